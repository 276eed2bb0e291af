"""The bench's check: which results it calls red, and that the parts which float64 takes add up to the whole."""

import pytest
import torch
from torch.nn import functional as F

from bench import checking
from bench.cells import Cell, make_problem
from bench.chains import CHAINS, NAMED, Chain
from bench.checking import Comparison, check, worst_of

CPU = torch.device("cpu")
L94, L75, L30, L19 = map(CHAINS.get, NAMED)
L19_CELL = Cell(L19, "bfloat16", None, "training", "5x8x16x4x5x3", "channels_last")
LINEAR_CELLS = [Cell(chain, "float32", "highest", "training", "5x16x64") for chain in (L94, L75, L30)]
RELU_CELL = Cell(CHAINS["linear_relu_mul_add"], "bfloat16", None, "training", "5x16x64")
FAMILY_CELLS = [
    Cell(CHAINS["group_norm_silu"], "bfloat16", None, "training", "5x16x4x5", "channels_last"),
    RELU_CELL,
]
L19_TENSORS = ("input", "weight", "conv_bias", "norm_weight", "norm_bias")


def l19(tensors):
    activated = F.gelu(F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["conv_bias"]))
    return F.group_norm(activated, 2, tensors["norm_weight"], tensors["norm_bias"])


def plain(cell):
    return l19 if cell.chain is L19 else cell.by_pytorch()


def check_l19(ours, cell=L19_CELL):
    return check(cell, make_problem(cell, CPU), ours, l19)


def red_tensors(result):
    return [name for name, errors in result.errors.items() if Comparison(name, *errors).is_red]


def test_equal_results_are_green():
    """Every tensor is compared, at errors of bfloat16's size."""
    result = check_l19(l19)
    assert list(result.errors) == ["output", *(f"d_{name}" for name in L19_TENSORS)]
    assert not result.red and result.away_from_jumps == 1.0
    for ours, torch_error in result.errors.values():
        assert ours == torch_error and 1e-4 < ours < 1e-1


@pytest.mark.parametrize("cell", [L19_CELL, *LINEAR_CELLS, *FAMILY_CELLS], ids=str)
def test_float64_in_parts(cell, monkeypatch):
    """Parts of two samples, the last of one, lead to the errors of the whole batch.

    Ours runs in float64 here, so that its errors are not those of PyTorch.
    """
    problem = make_problem(cell, CPU)
    at_once = []

    def ours(tensors):
        return plain(cell)({name: tensor.double() for name, tensor in tensors.items()}).to(getattr(torch, cell.dtype))

    def reference(tensors):
        if tensors["input"].dtype == torch.float64:
            at_once.append(len(tensors["input"]))
        return plain(cell)(tensors)

    whole = check(cell, problem, ours, reference)
    monkeypatch.setattr(checking, "_ELEMENTS_AT_ONCE", 2 * problem.output_gradient.numel() // cell.sizes[0])
    parts = check(cell, problem, ours, reference)
    assert at_once == [5, 2, 2, 1]
    assert list(parts.errors) == list(whole.errors)
    for name, errors in parts.errors.items():
        assert errors == pytest.approx(whole.errors[name], rel=1e-6)
    assert parts.errors["output"][0] != parts.errors["output"][1]


@pytest.mark.parametrize("sample", [0, 2, -1])
@pytest.mark.parametrize("wrong", [2.0, torch.nan])
def test_one_wrong_element_of_the_output(sample, wrong, monkeypatch):
    """A wrong sample is seen in every part."""

    def ours(tensors):
        output = l19(tensors)
        mask = torch.zeros_like(output)
        mask[sample, -1, -1, -1] = wrong
        return output + mask

    monkeypatch.setattr(checking, "_ELEMENTS_AT_ONCE", 1)
    result = check_l19(ours)
    assert result.red and worst_of(result.errors).tensor == "output"
    assert red_tensors(result) == ["output"]


@pytest.mark.parametrize("name", L19_TENSORS)
def test_wrong_gradient(name):
    """A tenth too large, of one tensor alone."""

    def ours(tensors):
        tensor = tensors[name]
        grown = tensor + (0.1 * (tensor - tensor.detach()))  # the same value
        return l19({**tensors, name: grown})

    result = check_l19(ours)
    assert red_tensors(result) == [f"d_{name}"]


def test_wrong_shape():
    with pytest.raises(ValueError, match=r"output has shape \(5, 16, 42\) where \(5, 16, 6, 7\) is right"):
        check_l19(lambda tensors: l19(tensors).flatten(2), Cell(L19, "float32", "highest", "forward", L19_CELL.shape))


def test_float64_goes_without_cudnn():
    """The float64 convolution does not use cuDNN. The setting is restored."""
    seen = set()

    def watched(tensors):
        seen.add((tensors["input"].dtype, torch.backends.cudnn.enabled))
        return l19(tensors)

    check(L19_CELL, make_problem(L19_CELL, CPU), l19, watched)
    assert seen == {(torch.bfloat16, True), (torch.float64, False)}
    assert torch.backends.cudnn.enabled


def test_elements_near_a_jump_are_not_compared():
    """The gradient is 0 near ReLU's jump, and only there: which side is taken there changes nothing."""
    problem = make_problem(RELU_CELL, CPU)
    value = F.linear(*(problem.tensors[name].double() for name in ("input", "weight", "linear_bias")))
    near = value.abs() <= 2 * torch.finfo(torch.bfloat16).eps * value.square().mean().sqrt()
    assert 0 < near.sum() < 20
    stopped, share = checking._stop_at_jumps(RELU_CELL, problem)
    assert torch.equal(stopped != 0, (problem.output_gradient != 0) & ~near)
    assert share == pytest.approx(1 - near.double().mean().item())

    def turned(where):
        def forward(tensors):
            value = F.linear(tensors["input"], tensors["weight"], tensors["linear_bias"])
            passed = (value > 0) ^ where
            return value * passed * 2 + tensors["residual"]

        return check(RELU_CELL, problem, forward, RELU_CELL.by_pytorch())

    small = [name for name in red_tensors(turned(near)) if name != "output"]
    assert not small
    assert "d_weight" in red_tensors(turned(value.abs() > 0.5))


def test_a_norm_spreads_a_jump_over_its_group():
    chain = Chain("any", "linear -> relu -> group_norm(4) -> silu", ("5x16x64",))
    cell = Cell(chain, "float32", "highest", "training", "5x16x64")
    problem = make_problem(cell, CPU)
    tensors = {name: tensor.double() for name, tensor in problem.tensors.items()}
    tensors["weight"][3], tensors["linear_bias"][3] = 0.0, 0.0  # channel 3 is 0 in every sample
    mask = checking._away_from_jumps(cell, tensors)
    assert not mask[:, :16].any() and mask[:, 16:].double().mean() > 0.9


@pytest.mark.parametrize("sample", [0, -1])
def test_wrong_gradient_of_a_residual(sample, monkeypatch):
    """It has a part of its own in every sample."""
    problem = make_problem(RELU_CELL, CPU)
    scale = torch.ones(5, 1)
    scale[sample] = 1.1
    monkeypatch.setattr(checking, "_ELEMENTS_AT_ONCE", 1)

    def ours(tensors):
        residual = tensors["residual"]
        grown = residual + (scale - 1) * (residual - residual.detach())
        return RELU_CELL.by_pytorch()({**tensors, "residual": grown.to(residual.dtype)})

    assert red_tensors(check(RELU_CELL, problem, ours, RELU_CELL.by_pytorch())) == ["d_residual"]
