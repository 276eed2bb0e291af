"""Pointwise functions and their gradients, as jit functions that every kernel composes.

A function takes float32 values and the bounds ``(min_val, max_val)``, used or not; its gradient takes the output's
gradient before them. So one can stand in for another as a kernel's constexpr argument. Both agree with PyTorch on NaN,
infinities and boundaries; a gradient that is cut off is selected away, not multiplied by 0, as an infinite one shows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.device import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def power_of_two(exponent):
    """2**exponent, 0 where that is subnormal: one instruction, where ``tl.exp2`` takes four for the sake of those."""
    if _INTERPRETED:
        return tl.exp2(exponent)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exponential(value):
    """exp(value) as ``tl.exp`` computes it on a GPU, by a power of two; 0 where that is subnormal."""
    if _INTERPRETED:
        return tl.exp(value)
    return power_of_two(value * 1.4426950408889634)


@triton.jit
def reciprocal(value):
    """1 / value to the last digit, for normal numbers and infinity: one instruction, where a division takes eight."""
    if _INTERPRETED:
        return 1.0 / value
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rounded_product(value, factor):
    """value * factor, rounded whatever is added to it: a compiler would fuse a plain product into the sum.

    A function that group norm follows ends in one. Where a group's values are all the same, so is their mean, and
    nothing may be left when it is subtracted; fused, the product's rounding would be: noise, 316 times as large after
    the norm.
    """
    if _INTERPRETED:
        return value * factor
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, factor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def identity(value, min_val, max_val):
    return value


@triton.jit
def identity_gradient(gradient, value, min_val, max_val):
    return gradient


@triton.jit
def hardtanh(value, min_val, max_val):
    """min(max(value, min_val), max_val); a NaN stays a NaN, which Triton's default minimum would drop."""
    raised = tl.maximum(value, min_val, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, max_val, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def hardtanh_gradient(gradient, value, min_val, max_val):
    """0 at and beyond the bounds; passed on between them and where the value is NaN."""
    return tl.where((value <= min_val) | (value >= max_val), 0.0, gradient)


@triton.jit
def softplus_terms(value):
    """(e, tanh(softplus(value)), r) with e = exp(value), n = e(e + 2), r = 1 / (n + 2): the tanh is n r = 1 - 2 r.

    The first form is accurate where it is small; the second is exactly 1 where it is large, and where e overflows.
    They part at e = 3/4, about where they are equally accurate; asked of e rather than n, that spills fewer registers.
    """
    e = exponential(value)
    n = e * (e + 2.0)
    r = reciprocal(n + 2.0)
    return e, tl.where(e > 0.75, 1.0 - 2.0 * r, n * r), r


@triton.jit
def mish(value, min_val, max_val):
    """value * tanh(softplus(value))"""
    e, tanh, r = softplus_terms(value)
    return rounded_product(value, tanh)


@triton.jit
def mish_gradient(gradient, value, min_val, max_val):
    """gradient * (tanh(softplus(v)) + v * sigmoid(v) * sech(softplus(v))**2), the second term being 4 v e (e + 1) r r.

    Beyond 20 the first is 1 and the second 0 in float32; v is held there, lest e overflow.
    """
    bounded = tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL)
    e, tanh, r = softplus_terms(bounded)
    return gradient * (tanh + (e * r) * ((e + 1.0) * r) * 4.0 * bounded)


@triton.jit
def hardtanh_mish(value, min_val, max_val):
    return mish(hardtanh(value, min_val, max_val), min_val, max_val)


@triton.jit
def hardtanh_mish_gradient(gradient, value, min_val, max_val):
    clipped = hardtanh(value, min_val, max_val)
    return hardtanh_gradient(mish_gradient(gradient, clipped, min_val, max_val), value, min_val, max_val)


@triton.jit
def normal_cdf(value):
    """P(X <= value) for a standard normal X, (1 + erf(value / sqrt(2))) / 2, within 6e-8, as the formula is in float32.

    1/2 + value times a polynomial in value**2, a minimax fit over |value| <= sqrt(28), beyond which this is 0 or 1
    within 6e-8; y is value**2 mapped to -1 ... 1, which keeps the coefficients small. About 20 multiply-adds and no
    branch: with it as its epilogue the convolution takes 1.73 ms at the target size, with erf 2.26 (H200).
    """
    y = tl.minimum(value * value, 28.0) * 0.0714285746216774 - 1.0
    ratio = 0.0002757363545242697
    ratio = ratio * y - 0.0007451784913428128
    ratio = ratio * y + 0.0007204240537248552
    ratio = ratio * y - 0.0010867734672501683
    ratio = ratio * y + 0.003092790488153696
    ratio = ratio * y - 0.0057799494825303555
    ratio = ratio * y + 0.008758326061069965
    ratio = ratio * y - 0.013116663321852684
    ratio = ratio * y + 0.018861297518014908
    ratio = ratio * y - 0.02525627426803112
    ratio = ratio * y + 0.03207278996706009
    ratio = ratio * y - 0.03961941972374916
    ratio = ratio * y + 0.049329083412885666
    ratio = ratio * y - 0.06662127375602722
    ratio = ratio * y + 0.1336061954498291
    return tl.minimum(tl.maximum(value * ratio + 0.5, 0.0), 1.0)


@triton.jit
def gelu(value, min_val, max_val):
    """value * normal_cdf(value) (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016); NaN for -inf, as in PyTorch.

    It is never below -0.17; the maximum is there for what ``rounded_product`` is, and spills fewer registers here.
    """
    return tl.maximum(value * normal_cdf(value), -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu_gradient(gradient, value, min_val, max_val):
    """gradient * (normal_cdf(v) + v * exp(-v**2 / 2) / sqrt(2 pi)); NaN for both infinities, as in PyTorch."""
    density = power_of_two(-0.7213475204444817 * (value * value)) * 0.3989422804014327
    return gradient * (normal_cdf(value) + value * density)


@triton.jit
def coarse_normal_tail(value):
    """(q, e): q = P(X > |value|), within 8e-6 of itself, and e = exp(-value**2 / 2).

    q / e is Mills' ratio over sqrt(2 pi): u times a polynomial in u = 1 / (1 + 0.3 |value|), a minimax fit.
    """
    u = reciprocal(1.0 + 0.3 * tl.abs(value))
    e = power_of_two(-0.7213475204444817 * (value * value))
    ratio = -0.07709738612174988
    ratio = ratio * u + 0.21603697538375854
    ratio = ratio * u - 0.016948005184531212
    ratio = ratio * u + 0.14419636130332947
    ratio = ratio * u + 0.1137419268488884
    ratio = ratio * u + 0.12007423490285873
    return ratio * (u * e), e


@triton.jit
def coarse_gelu_gradient(gradient, value, min_val, max_val):
    """``gelu_gradient`` within 5e-6 of the gradient."""
    q, e = coarse_normal_tail(value)
    return gradient * (tl.where(value > 0.0, 1.0 - q, q) + value * e * 0.3989422804014327)


@triton.jit
def times_logistic(value, factor):
    """value / (1 + 2**(value * factor)): GELU where that is the odds against ``normal_cdf``, accurate in its tail too.

    The maximum is there for what it is there for in ``gelu``.
    """
    quotient = value * reciprocal(1.0 + power_of_two(value * factor))
    return tl.maximum(quotient, -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def float16_gelu(value, min_val, max_val):
    """``gelu`` within 2.2e-6, and within 2e-4 of itself above -4: a tenth of what rounding both to float16 leaves.

    The factor is a minimax fit of degree 6 in value**2, weighted by the error of a value and its GELU in float16: as a
    quotient it is as accurate in the tail. As the convolution's epilogue it takes 0.45 ms at the target size (H200).
    """
    square = value * value
    factor = -2.9909319465559747e-09
    factor = factor * square + 2.597860770947591e-07
    factor = factor * square - 8.861806236382108e-06
    factor = factor * square + 0.00013506693358067423
    factor = factor * square + 0.00019935121235903352
    factor = factor * square - 0.10501373559236526
    factor = factor * square - 2.302126407623291
    return times_logistic(value, factor)


@triton.jit
def bfloat16_gelu(value, min_val, max_val):
    """``gelu`` within 7e-5, and within 0.6% of itself above -4: a third of what rounding both to bfloat16 leaves.

    The factor is the same fit of degree 3; 0.35 ms.
    """
    square = value * value
    factor = -6.891043085488491e-06
    factor = factor * square + 0.001233759569004178
    factor = factor * square - 0.10786987841129303
    factor = factor * square - 2.3001952171325684
    return times_logistic(value, factor)


@triton.jit
def gelu_tanh_exponential(value):
    """exp(-2 u) with u = sqrt(2 / pi) * (v + 0.044715 v**3): then (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).

    That has no difference to lose digits in, and is 0 where the exponential overflows.
    """
    return tl.exp(-1.5957691216057308 * value * (1.0 + 0.044715 * value * value))


@triton.jit
def gelu_tanh(value, min_val, max_val):
    """value * (1 + tanh(u)) / 2, which approximates ``gelu``."""
    return tl.maximum(value / (1.0 + gelu_tanh_exponential(value)), -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu_tanh_gradient(gradient, value, min_val, max_val):
    """gradient * (s + v * s * (1 - s) * 2 du/dv) with s = (1 + tanh(u)) / 2.

    s * (1 - s) is 0 in float32 where v * v > 200; beyond, v * v is held there lest it overflow.
    """
    e = gelu_tanh_exponential(value)
    s = 1.0 / (1.0 + e)
    rest = tl.where(e < 1.0, e * s, 1.0 - s)
    square = tl.minimum(value * value, 200.0, propagate_nan=tl.PropagateNan.ALL)
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * square)
    return gradient * (s + value * (s * rest) * slope)


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function of ``(value, min_val, max_val)`` and its gradient, as jit functions."""

    function: triton.runtime.JITFunction
    gradient: triton.runtime.JITFunction


IDENTITY = Pointwise(identity, identity_gradient)
HARDTANH = Pointwise(hardtanh, hardtanh_gradient)
HARDTANH_MISH = Pointwise(hardtanh_mish, hardtanh_mish_gradient)
GELU = Pointwise(gelu, gelu_gradient)
FLOAT16_GELU = Pointwise(float16_gelu, coarse_gelu_gradient)
BFLOAT16_GELU = Pointwise(bfloat16_gelu, coarse_gelu_gradient)
GELU_TANH = Pointwise(gelu_tanh, gelu_tanh_gradient)

#: GELU to the digits that values of a dtype have.
GELU_OF = {torch.bfloat16: BFLOAT16_GELU, torch.float16: FLOAT16_GELU, torch.float32: GELU}
