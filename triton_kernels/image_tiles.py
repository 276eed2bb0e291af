"""Tiles of images, for all kernels that pass over images of either memory format.

Tensors are viewed as [B, C, S]: samples, channels and pixels, with any strides. So one kernel serves both memory
formats, and input and output of different formats. A tile is BLOCK_C channels of BLOCK_S pixels of one sample.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import Chain
from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.launch import launch

#: Tiles of images with fewer pixels have all of them, and many channels.
_FEW_PIXELS = 16
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"


@dataclass(frozen=True)
class ImageNormConfig:
    """Channels and pixels of a tile, and the number of tiles that a program loops over (a strip)."""

    block_c: int
    block_s: int
    num_warps: int = 4
    strip: int = 16

    def tiles(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s)

    def strips(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s * self.strip)

    def stages(self, image: torch.Tensor, chain: Chain) -> int:
        """Of how many tiles of an image [B, C, S] a loop over a strip loads, the one that it works on among them.

        The next two tiles are on their way to shared memory; in float32 one, for its registers. Operands that are
        images would not fit there too, and 64-bit indices take the registers.
        """
        S = image.shape[2]
        if S >= 2**30 or chain.takes_tensors:
            return 1
        return min(2 if image.dtype == torch.float32 else 3, self.strip, self.tiles(S))

    @classmethod
    @functools.lru_cache
    def of_shape(cls, channels: int, pixels: int, long_rows: bool) -> "ImageNormConfig":
        """Long rows for images with contiguous pixels, else many channels a tile; all pixels where there are few.

        These are the best of the settings tried on an H200 at the target size.
        """
        if pixels < _FEW_PIXELS:
            block_s = max(1, next_power_of_2(pixels))
            return cls(min(4096 // block_s, next_power_of_2(channels)), block_s, num_warps=4 if pixels == 1 else 8)
        if long_rows:
            # Of a few long channels, a tile has as many values as of many.
            longest = max(1024, 4096 // next_power_of_2(channels))
            block_s = min(longest, next_power_of_2(pixels))
            return cls(min(4096 // block_s, next_power_of_2(channels)), block_s, num_warps=8 if block_s <= 64 else 4)
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
def place_of_program(channels, parts, LENGTH: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr):
    """This program's LENGTH pixels, one of ``parts`` of a sample: their corner (sample, channel, pixel), their channels
    [BLOCK_C], and which of these are real."""
    pixel = (tl.program_id(0) % parts).to(INDEX) * LENGTH
    corner = (tl.program_id(0) // parts, second_place().to(INDEX) * BLOCK_C, pixel)
    c = corner[1] + tl.arange(0, BLOCK_C)
    return corner, c, c < channels


@triton.jit
def place_of_sample(place, channels):
    """Where the sample's values begin in a matrix [B, C]."""
    return tl.cast(place[0], tl.int64) * channels


@triton.jit
def is_inside(real, pixel, pixels, BLOCK_S: tl.constexpr):
    """Which values [BLOCK_C, BLOCK_S] of the tile at ``pixel`` are inside, with its ``real`` channels."""
    return real[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]


@triton.jit
def tile_of_image(image, place, inside):
    """Pointers to the tile [BLOCK_C, BLOCK_S] of an image at a place. Offsets are int64, as images are large.

    ``image`` is from ``as_image``; ``inside`` has the tile's shape.
    """
    tensor, strides, units = image
    sample, channel, pixel = place
    corner = tl.cast(sample, tl.int64) * strides[0] * units[0]
    channels = (tl.cast(channel, tl.int64) + tl.arange(0, inside.shape[0])) * strides[1] * units[1]
    pixels = (tl.cast(pixel, tl.int64) + tl.arange(0, inside.shape[1])) * strides[2] * units[2]
    return tensor + (corner + channels[:, None] + pixels[None, :])


@triton.jit
def load_tile(image, place, inside):
    return tl.load(tile_of_image(image, place, inside), mask=inside, other=0.0)


@triton.jit
def store_tile(image, place, inside, values):
    tl.store(tile_of_image(image, place, inside), values.to(image[0].dtype.element_ty), mask=inside)


def size_unit(size: int) -> int:
    """The largest power of two, up to 16, that divides ``size``. Kernels take sizes in these units, which shows
    alignment."""
    return math.gcd(size, 16)


@functools.lru_cache(maxsize=1024)
def strides_in_units(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides divided by their units, and the units."""
    units = tuple(map(size_unit, strides))
    return tuple(stride // unit for stride, unit in zip(strides, units, strict=True)), units


def as_image(tensor: torch.Tensor, *, backwards: bool = False) -> tuple[Any, ...]:
    """A tensor [B, C, S] for kernels: with its strides, and the units of these as constants.

    ``backwards``: pixel -s is the tensor's pixel s.
    """
    strides, units = strides_in_units(tensor.stride())
    if backwards:
        strides = (*strides[:2], -strides[2])
    return tensor, strides, tuple(map(tl.constexpr, units))


def image_operands(chain: Chain, each_steps: Sequence[Any]) -> tuple[Any, ...]:
    """What each step has, with tensors as images."""
    return tuple(
        as_image(each) if step.operand == "tensor" and each is not None else each
        for step, each in zip(chain.steps, each_steps, strict=True)
    )


def launch_tiles(
    kernel: triton.runtime.JITFunction,
    image: torch.Tensor,
    parts: int,
    config: ImageNormConfig,
    *arguments: Any,
    **options: Any,
) -> None:
    """Launch a kernel whose programs take BLOCK_C channels of one of ``parts`` of a sample of ``image`` [B, C, S].

    The arguments that say so are added. Indices are of 64 bits where a tile may end beyond 2**31.
    """
    if image.numel() == 0:
        return
    B, C, S = image.shape
    unit = size_unit(S)
    launch(
        kernel,
        grid_of(B * parts, blocks_of(C, config.block_c)),
        image.device,
        *arguments,
        C,
        S // unit,
        parts,
        **options,
        PIXEL_UNIT=unit,
        INDEX=tl.int32 if max(C, S) < 2**30 else tl.int64,
        BLOCK_C=config.block_c,
        BLOCK_S=config.block_s,
        config=config,
        num_warps=config.num_warps,
    )
