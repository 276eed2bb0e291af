"""A chain of pointwise functions of a matrix in one pass, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import (
    Chain,
    add_gradients,
    apply_steps,
    load_tensors,
    load_vectors,
    no_sums,
    steps_gradient,
    store_gradients,
)
from triton_kernels.column_sums import add_up, store_sums
from triton_kernels.grid import blocks_of, grid_of, second_place
from triton_kernels.launch import launch, wait_for_launch_before

_BLOCK_M = 16
_BLOCK_C = 128
_ROWS_PER_PROGRAM = 64


@triton.jit
def pointwise_kernel(
    input,  # [M, C]
    operands,  # of the chain's steps
    output,  # [M, C]
    M,
    C,
    CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """output = CHAIN of the input"""
    wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (second_place() * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    inside = (rows < M)[:, None] & (columns < C)
    offsets = rows.to(tl.int64)[:, None] * C + columns
    loaded = load_tensors(load_vectors(operands, columns, columns < C, CHAIN), offsets, inside, CHAIN)
    value = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        output + offsets,
        apply_steps(value, loaded, CHAIN, 0, len(CHAIN.steps)).to(output.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def pointwise_backward_kernel(
    output_gradient,  # [M, C]
    input,  # [M, C]
    operands,  # of the chain's steps
    input_gradient,  # [M, C]
    bias_sums,  # of input_gradient over a chunk's rows: one of [chunks, C] or None for each of the chain's biases
    targets,  # of the other operands' gradients: likewise for vectors, [M, C] for tensors
    M,
    C,
    rows_per_program,
    CHAIN: tl.constexpr,
    KINDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """input_gradient of CHAIN, and the gradients of its operands, in one pass. KINDS says what ``targets`` are."""
    wait_for_launch_before()
    BIASES: tl.constexpr = len(CHAIN.biases)
    NORM: tl.constexpr = BIASES + len(CHAIN.activation)
    chunk = tl.program_id(0)
    columns = (second_place() * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    vectors = load_vectors(operands, columns, columns < C, CHAIN)
    input_sum = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    sums = no_sums(input_sum, KINDS)
    first_row = chunk * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, M), BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & (columns < C)
        offsets = rows.to(tl.int64)[:, None] * C + columns
        loaded = load_tensors(vectors, offsets, inside, CHAIN)
        z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
        z = apply_steps(z, loaded, CHAIN, 0, len(CHAIN.biases))
        dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        dz, gradients = steps_gradient(dy, z, loaded, CHAIN, BIASES, NORM)
        tl.store(input_gradient + offsets, dz.to(input_gradient.dtype.element_ty), mask=inside)
        input_sum += tl.where(inside, dz, 0.0)
        sums = add_gradients(sums, gradients, targets, offsets, inside, KINDS)
    place = chunk.to(tl.int64) * C + columns
    for i in tl.static_range(BIASES):
        store_sums(bias_sums[i], place, tl.sum(input_sum, 0)[None, :], columns < C)
    store_gradients(sums, targets, place, columns < C, KINDS)


def pointwise(input: torch.Tensor, chain: Chain, operands: Sequence[Any], *, output: torch.Tensor) -> None:
    """output = the chain of ``input``, both [M, C] and contiguous. The chain is pointwise functions alone."""
    M, C = input.shape
    if M == 0 or C == 0:
        return
    launch(
        pointwise_kernel,
        grid_of(blocks_of(M, _BLOCK_M), blocks_of(C, _BLOCK_C)),
        input.device,
        input,
        tuple(operands),
        output,
        M,
        C,
        CHAIN=chain,
        BLOCK_M=_BLOCK_M,
        BLOCK_C=_BLOCK_C,
    )


def pointwise_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    *,
    input_gradient: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Gradients of ``pointwise``. All matrices are [M, C] and contiguous.

    ``gradients`` has one entry a step, in any float dtype: the operand's gradient, or None where it is not wanted.
    """
    M, C = input.shape
    if C == 0:
        return
    chunks = blocks_of(M, _ROWS_PER_PROGRAM)
    targets = chain.targets(operands, gradients, chunks)
    if chunks:
        launch(
            pointwise_backward_kernel,
            grid_of(chunks, blocks_of(C, _BLOCK_C)),
            input.device,
            output_gradient,
            input,
            tuple(operands),
            input_gradient,
            targets.bias_sums,
            targets.others,
            M,
            C,
            _ROWS_PER_PROGRAM,
            CHAIN=chain,
            KINDS=targets.kinds,
            BLOCK_M=_BLOCK_M,
            BLOCK_C=_BLOCK_C,
        )
    add_up(targets.partials, gradients)
