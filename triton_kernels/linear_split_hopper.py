"""The tiled GEMM of ``linear`` for split float32 operands on Hopper: Gluon, the same epilogues.

One warp copies tiles into shared memory, and two warpgroups multiply them (``linear_split_sums``).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.chain import Chain
from triton_kernels.device import multiprocessor_count
from triton_kernels.epilogues import chain_epilogue
from triton_kernels.float32_block_split import BlockSplit
from triton_kernels.float32_split import SplitOperand
from triton_kernels.float32_tiles import LinearSplitConfig, sections_of
from triton_kernels.grid import blocks_of
from triton_kernels.grid import indices as triton_indices
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import async_load
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.linear import store_pointers, tile_at, tile_count, tile_place
from triton_kernels.linear_split_sums import check_scales, multiply_blocks, multiply_once, multiply_rows, release

#: Rows of a program that adds up sections.
_SECTION_ROWS = 8
#: Layouts of an operand's tile, rows or depth first.
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def indices(LENGTH: gl.constexpr):
    """0, 1, ..., LENGTH - 1, in the layout of what they are used with."""
    return gl.arange(0, LENGTH)


@gluon.jit
def store_registers(target, place, tile):
    """Store a tile at place = (row, column, M, N) of a contiguous [M, N] matrix, 32 bytes of each row at a time."""
    row, column, M, N = place
    rows = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, tile.type.layout)), 1)
    columns = gl.expand_dims(gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, tile.type.layout)), 0)
    corner = target + row.to(gl.int64) * N + column
    inside = (rows < M - row) & (columns < N - column)
    gl.store(corner + rows.to(gl.int64) * N + columns, tile.to(target.dtype.element_ty), mask=inside)


@gluon.jit
def copy_tile(operand, row, depth, tile, barrier, DEPTH_FIRST: gl.constexpr):
    async_load(operand, [depth, row] if DEPTH_FIRST else [row, depth], barrier, tile)


@gluon.jit
def item_count(M, N, sections, shares, CONFIG: gl.constexpr):
    """The number of tiles and sections, of which each program takes some."""
    tiles = tile_count(M, N, CONFIG)
    if sections is not None:
        whole, count, _ = shares
        tiles = whole + (tiles - whole) * count
    return tiles


@gluon.jit
def item_place(item, M, N, K, sections, shares, CONFIG: gl.constexpr):
    """Row and column, and terms (first, end), of a tile or section."""
    first, end = 0, K
    tile = item
    if sections is not None:
        whole, _, depth = shares
        if item >= whole:
            divided = tile_count(M, N, CONFIG) - whole
            tile = whole + (item - whole) % divided
            first = (item - whole) // divided * depth
            end = gl.minimum(first + depth, K)
    row, column = tile_place(tile, M, N, CONFIG)
    return row, column, first, end


@gluon.jit
def tile_of_result(row, column, of_result, CONFIG: gl.constexpr):
    """Which of the result's tiles one of the operands' is."""
    begin_row, begin_column, M, N = of_result
    return tile_at(begin_row + row, begin_column + column, M, N, CONFIG)


@gluon.jit
def copy_in(
    inputs,
    weights,
    memory,
    barriers,
    sections,
    shares,
    M,
    N,
    K,
    DEPTHS_FIRST: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The producer. For each tile and step, it copies all parts of both operands. Blocks take two steps each, be it of
    zeros."""
    PARTS: gl.constexpr = CONFIG.parts
    STAGES: gl.constexpr = CONFIG.stages
    input_tiles, weight_tiles = memory
    ready, empty = barriers
    count = 0
    for item in range(gl.program_id(0), item_count(M, N, sections, shares, CONFIG), gl.num_programs(0)):
        row, column, first, end = item_place(item, M, N, K, sections, shares, CONFIG)
        for depth in range(first, first + gl.cdiv(end - first, CONFIG.terms) * CONFIG.terms, CONFIG.block_k):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), PARTS * (CONFIG.block_m + CONFIG.block_n) * CONFIG.block_k * 2)
            for part in gl.static_range(PARTS):
                a, b = input_tiles.index(stage * PARTS + part), weight_tiles.index(stage * PARTS + part)
                copy_tile(inputs[part], row, depth, a, ready.index(stage), DEPTHS_FIRST[0])
                copy_tile(weights[part], column, depth, b, ready.index(stage), DEPTHS_FIRST[1])
            count += 1


@gluon.jit
def multiply(
    output,
    saved,
    scales,
    left,
    operands,
    eps,
    memory,
    barriers,
    sections,
    shares,
    of_result,
    M,
    N,
    K,
    DEPTHS_FIRST: gl.constexpr,
    CHAIN: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The consumers. Each computes its tiles' products and epilogues."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    count = 0
    for item in range(gl.program_id(0), item_count(M, N, sections, shares, CONFIG), gl.num_programs(0)):
        row, column, first, end = item_place(item, M, N, K, sections, shares, CONFIG)
        if not CONFIG.in_blocks:  # while registers are free
            is_left = left + tile_of_result(row, column, of_result, CONFIG)
            check_scales(scales[0][0], row, M, is_left, BLOCK_M, 8)
            check_scales(scales[1][0], column, N, is_left, BLOCK_N, 8)
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout=LAYOUT)
        if CONFIG.in_blocks:
            total, count, factors = multiply_blocks(
                total, row, column, first, end, count, scales, memory, barriers, DEPTHS_FIRST, CONFIG
            )
        elif CONFIG.parts == 2:
            total, count = multiply_rows(total, first, end, count, memory, barriers, DEPTHS_FIRST, CONFIG)
        else:
            total, count = multiply_once(total, first, end, count, memory, barriers, DEPTHS_FIRST, CONFIG)
        release(barriers, count - 1, CONFIG)
        if CONFIG.in_blocks:
            gl.store(left + tile_of_result(row, column, of_result, CONFIG), 1, mask=factors != factors)
        else:
            of_rows = gl.load(scales[0][0] + row + rows, mask=rows < M - row, other=1.0)
            of_columns = gl.load(scales[1][0] + column + columns, mask=columns < N - column, other=1.0)
            total *= gl.expand_dims(of_rows, 1)
            total *= gl.expand_dims(of_columns, 0)
        begin_row, begin_column, rows_of_result, columns_of_result = of_result
        place = (begin_row + row, begin_column + column, rows_of_result, columns_of_result)
        whole, _, _ = shares
        if sections is not None and item >= whole:
            place = ((item - whole) * BLOCK_M, 0, (item - whole + 1) * BLOCK_M, BLOCK_N)
            store_registers(sections, place, total)
        else:
            chain_epilogue(
                total, place, output, saved, operands, eps, store_registers, indices, CHAIN, GROUP_SIZE, gl.float32
            )


@gluon.jit(do_not_specialize=["whole", "count", "section_depth"])
def linear_split_kernel(
    input,  # [M, K] float16: descriptors of the high and, with two parts, low parts
    input_low,
    weight,  # [N, K] likewise
    weight_low,
    output,  # all rows by all columns, for the epilogue
    saved,  # likewise: what the backward pass needs; None where nothing is saved
    scales,  # of both operands: (pointer, 0, 0) to one of each row, or (pointer, stride, stride) to one of each block
    left,  # int32 [tiles]: 0, set to 1 where a tile has no scale somewhere
    sections,  # float32 [count x tiles left x BLOCK_M, BLOCK_N]: products of sections of K; None where there are none
    whole,  # the number of tiles that are whole
    count,  # of sections of each of the others
    section_depth,
    operands,  # of the chain's steps, for the epilogue
    eps,
    of_result,  # the first row and column to compute, and all of the result's
    M,  # to compute
    N,
    K,
    DEPTHS_FIRST: gl.constexpr,  # whether the operands' parts are
    CHAIN: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """CHAIN of input @ weight.T, tile by tile. A persistent program is one producer warp and two consumer
    warpgroups."""
    wait_for_launch_before()
    STAGES: gl.constexpr = CONFIG.stages
    BUFFERS: gl.constexpr = CONFIG.stages * CONFIG.parts
    input_tiles = gl.allocate_shared_memory(input.dtype, [BUFFERS] + input.block_shape, input.layout)
    weight_tiles = gl.allocate_shared_memory(weight.dtype, [BUFFERS] + weight.block_shape, weight.layout)
    barriers = (new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    fence_async_shared()
    memory = (input_tiles, weight_tiles)
    shares = (whole, count, section_depth)
    inputs, weights = (input, input_low), (weight, weight_low)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                output, saved, scales, left, operands, eps, memory, barriers, sections, shares, of_result, M, N, K,
                DEPTHS_FIRST, CHAIN, GROUP_SIZE, CONFIG,
            )),
            (copy_in, (
                inputs, weights, memory, barriers, sections, shares, M, N, K,
                DEPTHS_FIRST, CONFIG,
            )),
        ],
        [1],
        [24],
    )
    # fmt: on


@triton.jit(do_not_specialize=["whole", "count"])
def linear_sections_kernel(
    sections,  # as ``linear_split_kernel``'s
    output,
    saved,
    operands,
    eps,
    whole,
    count,
    of_result,
    M,
    N,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    CONFIG: tl.constexpr,
):
    """CHAIN of the tiles whose sections were stored: their sum, in order."""
    wait_for_launch_before()
    BLOCK_N: tl.constexpr = CONFIG.block_n
    STRIPS: tl.constexpr = CONFIG.block_m // ROWS
    item, strip = tl.program_id(0) // STRIPS, tl.program_id(0) % STRIPS
    divided = tile_count(M, N, CONFIG) - whole
    row, column = tile_place(whole + item, M, N, CONFIG)
    rows = strip * ROWS + tl.arange(0, ROWS)
    source = sections + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for section in range(count):
        total += tl.load(source + (section * divided + item).to(tl.int64) * (CONFIG.block_m * BLOCK_N))
    begin_row, begin_column, rows_of_result, columns_of_result = of_result
    place = (begin_row + row + strip * ROWS, begin_column + column, rows_of_result, columns_of_result)
    chain_epilogue(
        total, place, output, saved, operands, eps, store_pointers, triton_indices, CHAIN, GROUP_SIZE, tl.float32
    )


def _is_depth_first(part: torch.Tensor) -> bool:
    return part.stride(1) != 1


def _descriptor(part: torch.Tensor | None, block_rows: int, block_depth: int) -> TensorDescriptor | None:
    if part is None:
        return None
    if _is_depth_first(part):
        return TensorDescriptor.from_tensor(part.T, [block_depth, block_rows], _TILE_LAYOUT)
    return TensorDescriptor.from_tensor(part, [block_rows, block_depth], _TILE_LAYOUT)


def _scales(operand: SplitOperand | BlockSplit) -> tuple[torch.Tensor, int, int]:
    if isinstance(operand, BlockSplit):
        return operand.scale, operand.scale.stride(0), operand.scale.stride(1)
    return operand.scale, 0, 0


def linear_split(
    input: SplitOperand | BlockSplit,
    weight: SplitOperand | BlockSplit,
    chain: Chain,
    config: LinearSplitConfig,
    operands: Sequence[Any],
    *,
    left: torch.Tensor,
    output: torch.Tensor,
    place: tuple[int, int, int, int] | None = None,
    saved: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    eps: float = 0.0,
    group_size: int = 1,
) -> None:
    """As ``triton_kernels.linear.linear``, for operands [M, K] and [N, K] that were split into ``config.parts``.

    They may be some rows of the chain's. ``place`` is then the first row and column of their results, which are
    multiples of a tile's, and the number of all rows and columns.

    Both or none are split in blocks. A tile that has no scale somewhere is written too, with wrong values, and noted in
    ``left`` (int32 [tiles], 0 before). ``linear`` with ``left`` must follow.

    Where ``config`` divides K, the last tiles are computed in sections of it (``sections_of``): how a result is rounded
    depends on the number of tiles.
    """
    (M, K), N = input.high.shape, weight.high.shape[0]
    if M == 0 or N == 0:
        return
    place = place or (0, 0, M, N)
    assert all(isinstance(each, BlockSplit) == config.in_blocks for each in (input, weight))
    tiles, terms = blocks_of(M, config.block_m) * blocks_of(N, config.block_n), config.terms
    multiprocessors = multiprocessor_count(output.device)
    whole, count, depth = sections_of(tiles, K, multiprocessors, terms) if config.divides else (tiles, 1, K)
    size, sections = (tiles - whole) * count, None
    if size > 0:
        sections = torch.empty(size * config.block_m, config.block_n, dtype=torch.float32, device=output.device)
    launch(
        linear_split_kernel,
        (min(whole + size, multiprocessors),),
        output.device,
        _descriptor(input.high, config.block_m, config.block_k),
        _descriptor(input.low, config.block_m, config.block_k),
        _descriptor(weight.high, config.block_n, config.block_k),
        _descriptor(weight.low, config.block_n, config.block_k),
        output,
        saved,
        (_scales(input), _scales(weight)),
        left,
        sections,
        whole,
        count,
        depth,
        tuple(operands),
        eps,
        place,
        M,
        N,
        K,
        DEPTHS_FIRST=(_is_depth_first(input.high), _is_depth_first(weight.high)),
        CHAIN=chain,
        GROUP_SIZE=group_size,
        CONFIG=config,
        config=config,
        num_warps=8,
    )
    if sections is None:
        return
    launch(
        linear_sections_kernel,
        ((tiles - whole) * (config.block_m // _SECTION_ROWS),),
        output.device,
        sections,
        output,
        saved,
        tuple(operands),
        eps,
        whole,
        count,
        place,
        M,
        N,
        CHAIN=chain,
        GROUP_SIZE=group_size,
        ROWS=_SECTION_ROWS,
        CONFIG=config,
        config=config,
        num_warps=4,
    )
