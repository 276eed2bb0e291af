"""Split float32 operands of a product into float16 parts: two give float32's precision on tensor cores, one TF32's.

An operand's rows run along the axis that is not summed over. The elements of a row share a scale (``float32_parts``). A
row gets NaN as its scale if too many of its elements lose too much, or one is not finite. ``linear_rest_kernel``
computes the tiles of such rows.

By chance a few elements of any large matrix are so near zero: of 4096 x 4096 gradients behind a layer norm, one. Tiles
computed again for these would take longer than the product. Such an element may be off by 2**-39 of its row's largest
(two parts: 2**-50), which is less than the rounding of the others leaves.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.float32_parts import magnitude, parts_of, scales_of
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.launch import launch, wait_for_launch_before

#: The error from which an element loses too much, by number of parts: eight or four times the usual error. Elements
#: down to 2**-31 (two parts) or 2**-30 (one) of the largest never lose that much. Of normally distributed numbers one
#: in 7e8, or 3e8, is smaller.
_MOST_LOST = {2: 2.0**-19, 1: 2.0**-9}
#: Of so many elements of a row that are not zero, one may lose too much.
_ONE_LOST_OF = tl.constexpr(256)
#: Lines of ``high`` and ``low`` begin at multiples of this many elements: 16 bytes, as TMA requires.
ALIGNMENT = 8
#: Where depth is contiguous, a program keeps whole rows in registers, of this depth at least and at most: as many as
#: have so many elements, or one. It has eight warps for rows longer than the fourth number, else four.
_LEAST_KEPT, _LONGEST_KEPT, _KEPT, _LONG = 64, 16384, 2048, 4096
#: Rows, depth and warps of a program's block of longer rows.
_BLOCK = (4, 1024, 8)
#: Rows, depth and warps of a program's block where rows are contiguous: of few rows, and of many.
_FEW_TRANSPOSED, _TRANSPOSED_BLOCK = (16, 512, 16), (32, 128, 8)
#: Few are so many. Where all matrices together have no more, and beyond this depth, programs share rows.
_FEW_ROWS, _LONGEST_WHOLE = 4096, 512
#: Rows, depth and warps of their blocks, to find rows' largest elements and to split.
_LARGEST_BLOCK, _SHARED_BLOCK = (32, 128, 4), (64, 64, 4)
#: How many blocks a program splits. (Both kernels take 101 us at 3072 x 8192 and 27 at 768 x 6272. With one block, and
#: from the first part to the last, they take 112 and 29; H200, nothing of the operand cached.)
_SHARED_BLOCKS = tl.constexpr(2)
#: Into how many parts a row is cut, at most, to find its largest element, and their least depth.
_MOST_LARGEST, _LEAST_LARGEST = 32, 256
#: What a program adds to a row's balance, so that the last one can tell that it is the last.
_ARRIVED = tl.constexpr(1 << 40)


@dataclass(frozen=True)
class SplitOperand:
    """An operand [rows, depth]: its parts (float16, rows or depth first as the operand) and scale [rows]."""

    high: torch.Tensor
    low: torch.Tensor | None
    scale: torch.Tensor


@triton.jit
def in_lane_order(places):
    """The term at each place where ``split`` stores them in this order: of each 32, bits 1 and 2 of a place change
    places with bits 3 and 4. It is its own inverse."""
    terms = (places & ~30) | ((places & 24) >> 2) | ((places & 6) << 2)
    return tl.max_contiguous(tl.multiple_of(terms, 2), 2)


@triton.jit
def load_block(source, first, row_inside, depths, DEPTH, depth_stride):
    """The block of all rows from depth ``first`` on; zeros outside."""
    first = tl.cast(first, tl.int64)
    return tl.load(source + first * depth_stride, mask=row_inside & (depths < DEPTH - first)[None, :], other=0.0)


@triton.jit
def block_at(base, matrix, rows, depths, row_stride, depth_stride, matrix_stride):
    """``base``, a pointer or 0, and how far the elements of a block [rows, depths] of a matrix are from there."""
    return base + matrix * matrix_stride + rows[:, None] * row_stride + depths[None, :] * depth_stride


@triton.jit
def largest_of(source, first, end, row_inside, depths, DEPTH, depth_stride):
    """The greatest ``magnitude`` of each row from depth ``first`` to ``end``, block by block."""
    greatest = tl.zeros(source.shape, tl.int32)
    for depth in range(first, end, source.shape[1]):
        value = load_block(source, depth, row_inside, depths, DEPTH, depth_stride)
        greatest = tl.maximum(greatest, magnitude(value))
    return tl.max(greatest, 1)


@triton.jit
def store_parts(value, up, high, low, begin, place, inside, MOST_LOST: tl.constexpr):
    """Split a block, and store its parts at a place from ``begin`` on. Returns 1 for elements that lose too much."""
    high_part, low_part, lost = parts_of(value, up[:, None], MOST_LOST, low is not None)
    tl.store((high + begin) + place, high_part, mask=inside)
    if low is not None:
        tl.store((low + begin) + place, low_part, mask=inside)
    return lost


@triton.jit
def added_to_balance(value, lost, is_limited, ONE_LOST_OF: tl.constexpr):
    """What elements add to the balance of their row, which is negative where it loses too much: one that is ``lost``
    takes away what ONE_LOST_OF others add."""
    return ((value != 0.0) & ~is_limited).to(tl.int32) - ONE_LOST_OF * lost


@triton.jit
def store_scale(scale, largest, down, balance, inside):
    """Store rows' scales, NaN where the balance is negative."""
    tl.store(scale, tl.where(balance < 0, float("nan"), tl.where(largest > 0, down, 0.0)), mask=inside)


@triton.jit
def clear(cleared, CLEARED, BLOCK: tl.constexpr):
    """Set CLEARED numbers to 0, all programs together."""
    if cleared is not None:
        for each in range(tl.program_id(0), tl.cdiv(CLEARED, BLOCK), tl.num_programs(0)):
            places = each * BLOCK + tl.arange(0, BLOCK)
            tl.store(cleared + places, tl.zeros_like(places), mask=places < CLEARED)


@triton.jit
def split_kernel(
    operand,  # matrices [ROWS, DEPTH] float32, at any strides
    high,  # float16, strides as below
    low,  # likewise, or None
    scale,  # their rows', float32
    cleared,  # int32 [CLEARED]: set to 0; or None
    CLEARED,
    ROWS,
    DEPTH,
    SPLIT_DEPTH,  # of the parts: zeros behind the operand's
    row_stride,
    depth_stride,
    matrix_stride,
    split_row_stride,
    split_depth_stride,
    split_matrix_stride,
    MOST_LOST: tl.constexpr,
    MAY_LOSE: tl.constexpr,  # whether a row gets a scale where few of its elements lose more
    IN_LANE_ORDER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Each program splits BLOCK_ROWS whole rows: first it finds their largest elements, then it makes the parts. Where
    too much of an element is lost, it reads the rows again and counts."""
    wait_for_launch_before()
    blocks = tl.cdiv(ROWS, BLOCK_ROWS)
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64)
    rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    depths = tl.arange(0, BLOCK_DEPTH).to(tl.int64)
    terms = in_lane_order(depths) if IN_LANE_ORDER else depths
    row_inside = (rows < ROWS)[:, None]
    source = block_at(operand, matrix, rows, terms, row_stride, depth_stride, matrix_stride)
    target = block_at(0, matrix, rows, depths, split_row_stride, split_depth_stride, split_matrix_stride)
    if WHOLE:
        value = load_block(source, 0, row_inside, terms, DEPTH, depth_stride)
        largest = tl.max(magnitude(value), 1)
    else:
        largest = largest_of(source, 0, DEPTH, row_inside, terms, DEPTH, depth_stride)
    up, down, is_limited = scales_of(largest)
    any_lost = 0
    for first in range(0, SPLIT_DEPTH, BLOCK_DEPTH):
        if not WHOLE:
            value = load_block(source, first, row_inside, terms, DEPTH, depth_stride)
        place = target + tl.cast(first, tl.int64) * split_depth_stride
        inside = row_inside & (depths < SPLIT_DEPTH - first)[None, :]
        any_lost |= tl.max(store_parts(value, up, high, low, 0, place, inside, MOST_LOST))
    balance = tl.zeros((BLOCK_ROWS,), tl.int64)
    if any_lost > 0:  # which is rare
        for first in range(0, DEPTH, BLOCK_DEPTH):
            value = load_block(source, first, row_inside, terms, DEPTH, depth_stride)
            _, _, lost = parts_of(value, up[:, None], MOST_LOST, low is not None)
            balance += tl.sum(added_to_balance(value, lost, (is_limited | (not MAY_LOSE))[:, None], _ONE_LOST_OF), 1)
    store_scale(scale + matrix * ROWS + rows, largest, down, balance, rows < ROWS)
    clear(cleared, CLEARED, BLOCK_DEPTH)


@triton.jit
def share_of_program(ROWS, matrices, BLOCK_ROWS: tl.constexpr):
    """Which part of which rows of which matrix a program has: (part, matrix, first row), 64-bit integers."""
    blocks, program = tl.cdiv(ROWS, BLOCK_ROWS), tl.program_id(0).to(tl.int64)
    return program // (blocks * matrices), program // blocks % matrices, program % blocks * BLOCK_ROWS


@triton.jit
def largest_kernel(
    operand,  # as ``split_kernel``'s
    largest,  # int32 [COUNT, matrices x ROWS]: of each part of a row, the greatest ``magnitude``
    balances,  # int64 [matrices x ROWS]: set to 0
    cleared,  # as ``split_kernel``'s
    CLEARED,
    ROWS,
    DEPTH,
    row_stride,
    depth_stride,
    matrix_stride,
    matrices,
    part_depth,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Each program finds the largest elements of a part of BLOCK_ROWS rows."""
    wait_for_launch_before()
    part, matrix, first_row = share_of_program(ROWS, matrices, BLOCK_ROWS)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    depths = tl.arange(0, BLOCK_DEPTH).to(tl.int64)
    row_inside = (rows < ROWS)[:, None]
    source = block_at(operand, matrix, rows, depths, row_stride, depth_stride, matrix_stride)
    first = part * part_depth
    end = tl.minimum(first + part_depth, DEPTH)
    greatest = largest_of(source, first, end, row_inside, depths, DEPTH, depth_stride)
    place, inside = matrix * ROWS + rows, rows < ROWS
    tl.store(largest + part * matrices * ROWS + place, greatest, mask=inside)
    if part == 0:
        tl.store(balances + place, tl.zeros((BLOCK_ROWS,), tl.int64), mask=inside)
    clear(cleared, CLEARED, BLOCK_DEPTH)


@triton.jit
def split_shared_kernel(
    operand,  # as ``split_kernel``'s
    high,
    low,
    scale,
    largest,  # ``largest_kernel``'s
    balances,  # likewise: 0
    ROWS,
    DEPTH,
    SPLIT_DEPTH,
    row_stride,
    depth_stride,
    matrix_stride,
    split_row_stride,
    split_depth_stride,
    split_matrix_stride,
    matrices,
    parts,  # of each row, one for each program
    COUNT,
    MOST_LOST: tl.constexpr,
    MAY_LOSE: tl.constexpr,
    IN_LANE_ORDER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """``split_kernel`` where each program has _SHARED_BLOCKS blocks of BLOCK_ROWS rows, within which 32-bit integers
    hold strides. The last one to count what is lost in a row gives it its scale.

    What was read last is split first: that is still cached."""
    wait_for_launch_before()
    part, matrix, first_row = share_of_program(ROWS, matrices, BLOCK_ROWS)
    rows, depths = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DEPTH)
    terms = in_lane_order(depths) if IN_LANE_ORDER else depths
    row_inside = rows < ROWS - first_row
    place = matrix * ROWS + first_row + rows
    greatest = tl.zeros((BLOCK_ROWS,), tl.int32)
    for each in range(COUNT):
        found = tl.load(largest + tl.cast(each, tl.int64) * matrices * ROWS + place, mask=row_inside, other=0)
        greatest = tl.maximum(greatest, found)
    up, down, is_limited = scales_of(greatest)
    source = rows[:, None] * row_stride + terms[None, :] * depth_stride
    target = rows[:, None] * split_row_stride + depths[None, :] * split_depth_stride
    operand += matrix * matrix_stride + first_row * row_stride
    begin = matrix * split_matrix_stride + first_row * split_row_stride
    added = tl.full((BLOCK_ROWS,), _ARRIVED, tl.int64)
    for block in tl.static_range(_SHARED_BLOCKS):
        first = ((parts - 1 - part) * _SHARED_BLOCKS + block) * BLOCK_DEPTH
        of_operand = row_inside[:, None] & (terms < DEPTH - first)[None, :]
        value = tl.load(operand + first * depth_stride + source, mask=of_operand, other=0.0)
        inside = row_inside[:, None] & (depths < SPLIT_DEPTH - first)[None, :]
        at = begin + first * split_depth_stride
        lost = store_parts(value, up, high, low, at, target, inside, MOST_LOST)
        added += tl.sum(added_to_balance(value, lost, (is_limited | (not MAY_LOSE))[:, None], _ONE_LOST_OF), 1)
    balance = tl.atomic_add(balances + place, added, mask=row_inside) + added - tl.cast(parts, tl.int64) * _ARRIVED
    store_scale(scale + place, greatest, down, balance, row_inside & (balance > -(_ARRIVED // 2)))


def split(
    operand: torch.Tensor,
    parts: int,
    *,
    may_lose: bool = True,
    lane_order: bool = False,
    clears: torch.Tensor | None = None,
) -> SplitOperand:
    """Split a float32 matrix [rows, depth], or a batch of them [B, rows, depth], of any strides, into 1 or 2 parts.

    A row gets NaN as its scale where too many of its elements lose too much; unless it ``may_lose``, where one does.
    In ``lane_order`` (``in_lane_order``) the parts' depth is a multiple of 32, with zeros behind the operand's.
    ``clears`` (int32) is set to 0, for the kernel behind.
    """
    *batch, rows, depth = operand.shape
    by_rows = is_transposed(operand)
    split_depth = blocks_of(depth, 32) * 32 if lane_order else depth
    lines, length = (split_depth, rows) if by_rows else (rows, split_depth)
    padded = blocks_of(length, ALIGNMENT) * ALIGNMENT
    memory = torch.empty(parts, *batch, lines, padded, dtype=torch.float16, device=operand.device)[..., :length]
    if by_rows:
        memory = memory.mT
    scale = torch.empty(*batch, rows, dtype=torch.float32, device=operand.device)
    high, low = memory[0], memory[1] if parts == 2 else None
    result = SplitOperand(high, low, scale)
    options: dict[str, Any] = {"MOST_LOST": _MOST_LOST[parts], "MAY_LOSE": may_lose, "IN_LANE_ORDER": lane_order}
    if _shares_rows(operand):
        _split_shared(operand, result, clears, options)
        return result
    transposed = _FEW_TRANSPOSED if rows <= _FEW_ROWS else _TRANSPOSED_BLOCK
    block_rows, block_depth, warps = transposed if by_rows else _BLOCK
    whole = not by_rows and depth <= _LONGEST_KEPT
    if whole:
        block_depth = max(next_power_of_2(depth), _LEAST_KEPT)
        block_rows, warps = max(1, _KEPT // block_depth), 8 if block_depth > _LONG else 4
    launch(
        split_kernel,
        (blocks_of(rows, block_rows) * math.prod(batch),),
        operand.device,
        operand,
        high,
        low,
        scale,
        clears,
        0 if clears is None else clears.numel(),
        rows,
        depth,
        split_depth,
        *_strides(operand),
        *_strides(high),
        WHOLE=whole,
        BLOCK_ROWS=block_rows,
        BLOCK_DEPTH=block_depth,
        num_warps=warps,
        **options,
    )
    return result


def _split_shared(
    operand: torch.Tensor,
    result: SplitOperand,
    clears: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """By programs that share rows. Where rows are contiguous, few programs can have whole ones."""
    *batch, rows, depth = operand.shape
    matrices, device = math.prod(batch), operand.device
    block_rows, block_depth, warps = _LARGEST_BLOCK
    part_depth = max(blocks_of(blocks_of(depth, _MOST_LARGEST), block_depth) * block_depth, _LEAST_LARGEST)
    count = blocks_of(depth, part_depth)
    largest = torch.empty(count, matrices * rows, dtype=torch.int32, device=device)
    balances = torch.empty(matrices * rows, dtype=torch.int64, device=device)
    launch(
        largest_kernel,
        (matrices * blocks_of(rows, block_rows) * count,),
        device,
        operand,
        largest,
        balances,
        clears,
        0 if clears is None else clears.numel(),
        rows,
        depth,
        *_strides(operand),
        matrices,
        part_depth,
        BLOCK_ROWS=block_rows,
        BLOCK_DEPTH=block_depth,
        num_warps=warps,
    )
    block_rows, block_depth, warps = _SHARED_BLOCK
    parts = blocks_of(depth, block_depth * _SHARED_BLOCKS.value)
    launch(
        split_shared_kernel,
        (matrices * blocks_of(rows, block_rows) * parts,),
        device,
        operand,
        result.high,
        result.low,
        result.scale,
        largest,
        balances,
        rows,
        depth,
        result.high.shape[-1],
        *_strides(operand),
        *_strides(result.high),
        matrices,
        parts,
        count,
        BLOCK_ROWS=block_rows,
        BLOCK_DEPTH=block_depth,
        num_warps=warps,
        **options,
    )


def _shares_rows(operand: torch.Tensor) -> bool:
    """Whether programs share the operand's rows to split it, after a kernel that finds their largest elements."""
    *batch, rows, depth = operand.shape
    block_rows, block_depth, _ = _SHARED_BLOCK
    is_near = block_rows * operand.stride(-2) + block_depth * operand.stride(-1) < 2**31
    return is_transposed(operand) and math.prod(batch) * rows <= _FEW_ROWS and depth > _LONGEST_WHOLE and is_near


def is_transposed(operand: torch.Tensor) -> bool:
    """Whether rows are contiguous rather than the depth, as in a transposed matrix."""
    return operand.stride(-2) < operand.stride(-1)


def _strides(operand: torch.Tensor) -> tuple[int, int, int]:
    """Of rows, of the depth, and of matrices."""
    return operand.stride(-2), operand.stride(-1), operand.stride(0) if operand.ndim == 3 else 0
