"""Row minimum of group-normalised tiles, and the kernel that finishes it.

A minimum is found in two stages. Each tile writes its rows' minima as int32 keys that keep the order, with NaN first,
as torch's minimum propagates NaN. ``finish`` reduces the keys over the tiles. The backward pass
(``row_minimum_backward``) needs only the group that holds each row's minimum, so only that group is kept. The minimum's
place in the group is found once the winning tile is known.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.chain import Reduction
from triton_kernels.device import IN_INTERPRETER
from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.launch import launch, wait_for_launch_before

_LAST = tl.constexpr(2147483647)


@triton.jit
def ordered_key(value):
    """An int32 that is ordered as float32 is, NaN first. Both zeros have one key; else a later -0.0 would count as
    less."""
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)
    return tl.where(value != value, -2147483648, key)


@triton.jit
def key_value(key):
    """The float32 with this ``ordered_key``; 0.0 for both zeros."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def lesser(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bit_mask(condition):
    """All bits set where the condition holds, else none, in a register.

    Selecting with the mask costs one instruction. Without the register, a compiler would make a select and an
    ``either`` of it.
    """
    mask = tl.where(condition, -1, 0)
    if IN_INTERPRETER:
        return mask
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [mask], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def either(a, b):
    """Two numbers' bits, combined. One of the two has no bit set."""
    return a | b


@triton.jit
def store_row_minimum(
    y,  # [rows, groups, block]: the values to minimise
    normalized,  # the same before weight and bias
    rstd,  # [rows, groups]
    inside,  # [1, groups, block]: which are real, the first always; None where the others are infinite
    row,
    group,  # the tile's first row and group
    tile,  # the tile's number along the row
    M,
    minimum,  # [tiles, M] int32 keys
    saved,  # None, or (number [tiles, M], rstd [tiles, M], normalized [tiles, M, GROUP_SIZE]) of the winner's group
    INDICES: tl.constexpr,  # as for epilogues
    GROUP_SIZE: tl.constexpr,
):
    """Store a tile's row minima as keys and, for the backward pass, the group that each was found in."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1]
    BLOCK: tl.constexpr = y.shape[2]
    if inside is not None:
        y = tl.where(inside, y, float("inf"))
    if saved is None:
        # Over the groups first: a thread has values of all groups of its rows, but not all members of a group.
        least = tl.reduce(tl.reduce(y, 1, lesser), 1, lesser)
    else:
        group_least = tl.reduce(y, 2, lesser)
        least = tl.reduce(group_least, 1, lesser)
    rows = row + INDICES(ROWS)
    tl.store(minimum + tile.to(tl.int64) * M + rows, ordered_key(least), mask=rows < M)
    if saved is not None:
        # Indices are made anew for each use: in Gluon they take the one layout of what they are used with.
        saved_group, saved_rstd, saved_normalized = saved
        rows = row + INDICES(ROWS)
        row_inside = rows < M
        offset = tile.to(tl.int64) * M + rows
        found = (group_least == tl.expand_dims(least, 1)) | (group_least != group_least)  # a NaN is the least
        winner = tl.min(tl.where(found, INDICES(GROUPS)[None, :], GROUPS), 1)
        tl.store(saved_group + offset, group + winner, mask=row_inside)
        of_winner = bit_mask(INDICES(GROUPS)[None, :] == winner[:, None])
        winner_rstd = tl.reduce(rstd.to(tl.int32, bitcast=True) & of_winner, 1, either)
        tl.store(saved_rstd + offset, winner_rstd.to(tl.float32, bitcast=True), mask=row_inside)
        group_bits = normalized.to(tl.int32, bitcast=True) & tl.expand_dims(of_winner, 2)
        winner_normalized = tl.reduce(group_bits, 1, either)
        matrix_rows = (row + INDICES(ROWS))[:, None]
        members = INDICES(BLOCK)[None, :]
        target = (tile.to(tl.int64) * M + matrix_rows) * GROUP_SIZE + members
        winner_normalized = winner_normalized.to(tl.float32, bitcast=True)
        tl.store(saved_normalized + target, winner_normalized, mask=(matrix_rows < M) & (members < GROUP_SIZE))


ROW_MINIMUM = Reduction("row_minimum", store_row_minimum, lambda rows: torch.min(rows, dim=1, keepdim=True)[0])


@triton.jit
def finish_kernel(
    tile_minimum,  # [tiles, M] keys
    tile_saved,  # None, or the tiles' (group, rstd, normalized)
    norm_weight,  # of the minimised values: [channels], or None
    norm_bias,
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
    """output[c, m] = min over tiles of tile_minimum[:, m] + bias[c]. The first column of programs stores the winner."""
    wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = rows < M
    least = tl.full((BLOCK_M,), _LAST, tl.int32)
    winning_tile = tl.zeros((BLOCK_M,), tl.int32)
    for first in range(0, tiles, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        inside = (tile < tiles)[:, None] & row_inside[None, :]
        keys = tl.load(tile_minimum + tile.to(tl.int64)[:, None] * M + rows[None, :], mask=inside, other=_LAST)
        block_least = tl.min(keys, 0)
        if winner is not None:
            found = inside & (keys == block_least[None, :])
            block_tile = tl.min(tl.where(found, tile[:, None], _LAST), 0)
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
            tile_group, tile_rstd, tile_normalized = tile_saved
            winner_column, winner_rstd, winner_normalized = winner
            offset = winning_tile.to(tl.int64) * M + rows
            members = tl.arange(0, BLOCK_GROUP)
            member_inside = row_inside[:, None] & (members < GROUP_SIZE)[None, :]
            normalized = tl.load(tile_normalized + offset[:, None] * GROUP_SIZE + members[None, :], mask=member_inside)
            group_column = tl.load(tile_group + offset, mask=row_inside, other=0) * GROUP_SIZE
            # With a bias and no weight, the compiler rounds the tile's values once less than here. Of two values that
            # are one rounding apart, this may find the other one.
            affine = group_column[:, None] + members[None, :]
            y = normalized
            if norm_weight is not None:
                y *= tl.load(norm_weight + affine, mask=member_inside, other=0.0).to(tl.float32)
            if norm_bias is not None:
                y += tl.load(norm_bias + affine, mask=member_inside, other=0.0).to(tl.float32)
            keys = tl.where(member_inside, ordered_key(y), _LAST)
            found = member_inside & (keys == tl.min(keys, 1)[:, None])
            member = tl.min(tl.where(found, members[None, :], _LAST), 1)
            tl.store(winner_column + rows, group_column + member, mask=row_inside)
            tl.store(winner_rstd + rows, tl.load(tile_rstd + offset, mask=row_inside), mask=row_inside)
            destination = winner_normalized + rows.to(tl.int64)[:, None] * GROUP_SIZE + members[None, :]
            tl.store(destination, normalized, mask=member_inside)


def empty_tile_minimum(tiles: int, rows: int, group_size: int, device: torch.device, save: bool):
    """Buffers for ``store_row_minimum``: the keys and, if ``save``, (group, rstd, normalized) of the winners."""
    keys = torch.empty(tiles, rows, dtype=torch.int32, device=device)
    return keys, empty_winner(tiles * rows, group_size, device) if save else None


def empty_winner(count: int, group_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(column or group [count] int32, rstd [count] float32, normalized [count, group_size] float32), not
    initialised."""
    return (
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, group_size, dtype=torch.float32, device=device),
    )


def finish(
    keys: torch.Tensor,
    tile_saved: tuple[torch.Tensor, ...] | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    winner: tuple[torch.Tensor, ...] | None,
    group_size: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
) -> None:
    """output [C, M] = the least of ``keys`` [tiles, M] + bias [C].

    ``winner``, if any, is made from the winning tile's ``tile_saved``. It gets the winning group and the place in it of
    the least of the normalised values times ``norm_weight`` plus ``norm_bias`` (each [channels] or None).
    """
    tiles, M = keys.shape
    C = output.shape[0]
    block_group = next_power_of_2(group_size)
    block_m = max(1, min(64, 4096 // block_group)) if winner is not None else 64
    block_c = 128
    column_blocks = max(1, blocks_of(C, block_c))  # the first stores the winner, even where the bias is empty
    launch(
        finish_kernel,
        grid_of(blocks_of(M, block_m), column_blocks),
        keys.device,
        keys,
        tile_saved,
        norm_weight,
        norm_bias,
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
