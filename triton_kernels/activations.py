"""PyTorch's activations as pointwise functions, beside those of the four chains (``triton_kernels.pointwise``).

Each is what PyTorch's function of the same name computes in float32, also of NaN, infinities and at jumps, and as
accurate as PyTorch's own on a GPU over the whole range. The two exceptions are more accurate: where PyTorch's gradient
of ``tanh`` or ``sigmoid`` cancels (1 - y * y, 1 - y), and where its ``hardswish`` overflows (above 5.6e37). ``elu`` and
``relu`` of -0 are 0.

All end rounded, as ``rounded_product`` says.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from triton_kernels.device import IN_INTERPRETER
from triton_kernels.pointwise import (
    Pointwise,
    exponential,
    filled,
    hardtanh,
    hardtanh_gradient,
    polynomial,
    reciprocal,
    rounded_product,
)
from triton_kernels.versions import VERSION

#: Beside ``reciprocal``, Triton 3.9 keeps half of a tile's values on the stack in ``softplus``; not beside a division.
_DIVIDES = tl.constexpr(VERSION >= (3, 9))


@triton.jit
def decay(distance):
    """exp(-distance) for distance >= 0, to the last digit, also where that is subnormal.

    ``exponential`` rounds the exponent of two, which costs a relative error of up to 4e-6 at 80, and gives 0 from 87.4
    on. Here what the rounding leaves out is a factor: 2**(power + rest) = 2**power * (1 + rest * log(2))
    within 1e-11. log2(e) is the sum of two float32 numbers, as in Cody and Waite, Software Manual for the Elementary
    Functions, 1980.
    """
    if IN_INTERPRETER:
        return tl.exp(-distance)
    bounded = tl.minimum(distance, 128.0, propagate_nan=tl.PropagateNan.ALL)  # infinity minus infinity is NaN
    power = bounded * -1.4426950216293335
    rest = tl.fma(bounded, -1.4426950216293335, -power) - bounded * 1.9259629911266175e-08
    # Without ftz, which sets subnormal results to 0.
    whole = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)
    return tl.fma(whole, rest * 0.6931471805599453, whole)


@triton.jit
def with_sign(magnitude, value):
    """``magnitude``, which is not negative, with the sign of ``value``, also of a zero: one instruction."""
    sign = value.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def logistic_terms(value):
    """(e, s, r): e = exp(-|value|), s = e or 1 for values below 0 or not, r = 1 / (1 + e) = sigmoid(|value|).

    Then sigmoid(value) is s r, and its derivative e r r. Nothing cancels and nothing overflows.
    """
    e = decay(tl.abs(value))
    return e, tl.where(value < 0.0, e, 1.0), reciprocal(1.0 + e)


@triton.jit
def coarse_logistic(value):
    """1 / (1 + exp(-value)) with a relative error of some 1e-7 (1 + |value|), and 0 from -87.3 down."""
    return reciprocal(1.0 + exponential(-value))


@triton.jit
def coarse_logistic_terms(value):
    """(e, r) of ``logistic_terms``, with the error of ``exponential``."""
    e = exponential(-tl.abs(value))
    return e, reciprocal(1.0 + e)


@triton.jit
def relu(value, operand):
    """max(value, 0)"""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_gradient(gradient, value, operand):
    """0 at 0 and below; the gradient above, and where the value is NaN."""
    return tl.where(value <= 0.0, 0.0, gradient)


@triton.jit
def relu6(value, operand):
    """min(max(value, 0), 6)"""
    return hardtanh(value, (0.0, 6.0))


@triton.jit
def relu6_gradient(gradient, value, operand):
    return hardtanh_gradient(gradient, value, (0.0, 6.0))


@triton.jit
def leaky_relu(value, numbers):
    """value where it is above 0, else negative_slope * value."""
    return tl.where(value > 0.0, value, rounded_product(value, numbers[0]))


@triton.jit
def leaky_relu_gradient(gradient, value, numbers):
    return tl.where(value > 0.0, gradient, gradient * numbers[0])


@triton.jit
def expm1_of_negative(value):
    """exp(value) - 1 for value <= 0. From -1 on, where the difference would cancel, v + v**2 times a minimax fit."""
    ratio = polynomial(value, (
        0.00012913094542454928, 0.001301126554608345, 0.008276209235191345, 0.04164746776223183,
        0.16666366159915924, 0.49999985098838806,
    ))  # fmt: skip
    return tl.where(value < -1.0, exponential(value) - 1.0, value + value * value * ratio)


@triton.jit
def elu(value, numbers):
    """value above 0, else alpha * (exp(value) - 1) (Clevert, Unterthiner and Hochreiter, 2015).

    As a sum of both parts, one of which is 0, it spills no registers in a product's epilogue; as a choice it does. The
    sum is 0 at -0, where PyTorch's is -0.
    """
    above = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    below = tl.minimum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return above + rounded_product(expm1_of_negative(below), numbers[0])


@triton.jit
def elu_gradient(gradient, value, numbers):
    """gradient above 0, else gradient * alpha * exp(value)."""
    return tl.where(value <= 0.0, (gradient * numbers[0]) * decay(tl.abs(value)), gradient)


@triton.jit
def sigmoid(value, operand):
    """1 / (1 + exp(-value))"""
    e, s, r = logistic_terms(value)
    return rounded_product(s, r)


@triton.jit
def sigmoid_gradient(gradient, value, operand):
    """gradient * sigmoid(v) * sigmoid(-v)"""
    e, s, r = logistic_terms(value)
    return gradient * (e * r * r)


@triton.jit
def coarse_sigmoid(value, operand):
    """``sigmoid`` as precise as 16 bits are: five instructions for sixteen."""
    return coarse_logistic(value)


@triton.jit
def coarse_sigmoid_gradient(gradient, value, operand):
    e, r = coarse_logistic_terms(value)
    return gradient * (e * r * r)


@triton.jit
def silu(value, operand):
    """value * sigmoid(value) (Elfwing, Uchibe and Doya, 2017); NaN for -inf, as in PyTorch."""
    e, s, r = logistic_terms(value)
    return rounded_product(value * s, r)


@triton.jit
def silu_gradient(gradient, value, operand):
    """gradient * (sigmoid(v) + v * sigmoid(v) * sigmoid(-v)); NaN for both infinities, as in PyTorch."""
    e, s, r = logistic_terms(value)
    return gradient * (s * r + (value * e) * r * r)


@triton.jit
def coarse_silu(value, operand):
    """``silu`` as precise as 16 bits are."""
    return rounded_product(value, coarse_logistic(value))


@triton.jit
def coarse_silu_gradient(gradient, value, operand):
    """gradient * s * (1 + v * (1 - s)) with s = sigmoid(v)"""
    s = coarse_logistic(value)
    return gradient * (s * (1.0 + value * (1.0 - s)))


@triton.jit
def tanh(value, operand):
    """m + m**3 times a minimax fit in m**2 below 0.6, 1 - 2 / (1 + exp(2 m)) beyond, with m = |v| and v's sign."""
    magnitude = tl.abs(value)
    square = value * value
    ratio = polynomial(square, (
        -0.005895158275961876, 0.020795971155166626, -0.053783830255270004, 0.13331924378871918, -0.33333298563957214,
    ))  # fmt: skip
    far = 1.0 - 2.0 * reciprocal(1.0 + exponential(2.0 * magnitude))
    return with_sign(tl.where(magnitude < 0.6, magnitude + magnitude * square * ratio, far), value)


@triton.jit
def tanh_gradient(gradient, value, operand):
    """gradient / cosh(v)**2, which is gradient * 4 * sigmoid(2 v) * sigmoid(-2 v)"""
    e, s, r = logistic_terms(2.0 * value)
    return gradient * (4.0 * e * r * r)


@triton.jit
def bfloat16_tanh(value, operand):
    """``tanh`` by the GPU's instruction, within 2**-11 of its value: a quarter of the error of rounding to bfloat16."""
    if IN_INTERPRETER:
        return tanh(value, operand)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def coarse_tanh_gradient(gradient, value, operand):
    e, r = coarse_logistic_terms(2.0 * value)
    return gradient * (4.0 * e * r * r)


@triton.jit
def hardsigmoid(value, operand):
    """min(max(value + 3, 0), 6) / 6 (Howard and others, Searching for MobileNetV3, 2019)."""
    return rounded_product(hardtanh(value + 3.0, (0.0, 6.0)), 0.16666666666666666)


@triton.jit
def hardsigmoid_gradient(gradient, value, operand):
    """A sixth of the gradient between -3 and 3, else 0, also where the value is NaN."""
    return tl.where((value > -3.0) & (value < 3.0), gradient * 0.16666666666666666, 0.0)


@triton.jit
def hardswish(value, operand):
    """value * hardsigmoid(value) (ibid.); NaN for -inf, as in PyTorch. It does not overflow."""
    return rounded_product(value, hardtanh(value + 3.0, (0.0, 6.0)) * 0.16666666666666666)


@triton.jit
def hardswish_gradient(gradient, value, operand):
    """gradient * (v + 3/2) / 3 between -3 and 3. From there on, and where the value is NaN, the gradient; 0 below."""
    between = gradient * ((value + 1.5) * 0.3333333333333333)
    return tl.where(value <= -3.0, 0.0, tl.where(value < 3.0, between, gradient))


@triton.jit
def softplus(value, numbers):
    """log(1 + exp(beta * value)) / beta; value where beta * value is above threshold.

    With y = beta * value it is (max(y, 0) + log(1 + e)) / beta, e = exp(-|y|). log(1 + e) is 2 atanh(w) with
    w = e / (2 + e), at most 1/3: 2 w + 2 w**3 times a minimax fit in w**2.
    """
    beta, threshold = numbers
    scaled = value * beta
    e = decay(tl.abs(scaled))
    w = e / (2.0 + e) if _DIVIDES else e * reciprocal(2.0 + e)
    ratio = polynomial(w * w, (
        0.1400599479675293, 0.14000901579856873, 0.2001076340675354, 0.3333320915699005,
    ))  # fmt: skip
    tail = 2.0 * w * (1.0 + (w * w) * ratio)
    total = tl.maximum(scaled, 0.0, propagate_nan=tl.PropagateNan.ALL) + tail
    return tl.where(scaled > threshold, value, rounded_product(total, filled(total, 1.0) / beta))


@triton.jit
def softplus_gradient(gradient, value, numbers):
    """gradient * sigmoid(beta * value); the gradient where beta * value is above threshold."""
    beta, threshold = numbers
    scaled = value * beta
    e, s, r = logistic_terms(scaled)
    return tl.where(scaled > threshold, gradient, gradient * (s * r))


@triton.jit
def clamp_gradient(gradient, value, bounds):
    """The gradient at the bounds and between them. Beyond them 0, also where the value is NaN."""
    low, high = bounds
    return tl.where((value >= low) & (value <= high), gradient, 0.0)


def _clamp(value, bounds):
    # PyTorch refuses bounds beyond the dtype's range. The kernels take them for infinities.
    most = torch.finfo(value.dtype).max
    return torch.clamp(value, *(math.copysign(math.inf, bound) if abs(bound) > most else bound for bound in bounds))


def _softplus_jump(numbers):
    beta, threshold = numbers
    return (threshold / beta,) if beta else ()


RELU = Pointwise("relu", relu, relu_gradient, lambda value, _: F.relu(value), jumps=lambda _: (0.0,))
RELU6 = Pointwise("relu6", relu6, relu6_gradient, lambda value, _: F.relu6(value), jumps=lambda _: (0.0, 6.0))
LEAKY_RELU = Pointwise(
    "leaky_relu", leaky_relu, leaky_relu_gradient, lambda z, slope: F.leaky_relu(z, *slope), "numbers", lambda _: (0.0,)
)
ELU = Pointwise("elu", elu, elu_gradient, lambda value, alpha: F.elu(value, *alpha), "numbers", lambda _: (0.0,))
SILU = Pointwise(
    "silu",
    silu,
    silu_gradient,
    lambda value, _: F.silu(value),
    forms=tuple((dtype, coarse_silu, coarse_silu_gradient) for dtype in (torch.bfloat16, torch.float16)),
)
TANH = Pointwise(
    "tanh",
    tanh,
    tanh_gradient,
    lambda value, _: torch.tanh(value),
    forms=(
        (torch.bfloat16, bfloat16_tanh, coarse_tanh_gradient),
        (torch.float16, tanh, coarse_tanh_gradient),
    ),
)
SIGMOID = Pointwise(
    "sigmoid",
    sigmoid,
    sigmoid_gradient,
    lambda value, _: torch.sigmoid(value),
    forms=tuple((dtype, coarse_sigmoid, coarse_sigmoid_gradient) for dtype in (torch.bfloat16, torch.float16)),
)
HARDSIGMOID = Pointwise(
    "hardsigmoid", hardsigmoid, hardsigmoid_gradient, lambda z, _: F.hardsigmoid(z), jumps=lambda _: (-3.0, 3.0)
)
HARDSWISH = Pointwise(
    "hardswish", hardswish, hardswish_gradient, lambda z, _: F.hardswish(z), jumps=lambda _: (-3.0, 3.0)
)
SOFTPLUS = Pointwise(
    "softplus", softplus, softplus_gradient, lambda z, numbers: F.softplus(z, *numbers), "numbers", _softplus_jump
)
CLAMP = Pointwise("clamp", hardtanh, clamp_gradient, _clamp, "numbers", lambda bounds: bounds)
ACTIVATIONS = (
    RELU, RELU6, LEAKY_RELU, ELU, SILU, TANH, SIGMOID, HARDSIGMOID, HARDSWISH, SOFTPLUS, CLAMP,
)  # fmt: skip
