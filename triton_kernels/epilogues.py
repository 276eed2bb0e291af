"""Epilogues of ``linear_kernel``: what is done with a tile of input @ weight.T while it is still in registers.

Each is a jit function of (accumulator [BLOCK_M, BLOCK_N] in float32, row, column, M, N, output, saved, operands, STORE,
GROUP_SIZE), composed from the pieces below. Vectors over the columns may be None.
"""

import triton
import triton.language as tl

from triton_kernels.group_statistics import normalize_groups
from triton_kernels.pointwise import hardtanh, hardtanh_mish
from triton_kernels.row_minimum import store_row_minimum


@triton.jit
def column_vector(pointer, column, N, BLOCK_N: tl.constexpr, ABSENT: tl.constexpr):
    """[1, BLOCK_N] of a vector over the columns, in float32; ABSENT everywhere where there is none."""
    if pointer is None:
        values = tl.full((BLOCK_N,), ABSENT, tl.float32)
    else:
        columns = tl.arange(0, BLOCK_N)
        values = tl.load(pointer + column + columns, mask=columns < N - column, other=0.0).to(tl.float32)
    return tl.expand_dims(values, 0)


@triton.jit
def normalize_tile(tile, eps, GROUP_SIZE: tl.constexpr):
    """Normalise each row's groups; returns [rows, groups, GROUP_SIZE] and the reciprocal standard deviations."""
    groups = tl.reshape(tile, (tile.shape[0], tile.shape[1] // GROUP_SIZE, GROUP_SIZE))
    return normalize_groups(groups, None, eps, GROUP_SIZE)


@triton.jit
def bias_epilogue(accumulator, row, column, M, N, output, saved, operands, STORE, GROUP_SIZE: tl.constexpr):
    """output = accumulator + linear_bias + bias"""
    linear_bias, bias = operands
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = accumulator + column_vector(linear_bias, column, N, BLOCK_N, 0.0) + column_vector(bias, column, N, BLOCK_N, 0.0)
    STORE(output, row, column, M, N, z)


@triton.jit
def hardtanh_mish_group_norm_epilogue(
    accumulator, row, column, M, N, output, saved, operands, STORE, GROUP_SIZE: tl.constexpr
):
    """output = group_norm(mish(hardtanh(z))), saved = z, with z = accumulator + linear_bias + bias"""
    linear_bias, bias, norm_weight, norm_bias, min_val, max_val, eps = operands
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = accumulator + column_vector(linear_bias, column, N, BLOCK_N, 0.0) + column_vector(bias, column, N, BLOCK_N, 0.0)
    if saved is not None:
        STORE(saved, row, column, M, N, z)
    normalized, rstd = normalize_tile(hardtanh_mish(z, min_val, max_val), eps, GROUP_SIZE)
    y = tl.reshape(normalized, accumulator.shape) * column_vector(norm_weight, column, N, BLOCK_N, 1.0)
    STORE(output, row, column, M, N, y + column_vector(norm_bias, column, N, BLOCK_N, 0.0))


@triton.jit
def group_norm_hardtanh_epilogue(
    accumulator, row, column, M, N, output, saved, operands, STORE, GROUP_SIZE: tl.constexpr
):
    """output = hardtanh(group_norm(z)), saved = z, with z = accumulator + linear_bias"""
    linear_bias, norm_weight, norm_bias, min_val, max_val, eps = operands
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = accumulator + column_vector(linear_bias, column, N, BLOCK_N, 0.0)
    if saved is not None:
        STORE(saved, row, column, M, N, z)
    normalized, rstd = normalize_tile(z, eps, GROUP_SIZE)
    y = tl.reshape(normalized, accumulator.shape) * column_vector(norm_weight, column, N, BLOCK_N, 1.0)
    y += column_vector(norm_bias, column, N, BLOCK_N, 0.0)
    STORE(output, row, column, M, N, hardtanh(y, min_val, max_val))


@triton.jit
def group_norm_row_minimum_epilogue(
    accumulator, row, column, M, N, output, saved, operands, STORE, GROUP_SIZE: tl.constexpr
):
    """output, saved = this tile's part of the row minimum of group_norm(accumulator + linear_bias)"""
    linear_bias, norm_weight, norm_bias, eps = operands
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = accumulator + column_vector(linear_bias, column, N, BLOCK_N, 0.0)
    normalized, rstd = normalize_tile(z, eps, GROUP_SIZE)
    y = tl.reshape(normalized, accumulator.shape) * column_vector(norm_weight, column, N, BLOCK_N, 1.0)
    y += column_vector(norm_bias, column, N, BLOCK_N, 0.0)
    inside = tl.reshape(tl.arange(0, BLOCK_N) < N - column, (1, BLOCK_N // GROUP_SIZE, GROUP_SIZE))
    y = tl.reshape(y, normalized.shape)
    first_group = column // GROUP_SIZE
    store_row_minimum(
        y, normalized, rstd, inside, row, first_group, column // BLOCK_N, M, output, saved, GROUP_SIZE
    )
