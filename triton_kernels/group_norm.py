"""Group norm of matrices whose groups fit one program's registers: one pass forward, one pass backward.

Values are [M, C] with ``num_groups`` groups of GROUP_SIZE neighbouring columns. A tile is [BLOCK_M, BLOCK_G,
BLOCK_GROUP]: rows, groups, and the members of a group padded to a power of two. One pointwise function may come before
the norm (ACTIVATION), and one after it (FINAL).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import add_up, empty_partials, store_sums
from triton_kernels.grid import blocks_of, grid_of, indices, next_power_of_2, second_place
from triton_kernels.group_statistics import load_affine, normalize_groups
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import IDENTITY, Pointwise
from triton_kernels.row_minimum import store_row_minimum

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

    def blocks(self, group_size: int) -> dict[str, int]:
        block_group = next_power_of_2(group_size)
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_G": max(1, self.block_columns // block_group),
            "BLOCK_GROUP": block_group,
        }


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
def normalize_tile(values, real, eps, GROUP_SIZE: tl.constexpr):
    """``normalize_groups``, with a mask only where groups are padded."""
    padding = None if values.shape[2] == GROUP_SIZE else real
    return normalize_groups(values, padding, eps, GROUP_SIZE)


@triton.jit
def finish_matrix(y, normalized, rstd, real, offsets, inside, place, output, saved, GROUP_SIZE: tl.constexpr):
    """output = the normalised matrix."""
    tl.store(output + offsets, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def finish_row_minimum(y, normalized, rstd, real, offsets, inside, place, output, saved, GROUP_SIZE: tl.constexpr):
    """output, saved = this tile's part of the row minimum; see ``row_minimum``."""
    row, group, tile, M = place
    store_row_minimum(y, normalized, rstd, real, row, group, tile, M, output, saved, indices, GROUP_SIZE)


@triton.jit
def group_norm_kernel(
    input,  # [M, C]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    output,
    saved,
    M,
    num_groups,
    min_val,
    max_val,
    eps,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    FINISH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """FINISH(FINAL(group_norm(ACTIVATION(input))))"""
    wait_for_launch_before()
    row = tl.program_id(0) * BLOCK_M
    tile = second_place()
    group = tile * BLOCK_G
    columns, real, offsets, inside = place_tile(row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP)
    weight, shift = load_affine(norm_weight, norm_bias, columns, real)
    z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    normalized, rstd = normalize_tile(ACTIVATION(z, min_val, max_val), real, eps, GROUP_SIZE)
    y = FINAL(normalized * weight + shift, min_val, max_val)
    row = tl.where(group < num_groups, row, M)  # past the last group there is no tile to store
    FINISH(y, normalized, rstd, real, offsets, inside, (row, group, tile, M), output, saved, GROUP_SIZE)


@triton.jit
def group_norm_backward_kernel(
    output_gradient,  # [M, C]
    input,  # [M, C]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    input_gradient,  # [M, C]
    sums,  # four of [chunks, C] or None: sums over a chunk's rows of dy * normalized, of dy, of input_gradient twice
    M,
    num_groups,
    min_val,
    max_val,
    eps,
    rows_per_program,
    ACTIVATION: tl.constexpr,
    ACTIVATION_GRADIENT: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """input_gradient of FINAL(group_norm(ACTIVATION(input))), and the column sums, in one pass.

    With a = ACTIVATION(input), x = (a - mean) * rstd and g = weight * dy (Wu and He, Group Normalization, 2018): da =
    rstd * (g - mean(g) - x * mean(g * x)), with means over each group.
    """
    wait_for_launch_before()
    chunk = tl.program_id(0)
    group = second_place() * BLOCK_G
    input_sum = tl.zeros((BLOCK_M, BLOCK_G, BLOCK_GROUP), tl.float32)
    weight_sum = tl.zeros((BLOCK_M, BLOCK_G, BLOCK_GROUP), tl.float32)
    shift_sum = tl.zeros((BLOCK_M, BLOCK_G, BLOCK_GROUP), tl.float32)
    first_row = chunk * rows_per_program
    columns, real, offsets, inside = place_tile(
        first_row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP
    )
    weight, shift = load_affine(norm_weight, norm_bias, columns, real)
    for row in range(first_row, tl.minimum(first_row + rows_per_program, M), BLOCK_M):
        columns, real, offsets, inside = place_tile(
            row, group, M, num_groups, GROUP_SIZE, BLOCK_M, BLOCK_G, BLOCK_GROUP
        )
        z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        normalized, rstd = normalize_tile(ACTIVATION(z, min_val, max_val), real, eps, GROUP_SIZE)
        dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
        scaled = dy * weight
        mean = tl.expand_dims(tl.sum(scaled, 2) / GROUP_SIZE, 2)
        projection = tl.expand_dims(tl.sum(scaled * normalized, 2) / GROUP_SIZE, 2)
        dz = tl.expand_dims(rstd, 2) * (scaled - mean - normalized * projection)
        dz = ACTIVATION_GRADIENT(dz, z, min_val, max_val)
        tl.store(input_gradient + offsets, dz.to(input_gradient.dtype.element_ty), mask=inside)
        input_sum += tl.where(inside, dz, 0.0)
        weight_sum += tl.where(inside, dy * normalized, 0.0)
        shift_sum += tl.where(inside, dy, 0.0)
    C = num_groups * GROUP_SIZE
    columns = tl.reshape(columns, (BLOCK_G, BLOCK_GROUP))
    real = tl.reshape(real, (BLOCK_G, BLOCK_GROUP))
    target = chunk.to(tl.int64) * C + columns
    store_sums(sums[0], target, tl.sum(weight_sum, 0), real)
    store_sums(sums[1], target, tl.sum(shift_sum, 0), real)
    store_sums(sums[2], target, tl.sum(input_sum, 0), real)
    store_sums(sums[3], target, tl.sum(input_sum, 0), real)


def column_tiles(channels: int, group_size: int, config: GroupNormConfig) -> int:
    """The number of tiles that a row is divided into."""
    return blocks_of(channels // group_size, config.blocks(group_size)["BLOCK_G"])


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    config: GroupNormConfig,
    *,
    output: torch.Tensor,
    saved: tuple[torch.Tensor, ...] | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
    finish: triton.runtime.JITFunction = finish_matrix,
) -> None:
    """output [M, C] = final(group_norm(activation(input))) for contiguous ``input``, or what ``finish`` makes of it."""
    M, C = input.shape
    if M == 0:
        return
    group_size = C // num_groups
    launch(
        group_norm_kernel,
        grid_of(blocks_of(M, config.block_m), column_tiles(C, group_size, config)),
        input.device,
        input,
        norm_weight,
        norm_bias,
        output,
        saved,
        M,
        num_groups,
        *bounds,
        eps,
        ACTIVATION=activation.function,
        FINAL=final.function,
        FINISH=finish,
        GROUP_SIZE=group_size,
        **config.blocks(group_size),
        num_warps=config.num_warps,
    )


def group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    num_groups: int,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    config: GroupNormConfig,
    *,
    input_gradient: torch.Tensor,
    vector_gradients: tuple[torch.Tensor | None, ...],
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Gradients of ``group_norm``. All matrices are [M, C] and contiguous.

    ``vector_gradients`` are four vectors [C] of any float dtype, or None where not wanted. They become the gradients of
    ``norm_weight``, of ``norm_bias``, and of two biases added to the input. The last two are the same: the sum of
    ``input_gradient`` over the rows. ``norm_bias`` itself is read for ``final``'s gradient only.
    """
    M, C = input.shape
    group_size = C // num_groups
    chunks = blocks_of(M, config.rows_per_program)
    if chunks == 1:
        stored = sums = vector_gradients
    else:
        weight_gradient, shift_gradient, *biases = vector_gradients
        bias_gradient = biases[1] if biases[0] is None else biases[0]
        partials = empty_partials((weight_gradient, shift_gradient, bias_gradient), chunks)
        stored, sums = (*partials, None), (*partials, partials[2])
    if chunks:
        launch(
            group_norm_backward_kernel,
            grid_of(chunks, column_tiles(C, group_size, config)),
            input.device,
            output_gradient,
            input,
            norm_weight,
            norm_bias,
            input_gradient,
            stored,
            M,
            num_groups,
            *bounds,
            eps,
            config.rows_per_program,
            ACTIVATION=activation.function,
            ACTIVATION_GRADIENT=activation.gradient,
            FINAL_GRADIENT=final.gradient,
            GROUP_SIZE=group_size,
            **config.blocks(group_size),
            num_warps=config.num_warps,
        )
    add_up(sums, vector_gradients)
