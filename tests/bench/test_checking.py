"""The bench's check: which results it calls red, and that the parts which float64 takes add up to the whole."""

import pytest
import torch
from torch.nn import functional as F

from bench import checking
from bench.cells import Cell, make_problem
from bench.checking import check
from bench.convolution_chains import L19, ConvolutionShape
from bench.linear_chains import L30, L75, L94, LinearShape
from ops import reference

CPU = torch.device("cpu")
L19_CELL = Cell(L19, "bfloat16", None, "training", ConvolutionShape(5, 8, 16, 4, 5, 3), "channels_last")
LINEAR_CELLS = [Cell(chain, "float32", "highest", "training", LinearShape(5, 16, 64)) for chain in (L94, L75, L30)]
L19_TENSORS = ("input", "weight", "conv_bias", "norm_weight", "norm_bias")


def l19(tensors):
    activated = F.gelu(F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["conv_bias"]))
    return F.group_norm(activated, 2, tensors["norm_weight"], tensors["norm_bias"])


def plain(cell):
    return l19 if cell.chain is L19 else cell.chain.bind(reference, cell.shape.channels)


def check_l19(ours, cell=L19_CELL):
    return check(cell, make_problem(cell, CPU), ours, l19)


def test_equal_results_are_green():
    """Every tensor is compared, at errors of bfloat16's size."""
    result = check_l19(l19)
    assert [entry.tensor for entry in result.comparisons] == ["output", *(f"d_{name}" for name in L19_TENSORS)]
    assert not result.is_red and result.away_from_jumps == 1.0
    for entry in result.comparisons:
        assert entry.ours == entry.torch and 1e-4 < entry.ours < 1e-1


@pytest.mark.parametrize("cell", [L19_CELL, *LINEAR_CELLS], ids=str)
def test_float64_in_parts(cell, monkeypatch):
    """Parts of two samples, the last of one, lead to the errors of the whole batch.

    Ours runs in float64 here, so that its errors are not those of PyTorch.
    """
    problem = make_problem(cell, CPU)

    def ours(tensors):
        return plain(cell)({name: tensor.double() for name, tensor in tensors.items()}).to(cell.torch_dtype)

    whole = check(cell, problem, ours, plain(cell))
    monkeypatch.setattr(checking, "_ELEMENTS_AT_ONCE", 2 * problem.output_gradient.numel() // cell.shape.batch)
    parts = check(cell, problem, ours, plain(cell))
    assert (whole.samples, whole.samples_at_once) == (5, 5)
    assert (parts.samples, parts.samples_at_once) == (5, 2)
    for entry, expected in zip(parts.comparisons, whole.comparisons, strict=True):
        assert entry.tensor == expected.tensor
        assert entry.ours == pytest.approx(expected.ours, rel=1e-6)
        assert entry.torch == pytest.approx(expected.torch, rel=1e-6)
    assert parts.comparisons[0].ours != parts.comparisons[0].torch


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
    assert result.samples_at_once == 1
    assert result.is_red and result.worst.tensor == "output"
    assert [entry.tensor for entry in result.comparisons if entry.is_red] == ["output"]


@pytest.mark.parametrize("name", L19_TENSORS)
def test_wrong_gradient(name):
    """A tenth too large, of one tensor alone."""

    def ours(tensors):
        tensor = tensors[name]
        grown = tensor + (0.1 * (tensor - tensor.detach()))  # the same value
        return l19({**tensors, name: grown})

    result = check_l19(ours)
    assert [entry.tensor for entry in result.comparisons if entry.is_red] == [f"d_{name}"]


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
