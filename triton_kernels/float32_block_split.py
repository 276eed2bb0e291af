"""Split float32 matrices into float16 parts where blocks of 128 x 128 elements share a scale (``float32_parts``).

One pass over a matrix makes parts that serve along either axis, as the gradient of a layer's result does in both
gradients that it leads to. The product multiplies the sum of each block of terms by the two scales. Rows or columns of
a block in which too much is lost leave its scale NaN, for products along them.

An element far below the largest of its block loses digits: what ``float32_split`` says of rows holds of blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_kernels.float32_parts import magnitude, parts_of, scales_of
from triton_kernels.float32_split import ALIGNMENT, added_to_balance, block_at, clear, is_transposed
from triton_kernels.grid import blocks_of
from triton_kernels.launch import launch, wait_for_launch_before

#: Lines and columns that share a scale.
BLOCK = tl.constexpr(128)
#: Scales are limited as if the largest element were no less, so that a product of two, and 2**-11 of it, is a number.
_LEAST_EXPONENT = tl.constexpr(127 - 52)
#: The error from which an element loses too much. (Low times low is left out: where rows of both operands are so small,
#: 2**-19 of each is too much of the result.) Elements down to 2**-29 of the largest never lose that much.
_MOST_LOST = 2.0**-21
#: Of so many elements of a row or column of a block that are not zero, one may lose too much.
_ONE_LOST_OF = tl.constexpr(64)
#: Lines that a program has at once, and its warps.
_STRIP, _WARPS = 32, 16


@dataclass(frozen=True)
class BlockSplit:
    """A matrix [rows, depth]: its parts (float16, rows or depth first as the matrix) and scales [rows, depth] of its
    blocks: those for products that sum over the depth, and over the rows."""

    high: torch.Tensor
    low: torch.Tensor
    scale: torch.Tensor
    scale_of_transposed: torch.Tensor

    @property
    def T(self) -> "BlockSplit":
        return BlockSplit(self.high.T, self.low.T, self.scale_of_transposed.T, self.scale.T)


@triton.jit
def load_strip(matrix, lines, columns, LINES, LENGTH, line_stride, column_stride):
    """Lines of a block, and which elements are inside the matrix; zeros outside."""
    inside = (lines < LINES)[:, None] & (columns < LENGTH)[None, :]
    source = block_at(matrix, 0, lines, columns, line_stride, column_stride, 0)
    return tl.load(source, mask=inside, other=0.0), inside


@triton.jit
def parts_of_strip(value, up, LOST: tl.constexpr):
    """As ``parts_of``. What the scale makes zero is lost, too."""
    high, low, lost = parts_of(value, up, LOST, True)
    return high, low, tl.where((value != 0.0) & (value * up == 0.0), 1, lost)


@triton.jit
def split_blocks_kernel(
    matrix,  # [LINES, LENGTH] float32, at any strides
    high,  # float16 [LINES, LENGTH]
    low,
    scale,  # float32 [2, blocks of LINES, blocks of LENGTH]: for sums along lines, and across them
    cleared,  # int32 [CLEARED]: set to 0; or None
    CLEARED,
    LINES,
    LENGTH,
    line_stride,
    column_stride,
    part_stride,  # of lines of high and low
    LOST: tl.constexpr,
    STRIP: tl.constexpr,  # lines that a program has at once
    FOURS: tl.constexpr,  # whether LENGTH and line_stride are multiples of 4
):
    """Each program reads a block twice, and a third time where too much of an element is lost: to count. Then it is
    cached."""
    wait_for_launch_before()
    if FOURS:  # no change, but the compiler loads and stores several elements at once
        LENGTH, line_stride, part_stride = LENGTH // 4 * 4, line_stride // 4 * 4, part_stride // 4 * 4
    across = tl.cdiv(LENGTH, BLOCK)
    first = (tl.program_id(0) // across * BLOCK).to(tl.int64)
    columns = (tl.program_id(0) % across * BLOCK).to(tl.int64) + tl.arange(0, BLOCK)
    strip = first + tl.arange(0, STRIP)
    greatest = tl.zeros((STRIP, BLOCK), tl.int32)
    for line in range(0, BLOCK, STRIP):
        value, _ = load_strip(matrix, strip + line, columns, LINES, LENGTH, line_stride, column_stride)
        greatest = tl.maximum(greatest, magnitude(value))
    largest = tl.max(greatest)
    up, down, is_limited = scales_of(largest, _LEAST_EXPONENT)
    any_lost = tl.zeros((STRIP, BLOCK), tl.int32)
    for line in tl.range(0, BLOCK, STRIP, loop_unroll_factor=2):
        value, inside = load_strip(matrix, strip + line, columns, LINES, LENGTH, line_stride, column_stride)
        high_part, low_part, lost = parts_of_strip(value, up, LOST)
        place = block_at(0, 0, strip + line, columns, part_stride, 1, 0)
        tl.store(high + place, high_part, mask=inside)
        tl.store(low + place, low_part, mask=inside)
        any_lost |= lost
    of_lines, of_columns = 0, 0  # the least balances
    if tl.max(any_lost) > 0:  # which is rare, so fewer lines at once take no more registers
        RARE: tl.constexpr = STRIP // 4
        few = first + tl.arange(0, RARE)
        least = tl.zeros((RARE,), tl.int32)
        balance = tl.zeros((RARE, BLOCK), tl.int32)
        for line in range(0, BLOCK, RARE):
            value, _ = load_strip(matrix, few + line, columns, LINES, LENGTH, line_stride, column_stride)
            _, _, lost = parts_of_strip(value, up, LOST)
            added = added_to_balance(value, lost, is_limited, _ONE_LOST_OF)
            least = tl.minimum(least, tl.sum(added, 1))
            balance += added
        of_lines = tl.min(least)
        of_columns = tl.min(tl.sum(balance, 0))
    down = tl.where(largest > 0, down, 0.0)
    tl.store(scale + tl.program_id(0), tl.where(of_lines < 0, float("nan"), down))
    tl.store(scale + tl.num_programs(0) + tl.program_id(0), tl.where(of_columns < 0, float("nan"), down))
    clear(cleared, CLEARED, BLOCK)


def split_blocks(matrix: torch.Tensor, clears: torch.Tensor | None = None) -> BlockSplit:
    """Split a float32 matrix [rows, depth] of any strides. ``clears`` (int32) is set to 0, for the kernel behind."""
    if is_transposed(matrix):
        return split_blocks(matrix.T, clears).T
    lines, length = matrix.shape
    padded = blocks_of(length, ALIGNMENT) * ALIGNMENT
    parts = torch.empty(2, lines, padded, dtype=torch.float16, device=matrix.device)[..., :length]
    high, low = parts[0], parts[1]
    blocks = blocks_of(lines, BLOCK.value), blocks_of(length, BLOCK.value)
    scale = torch.empty(2, *blocks, dtype=torch.float32, device=matrix.device)
    launch(
        split_blocks_kernel,
        (scale[0].numel(),),
        matrix.device,
        matrix,
        high,
        low,
        scale,
        clears,
        0 if clears is None else clears.numel(),
        lines,
        length,
        *matrix.stride(),
        high.stride(0),
        LOST=_MOST_LOST,
        STRIP=_STRIP,
        FOURS=length % 4 == matrix.stride(0) % 4 == 0,
        num_warps=_WARPS,
    )
    return BlockSplit(high, low, scale[0], scale[1])
