"""The arithmetic of splitting: a float32 number as two float16 parts that share a scale with others.

    value = scale * (high + low / 2**11),   high = float16(value / scale),   low = float16(rest * 2**11)

The scale is a power of two, which is exact, and brings the largest of those that share it between 2**14 and 2**15. For
an element of at least 2**-28 of the largest (where float16 is still normal), high has a relative error of at most
2**-11, as TF32 has, and both parts together 2**-22. For smaller elements the error doubles with each halving. Both
parts of an element of at least 2**-26 of the largest are the same bits whatever the scale.

Two parts and three products, without low times low: Ootomo and Yokota, Recovering single precision accuracy from tensor
cores while surpassing the FP32 theoretical peak performance, 2022. Rows scaled by powers of two: Mukunoki, Ozaki, Ogita
and Imamura, DGEMM using tensor cores, and its accurate and reproducible versions, 2020.
"""

import triton
import triton.language as tl

#: ``low`` is stored times this, so that it is about as far from float16's subnormal range as ``high``.
LOW_SCALE = tl.constexpr(2048.0)
#: Scales are limited as if the largest element were within 2**-60 ... 2**60, so that a product of two cannot overflow.
_LEAST_EXPONENT = tl.constexpr(127 - 60)
_GREATEST_EXPONENT = tl.constexpr(127 + 60)
#: Below 2**-28 of the largest, high is subnormal. The exponent, in a float32's place.
_FARTHEST = tl.constexpr(28 << 23)


@triton.jit
def magnitude(value):
    """An integer that grows with the absolute value. Infinity's is above all numbers', NaN's above that."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(largest, LEAST_EXPONENT: tl.constexpr = _LEAST_EXPONENT):
    """By what numbers with this largest magnitude are multiplied before they are split, what makes up for it, and
    whether the scale is limited. The numbers may all be 0."""
    found = largest >> 23
    exponent = tl.minimum(tl.maximum(found, LEAST_EXPONENT), _GREATEST_EXPONENT)
    up = ((127 + 14 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return up, down, exponent != found


@triton.jit
def parts_of(value, up, MOST_LOST: tl.constexpr, LOW: tl.constexpr):
    """high, low, and 1 where too much is lost, else 0, of numbers that are multiplied by ``up`` before."""
    scaled = value * up
    high = scaled.to(tl.float16)
    rest = scaled - high.to(tl.float32)
    low = (rest * LOW_SCALE).to(tl.float16)
    if LOW:
        rest -= low.to(tl.float32) * (1.0 / LOW_SCALE)
    return high, low, tl.where(tl.abs(rest) <= tl.abs(scaled) * MOST_LOST, 0, 1)  # a NaN compares false


@triton.jit
def bounds_of(largest, least):
    """Of numbers that share a scale: by what they are multiplied before they are split, what makes up for it, and a
    bound (float32). ``largest`` is their greatest ``magnitude``, ``least`` twice the least that is not 0, less one
    (uint32).

    An element of less than 2**-28 of the largest is off by up to 2**-49 of it: its parts by 2**-36 where the largest is
    2**14, and as much again as low times low is left out. Where there is none, the bound is 0, and nothing is off by
    more than 2**-19 beside another operand that ``may_lose`` nothing; else it is the largest, and NaN where no scale
    holds that.
    """
    held = tl.maximum(largest, _LEAST_EXPONENT << 23)
    up, down, is_limited = scales_of(held)
    farthest = (tl.maximum(held - _FARTHEST, 1) * 2 - 1).to(tl.uint32)
    bound = tl.where(least < farthest, held.to(tl.float32, bitcast=True), 0.0)
    return up, down, tl.where(is_limited, float("nan"), bound)
