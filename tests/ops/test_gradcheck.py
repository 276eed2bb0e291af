"""Promise: in float64 every function's gradients are the derivatives of its result, with or without each vector."""

import math

import pytest
import torch

import ops
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L30,
    L94,
    LINEAR,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

PROBLEM = Problem(rows=4, depth=5, groups=2, group_size=3)
#: Each vector absent in turn, all of them, and none.
CASES = [
    pytest.param(chain, absent, id=f"{chain.name}-without_{'_and_'.join(absent) or 'none'}")
    for chain in CHAINS
    for absent in dict.fromkeys([(), *((name,) for name in chain.vectors), chain.vectors])
]


def gradcheck(chain, arguments):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}

    def function(*tensors):
        return chain.function(**{**arguments, **dict(zip(leaves, tensors, strict=True))})

    assert function(*leaves.values()).dtype == torch.float64
    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("chain, absent", CASES)
def test_gradients(chain, absent):
    arguments = make_arguments(chain, PROBLEM, torch.float64, absent=absent)
    assert all(arguments[name] is None for name in absent)
    gradcheck(chain, arguments)


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_second_derivatives(chain):
    """Of plain PyTorch's path; the kernels refuse."""
    arguments = make_arguments(chain, Problem(rows=2, depth=3, groups=2, group_size=2), torch.float64)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}

    def function(*tensors):
        return chain.function(**{**arguments, **dict(zip(leaves, tensors, strict=True))})

    assert torch.autograd.gradgradcheck(function, tuple(leaves.values()))


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_functional_transforms(chain):
    """``torch.func`` too works on plain PyTorch's path."""
    arguments = make_arguments(chain, PROBLEM, torch.float64)

    def function(input):
        return chain.function(**{**arguments, "input": input})

    input = arguments["input"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(input).sum(), input)
    torch.testing.assert_close(torch.func.grad(lambda input: function(input).sum())(arguments["input"]), expected)
    _, change = torch.func.jvp(function, (arguments["input"],), (torch.ones_like(input),))
    torch.testing.assert_close(change.sum(), expected.sum())


@pytest.mark.parametrize("chain", [L94, L30, BIAS_HARDTANH_MISH, GROUP_NORM_HARDTANH], ids=chain_id)
@pytest.mark.parametrize("bounds", [(-0.5, 0.25), (-math.inf, math.inf), (0.125, 0.125)], ids=str)
def test_bounds(chain, bounds):
    arguments = make_arguments(chain, PROBLEM, torch.float64)
    arguments["min_val"], arguments["max_val"] = bounds
    gradcheck(chain, arguments)


@pytest.mark.parametrize("pixels", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("absent", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_pixels(chain, absent, pixels):
    problem = Problem(rows=2, depth=1, groups=2, group_size=2, pixels=pixels)
    gradcheck(chain, make_arguments(chain, problem, torch.float64, absent=absent))


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("chain", [L94, L30, LINEAR, BIAS_HARDTANH_MISH], ids=chain_id)
def test_leading_dimensions(chain, shape):
    arguments = make_arguments(chain, Problem(math.prod(shape), 4, 2, 3), torch.float64)
    arguments["input"] = arguments["input"].reshape(*shape, -1)
    gradcheck(chain, arguments)


@pytest.mark.parametrize("eps", [0, 1e-2, 1.0])
def test_eps(eps):
    input = make_arguments(GROUP_NORM, PROBLEM, torch.float64)["input"].requires_grad_()
    assert torch.autograd.gradcheck(lambda values: ops.group_norm(values, 2, eps=eps), (input,))
