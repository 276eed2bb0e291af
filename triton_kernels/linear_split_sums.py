"""How two warpgroups of Hopper's add up products of split float32 operands, a tile's terms step by step.

With two parts, the tensor cores add up high times high over 32 terms only, because they truncate as they add. That sum
is then added in registers, in float32, which rounds (sums of 16 terms are less precise). The mixed products are 2**-11
as large. The tensor cores add them up over all terms, or where blocks share scales (``float32_block_split``) over their
128, and stay busy with them during the additions in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from triton_kernels.float32_block_split import BLOCK
from triton_kernels.float32_parts import LOW_SCALE


@gluon.jit
def next_operands(memory, barriers, count, DEPTHS_FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Of the next step, once they are there: the input's tile [rows, depth] and the weight's [depth, rows], high,
    and low of two parts."""
    PARTS: gl.constexpr = CONFIG.parts
    input_tiles, weight_tiles = memory
    ready, _ = barriers
    stage = count % CONFIG.stages
    mbarrier.wait(ready.index(stage), count // CONFIG.stages & 1)
    a, b = input_tiles.index(stage * PARTS), weight_tiles.index(stage * PARTS)
    a_low, b_low = input_tiles.index(stage * PARTS + PARTS - 1), weight_tiles.index(stage * PARTS + PARTS - 1)
    if DEPTHS_FIRST[0]:
        a, a_low = a.permute((1, 0)), a_low.permute((1, 0))
    if not DEPTHS_FIRST[1]:
        b, b_low = b.permute((1, 0)), b_low.permute((1, 0))
    return a, a_low, b, b_low


@gluon.jit
def release(barriers, count, CONFIG: gl.constexpr):
    """Tell that a step's tiles were multiplied."""
    _, empty = barriers
    mbarrier.arrive(empty.index(count % CONFIG.stages), count=1)


@gluon.jit
def multiply_half(a, b, HALF: gl.constexpr, total, USE_TOTAL: gl.constexpr):
    """Begin the product of half of a step's terms."""
    TERMS: gl.constexpr = a.shape[1] // 2
    return warpgroup_mma(
        a.slice(HALF * TERMS, TERMS, 1), b.slice(HALF * TERMS, TERMS, 0), total, use_acc=USE_TOTAL, is_async=True
    )


@gluon.jit
def multiply_once(total, first, end, count, memory, barriers, DEPTHS_FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Of one part, the product of terms, and the number of steps so far."""
    for depth in range(first, end, CONFIG.block_k):
        a, _, b, _ = next_operands(memory, barriers, count, DEPTHS_FIRST, CONFIG)
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
        if depth > first:
            release(barriers, count - 1, CONFIG)
        count += 1
    return warpgroup_mma_wait(num_outstanding=0, deps=(total,)), count


@gluon.jit
def multiply_rows(total, first, end, count, memory, barriers, DEPTHS_FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Of two parts whose rows have scales, likewise."""
    block, mixed = gl.zeros_like(total), gl.zeros_like(total)
    for depth in range(first, end, CONFIG.block_k):
        a, a_low, b, b_low = next_operands(memory, barriers, count, DEPTHS_FIRST, CONFIG)
        block = multiply_half(a, b, 0, block, False)
        mixed = warpgroup_mma(a, b_low, mixed, is_async=True)
        block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
        if depth > first:
            release(barriers, count - 1, CONFIG)
        total += block
        block = multiply_half(a, b, 1, block, False)
        mixed = warpgroup_mma(a_low, b, mixed, is_async=True)
        block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
        total += block
        count += 1
    mixed = warpgroup_mma_wait(num_outstanding=0, deps=(mixed,))
    return total + mixed * (1.0 / LOW_SCALE), count


@gluon.jit
def add_scaled(total, block, factor):
    """total + block * factor, rounded once, before the products that are issued next. (LLVM would put it off behind all
    of a loop's, for which there are no registers.)"""
    factors = gl.full_like(total, factor)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [block, factors, total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def multiply_first_step(operands, total, block, mixed, factor):
    """The first 64 of the terms that share scales, but for high times low. Mixed products are left in flight."""
    a, a_low, b, _ = operands
    for half in gl.static_range(2):
        block = multiply_half(a, b, half, block, False)
        mixed = multiply_half(a_low, b, half, mixed, True)
        block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
        total = add_scaled(total, block, factor)
    return total, block, mixed


@gluon.jit
def multiply_second_step(operands, total, block, mixed, factor, barriers, count, CONFIG: gl.constexpr):
    """The others. The last products, of high parts, are left in flight."""
    a, a_low, b, b_low = operands
    block = multiply_half(a, b, 0, block, False)
    mixed = warpgroup_mma(a, b_low, mixed, is_async=True)
    block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
    release(barriers, count - 1, CONFIG)
    total = add_scaled(total, block, factor)
    mixed = warpgroup_mma(a_low, b, mixed, is_async=True)
    block = multiply_half(a, b, 1, block, False)
    block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
    return add_scaled(total, mixed, factor * (1.0 / LOW_SCALE)), block, mixed


@gluon.jit
def scales_of_terms(scales, row, column, first, end):
    """Of both operands' blocks at a tile, those of the terms from ``first`` on; 1 behind the end."""
    of_input, of_weight = scales
    input_scale, row_stride, depth_stride = of_input
    input_scale += row // BLOCK * row_stride + first // BLOCK * depth_stride
    weight_scale, row_stride, depth_stride = of_weight
    weight_scale += column // BLOCK * row_stride + first // BLOCK * depth_stride
    return gl.load(input_scale, mask=first < end, other=1.0), gl.load(weight_scale, mask=first < end, other=1.0)


@gluon.jit
def multiply_blocks(
    total, row, column, first, end, count, scales, memory, barriers, DEPTHS_FIRST: gl.constexpr, CONFIG: gl.constexpr
):
    """Of two parts whose blocks have scales, likewise, and the sum of the factors of blocks: NaN where one has none.

    A turn of the loop is the second step of some terms that share scales, and the first one of the next. So the sum of
    the mixed products can be added while tensor cores are busy. (They may not be read in a turn in which they were not
    multiplied: the assembler would wait for each product.)
    """
    block, mixed = gl.zeros_like(total), gl.zeros_like(total)
    of_input, of_weight = scales_of_terms(scales, row, column, first, end)
    factor = of_input * of_weight
    factors = factor
    operands = next_operands(memory, barriers, count, DEPTHS_FIRST, CONFIG)
    mixed = warpgroup_mma(operands[0], operands[3], mixed, use_acc=False, is_async=True)
    total, block, mixed = multiply_first_step(operands, total, block, mixed, factor)
    for depth in range(first + CONFIG.terms, end, CONFIG.terms):
        of_input, of_weight = scales_of_terms(scales, row, column, depth, end)
        operands = next_operands(memory, barriers, count + 1, DEPTHS_FIRST, CONFIG)
        total, block, mixed = multiply_second_step(operands, total, block, mixed, factor, barriers, count + 1, CONFIG)
        operands = next_operands(memory, barriers, count + 2, DEPTHS_FIRST, CONFIG)
        mixed = warpgroup_mma(operands[0], operands[3], mixed, use_acc=False, is_async=True)
        block, mixed = warpgroup_mma_wait(num_outstanding=1, deps=(block, mixed))
        release(barriers, count + 1, CONFIG)
        total = add_scaled(total, block, factor)
        factor = of_input * of_weight
        factors += factor
        total, block, mixed = multiply_first_step(operands, total, block, mixed, factor)
        count += 2
    operands = next_operands(memory, barriers, count + 1, DEPTHS_FIRST, CONFIG)
    total, block, mixed = multiply_second_step(operands, total, block, mixed, factor, barriers, count + 1, CONFIG)
    block = warpgroup_mma_wait(num_outstanding=0, deps=(block,))
    return add_scaled(total, block, factor), count + 2, factors


@gluon.jit
def check_scales(scale, first, end, flag, LENGTH: gl.constexpr, WARPS: gl.constexpr):
    """Set a flag if one of LENGTH rows from ``first`` on has no scale."""
    rows = gl.arange(0, LENGTH, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    found = gl.load(scale + first + rows, mask=rows < end - first, other=1.0)
    gl.store(flag + rows * 0, gl.full_like(rows, 1), mask=found != found)
