"""The weight gradient of a convolution with few taps and channels, such as the first of a network for images.

    dW[o, tap, c] = sum over samples and output pixels of gradient[o, pixel] * input[c, pixel * stride + tap's shift]

This is a product whose columns are taps and channels together, and whose sum is long. Tiles for many channels are
mostly empty there, and too few to fill a GPU. Here a program gathers the columns from the input, for a share of the
pixels. Shares are added up in a second launch, in a fixed order. Images are [B, C, S] (see ``image_tiles``), whose
pixels are three axes long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import add_up
from triton_kernels.device import IN_INTERPRETER, multiprocessor_count
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.image_tiles import as_image, pixels_of_image
from triton_kernels.launch import launch, wait_for_launch_before

#: Channels, and columns, of a tile: tensor cores multiply no fewer.
_FEWEST, _MOST = 16, 128
#: Pixels of a tile.
_PIXELS = 64
#: Columns of a tile whose values are loaded one by one, for their registers.
_MOST_OF_SINGLE = 64
_PROGRAMS_PER_MULTIPROCESSOR = 4
#: Beyond any axis.
FAR = tl.constexpr(2**30)


@dataclass(frozen=True)
class ConvolvedAxis:
    """One axis, whose tap ``t`` of an output is at input ``output * stride + t * dilation - padding``."""

    size: int
    outputs: int
    taps: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1


def geometry_of(axes: Sequence[ConvolvedAxis]) -> dict[str, Any]:
    """What kernels are compiled for, by their arguments' names."""
    return {
        "TAPS": tuple(axis.taps for axis in axes),
        "STRIDE": tuple(axis.stride for axis in axes),
        "PADDING": tuple(axis.padding for axis in axes),
        "DILATION": tuple(axis.dilation for axis in axes),
    }


@triton.jit
def shift_along(tap, TAPS: tl.constexpr, DILATION: tl.constexpr, PADDING: tl.constexpr):
    """Where taps are along an axis that has TAPS of them, and what is left of the taps' numbers."""
    return tap % TAPS * DILATION - PADDING, tap // TAPS


@triton.jit
def narrow_weight_gradient_kernel(
    gradient,  # an image of O channels
    input,  # an image of C channels
    partials,  # [shares, O, columns], float32
    outputs,  # pixels of gradient, along each axis
    sizes,  # of input, along each axis
    tiles,  # of pixels
    tiles_of_share,
    COLUMNS: tl.constexpr,  # taps and channels
    O: tl.constexpr,  # noqa: E741
    C: tl.constexpr,
    TAPS: tl.constexpr,  # along each axis, as are the following
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns
    BLOCK_S: tl.constexpr,  # pixels of a line
):
    """The gradient of BLOCK_O channels and BLOCK_N columns, over a share of the tiles."""
    wait_for_launch_before()
    share, first_o = tl.program_id(0), tl.program_id(2) * BLOCK_O
    o = first_o + tl.arange(0, BLOCK_O)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    shift_x, rest = shift_along(column // C, TAPS[2], DILATION[2], PADDING[2])
    shift_y, rest = shift_along(rest, TAPS[1], DILATION[1], PADDING[1])
    shift_z, rest = shift_along(rest, TAPS[0], DILATION[0], PADDING[0])
    tensor, strides, units = input
    of_pixel = strides[2] * units[2]
    shift = ((shift_z * sizes[1] + shift_y) * sizes[2] + shift_x) * of_pixel + column % C * (strides[1] * units[1])
    is_real = column < COLUMNS
    total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    tiles_of_line = tl.cdiv(outputs[2], BLOCK_S)
    begin = share * tiles_of_share
    for tile in tl.range(begin, tl.minimum(begin + tiles_of_share, tiles), num_stages=STAGES):
        row = tile // tiles_of_line
        x = tile % tiles_of_line * BLOCK_S + tl.arange(0, BLOCK_S)
        y, z, sample = row % outputs[1], row // outputs[1] % outputs[0], row // (outputs[1] * outputs[0])
        pixels = (z * outputs[1] + y) * outputs[2] + x
        inside = (o < O)[:, None] & (x < outputs[2])[None, :]
        of_output = tl.load(pixels_of_image(gradient, (sample, first_o), pixels, BLOCK_O), mask=inside, other=0.0)
        z, y = z * STRIDE[0], y * STRIDE[1]
        x = tl.where(x < outputs[2], x * STRIDE[2], FAR)  # where no tap is in the image: 0 * inf would be NaN
        is_there = is_real & (z + shift_z >= 0) & (z + shift_z < sizes[0])
        is_there &= (y + shift_y >= 0) & (y + shift_y < sizes[1])
        place = x[:, None] + shift_x[None, :]
        inside = is_there[None, :] & (place >= 0) & (place < sizes[2])
        corner = tensor + tl.cast(sample, tl.int64) * strides[0] * units[0] + (z * sizes[1] + y) * sizes[2] * of_pixel
        values = tl.load(corner + ((x * of_pixel)[:, None] + shift[None, :]), mask=inside, other=0.0)
        if IN_INTERPRETER:  # which would multiply the bit patterns of bfloat16 numbers
            of_output, values = of_output.to(tl.float32), values.to(tl.float32)
        total = tl.dot(of_output, values, total)
    target = (share * O + o)[:, None] * COLUMNS + column[None, :]
    tl.store(partials + target, total, mask=(o < O)[:, None] & is_real[None, :])


def narrow_weight_gradient(
    gradient: torch.Tensor,
    input: torch.Tensor,
    target: torch.Tensor,
    axes: tuple[ConvolvedAxis, ConvolvedAxis, ConvolvedAxis],
) -> None:
    """target [O, taps, C] = the weight's gradient, from that of the outputs [B, O, S'] and the input [B, C, S].

    Both are of one 16-bit dtype, and sums are float32's. A sample of the input, with what its padding would take in
    memory, has at most 2^30 elements.
    """
    (B, channels, _), C = gradient.shape, input.shape[1]
    tiles = B * axes[0].outputs * axes[1].outputs * blocks_of(axes[2].outputs, _PIXELS)
    columns = target.numel() // channels
    most = _MOST if C % 2 == 0 else _MOST_OF_SINGLE
    block_o, block_n = (
        min(limit, max(_FEWEST, next_power_of_2(size))) for limit, size in ((_MOST, channels), (most, columns))
    )
    blocks = blocks_of(columns, block_n), blocks_of(channels, block_o)
    programs = multiprocessor_count(input.device) * _PROGRAMS_PER_MULTIPROCESSOR
    tiles_of_share = max(1, blocks_of(tiles, max(1, programs // (blocks[0] * blocks[1]))))  # of no samples, too
    shares = blocks_of(tiles, tiles_of_share)
    partials = torch.empty(shares, target.numel(), dtype=torch.float32, device=input.device)
    launch(
        narrow_weight_gradient_kernel,
        (shares, *blocks),
        input.device,
        as_image(gradient),
        as_image(input),
        partials,
        tuple(axis.outputs for axis in axes),
        tuple(axis.size for axis in axes),
        tiles,
        tiles_of_share,
        COLUMNS=columns,
        O=channels,
        C=C,
        **geometry_of(axes),
        STAGES=3,
        BLOCK_O=block_o,
        BLOCK_N=block_n,
        BLOCK_S=_PIXELS,
        num_warps=4,
    )
    add_up((partials,), (target.view(-1),))
