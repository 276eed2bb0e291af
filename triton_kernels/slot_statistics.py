"""Partial statistics of tiles of ``convolution_hopper``, in Gluon: each thread keeps its own, in registers.

A slot is the pixels of a channel that one thread holds. Its count, mean and M2, the sum of centred squares, are kept
from tile to tile of a sample, and merged at the sample's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def by_slot(values):
    """[64, pixels] viewed as [64, halves, 16, 4, 2]: warpgroup, then 16 pairs of pixels of each of 4 threads."""
    return values.reshape([64, values.shape[1] // 128, 16, 4, 2])


@gluon.jit
def slot_sums(values):
    """Sums [64, halves, 4] over each thread's own pixels. No data moves between threads."""
    return gl.sum(gl.sum(values, 4), 2)


@gluon.jit
def spread(slots):
    """[64, halves, 4] in a shape that broadcasts with ``by_slot``."""
    return gl.expand_dims(gl.expand_dims(slots, 2), 4)


@gluon.jit
def slot_statistics(values, inside, MASKED: gl.constexpr):
    """Count, mean and M2 of each slot's values, those ``inside`` only."""
    if MASKED:
        count = slot_sums(gl.where(inside, 1.0, 0.0))
        divisor = gl.maximum(count, 1.0)
        mean = slot_sums(gl.where(inside, values, 0.0)) / divisor
        centred = gl.where(inside, values - spread(mean), 0.0)
        # Where the count is no power of two, the mean is rounded; this corrects it.
        correction = slot_sums(centred) / divisor
        mean += correction
        centred = gl.where(inside, centred - spread(correction), 0.0)
    else:
        mean = slot_sums(values) * (1.0 / 32.0)
        count = gl.full(mean.shape, 32.0, gl.float32, layout=mean.type.layout)
        centred = values - spread(mean)
    return count, mean, slot_sums(centred * centred)


@gluon.jit
def merged_statistics(count, mean, m2, other_count, other_mean, other_m2):
    """Count, mean and M2 of two sets together (Chan, Golub and LeVeque). The first or both may be empty."""
    total = count + other_count
    share = other_count / gl.maximum(total, 1.0)
    away = other_mean - mean
    return total, mean + away * share, m2 + other_m2 + (away * (count * share)) * away


@gluon.jit
def over_slots(count, mean, m2):
    """Count, mean and M2 [64, halves] of all threads' slots together. The mean of nothing is 0."""
    total = gl.sum(count, 2)
    divisor = gl.maximum(total, 1.0)
    centre = gl.sum(count * mean, 2) / divisor
    away = mean - gl.expand_dims(centre, 2)
    correction = gl.sum(count * away, 2) / divisor  # of the mean's rounding
    away = gl.where(count > 0, away - gl.expand_dims(correction, 2), 0.0)  # else 0 * infinity far from zero
    return total, centre + correction, gl.sum(m2 + count * (away * away), 2)


@gluon.jit
def store_statistics(partials, place, block, channels, statistics):
    """Store the statistics [64, halves] of the channels from ``block`` on, in the rows from ``place`` on."""
    counts, means, m2s = partials
    count, mean, m2 = statistics
    LAYOUT: gl.constexpr = count.type.layout
    channel = gl.expand_dims(block + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), 1)
    row = place + gl.expand_dims(gl.arange(0, count.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    inside = (channel < channels) & (row >= 0)
    gl.store(counts + row + channel * 0, count, mask=inside & (channel == block))
    gl.store(means + row * channels + channel, mean, mask=inside)
    gl.store(m2s + row * channels + channel, m2, mask=inside)
