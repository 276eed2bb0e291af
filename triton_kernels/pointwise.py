"""Pointwise functions and their gradients, as jit functions that every kernel composes.

A function takes float32 values and the bounds ``(min_val, max_val)``, used or not; its gradient takes the output's
gradient before them. So one can stand in for another as a kernel's constexpr argument. Both agree with PyTorch on NaN,
infinities and boundaries; a gradient that is cut off is selected away, not multiplied by 0, as an infinite one shows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


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

    The first form is accurate where it is small, the second exactly 1 where it is large. Beyond 20 it is 1 in float32,
    so clamping the exponent there changes nothing and keeps e*e finite. The reciprocal is a squared rsqrt and a step of
    Newton's method: four instructions where a division takes eight.
    """
    e = tl.exp(tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL))
    n = e * (e + 2.0)
    root = tl.rsqrt(n + 2.0)
    r = root * root
    r *= 2.0 - (n + 2.0) * r
    return e, tl.where(n > 2.0, 1.0 - 2.0 * r, n * r), r


@triton.jit
def mish(value, min_val, max_val):
    """value * tanh(softplus(value))

    It is never below -0.31. The maximum keeps the product from being fused into the subtraction of a mean, which would
    leave its rounding behind: noise, 316 times as large after the norm, where a group's values are all the same.
    """
    e, tanh, r = softplus_terms(value)
    return tl.maximum(value * tanh, -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mish_gradient(gradient, value, min_val, max_val):
    """gradient * (tanh(softplus(v)) + v * sigmoid(v) * sech(softplus(v))**2), the second term being 4 v e (e + 1) r r.

    That is 0 in float32 beyond 20, where e is clamped; v is clamped with it, lest a huge v revive it.
    """
    e, tanh, r = softplus_terms(value)
    bounded = tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL)
    return gradient * (tanh + (e * r) * ((e + 1.0) * r) * 4.0 * bounded)


@triton.jit
def hardtanh_mish(value, min_val, max_val):
    return mish(hardtanh(value, min_val, max_val), min_val, max_val)


@triton.jit
def hardtanh_mish_gradient(gradient, value, min_val, max_val):
    clipped = hardtanh(value, min_val, max_val)
    return hardtanh_gradient(mish_gradient(gradient, clipped, min_val, max_val), value, min_val, max_val)


@triton.jit
def normal_tail(value):
    """(q, e): q = P(|X| > |value|) / 2 for a standard normal X, and e = exp(-value**2 / 2).

    q / e is Mills' ratio over sqrt(2 pi), here u times a polynomial in u = 1 / (1 + 0.5 |value|), a minimax fit whose
    relative error is below 7e-8 everywhere. That takes about 18 instructions where erf takes twice as many and a
    branch (measured on an H200: it made the convolution's epilogue slower than its products), and keeps the digits
    that 1 + erf(value) loses on the left. u is a squared rsqrt, which is faster than a division.
    """
    root = tl.rsqrt(1.0 + 0.5 * tl.abs(value))
    u = root * root
    e = tl.exp2(-0.7213475204444817 * (value * value))
    ratio = -0.025973547250032425
    ratio = ratio * u + 0.1947888284921646
    ratio = ratio * u - 0.5958943963050842
    ratio = ratio * u + 0.936434805393219
    ratio = ratio * u - 0.7324904799461365
    ratio = ratio * u + 0.1727037876844406
    ratio = ratio * u - 0.005399012006819248
    ratio = ratio * u + 0.15748894214630127
    ratio = ratio * u + 0.19884923100471497
    ratio = ratio * u + 0.19949181377887726
    return ratio * (u * e), e


@triton.jit
def gelu(value, min_val, max_val):
    """value * P(X <= value) (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016) = max(value, 0) - |value| q.

    NaN for both infinities: PyTorch's is infinite for the positive one, of which a norm makes NaN all the same. It ends
    in a multiply-add, so nothing is left to be fused into the subtraction of a mean (see ``mish``).
    """
    q, e = normal_tail(value)
    return tl.maximum(value, 0.0) - tl.abs(value) * q


@triton.jit
def gelu_gradient(gradient, value, min_val, max_val):
    """gradient * (P(X <= v) + v * exp(-v**2 / 2) / sqrt(2 pi)); NaN for both infinities, as in PyTorch."""
    q, e = normal_tail(value)
    return gradient * (tl.where(value > 0.0, 1.0 - q, q) + value * e * 0.3989422804014327)


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
GELU_TANH = Pointwise(gelu_tanh, gelu_tanh_gradient)
