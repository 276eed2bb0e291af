"""Float32 products on Hopper, of few rows or columns and of batches: the larger operand, here called the weight, is
read once, and split in registers (Gluon).

``linear_split_hopper`` needs both operands split in memory beforehand, which takes longer than the product where the
other has few rows. Tensor cores take their first operand from registers, so here that is the weight: one warp copies
its tiles and those of the split input into shared memory, and two warpgroups split the weight's as they multiply.

Each 64 terms of a weight's row have a scale of their own, as ``float32_split`` gives each row one. Tensor cores
truncate as they add. So high times high of 16 terms is added in registers, in float32, which rounds.

The depth is cut into parts, which programs compute, and whose sums are added in order. Where parts end depends on the
weight's size and the GPU alone, so a row of the result does not depend on how many rows there are.
"""

from dataclasses import replace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.device import multiprocessor_count
from triton_kernels.float32_parts import LOW_SCALE
from triton_kernels.float32_split import split
from triton_kernels.float32_tiles import LinearRegistersConfig, steps_of_parts
from triton_kernels.grid import blocks_of
from triton_kernels.hopper import is_matrix_copyable
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import async_store, load_box, view
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.linear import tile_count, tile_place
from triton_kernels.linear_registers_finish import finish
from triton_kernels.linear_registers_split import BLOCK, BLOCK_K, in_lane_order, split_in_registers


@triton.constexpr_function
def matrix_layout(layout):
    """Of a matrix in memory, where TMA copies it as a box of this layout."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.jit
def fetch(pointers):
    """Begin to bring memory into the nearest cache. A load would take a register until its result is needed."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def item_count(sizes, IN_PARTS: gl.constexpr, CONFIG: gl.constexpr):
    """The number of items that programs compute: tiles of a matrix, by matrices and, IN_PARTS, by parts of the sum."""
    B, M, N, steps, part_steps, _ = sizes
    return tile_count(M, N, CONFIG) * B * (gl.cdiv(steps, part_steps) if IN_PARTS else 1)


@gluon.jit
def place_of(item, sizes, IN_PARTS: gl.constexpr, CONFIG: gl.constexpr):
    """An item's matrix, its first rows of the input and of the weight, its first part, and where its parts end."""
    B, M, N, steps, part_steps, _ = sizes
    tiles = tile_count(M, N, CONFIG)
    m, n = tile_place(item % tiles, M, N, CONFIG)
    if IN_PARTS:
        first = item // tiles // B
        place = item // tiles % B, m, n, first, first + 1
    else:
        place = item // tiles, m, n, 0, gl.cdiv(steps, part_steps)
    return place


@gluon.jit
def copy_in(
    weight,
    high,
    low,
    memory,
    barriers,
    sizes,
    DEPTH_FIRST: gl.constexpr,
    INPUT_DEPTH_FIRST: gl.constexpr,
    IN_PARTS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The producer."""
    BYTES: gl.constexpr = (CONFIG.block_n * 4 + 2 * CONFIG.block_m * 2) * BLOCK_K
    STAGES: gl.constexpr = CONFIG.stages
    CONSUMERS: gl.constexpr = CONFIG.consumers
    weight_tiles, input_tiles = memory
    ready, empty = barriers
    B, M, N, steps, part_steps, is_own = sizes
    count = 0
    for item in range(gl.program_id(0), item_count(sizes, IN_PARTS, CONFIG), gl.num_programs(0)):
        batch, m, n, first, end = place_of(item, sizes, IN_PARTS, CONFIG)
        for step in range(first * part_steps, gl.minimum(end * part_steps, steps)):
            stage, depth = count % STAGES, step * BLOCK_K
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            for i in gl.static_range(CONSUMERS):
                row = n + i * CONFIG.consumer_rows
                of_weight = [batch, depth, row] if DEPTH_FIRST else [batch, row, depth]
                load_box(weight, of_weight, ready.index(stage), weight_tiles.index(CONSUMERS * stage + i))
            of_input = [batch * is_own, depth, m] if INPUT_DEPTH_FIRST else [batch * is_own, m, depth]
            load_box(high, of_input, ready.index(stage), input_tiles.index(2 * stage))
            load_box(low, of_input, ready.index(stage), input_tiles.index(2 * stage + 1))
            count += 1


@gluon.jit
def block_of(tile, place: gl.constexpr, DEPTH_FIRST: gl.constexpr):
    """16 terms of the input's rows, depth first."""
    return tile.slice(place, BLOCK, 0) if DEPTH_FIRST else tile.slice(place, BLOCK, 1).permute((1, 0))


@gluon.jit
def multiply(
    output,
    staged,
    results,
    scales,
    bias,
    any_rest,
    memory,
    barriers,
    sizes,
    PLACE: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
    INPUT_DEPTH_FIRST: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    IN_PARTS: gl.constexpr,
    ADDS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """The consumer at this PLACE of a tile's rows."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    ROWS: gl.constexpr = CONFIG.consumer_rows
    STAGES: gl.constexpr = CONFIG.stages
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_M, 16])
    weight_tiles, input_tiles = memory
    input_scale, weight_bounds = scales
    ready, empty = barriers
    B, M, N, steps, part_steps, is_own = sizes
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    of_rows = PLACE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    of_input = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [ROWS // 16], [0]))  # one for each thread
    count = 0
    for item in range(gl.program_id(0), item_count(sizes, IN_PARTS, CONFIG), gl.num_programs(0)):
        batch, m, n, first, end = place_of(item, sizes, IN_PARTS, CONFIG)
        scale_of_input = input_scale + batch * is_own * M
        fetch(scale_of_input + gl.minimum(m + of_input, M - 1))
        for part in range(first, end):
            total = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=LAYOUT)
            block = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=LAYOUT)
            mixed = gl.zeros((ROWS, BLOCK_M), gl.float32, layout=LAYOUT)
            bound = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
            for _ in range(part * part_steps, gl.minimum(part * part_steps + part_steps, steps)):
                stage = count % STAGES
                tile = weight_tiles.index(CONFIG.consumers * stage + PLACE)
                if DEPTH_FIRST:
                    tile = tile.permute((1, 0))
                else:
                    tile = view(tile, tile.dtype, [ROWS, BLOCK_K], in_lane_order(ROWS))
                mbarrier.wait(ready.index(stage), count // STAGES & 1)
                blocks, scale, of_step = split_in_registers(tile, LAYOUT)
                bound += of_step
                for i in gl.static_range(BLOCK_K // BLOCK):
                    high, low = blocks[i]
                    input_high = block_of(input_tiles.index(2 * stage), i * BLOCK, INPUT_DEPTH_FIRST)
                    input_low = block_of(input_tiles.index(2 * stage + 1), i * BLOCK, INPUT_DEPTH_FIRST)
                    block = warpgroup_mma(high, input_high, block, use_acc=False, is_async=True)
                    mixed = warpgroup_mma(low, input_high, mixed, use_acc=i > 0, is_async=True)
                    mixed = warpgroup_mma(high, input_low, mixed, is_async=True)
                    block, mixed = warpgroup_mma_wait(num_outstanding=2 if i < 3 else 0, deps=(block, mixed))
                    total += block * scale
                if staged is not None:
                    tma.store_wait(pendings=0)  # of the item before, whose memory the next results take
                mbarrier.arrive(empty.index(stage), count=1)
                total += mixed * (scale * (1.0 / LOW_SCALE))
                count += 1
            behind = count >> 31  # 0: what depends on it takes no registers before
            rows, input_rows = n + behind + of_rows, m + behind + of_input
            of_column = gl.load(scale_of_input + input_rows, mask=input_rows < M, other=1.0)
            is_bounded = (bound != 0.0) & (rows < N)
            bits = bound.to(gl.int32, bitcast=True)
            gl.atomic_max(weight_bounds + batch * N + rows, bits, mask=is_bounded, sem="relaxed")
            gl.store(any_rest + rows * 0, gl.full_like(rows, 1), mask=is_bounded)
            if PLACE == 0:
                gl.store(any_rest + of_input * 0, gl.full_like(of_input, 1), mask=of_column != of_column)
            total *= gl.expand_dims(gl.convert_layout(of_column, OF_COLUMNS), 0)
            if bias is not None:
                if TRANSPOSED:
                    shift = gl.load(bias + input_rows, mask=(input_rows < M) & (part == 0), other=0.0)
                    total += gl.expand_dims(gl.convert_layout(shift, OF_COLUMNS), 0)
                else:
                    total += gl.expand_dims(gl.load(bias + rows, mask=(rows < N) & (part == 0), other=0.0), 1)
            of_part = (part * B if IN_PARTS else 0) + batch
            if staged is None:
                columns = m + behind + gl.arange(0, BLOCK_M, layout=OF_COLUMNS)
                inside = gl.expand_dims(rows < N, 1) & gl.expand_dims(columns < M, 0)
                place = of_part.to(gl.int64) * M * N + _elements(rows, columns, M, N, TRANSPOSED)
                if ADDS:
                    total += gl.load(output + place, mask=inside & (part > 0), other=0.0)
                gl.store(output + place, total, mask=inside)
            else:
                result = results.index(PLACE)
                box = view(result, staged.dtype, staged.block_shape, staged.layout)
                if TRANSPOSED:
                    result.store(total)
                    fence_async_shared()
                    async_store(staged, [of_part, n + PLACE * ROWS, m], box)
                else:
                    result.permute((1, 0)).store(total)
                    fence_async_shared()
                    async_store(staged, [of_part, m, n + PLACE * ROWS], box)
    if staged is not None:
        tma.store_wait(pendings=0)


@gluon.jit
def _elements(rows, columns, M, N, TRANSPOSED: gl.constexpr):
    """Where a result lies that has the weight's rows and the input's: [M, N], or TRANSPOSED [N, M]."""
    if TRANSPOSED:
        place = gl.expand_dims(rows.to(gl.int64) * M, 1) + gl.expand_dims(columns, 0)
    else:
        place = gl.expand_dims(columns.to(gl.int64) * N, 0) + gl.expand_dims(rows, 1)
    return place


@gluon.jit(
    do_not_specialize=["B", "M", "N", "steps", "part_steps", "is_own"]
)  # a loop of one step would be none, and spill
def linear_registers_kernel(
    weight,  # a descriptor of [B, N, K] float32, rows or depth first
    high,  # those of the input's parts, [B, M, K] float16, likewise
    low,
    output,  # [B, M, N] float32, TRANSPOSED [B, N, M]; IN_PARTS one for each part, for ``finish_kernel``
    staged,  # the same as a descriptor of a consumer's part of a tile, where results go through shared memory; or None
    scales,  # pointers to [B, M], and to the bounds [B, N] (``bounds_of``): zeros before
    bias,  # [N] float32, TRANSPOSED [M]; or None
    any_rest,  # [1] int32: set to 1 where a row has a bound or no scale
    B,
    M,
    N,
    steps,  # of BLOCK_K terms
    part_steps,  # those of a part
    is_own,  # 1 where each matrix has an input of its own, 0 where all have the first
    DEPTH_FIRST: gl.constexpr,
    INPUT_DEPTH_FIRST: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    IN_PARTS: gl.constexpr,
    ADDS: gl.constexpr,  # the parts' sums in the output
    CONFIG: gl.constexpr,
):
    """input @ weight.T: tiles of the weight's rows by tiles of the input's. A persistent program is one producer warp
    and two consumer warpgroups."""
    wait_for_launch_before()
    STAGES: gl.constexpr = CONFIG.stages
    weight_tiles = gl.allocate_shared_memory(
        gl.float32, [STAGES * CONFIG.consumers] + weight.block_shape[1:], matrix_layout(weight.layout)
    )
    input_tiles = gl.allocate_shared_memory(gl.float16, [2 * STAGES] + high.block_shape[1:], matrix_layout(high.layout))
    if staged is None:
        results = input_tiles  # none are kept there
    else:
        results = gl.allocate_shared_memory(
            gl.float32, [CONFIG.consumers] + staged.block_shape[1:], matrix_layout(staged.layout)
        )
    memory = (weight_tiles, input_tiles)
    barriers = (new_barriers(STAGES, 1), new_barriers(STAGES, CONFIG.consumers))
    fence_async_shared()
    sizes = (B, M, N, steps, part_steps, is_own)
    # fmt: off
    if CONFIG.consumers == 1:
        gl.warp_specialize(
            [
                (multiply, (
                    output, staged, results, scales, bias, any_rest, memory, barriers, sizes,
                    0, DEPTH_FIRST, INPUT_DEPTH_FIRST, TRANSPOSED, IN_PARTS, ADDS, CONFIG,
                )),
                (copy_in, (
                    weight, high, low, memory, barriers, sizes, DEPTH_FIRST, INPUT_DEPTH_FIRST, IN_PARTS, CONFIG,
                )),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    output, staged, results, scales, bias, any_rest, memory, barriers, sizes,
                    0, DEPTH_FIRST, INPUT_DEPTH_FIRST, TRANSPOSED, IN_PARTS, ADDS, CONFIG,
                )),
                (multiply, (
                    output, staged, results, scales, bias, any_rest, memory, barriers, sizes,
                    1, DEPTH_FIRST, INPUT_DEPTH_FIRST, TRANSPOSED, IN_PARTS, ADDS, CONFIG,
                )),
                (copy_in, (
                    weight, high, low, memory, barriers, sizes, DEPTH_FIRST, INPUT_DEPTH_FIRST, IN_PARTS, CONFIG,
                )),
            ],
            [4, 1],
            [240, 24],
        )
    # fmt: on


def linear_registers(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    memory: torch.Tensor,
    *,
    output: torch.Tensor,
    transposed: bool = False,
) -> None:
    """output [B, M, N] = input [B, M, K] @ weight [B, N, K].mT + bias [N], in float32; ``transposed`` it is [B, N, M],
    and the bias [M]. The input may be one matrix, [1, M, K], for all.

    It may have any strides, and TMA can copy the weight (``hopper.is_matrix_copyable``). The output is contiguous.
    ``memory`` [B * N + 1] (int32) gets the bounds of the weight's rows (``bounds_of``), and at last 1 where there are
    any, or rows of the input without a scale: results that cannot be trusted there come from three TF32 products.
    """
    (inputs, M, K), (B, N, _) = input.shape, weight.shape
    assert inputs in (1, B)
    bounds, any_rest = memory[:-1], memory[-1:]
    parts_of_input = split(input, 2, may_lose=False, lane_order=not _is_depth_first(weight), clears=memory)
    scales = parts_of_input.scale, bounds
    multiprocessors = multiprocessor_count(output.device)
    steps, part_steps = blocks_of(K, BLOCK_K.value), steps_of_parts(B * N, K, multiprocessors)
    config, parts = LinearRegistersConfig.of_rows(M, steps), blocks_of(steps, part_steps)
    tiles = B * blocks_of(M, config.block_m) * blocks_of(N, config.block_n)
    in_parts = tiles < multiprocessors and blocks_of(tiles * parts, multiprocessors) < parts
    target = output.new_empty(parts, *output.shape) if in_parts else output
    adds = parts > 1 and not in_parts
    matrices = target.view(-1, *target.shape[-2:])
    if not adds and part_steps <= config.most_staged_steps and is_matrix_copyable(matrices):
        config = replace(config, is_staged=True)
    rows = [config.consumer_rows, config.block_m]
    launch(
        linear_registers_kernel,
        (min(tiles * (parts if in_parts else 1), multiprocessors),),
        output.device,
        _of_step(weight, config.consumer_rows),
        _of_step(parts_of_input.high, config.block_m),
        _of_step(parts_of_input.low, config.block_m),  # type: ignore[arg-type]
        target,
        _descriptor(matrices, rows if transposed else rows[::-1]) if config.is_staged else None,
        scales,
        None if in_parts else bias,
        any_rest,
        B,
        M,
        N,
        steps,
        part_steps,
        int(inputs == B),
        DEPTH_FIRST=_is_depth_first(weight),
        INPUT_DEPTH_FIRST=_is_depth_first(parts_of_input.high),
        TRANSPOSED=transposed,
        IN_PARTS=in_parts,
        ADDS=adds,
        CONFIG=config,
        config=config,
        num_warps=config.consumer_rows // 16,
    )
    sums = target if in_parts else None
    finish(sums, parts, input, weight, scales, bias, any_rest, output=output, transposed=transposed)


def _is_depth_first(operand: torch.Tensor) -> bool:
    return operand.stride(-1) != 1


def _of_step(operand: torch.Tensor, rows: int) -> TensorDescriptor:
    """Boxes of so many rows and the terms of a step, of one matrix."""
    if _is_depth_first(operand):
        return _descriptor(operand.mT, [BLOCK_K.value, rows])
    return _descriptor(operand, [rows, BLOCK_K.value])


def _descriptor(matrices: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Boxes of one of them."""
    swizzled = min(128, box[1] * matrices.element_size())
    layout = gl.NVMMASharedLayout(swizzled, 8 * matrices.element_size(), rank=3)
    return TensorDescriptor.from_tensor(matrices, [1, *box], layout)
