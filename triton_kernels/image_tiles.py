"""Tiles of images, for all kernels that pass over images of either memory format.

Tensors are viewed as [B, C, S]: samples, channels and pixels, with any strides. So one kernel serves both memory
formats, and input and output of different formats. A tile is BLOCK_C channels of BLOCK_S pixels of one sample.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of, next_power_of_2, second_place

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"


@dataclass(frozen=True)
class ImageNormConfig:
    """Channels and pixels of a tile, and the number of tiles that a program loops over in the backward pass."""

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
        """Long rows for images with contiguous pixels, else many channels a tile.

        These are the best of the settings tried on an H200 at the target size.
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
    """Whether the pixels of an image [B, C, S] are contiguous, or its channels. This affects speed only: any strides
    work."""
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
    """This program's tile: its corner (sample, channel, pixel), its channels [BLOCK_C], and what is inside."""
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


def size_unit(size: int) -> int:
    """The largest power of two, up to 16, that divides ``size``. Kernels take sizes in these units, which shows
    alignment."""
    return math.gcd(size, 16)


@functools.lru_cache(maxsize=1024)
def strides_in_units(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides divided by their units, and the units."""
    units = tuple(map(size_unit, strides))
    return tuple(stride // unit for stride, unit in zip(strides, units, strict=True)), units
