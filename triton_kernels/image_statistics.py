"""Statistics of images [B, C, S] (see ``image_tiles``): partial ones of each channel of a tile, and their merge.

Partial statistics are count, mean and M2, the sum of centred squares. They are merged over a group's channels and tiles
after Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

import functools
import math
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
    CONTIGUOUS,
    ImageNormConfig,
    as_image,
    image_operands,
    is_inside,
    launch_tiles,
    layout_of,
    load_tile,
    place_of_program,
    place_of_sample,
    tile_of_image,
)
from triton_kernels.launch import launch, wait_for_launch_before


@triton.jit
def partial_statistics_kernel(
    input,  # an image
    operands,  # of the chain's steps
    counts,  # [B, strips]: values of each row of a strip
    means,  # [B, strips, C / FOLD]
    m2s,  # [B, strips, C / FOLD]
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    CHAIN: tl.constexpr,
    FOLD: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Mean and M2 of what CHAIN's norm takes, over the pixels of a strip of STRIP tiles, for each channel or FOLD
    neighbouring ones.

    Each place in a tile has statistics of its own, kept from tile to tile (Welford, Note on a Method for Calculating
    Corrected Sums of Squares and Products, 1962). No data moves between threads before the strip's end.
    """
    wait_for_launch_before()
    ROWS: tl.constexpr = BLOCK_C // FOLD
    pixels = tl.cast(pixels, INDEX) * PIXEL_UNIT
    corner, c, real = place_of_program(channels, strips, STRIP * BLOCK_S, BLOCK_C, INDEX)
    end = tl.minimum(corner[2] + STRIP * BLOCK_S, pixels)
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    mean = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    m2 = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for pixel in tl.range(corner[2], end, BLOCK_S, num_stages=STAGES):
        place = (corner[0], corner[1], pixel)
        inside = is_inside(real, pixel, pixels, BLOCK_S)
        loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
        values = load_tile(input, place, inside).to(tl.float32)
        values = tl.where(inside, apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place), mean)
        away = values - mean
        mean += away * (1.0 / ((pixel - corner[2]) // BLOCK_S + 1).to(tl.float32))
        m2 += away * (values - mean)
    count = tl.maximum((end - corner[2] - tl.arange(0, BLOCK_S) + (BLOCK_S - 1)) // BLOCK_S, 0).to(tl.float32)
    count = tl.where(real[:, None], count[None, :], 0.0)
    count = tl.reshape(count, (ROWS, FOLD * BLOCK_S))
    mean = tl.reshape(mean, count.shape)
    m2 = tl.reshape(m2, count.shape)
    total = (end - corner[2]).to(tl.float32) * FOLD
    centre = tl.sum(count * mean, 1) / total
    away = mean - centre[:, None]
    correction = tl.sum(count * away, 1) / total  # of the mean's rounding
    away = away - correction[:, None]
    row = corner[1] // FOLD + tl.arange(0, ROWS)
    target = tl.program_id(0).to(tl.int64) * (channels // FOLD) + row
    tl.store(means + target, centre + correction, mask=row < channels // FOLD)
    tl.store(m2s + target, tl.sum(m2 + count * (away * away), 1), mask=row < channels // FOLD)
    tl.store(counts + tl.program_id(0), total)


@triton.jit
def merged_group(
    partials,  # counts [B, tiles], means [B, tiles, C], m2s [B, tiles, C]
    sample,
    group,
    tiles,
    channels,
    width,  # values of the group, in float32
    eps,
    GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """mean = sum of count_i mean_i / width, M2 = sum of M2_i + count_i (mean_i - mean)**2, rstd from M2 / width."""
    counts, means, m2s = partials
    sample = tl.cast(sample, tl.int64)
    first_channel = tl.cast(group, tl.int64) * GROUP_SIZE
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
    drift = tl.sum(tl.sum(drifts, 1), 0)  # of the rounding of the mean and of the shares
    variance = tl.maximum(tl.sum(tl.sum(variances, 1), 0) - drift * drift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return group_mean + drift, reciprocal_deviation(variance, eps)


@triton.jit
def merge_statistics_kernel(
    partials,  # counts [B, tiles], means [B, tiles, C], m2s [B, tiles, C]
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
    """A group's statistics, from those of its channels' tiles."""
    wait_for_launch_before()
    sample, group = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups
    width = tl.cast(pixels, tl.float32) * GROUP_SIZE
    found = merged_group(partials, sample, group, tiles, channels, width, eps, GROUP_SIZE, BLOCK_T, BLOCK_C)
    tl.store(mean + tl.program_id(0), found[0])
    tl.store(rstd + tl.program_id(0), found[1])


@functools.lru_cache
def merged_blocks(group_size: int, places: int) -> tuple[int, int]:
    """The channels of a group, and the places of a sample, that a program merges at a time."""
    block_c = min(64, next_power_of_2(group_size))
    block_t = min(2048 // block_c, next_power_of_2(places))
    return min(2048 // block_t, next_power_of_2(group_size)), block_t


@dataclass(frozen=True)
class PartialStatistics:
    """Each tile's count of values [B, tiles], and each channel's mean and M2 in it [B, tiles, C / fold].

    ``fold`` neighbouring channels are one here.
    """

    counts: torch.Tensor
    means: torch.Tensor
    m2s: torch.Tensor
    fold: int = 1

    @classmethod
    def empty(cls, samples: int, tiles: int, channels: int, device: torch.device, fold: int = 1) -> "PartialStatistics":
        means, m2s = torch.empty(2, samples, tiles, channels // fold, dtype=torch.float32, device=device).unbind()
        return cls(torch.empty(samples, tiles, dtype=torch.float32, device=device), means, m2s, fold)

    def __getitem__(self, samples: slice) -> "PartialStatistics":
        return PartialStatistics(self.counts[samples], self.means[samples], self.m2s[samples], self.fold)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As kernels take them."""
        return self.counts, self.means, self.m2s

    def empty_statistics(self, num_groups: int) -> torch.Tensor:
        """Memory for each group's mean and reciprocal standard deviation: [2, B * num_groups] in float32."""
        return torch.empty(2, len(self.means) * num_groups, dtype=torch.float32, device=self.means.device)

    def merge(self, num_groups: int, pixels: int, eps: float) -> torch.Tensor:
        """Each group's mean and reciprocal standard deviation, [2, B * num_groups] in float32, of images of ``pixels``
        pixels."""
        samples, tiles, channels = self.means.shape
        statistics = self.empty_statistics(num_groups)
        if self.means.numel() == 0:
            return statistics
        mean, rstd = statistics.unbind()
        group_size = channels // num_groups
        block_c, block_t = merged_blocks(group_size, tiles)
        launch(
            merge_statistics_kernel,
            (samples * num_groups,),
            mean.device,
            self.tensors,
            mean,
            rstd,
            tiles,
            channels,
            pixels * self.fold,
            num_groups,
            eps,
            GROUP_SIZE=group_size,
            BLOCK_T=block_t,
            BLOCK_C=block_c,
        )
        return statistics


def partial_statistics(
    input: torch.Tensor, num_groups: int, config: ImageNormConfig, chain: Chain, operands: Sequence[Any]
) -> PartialStatistics:
    """Those of what the chain's norm takes, of each channel or some neighbouring ones of a group.

    ``input`` is [B, C, S] with any strides, as are operands that are tensors. ``operands`` has one entry a step.
    Without values, nothing is written.
    """
    B, C, S = input.shape
    strips = config.strips(S)
    # Where a tile has all pixels of its channels. Fewer numbers are stored, and fewer means rounded before the merge.
    # (Of channels_last images, Triton 3.6 adds up wrong values after the reshape: H200.)
    folds = config.tiles(S) == 1 and layout_of(input) == CONTIGUOUS
    fold = math.gcd(C // num_groups, config.block_c) if folds else 1
    partials = PartialStatistics.empty(B, strips, C, input.device, fold)
    launch_tiles(
        partial_statistics_kernel,
        input,
        strips,
        config,
        as_image(input),
        image_operands(chain, operands),
        *partials.tensors,
        CHAIN=chain,
        FOLD=fold,
        STRIP=config.strip,
        STAGES=config.stages(input, chain),
    )
    return partials


def image_statistics(
    input: torch.Tensor, num_groups: int, eps: float, config: ImageNormConfig, chain: Chain, operands: Sequence[Any]
) -> torch.Tensor:
    """Mean and reciprocal standard deviation [2, B * num_groups], float32, of what the chain's norm takes.

    The arguments are those of ``partial_statistics``.
    """
    partials = partial_statistics(input, num_groups, config, chain, operands)
    return partials.merge(num_groups, input.shape[2], eps)
