"""Copies of images between memory formats, tile by tile, so that both sides are read and written in full lines.

The copy can round the numbers, or split float32 numbers into a bfloat16 number and another one for the remainder.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.image_tiles import (
    ImageNormConfig,
    as_image,
    is_inside,
    launch_tiles,
    load_tile,
    place_of_program,
    store_tile,
)
from triton_kernels.launch import wait_for_launch_before
from triton_kernels.pointwise import identity

#: The largest finite bfloat16.
_LARGEST_BFLOAT16 = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def finite_bfloat16(value, operand):
    """``value`` (float32) limited to bfloat16's range, so that it does not round to infinity; 0 where it is not
    finite."""
    bounded = tl.minimum(tl.maximum(value, -_LARGEST_BFLOAT16), _LARGEST_BFLOAT16)
    return tl.where(tl.abs(value) < float("inf"), bounded, 0.0)


@triton.jit
def copy_kernel(
    source,  # an image
    target,  # an image
    rest,  # an image or None: source - target, for a float32 source
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    TRANSFORM: tl.constexpr,
    BACKWARDS: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """target = TRANSFORM(source) and rest = source - target; one tile per program."""
    wait_for_launch_before()
    pixels = tl.cast(pixels, INDEX) * PIXEL_UNIT
    place, c, real = place_of_program(channels, tiles, BLOCK_S, BLOCK_C, INDEX)
    inside = is_inside(real, place[2], pixels, BLOCK_S)
    values = load_tile(source, place, inside)
    if BACKWARDS:
        place = (place[0], place[1], place[2] + 1 - pixels)
    copied = TRANSFORM(values, None).to(target[0].dtype.element_ty)
    store_tile(target, place, inside, copied)
    if rest is not None:
        store_tile(rest, place, inside, values - copied.to(tl.float32))


def copy_image(
    source: torch.Tensor,
    target: torch.Tensor,
    config: ImageNormConfig,
    transform: triton.runtime.JITFunction = identity,
    *,
    rest: torch.Tensor | None = None,
    backwards: bool = False,
) -> None:
    """target = transform(source), both [B, C, S] with any strides, converted to the target's dtype.

    ``backwards``: the target's first pixel is the source's last one.

    ``transform`` is a function as ``triton_kernels.pointwise`` describes them. It takes values of the source's dtype.
    ``rest`` has the target's strides and becomes source - target for a float32 source.
    """
    launch_tiles(
        copy_kernel,
        source,
        config.tiles(source.shape[2]),
        config,
        as_image(source),
        as_image(target, backwards=backwards),
        None if rest is None else as_image(rest, backwards=backwards),
        TRANSFORM=transform,
        BACKWARDS=backwards,
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
