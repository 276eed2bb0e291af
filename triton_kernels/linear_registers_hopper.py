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

from triton_kernels.float32_split import (
    LOW_SCALE,
    LinearRegistersConfig,
    SplitOperand,
    balance_of,
    magnitude,
    scales_of,
)
from triton_kernels.grid import blocks_of
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import async_load
from triton_kernels.launch import launch, wait_for_launch_before

#: Rows of the weight in a program's tile: 64 for each of two warpgroups.
BLOCK_N = gl.constexpr(128)
#: Terms of a step, which share a scale, and those that tensor cores add up.
BLOCK_K, _BLOCK = gl.constexpr(64), gl.constexpr(16)
_HALF = gl.constexpr(64)

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
def copy_in(weight, high, low, memory, barriers, n, m, first, steps, DEPTH_FIRST: gl.constexpr, STAGES: gl.constexpr):
    """The producer."""
    BYTES: gl.constexpr = (BLOCK_N * 4 + 2 * high.block_shape[0] * 2) * BLOCK_K
    weight_tiles, input_tiles = memory
    ready, empty = barriers
    for step in range(0, steps):
        stage, depth = step % STAGES, first + step * BLOCK_K
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        async_load(weight, [depth, n] if DEPTH_FIRST else [n, depth], ready.index(stage), weight_tiles.index(stage))
        async_load(high, [m, depth], ready.index(stage), input_tiles.index(2 * stage))
        async_load(low, [m, depth], ready.index(stage), input_tiles.index(2 * stage + 1))


@gluon.jit
def block_of(tile, place: gl.constexpr):
    """16 terms of the input's rows, depth first."""
    return tile.slice(place, _BLOCK, 1).permute((1, 0))


@gluon.jit
def multiply(
    output,
    scales,
    bias,
    any_rest,
    memory,
    barriers,
    place,
    steps,
    HALF: gl.constexpr,
    DEPTH_FIRST: gl.constexpr,
    IN_PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer: HALF of a tile's rows. While it splits a step's, the other one multiplies."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    weight_tiles, input_tiles = memory
    input_scale, weight_scale = scales
    ready, empty = barriers
    n, m, part, M, N = place
    total = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
    block = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
    mixed = gl.zeros((_HALF, BLOCK_M), gl.float32, layout=LAYOUT)
    balance = gl.zeros((_HALF,), gl.int32, layout=gl.SliceLayout(1, LAYOUT))
    for step in range(0, steps):
        stage = step % STAGES
        tile = weight_tiles.index(stage)
        tile = (tile.permute((1, 0)) if DEPTH_FIRST else tile).slice(HALF * _HALF, _HALF, 0)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        blocks, scale, of_step = split_in_registers(tile, LAYOUT)
        balance = gl.maximum(balance + of_step, _UNFIT)
        for i in gl.static_range(BLOCK_K // _BLOCK):
            high, low = blocks[i]
            input_high = block_of(input_tiles.index(2 * stage), i * _BLOCK)
            input_low = block_of(input_tiles.index(2 * stage + 1), i * _BLOCK)
            block = warpgroup_mma(high, input_high, block, use_acc=False, is_async=True)
            mixed = warpgroup_mma(low, input_high, mixed, use_acc=i > 0, is_async=True)
            mixed = warpgroup_mma(high, input_low, mixed, is_async=True)
            block, mixed = warpgroup_mma_wait(num_outstanding=2 if i < 3 else 0, deps=(block, mixed))
            total += block * scale
        mbarrier.arrive(empty.index(stage), count=1)
        total += mixed * (scale * (1.0 / LOW_SCALE))
    rows = n + HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, LAYOUT))
    columns = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    is_left = (balance < 0) & (rows < N)
    gl.store(weight_scale + rows, gl.full_like(rows, float("nan"), dtype=gl.float32), mask=is_left)
    gl.store(any_rest + rows * 0, gl.full_like(rows, 1), mask=is_left)
    if not IN_PARTS:
        total *= gl.expand_dims(gl.load(input_scale + columns, mask=columns < M, other=1.0), 0)
        if bias is not None:
            total += gl.expand_dims(gl.load(bias + rows, mask=rows < N, other=0.0), 1)
    inside = gl.expand_dims(rows < N, 1) & gl.expand_dims(columns < M, 0)
    lines = (part.to(gl.int64) * M + columns) * N
    gl.store(output + gl.expand_dims(lines, 0) + gl.expand_dims(rows, 1), total, mask=inside)


@gluon.jit
def linear_registers_kernel(
    weight,  # a descriptor of [N, K] float32, rows or depth first
    high,  # those of the input's parts, [M, K] float16
    low,
    output,  # [M, N] float32; IN_PARTS [parts, M, N], for ``add_parts_kernel``
    scales,  # pointers to [M], and to [N] zeros: NaN is stored for a row that is left to ``linear_rest_kernel``
    bias,  # [N] float32 or None
    any_rest,  # [1] int32: set to 1 where a row is left
    M,
    N,
    steps,  # of BLOCK_K terms
    part_steps,  # those of a part
    DEPTH_FIRST: gl.constexpr,
    IN_PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """input @ weight.T: tiles of the weight's rows, by tiles of the input's, by parts of the sum."""
    wait_for_launch_before()
    weight_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + weight.block_shape, weight.layout)
    input_tiles = gl.allocate_shared_memory(gl.float16, [2 * STAGES] + high.block_shape, high.layout)
    memory, barriers = (weight_tiles, input_tiles), (new_barriers(STAGES, 1), new_barriers(STAGES, 2))
    fence_async_shared()
    n, m, part = gl.program_id(0) * BLOCK_N, gl.program_id(1) * BLOCK_M, gl.program_id(2)
    first = part * part_steps
    steps = gl.minimum(steps - first, part_steps)
    place = (n, m, part, M, N)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                output, scales, bias, any_rest, memory, barriers, place, steps,
                0, DEPTH_FIRST, IN_PARTS, BLOCK_M, STAGES,
            )),
            (multiply, (
                output, scales, bias, any_rest, memory, barriers, place, steps,
                1, DEPTH_FIRST, IN_PARTS, BLOCK_M, STAGES,
            )),
            (copy_in, (weight, high, low, memory, barriers, n, m, first * BLOCK_K, steps, DEPTH_FIRST, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


@triton.jit
def add_parts_kernel(
    parts,  # [PARTS, M, N] float32
    output,  # [M, N] float32
    input_scale,  # [M] float32
    bias,  # [N] float32 or None
    M,
    N,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts' sum in order, scaled, with the bias."""
    wait_for_launch_before()
    row, columns = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    place = row * N + columns
    total = tl.load(parts + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + tl.cast(part, tl.int64) * M * N + place, mask=inside, other=0.0)
    total *= tl.load(input_scale + row)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(output + place, total, mask=inside)


#: Columns of a program of ``add_parts_kernel``.
_ADDED = 1024


def linear_registers(
    input: SplitOperand,
    weight: torch.Tensor,
    config: LinearRegistersConfig,
    bias: torch.Tensor | None,
    *,
    output: torch.Tensor,
    weight_scale: torch.Tensor,
    any_rest: torch.Tensor,
) -> None:
    """output [M, N] = input [M, K] @ weight [N, K].T + bias [N], in float32.

    The input's parts are depth-contiguous, and TMA can copy the weight (``hopper.is_matrix_copyable``).
    ``weight_scale`` [N] (float32) is all 0, and NaN is stored for rows that are left: ``linear`` with ``rest`` must
    follow. ``any_rest`` [1] (int32) is set to 1 where there are such.
    """
    (M, K), N = input.high.shape, weight.shape[0]
    is_depth_first = weight.stride(1) != 1
    rows, depth = BLOCK_N.value, BLOCK_K.value
    lines, box = (weight.T, [depth, rows]) if is_depth_first else (weight, [rows, depth])
    parts = config.parts(K)
    target = output if parts == 1 else output.new_empty(parts, M, N)
    launch(
        linear_registers_kernel,
        (blocks_of(N, rows), blocks_of(M, config.block_m), parts),
        output.device,
        TensorDescriptor.from_tensor(lines, box, _layout(32)),
        TensorDescriptor.from_tensor(input.high, [config.block_m, depth], _layout(16)),
        TensorDescriptor.from_tensor(input.low, [config.block_m, depth], _layout(16)),
        target,
        (input.scale, weight_scale),
        bias,
        any_rest,
        M,
        N,
        blocks_of(K, depth),
        config.steps,
        DEPTH_FIRST=is_depth_first,
        IN_PARTS=parts > 1,
        BLOCK_M=config.block_m,
        STAGES=config.stages,
        config=config,
        num_warps=4,
    )
    if parts > 1:
        launch(
            add_parts_kernel,
            (blocks_of(N, _ADDED), M),
            output.device,
            target,
            output,
            input.scale,
            bias,
            M,
            N,
            PARTS=parts,
            BLOCK=_ADDED,
        )


def _layout(bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
