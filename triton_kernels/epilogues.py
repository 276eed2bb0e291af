"""Epilogues of ``linear_kernel``: what is done with a tile of input @ weight.T while it is in registers.

Each is a jit function of (accumulator, place, output, saved, vectors, scalars, STORE, INDICES, GROUP_SIZE, DTYPE):

- accumulator: [BLOCK_M, BLOCK_N] in float32, at place = (row, column, M, N)
- output, saved: where the results go, stored by STORE; saved is None where nothing is kept for the backward pass
- INDICES: makes 0, 1, ..., which Triton and Gluon do differently (``triton_kernels.linear.indices``). All else that is
  used here they have in common, so both kinds of kernel share these functions
- vectors: (linear_bias, bias, norm_weight, norm_bias), pointers to [N]; each may be None and then counts as 0, 0, 1, 0
- scalars: (min_val, max_val, eps)
- DTYPE: that of the operands, and so of z = input @ weight.T + linear_bias + bias wherever it is stored
"""

import triton
import triton.language as tl

from triton_kernels.device import INTERPRETED
from triton_kernels.group_statistics import normalize_groups
from triton_kernels.pointwise import hardtanh, hardtanh_mish
from triton_kernels.row_minimum import store_row_minimum

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def load_columns(pointer, place, BLOCK_N: tl.constexpr, INDICES: tl.constexpr, OUTSIDE: tl.constexpr = 0.0):
    """[BLOCK_N] values of a vector over the columns, in its own dtype; OUTSIDE past the last column."""
    row, column, M, N = place
    columns = INDICES(BLOCK_N)
    return tl.load(pointer + column + columns, mask=columns < N - column, other=OUTSIDE)


@triton.jit
def widen(values):
    """[BLOCK_N] values in float32, each converted by the thread that loads it.

    Triton would move a cast behind the exchange with the threads that use the values. That exchanges fewer bytes, but
    each thread then converts a quarter of the columns. Triton does not move inline assembly.
    """
    if _INTERPRETED or values.dtype == tl.float32:
        return values.to(tl.float32)
    CONVERSION: tl.constexpr = (
        "{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 $0, {zero, $1}; }"
        if values.dtype == tl.bfloat16
        else "cvt.f32.f16 $0, $1;"
    )
    return tl.inline_asm_elementwise(CONVERSION, "=f,h", [values], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def overflow(z, DTYPE: tl.constexpr):
    """z, with infinity where rounding to float16 would give infinity. Other values keep their full precision.

    The backward pass reads z as it was stored, rounded. If z were finite in the forward pass alone, results would be
    finite and all gradients NaN. PyTorch rounds z in between, and so has no finite result there either.
    """
    if DTYPE == tl.float16:
        z = tl.where(tl.abs(z) < 65520.0, z, z * float("inf"))
    return z


@triton.jit
def add_biases(accumulator, place, vectors, INDICES: tl.constexpr):
    """z = accumulator + (linear_bias + bias)"""
    linear_bias, bias, norm_weight, norm_bias = vectors
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = accumulator
    if linear_bias is not None:
        total = widen(load_columns(linear_bias, place, BLOCK_N, INDICES))
        if bias is not None:
            total += widen(load_columns(bias, place, BLOCK_N, INDICES))
        z += tl.expand_dims(total, 0)
    elif bias is not None:
        z += tl.expand_dims(widen(load_columns(bias, place, BLOCK_N, INDICES)), 0)
    return z


@triton.jit
def group_norm_tile(
    tile, place, vectors, eps, INDICES: tl.constexpr, GROUP_SIZE: tl.constexpr, OUTSIDE: tl.constexpr = 0.0
):
    """Group norm of each row of a tile that holds whole groups.

    Returns the result [rows, columns], the same before weight and bias [rows, groups, GROUP_SIZE], and the reciprocal
    standard deviations [rows, groups]. Past the last column the norm's bias, if there is one, counts as OUTSIDE.
    """
    linear_bias, bias, norm_weight, norm_bias = vectors
    BLOCK_N: tl.constexpr = tile.shape[1]
    groups = tl.reshape(tile, (tile.shape[0], BLOCK_N // GROUP_SIZE, GROUP_SIZE))
    normalized, rstd = normalize_groups(groups, None, eps, GROUP_SIZE)
    y = tl.reshape(normalized, tile.shape)
    if norm_weight is not None:
        # Not widened: a thread holds its weights while the bias is exchanged, and two 16-bit ones share a register.
        y *= tl.expand_dims(load_columns(norm_weight, place, BLOCK_N, INDICES).to(tl.float32), 0)
    if norm_bias is not None:
        y += tl.expand_dims(widen(load_columns(norm_bias, place, BLOCK_N, INDICES, OUTSIDE)), 0)
    return y, normalized, rstd


@triton.jit
def bias_epilogue(
    accumulator, place, output, saved, vectors, scalars, STORE, INDICES, GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """output = accumulator + linear_bias + bias"""
    STORE(output, place, add_biases(accumulator, place, vectors, INDICES))


@triton.jit
def hardtanh_mish_group_norm_epilogue(
    accumulator, place, output, saved, vectors, scalars, STORE, INDICES, GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """output = group_norm(mish(hardtanh(z))), saved = z, with z = accumulator + linear_bias + bias"""
    min_val, max_val, eps = scalars
    z = overflow(add_biases(accumulator, place, vectors, INDICES), DTYPE)
    if saved is not None:
        STORE(saved, place, z)
    y, normalized, rstd = group_norm_tile(hardtanh_mish(z, min_val, max_val), place, vectors, eps, INDICES, GROUP_SIZE)
    STORE(output, place, y)


@triton.jit
def group_norm_hardtanh_epilogue(
    accumulator, place, output, saved, vectors, scalars, STORE, INDICES, GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """output = hardtanh(group_norm(z)), saved = z, with z = accumulator + linear_bias + bias"""
    min_val, max_val, eps = scalars
    z = overflow(add_biases(accumulator, place, vectors, INDICES), DTYPE)
    if saved is not None:
        STORE(saved, place, z)
    y, normalized, rstd = group_norm_tile(z, place, vectors, eps, INDICES, GROUP_SIZE)
    STORE(output, place, hardtanh(y, min_val, max_val))


@triton.jit
def group_norm_row_minimum_epilogue(
    accumulator, place, output, saved, vectors, scalars, STORE, INDICES, GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr
):
    """output, saved = this tile's part of the row minimum of group_norm(accumulator + linear_bias + bias)"""
    min_val, max_val, eps = scalars
    row, column, M, N = place
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    z = overflow(add_biases(accumulator, place, vectors, INDICES), DTYPE)
    y, normalized, rstd = group_norm_tile(z, place, vectors, eps, INDICES, GROUP_SIZE, float("inf"))
    y = tl.reshape(y, normalized.shape)
    # Past the last column the norm's bias makes y infinite, so no mask is needed. (Where the input's row is not finite,
    # y stays NaN there, but then all of that row is NaN.) Without a bias a mask is needed. Where something is saved, a
    # mask spills fewer registers.
    inside = None
    if vectors[3] is None or saved is not None:
        inside = tl.reshape(INDICES(BLOCK_N) < N - column, (1, BLOCK_N // GROUP_SIZE, GROUP_SIZE))
    tile = column // BLOCK_N
    row = tl.where(column < N, row, M)  # a strip past the last column has no tile to store
    store_row_minimum(
        y, normalized, rstd, inside, row, column // GROUP_SIZE, tile, M, output, saved, INDICES, GROUP_SIZE
    )
