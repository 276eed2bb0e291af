"""Copies of images between memory formats, tile by tile, so that both sides are read and written in full lines.

The copy can round the numbers, or split float32 numbers into a bfloat16 number and another one for the remainder.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of, grid_of
from triton_kernels.image_tiles import ImageNormConfig, size_unit, strides_in_units, tile_of_program, tile_offsets
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import identity

#: The largest finite bfloat16.
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def finite_bfloat16(value, min_val, max_val):
    """``value`` (float32) limited to bfloat16's range, so that it does not round to infinity; 0 where it is not
    finite."""
    bounded = tl.minimum(tl.maximum(value, -_LARGEST_BFLOAT16), _LARGEST_BFLOAT16)
    return tl.where(tl.abs(value) < float("inf"), bounded, 0.0)


@triton.jit
def copy_kernel(
    source,  # [B, C, S]
    source_strides,
    target,  # [B, C, S]
    rest,  # [B, C, S] or None: source - target, for a float32 source
    target_strides,  # of both
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
    """target = TRANSFORM(source) and rest = source - target; one tile per program."""
    wait_for_launch_before()
    pixels = pixels * PIXEL_UNIT
    sample, channel, pixel, _, inside = tile_of_program(tiles, channels, pixels, BLOCK_C, BLOCK_S)
    offsets = tile_offsets(source_strides, SOURCE_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(source + offsets, mask=inside, other=0.0)
    offsets = tile_offsets(target_strides, TARGET_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    copied = TRANSFORM(values, 0.0, 0.0).to(target.dtype.element_ty)
    tl.store(target + offsets, copied, mask=inside)
    if rest is not None:
        tl.store(rest + offsets, (values - copied.to(tl.float32)).to(rest.dtype.element_ty), mask=inside)


def copy_image(
    source: torch.Tensor,
    target: torch.Tensor,
    config: ImageNormConfig,
    transform: triton.runtime.JITFunction = identity,
    *,
    rest: torch.Tensor | None = None,
) -> None:
    """target = transform(source), both [B, C, S] with any strides, converted to the target's dtype.

    ``transform`` is a function as ``triton_kernels.pointwise`` describes them. It takes values of the source's dtype.
    ``rest`` has the target's strides and becomes source - target for a float32 source.
    """
    if source.numel() == 0:
        return
    B, C, S = source.shape
    tiles = config.tiles(S)
    source_strides, source_units = strides_in_units(source.stride())
    target_strides, target_units = strides_in_units(target.stride())
    unit = size_unit(S)
    launch(
        copy_kernel,
        grid_of(B * tiles, blocks_of(C, config.block_c)),
        source.device,
        source,
        source_strides,
        target,
        rest,
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
    """Split source: high = source in bfloat16, low = source - high in bfloat16. high + low is within 2**-17 of source.

    All are [B, C, S] with any strides; ``high`` and ``low`` have the same strides. source is float32. (Where ``low`` is
    subnormal, the sum is within 2**-134.)

    A product of two split images is high * high' + high * low' + low * high'. It must be infinite or NaN where the
    product of the images is. So where the source is not finite, high is 0 and low is the source. Then low * high' has
    the right value and high * low' is 0. An infinite high would give NaN with a low' that is 0 or has the opposite
    sign.
    """
    copy_image(source, high, config, finite_bfloat16, rest=low)
