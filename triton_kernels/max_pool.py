"""The gradient of max pooling, gathered: each input adds up the windows that chose it.

Images are [B, C, S] (see ``image_tiles``), whose pixels are three axes long. An output keeps the place in its window of
what it is the value of.

Along an axis, input ``stride * q + r - padding`` with 0 <= r < stride is at place ``r + stride * j`` of window
``q - j``. So all inputs of one q have the same windows, and their places in these are constants.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of, grid_of
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, as_image, layout_of, pixels_of_image, place_of_program
from triton_kernels.launch import launch, wait_for_launch_before

#: Channels and q of a tile.
_TILES = {CONTIGUOUS: (2, 256), CHANNELS_LAST: (64, 16)}


@dataclass(frozen=True)
class PooledAxis:
    """One axis, whose window of an output begins at input ``output * stride - padding``."""

    size: int
    outputs: int
    kernel: int
    stride: int
    padding: int

    @property
    def windows(self) -> int:
        """The most windows that an input is in."""
        return blocks_of(self.kernel, self.stride)

    @property
    def quotients(self) -> int:
        """How many q there are."""
        return blocks_of(self.size + self.padding, self.stride)


@triton.jit
def along_axes(index, SIZES: tl.constexpr):
    """An index into three axes of these sizes as one index each."""
    return index // (SIZES[1] * SIZES[2]), index // SIZES[2] % SIZES[1], index % SIZES[2]


@triton.jit
def index_of(along, sizes):
    """One index of what has an index along each of three axes of these sizes, and whether it is there."""
    is_there = (along[0] >= 0) & (along[1] >= 0) & (along[2] >= 0)
    is_there &= (along[0] < sizes[0]) & (along[1] < sizes[1]) & (along[2] < sizes[2])
    return (along[0] * sizes[1] + along[1]) * sizes[2] + along[2], is_there


@triton.jit
def max_pool_backward_kernel(
    gradient,  # of the outputs, an image
    chosen,  # an image, int8: the place in its window of each output's value
    target,  # an image: the gradient of the inputs
    sizes,  # of the inputs, along each axis
    outputs,  # along each axis
    quotients,  # along each axis
    channels,
    tiles,  # of all q
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    WINDOWS: tl.constexpr,  # of each q, along each axis
    ALL_WINDOWS: tl.constexpr,
    ALL_INPUTS: tl.constexpr,  # of each q
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The gradient of the inputs of BLOCK_S q."""
    wait_for_launch_before()
    place, c, real = place_of_program(channels, tiles, BLOCK_S, BLOCK_C, INDEX)
    q = place[2] + tl.arange(0, BLOCK_S)
    z, y, x = q // (quotients[1] * quotients[2]), q // quotients[2] % quotients[1], q % quotients[2]
    found, values = (), ()
    for i in tl.static_range(ALL_WINDOWS):
        before = along_axes(i, WINDOWS)
        window = (z - before[0], y - before[1], x - before[2])
        output, is_there = index_of(window, outputs)
        inside = real[:, None] & is_there[None, :]
        found = found + (tl.load(pixels_of_image(chosen, place, output, BLOCK_C), mask=inside, other=-1),)
        value = tl.load(pixels_of_image(gradient, place, output, BLOCK_C), mask=inside, other=0.0)
        values = values + (value.to(tl.float32),)
    for each in tl.static_range(ALL_INPUTS):
        r = along_axes(each, STRIDE)
        total = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
        for i in tl.static_range(ALL_WINDOWS):
            before = along_axes(i, WINDOWS)
            number = (r[0] + STRIDE[0] * before[0], r[1] + STRIDE[1] * before[1], r[2] + STRIDE[2] * before[2])
            if number[0] < KERNEL[0] and number[1] < KERNEL[1] and number[2] < KERNEL[2]:
                is_chosen = found[i] == (number[0] * KERNEL[1] + number[1]) * KERNEL[2] + number[2]
                total += tl.where(is_chosen, values[i], 0.0)
        input = (
            z * STRIDE[0] + r[0] - PADDING[0],
            y * STRIDE[1] + r[1] - PADDING[1],
            x * STRIDE[2] + r[2] - PADDING[2],
        )
        pixel, is_there = index_of(input, sizes)
        pointers = pixels_of_image(target, place, pixel, BLOCK_C)
        tl.store(pointers, total.to(target[0].dtype.element_ty), mask=real[:, None] & is_there[None, :])


def max_pool_backward(
    gradient: torch.Tensor,
    chosen: torch.Tensor,
    target: torch.Tensor,
    axes: tuple[PooledAxis, PooledAxis, PooledAxis],
) -> None:
    """target [B, C, S] = the gradient of max pooling's inputs, from that of its outputs [B, C, S'].

    ``chosen`` (int8) has their shape: the place in each window, counted along the last axis first. All may have any
    strides.
    """
    B, C, S = target.shape
    block_c, block_s = _TILES[layout_of(target)]
    quotients, windows = ([getattr(axis, name) for axis in axes] for name in ("quotients", "windows"))
    tiles = blocks_of(math.prod(quotients), block_s)
    launch(
        max_pool_backward_kernel,
        grid_of(B * tiles, blocks_of(C, block_c)),
        target.device,
        as_image(gradient),
        as_image(chosen),
        as_image(target),
        tuple([axis.size for axis in axes]),
        tuple([axis.outputs for axis in axes]),
        tuple(quotients),
        C,
        tiles,
        KERNEL=tuple([axis.kernel for axis in axes]),
        STRIDE=tuple([axis.stride for axis in axes]),
        PADDING=tuple([axis.padding for axis in axes]),
        WINDOWS=tuple(windows),
        ALL_WINDOWS=math.prod(windows),
        ALL_INPUTS=math.prod([axis.stride for axis in axes]),
        INDEX=tl.int32 if max(C, S, math.prod(quotients)) < 2**30 else tl.int64,
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=4,
    )
