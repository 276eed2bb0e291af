"""Chains from their declarations: what a composition says, and that its tensors and functions are those it names."""

import pytest
import torch
from torch.nn import functional as F

import ops
from bench.cells import Cell, default_shapes, make_cells, make_problem
from bench.chains import CHAINS, FAMILY, NAMED, Chain, Part
from bench.compositions import bare_product, by_ops, by_pytorch, draw_tensors, jumps, num_groups
from bench.sizes import sizes_of

CPU = torch.device("cpu")
#: Chains as one writes them by hand, with the tensors by name and the number of groups. Others are compared with
#: PyTorch's form of their composition.
BY_HAND = {
    "l94": lambda t, groups: F.group_norm(
        F.mish(F.hardtanh(F.linear(t["input"], t["weight"], t["linear_bias"]) + t["bias"], -1.0, 1.0)),
        groups,
        t["norm_weight"],
        t["norm_bias"],
    ),
    "l75": lambda t, groups: (
        F.group_norm(
            F.linear(t["input"], t["weight"], t["linear_bias"]), groups, t["norm_weight"], t["norm_bias"]
        ).amin(dim=1, keepdim=True)
        + t["bias"]
    ),
    "l30": lambda t, groups: F.hardtanh(
        F.group_norm(F.linear(t["input"], t["weight"], t["linear_bias"]), groups, t["norm_weight"], t["norm_bias"]),
        -2.0,
        2.0,
    ),
    "l19": lambda t, groups: F.group_norm(
        F.gelu(F.conv_transpose2d(t["input"], t["weight"], t["conv_bias"])), groups, t["norm_weight"], t["norm_bias"]
    ),
    "linear_group_norm_silu": lambda t, groups: F.silu(
        F.group_norm(F.linear(t["input"], t["weight"], t["linear_bias"]), groups, t["norm_weight"], t["norm_bias"])
    ),
    "linear_layer_norm_gelu": lambda t, groups: F.gelu(
        F.layer_norm(F.linear(t["input"], t["weight"], t["linear_bias"]), (64,), t["norm_weight"], t["norm_bias"])
    ),
    "group_norm_silu": lambda t, groups: F.silu(F.group_norm(t["input"], groups, t["norm_weight"], t["norm_bias"])),
    "conv2d_group_norm_silu": lambda t, groups: F.silu(
        F.group_norm(
            F.conv2d(t["input"], t["weight"], t["conv_bias"], padding=1), groups, t["norm_weight"], t["norm_bias"]
        )
    ),
    "conv2d_add_mul_sigmoid_group_norm": lambda t, groups: F.group_norm(
        torch.sigmoid(
            (F.conv2d(t["input"], t["weight"], t["conv_bias"]) + t["bias"].view(-1, 1, 1)) * t["scale"].view(-1, 1, 1)
        ),
        groups,
        t["norm_weight"],
        t["norm_bias"],
    ),
    "linear_relu_mul_add": lambda t, groups: (
        F.relu(F.linear(t["input"], t["weight"], t["linear_bias"])) * 2 + t["residual"]
    ),
    "linear_silu_mul_add": lambda t, groups: (
        F.silu(F.linear(t["input"], t["weight"], t["linear_bias"])) * t["scale"] + t["bias"]
    ),
}


def test_parts():
    chain = Chain("any", "linear -> add(bias) -> hardtanh(-1, 0.5) -> group_norm -> mul(2) -> silu", ("8x64x64",))
    assert chain.contraction == "linear" and chain.norm == Part("group_norm") and chain.product == "GEMM"
    before, after = chain.steps
    assert before == (Part("add", ("bias",)), Part("hardtanh", (-1.0, 0.5))) and after == (
        Part("mul", (2.0,)),
        Part("silu"),
    )
    alone = Chain("any", "silu -> layer_norm", ("8x64",))
    assert (alone.contraction, alone.product, alone.steps) == ("", "norm", ((Part("silu"),), ()))
    assert Chain("any", "linear -> relu -> tanh", ()).steps == ((), (Part("relu"), Part("tanh")))


def test_every_chain_is_named_or_of_the_family():
    assert [*NAMED, *FAMILY] == list(CHAINS) and set(CHAINS) >= set(BY_HAND)


@pytest.mark.parametrize("name", CHAINS)
def test_functions(name):
    """By ``ops`` and by PyTorch, the chain is what its name says. Every tensor that is drawn counts."""
    (cell,) = make_cells([name], ["float32"], ["training"], default_shapes(on_gpu=False))
    tensors = {key: each.double().requires_grad_() for key, each in make_problem(cell, CPU).tensors.items()}
    by_hand = BY_HAND.get(name, lambda tensors, groups: cell.by_pytorch()(tensors))
    expected = by_hand(tensors, cell.num_groups)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, list(tensors.values()), gradient)
    assert all(each.abs().sum() > 0 for each in gradients)
    for forward in (cell.by_ops(), cell.by_pytorch()):
        result = forward(tensors)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result, list(tensors.values()), gradient), gradients)


@pytest.mark.parametrize("name", FAMILY)
def test_ours_is_one_call(name, monkeypatch):
    """``ops`` gets all steps in one call of the function that its contraction and norm name."""
    chain = CHAINS[name]
    function = "_".join(filter(None, (chain.contraction, chain.norm.name)))
    calls = []
    monkeypatch.setattr(ops, function, lambda *arguments, **options: calls.append((arguments, options)))
    (cell,) = make_cells([name], ["float32"], ["forward"], default_shapes(on_gpu=False))
    tensors = make_problem(cell, CPU).tensors
    by_ops(chain, cell.num_groups)(tensors)
    ((arguments, options),) = calls
    given = [each for each in arguments if isinstance(each, torch.Tensor)]
    steps = [*options.get("before", ()), *options.get("after", ())]
    given += [step.operand for step in steps if isinstance(step.operand, torch.Tensor)]
    assert sorted(map(id, given)) == sorted(map(id, tensors.values()))
    for where, parts in zip(("before", "after"), chain.steps, strict=True):
        assert [step.pointwise.name for step in options.get(where, ())] == [part.name for part in parts]


def test_steps_before_a_norm():
    chain = Chain("any", "mul(scale) -> relu -> group_norm(4) -> add(residual)", ("2x8x3x5",))
    tensors = {name: each.double() for name, each in draw_tensors(chain, (2, 8, 3, 5)).items()}
    first = F.relu(tensors["input"] * tensors["scale"].view(-1, 1, 1))
    expected = F.group_norm(first, 4, tensors["norm_weight"], tensors["norm_bias"]) + tensors["residual"]
    for by in (by_ops, by_pytorch):
        torch.testing.assert_close(by(chain, 4)(tensors), expected)


def test_geometry():
    """The contraction's options are those of ``ops``, of PyTorch and of the bare convolution."""
    chain = Chain("any", "conv_transpose2d(padding=1) -> group_norm(2) -> silu", ("2x4x6x5x7x3",))
    tensors = {name: each.double() for name, each in draw_tensors(chain, (2, 4, 6, 5, 7, 3)).items()}
    assert chain.product == "convolution" and bare_product(chain)(tensors).shape == (2, 6, 5, 7)
    convolved = F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["conv_bias"], padding=1)
    expected = F.silu(F.group_norm(convolved, 2, tensors["norm_weight"], tensors["norm_bias"]))
    for by in (by_ops, by_pytorch):
        torch.testing.assert_close(by(chain, 2)(tensors), expected)


def test_number_of_groups():
    """Of the declared number or size where that divides, else of the nearest divisor."""
    by_number, by_size = CHAINS["group_norm_silu"], CHAINS["l30"]
    assert [num_groups(by_number, channels) for channels in (320, 64, 16, 48)] == [32, 32, 16, 24]
    assert [num_groups(by_size, channels) for channels in (8192, 512, 64, 3 * 512)] == [16, 1, 1, 3]
    assert num_groups(CHAINS["linear_layer_norm_gelu"], 64) == 1


def test_jumps():
    assert jumps(Part("hardtanh", (-1.0, 0.5))) == (-1.0, 0.5) and jumps(Part("relu")) == (0.0,)
    assert jumps(Part("mul", ("scale",))) == jumps(Part("silu")) == jumps(Part("add", (2.0,))) == ()


def test_data_of_equal_shapes():
    """Drawn once from a seed: the same values at any dtype, rounded."""
    chain = CHAINS["linear_silu_mul_add"]
    one, other = (
        make_problem(Cell(chain, dtype, None, "training", "5x16x24"), CPU) for dtype in ("float32", "bfloat16")
    )
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.bfloat16(), other.tensors[name])
    assert {name: tuple(tensor.shape) for name, tensor in one.tensors.items()} == {
        "input": (5, 16), "weight": (24, 16), "linear_bias": (24,), "scale": (24,), "bias": (24,)
    }  # fmt: skip


def test_sizes_have_the_form_of_their_product():
    for chain in CHAINS.values():
        tensors = {len(sizes_of(shape)) for shape in chain.sizes}
        assert tensors <= {"GEMM": {3}, "convolution": {6}, "norm": {4, 5}}[chain.product]
