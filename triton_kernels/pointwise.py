"""Pointwise functions and their derivatives, as jit functions that every kernel composes.

Each takes float32 values and the bounds ``(min_val, max_val)``, used or not, so that one can stand in for another as a
kernel's constexpr argument. Functions and derivatives agree with PyTorch on NaN, infinities and boundaries.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@triton.jit
def identity(value, min_val, max_val):
    return value


@triton.jit
def identity_derivative(value, min_val, max_val):
    return tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def hardtanh(value, min_val, max_val):
    """min(max(value, min_val), max_val); a NaN stays a NaN, which Triton's default minimum would drop."""
    raised = tl.maximum(value, min_val, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, max_val, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def hardtanh_derivative(value, min_val, max_val):
    """0 at and beyond the bounds, 1 between them and for NaN, as torch's hardtanh_backward."""
    return tl.where((value <= min_val) | (value >= max_val), 0.0, 1.0)


@triton.jit
def softplus_terms(value):
    """(e, n, 1 / (n + 2)) with e = exp(value), n = e(e + 2), the terms of tanh(softplus(value)) = n / (n + 2).

    Beyond 20 that is 1 in float32, so clamping the exponent there changes nothing and keeps e*e finite. The reciprocal
    is a squared rsqrt: two instructions where a division takes eight, and still right to 3e-7.
    """
    e = tl.exp(tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL))
    n = e * (e + 2.0)
    root = tl.rsqrt(n + 2.0)
    return e, n, root * root


@triton.jit
def mish(value, min_val, max_val):
    """value * tanh(softplus(value)) = value * n / (n + 2)"""
    e, n, reciprocal = softplus_terms(value)
    return value * (n * reciprocal)


@triton.jit
def mish_derivative(value, min_val, max_val):
    """tanh(softplus(v)) + v * sigmoid(v) * sech(softplus(v))**2 = n / (n + 2) + 4 v e (e + 1) / (n + 2)**2

    The second term is 0 in float32 beyond 20, where e is clamped; v is clamped with it, lest a huge v revive it.
    """
    e, n, reciprocal = softplus_terms(value)
    bounded = tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL)
    return n * reciprocal + 4.0 * bounded * (e * reciprocal) * ((e + 1.0) * reciprocal)


@triton.jit
def hardtanh_mish(value, min_val, max_val):
    return mish(hardtanh(value, min_val, max_val), min_val, max_val)


@triton.jit
def hardtanh_mish_derivative(value, min_val, max_val):
    """Selected, not multiplied: a bound far below zero must give 0 even where mish's derivative is not finite."""
    outside = (value <= min_val) | (value >= max_val)
    return tl.where(outside, 0.0, mish_derivative(hardtanh(value, min_val, max_val), min_val, max_val))


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function and its derivative: jit functions of ``(value, min_val, max_val)``."""

    function: triton.runtime.JITFunction
    derivative: triton.runtime.JITFunction


IDENTITY = Pointwise(identity, identity_derivative)
HARDTANH = Pointwise(hardtanh, hardtanh_derivative)
HARDTANH_MISH = Pointwise(hardtanh_mish, hardtanh_mish_derivative)
