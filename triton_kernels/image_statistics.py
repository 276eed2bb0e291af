"""Statistics of images [B, C, S] (see ``image_tiles``), in one launch; and the merge of those that a convolution made.

Partial statistics are count, mean and M2, the sum of centred squares. They are merged after Chan, Golub and LeVeque,
Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import Chain, apply_steps, load_tensors, load_vectors
from triton_kernels.grid import next_power_of_2
from triton_kernels.group_statistics import reciprocal_deviation
from triton_kernels.image_tiles import (
    ImageSumsConfig,
    Parts,
    as_image,
    channels_of_block,
    image_operands,
    is_in_part,
    is_last,
    launch_parts,
    load_tile,
    members,
    part_of_program,
    place_of_sample,
    store_of_channels,
    tensors_of,
    tile_of_image,
)
from triton_kernels.launch import launch, wait_for_launch_before


@triton.jit
def merged(count, mean, m2, total, AXIS: tl.constexpr):
    """Count, mean and M2 of sets of values together, along an axis. Those without a value have zeros.

    Means are halved, as a sum of shares of the largest number may round to more than that.
    """
    share = count / total
    half = mean * 0.5
    centre = tl.sum(share * half, AXIS)
    away = tl.where(count > 0, half - tl.expand_dims(centre, AXIS), 0.0)
    drift = tl.sum(share * away, AXIS)  # of the rounding of the mean and of the shares
    away = tl.where(count > 0, away - tl.expand_dims(drift, AXIS), 0.0)
    return 2.0 * (centre + drift), tl.sum(m2 + 4.0 * count * (away * away), AXIS)


@triton.jit
def merged_with(found, count, mean, m2):
    """Count, mean and M2 of those of two sets of values together. The first may be empty, with zeros."""
    total = found[0] + count
    share = count / tl.maximum(total, 1.0)
    away = tl.where(found[0] > 0, mean - found[1], 0.0)
    mean = tl.where(found[0] > 0, found[1] + away * share, mean)
    return total, mean, m2 + found[2] + (away * (found[0] * share)) * away


@triton.jit
def store_statistics(targets, found, place, inside, eps):
    """Store the mean and the rstd that follow from counts, means and M2. Returns both."""
    count, mean, m2 = found
    variance = tl.maximum(m2 / count, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = reciprocal_deviation(variance, eps)
    tl.store(targets[0] + place, mean, mask=inside)
    tl.store(targets[1] + place, rstd, mask=inside)
    return mean, rstd


@triton.jit
def statistics_of_part(
    input,
    operands,
    corner,
    end,
    c,
    real,
    channels,
    CHAIN: tl.constexpr,
    STAGES: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Mean and M2 [BLOCK_C] of what CHAIN's norm takes, over a part's pixels.

    Each place in a tile has statistics of its own, kept from tile to tile (Welford, Note on a Method for Calculating
    Corrected Sums of Squares and Products, 1962). No data moves between threads before the end.
    """
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    mean = tl.zeros((c.shape[0], BLOCK_S), tl.float32)
    m2 = tl.zeros((c.shape[0], BLOCK_S), tl.float32)
    for pixel in tl.range(corner[2], end, BLOCK_S, num_stages=STAGES):
        place = (corner[0], corner[1], pixel)
        inside = is_in_part(real, pixel, end, FULL, BLOCK_S)
        loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
        values = load_tile(input, place, inside).to(tl.float32)
        values = tl.where(inside, apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place), mean)
        away = values - mean
        mean += away * (1.0 / ((pixel - corner[2]) // BLOCK_S + 1).to(tl.float32))
        m2 += away * (values - mean)
    s = tl.arange(0, BLOCK_S)[None, :]
    pixels = end - corner[2]
    count = tl.maximum((pixels - s + (BLOCK_S - 1)) // BLOCK_S, 0).to(tl.float32)
    return merged(count, mean, m2, pixels.to(tl.float32), 1)


@triton.jit
def channels_of_part(block, GROUP_SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """How many channels of each group are in a block of a unit, in float32."""
    return tl.minimum(GROUP_SIZE - block * BLOCK_C, BLOCK_C if BLOCKS > 1 else GROUP_SIZE).to(tl.float32)


@triton.jit
def merged_parts(
    partials,  # mean and M2 of each group of a unit's parts: [parts, 2, LANES]
    parts,
    pixels,
    length,  # of a strip
    GROUP_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Count, mean and M2 [LANES] of a unit's groups."""
    found = (tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32))
    for first in tl.range(0, parts, BLOCK_T, num_stages=1):
        part = first + tl.arange(0, BLOCK_T)
        inside = (part < parts)[:, None] & (tl.arange(0, LANES) >= 0)[None, :]
        of_pixels = tl.minimum(pixels - (part // BLOCKS).to(pixels.dtype) * length, length).to(tl.float32)
        of_channels = channels_of_part(part % BLOCKS, GROUP_SIZE, BLOCKS, BLOCK_C)
        counts = tl.where(inside, (of_pixels * of_channels)[:, None], 0.0)
        place = part.to(tl.int64)[:, None] * (2 * LANES) + tl.arange(0, LANES)[None, :]
        means = tl.load(partials + place, mask=inside, other=0.0, cache_modifier=".cg")
        m2s = tl.load(partials + place + LANES, mask=inside, other=0.0, cache_modifier=".cg")
        total = tl.sum(counts, 0)
        mean, m2 = merged(counts, means, m2s, tl.maximum(total, 1.0), 0)
        found = merged_with(found, total, mean, m2)
    return found


@triton.jit
def statistics_kernel(
    input,  # an image
    operands,  # of the chain's steps
    statistics,  # mean and rstd: [B * G]
    of_channels,  # None, or the mean and rstd * the norm's weight: [B, C]
    norm_weight,  # [C] or None
    partials,  # [B, units, parts, 2, LANES]
    counters,  # [B, units]
    num_groups,
    eps,
    sizes,  # channels, pixels of a sample (in units of PIXEL_UNIT), units, strips, tiles of a strip
    CHAIN: tl.constexpr,
    APART: tl.constexpr,  # how many steps right before the norm add vectors that the means in of_channels are without
    FOLD: tl.constexpr,  # channels that are one here
    GROUPS: tl.constexpr,  # and the following: as in Parts
    GROUP_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    SOLE: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,  # parts that are merged at a time
    BLOCK_J: tl.constexpr,  # channels of a group that are stored at a time
):
    """Each group's statistics of what CHAIN's norm takes."""
    wait_for_launch_before()
    corner, end, unit, strip, block = part_of_program(
        sizes, PIXEL_UNIT, GROUPS, GROUP_SIZE, BLOCKS, BLOCK_C, BLOCK_S, INDEX
    )
    first = unit.to(INDEX) * (GROUPS * GROUP_SIZE)
    c, real = channels_of_block(first, block, sizes[0], GROUPS * GROUP_SIZE, BLOCK_C)
    mean, m2 = statistics_of_part(input, operands, corner, end, c, real, sizes[0], CHAIN, STAGES, FULL, BLOCK_S)
    count = (end - corner[2]).to(tl.float32) * channels_of_part(block, GROUP_SIZE, BLOCKS, BLOCK_C)
    if GROUP_SIZE > 1:
        member = members(real, GROUPS, GROUP_SIZE, LANES)
        means, m2s = tl.where(member, mean[None, :], 0.0), tl.where(member, m2[None, :], 0.0)
        mean, m2 = merged(tl.where(member, (end - corner[2]).to(tl.float32), 0.0), means, m2s, count, 1)
    found = (count + tl.zeros_like(mean), mean, m2)
    finishes = True
    if not SOLE:
        parts = sizes[3] * BLOCKS
        place = corner[0].to(tl.int64) * sizes[2] + unit
        of_unit = partials + place * parts * (2 * LANES)
        own = of_unit + (strip * BLOCKS + block) * (2 * LANES) + tl.arange(0, LANES)
        tl.store(own, found[1])
        tl.store(own + LANES, found[2])
        finishes = is_last(counters + place, parts)
    if finishes:
        if not SOLE:
            pixels = tl.cast(sizes[1], INDEX) * PIXEL_UNIT
            length = tl.cast(sizes[4], INDEX) * BLOCK_S
            found = merged_parts(of_unit, parts, pixels, length, GROUP_SIZE, BLOCKS, LANES, BLOCK_C, BLOCK_T)
        group = unit * GROUPS + tl.arange(0, LANES)
        inside = (tl.arange(0, LANES) < GROUPS) & (group < num_groups)
        target = corner[0].to(tl.int64) * num_groups + group
        stored = store_statistics(statistics, found, target, inside, eps)
        store_of_channels(
            of_channels,
            stored,
            norm_weight,
            corner[0],
            unit * GROUPS,
            num_groups,
            GROUPS,
            GROUP_SIZE * FOLD,
            LANES,
            BLOCK_J,
            operands,
            CHAIN,
            CHAIN.norm_place - APART,
            CHAIN.norm_place,
        )


@triton.jit
def merge_statistics_kernel(
    partials,  # counts [B, tiles], means [B, tiles, C], m2s [B, tiles, C]
    statistics,  # mean and rstd: [B * G]
    tiles,
    channels,
    num_groups,
    eps,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group's statistics, from those of its channels' tiles."""
    wait_for_launch_before()
    sample = (tl.program_id(0) // num_groups).to(tl.int64)
    first_channel = (tl.program_id(0) % num_groups).to(tl.int64) * GROUP_SIZE
    found = (tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32))
    for first in tl.range(0, tiles * GROUP_SIZE, BLOCK, num_stages=1):
        place = first + tl.arange(0, BLOCK)[:, None]
        inside = place < tiles * GROUP_SIZE
        tile = sample * tiles + place // GROUP_SIZE
        source = tile * channels + first_channel + place % GROUP_SIZE
        counts = tl.load(partials[0] + tile, mask=inside, other=0.0)
        means = tl.load(partials[1] + source, mask=inside, other=0.0)
        m2s = tl.load(partials[2] + source, mask=inside, other=0.0)
        total = tl.sum(counts, 0)
        mean, m2 = merged(counts, means, m2s, total, 0)
        found = merged_with(found, total, mean, m2)
    store_statistics(statistics, found, tl.program_id(0) + tl.arange(0, 1), tl.arange(0, 1) == 0, eps)


@dataclass(frozen=True)
class PartialStatistics:
    """Each tile's count of values [B, tiles], and each channel's mean and M2 in it [B, tiles, C]."""

    counts: torch.Tensor
    means: torch.Tensor
    m2s: torch.Tensor

    @classmethod
    def empty(cls, samples: int, tiles: int, channels: int, device: torch.device) -> "PartialStatistics":
        means, m2s = torch.empty(2, samples, tiles, channels, dtype=torch.float32, device=device).unbind()
        return cls(torch.empty(samples, tiles, dtype=torch.float32, device=device), means, m2s)

    def __getitem__(self, samples: slice) -> "PartialStatistics":
        return PartialStatistics(self.counts[samples], self.means[samples], self.m2s[samples])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As kernels take them."""
        return self.counts, self.means, self.m2s

    def merge(self, num_groups: int, eps: float) -> torch.Tensor:
        """Each group's mean and reciprocal standard deviation, [2, B * num_groups] in float32."""
        samples, tiles, channels = self.means.shape
        statistics = torch.empty(2, samples * num_groups, dtype=torch.float32, device=self.means.device)
        if self.means.numel() == 0:
            return statistics
        group_size = channels // num_groups
        launch(
            merge_statistics_kernel,
            (samples * num_groups,),
            statistics.device,
            self.tensors,
            statistics.unbind(),
            tiles,
            channels,
            num_groups,
            eps,
            GROUP_SIZE=group_size,
            BLOCK=min(2048, next_power_of_2(tiles * group_size)),
        )
        return statistics


def image_statistics(
    input: torch.Tensor,
    num_groups: int,
    eps: float,
    config: ImageSumsConfig,
    chain: Chain,
    operands: Sequence[Any],
    *,
    channels: Sequence[torch.Tensor] | None = None,
    are_apart: bool = False,
    statistics: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean and reciprocal standard deviation [2, B * num_groups], float32, of what the chain's norm takes.

    ``input`` is [B, C, S] with any strides, as are operands that are tensors. ``operands`` has one entry a step.
    ``channels`` are two of [B, C] in float32, which become the mean, and the reciprocal standard deviation times the
    norm's weight. Vectors that are added right before the norm ``are_apart`` where these means are without them.
    Without values, nothing is written. ``statistics`` is memory for the result.
    """
    B, C, S = input.shape
    if statistics is None:
        statistics = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device)
    if input.numel() == 0:
        return statistics
    norm = chain.norm_place
    weight, fold = operands[norm], 1
    operands = (*operands[:norm], *[None] * (len(operands) - norm))  # no later ones are read
    varies = any(step.has_tensor and step.operand != "scalar" for step in chain.steps[:norm])
    if input.stride(1) == (S * input.stride(2) if S > 1 else 1) and not varies:
        # The channels of a group are one long one.
        fold = C // num_groups
        input = input.view(B, num_groups, fold * S)
    group_size = C // num_groups // fold
    parts = Parts.of(tuple(input.shape), group_size, config)
    partials = None
    if parts.of_unit > 1:
        partials = torch.empty(B, parts.units, parts.of_unit, 2, parts.lanes, dtype=torch.float32, device=input.device)
    launch_parts(
        statistics_kernel,
        [input, *tensors_of(chain, operands)],
        group_size,
        parts,
        config,
        as_image(input),
        image_operands(chain, operands),
        statistics.unbind(),
        channels and tuple(channels),
        weight if channels else None,
        partials,
        parts.counters(B) if parts.of_unit > 1 else None,
        num_groups,
        eps,
        CHAIN=chain,
        APART=chain.added_last if are_apart else 0,
        FOLD=fold,
        BLOCK_T=min(next_power_of_2(parts.of_unit), max(1, 512 * config.num_warps // parts.lanes)),
        BLOCK_J=min(next_power_of_2(C // num_groups), max(1, 2048 // parts.lanes)),
    )
    return statistics
