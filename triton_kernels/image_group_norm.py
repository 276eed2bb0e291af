"""Group norm of images: per-channel partial statistics, their merge, and passes over tiles of channels and pixels.

Tensors are viewed as [B, C, S]: samples, channels and pixels, with any strides, so that both memory formats (and one
in, the other out) are the same kernels. A tile is BLOCK_C channels of BLOCK_S pixels of one sample. Statistics are
taken for each channel of a tile (count, mean and M2, the sum of centred squares) and merged over a group's channels and
tiles after Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.device import on_device_of
from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.group_statistics import reciprocal_deviation
from triton_kernels.pointwise import IDENTITY, Pointwise, identity

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"


@dataclass(frozen=True)
class ImageNormConfig:
    """Channels and pixels of a tile, and how many tiles a program of the backward pass goes through."""

    block_c: int
    block_s: int
    num_warps: int = 4
    strip: int = 16

    def tiles(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s)

    def strips(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s * self.strip)

    @classmethod
    @functools.lru_cache
    def of_shape(cls, channels: int, pixels: int, long_rows: bool) -> "ImageNormConfig":
        """Long rows, for images whose pixels are contiguous, or else many channels a tile.

        The best of those tried on an H200 at the target size.
        """
        if long_rows:
            block_s = min(1024, max(16, next_power_of_2(pixels)))
            return cls(min(4096 // block_s, next_power_of_2(channels)), block_s)
        return cls(min(64, next_power_of_2(channels)), 64)

    @classmethod
    def fit(cls, *images: torch.Tensor) -> "ImageNormConfig":
        """For images [B, C, S] of one shape: long rows where the pixels of all are contiguous."""
        return cls.of_shape(*images[0].shape[1:], all(layout_of(image) == CONTIGUOUS for image in images))


def layout_of(image: torch.Tensor) -> str:
    """Whether the pixels of an image [B, C, S] lie side by side, or its channels (or neither: strides do not matter for
    what is right)."""
    return CONTIGUOUS if image.stride(2) == 1 else CHANNELS_LAST


@triton.jit
def tile_offsets(strides, UNITS: tl.constexpr, sample, channel, pixel, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Offsets [BLOCK_C, BLOCK_S] of the tile whose corner is (sample, channel, pixel); int64, as images are large."""
    corner = tl.cast(sample, tl.int64) * strides[0] * UNITS[0]
    channels = (tl.cast(channel, tl.int64) + tl.arange(0, BLOCK_C)) * strides[1] * UNITS[1]
    pixels = (tl.cast(pixel, tl.int64) + tl.arange(0, BLOCK_S)) * strides[2] * UNITS[2]
    return corner + channels[:, None] + pixels[None, :]


@triton.jit
def tile_of_program(tiles, channels, pixels, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """The tile that a program has: its corner (sample, channel, pixel), its channels [BLOCK_C], and what is inside."""
    pixel = tl.program_id(0) % tiles * BLOCK_S
    channel = second_place() * BLOCK_C
    c = channel + tl.arange(0, BLOCK_C)
    inside = (c < channels)[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
    return tl.program_id(0) // tiles, channel, pixel, c, inside


@triton.jit
def load_rows(vector, index, inside, default):
    """vector[index] in float32, as a column [BLOCK_C, 1]; ``default`` where there is no vector."""
    if vector is None:
        values = tl.full(index.shape, default, tl.float32)
    else:
        values = tl.load(vector + index, mask=inside, other=0.0).to(tl.float32)
    return tl.expand_dims(values, 1)


@triton.jit
def partial_statistics_kernel(
    input,  # [B, C, S]
    strides,  # of input, in units of UNITS
    input_bias,  # [C] or None: added to the input
    counts,  # [B, tiles]: pixels of each tile
    means,  # [B, tiles, C]
    m2s,  # [B, tiles, C]
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Mean and M2 over the pixels of a tile, channel by channel, of the activated input."""
    pixels = pixels * PIXEL_UNIT
    sample, channel, pixel, c, inside = tile_of_program(tiles, channels, pixels, BLOCK_C, BLOCK_S)
    offsets = tile_offsets(strides, UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    values = ACTIVATION(values + load_rows(input_bias, c, c < channels, 0.0), 0.0, 0.0)
    count = tl.minimum(pixels - pixel, BLOCK_S)
    values = tl.where(inside, values, 0.0)
    mean = tl.sum(values, 1) / count
    centred = tl.where(inside, values - mean[:, None], 0.0)
    correction = tl.sum(centred, 1) / count  # what rounding left of the mean
    centred = tl.where(inside, centred - correction[:, None], 0.0)
    target = tl.program_id(0).to(tl.int64) * channels + c
    tl.store(means + target, mean + correction, mask=c < channels)
    tl.store(m2s + target, tl.sum(centred * centred, 1), mask=c < channels)
    tl.store(counts + tl.program_id(0), tl.cast(count, tl.float32))


@triton.jit
def merge_statistics_kernel(
    counts,  # [B, tiles]
    means,  # [B, tiles, C]
    m2s,  # [B, tiles, C]
    mean,  # [B * G]
    rstd,  # [B * G]
    tiles,
    channels,
    pixels,
    num_groups,
    eps,
    GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """mean = sum of count_i mean_i / width, M2 = sum of M2_i + count_i (mean_i - mean)**2, rstd from M2 / width."""
    sample = (tl.program_id(0) // num_groups).to(tl.int64)
    first_channel = tl.program_id(0) % num_groups * GROUP_SIZE
    width = tl.cast(pixels, tl.float32) * GROUP_SIZE
    weighted = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tile in range(0, tiles, BLOCK_T):
        t = tile + tl.arange(0, BLOCK_T)
        share = tl.load(counts + sample * tiles + t, mask=t < tiles, other=0.0) / width
        for channel in range(0, GROUP_SIZE, BLOCK_C):
            c = channel + tl.arange(0, BLOCK_C)
            inside = (t < tiles)[:, None] & (c < GROUP_SIZE)[None, :]
            source = (sample * tiles + t)[:, None] * channels + (first_channel + c)[None, :]
            weighted += share[:, None] * tl.load(means + source, mask=inside, other=0.0)
    group_mean = tl.sum(tl.sum(weighted, 1), 0)
    variances = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    drifts = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tile in range(0, tiles, BLOCK_T):
        t = tile + tl.arange(0, BLOCK_T)
        share = tl.load(counts + sample * tiles + t, mask=t < tiles, other=0.0) / width
        for channel in range(0, GROUP_SIZE, BLOCK_C):
            c = channel + tl.arange(0, BLOCK_C)
            inside = (t < tiles)[:, None] & (c < GROUP_SIZE)[None, :]
            source = (sample * tiles + t)[:, None] * channels + (first_channel + c)[None, :]
            away = tl.where(inside, tl.load(means + source, mask=inside, other=0.0) - group_mean, 0.0)
            variances += tl.load(m2s + source, mask=inside, other=0.0) / width + share[:, None] * (away * away)
            drifts += share[:, None] * away
    drift = tl.sum(tl.sum(drifts, 1), 0)  # what rounding, that of the shares too, left of the mean
    variance = tl.maximum(tl.sum(tl.sum(variances, 1), 0) - drift * drift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean + tl.program_id(0), group_mean + drift)
    tl.store(rstd + tl.program_id(0), reciprocal_deviation(variance, eps))


@triton.jit
def apply_kernel(
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    output,  # [B, C, S]
    output_strides,
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    num_groups,
    min_val,
    max_val,
    INPUT_UNITS: tl.constexpr,
    OUTPUT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """output = FINAL((ACTIVATION(input) - mean) * rstd * norm_weight + norm_bias), a tile a program"""
    pixels = pixels * PIXEL_UNIT
    sample, channel, pixel, c, inside = tile_of_program(tiles, channels, pixels, BLOCK_C, BLOCK_S)
    group = sample * num_groups + c // GROUP_SIZE
    source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(input + source, mask=inside, other=0.0).to(tl.float32)
    values = ACTIVATION(values + load_rows(input_bias, c, c < channels, 0.0), 0.0, 0.0)
    normalized = (values - load_rows(mean, group, c < channels, 0.0)) * load_rows(rstd, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    y = FINAL(normalized * weight + shift, min_val, max_val)
    target = tile_offsets(output_strides, OUTPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    tl.store(output + target, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def channel_sums_kernel(
    output_gradient,  # [B, C, S]
    gradient_strides,
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    sums,  # [2, B, strips, C]: sums over a strip's pixels of dy * normalized, and of dy
    plane,  # B * strips * C
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    num_groups,
    min_val,
    max_val,
    GRADIENT_UNITS: tl.constexpr,
    INPUT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STRIP: tl.constexpr,
):
    """A strip's share of the gradients of the norm's weight and bias; STRIP tiles of BLOCK_S pixels are a strip."""
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // strips
    first_pixel = tl.program_id(0) % strips * (STRIP * BLOCK_S)
    channel = second_place() * BLOCK_C
    c = channel + tl.arange(0, BLOCK_C)
    group = sample * num_groups + c // GROUP_SIZE
    group_mean = load_rows(mean, group, c < channels, 0.0)
    group_rstd = load_rows(rstd, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    before = load_rows(input_bias, c, c < channels, 0.0)
    weight_sum = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    shift_sum = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for pixel in range(first_pixel, tl.minimum(first_pixel + STRIP * BLOCK_S, pixels), BLOCK_S):
        inside = (c < channels)[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
        source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        values = ACTIVATION(tl.load(input + source, mask=inside, other=0.0).to(tl.float32) + before, 0.0, 0.0)
        normalized = (values - group_mean) * group_rstd
        source = tile_offsets(gradient_strides, GRADIENT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        dy = tl.load(output_gradient + source, mask=inside, other=0.0).to(tl.float32)
        dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
        weight_sum += tl.where(inside, dy * normalized, 0.0)
        shift_sum += tl.where(inside, dy, 0.0)
    target = tl.program_id(0).to(tl.int64) * channels + c
    tl.store(sums + target, tl.sum(weight_sum, 1), mask=c < channels)
    tl.store(sums + plane + target, tl.sum(shift_sum, 1), mask=c < channels)


@triton.jit
def group_means_kernel(
    sums,  # [2, B, strips, C]
    plane,  # B * strips * C
    norm_weight,  # [C] or None
    projection,  # [B * G]: mean of norm_weight * dy * normalized
    gradient_mean,  # [B * G]: mean of norm_weight * dy
    strips,
    channels,
    pixels,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A group's means over its channels and pixels, from the sums of its strips."""
    sample = (tl.program_id(0) // num_groups).to(tl.int64)
    first_channel = tl.program_id(0) % num_groups * GROUP_SIZE
    projections = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    means = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for channel in range(0, GROUP_SIZE, BLOCK_C):
        c = channel + tl.arange(0, BLOCK_C)
        weight = tl.full((BLOCK_C,), 1.0, tl.float32)
        if norm_weight is not None:
            weight = tl.load(norm_weight + first_channel + c, mask=c < GROUP_SIZE, other=0.0).to(tl.float32)
        for strip in range(0, strips, BLOCK_T):
            t = strip + tl.arange(0, BLOCK_T)
            inside = (t < strips)[:, None] & (c < GROUP_SIZE)[None, :]
            source = (sample * strips + t)[:, None] * channels + (first_channel + c)[None, :]
            projections += weight[None, :] * tl.load(sums + source, mask=inside, other=0.0)
            means += weight[None, :] * tl.load(sums + plane + source, mask=inside, other=0.0)
    width = tl.cast(pixels, tl.float32) * GROUP_SIZE
    tl.store(projection + tl.program_id(0), tl.sum(tl.sum(projections, 1), 0) / width)
    tl.store(gradient_mean + tl.program_id(0), tl.sum(tl.sum(means, 1), 0) / width)


@triton.jit
def apply_backward_kernel(
    output_gradient,  # [B, C, S]
    gradient_strides,
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    input_gradient,  # [B, C, S]
    result_strides,
    mean,  # [B * G]
    rstd,  # [B * G]
    projection,  # [B * G]
    gradient_mean,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    bias_sums,  # [B, strips, C]: sums over a strip's pixels of what STORED takes; or None
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    num_groups,
    min_val,
    max_val,
    GRADIENT_UNITS: tl.constexpr,
    INPUT_UNITS: tl.constexpr,
    RESULT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACTIVATION_GRADIENT: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    STORED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STRIP: tl.constexpr,
):
    """input_gradient = STORED(ACTIVATION'(input) * rstd * (g - mean(g) - x * mean(g * x))), with x the normalised
    activated input and g = norm_weight * dy
    """
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // strips
    first_pixel = tl.program_id(0) % strips * (STRIP * BLOCK_S)
    channel = second_place() * BLOCK_C
    c = channel + tl.arange(0, BLOCK_C)
    group = sample * num_groups + c // GROUP_SIZE
    group_mean = load_rows(mean, group, c < channels, 0.0)
    group_rstd = load_rows(rstd, group, c < channels, 0.0)
    group_projection = load_rows(projection, group, c < channels, 0.0)
    group_gradient_mean = load_rows(gradient_mean, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    before = load_rows(input_bias, c, c < channels, 0.0)
    total = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for pixel in range(first_pixel, tl.minimum(first_pixel + STRIP * BLOCK_S, pixels), BLOCK_S):
        inside = (c < channels)[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
        source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        values = tl.load(input + source, mask=inside, other=0.0).to(tl.float32) + before
        normalized = (ACTIVATION(values, 0.0, 0.0) - group_mean) * group_rstd
        source = tile_offsets(gradient_strides, GRADIENT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        dy = tl.load(output_gradient + source, mask=inside, other=0.0).to(tl.float32)
        dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
        gradient = group_rstd * (dy * weight - group_gradient_mean - normalized * group_projection)
        gradient = ACTIVATION_GRADIENT(gradient, values, 0.0, 0.0)
        if bias_sums is not None:
            total += tl.where(inside, gradient, 0.0)
        target = tile_offsets(result_strides, RESULT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        stored = STORED(gradient, 0.0, 0.0)
        tl.store(input_gradient + target, stored.to(input_gradient.dtype.element_ty), mask=inside)
    if bias_sums is not None:
        target = tl.program_id(0).to(tl.int64) * channels + c
        tl.store(bias_sums + target, tl.sum(total, 1), mask=c < channels)


def size_unit(size: int) -> int:
    """The largest power of two, up to 16, that divides ``size``: kernels take sizes in such units to know alignment."""
    return math.gcd(size, 16)


@functools.lru_cache(maxsize=1024)
def strides_in_units(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides divided by their units, and the units."""
    units = tuple(map(size_unit, strides))
    return tuple(stride // unit for stride, unit in zip(strides, units, strict=True)), units


@functools.lru_cache
def _merged_blocks(group_size: int, places: int) -> tuple[int, int]:
    """Channels of a group, and places of a sample, that a program merges at a time."""
    block_c = min(64, next_power_of_2(group_size))
    return block_c, min(2048 // block_c, next_power_of_2(places))


@dataclass(frozen=True)
class PartialStatistics:
    """What is merged: each tile's count of pixels [B, tiles], and each channel's mean and M2 in it [B, tiles, C]."""

    counts: torch.Tensor
    means: torch.Tensor
    m2s: torch.Tensor

    @classmethod
    def empty(cls, samples: int, tiles: int, channels: int, device: torch.device) -> "PartialStatistics":
        means, m2s = torch.empty(2, samples, tiles, channels, dtype=torch.float32, device=device).unbind()
        return cls(torch.empty(samples, tiles, dtype=torch.float32, device=device), means, m2s)

    def __getitem__(self, samples: slice) -> "PartialStatistics":
        return PartialStatistics(self.counts[samples], self.means[samples], self.m2s[samples])

    def merge(self, num_groups: int, pixels: int, eps: float) -> torch.Tensor:
        """Each group's mean and reciprocal standard deviation, [2, B * num_groups] in float32."""
        samples, tiles, channels = self.means.shape
        statistics = torch.empty(2, samples * num_groups, dtype=torch.float32, device=self.means.device)
        mean, rstd = statistics.unbind()
        group_size = channels // num_groups
        block_c, block_t = _merged_blocks(group_size, tiles)
        with on_device_of(mean):
            merge_statistics_kernel[(samples * num_groups,)](
                self.counts,
                self.means,
                self.m2s,
                mean,
                rstd,
                tiles,
                channels,
                pixels,
                num_groups,
                eps,
                GROUP_SIZE=group_size,
                BLOCK_T=block_t,
                BLOCK_C=block_c,
            )
        return statistics


def image_statistics(
    input: torch.Tensor,
    num_groups: int,
    eps: float,
    config: ImageNormConfig,
    *,
    input_bias: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
) -> torch.Tensor:
    """Mean and reciprocal standard deviation [2, B * num_groups], float32, of activation(input + input_bias).

    ``input`` is [B, C, S] with any strides, ``input_bias`` [C] or None.
    """
    B, C, S = input.shape
    if input.numel() == 0:
        return torch.zeros(2, B * num_groups, dtype=torch.float32, device=input.device)
    tiles = config.tiles(S)
    partials = PartialStatistics.empty(B, tiles, C, input.device)
    strides, units = strides_in_units(input.stride())
    with on_device_of(input):
        partial_statistics_kernel[grid_of(B * tiles, blocks_of(C, config.block_c))](
            input,
            strides,
            input_bias,
            partials.counts,
            partials.means,
            partials.m2s,
            C,
            S // size_unit(S),
            tiles,
            UNITS=units,
            ACTIVATION=activation.function,
            PIXEL_UNIT=size_unit(S),
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )
    return partials.merge(num_groups, S, eps)


def image_group_norm(
    input: torch.Tensor,
    statistics: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    config: ImageNormConfig,
    *,
    output: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> None:
    """output = final((activation(input) - mean) * rstd * norm_weight + norm_bias), both [B, C, S] with any strides.

    ``statistics`` are those of ``image_statistics``. ``input_bias`` [C] is added to the input first.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    mean, rstd = statistics.unbind()
    num_groups = mean.numel() // B
    tiles = config.tiles(S)
    input_strides, input_units = strides_in_units(input.stride())
    output_strides, output_units = strides_in_units(output.stride())
    with on_device_of(input):
        apply_kernel[grid_of(B * tiles, blocks_of(C, config.block_c))](
            input,
            input_strides,
            input_bias,
            output,
            output_strides,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            C,
            S // size_unit(S),
            tiles,
            num_groups,
            *bounds,
            INPUT_UNITS=input_units,
            OUTPUT_UNITS=output_units,
            ACTIVATION=activation.function,
            FINAL=final.function,
            GROUP_SIZE=C // num_groups,
            PIXEL_UNIT=size_unit(S),
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )


def image_group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    statistics: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    config: ImageNormConfig,
    *,
    input_gradient: torch.Tensor,
    norm_sums: torch.Tensor,
    bias_sums: torch.Tensor | None = None,
    input_bias: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
    stored: triton.runtime.JITFunction = identity,
) -> None:
    """The gradient at ``input`` of ``image_group_norm`` over its own statistics; all [B, C, S] with any strides.

    ``norm_sums`` [2, B, config.strips(S), C] becomes the partial sums of the gradients of norm_weight and norm_bias,
    ``bias_sums`` [B, config.strips(S), C] those of the gradient at ``input`` over the pixels (float32).
    ``input_gradient`` becomes ``stored`` of it, a function as ``triton_kernels.pointwise`` describes them.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    mean, rstd = statistics.unbind()
    num_groups = mean.numel() // B
    group_size = C // num_groups
    strips = config.strips(S)
    block_c, block_t = _merged_blocks(group_size, strips)
    projection, gradient_mean = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device).unbind()
    gradient_strides, gradient_units = strides_in_units(output_gradient.stride())
    input_strides, input_units = strides_in_units(input.stride())
    result_strides, result_units = strides_in_units(input_gradient.stride())
    with on_device_of(input):
        channel_sums_kernel[grid_of(B * strips, blocks_of(C, config.block_c))](
            output_gradient,
            gradient_strides,
            input,
            input_strides,
            input_bias,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            norm_sums,
            norm_sums.stride(0),
            C,
            S // size_unit(S),
            strips,
            num_groups,
            *bounds,
            GRADIENT_UNITS=gradient_units,
            INPUT_UNITS=input_units,
            ACTIVATION=activation.function,
            FINAL_GRADIENT=final.gradient,
            GROUP_SIZE=group_size,
            PIXEL_UNIT=size_unit(S),
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            STRIP=config.strip,
            num_warps=config.num_warps,
        )
        group_means_kernel[(B * num_groups,)](
            norm_sums,
            norm_sums.stride(0),
            norm_weight,
            projection,
            gradient_mean,
            strips,
            C,
            S,
            num_groups,
            GROUP_SIZE=group_size,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
        )
        apply_backward_kernel[grid_of(B * strips, blocks_of(C, config.block_c))](
            output_gradient,
            gradient_strides,
            input,
            input_strides,
            input_bias,
            input_gradient,
            result_strides,
            mean,
            rstd,
            projection,
            gradient_mean,
            norm_weight,
            norm_bias,
            bias_sums,
            C,
            S // size_unit(S),
            strips,
            num_groups,
            *bounds,
            GRADIENT_UNITS=gradient_units,
            INPUT_UNITS=input_units,
            RESULT_UNITS=result_units,
            ACTIVATION=activation.function,
            ACTIVATION_GRADIENT=activation.gradient,
            FINAL_GRADIENT=final.gradient,
            STORED=stored,
            GROUP_SIZE=group_size,
            PIXEL_UNIT=size_unit(S),
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            STRIP=config.strip,
            num_warps=config.num_warps,
        )
