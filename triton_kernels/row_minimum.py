"""Row minimum of group-normalised tiles, and the kernel that finishes it.

A minimum is found in two stages. Each tile leaves its rows' minima as order-preserving int32 keys, so that NaN comes
first (torch's minimum propagates it) and one integer reduction finds value and place alike; ``finish`` reduces the
keys over the tiles. The backward pass (``row_minimum_backward``) needs only the group that holds each row's minimum, so
that is all that is kept.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.launch import launch, wait_for_launch_before

_NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def ordered_key(value):
    """int32 whose order is float32's, NaN first; one for zeros of both signs, lest a later -0.0 pass for less."""
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)
    return tl.where(value != value, -2147483648, key)


@triton.jit
def key_value(key):
    """The float32 whose ``ordered_key`` this is, 0.0 for both zeros."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lesser(a, b):
    """The lesser of two numbers, NaN where one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_row_minimum(
    y,  # [rows, groups, block]: the values to minimise
    normalized,  # the same before weight and bias
    rstd,  # [rows, groups]
    inside,  # [1, groups, block]: which of them are real, the first included; None where the others are infinite
    row,
    group,  # the tile's first row and group
    tile,  # the tile's number along the row
    M,
    minimum,  # [tiles, M] int32 keys
    saved,  # None, or (column [tiles, M], rstd [tiles, M], normalized [tiles, M, GROUP_SIZE]) of the winner's group
    INDICES: tl.constexpr,  # as for epilogues
    GROUP_SIZE: tl.constexpr,
):
    """Store a tile's row minima as keys and, for the backward pass, the group that each was found in."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1]
    BLOCK: tl.constexpr = y.shape[2]
    if inside is not None:
        y = tl.where(inside, y, float("inf"))
    # Over the groups first: a thread of a product holds all of its rows' groups, but not all of a group's members.
    least = tl.reduce(tl.reduce(y, 1, lesser), 1, lesser)
    rows = row + INDICES(ROWS)
    tl.store(minimum + tile.to(tl.int64) * M + rows, ordered_key(least), mask=rows < M)
    if saved is not None:
        # Indices are made anew for each use: Gluon gives them the layout of what they are used with, one alone.
        saved_column, saved_rstd, saved_normalized = saved
        rows = row + INDICES(ROWS)
        row_inside = rows < M
        offset = tile.to(tl.int64) * M + rows
        columns = (group + INDICES(GROUPS))[None, :, None] * GROUP_SIZE + INDICES(BLOCK)[None, None, :]
        found = (y == tl.expand_dims(tl.expand_dims(least, 1), 1)) | (y != y)  # a NaN is the least, if there is one
        # Where all are infinite, what is not real is found too; but the first is real.
        winner = tl.min(tl.min(tl.where(found, columns, _NO_COLUMN), 2), 1)
        in_group = (group + INDICES(GROUPS))[None, :] == (winner // GROUP_SIZE)[:, None]
        winner_rstd = tl.sum(tl.where(in_group, rstd, 0.0), 1)
        winner_normalized = tl.sum(tl.where(tl.expand_dims(in_group, 2), normalized, 0.0), 1)
        tl.store(saved_column + offset, winner, mask=row_inside)
        tl.store(saved_rstd + offset, winner_rstd, mask=row_inside)
        matrix_rows = (row + INDICES(ROWS))[:, None]
        members = INDICES(BLOCK)[None, :]
        target = (tile.to(tl.int64) * M + matrix_rows) * GROUP_SIZE + members
        tl.store(saved_normalized + target, winner_normalized, mask=(matrix_rows < M) & (members < GROUP_SIZE))


@triton.jit
def finish_kernel(
    tile_minimum,  # [tiles, M] keys
    tile_saved,  # None, or the tiles' (column, rstd, normalized)
    bias,  # [C] or None
    output,  # [C, M]
    winner,  # None, or (column [M], rstd [M], normalized [M, GROUP_SIZE])
    tiles,
    M,
    C,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """output[c, m] = min over tiles of tile_minimum[:, m] + bias[c]; the first column of programs keeps the winner."""
    wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = rows < M
    least = tl.full((BLOCK_M,), 2147483647, tl.int32)
    winning_tile = tl.zeros((BLOCK_M,), tl.int32)
    for first in range(0, tiles, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        inside = (tile < tiles)[:, None] & row_inside[None, :]
        keys = tl.load(tile_minimum + tile.to(tl.int64)[:, None] * M + rows[None, :], mask=inside, other=2147483647)
        block_least = tl.min(keys, 0)
        if winner is not None:
            found = inside & (keys == block_least[None, :])
            block_tile = tl.min(tl.where(found, tile[:, None], _NO_COLUMN), 0)
            winning_tile = tl.where((block_least < least) | (first == 0), block_tile, winning_tile)
        least = tl.minimum(least, block_least)
    columns = second_place() * BLOCK_C + tl.arange(0, BLOCK_C)
    column_inside = columns < C
    result = tl.expand_dims(key_value(least), 0)
    if bias is not None:
        result += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[:, None]
    result = tl.broadcast_to(result, (BLOCK_C, BLOCK_M))
    tl.store(
        output + columns.to(tl.int64)[:, None] * M + rows[None, :],
        result.to(output.dtype.element_ty),
        mask=column_inside[:, None] & row_inside[None, :],
    )
    if winner is not None:
        if second_place() == 0:
            tile_column, tile_rstd, tile_normalized = tile_saved
            winner_column, winner_rstd, winner_normalized = winner
            offset = winning_tile.to(tl.int64) * M + rows
            members = tl.arange(0, BLOCK_GROUP)
            member_inside = row_inside[:, None] & (members < GROUP_SIZE)[None, :]
            normalized = tl.load(tile_normalized + offset[:, None] * GROUP_SIZE + members[None, :], mask=member_inside)
            tl.store(winner_column + rows, tl.load(tile_column + offset, mask=row_inside), mask=row_inside)
            tl.store(winner_rstd + rows, tl.load(tile_rstd + offset, mask=row_inside), mask=row_inside)
            destination = winner_normalized + rows.to(tl.int64)[:, None] * GROUP_SIZE + members[None, :]
            tl.store(destination, normalized, mask=member_inside)


def empty_tile_minimum(tiles: int, rows: int, group_size: int, device: torch.device, save: bool):
    """Buffers for ``store_row_minimum``: the keys and, if ``save``, the (column, rstd, normalized) of the winners."""
    keys = torch.empty(tiles, rows, dtype=torch.int32, device=device)
    return keys, empty_winner(tiles * rows, group_size, device) if save else None


def empty_winner(count: int, group_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(column [count] int32, rstd [count] float32, normalized [count, group_size] float32), uninitialised."""
    return (
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, group_size, dtype=torch.float32, device=device),
    )


def finish(keys, tile_saved, bias, output, winner, group_size: int) -> None:
    """output [C, M] = the least of ``keys`` [tiles, M] + bias [C]; copies the winning tile's ``tile_saved``, if any."""
    tiles, M = keys.shape
    C = output.shape[0]
    if M == 0:
        return
    block_group = next_power_of_2(group_size)
    block_m = max(1, min(64, 4096 // block_group)) if winner is not None else 64
    block_c = 128
    column_blocks = max(1, blocks_of(C, block_c))  # the first keeps the winner, even where the bias is empty
    launch(
        finish_kernel,
        grid_of(blocks_of(M, block_m), column_blocks),
        keys.device,
        keys,
        tile_saved,
        bias,
        output,
        winner,
        tiles,
        M,
        C,
        GROUP_SIZE=group_size,
        BLOCK_GROUP=block_group,
        BLOCK_TILES=min(32, next_power_of_2(tiles)),
        BLOCK_M=block_m,
        BLOCK_C=block_c,
        num_warps=4,
    )
