"""Promise: under autocast the chains that multiply run, and return, its dtype, with gradients in the parameters' own.

Both ways are tested: the kernels and, with ``runs_kernels`` answering no, the reference.
"""

import math

import pytest
import torch

import ops
from bench.checking import ALLOWANCE
from ops import precision
from tests.accuracy import draw_grad_output, gradient_nearby, neighbour, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    doubled,
    make_arguments,
    tensors_of,
)

PROBLEM = Problem(rows=70, depth=72, groups=5, group_size=16)
SMALL = Problem(rows=5, depth=16, groups=4, group_size=8)
MULTIPLYING = (*LINEAR_CHAINS, LINEAR)

by_multiplying_chain = pytest.mark.parametrize("chain", MULTIPLYING, ids=chain_id)


@pytest.fixture(params=["kernels", "reference"])
def way(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(precision, "runs_kernels", lambda tensor: False)
    return request.param


def autocast(function, dtype=torch.bfloat16):
    """``function`` under autocast, its result in the dtype promised: PyTorch's own goes back to float32 on the way."""

    def under_autocast(**arguments):
        with torch.autocast("cpu", dtype):
            output = function(**arguments)
        return output if output.dtype == torch.float64 else output.to(dtype)

    return under_autocast


def errors_of(result, exact):
    return {name: (result[name].double() - exact[name]).norm() for name in exact}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
@by_multiplying_chain
def test_dtypes(chain, dtype, way):
    arguments = make_arguments(chain, SMALL, torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}
    with torch.autocast("cpu", dtype):
        output = chain.function(**arguments)
    assert output.dtype == dtype
    output.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32 and leaf.grad.shape == leaf.shape, name


@pytest.mark.parametrize("backward", ["outside", "inside"])
@by_multiplying_chain
def test_accuracy(chain, way, backward):
    """No further from float64 than plain PyTorch under autocast, wherever the backward pass is called.

    The arguments are such as bfloat16 holds exactly: their rounding, which both do alike, would hide the rest.
    """
    rounded = make_arguments(chain, PROBLEM, torch.bfloat16)
    grad_output = draw_grad_output(chain, rounded)
    arguments = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in rounded.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=backward == "inside"):
        ours = run(autocast(chain.function), arguments, grad_output)
        theirs = run(autocast(chain.plain), arguments, grad_output)
    exact = run(chain.plain, doubled(arguments), grad_output.double())
    our_errors, their_errors = errors_of(ours, exact), errors_of(theirs, exact)
    chances = []
    for seed in range(3):
        near = neighbour(rounded, seed)
        gradient = gradient_nearby(chain, near, grad_output)
        near = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in near.items()}
        near_exact = run(chain.plain, doubled(near), gradient.double())
        chances.append(errors_of(run(autocast(chain.plain), near, gradient), near_exact))
    failures = []
    for name in exact:
        assert ours[name].dtype == theirs[name].dtype, name
        chance = 2 * max(errors[name] for errors in chances) / math.sqrt(PROBLEM.rows)
        allowed = ALLOWANCE * their_errors[name] + torch.finfo(torch.float32).eps / 4 * exact[name].norm() + chance
        if not our_errors[name] <= allowed:
            failures.append(
                f"{name}: {our_errors[name]:.3e}, PyTorch's {their_errors[name]:.3e}, allowed {allowed:.3e}"
            )
    assert not failures, "\n".join(failures)


@by_multiplying_chain
def test_same_as_without_on_rounded_arguments(chain):
    """Autocast is a cast of the matrices and nothing else. (A second vector that is added to the product is not rounded
    with it, where it is in float32: of zeros both are the same.)"""
    rounded = make_arguments(chain, SMALL, torch.bfloat16)
    if chain is L94:
        rounded["bias"].detach().zero_()
    arguments = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in rounded.items()}
    grad_output = draw_grad_output(chain, rounded)
    expected = run(chain.function, rounded, grad_output)
    results = run(autocast(chain.function), arguments, grad_output)
    for name, value in expected.items():
        assert torch.equal(results[name].bfloat16(), value), name


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_float64_stays(chain, way):
    arguments = make_arguments(chain, SMALL, torch.float64)
    grad_output = draw_grad_output(chain, arguments)
    results = run(autocast(chain.function), arguments, grad_output)
    expected = run(chain.function, arguments, grad_output)
    for name, value in expected.items():
        assert results[name].dtype == torch.float64 and torch.equal(results[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=chain_id)
@pytest.mark.parametrize("chain", [BIAS_HARDTANH_MISH, *NORMS], ids=chain_id)
def test_blocks_without_a_product_keep_their_dtype(chain, dtype, way):
    """As PyTorch's autocast does on the CPU: hardtanh, mish and group norm run in the dtype that comes."""
    arguments = make_arguments(chain, SMALL, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        output = chain.function(**arguments)
    assert output.dtype == dtype
    assert torch.equal(output, chain.function(**arguments))


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_mixed_dtypes(chain, way):
    """A half-precision activation meets float32 parameters: only there, under autocast, dtypes may differ."""
    arguments = make_arguments(chain, SMALL, torch.float32)
    arguments["input"] = arguments["input"].bfloat16()
    with pytest.raises(TypeError, match="must have input's dtype torch.bfloat16, got torch.float32"):
        chain.function(**arguments)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}
    with torch.autocast("cpu", torch.bfloat16):
        output = chain.function(**arguments)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all(), name


@by_multiplying_chain
def test_backward_within_the_region(chain):
    """The kernels' gradients do not depend on whether the backward pass is called inside or outside."""
    arguments = make_arguments(chain, SMALL, torch.float32)
    grad_output = draw_grad_output(chain, arguments).bfloat16()
    outside = run(autocast(chain.function), arguments, grad_output)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(chain.function, arguments, grad_output)
    for name in outside:
        assert inside[name].dtype == outside[name].dtype and torch.equal(inside[name], outside[name]), name


@by_multiplying_chain
def test_disabled_region(chain):
    arguments = make_arguments(chain, SMALL, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        output = chain.function(**arguments)
    assert output.dtype == torch.float32 and torch.equal(output, chain.function(**arguments))


@pytest.mark.parametrize(
    "module, arguments",
    [
        (ops.LinearHardtanhMishGroupNorm, (16, 32, (32,), 4)),
        (ops.LinearGroupNormMin, (16, 32, 4, (1, 32, 1, 1))),
        (ops.LinearGroupNormHardtanh, (16, 32, 4, -2.0, 2.0)),
    ],
)
def test_modules(module, arguments, way):
    """Parameters stay float32 and so do their gradients, for a float32 and for a bfloat16 input."""
    model = module(*arguments)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.randn(5, 16, dtype=dtype))
        assert output.dtype == torch.bfloat16
        model.zero_grad(set_to_none=True)
        output.float().square().sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_float32_bias_is_added_before_rounding():
    """L75's sum of minimum and bias is rounded once; a bias rounded before would move it."""
    arguments = make_arguments(L75, SMALL, torch.float32)
    arguments["norm_weight"] = torch.zeros(32)
    arguments["norm_bias"] = torch.full((32,), 1.0)
    arguments["bias"] = torch.full((1, 32, 1, 1), 2.0**-8 + 2.0**-10)
    with torch.autocast("cpu", torch.bfloat16):
        output = ops.linear_group_norm_min(**arguments)
    exact = torch.full_like(output, 1.0 + 2.0**-8 + 2.0**-10, dtype=torch.float32).bfloat16()
    assert torch.equal(output, exact)
