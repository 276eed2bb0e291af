"""Copy of images between memory formats, tile by tile, so that both sides are read and written in whole lines."""

import torch
import triton
import triton.language as tl

from triton_kernels.device import on_device_of
from triton_kernels.grid import grid_of, second_place
from triton_kernels.image_group_norm import ImageNormConfig, size_unit, strides_in_units, tile_offsets


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
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """target = source, a tile a program"""
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // tiles
    pixel = tl.program_id(0) % tiles * BLOCK_S
    channel = second_place() * BLOCK_C
    inside = (channel + tl.arange(0, BLOCK_C) < channels)[:, None]
    inside = inside & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
    offsets = tile_offsets(source_strides, SOURCE_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(source + offsets, mask=inside, other=0.0)
    offsets = tile_offsets(target_strides, TARGET_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    tl.store(target + offsets, values.to(target.dtype.element_ty), mask=inside)


def copy_image(source: torch.Tensor, target: torch.Tensor, config: ImageNormConfig) -> None:
    """target = source, both [B, C, S] with any strides, converted to the target's dtype."""
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
            PIXEL_UNIT=unit,
            BLOCK_C=config.block_c,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )
