"""Stride-1 convolution of images of any dtype, strides and size, for what the faster kernels do not take.

output[n, o, y, x] = bias[o] + sum over ky, kx, c of
                     weight[ky, kx, o, c] * input[n, c, y + sy + ky * dy, x + sx + kx * dx]   (0 outside the image)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import Chain, apply_steps, load_vectors
from triton_kernels.device import IN_INTERPRETER
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.launch import launch, wait_for_launch_before


@dataclass(frozen=True)
class StrideOneConvolution:
    """Taps (rows, columns), their dilation, and the offset of the first tap from the output's pixel."""

    kernel_size: tuple[int, int]
    dilation: tuple[int, int]
    shift: tuple[int, int]


@dataclass(frozen=True)
class ConvolutionConfig:
    """Pixels and output channels of a tile, and input channels of a step. Four warps would spill registers."""

    block_pixels: int = 128
    block_o: int = 64
    block_c: int = 32
    num_warps: int = 8
    num_stages: int = 3

    def tiles(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_pixels)

    @classmethod
    def fit(cls, in_channels: int, out_channels: int) -> "ConvolutionConfig":
        """Blocks no wider than the channels need."""
        block_c, block_o = (max(16, next_power_of_2(channels)) for channels in (in_channels, out_channels))
        return cls(block_o=min(64, block_o), block_c=min(32, block_c))


@triton.jit
def convolution_kernel(
    input,  # [N, C, H, W]
    input_strides,
    weight,  # [KH, KW, O, C], contiguous
    bias,  # [O] or None
    output,  # [N, O, OH, OW]
    output_strides,
    counts,  # [N, tiles]
    means,  # [N, tiles, O]; None where no statistics are wanted
    m2s,  # [N, tiles, O]
    operands,  # of the chain's steps
    tiles,  # of a sample's pixels
    in_channels,
    in_height,
    in_width,
    out_channels,
    out_height,
    out_width,
    shift_y,
    shift_x,
    dilation_y,
    dilation_x,
    CHAIN: tl.constexpr,
    TAP_ROWS: tl.constexpr,
    TAP_COLUMNS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile per program: neighbouring pixels of a sample's output, row after row, by BLOCK_O channels."""
    wait_for_launch_before()
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * BLOCK_PIXELS
    pixel = first + tl.arange(0, BLOCK_PIXELS)
    y = pixel // out_width
    x = pixel % out_width
    pixel_inside = pixel < out_height * out_width
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    o_inside = o < out_channels
    accumulator = tl.zeros((BLOCK_PIXELS, BLOCK_O), tl.float32)
    steps = tl.cdiv(in_channels, BLOCK_C)
    for turn in range(TAP_ROWS * TAP_COLUMNS * steps):
        tap = turn // steps
        c = turn % steps * BLOCK_C + tl.arange(0, BLOCK_C)
        source_y = y + shift_y + tap // TAP_COLUMNS * dilation_y
        source_x = x + shift_x + tap % TAP_COLUMNS * dilation_x
        inside = pixel_inside & (source_y >= 0) & (source_y < in_height) & (source_x >= 0) & (source_x < in_width)
        source = source_y.to(tl.int64) * input_strides[2] + source_x.to(tl.int64) * input_strides[3]
        offsets = source[:, None] + (c.to(tl.int64) * input_strides[1])[None, :]
        mask = inside[:, None] & (c < in_channels)[None, :]
        a = tl.load(input + sample * input_strides[0] + offsets, mask=mask, other=0.0)
        row = tl.cast(tap, tl.int64) * out_channels + o
        mask = o_inside[:, None] & (c < in_channels)[None, :]
        b = tl.load(weight + row[:, None] * in_channels + c[None, :], mask=mask, other=0.0)
        if IN_INTERPRETER:
            a, b = a.to(tl.float32), b.to(tl.float32)
        accumulator = tl.dot(a, b.T, accumulator, input_precision=INPUT_PRECISION)
    if bias is not None:
        accumulator += tl.load(bias + o, mask=o_inside, other=0.0).to(tl.float32)[None, :]
    if CHAIN is not None:
        loaded = load_vectors(operands, o[None, :], o_inside[None, :], CHAIN)
        accumulator = apply_steps(accumulator, loaded, CHAIN, 1, len(CHAIN.biases))
    values = accumulator.to(output.dtype.element_ty)
    offsets = y.to(tl.int64) * output_strides[2] + x.to(tl.int64) * output_strides[3]
    offsets = offsets[:, None] + (o.to(tl.int64) * output_strides[1])[None, :]
    tl.store(output + sample * output_strides[0] + offsets, values, mask=pixel_inside[:, None] & o_inside[None, :])
    if means is not None:
        count = tl.minimum(out_height * out_width - first, BLOCK_PIXELS)
        activated = apply_steps(values.to(tl.float32), loaded, CHAIN, len(CHAIN.biases), CHAIN.norm_place)
        activated = tl.where(pixel_inside[:, None], activated, 0.0)
        mean = tl.sum(activated, 0) / count
        centred = tl.where(pixel_inside[:, None], activated - mean[None, :], 0.0)
        target = tl.program_id(0).to(tl.int64) * out_channels + o
        tl.store(means + target, mean, mask=o_inside)
        tl.store(m2s + target, tl.sum(centred * centred, 0), mask=o_inside)
        tl.store(counts + tl.program_id(0), tl.cast(count, tl.float32))


def check_statistics(chain: Chain, operands: Sequence[Any]) -> None:
    """Whether a convolution can compute the statistics of the chain's norm: tensors before it have other tiles."""
    for step, operand in zip(chain.steps[: chain.norm_place], operands, strict=False):
        if step.operand in ("sample", "tensor") and operand is not None:
            raise NotImplementedError(
                f"statistics of {step.name} with a {step.operand}; image_statistics computes them"
            )


def convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    convolution: StrideOneConvolution,
    config: ConvolutionConfig,
    *,
    output: torch.Tensor,
    partials: PartialStatistics | None = None,
    chain: Chain | None = None,
    operands: Sequence[Any] = (),
    input_precision: str = "ieee",
) -> None:
    """Write the convolution to ``output`` [N, O, OH, OW] and, if given, the statistics for a norm to ``partials``.

    ``input`` [N, C, H, W] and ``output`` may have any strides. ``weight`` is [KH, KW, O, C] in the input's dtype, and
    contiguous. ``partials`` are over tiles of ``config.block_pixels``, and of what the norm of ``chain`` takes; with
    ``operands``, the first of which is ``bias``, its further biases are added too. ``input_precision`` is ``tl.dot``'s.
    """
    N, channels, height, width = output.shape
    if output.numel() == 0:
        return
    if chain is not None:
        check_statistics(chain, operands)
    tiles = config.tiles(height * width)
    launch(
        convolution_kernel,
        (N * tiles, blocks_of(channels, config.block_o)),
        input.device,
        input,
        input.stride(),
        weight,
        bias,
        output,
        output.stride(),
        None if partials is None else partials.counts,
        None if partials is None else partials.means,
        None if partials is None else partials.m2s,
        tuple(operands),
        tiles,
        *input.shape[1:],
        channels,
        height,
        width,
        *convolution.shift,
        *convolution.dilation,
        CHAIN=chain,
        TAP_ROWS=convolution.kernel_size[0],
        TAP_COLUMNS=convolution.kernel_size[1],
        INPUT_PRECISION=input_precision,
        BLOCK_PIXELS=config.block_pixels,
        BLOCK_O=config.block_o,
        BLOCK_C=config.block_c,
        config=config,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
