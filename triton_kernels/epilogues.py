"""The epilogue of ``linear_kernel``: a chain on a tile of input @ weight.T while it is in registers.

- accumulator: [BLOCK_M, BLOCK_N] in float32, at place = (row, column, M, N)
- output, saved: where the results go, stored by STORE; saved is None where nothing is kept for the backward pass
- operands: one a step of CHAIN; scalars are pointers to one value, vectors to [N], tensors to contiguous [M, N], in
  their own dtypes
- INDICES: makes 0, 1, ..., which Triton and Gluon do differently (``triton_kernels.linear.indices``). All else that is
  used here they have in common, so both kinds of kernel share these functions
- DTYPE: that of the matrices, and so of z = input @ weight.T + biases wherever it is stored
"""

import triton
import triton.language as tl

from triton_kernels.device import IN_INTERPRETER
from triton_kernels.group_statistics import normalize_groups


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
    if IN_INTERPRETER or values.dtype == tl.float32:
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
def load_tile(pointer, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDICES: tl.constexpr):
    """A tile of a contiguous [M, N] matrix in float32; zeros outside."""
    row, column, M, N = place
    rows = tl.expand_dims(INDICES(ROWS), 1)
    columns = tl.expand_dims(INDICES(COLUMNS), 0)
    corner = pointer + row.to(tl.int64) * N + column
    inside = (rows < M - row) & (columns < N - column)
    return tl.load(corner + rows.to(tl.int64) * N + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def apply_to_tile(
    tile,
    place,
    operands,
    CHAIN: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    INDICES: tl.constexpr,
    OUTSIDE: tl.constexpr = 0.0,
):
    """What the steps FIRST to END make of a tile. Past the last column, added vectors count as OUTSIDE.

    Vectors that are added one after the other are added up first: an addition a column, not one a value.
    """
    BLOCK_N: tl.constexpr = tile.shape[1]
    shift = None
    values = ()  # what the steps are applied to, complete where a later one takes it
    for i in tl.static_range(FIRST, END):
        if shift is not None and (CHAIN.reached[i] or not CHAIN.steps[i].adds_vector):
            tile += tl.expand_dims(shift, 0)
            shift = None
        values = values + (tile,)
        if CHAIN.steps[i].adds_vector:
            if operands[i] is not None:
                vector = widen(load_columns(operands[i], place, BLOCK_N, INDICES, OUTSIDE))
                if shift is None:
                    shift = vector
                else:
                    shift += vector
        elif CHAIN.steps[i].earlier > 0:
            tile = CHAIN.steps[i].function(tile, values[i - FIRST - CHAIN.steps[i].earlier])
        elif not CHAIN.steps[i].has_tensor:
            tile = CHAIN.steps[i].function(tile, operands[i])
        elif operands[i] is not None:
            if CHAIN.steps[i].operand == "scalar":
                tile = CHAIN.steps[i].function(tile, tl.load(operands[i]).to(tl.float32))
            elif CHAIN.steps[i].operand == "vector":
                # Not widened: a thread holds these values while the next vector is exchanged, and two 16-bit ones share
                # a register.
                vector = load_columns(operands[i], place, BLOCK_N, INDICES).to(tl.float32)
                tile = CHAIN.steps[i].function(tile, tl.expand_dims(vector, 0))
            else:
                other = load_tile(operands[i], place, tile.shape[0], BLOCK_N, INDICES)
                tile = CHAIN.steps[i].function(tile, other)
    if shift is not None:
        tile += tl.expand_dims(shift, 0)
    return tile


@triton.jit
def chain_epilogue(
    accumulator,
    place,
    output,
    saved,
    operands,
    eps,
    STORE,
    INDICES,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """output = the chain's result for this tile. saved = z or, with a reduction, what that keeps."""
    row, column, M, N = place
    BLOCK_N: tl.constexpr = accumulator.shape[1]
    # A reduction has no use for what is past the last column, and the norm's bias hides it there.
    HIDES: tl.constexpr = CHAIN.reduction is not None
    # Without that bias a mask is needed. Where something is saved, a mask spills fewer registers.
    MASKS: tl.constexpr = HIDES and (saved is not None or operands[CHAIN.norm_place + 1] is None)
    OUTSIDE: tl.constexpr = float("inf") if HIDES else 0.0
    tile = apply_to_tile(accumulator, place, operands, CHAIN, 0, len(CHAIN.biases), INDICES)
    if CHAIN.norm != "":
        tile = overflow(tile, DTYPE)
    if saved is not None and not HIDES:
        STORE(saved, place, tile)
    tile = apply_to_tile(tile, place, operands, CHAIN, len(CHAIN.biases), CHAIN.norm_place, INDICES)
    if CHAIN.norm != "":
        groups = tl.reshape(tile, (tile.shape[0], BLOCK_N // GROUP_SIZE, GROUP_SIZE))
        if HIDES and not MASKS:  # past the last column zeros must stay numbers, also without an eps
            is_group = INDICES(BLOCK_N // GROUP_SIZE) * GROUP_SIZE < N - column
            eps = tl.expand_dims(tl.where(is_group, eps, 1.0), 0)
        normalized, rstd = normalize_groups(groups, None, eps, GROUP_SIZE)
        tile = tl.reshape(normalized, tile.shape)
    tile = apply_to_tile(tile, place, operands, CHAIN, CHAIN.norm_place, len(CHAIN.steps), INDICES, OUTSIDE)
    if HIDES:
        y = tl.reshape(tile, normalized.shape)
        # Past the last column the norm's bias makes y infinite. (Where the input's row is not finite, y stays NaN
        # there, but then all of that row is NaN.)
        inside = None
        if MASKS:
            inside = tl.reshape(INDICES(BLOCK_N) < N - column, (1, BLOCK_N // GROUP_SIZE, GROUP_SIZE))
        row = tl.where(column < N, row, M)  # a strip past the last column has no tile to store
        CHAIN.reduction.store(
            y,
            normalized,
            rstd,
            inside,
            row,
            column // GROUP_SIZE,
            column // BLOCK_N,
            M,
            output,
            saved,
            INDICES,
            GROUP_SIZE,
        )
    else:
        STORE(output, place, tile)
