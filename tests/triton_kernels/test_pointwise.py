"""Pointwise functions and gradients against PyTorch's, one number at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from triton_kernels.pointwise import ADD, GELU, GELU_TANH, HARDTANH, MISH, MUL, Pointwise

FUNCTIONS = {
    "hardtanh": (HARDTANH, lambda z, bounds: F.hardtanh(z, *bounds)),
    "mish": (MISH, lambda z, _: F.mish(z)),
    "gelu": (GELU, lambda z, _: F.gelu(z)),
    # PyTorch's gradient of it overflows to NaN from about 1e19; in float64 it does not.
    "gelu_tanh": (GELU_TANH, lambda z, _: F.gelu(z.double(), approximate="tanh").to(z.dtype)),
}
BOUNDS = [(-1.0, 1.0), (-2.0, 0.25), (0.5, 0.5), (-math.inf, math.inf), (-1e30, 1e30)]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 88.8, -88.8, -104.0, 20.0, 44.5]


@triton.jit
def _kernel(
    value, gradient, operand, output, value_gradient, operand_gradient, size, F: tl.constexpr, BLOCK: tl.constexpr
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(value + places, mask=inside, other=0.0)
    incoming = tl.load(gradient + places, mask=inside, other=0.0)
    if F.has_tensor:
        operand = tl.load(operand + places, mask=inside, other=0.0)
    tl.store(output + places, F.function(values, operand), mask=inside)
    of_value = F.gradient(incoming, values, operand)
    if F.has_tensor:
        of_value, of_operand = of_value
        tl.store(operand_gradient + places, of_operand, mask=inside)
    tl.store(value_gradient + places, of_value, mask=inside)


def ours(pointwise: Pointwise, value, gradient, operand=None):
    """The function of ``value``, its gradient for ``gradient``, and that of the operand where it is a tensor."""
    results = [torch.full_like(value, torch.nan) for _ in range(3)]
    grid = (triton.cdiv(value.numel(), 4096),)
    _kernel[grid](value, gradient, operand, *results, value.numel(), F=pointwise, BLOCK=4096)
    return results if pointwise.has_tensor else results[:2]


def theirs(function, value, gradient, operand=None):
    value = value.detach().requires_grad_()
    leaves = [value]
    if isinstance(operand, torch.Tensor):
        operand = operand.detach().requires_grad_()
        leaves.append(operand)
    result = function(value, operand)
    return result.detach(), *torch.autograd.grad(result, leaves, gradient)


@pytest.mark.parametrize(
    "name, bounds", [*(("hardtanh", bounds) for bounds in BOUNDS), *((name, None) for name in list(FUNCTIONS)[1:])]
)
def test_special_values(name, bounds):
    pointwise, function = FUNCTIONS[name]
    finite_bounds = [bound for bound in bounds or () if math.isfinite(bound)]
    value = torch.tensor(SPECIAL + finite_bounds)
    gradient = torch.full_like(value, 3.0)
    result, result_gradient = ours(pointwise, value, gradient, bounds)
    # One by one: PyTorch's vectorised hardtanh_backward on the CPU gives 0 for a NaN, its scalar one passes it on.
    for place in range(value.numel()):
        one = slice(place, place + 1)
        expected, expected_gradient = theirs(function, value[one], gradient[one], bounds)
        message = f"{name} of {value[place]}"
        torch.testing.assert_close(result[one], expected, equal_nan=True, msg=message)
        torch.testing.assert_close(result_gradient[one], expected_gradient, equal_nan=True, msg=message)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_special_values_of_mish_within_bounds(bounds):
    """One function after the other, as in a chain."""
    value = torch.tensor([*SPECIAL, *filter(math.isfinite, bounds)])
    gradient = torch.full_like(value, 3.0)
    inner, _ = ours(HARDTANH, value, gradient, bounds)
    result, inner_gradient = ours(MISH, inner, gradient)
    _, result_gradient = ours(HARDTANH, value, inner_gradient, bounds)
    for place in range(value.numel()):
        one = slice(place, place + 1)
        expected, expected_gradient = theirs(
            lambda z, bounds: F.mish(F.hardtanh(z, *bounds)), value[one], gradient[one], bounds
        )
        torch.testing.assert_close(result[one], expected, equal_nan=True)
        torch.testing.assert_close(result_gradient[one], expected_gradient, equal_nan=True)


@pytest.mark.parametrize("pointwise, function", [(ADD, torch.add), (MUL, torch.mul)], ids=["add", "mul"])
def test_tensors_and_their_gradients(pointwise, function):
    value, operand, gradient = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    value[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    operand[3:6] = torch.tensor([math.nan, math.inf, -math.inf])
    for result, expected in zip(
        ours(pointwise, value, gradient, operand), theirs(function, value, gradient, operand), strict=True
    ):
        assert torch.equal(result.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", [*FUNCTIONS, "add", "mul"])
def test_what_each_stands_for(name):
    """``plain`` is the function that the other tests compare with."""
    pointwise, function = {**FUNCTIONS, "add": (ADD, torch.add), "mul": (MUL, torch.mul)}[name]
    assert pointwise.name == name
    value = torch.tensor([*SPECIAL, 0.5, -0.5, 3.0]).double()
    operand = (-1.0, 0.75) if name == "hardtanh" else torch.randn_like(value)
    torch.testing.assert_close(
        pointwise.plain(value, operand), function(value, operand), rtol=0, atol=0, equal_nan=True
    )


def test_bounds_beyond_the_dtype():
    """They are as good as infinite; PyTorch's own function refuses them."""
    value = torch.tensor([-math.inf, -6e4, 0.5, math.inf], dtype=torch.float16)
    assert torch.equal(HARDTANH.plain(value, (-1e30, 1.0)), torch.tensor([-math.inf, -6e4, 0.5, 1.0]).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forms(dtype):
    """A dtype's own form is another function under the same name."""
    assert MISH.form(dtype) is MISH
    form = GELU.form(dtype)
    assert form.name == GELU.name and (form == GELU) == (form.function is GELU.function) == (dtype == torch.float32)


def test_gradient_is_selected_not_multiplied():
    """Outside the bounds it is 0, though the incoming one be infinite or NaN."""
    value = torch.tensor([-1.0, 1.0, -5.0, 5.0])
    for special in (math.inf, -math.inf, math.nan):
        incoming = torch.full_like(value, special)
        for each in (incoming, ours(MISH, value.clamp(-1.0, 1.0), incoming)[1]):
            assert ours(HARDTANH, value, each, (-1.0, 1.0))[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("low, high", [(-1, 1), (-4, 4), (-30, 30)])
@pytest.mark.parametrize(
    "pointwise, function",
    [FUNCTIONS["mish"], FUNCTIONS["gelu"], (GELU_TANH, lambda z, _: F.gelu(z, approximate="tanh"))],
    ids=["mish", "gelu", "gelu_tanh"],
)
def test_as_accurate_as_pytorch(pointwise, function, low, high):
    """The rule of ``tests.accuracy`` over 40000 numbers with a quarter of its floor: no sum hides an error here."""
    value = torch.linspace(low, high, 40001)
    gradient = torch.ones_like(value)
    results, expected = ours(pointwise, value, gradient), theirs(function, value, gradient)
    exact = theirs(function, value.double(), gradient.double())
    for our_result, their_result, truth in zip(results, expected, exact, strict=True):
        floor = torch.finfo(torch.float32).eps / 4 * truth.norm()
        assert (our_result - truth).norm() <= 1.1 * (their_result - truth).norm() + floor


def test_mish_far_below_zero_keeps_its_digits():
    """There mish is z * exp(z): as many digits of it as PyTorch's, down to the smallest numbers."""
    value = torch.linspace(-85.0, -5.0, 999)
    result, _ = ours(MISH, value, torch.ones_like(value))
    exact = F.mish(value.double())
    assert ((result - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_where_it_is_the_identity_or_zero(name):
    """Far from zero nothing overflows, neither in the value nor in the gradient."""
    value = torch.tensor([1.0, -1.0]) * torch.logspace(1.2, 38.5, 500, base=10.0)[:, None]
    result, gradient = ours(FUNCTIONS[name][0], value, torch.full_like(value, 3.0))
    assert torch.equal(result[:, 0], value[:, 0]) and not result[:, 1].any()
    assert torch.equal(gradient, torch.tensor([3.0, 0.0]).expand_as(value))


def test_gelu_tanh_far_below_zero_keeps_its_digits():
    value = torch.linspace(-6.0, -2.0, 999)
    result, _ = ours(GELU_TANH, value, torch.ones_like(value))
    u = math.sqrt(2 / math.pi) * (value.double() + 0.044715 * value.double() ** 3)
    exact = value / (1 + torch.exp(-2 * u))
    assert ((result - exact) / exact).abs().max() < 1e-5


#: What each says of its error: of the value, of the gradient, and of the value relative to itself between -4 and 0.
APPROXIMATIONS = {
    "float16": (GELU.form(torch.float16), 2.2e-6, 5e-6, 2e-4),
    "bfloat16": (GELU.form(torch.bfloat16), 7e-5, 5e-6, 6e-3),
}
by_approximation = pytest.mark.parametrize("name", APPROXIMATIONS)


@by_approximation
def test_approximate_gelu(name):
    """As near to float64 as it says, from where GELU is 0 to where it is the identity, and 0 at 0."""
    function, *allowed, relative = APPROXIMATIONS[name]
    value = torch.cat([torch.linspace(-30.0, 30.0, 120001), torch.linspace(-1e-3, 1e-3, 2001)])
    results = ours(function, value, torch.ones_like(value))
    exact = theirs(lambda z, _: F.gelu(z), value.double(), torch.ones_like(value).double())
    for result, truth, most in zip(results, exact, allowed, strict=True):
        assert (result - truth).abs().max() <= most
    tail = (value > -4.0) & (value < -1e-6)
    assert ((results[0] - exact[0]) / exact[0])[tail].abs().max() <= relative
    zero, gradient = ours(function, torch.zeros(1), torch.full((1,), 3.0))
    assert zero.item() == 0.0 and abs(gradient.item() - 1.5) <= 3 * 5e-6


@by_approximation
def test_approximate_gelu_far_from_zero(name):
    """There it is 0 or the identity, and nothing overflows; NaN stays NaN."""
    value = torch.tensor([1.0, -1.0]) * torch.logspace(1.2, 38.5, 500, base=10.0)[:, None]
    result, gradient = ours(APPROXIMATIONS[name][0], value, torch.full_like(value, 3.0))
    assert torch.equal(result[:, 0], value[:, 0]) and not result[:, 1].any()
    assert torch.equal(gradient, torch.tensor([3.0, 0.0]).expand_as(value))
    result, gradient = ours(APPROXIMATIONS[name][0], torch.full((1,), math.nan), torch.ones(1))
    assert result.isnan() and gradient.isnan()
