"""Group norm of matrices whose groups fit one program's registers: one pass forward, one pass backward.

Values are [M, C] with ``num_groups`` groups of GROUP_SIZE neighbouring columns. A tile is [BLOCK_M, BLOCK_G,
BLOCK_GROUP]: rows, groups, and the members of a group padded to a power of two. CHAIN is all that is done with them;
the product's bias is among its operands only where it is not in the values yet. Of a CHAIN without a norm, a column is
a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import (
    Chain,
    add_gradients,
    added,
    apply_steps,
    load_tensors,
    load_vectors,
    no_sums,
    steps_gradient,
    store_gradients,
)
from triton_kernels.column_sums import add_up, store_sums
from triton_kernels.grid import blocks_of, grid_of, indices, next_power_of_2, second_place
from triton_kernels.group_statistics import normalize_groups
from triton_kernels.launch import launch, wait_for_launch_before

#: The widest group that one program holds in registers.
WIDEST_GROUP = 8192


@dataclass(frozen=True)
class GroupNormConfig:
    """A program takes ``block_columns`` columns (at least one group) and ``block_m`` rows at a time.

    In the backward pass it loops over ``rows_per_program`` rows and adds up its columns' sums.
    """

    block_m: int
    block_columns: int
    rows_per_program: int
    num_warps: int = 8
    #: Of how many tiles it loads in the backward pass, the one that it works on among them.
    num_stages: int = 1

    def shared_memory(self, group_size: int, element_size: int) -> int:
        """Bytes of shared memory for the tiles of the input and of the output's gradient that are on their way."""
        return (self.num_stages - 1) * 2 * math.prod(self.blocks(group_size).values()) * element_size

    def whole_axis(self, group_size: int) -> int | None:
        """The axis of a tile's rows, where a thread has its columns of all of them: the others' columns fill all
        threads, eight a thread."""
        blocks = self.blocks(group_size)
        return 0 if blocks["BLOCK_G"] * blocks["BLOCK_GROUP"] >= 8 * 32 * self.num_warps else None

    def blocks(self, group_size: int) -> dict[str, Any]:
        block_group = next_power_of_2(group_size)
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_G": max(1, self.block_columns // block_group),
            "BLOCK_GROUP": block_group,
        }


#: For pointwise functions alone, forward.
_POINTWISE = GroupNormConfig(block_m=16, block_columns=128, rows_per_program=16, num_warps=4)
#: Backward: the most rows, and tiles for them. Of few rows tiles have few columns, for more programs.
_POINTWISE_BACKWARD = ((512, (64, 32)), (2048, (32, 64)), (math.inf, (16, 128)))
_POINTWISE_PROGRAMS = 512


def _pointwise_backward_config(M: int, C: int, element_size: int) -> GroupNormConfig:
    """Some four programs a multiprocessor: more would be more sums to add up. (With 64 rows a program and one tile for
    all, 64 x 1024 took 11.6 us for 6.0, 1024 x 8192 39 for 29 and 4096 x 4096 67 for 48: SiLU, two vectors, bfloat16,
    H200.) In float32 they load ahead: 66 us for 80 at 6272 x 3072, 45 for 51 at 24576 x 384 (GELU, H200)."""
    block_m, block_columns = next(tile for most, tile in _POINTWISE_BACKWARD if most >= M)
    chunks = max(1, _POINTWISE_PROGRAMS // blocks_of(C, block_columns))
    rows = blocks_of(blocks_of(M, chunks), block_m) * block_m
    stages = 3 if element_size == 4 and M > _POINTWISE_BACKWARD[-2][0] else 1
    return GroupNormConfig(block_m, block_columns, max(rows, block_m), num_warps=4, num_stages=stages)


@triton.jit
def place_tile(
    row,
    group,
    M,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """The tile at (row, group): columns [1, BLOCK_G, BLOCK_GROUP], which of them are real, offsets and mask."""
    rows = (row + tl.arange(0, BLOCK_M))[:, None, None]
    groups = (group + tl.arange(0, BLOCK_G))[None, :, None]
    members = tl.arange(0, BLOCK_GROUP)[None, None, :]
    columns = groups * GROUP_SIZE + members
    real = (groups < num_groups) & (members < GROUP_SIZE)
    offsets = rows.to(tl.int64) * (num_groups * GROUP_SIZE) + columns
    return columns, real, offsets, real & (rows < M)


@triton.jit
def pointers_at(matrix, offsets, inside):
    return matrix + offsets


@triton.jit
def group_norm_kernel(
    input,  # [M, C]
    operands,  # of the chain's steps
    output,
    saved,
    M,
    num_groups,
    eps,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """output = CHAIN of the input; with a reduction, output and saved are this tile's part of it."""
    wait_for_launch_before()
    row = tl.program_id(0) * BLOCK_M
    tile = second_place()
    group = tile * BLOCK_G
    columns, real, offsets, inside = place_tile(row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP)
    loaded = load_tensors(load_vectors(operands, columns, real, CHAIN), offsets, inside, pointers_at, CHAIN)
    values = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    y = apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place)
    if CHAIN.norm != "":
        normalized, rstd = normalize_groups(y, None if BLOCK_GROUP == GROUP_SIZE else real, eps, GROUP_SIZE)
        y = apply_steps(normalized, loaded, CHAIN, CHAIN.norm_place, len(CHAIN.steps))
    if CHAIN.reduction is not None:
        row = tl.where(group < num_groups, row, M)  # past the last group there is no tile to store
        CHAIN.reduction.store(y, normalized, rstd, real, row, group, tile, M, output, saved, indices, GROUP_SIZE)
    else:
        tl.store(output + offsets, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def group_norm_backward_kernel(
    output_gradient,  # [M, C]
    input,  # [M, C]
    operands,  # of the chain's steps
    input_gradient,  # [M, C]
    bias_sums,  # of input_gradient over a chunk's rows: one of [chunks, C] or None for each of the chain's biases
    targets,  # of the other operands' gradients: likewise for vectors, [M, C] for tensors
    M,
    num_groups,
    eps,
    rows_per_program,
    CHAIN: tl.constexpr,
    KINDS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    AXIS: tl.constexpr,
):
    """input_gradient of CHAIN, and the gradients of its operands, in one pass. KINDS says what ``targets`` are.

    With a the value before the norm, x = (a - mean) * rstd and dx the gradient at x (Wu and He, Group Normalization,
    2018): da = rstd * (dx - mean(dx) - x * mean(dx * x)), with means over each group.
    """
    wait_for_launch_before()
    chunk = tl.program_id(0)
    group = second_place() * BLOCK_G
    input_sum = tl.zeros((BLOCK_M if AXIS is None else 1, BLOCK_G, BLOCK_GROUP), tl.float32)
    sums = no_sums(input_sum, KINDS)
    first_row = chunk * rows_per_program
    columns, real, offsets, inside = place_tile(
        first_row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP
    )
    vectors = load_vectors(operands, columns, real, CHAIN, WIDE=False)
    for row in tl.range(first_row, tl.minimum(first_row + rows_per_program, M), BLOCK_M, num_stages=STAGES):
        columns, real, offsets, inside = place_tile(
            row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP
        )
        loaded = load_tensors(vectors, offsets, inside, pointers_at, CHAIN)
        z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
        z = apply_steps(z, loaded, CHAIN, 0, len(CHAIN.biases))
        dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        of_last = ()
        if CHAIN.norm != "":
            y = apply_steps(z, loaded, CHAIN, len(CHAIN.biases), CHAIN.norm_place)
            normalized, rstd = normalize_groups(y, None if BLOCK_GROUP == GROUP_SIZE else real, eps, GROUP_SIZE)
            dx, of_last = steps_gradient(dy, normalized, loaded, CHAIN, CHAIN.norm_place, len(CHAIN.steps))
            if BLOCK_GROUP != GROUP_SIZE:  # in the padding a gradient may be NaN, as that of 0 / 0
                dx = tl.where(inside, dx, 0.0)
            mean = tl.expand_dims(tl.sum(dx, 2) / GROUP_SIZE, 2)
            projection = tl.expand_dims(tl.sum(dx * normalized, 2) / GROUP_SIZE, 2)
            dy = tl.expand_dims(rstd, 2) * (dx - mean - normalized * projection)
        dz, of_activation = steps_gradient(dy, z, loaded, CHAIN, len(CHAIN.biases), CHAIN.norm_place)
        tl.store(input_gradient + offsets, dz.to(input_gradient.dtype.element_ty), mask=inside)
        input_sum = added(input_sum, tl.where(inside, dz, 0.0), AXIS)
        sums = add_gradients(sums, of_activation + of_last, targets, offsets, inside, pointers_at, KINDS, AXIS)
    columns = tl.reshape(columns, (BLOCK_G, BLOCK_GROUP))
    real = tl.reshape(real, (BLOCK_G, BLOCK_GROUP))
    place = chunk.to(tl.int64) * (num_groups * GROUP_SIZE) + columns
    for i in tl.static_range(len(CHAIN.biases)):
        store_sums(bias_sums[i], place, tl.sum(input_sum, 0), real)
    store_gradients(sums, targets, place, real, 0, KINDS)


def column_tiles(channels: int, group_size: int, config: GroupNormConfig) -> int:
    """The number of tiles that a row is divided into."""
    return blocks_of(channels // group_size, config.blocks(group_size)["BLOCK_G"])


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    chain: Chain,
    operands: Sequence[Any],
    eps: float,
    config: GroupNormConfig,
    *,
    output: torch.Tensor,
    saved: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """output = the chain of ``input`` [M, C], contiguous; ``operands`` has one entry a step.

    With a reduction, ``output`` and ``saved`` are what it stores of each of ``column_tiles`` tiles.
    """
    M, C = input.shape
    group_size = C // num_groups
    launch(
        group_norm_kernel,
        grid_of(blocks_of(M, config.block_m), column_tiles(C, group_size, config)),
        input.device,
        input,
        tuple(operands),
        output,
        saved,
        M,
        num_groups,
        eps,
        CHAIN=chain,
        GROUP_SIZE=group_size,
        **config.blocks(group_size),
        config=config,
        num_warps=config.num_warps,
    )


def group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    num_groups: int,
    chain: Chain,
    operands: Sequence[Any],
    eps: float,
    config: GroupNormConfig,
    *,
    input_gradient: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Gradients of ``group_norm``. All matrices are [M, C] and contiguous.

    ``gradients`` has one entry a step, in any float dtype: the operand's gradient, or None where it is not wanted. That
    of each of the chain's biases is the sum of ``input_gradient`` over the rows, whether or not it is among
    ``operands``.
    """
    M, C = input.shape
    group_size = C // num_groups
    chunks = blocks_of(M, config.rows_per_program)
    bias_sums, targets, kinds, partials = chain.targets(operands, gradients, chunks)
    launch(
        group_norm_backward_kernel,
        grid_of(chunks, column_tiles(C, group_size, config)),
        input.device,
        output_gradient,
        input,
        tuple(operands),
        input_gradient,
        bias_sums,
        targets,
        M,
        num_groups,
        eps,
        config.rows_per_program,
        CHAIN=chain,
        KINDS=kinds,
        GROUP_SIZE=group_size,
        # Tensors would have to fit into shared memory too.
        STAGES=1 if chain.takes_tensors else config.num_stages,
        AXIS=config.whole_axis(group_size),
        **config.blocks(group_size),
        config=config,
        num_warps=config.num_warps,
    )
    add_up(partials, gradients)


def pointwise(input: torch.Tensor, chain: Chain, operands: Sequence[Any], *, output: torch.Tensor) -> None:
    """output = the chain of ``input``, both [M, C] and contiguous. The chain is pointwise functions alone."""
    if C := input.shape[1]:
        group_norm(input, C, chain, operands, 0.0, _POINTWISE, output=output)


def pointwise_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    *,
    input_gradient: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Gradients of ``pointwise``, as those of ``group_norm``."""
    M, C = input.shape
    if C:
        config = _pointwise_backward_config(M, C, input.element_size())
        arguments = (output_gradient, input, C, chain, operands, 0.0, config)
        group_norm_backward(*arguments, input_gradient=input_gradient, gradients=gradients)
