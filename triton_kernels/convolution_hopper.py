"""Stride-1 convolution with a fused bias and partial group statistics, for Hopper, in Gluon.

    output[n, o, y, x] = bias[o] + sum over ky, kx, c of
                         weight[ky, kx, o, c] * input[n, c, y + sy + ky * dy, x + sx + kx * dx]   (0 outside the image)

A transposed convolution of stride 1 is this with its taps reversed. Its input gradient is this with its taps as they
are. The input is channels_last; the output is channels_last or contiguous. 16-bit images are multiplied as they are.
float32 images are multiplied as TF32 and must hold TF32 numbers already: the tensor cores truncate the rest.

The product has weights on its rows (64 output channels) and 128 pixels of each warpgroup on its columns. So shared
memory keeps up with the tensor cores. One warp copies tiles in. Two consumers take the tiles in turn and multiply one
after the other, so that each one's epilogue overlaps the other's products. Where statistics are wanted, a consumer is
two warpgroups with a tile of 256 pixels, if that fits: an epilogue mostly waits for instruction fetches, and warps that
run the same epilogue share them. A program keeps the weights of its 64 channels in shared memory. For each tap column,
a box of image rows with a halo is copied. The tap rows read that box at offsets of whole swizzle atoms: 8 pixels, of
128 bytes, or of 32 or 64 where the image has no more.

Each thread keeps its own statistics (``slot_statistics``) from tile to tile of a sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
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

from triton_kernels.chain import Chain, apply_steps, load_vectors
from triton_kernels.convolution_tiling import (
    CHANNELS,
    WIDEST_HALO,
    StrideOneConvolution,
    columns_of,
    tiling_for,
    tiling_of,
)
from triton_kernels.device import multiprocessor_count
from triton_kernels.grid import blocks_of
from triton_kernels.hopper import is_channels_last, is_copyable, runs_hopper_kernels, takes_input
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import async_load, async_store, atoms_of, load_box, view, window
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.image_tiles import size_unit, strides_in_units
from triton_kernels.launch import call, launch, wait_for_launch_before
from triton_kernels.slot_statistics import (
    by_slot,
    merged_statistics,
    over_slots,
    slot_statistics,
    slot_sums,
    store_statistics,
)


def supports(input: torch.Tensor, output: torch.Tensor, convolution: StrideOneConvolution) -> bool:
    """Whether ``convolution_hopper`` takes it: architecture, dtypes, alignment, weights that fit into shared memory.

    TMA must be able to copy the channels_last input, and an output in 16 bits too. The pixels of one in 32 bits must
    have one constant distance, across rows too.
    """
    is_one_run = output.stride(2) == output.stride(3) * output.shape[3]
    if not (
        runs_hopper_kernels(input.device)
        and input.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and input.dtype == output.dtype
        and 0 not in (input.numel(), output.numel())
        and takes_input(input)
        and (is_copyable(output) if output.element_size() == 2 else is_one_run)
    ):
        return False
    # Not cached: torch.compile asks with a symbolic number of channels too, which is no key.
    tiling = tiling_of(128, columns_of(output), input.shape[1], input.element_size(), convolution)
    return tiling.halo <= WIDEST_HALO and tiling.stages >= 2


@gluon.jit
def tile_place(tile, places):
    """Sample, tile row and tile column of a tile. The blocks of channels are divided among the programs."""
    tiles_y, tiles_x, channel_blocks = places
    tile = tile // channel_blocks
    n = tile // (tiles_x * tiles_y)
    tile -= n * (tiles_x * tiles_y)
    return n, tile // tiles_x, tile % tiles_x


@gluon.jit
def copy_in(input, halo, weight, memory, barriers, tiles, places, first_tap, dilation_x, TILING: gl.constexpr):
    """The producer. It copies all weights of the program's channels once, then a box for each tile, channel step and
    tap column."""
    TAPS: gl.constexpr = TILING.tap_rows * TILING.tap_columns
    STEPS: gl.constexpr = TILING.steps
    HALO_BOXES: gl.constexpr = TILING.halo // TILING.halo_rows
    STEP: gl.constexpr = weight.block_shape[1]
    atoms, weights, results = memory
    OF_ROW: gl.constexpr = TILING.columns // 8
    OF_TILE: gl.constexpr = atoms_of(input.block_shape, atoms.shape)
    OF_HALO: gl.constexpr = atoms_of(halo.block_shape, atoms.shape)
    ready, empty, weights_ready, turns, hands = barriers
    channel_blocks = places[2]
    block = gl.program_id(0) % channel_blocks
    mbarrier.expect(weights_ready, TAPS * TILING.steps * 64 * TILING.row_bytes)
    for tap in range(TAPS):
        for step in gl.static_range(STEPS):
            place = [(tap * channel_blocks + block) * 64, step * STEP]
            async_load(weight, place, weights_ready, weights.index(tap * TILING.steps + step))
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, tile_y, tile_x = tile_place(tile, places)
        y = tile_y * TILING.rows + first_tap[0]
        for turn in range(TILING.steps * TILING.tap_columns):
            c = turn // TILING.tap_columns * STEP
            x = tile_x * TILING.columns + first_tap[1] + turn % TILING.tap_columns * dilation_x
            stage = count % TILING.stages
            mbarrier.wait(empty.index(stage), (count // TILING.stages & 1) ^ 1)
            mbarrier.expect(ready.index(stage), TILING.box_atoms * 8 * TILING.row_bytes)
            box = window(atoms, stage, OF_TILE, TILING.weight_atoms, TILING.box_atoms, TILING.stages, 0)
            load_box(input, [n, y, x, c], ready.index(stage), box)
            for part in gl.static_range(HALO_BOXES):
                row = TILING.rows + part * TILING.halo_rows
                box = window(
                    atoms,
                    stage,
                    OF_HALO,
                    TILING.weight_atoms,
                    TILING.box_atoms,
                    TILING.stages,
                    (TILING.rows + part * TILING.halo_rows) * OF_ROW,
                )
                load_box(halo, [n, y + row, x, c], ready.index(stage), box)
            count += 1


@gluon.jit
def rounded(values, DTYPE: gl.constexpr):
    """``values`` in DTYPE. The move packs two 16-bit numbers into a register. Otherwise they are converted one by
    one, slowly."""
    result = values.to(DTYPE)
    if DTYPE.primitive_bitwidth == 16:
        result = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=True, pack=2
        )
    return result


@gluon.jit
def multiply(
    output,
    output_strides,
    staged,
    bias,
    partials,
    operands,
    memory,
    barriers,
    tiles,
    places,
    size,
    CONSUMER: gl.constexpr,
    CHAIN: gl.constexpr,
    UNITS: gl.constexpr,
    WIDTH_UNIT: gl.constexpr,
    TILING: gl.constexpr,
):
    """A consumer: product and epilogue of every second tile of the program."""
    PIXELS: gl.constexpr = TILING.rows * TILING.columns
    HALVES: gl.constexpr = PIXELS // 128
    TAP_ROWS: gl.constexpr = TILING.tap_rows
    TURNS: gl.constexpr = TILING.steps * TILING.tap_columns
    atoms, weights, results = memory
    ready, empty, weights_ready, turns, hands = barriers
    TAP_PITCH: gl.constexpr = TILING.dilation_y * TILING.columns // 8
    STEP: gl.constexpr = weights.shape[2]
    BITS: gl.constexpr = weights.dtype.primitive_bitwidth
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, HALVES], [16, 128, 256 // BITS])
    PIXEL_ROWS: gl.constexpr = gl.NVMMASharedLayout(TILING.row_bytes, BITS, 2)
    channels, height, width = size
    width = width * WIDTH_UNIT
    tiles_y, tiles_x, channel_blocks = places
    sample_tiles = tiles_y * tiles_x * channel_blocks
    stride = 2 * gl.num_programs(0)
    block = gl.program_id(0) % channel_blocks * 64
    channel = block + gl.arange(0, 64, layout=gl.SliceLayout(1, ACCUMULATOR))
    shift = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(1, ACCUMULATOR))
    if bias is not None:
        shift = gl.load(bias + channel, mask=channel < channels, other=0.0).to(gl.float32)
    shift = gl.expand_dims(shift, 1)
    if CHAIN is not None:
        operands = load_vectors(operands, gl.expand_dims(channel, 1), gl.expand_dims(channel < channels, 1), CHAIN)
        shift = apply_steps(shift, operands, CHAIN, 1, len(CHAIN.biases))
    pixel = gl.arange(0, PIXELS, layout=gl.SliceLayout(0, ACCUMULATOR))
    row, column = pixel // TILING.columns, pixel % TILING.columns
    nothing = slot_sums(by_slot(gl.zeros((64, PIXELS), gl.float32, layout=ACCUMULATOR)))
    count, mean, m2 = nothing, nothing, nothing
    mbarrier.wait(weights_ready, 0)
    box_count = CONSUMER * TURNS
    turn = 1 - CONSUMER  # the phase to wait for at each of the two barriers of turns
    for tile in range(gl.program_id(0) + CONSUMER * gl.num_programs(0), tiles, stride):
        n, tile_y, tile_x = tile_place(tile, places)
        y, x = tile_y * TILING.rows, tile_x * TILING.columns
        accumulator = gl.zeros((64, PIXELS), gl.float32, layout=ACCUMULATOR)
        if BITS == 16:
            accumulator += shift
        # The consumers multiply in the order of the tiles. That is the order of the boxes, and keeps epilogues apart.
        mbarrier.wait(turns.index(CONSUMER), turn)
        for part in range(TURNS):
            stage = box_count % TILING.stages
            mbarrier.wait(ready.index(stage), box_count // TILING.stages & 1)
            for tap_row in gl.static_range(TAP_ROWS):
                tap = tap_row * TILING.tap_columns + part % TILING.tap_columns
                a = weights.index(tap * TILING.steps + part // TILING.tap_columns)
                pixels = window(
                    atoms,
                    stage,
                    TILING.tile_atoms,
                    TILING.weight_atoms,
                    TILING.box_atoms,
                    TILING.stages,
                    tap_row * TAP_PITCH,
                )
                b = view(pixels, weights.dtype, [PIXELS, STEP], PIXEL_ROWS).permute((1, 0))
                accumulator = warpgroup_mma(a, b, accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(num_outstanding=TAP_ROWS, deps=(accumulator,))
            if part > 0:
                mbarrier.arrive(empty.index((box_count + TILING.stages - 1) % TILING.stages), count=1)
            box_count += 1
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index((box_count + TILING.stages - 1) % TILING.stages), count=1)
        box_count += TURNS
        if BITS == 32:  # with a large bias in the sum the products would lose precision: the tensor cores truncate it
            accumulator += shift
        values = rounded(accumulator, output.dtype.element_ty)
        rows = gl.minimum(height - y, TILING.rows)
        columns = gl.minimum(width - x, TILING.columns)
        inside = gl.expand_dims((row < rows) & (column < columns), 0)
        if staged is None:
            corner = output + n.to(gl.int64) * output_strides[0] * UNITS[0]
            corner += (y.to(gl.int64) * width + x) * output_strides[2] * UNITS[2]
            targets = corner + gl.expand_dims(channel.to(gl.int64) * output_strides[1] * UNITS[1], 1)
            targets += gl.expand_dims((row * width + column).to(gl.int64) * output_strides[2] * UNITS[2], 0)
            gl.store(targets, values, mask=inside & gl.expand_dims(channel < channels, 1))
        else:
            mbarrier.wait(hands.index(CONSUMER), turn)
            box = view(results, staged.dtype, staged.block_shape, staged.layout)
            if TILING.columns > 8:
                results.store(values)
                fence_async_shared()
                async_store(staged, [n, y, block, x], box)
            else:
                results.permute((1, 0)).store(values)
                fence_async_shared()
                async_store(staged, [n, y, x, block], box)
        if partials is not None:
            activated = by_slot(
                apply_steps(values.to(gl.float32), operands, CHAIN, len(CHAIN.biases), CHAIN.norm_place)
            )
            if rows * columns == PIXELS:
                more = slot_statistics(activated, None, False)
            else:
                more = slot_statistics(activated, by_slot(inside & gl.expand_dims(channel >= 0, 1)), True)
            count, mean, m2 = merged_statistics(count, mean, m2, more[0], more[1], more[2])
            first = n * sample_tiles
            if tile + stride >= first + sample_tiles:
                # A consumer's statistics have the place of its first tile in the sample.
                place = (tile - first) % stride // channel_blocks
                place += n.to(gl.int64) * (gl.minimum(sample_tiles, stride) // channel_blocks)
                store_statistics(partials, place * HALVES, block, channels, over_slots(count, mean, m2))
                count, mean, m2 = nothing, nothing, nothing
        if staged is not None:
            tma.store_wait(pendings=0)
            mbarrier.arrive(hands.index(1 - CONSUMER), count=1)
        turn ^= 1


@gluon.jit(do_not_specialize=["tiles"])
def convolution_kernel(
    input,  # [N, H, W, C]: a descriptor of a tile's rows
    halo,  # the same tensor: a descriptor of the rows of a halo that are copied at a time
    weight,  # [taps * channel_blocks * 64, channels in whole steps]: a descriptor
    bias,  # [O] or None
    output,  # [N, O, OH * OW]
    output_strides,  # in units of UNITS
    staged,  # the same as a descriptor of a tile, where results go through shared memory; or None
    partials,  # counts [N, places], means and m2s [N, places, O]; None where no statistics are wanted
    operands,  # of the chain's steps
    tiles,  # of all samples and blocks of 64 channels
    places,  # tile rows and columns of a sample, blocks of 64 channels
    size,  # O, OH, and OW in units of WIDTH_UNIT
    first_tap,  # its row and column in the image, less those of the output's pixel
    dilation_x,
    CHAIN: gl.constexpr,
    UNITS: gl.constexpr,
    WIDTH_UNIT: gl.constexpr,
    TILING: gl.constexpr,
):
    """A persistent program: one producer warp and two consumers, each with a warpgroup per 128 pixels of a tile."""
    wait_for_launch_before()
    PIXELS: gl.constexpr = TILING.rows * TILING.columns
    STAGES: gl.constexpr = TILING.stages
    BITS: gl.constexpr = input.dtype.primitive_bitwidth
    STEP: gl.constexpr = weight.block_shape[1]
    ROW: gl.constexpr = gl.NVMMASharedLayout(TILING.row_bytes, BITS, 2)
    atoms = gl.allocate_shared_memory(input.dtype, [TILING.atoms, 8, STEP], ROW)
    weights = view(atoms, input.dtype, [TILING.atoms // 8, 64, STEP], ROW)  # at first; then come the boxes
    if staged is None:
        results = atoms  # not used
    elif TILING.columns == 8:
        results = gl.allocate_shared_memory(staged.dtype, [PIXELS, 64], gl.NVMMASharedLayout(128, BITS, 2))
    else:
        results = gl.allocate_shared_memory(staged.dtype, [64, PIXELS], gl.NVMMASharedLayout(64, BITS, 2))
    ready, empty, weights_ready = new_barriers(STAGES, 1), new_barriers(STAGES, 1), new_barriers(1, 1).index(0)
    turns, hands = new_barriers(2, 1), new_barriers(2, 1)  # to multiply, and to stage results
    fence_async_shared()
    memory = (atoms, weights, results)
    barriers = (ready, empty, weights_ready, turns, hands)
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                output, output_strides, staged, bias, partials, operands, memory, barriers, tiles, places, size,
                0, CHAIN, UNITS, WIDTH_UNIT, TILING,
            )),
            (multiply, (
                output, output_strides, staged, bias, partials, operands, memory, barriers, tiles, places, size,
                1, CHAIN, UNITS, WIDTH_UNIT, TILING,
            )),
            (copy_in, (input, halo, weight, memory, barriers, tiles, places, first_tap, dilation_x, TILING)),
        ],
        [PIXELS // 32, 1],
        [240 if PIXELS == 128 else 112, 24],
    )
    # fmt: on


def _descriptor(image: torch.Tensor, rows: int, columns: int, channels: int) -> TensorDescriptor:
    """A descriptor of boxes of ``channels`` and ``rows`` x ``columns`` pixels, in a channels_last or a contiguous
    image."""
    if is_channels_last(image):
        view, box = image.permute(0, 2, 3, 1), [1, rows, columns, channels]
        swizzle = channels * image.element_size()
    else:
        view, box, swizzle = image.permute(0, 2, 1, 3), [1, rows, channels, columns], 64
    layout = gl.NVMMASharedLayout(swizzle, image.element_size() * 8, 4)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), box, layout)


def _packed(weight: torch.Tensor, step: int) -> torch.Tensor:
    """[KH, KW, O, C] as [KH * KW * O, C], with O padded by zeros to a multiple of 64 and C to a multiple of
    ``step``."""
    height, width, out_channels, in_channels = weight.shape
    padded = blocks_of(out_channels, CHANNELS) * CHANNELS, blocks_of(in_channels, step) * step
    if padded == (out_channels, in_channels) and weight.is_contiguous() and weight.data_ptr() % 16 == 0:
        return weight.view(-1, in_channels)
    packed = weight.new_zeros(height, width, *padded)
    packed[:, :, :out_channels, :in_channels] = weight
    return packed.view(-1, padded[1])


def _programs(output: torch.Tensor) -> int:
    """As many programs as run at once, in a multiple of the blocks of channels."""
    blocks = blocks_of(output.shape[1], CHANNELS)
    return max(multiprocessor_count(output.device) // blocks, 1) * blocks


def partial_count(input: torch.Tensor, output: torch.Tensor, convolution: StrideOneConvolution) -> int:
    """The number of partial statistics of a sample: one for each consumer warpgroup that has a tile of it."""
    tiling = tiling_for(input, output, convolution, statistics=True)
    consumers = 2 * _programs(output) // blocks_of(output.shape[1], CHANNELS)
    return min(math.prod(tiling.tiles(*output.shape[2:])), consumers) * (tiling.pixels // 128)


def check_statistics(chain: Chain, operands: Sequence[Any]) -> None:
    """Whether a convolution can compute the statistics of the chain's norm: tensors before it have other tiles."""
    for step, operand in zip(chain.steps[: chain.norm_place], operands, strict=False):
        if step.operand in ("sample", "tensor") and operand is not None:
            raise NotImplementedError(
                f"statistics of {step.name} with a {step.operand}; image_statistics computes them"
            )


def convolution_hopper(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    convolution: StrideOneConvolution,
    *,
    output: torch.Tensor,
    partials: PartialStatistics | None = None,
    chain: Chain | None = None,
    operands: Sequence[Any] = (),
) -> None:
    """Write the convolution to ``output`` [N, O, OH, OW] and, if given, the statistics for a norm to ``partials``.

    ``input`` [N, C, H, W] and ``output`` must be as ``supports`` says. ``weight`` is [KH, KW, O, C] in the input's
    dtype. In float32 both must hold TF32 numbers. ``partials`` are ``partial_count`` per sample, of what the norm of
    ``chain`` takes; with ``operands``, the first of which is ``bias``, its further biases are added too.
    """
    if chain is not None:
        check_statistics(chain, operands)
    tiling = tiling_for(input, output, convolution, partials is not None)
    N, channels, height, width = output.shape
    places = *tiling.tiles(height, width), blocks_of(channels, CHANNELS)
    tiles = N * math.prod(places)
    step = tiling.row_bytes // input.element_size()
    packed = call(_packed, weight, step)
    sample_stride, channel_stride, _, pixel_stride = output.stride()
    strides, units = strides_in_units((sample_stride, channel_stride, pixel_stride))
    # 16-bit results are stored by TMA from shared memory. In float32 that takes no longer without: each thread of the
    # consumers stores its own, 32 bytes of a row, or of neighbouring channels, at a time.
    is_staged = output.element_size() == 2
    staged = _descriptor(output, tiling.rows, tiling.columns, CHANNELS) if is_staged else None
    launch(
        convolution_kernel,
        (min(tiles, _programs(output)),),
        input.device,
        _descriptor(input, tiling.rows, tiling.columns, step),
        _descriptor(input, tiling.halo_rows, tiling.columns, step),
        TensorDescriptor.from_tensor(
            packed, [CHANNELS, step], gl.NVMMASharedLayout(tiling.row_bytes, 8 * input.element_size(), 2)
        ),
        bias,
        output,
        strides,
        staged,
        None if partials is None else (partials.counts, partials.means, partials.m2s),
        tuple(operands),
        tiles,
        places,
        (channels, height, width // size_unit(width)),
        convolution.shift,
        convolution.dilation[1],
        CHAIN=chain,
        UNITS=units,
        WIDTH_UNIT=size_unit(width),
        TILING=tiling,
        config=tiling,
        num_warps=tiling.pixels // 32,
    )
