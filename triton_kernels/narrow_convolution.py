"""Convolutions of images with few channels, such as the first of a network, and input gradients of those with few
outputs.

    result[pixel, o] = sum over taps and c of input[pixel * stride + the tap's shift, c] * weight[o, c, tap]

cuDNN's tiles are for many channels. Here a program gathers, for a tile of pixels, some taps' channels at a time, and
multiplies them with the weight's. An address is computed once for a pixel and tap, and channels are loaded in runs: of
a power of two that divides their number, and so all their addresses. Images are dense and channels_last, and their
pixels three axes long.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.device import IN_INTERPRETER
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, geometry_of

#: Channels of a tile, and terms: tensor cores multiply no fewer.
_FEWEST, _MOST = 16, 128
#: Pixels of a tile.
_PIXELS = 128
#: Taps and channels of a step, at most; half of them where a run is wide (H200, bfloat16).
_TERMS, _WIDE_RUN = 64, 8


@triton.jit
def narrow_convolution_kernel(
    input,  # [B, Z, Y, X, C]
    weight,  # [taps * C, O]
    result,  # [pixels of all samples, O]
    outputs,  # pixels of a sample's result, along each axis
    sizes,  # of input, along each axis
    pixels,  # of all samples' results
    O: tl.constexpr,  # noqa: E741
    C: tl.constexpr,
    TAPS: tl.constexpr,  # along each axis, as are the following
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,  # taps
    RUN: tl.constexpr,  # channels that are loaded at once: a power of two that divides C
    BLOCK_S: tl.constexpr,  # pixels
):
    """The result's BLOCK_O channels of BLOCK_S pixels."""
    wait_for_launch_before()
    first = tl.program_id(0) * BLOCK_S
    number = first + tl.arange(0, BLOCK_S)
    inside = number < pixels
    x, rest = number % outputs[2], number // outputs[2]
    y, rest = rest % outputs[1], rest // outputs[1]
    z, sample = rest % outputs[0], rest // outputs[0]
    x, y, z = x * STRIDE[2] - PADDING[2], y * STRIDE[1] - PADDING[1], z * STRIDE[0] - PADDING[0]
    corner = input + sample.to(tl.int64) * (sizes[0] * sizes[1] * sizes[2] * C)
    corner += ((z * sizes[1] + y) * sizes[2] + x) * C
    c = tl.arange(0, RUN)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    COUNT: tl.constexpr = TAPS[0] * TAPS[1] * TAPS[2]
    total = tl.zeros((BLOCK_S, BLOCK_O), tl.float32)
    for begin in tl.range(0, COUNT, BLOCK_T, num_stages=1):
        tap = begin + tl.arange(0, BLOCK_T)
        shift_x = tap % TAPS[2] * DILATION[2]
        shift_y = tap // TAPS[2] % TAPS[1] * DILATION[1]
        shift_z = tap // (TAPS[2] * TAPS[1]) * DILATION[0]
        is_there = inside[:, None] & (tap < COUNT)[None, :]
        if TAPS[2] > 1 or PADDING[2] > 0:
            at = x[:, None] + shift_x[None, :]
            is_there &= (at >= 0) & (at < sizes[2])
        if TAPS[1] > 1 or PADDING[1] > 0:
            at = y[:, None] + shift_y[None, :]
            is_there &= (at >= 0) & (at < sizes[1])
        if TAPS[0] > 1 or PADDING[0] > 0:
            at = z[:, None] + shift_z[None, :]
            is_there &= (at >= 0) & (at < sizes[0])
        shift = ((shift_z * sizes[1] + shift_y) * sizes[2] + shift_x) * C
        places = corner[:, None] + shift[None, :]
        k = tl.arange(0, BLOCK_T * RUN)
        is_real = (begin + k // RUN < COUNT)[:, None] & (o < O)[None, :]
        for part in tl.static_range(C // RUN):
            values = tl.load(places[:, :, None] + (part * RUN + c)[None, None, :], mask=is_there[:, :, None], other=0.0)
            row = (begin + k // RUN) * C + part * RUN + k % RUN
            factors = tl.load(weight + row[:, None] * O + o[None, :], mask=is_real, other=0.0)
            values = tl.reshape(values, (BLOCK_S, BLOCK_T * RUN))
            if IN_INTERPRETER:  # which would multiply the bit patterns of bfloat16 numbers
                values, factors = values.to(tl.float32), factors.to(tl.float32)
            total = tl.dot(values, factors, total)
    target = result + tl.cast(first, tl.int64) * O + (tl.arange(0, BLOCK_S) * O)[:, None] + o[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=inside[:, None] & (o < O)[None, :])


def narrow_convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    result: torch.Tensor,
    axes: tuple[ConvolvedAxis, ConvolvedAxis, ConvolvedAxis],
) -> None:
    """result [pixels, O] = the convolution of input [B, S, C], both dense, with weight [taps * C, O].

    All are of one 16-bit dtype, and sums are float32's. There are less than 2^31 pixels. A sample of the input has at
    most 2^30 elements, with what it would have as far as there are outputs and taps.
    """
    (pixels, channels), C = result.shape, input.shape[-1]
    taps = axes[0].taps * axes[1].taps * axes[2].taps
    run, block_o = C & -C, min(_MOST, max(_FEWEST, next_power_of_2(channels)))
    wide = block_o // _MOST + 1  # the registers of many channels are as many as of twice the terms
    most = _TERMS // wide if run == 1 else _TERMS if run < _WIDE_RUN else _TERMS // 2
    block_t = max(_FEWEST // run, min(most // run, next_power_of_2(taps)), 1)
    block_s = _PIXELS if block_t * run * wide < _TERMS else _PIXELS // 2
    launch(
        narrow_convolution_kernel,
        (blocks_of(pixels, block_s), blocks_of(channels, block_o)),
        input.device,
        input,
        weight,
        result,
        tuple(axis.outputs for axis in axes),
        tuple(axis.size for axis in axes),
        pixels,
        O=channels,
        C=C,
        **geometry_of(axes),
        BLOCK_O=block_o,
        BLOCK_T=block_t,
        RUN=run,
        BLOCK_S=block_s,
        num_warps=4,
    )
