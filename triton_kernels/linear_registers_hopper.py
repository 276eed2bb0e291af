"""Float32 products of few rows on Hopper: the weight is read once, and split in registers (Gluon).

``linear_split_hopper`` needs both operands split in memory beforehand, which takes longer than the product where the
other has few rows. Tensor cores take their first operand from registers, so here that is the weight: one warp copies
its tiles and those of the split input into shared memory, and two warpgroups split the weight's as they multiply.

Each 64 terms of a weight's row have a scale of their own, as ``float32_split`` gives each row one. Tensor cores
truncate as they add. So high times high of 16 terms is added in registers, in float32, which rounds.

The depth is cut into parts, which programs compute, and whose sums are added in order. Where parts end depends on the
weight's size and the GPU alone, so a row of the result does not depend on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.device import multiprocessor_count
from triton_kernels.float32_split import (
    LOW_SCALE,
    LinearRegistersConfig,
    balance_of,
    magnitude,
    scales_of,
    split,
    steps_of_parts,
)
from triton_kernels.grid import blocks_of
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import load_box
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.linear import (
    FLOAT32_INPUT_PRECISION,
    LinearConfig,
    load_pointers,
    multiply_tile,
    tile_count,
    tile_place,
)

#: Terms of a step, which share a scale, and those that tensor cores add up.
BLOCK_K, _BLOCK = gl.constexpr(64), gl.constexpr(16)
_HALF = gl.constexpr(64)


@triton.constexpr_function
def matrix_layout(layout):
    """Of a matrix in memory, where TMA copies it as a box of this layout."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


#: The balance of a step that float16 cannot hold: no other steps make up for it.
_UNFIT = gl.constexpr(-(1 << 28))


@gluon.jit
def load_block(tile, place: gl.constexpr, LAYOUT: gl.constexpr):
    """16 columns of the tile [rows, 64] of shared memory, as tensor cores take them, and their magnitudes."""
    value = tile.slice(place, _BLOCK, 1).load(gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2))
    return value, magnitude(value)


@gluon.jit
def split_block(value, up):
    """High and low float16 parts."""
    scaled = value * up
    high = scaled.to(gl.float16)
    return high, ((scaled - high.to(gl.float32)) * LOW_SCALE).to(gl.float16)


@gluon.jit
def split_in_registers(tile, LAYOUT: gl.constexpr):
    """The tile [rows, 64] of shared memory as four blocks of high and low float16 parts in registers; its rows' scales;
    and the balance of each (``balance_of``), negative where float16 cannot hold it."""
    a, a_size = load_block(tile, 0, LAYOUT)
    b, b_size = load_block(tile, 16, LAYOUT)
    c, c_size = load_block(tile, 32, LAYOUT)
    d, d_size = load_block(tile, 48, LAYOUT)
    largest = gl.max(gl.maximum(gl.maximum(a_size, b_size), gl.maximum(c_size, d_size)), 1)
    up, down, is_limited = scales_of(largest)
    up = gl.expand_dims(up, 1)
    of_row = gl.expand_dims(largest, 1)
    balance = balance_of(a_size, of_row) + balance_of(b_size, of_row)
    balance += balance_of(c_size, of_row) + balance_of(d_size, of_row)
    balance = gl.where((largest > 0) & is_limited, _UNFIT, gl.sum(balance, 1))
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    scale = gl.expand_dims(gl.convert_layout(down, OF_ROWS, assert_trivial=True), 1)
    balance = gl.convert_layout(balance, OF_ROWS, assert_trivial=True)
    return (split_block(a, up), split_block(b, up), split_block(c, up), split_block(d, up)), scale, balance


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
    first = item // tiles // B
    return item // tiles % B, m, n, first, first + 1 if IN_PARTS else gl.cdiv(steps, part_steps)


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
    weight_tiles, input_tiles = memory
    ready, empty, _ = barriers
    B, M, N, steps, part_steps, is_own = sizes
    count = 0
    for item in range(gl.program_id(0), item_count(sizes, IN_PARTS, CONFIG), gl.num_programs(0)):
        batch, m, n, first, end = place_of(item, sizes, IN_PARTS, CONFIG)
        for step in range(first * part_steps, gl.minimum(end * part_steps, steps)):
            stage, depth = count % STAGES, step * BLOCK_K
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            of_weight = [batch, depth, n] if DEPTH_FIRST else [batch, n, depth]
            load_box(weight, of_weight, ready.index(stage), weight_tiles.index(stage))
            of_input = [batch * is_own, depth, m] if INPUT_DEPTH_FIRST else [batch * is_own, m, depth]
            load_box(high, of_input, ready.index(stage), input_tiles.index(2 * stage))
            load_box(low, of_input, ready.index(stage), input_tiles.index(2 * stage + 1))
            count += 1


@gluon.jit
def block_of(tile, place: gl.constexpr, DEPTH_FIRST: gl.constexpr):
    """16 terms of the input's rows, depth first."""
    return tile.slice(place, _BLOCK, 0) if DEPTH_FIRST else tile.slice(place, _BLOCK, 1).permute((1, 0))


@gluon.jit
def multiply(
    output,
    scales,
    bias,
    any_rest,
    memory,
    barriers,
    sizes,
    HALF: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
    INPUT_DEPTH_FIRST: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    IN_PARTS: gl.constexpr,
    ADDS: gl.constexpr,
    CONFIG: gl.constexpr,
):
    """A consumer: HALF of a tile's rows. While it splits a step's, the other one multiplies: they take turns."""
    BLOCK_M: gl.constexpr = CONFIG.block_m
    STAGES: gl.constexpr = CONFIG.stages
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    weight_tiles, input_tiles = memory
    input_scale, weight_scale = scales
    ready, empty, turn = barriers
    B, M, N, steps, part_steps, is_own = sizes
    of_half = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    of_input = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    count = 0
    for item in range(gl.program_id(0), item_count(sizes, IN_PARTS, CONFIG), gl.num_programs(0)):
        batch, m, n, first, end = place_of(item, sizes, IN_PARTS, CONFIG)
        for part in range(first, end):
            total = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
            block = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
            mixed = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
            balance = gl.zeros((_HALF,), gl.int32, layout=gl.SliceLayout(1, LAYOUT))
            for _ in range(part * part_steps, gl.minimum(part * part_steps + part_steps, steps)):
                stage = count % STAGES
                tile = weight_tiles.index(stage)
                tile = (tile.permute((1, 0)) if DEPTH_FIRST else tile).slice(HALF * _HALF, _HALF, 0)
                mbarrier.wait(ready.index(stage), count // STAGES & 1)
                blocks, scale, of_step = split_in_registers(tile, LAYOUT)
                balance = gl.maximum(balance + of_step, _UNFIT)
                mbarrier.wait(turn.index(HALF), (count & 1) ^ (1 - HALF))
                for i in gl.static_range(BLOCK_K // _BLOCK):
                    high, low = blocks[i]
                    input_high = block_of(input_tiles.index(2 * stage), i * _BLOCK, INPUT_DEPTH_FIRST)
                    input_low = block_of(input_tiles.index(2 * stage + 1), i * _BLOCK, INPUT_DEPTH_FIRST)
                    block = warpgroup_mma(high, input_high, block, use_acc=False, is_async=True)
                    mixed = warpgroup_mma(low, input_high, mixed, use_acc=i > 0, is_async=True)
                    mixed = warpgroup_mma(high, input_low, mixed, is_async=True)
                    if i == BLOCK_K // _BLOCK - 1:
                        mbarrier.arrive(turn.index(1 - HALF), count=1)
                    block, mixed = warpgroup_mma_wait(num_outstanding=2 if i < 3 else 0, deps=(block, mixed))
                    total += block * scale
                mbarrier.arrive(empty.index(stage), count=1)
                total += mixed * (scale * (1.0 / LOW_SCALE))
                count += 1
            behind = count >> 31  # 0: what depends on it takes no registers before
            rows, columns = n + behind + of_half, m + behind + of_input
            is_left = (balance < 0) & (rows < N)
            gl.store(weight_scale + batch * N + rows, gl.full_like(rows, float("nan"), dtype=gl.float32), mask=is_left)
            gl.store(any_rest + rows * 0, gl.full_like(rows, 1), mask=is_left)
            total *= gl.expand_dims(gl.load(input_scale + batch * is_own * M + columns, mask=columns < M, other=1.0), 0)
            inside = gl.expand_dims(rows < N, 1) & gl.expand_dims(columns < M, 0)
            place = _elements(rows, columns, M, N, TRANSPOSED)
            target = output + ((part * B if IN_PARTS else 0) + batch).to(gl.int64) * M * N
            if bias is not None:
                total += gl.expand_dims(gl.load(bias + rows, mask=(rows < N) & (part == 0), other=0.0), 1)
            if ADDS:
                total += gl.load(target + place, mask=inside & (part > 0), other=0.0)
            gl.store(target + place, total, mask=inside)


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
    output,  # [B, M, N] float32, TRANSPOSED [B, N, M]; IN_PARTS one for each part, for ``add_parts_kernel``
    scales,  # pointers to [B, M], and to [B, N] zeros: NaN is stored for a row that is left
    bias,  # [N] float32 or None
    any_rest,  # [1] int32: set to 1 where a row is left
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
        gl.float32, [STAGES] + weight.block_shape[1:], matrix_layout(weight.layout)
    )
    input_tiles = gl.allocate_shared_memory(gl.float16, [2 * STAGES] + high.block_shape[1:], matrix_layout(high.layout))
    memory = (weight_tiles, input_tiles)
    barriers = (new_barriers(STAGES, 1), new_barriers(STAGES, 2), new_barriers(2, 1))
    fence_async_shared()
    sizes = (B, M, N, steps, part_steps, is_own)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                output, scales, bias, any_rest, memory, barriers, sizes,
                0, DEPTH_FIRST, INPUT_DEPTH_FIRST, TRANSPOSED, IN_PARTS, ADDS, CONFIG,
            )),
            (multiply, (
                output, scales, bias, any_rest, memory, barriers, sizes,
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


@triton.jit
def add_parts_kernel(
    parts,  # [PARTS, rows, N] float32
    output,  # [rows, N] float32
    bias,  # [N] float32 or None
    rows,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts' sum in order, with the bias behind the first."""
    wait_for_launch_before()
    row, columns = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    place = row * N + columns
    total = tl.load(parts + place, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + tl.cast(part, tl.int64) * rows * N + place, mask=inside, other=0.0)
    tl.store(output + place, total, mask=inside)


@triton.jit
def left_tiles_kernel(
    input,  # [B, M, K]: (pointer, row stride, depth stride), and between matrices as below
    weight,  # [B, N, K] likewise
    output,  # as ``linear_registers_kernel``'s
    scales,  # [B, M] and [B, N]: NaN where a row is left
    bias,
    any_rest,  # [1]: 0 where none is
    B,
    M,
    N,
    K,
    input_stride,
    weight_stride,
    is_own,
    TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The results of rows that are left, as three TF32 products of their tiles."""
    wait_for_launch_before()
    input_scale, weight_scale = scales
    tiles = tile_count(M, N, CONFIG)
    if tl.load(any_rest) != 0:
        for item in range(tl.program_id(0), B * tiles, tl.num_programs(0)):
            matrix = item // tiles
            m, n = tile_place(item % tiles, M, N, CONFIG)
            rows, columns = m + tl.arange(0, CONFIG.block_m), n + tl.arange(0, CONFIG.block_n)
            of_rows = tl.load(input_scale + matrix * is_own * M + rows, mask=rows < M, other=1.0)
            of_columns = tl.load(weight_scale + matrix * N + columns, mask=columns < N, other=1.0)
            is_left = (of_rows != of_rows)[:, None] | (of_columns != of_columns)[None, :]
            if tl.max(tl.max(is_left.to(tl.int32), 1), 0) != 0:
                a = (input[0] + matrix.to(tl.int64) * input_stride, input[1], input[2])
                b = (weight[0] + matrix.to(tl.int64) * weight_stride, weight[1], weight[2])
                place, steps = (m, n, M, N), tl.cdiv(K, CONFIG.block_k)
                tile = multiply_tile(a, b, place, steps, K, load_pointers, load_pointers, INPUT_PRECISION, CONFIG)
                is_left &= (rows < M)[:, None] & (columns < N)[None, :]
                if bias is not None:
                    tile += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
                target = output + matrix.to(tl.int64) * M * N
                if TRANSPOSED:
                    target += columns.to(tl.int64)[None, :] * M + rows[:, None]
                else:
                    target += rows.to(tl.int64)[:, None] * N + columns[None, :]
                tl.store(target, tile, mask=is_left)


#: Columns of a program of ``add_parts_kernel``.
_ADDED = 1024


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
    without a bias. The input may be one matrix, [1, M, K], for all.

    It may have any strides, and TMA can copy the weight (``hopper.is_matrix_copyable``). The output is
    contiguous. ``memory`` [B * N + 1] (float32) is all 0, and has NaN in the places of the weight's rows that were left
    to three TF32 products, and at last 1 (int32) where there are such, or rows of the input.
    """
    (inputs, M, K), (B, N, _) = input.shape, weight.shape
    assert inputs in (1, B) and not (transposed and bias is not None)
    weight_scale, any_rest = memory[:-1].view(B, N), memory[-1:].view(torch.int32)
    parts_of_input = split(input, 2, any_rest)
    scales = parts_of_input.scale, weight_scale
    multiprocessors = multiprocessor_count(output.device)
    config, part_steps = LinearRegistersConfig.of_rows(M), steps_of_parts(B * N, K, multiprocessors)
    tiles, steps = B * blocks_of(M, config.block_m) * blocks_of(N, config.block_n), blocks_of(K, BLOCK_K.value)
    parts = blocks_of(steps, part_steps)
    in_parts = tiles < multiprocessors and blocks_of(tiles * parts, multiprocessors) < parts
    target = output.new_empty(parts, *output.shape) if in_parts else output
    launch(
        linear_registers_kernel,
        (min(tiles * (parts if in_parts else 1), multiprocessors),),
        output.device,
        _descriptor(weight, config.block_n),
        _descriptor(parts_of_input.high, config.block_m),
        _descriptor(parts_of_input.low, config.block_m),  # type: ignore[arg-type]
        target,
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
        ADDS=parts > 1 and not in_parts,
        CONFIG=config,
        config=config,
        num_warps=4,
    )
    if in_parts:
        rows = output.shape[:-1].numel()
        launch(
            add_parts_kernel,
            (blocks_of(output.shape[-1], _ADDED), rows),
            output.device,
            target,
            output,
            bias,
            rows,
            output.shape[-1],
            PARTS=parts,
            BLOCK=_ADDED,
        )
    of_rest = LinearConfig(64, 64, 32, num_warps=4)
    launch(
        left_tiles_kernel,
        (min(B * blocks_of(M, of_rest.block_m) * blocks_of(N, of_rest.block_n), 2 * multiprocessors),),
        output.device,
        (input, *input.stride()[1:]),
        (weight, *weight.stride()[1:]),
        output,
        scales,
        bias,
        any_rest,
        B,
        M,
        N,
        K,
        input.stride(0) if inputs == B else 0,
        weight.stride(0),
        int(inputs == B),
        TRANSPOSED=transposed,
        INPUT_PRECISION=FLOAT32_INPUT_PRECISION,
        CONFIG=of_rest,
        config=of_rest,
        num_warps=of_rest.num_warps,
        num_stages=of_rest.num_stages,
    )


def _is_depth_first(operand: torch.Tensor) -> bool:
    return operand.stride(-1) != 1


def _descriptor(operand: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of boxes of so many rows and the terms of a step, of one matrix."""
    lines, box = (operand.mT, [BLOCK_K.value, rows]) if _is_depth_first(operand) else (operand, [rows, BLOCK_K.value])
    swizzled = min(128, box[1] * operand.element_size())
    layout = gl.NVMMASharedLayout(swizzled, 8 * operand.element_size(), rank=3)
    return TensorDescriptor.from_tensor(lines, [1, *box], layout)
