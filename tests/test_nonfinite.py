"""Promise: NaN and infinities go where PyTorch puts them, in results and in every gradient.

In results NaN and each infinity are told apart. In gradients only finite and not finite are: whether inf - inf or
0 * inf comes up on the way to a group's gradients depends on how sums are arranged, in PyTorch's own kernels too.
"""

import math

import pytest
import torch

import ops
from tests.accuracy import run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    DTYPES,
    L30,
    L75,
    L94,
    LINEAR,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
PROBLEM = Problem(rows=7, depth=24, groups=5, group_size=8)
VALUES = (math.nan, math.inf, -math.inf)


def kinds(tensor: torch.Tensor) -> torch.Tensor:
    """0 for a finite number, 1 for infinity, -1 for minus infinity, 2 for NaN."""
    return torch.isposinf(tensor).int() - torch.isneginf(tensor).int() + 2 * torch.isnan(tensor).int()


def assert_same_places(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    different = kinds(ours) != kinds(theirs)
    if name != "output":
        different = torch.isfinite(ours) != torch.isfinite(theirs)
    count = int(different.sum())
    assert count == 0, (
        f"{name}: {count} of {different.numel()} differ, first at {different.nonzero()[0].tolist()}: "
        f"{ours[different][0].item()}, PyTorch's {theirs[different][0].item()}"
    )


def check_places(chain, arguments, *, gradients=True):
    output = chain.plain(**arguments)
    assert_same_places(chain.function(**arguments), output, "output")
    if gradients:
        grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
        ours, theirs = run(chain.function, arguments, grad_output), run(chain.plain, arguments, grad_output)
        for name in ours:
            assert_same_places(ours[name], theirs[name], name)


@by_dtype
@pytest.mark.parametrize("value", VALUES)
@by_chain
def test_one_element_of_input(chain, value, dtype):
    arguments = make_arguments(chain, PROBLEM, dtype)
    arguments["input"][3, 11] = value
    check_places(chain, arguments, gradients=chain is not L75)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("chain", [L94, L75, L30, LINEAR], ids=chain_id)
def test_one_element_of_weight(chain, value):
    """One column of the product: one group of each sample."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    arguments["weight"][19, 5] = value
    check_places(chain, arguments, gradients=chain is not L75)


@pytest.mark.parametrize("value", VALUES)
@by_chain
def test_one_element_of_each_vector(chain, value):
    for name in chain.vectors:
        if math.isinf(value) and name == ("norm_weight" if chain.is_linear else "weight"):
            continue  # PyTorch's CPU kernel and CUDA kernel disagree on it: the one adds inf * mean, the other does not
        arguments = make_arguments(chain, PROBLEM, torch.float32)
        arguments[name].view(-1)[19] = value
        check_places(chain, arguments, gradients=chain is not L75)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("groups", [5, 20])
def test_gradients_of_the_minimum(groups, value):
    """L75's gradients of parameters may be computed in the winning groups alone, and a NaN then stays in its group.

    PyTorch's dense backward multiplies the others' zeros by NaN as well. The gradient at the input is NaN in both.
    """
    arguments = make_arguments(L75, Problem(rows=7, depth=24, groups=groups, group_size=8), torch.float32)
    arguments["input"][3, 11] = value
    output = L75.plain(**arguments)
    grad_output = torch.ones_like(output)
    ours, theirs = run(ops.linear_group_norm_min, arguments, grad_output), run(L75.plain, arguments, grad_output)
    for name in ("output", "input", "bias"):
        assert_same_places(ours[name], theirs[name], name)
    # The whole row is NaN, and its first element is the minimum: of the first group, and the norm's weight's first.
    for name, won in (("weight", 8), ("linear_bias", 8), ("norm_weight", 1)):
        assert_same_places(ours[name][:won], theirs[name][:won], name)
        assert torch.isfinite(ours[name][torch.isfinite(theirs[name])]).all(), name


@by_dtype
@pytest.mark.parametrize("value", VALUES)
@by_chain
def test_one_element_of_grad_output(chain, value, dtype):
    arguments = make_arguments(chain, PROBLEM, dtype)
    grad_output = torch.randn(chain.plain(**arguments).shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    grad_output.view(-1)[17] = value
    ours, theirs = run(chain.function, arguments, grad_output), run(chain.plain, arguments, grad_output)
    names = ("input", "norm_bias", "bias") if chain is L75 else ours
    for name in names:
        assert_same_places(ours[name], theirs[name], name)


@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
@pytest.mark.parametrize("value", VALUES)
def test_pixels(chain, value):
    problem = Problem(rows=3, depth=1, groups=2, group_size=4, pixels=(5, 6))
    arguments = make_arguments(chain, problem, torch.float32)
    arguments["input"][1, 2, 3, 4] = value
    check_places(chain, arguments)


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-1.0, math.inf), (-math.inf, 1.0), (-1e15, 1e15)])
@pytest.mark.parametrize("chain, largest", [(L94, 1e15), (BIAS_HARDTANH_MISH, 3e38)], ids=["L94", "block"])
def test_infinite_and_huge_bounds(chain, largest, bounds):
    """mish and its gradient overflow nowhere; only -inf itself gives NaN, in PyTorch as here. (L94 squares them.)"""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    arguments["min_val"], arguments["max_val"] = bounds
    places = arguments["bias"].view(-1)
    places[:6] = torch.tensor([100.0, -100.0, 1e15, -1e15, largest, -largest])
    check_places(chain, arguments)
    places[:2] = torch.tensor([math.inf, -math.inf])
    check_places(chain, arguments)


@pytest.mark.parametrize("chain", [L94, L30, L75], ids=chain_id)
def test_padding_is_never_read(chain):
    """NaN beside the operands, where a tile reaches over their edges, must not be multiplied into the result."""
    arguments = make_arguments(chain, Problem(rows=9, depth=20, groups=3, group_size=10), torch.float32)
    expected = chain.function(**arguments)
    for name in ("input", "weight"):
        matrix = arguments[name]
        wide = matrix.new_full((matrix.shape[0] + 64, matrix.shape[1] + 64), math.nan)
        wide[: matrix.shape[0], : matrix.shape[1]] = matrix
        arguments[name] = wide[: matrix.shape[0], : matrix.shape[1]]
    assert torch.isfinite(chain.function(**arguments)).all()
    torch.testing.assert_close(chain.function(**arguments), expected)
