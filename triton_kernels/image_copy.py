"""Copies of images between memory formats, tile by tile, so that both sides are read and written in whole lines.

On the way the numbers may be rounded, or split: a float32 number is a bfloat16 one and another for what that leaves.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.device import on_device_of
from triton_kernels.grid import grid_of, second_place
from triton_kernels.image_group_norm import ImageNormConfig, size_unit, strides_in_units, tile_offsets
from triton_kernels.pointwise import identity

#: bfloat16's largest number.
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def copy_kernel(
    source,  # [B, C, S]
    source_strides,
    target,  # [B, C, S]
    target_strides,
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    SOURCE_UNITS: tl.constexpr,
    TARGET_UNITS: tl.constexpr,
    TRANSFORM: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """target = TRANSFORM(source), a tile a program"""
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // tiles
    pixel = tl.program_id(0) % tiles * BLOCK_S
    channel = second_place() * BLOCK_C
    inside = (channel + tl.arange(0, BLOCK_C) < channels)[:, None]
    inside = inside & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
    offsets = tile_offsets(source_strides, SOURCE_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(source + offsets, mask=inside, other=0.0)
    offsets = tile_offsets(target_strides, TARGET_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = TRANSFORM(values, 0.0, 0.0)
    tl.store(target + offsets, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def split_kernel(
    source,  # [B, C, S] float32
    source_strides,
    high,  # [B, C, S] bfloat16
    low,  # [B, C, S] bfloat16
    target_strides,  # of high and of low
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    SOURCE_UNITS: tl.constexpr,
    TARGET_UNITS: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """high + low = source, a tile a program"""
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // tiles
    pixel = tl.program_id(0) % tiles * BLOCK_S
    channel = second_place() * BLOCK_C
    inside = (channel + tl.arange(0, BLOCK_C) < channels)[:, None]
    inside = inside & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
    offsets = tile_offsets(source_strides, SOURCE_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(source + offsets, mask=inside, other=0.0)
    # What would round to infinity becomes the largest number, and low is the rest of it.
    bounded = tl.minimum(tl.maximum(values, -_LARGEST_BFLOAT16), _LARGEST_BFLOAT16)
    high_values = tl.where(tl.abs(values) < float("inf"), bounded, 0.0).to(tl.bfloat16)
    offsets = tile_offsets(target_strides, TARGET_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    tl.store(high + offsets, high_values, mask=inside)
    tl.store(low + offsets, (values - high_values.to(tl.float32)).to(tl.bfloat16), mask=inside)


def copy_image(
    source: torch.Tensor,
    target: torch.Tensor,
    config: ImageNormConfig,
    transform: triton.runtime.JITFunction = identity,
) -> None:
    """target = transform(source), both [B, C, S] with any strides, converted to the target's dtype.

    ``transform`` is a function as ``triton_kernels.pointwise`` describes them; it takes values of the source's dtype.
    """
    if source.numel() == 0:
        return
    B, C, S = source.shape
    tiles = config.tiles(S)
    source_strides, source_units = strides_in_units(source)
    target_strides, target_units = strides_in_units(target)
    unit = size_unit(S)
    with on_device_of(source):
        copy_kernel[grid_of(B * tiles, triton.cdiv(C, config.block_c))](
            source,
            source_strides,
            target,
            target_strides,
            C,
            S // unit,
            tiles,
            SOURCE_UNITS=source_units,
            TARGET_UNITS=target_units,
            TRANSFORM=transform,
            PIXEL_UNIT=unit,
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )


def split_image(source: torch.Tensor, high: torch.Tensor, low: torch.Tensor, config: ImageNormConfig) -> None:
    """high = source rounded to bfloat16, low = source - high rounded likewise: high + low is within 2**-17 of source.

    All are [B, C, S] with any strides, which are the same for ``high`` and ``low``; source is float32, they bfloat16.
    (Numbers so small that ``low`` is subnormal are within 2**-134 of themselves.)

    Products of two split images are high * high' + high * low' + low * high'. So that they are infinite or NaN where
    those of the images are, high is 0 where the source is not finite, and low the source itself: low * high' then has
    the product, and high * low' is 0, where an infinite high would have made NaN of a low' of 0 or of another sign.
    """
    if source.numel() == 0:
        return
    B, C, S = source.shape
    tiles = config.tiles(S)
    source_strides, source_units = strides_in_units(source)
    target_strides, target_units = strides_in_units(high)
    unit = size_unit(S)
    with on_device_of(source):
        split_kernel[grid_of(B * tiles, triton.cdiv(C, config.block_c))](
            source,
            source_strides,
            high,
            low,
            target_strides,
            C,
            S // unit,
            tiles,
            SOURCE_UNITS=source_units,
            TARGET_UNITS=target_units,
            PIXEL_UNIT=unit,
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )
