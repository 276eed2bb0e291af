"""A pointwise function of a matrix plus a bias over its columns, forward and backward."""

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import add_up, empty_partials, store_sums
from triton_kernels.grid import blocks_of, grid_of, second_place
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import Pointwise

_BLOCK_M = 16
_BLOCK_C = 128
_ROWS_PER_PROGRAM = 64


@triton.jit
def bias_pointwise_kernel(
    input,  # [M, C]
    bias,  # [C] or None
    output,  # [M, C]
    M,
    C,
    min_val,
    max_val,
    FUNCTION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """output = FUNCTION(input + bias)"""
    wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = second_place() * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < M)[:, None] & (columns < C)[None, :]
    offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
    z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    tl.store(output + offsets, FUNCTION(z, min_val, max_val).to(output.dtype.element_ty), mask=inside)


@triton.jit
def bias_pointwise_backward_kernel(
    output_gradient,  # [M, C]
    input,  # [M, C]
    bias,  # [C] or None
    input_gradient,  # [M, C]
    sums,  # [chunks, C] or None: sums of input_gradient over a chunk's rows
    M,
    C,
    min_val,
    max_val,
    rows_per_program,
    GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """input_gradient = GRADIENT(output_gradient, input + bias), and its column sums in the same pass."""
    wait_for_launch_before()
    chunk = tl.program_id(0)
    columns = second_place() * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    shift = tl.zeros((BLOCK_C,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)
    first_row = chunk * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, M), BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (columns < C)[None, :]
        offsets = rows.to(tl.int64)[:, None] * C + columns[None, :]
        z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        dz = GRADIENT(dy, z, min_val, max_val)
        tl.store(input_gradient + offsets, dz.to(input_gradient.dtype.element_ty), mask=inside)
        total += tl.where(inside, dz, 0.0)
    store_sums(sums, chunk.to(tl.int64) * C + columns, tl.sum(total, 0), columns < C)


def bias_pointwise(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    pointwise: Pointwise,
    bounds: tuple[float, float],
    *,
    output: torch.Tensor,
) -> None:
    """output [M, C] = pointwise(input + bias), both matrices contiguous."""
    M, C = input.shape
    if M == 0 or C == 0:
        return
    launch(
        bias_pointwise_kernel,
        grid_of(blocks_of(M, _BLOCK_M), blocks_of(C, _BLOCK_C)),
        input.device,
        input,
        bias,
        output,
        M,
        C,
        *bounds,
        FUNCTION=pointwise.function,
        BLOCK_M=_BLOCK_M,
        BLOCK_C=_BLOCK_C,
    )


def bias_pointwise_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    pointwise: Pointwise,
    bounds: tuple[float, float],
    *,
    input_gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
) -> None:
    """Gradients of ``bias_pointwise``. All matrices are [M, C] and contiguous.

    ``bias_gradient`` is [C] in any float dtype, or None where it is not wanted.
    """
    M, C = input.shape
    if C == 0:
        return
    chunks = blocks_of(M, _ROWS_PER_PROGRAM)
    partials = empty_partials((bias_gradient,), chunks)
    if chunks:
        launch(
            bias_pointwise_backward_kernel,
            grid_of(chunks, blocks_of(C, _BLOCK_C)),
            input.device,
            output_gradient,
            input,
            bias,
            input_gradient,
            *partials,
            M,
            C,
            *bounds,
            _ROWS_PER_PROGRAM,
            GRADIENT=pointwise.gradient,
            BLOCK_M=_BLOCK_M,
            BLOCK_C=_BLOCK_C,
        )
    add_up(partials, (bias_gradient,))
