"""Group statistics of values in registers, mean first and then centred squares."""

import triton
import triton.language as tl

from triton_kernels.device import INTERPRETED
from triton_kernels.versions import VERSION

#: Beside this instruction Triton 3.6 spills registers in a norm's loop, beside the other way 3.7 and 3.9 do.
_WRITES_PTX = tl.constexpr(not INTERPRETED and VERSION >= (3, 7))


@triton.jit
def reciprocal_root(value):
    """1 / sqrt(value) to the last digits, also where value is subnormal, which ``tl.rsqrt`` takes for 0."""
    if _WRITES_PTX:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    scale = tl.where(value < 2.0**-100, 2.0**24, 1.0)
    return tl.rsqrt(value * scale * scale) * scale


@triton.jit
def reciprocal_deviation(variance, eps):
    """1 / sqrt(variance + eps), as in PyTorch: infinity for 0, and 0 for infinity.

    It takes one step of Newton's method, since the approximation's error would show in float32 gradients. At 0 and at
    infinity the step gives NaN.
    """
    value = variance + eps
    root = reciprocal_root(value)
    refined = root * (1.5 - 0.5 * (value * root) * root)
    return tl.where(refined == refined, refined, root)


@triton.jit
def normalize_groups(groups, inside, eps, GROUP_SIZE: tl.constexpr):
    """Normalise ``groups`` [rows, groups, block] over its last axis (biased variance).

    ``inside`` masks the GROUP_SIZE real elements of a padded block; None where nothing is padded.
    Returns the normalised values (0 in the padding) and the reciprocal standard deviations [rows, groups].

    Finite values have a finite mean: they are divided by the block's size, a power of two, before they are added up.
    That changes no digit of normal numbers.
    """
    BLOCK: tl.constexpr = groups.shape[2]
    if inside is not None:
        groups = tl.where(inside, groups, 0.0)
    mean = tl.sum(groups * (1.0 / BLOCK), 2)
    if inside is not None:
        scaled = mean * (BLOCK / GROUP_SIZE)
        # Where rounding makes it infinite, a little less.
        mean = tl.where(tl.abs(scaled) < float("inf"), scaled, mean * (BLOCK / GROUP_SIZE * (1.0 - 2.0**-20)))
    centred = groups - tl.expand_dims(mean, 2)
    if inside is not None:
        # Dividing by GROUP_SIZE rounds where it is no power of two. In a nearly constant group that error may be as
        # large as the differences between the values. So the mean of the centred values is subtracted as well.
        centred = tl.where(inside, centred, 0.0)
        drift = tl.div_rn(tl.sum(centred, 2), tl.full(mean.shape, GROUP_SIZE, tl.float32))
        drift = tl.where(tl.abs(drift) < float("inf"), drift, 0.0)
        centred -= tl.expand_dims(drift, 2)
        centred = tl.where(inside, centred, 0.0)
    squares = tl.sum(centred * centred, 2)
    variance = squares / GROUP_SIZE
    rstd = reciprocal_deviation(variance, eps)
    return centred * tl.expand_dims(rstd, 2), rstd
