"""The first part of the row minimum's backward pass: sums of the output's gradient, and the order of the rows by the
group that holds their minimum. It depends on nothing else of the pass.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import add_up, empty_partials, store_sums
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.launch import call, launch, wait_for_launch_before

_LAST = tl.constexpr(2147483647)

#: Up to this many rows, counting takes less time than PyTorch's sort: 8 us against 39 us at 1024 (H200).
_MOST_RANKED_ROWS = 8192
#: Number of programs that share the output's gradient. Where it has few columns, its rows are divided too.
_OUTPUT_GRADIENT_PROGRAMS = 256


@triton.jit(do_not_specialize=["shares", "sum_programs", "row_programs"])  # these go with the batch
def sums_and_ranks_kernel(
    output_gradient,  # [C, M], any strides
    column_stride,
    row_stride,
    row_partials,  # [blocks of C, M] float64: sums over a block's columns
    column_partials,  # [shares of M, C] or None: sums over a share's rows
    column,  # [M]: where each row's minimum was found
    order,  # [M]
    offsets,  # [num_groups + 1]
    M,
    C,
    shares,
    rows_per_program,
    sum_programs,
    num_groups,
    row_programs,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """Sums of the output's gradient, and the order of the rows. They are independent, and a second launch would take
    4 us.

    The first programs take the output's gradient in one pass: they sum over the columns for the minimum, and over the
    rows for the bias. They do so in float64, which costs no time beside the memory traffic. A minimum's gradient is one
    long sum, and all that follows has its error.

    The others count, in one pass: order[rank of m] = m, offsets[g] = number of rows in groups before g.
    """
    wait_for_launch_before()
    program = tl.program_id(0)
    if program < sum_programs:
        share = program % shares
        column_block = program // shares
        columns = column_block * BLOCK_C + tl.arange(0, BLOCK_C)
        column_inside = columns < C
        source = output_gradient + columns.to(tl.int64)[:, None] * column_stride
        total = tl.zeros((BLOCK_C,), tl.float64)
        first_row = share * rows_per_program
        for first in range(first_row, tl.minimum(first_row + rows_per_program, M), BLOCK_M):
            rows = first + tl.arange(0, BLOCK_M)
            inside = column_inside[:, None] & (rows < M)[None, :]
            values = tl.load(source + rows.to(tl.int64)[None, :] * row_stride, mask=inside, other=0.0).to(tl.float64)
            total += tl.sum(values, 1)
            tl.store(row_partials + column_block.to(tl.int64) * M + rows, tl.sum(values, 0), mask=rows < M)
        store_sums(column_partials, share.to(tl.int64) * C + columns, total.to(tl.float32), column_inside)
    else:
        program -= sum_programs
        ranks_rows = program < row_programs
        mine = tl.where(ranks_rows, program, program - row_programs) * BLOCK + tl.arange(0, BLOCK)
        my_group = mine
        my_row = tl.zeros((BLOCK,), tl.int32)
        if ranks_rows:
            my_group = tl.load(column + mine, mask=mine < M, other=0) // GROUP_SIZE
            my_row = mine
        count = tl.zeros((BLOCK, BLOCK_OTHERS), tl.int32)
        for start in range(0, M, BLOCK_OTHERS):
            others = start + tl.arange(0, BLOCK_OTHERS)
            group = tl.load(column + others, mask=others < M, other=_LAST) // GROUP_SIZE
            in_group = (group[None, :] == my_group[:, None]) & (others[None, :] < my_row[:, None])
            count += ((group[None, :] < my_group[:, None]) | in_group).to(tl.int32)
        rank = tl.sum(count, 1)
        if ranks_rows:
            tl.store(order + rank, mine, mask=mine < M)
        else:
            tl.store(offsets + mine, rank, mask=mine <= num_groups)


def _sorted_rows(column: torch.Tensor, num_groups: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """order and offsets, by PyTorch's sort."""
    groups, order = torch.sort(torch.div(column, group_size, rounding_mode="floor"), stable=True)
    bounds = torch.arange(num_groups + 1, dtype=groups.dtype, device=column.device)
    return order.to(torch.int32), torch.searchsorted(groups, bounds, out_int32=True)


def sums_and_order(
    output_gradient: torch.Tensor,
    column: torch.Tensor,
    num_groups: int,
    group_size: int,
    bias_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_partials, order, offsets).

    ``output_gradient`` is [C, M], at any strides. row_partials [blocks, M] are its sums over blocks of its columns, in
    float64, for ``winner_backward``. order [M] has the rows sorted by their winning groups; offsets [num_groups + 1]
    are where each group begins. ``bias_gradient``, [C] in any float dtype or None where it is not wanted, becomes the
    sums of ``output_gradient`` over the rows.
    """
    C, M = output_gradient.shape
    device = output_gradient.device
    block_m, block_c, block = min(1024, next_power_of_2(max(1, M))), 16, 32
    column_blocks = blocks_of(C, block_c)
    shares = max(1, min(blocks_of(M, block_m), _OUTPUT_GRADIENT_PROGRAMS // max(1, column_blocks)))
    rows_per_program = blocks_of(blocks_of(M, shares), block_m) * block_m
    # These may cancel, and their sum is a row's whole gradient: float32's error would show.
    row_partials = torch.empty(column_blocks, M, dtype=torch.float64, device=device)
    shares = blocks_of(M, rows_per_program) if M else 0
    column_partials = empty_partials((bias_gradient,), shares)
    sum_programs, row_programs, rank_programs = shares * column_blocks, blocks_of(M, block), 0
    if M <= _MOST_RANKED_ROWS:
        order = torch.empty(M, dtype=torch.int32, device=device)
        offsets = torch.empty(num_groups + 1, dtype=torch.int32, device=device)
        rank_programs = row_programs + blocks_of(num_groups + 1, block)
    else:
        order, offsets = call(_sorted_rows, column, num_groups, group_size)
    launch(
        sums_and_ranks_kernel,
        (sum_programs + rank_programs,),
        device,
        output_gradient,
        *output_gradient.stride(),
        row_partials,
        *column_partials,
        column,
        order,
        offsets,
        M,
        C,
        max(1, shares),
        rows_per_program,
        sum_programs,
        num_groups,
        row_programs,
        GROUP_SIZE=group_size,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
        BLOCK=block,
        BLOCK_OTHERS=128,
        num_warps=4,
    )
    add_up(column_partials, (bias_gradient,))
    return row_partials, order, offsets
