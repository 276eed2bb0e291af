"""Pointwise functions and gradients against PyTorch's, one number at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from triton_kernels.pointwise import (
    BFLOAT16_GELU,
    FLOAT16_GELU,
    GELU,
    GELU_TANH,
    HARDTANH,
    HARDTANH_MISH,
    IDENTITY,
    Pointwise,
)

FUNCTIONS = {
    "identity": (IDENTITY, lambda z, low, high: z.clone()),
    "hardtanh": (HARDTANH, F.hardtanh),
    "hardtanh_mish": (HARDTANH_MISH, lambda z, low, high: F.mish(F.hardtanh(z, low, high))),
    "gelu": (GELU, lambda z, low, high: F.gelu(z)),
    # PyTorch's gradient of it overflows to NaN from about 1e19; in float64 it does not.
    "gelu_tanh": (GELU_TANH, lambda z, low, high: F.gelu(z.double(), approximate="tanh").to(z.dtype)),
}
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 88.8, -88.8, -104.0, 20.0, 44.5]


@triton.jit
def _value_kernel(value, output, size, low, high, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    tl.store(output + places, FUNCTION(tl.load(value + places, mask=inside, other=0.0), low, high), mask=inside)


@triton.jit
def _gradient_kernel(gradient, value, output, size, low, high, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    incoming = tl.load(gradient + places, mask=inside, other=0.0)
    values = tl.load(value + places, mask=inside, other=0.0)
    tl.store(output + places, GRADIENT(incoming, values, low, high), mask=inside)


def ours(pointwise: Pointwise, value, gradient, low, high):
    """The function of ``value``, and its gradient for ``gradient``."""
    result, result_gradient = torch.empty_like(value), torch.empty_like(value)
    grid = (triton.cdiv(value.numel(), 4096),)
    _value_kernel[grid](value, result, value.numel(), low, high, FUNCTION=pointwise.function, BLOCK=4096)
    _gradient_kernel[grid](
        gradient, value, result_gradient, value.numel(), low, high, GRADIENT=pointwise.gradient, BLOCK=4096
    )
    return result, result_gradient


def theirs(function, value, gradient, low, high):
    value = value.detach().requires_grad_()
    result = function(value, low, high)
    return result.detach(), torch.autograd.grad(result, value, gradient)[0]


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 0.25), (0.5, 0.5), (-math.inf, math.inf), (-1e30, 1e30)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name, bounds):
    pointwise, function = FUNCTIONS[name]
    finite_bounds = [bound for bound in bounds if math.isfinite(bound)]
    value = torch.tensor(SPECIAL + finite_bounds)
    gradient = torch.full_like(value, 3.0)
    result, result_gradient = ours(pointwise, value, gradient, *bounds)
    # One by one: PyTorch's vectorised hardtanh_backward on the CPU gives 0 for a NaN, its scalar one passes it on.
    for place in range(value.numel()):
        one = slice(place, place + 1)
        expected, expected_gradient = theirs(function, value[one], gradient[one], *bounds)
        message = f"{name} of {value[place]}"
        torch.testing.assert_close(result[one], expected, equal_nan=True, msg=message)
        torch.testing.assert_close(result_gradient[one], expected_gradient, equal_nan=True, msg=message)


@pytest.mark.parametrize("name", ["hardtanh", "hardtanh_mish"])
def test_gradient_is_selected_not_multiplied(name):
    """Outside the bounds it is 0, though the incoming one be infinite or NaN."""
    value = torch.tensor([-1.0, 1.0, -5.0, 5.0])
    for special in (math.inf, -math.inf, math.nan):
        _, gradient = ours(FUNCTIONS[name][0], value, torch.full_like(value, special), -1.0, 1.0)
        assert gradient.tolist() == [0.0] * 4


@pytest.mark.parametrize("low, high", [(-1, 1), (-4, 4), (-30, 30)])
@pytest.mark.parametrize(
    "pointwise, function",
    [FUNCTIONS["hardtanh_mish"], FUNCTIONS["gelu"], (GELU_TANH, lambda z, low, high: F.gelu(z, approximate="tanh"))],
    ids=["mish", "gelu", "gelu_tanh"],
)
def test_as_accurate_as_pytorch(pointwise, function, low, high):
    """The rule of ``tests.accuracy`` over 40000 numbers with a quarter of its floor: no sum hides an error here."""
    value = torch.linspace(low, high, 40001)
    gradient = torch.ones_like(value)
    wide = (-math.inf, math.inf)
    results, expected = ours(pointwise, value, gradient, *wide), theirs(function, value, gradient, *wide)
    exact = theirs(function, value.double(), gradient.double(), *wide)
    for our_result, their_result, truth in zip(results, expected, exact, strict=True):
        floor = torch.finfo(torch.float32).eps / 4 * truth.norm()
        assert (our_result - truth).norm() <= 1.1 * (their_result - truth).norm() + floor


def test_mish_far_below_zero_keeps_its_digits():
    """There mish is z * exp(z): as many digits of it as PyTorch's, down to the smallest numbers."""
    value = torch.linspace(-85.0, -5.0, 999)
    result, _ = ours(HARDTANH_MISH, value, torch.ones_like(value), -math.inf, math.inf)
    exact = F.mish(value.double())
    assert ((result - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_where_it_is_the_identity_or_zero(name):
    """Far from zero nothing overflows, neither in the value nor in the gradient."""
    value = torch.tensor([1.0, -1.0]) * torch.logspace(1.2, 38.5, 500, base=10.0)[:, None]
    result, gradient = ours(FUNCTIONS[name][0], value, torch.full_like(value, 3.0), 0.0, 0.0)
    assert torch.equal(result[:, 0], value[:, 0]) and not result[:, 1].any()
    assert torch.equal(gradient, torch.tensor([3.0, 0.0]).expand_as(value))


def test_gelu_tanh_far_below_zero_keeps_its_digits():
    value = torch.linspace(-6.0, -2.0, 999)
    result, _ = ours(GELU_TANH, value, torch.ones_like(value), 0.0, 0.0)
    u = math.sqrt(2 / math.pi) * (value.double() + 0.044715 * value.double() ** 3)
    exact = value / (1 + torch.exp(-2 * u))
    assert ((result - exact) / exact).abs().max() < 1e-5


#: What each says of its error: of the value, of the gradient, and of the value relative to itself between -4 and 0.
APPROXIMATIONS = {
    "float16": (FLOAT16_GELU, 2.2e-6, 5e-6, 2e-4),
    "bfloat16": (BFLOAT16_GELU, 7e-5, 5e-6, 6e-3),
}
by_approximation = pytest.mark.parametrize("name", APPROXIMATIONS)


@by_approximation
def test_approximate_gelu(name):
    """As near to float64 as it says, from where GELU is 0 to where it is the identity, and 0 at 0."""
    function, *allowed, relative = APPROXIMATIONS[name]
    value = torch.cat([torch.linspace(-30.0, 30.0, 120001), torch.linspace(-1e-3, 1e-3, 2001)])
    results = ours(function, value, torch.ones_like(value), 0.0, 0.0)
    exact = theirs(lambda z, low, high: F.gelu(z), value.double(), torch.ones_like(value).double(), 0.0, 0.0)
    for result, truth, most in zip(results, exact, allowed, strict=True):
        assert (result - truth).abs().max() <= most
    tail = (value > -4.0) & (value < -1e-6)
    assert ((results[0] - exact[0]) / exact[0])[tail].abs().max() <= relative
    zero, gradient = ours(function, torch.zeros(1), torch.full((1,), 3.0), 0.0, 0.0)
    assert zero.item() == 0.0 and abs(gradient.item() - 1.5) <= 3 * 5e-6


@by_approximation
def test_approximate_gelu_far_from_zero(name):
    """There it is 0 or the identity, and nothing overflows; NaN stays NaN."""
    value = torch.tensor([1.0, -1.0]) * torch.logspace(1.2, 38.5, 500, base=10.0)[:, None]
    result, gradient = ours(APPROXIMATIONS[name][0], value, torch.full_like(value, 3.0), 0.0, 0.0)
    assert torch.equal(result[:, 0], value[:, 0]) and not result[:, 1].any()
    assert torch.equal(gradient, torch.tensor([3.0, 0.0]).expand_as(value))
    result, gradient = ours(APPROXIMATIONS[name][0], torch.full((1,), math.nan), torch.ones(1), 0.0, 0.0)
    assert result.isnan() and gradient.isnan()
