"""Group statistics of values in registers, mean first and then centred squares."""

import triton
import triton.language as tl


@triton.jit
def reciprocal_deviation(variance, eps):
    """1 / sqrt(variance + eps): rsqrt and one step of Newton's method. rsqrt's error would show in float32
    gradients."""
    value = variance + eps
    root = tl.rsqrt(value)
    refined = root * (1.5 - 0.5 * (value * root) * root)
    return tl.where(value < float("inf"), refined, root)


@triton.jit
def normalize_groups(groups, inside, eps, GROUP_SIZE: tl.constexpr):
    """Normalise ``groups`` [rows, groups, block] over its last axis (biased variance).

    ``inside`` masks the GROUP_SIZE real elements of a padded block; None where nothing is padded.
    Returns the normalised values (0 in the padding) and the reciprocal standard deviations [rows, groups].
    """
    if inside is not None:
        groups = tl.where(inside, groups, 0.0)
    mean = tl.sum(groups, 2) / GROUP_SIZE
    centred = groups - tl.expand_dims(mean, 2)
    if inside is not None:
        # Dividing by GROUP_SIZE rounds where it is no power of two. In a nearly constant group that error may be as
        # large as the differences between the values. So the mean of the centred values is subtracted as well.
        centred = tl.where(inside, centred, 0.0)
        centred -= tl.expand_dims(tl.sum(centred, 2) / GROUP_SIZE, 2)
        centred = tl.where(inside, centred, 0.0)
    variance = tl.sum(centred * centred, 2) / GROUP_SIZE
    rstd = reciprocal_deviation(variance, eps)
    return centred * tl.expand_dims(rstd, 2), rstd
