"""Stride-1 convolution of 16-bit images with a fused bias and partial group statistics, for Hopper: Gluon.

    output[n, o, y, x] = bias[o] + sum over ky, kx, c of
                         weight[ky, kx, o, c] * input[n, c, y + sy + ky * dy, x + sx + kx * dx]   (0 outside the image)

A transposed convolution of stride 1 is this with its taps reversed; its input gradient is this as they are. The input
is channels_last, the output that or contiguous. Weights lie on the rows of the product (64 output channels), 128 pixels
on its columns, so that shared memory keeps up with the tensor cores. One warp copies tiles in; two warpgroups take them
in turn and multiply one after the other, so that each one's epilogue runs beside the other's products. A program keeps
the weights of its 64 channels in shared memory. For each tap column a box of image rows and a halo is copied; the tap
rows read it at a distance of whole swizzle atoms (8 pixels of 64 channels, 1024 bytes).
"""

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

from triton_kernels.convolution import StrideOneConvolution
from triton_kernels.device import SHARED_MEMORY, multiprocessor_count, on_device_of
from triton_kernels.hopper import is_channels_last, is_copyable, runs_hopper_kernels, takes_input
from triton_kernels.image_group_norm import PartialStatistics
from triton_kernels.pointwise import IDENTITY, Pointwise

#: Output channels of a tile, and input channels of a step: 128 bytes of 16-bit numbers.
_CHANNELS = 64
#: Pixels of a tile.
_PIXELS = 128
#: Image rows of a halo that are copied at a time.
_HALO_ROWS = 2
#: The widest halo; a box has at most 32 rows.
_WIDEST_HALO = 16
#: Boxes under way at most.
_MOST_STAGES = 6
#: Bytes set aside for barriers, reductions and alignment.
_RESERVED_BYTES = 4096


def tile_shape(output: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the tiles of an output of this memory format."""
    return (16, 8) if is_channels_last(output) else (4, 32)


def _halo(convolution: StrideOneConvolution) -> int:
    """Image rows that a tile needs beyond its own, rounded up to what is copied at a time."""
    return triton.cdiv((convolution.kernel_size[0] - 1) * convolution.dilation[0], _HALO_ROWS) * _HALO_ROWS


def _stages(input: torch.Tensor, output: torch.Tensor, convolution: StrideOneConvolution) -> int:
    """How many boxes of the input fit into shared memory beside the weights and the staged results."""
    rows, columns = tile_shape(output)
    steps = triton.cdiv(input.shape[1], _CHANNELS)
    box = (rows + _halo(convolution)) * columns * _CHANNELS * input.element_size()
    weights = convolution.taps * steps * _CHANNELS * _CHANNELS * input.element_size()
    results = 2 * _PIXELS * _CHANNELS * output.element_size()
    return min((SHARED_MEMORY[90] - _RESERVED_BYTES - weights - results) // box, _MOST_STAGES)


def supports(input: torch.Tensor, output: torch.Tensor, convolution: StrideOneConvolution) -> bool:
    """Whether ``convolution_hopper`` takes it: architecture, dtypes, alignment, weights that fit into shared memory."""
    return (
        runs_hopper_kernels(input.device)
        and input.dtype in (torch.bfloat16, torch.float16)
        and 0 not in (input.numel(), output.numel())
        and takes_input(input)
        and is_copyable(output)
        and (is_channels_last(output) or output.element_size() == 2)
        and _halo(convolution) <= _WIDEST_HALO
        and _stages(input, output, convolution) >= 2
    )


@gluon.jit
def tile_place(tile, tiles_y, tiles_x, channel_blocks):
    """Sample, tile row and tile column of a tile; the blocks of channels are spread over the programs."""
    tile = tile // channel_blocks
    return tile // (tiles_x * tiles_y), tile // tiles_x % tiles_y, tile % tiles_x


@gluon.jit
def copy_in(
    input,
    halo,
    weight,
    boxes,
    weights,
    ready,
    empty,
    weights_ready,
    tiles,
    tiles_y,
    tiles_x,
    channel_blocks,
    shift_y,
    shift_x,
    dilation_x,
    TILE_ROWS: gl.constexpr,
    TAP_ROWS: gl.constexpr,
    TAP_COLUMNS: gl.constexpr,
    STEPS: gl.constexpr,
    HALO: gl.constexpr,
    HALO_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: all weights of the program's channels once, then a box for each tile, channel step, tap column."""
    TILE_COLUMNS: gl.constexpr = 128 // TILE_ROWS
    ROWS: gl.constexpr = TILE_ROWS + HALO
    block = gl.program_id(0) % channel_blocks
    mbarrier.expect(weights_ready, TAP_ROWS * TAP_COLUMNS * STEPS * 64 * 64 * 2)
    for tap in range(TAP_ROWS * TAP_COLUMNS):
        for step in gl.static_range(STEPS):
            place = [(tap * channel_blocks + block) * 64, step * 64]
            tma.async_copy_global_to_shared(weight, place, weights_ready, weights.index(tap * STEPS + step))
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n, tile_y, tile_x = tile_place(tile, tiles_y, tiles_x, channel_blocks)
        y = tile_y * TILE_ROWS + shift_y
        for turn in range(STEPS * TAP_COLUMNS):
            c = turn // TAP_COLUMNS * 64
            x = tile_x * TILE_COLUMNS + shift_x + turn % TAP_COLUMNS * dilation_x
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), ROWS * TILE_COLUMNS * 64 * 2)
            box = boxes.index(stage * ROWS)._reinterpret(input.dtype, input.block_shape, input.layout)
            tma.async_copy_global_to_shared(input, [n, y, x, c], ready.index(stage), box)
            for part in gl.static_range(HALO // HALO_ROWS):
                row = TILE_ROWS + part * HALO_ROWS
                box = boxes.index(stage * ROWS + row)._reinterpret(halo.dtype, halo.block_shape, halo.layout)
                tma.async_copy_global_to_shared(halo, [n, y + row, x, c], ready.index(stage), box)
            count += 1


@gluon.jit
def channel_statistics(values, inside, count, MASKED: gl.constexpr):
    """Mean and M2 [64] of the rows of ``values`` [64, 128], over the ``count`` pixels that are ``inside``."""
    if MASKED:
        values = gl.where(inside, values, 0.0)
    mean = gl.sum(values, 1) / count
    centred = values - gl.expand_dims(mean, 1)
    if MASKED:
        # The count may be no power of two: what rounding left of the mean.
        correction = gl.sum(gl.where(inside, centred, 0.0), 1) / count
        mean += correction
        centred = gl.where(inside, centred - gl.expand_dims(correction, 1), 0.0)
    return mean, gl.sum(centred * centred, 1)


@gluon.jit
def rounded(values, DTYPE: gl.constexpr):
    """``values`` in DTYPE. The move keeps two 16-bit numbers a register, lest they be converted one by one, slowly."""
    result = values.to(DTYPE)
    if DTYPE.primitive_bitwidth == 16:
        result = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=True, pack=2
        )
    return result


@gluon.jit
def multiply(
    output,
    bias,
    counts,
    means,
    m2s,
    boxes,
    weights,
    results,
    ready,
    empty,
    weights_ready,
    turns,
    tiles,
    tiles_y,
    tiles_x,
    channel_blocks,
    height,
    width,
    channels,
    CONSUMER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    TAP_ROWS: gl.constexpr,
    TAP_COLUMNS: gl.constexpr,
    STEPS: gl.constexpr,
    DILATION_Y: gl.constexpr,
    HALO: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer: product and epilogue of every other one of the program's tiles."""
    TILE_COLUMNS: gl.constexpr = 128 // TILE_ROWS
    ROWS: gl.constexpr = TILE_ROWS + HALO
    ACCUMULATOR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    PIXEL_ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    block = gl.program_id(0) % channel_blocks * 64
    channel = block + gl.arange(0, 64, layout=gl.SliceLayout(1, ACCUMULATOR))
    shift = gl.zeros((64,), gl.float32, layout=gl.SliceLayout(1, ACCUMULATOR))
    if bias is not None:
        shift = gl.load(bias + channel, mask=channel < channels, other=0.0).to(gl.float32)
    pixel = gl.arange(0, 128, layout=gl.SliceLayout(0, ACCUMULATOR))
    result = results.index(CONSUMER)
    mbarrier.wait(weights_ready, 0)
    count = CONSUMER * STEPS * TAP_COLUMNS
    own_tiles = 0
    for tile in range(gl.program_id(0) + CONSUMER * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        n, tile_y, tile_x = tile_place(tile, tiles_y, tiles_x, channel_blocks)
        y, x = tile_y * TILE_ROWS, tile_x * TILE_COLUMNS
        accumulator = gl.expand_dims(shift, 1) + gl.zeros((64, 128), gl.float32, layout=ACCUMULATOR)
        # The consumers multiply in the order of their tiles: that of the boxes, and so that epilogues do not coincide.
        mbarrier.wait(turns.index(CONSUMER), (own_tiles & 1) ^ (1 - CONSUMER))
        own_tiles += 1
        for turn in range(STEPS * TAP_COLUMNS):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            for tap_row in gl.static_range(TAP_ROWS):
                tap = tap_row * TAP_COLUMNS + turn % TAP_COLUMNS
                a = weights.index(tap * STEPS + turn // TAP_COLUMNS)
                rows = boxes.index(stage * ROWS + tap_row * DILATION_Y)
                b = rows._reinterpret(weights.dtype, [128, 64], PIXEL_ROWS).permute((1, 0))
                accumulator = warpgroup_mma(a, b, accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(num_outstanding=TAP_ROWS, deps=(accumulator,))
            if turn > 0:
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            count += 1
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        count += STEPS * TAP_COLUMNS
        values = rounded(accumulator, output.dtype)
        tma.store_wait(pendings=0)
        box = result._reinterpret(output.dtype, output.block_shape, output.layout)
        if TILE_ROWS == 16:
            result.permute((1, 0)).store(values)
            fence_async_shared()
            tma.async_copy_shared_to_global(output, [n, y, x, block], box)
        else:
            result.store(values)
            fence_async_shared()
            tma.async_copy_shared_to_global(output, [n, y, block, x], box)
        if means is not None:
            rows = gl.minimum(height - y, TILE_ROWS)
            columns = gl.minimum(width - x, TILE_COLUMNS)
            inside = gl.expand_dims((pixel // TILE_COLUMNS < rows) & (pixel % TILE_COLUMNS < columns), 0)
            activated = ACTIVATION(values.to(gl.float32), 0.0, 0.0)
            if rows * columns == 128:
                mean, m2 = channel_statistics(activated, inside, 128, False)
            else:
                mean, m2 = channel_statistics(activated, inside, rows * columns, True)
            index = ((n * tiles_y + tile_y) * tiles_x + tile_x).to(gl.int64)
            gl.store(counts + index, (rows * columns).to(gl.float32))
            gl.store(means + index * channels + channel, mean, mask=channel < channels)
            gl.store(m2s + index * channels + channel, m2, mask=channel < channels)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["tiles"])
def convolution_kernel(
    input,  # [N, H, W, C]: a descriptor of a tile's rows
    halo,  # the same tensor: a descriptor of HALO_ROWS rows
    weight,  # [taps * channel_blocks * 64, STEPS * 64]: a descriptor
    output,  # [N, OH, OW, O], or [N, OH, O, OW] of a contiguous image: a descriptor of a tile
    bias,  # [O] or None
    counts,  # [N, tiles]
    means,  # [N, tiles, O]; None where no statistics are wanted
    m2s,  # [N, tiles, O]
    tiles,  # of all samples and blocks of 64 channels
    tiles_y,
    tiles_x,
    channel_blocks,
    height,  # OH
    width,  # OW
    channels,  # O
    shift_y,
    shift_x,
    dilation_x,
    ACTIVATION: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    TAP_ROWS: gl.constexpr,
    TAP_COLUMNS: gl.constexpr,
    STEPS: gl.constexpr,
    DILATION_Y: gl.constexpr,
    HALO: gl.constexpr,
    HALO_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A persistent program: one producer warp and two consumer warpgroups."""
    BITS: gl.constexpr = output.dtype.primitive_bitwidth
    ROW: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    boxes = gl.allocate_shared_memory(input.dtype, [STAGES * (TILE_ROWS + HALO), 128 // TILE_ROWS, 64], ROW)
    weights = gl.allocate_shared_memory(input.dtype, [TAP_ROWS * TAP_COLUMNS * STEPS, 64, 64], ROW)
    if TILE_ROWS == 16:
        results = gl.allocate_shared_memory(output.dtype, [2, 128, 64], gl.NVMMASharedLayout(128, BITS, 2))
    else:
        results = gl.allocate_shared_memory(output.dtype, [2, 64, 128], gl.NVMMASharedLayout(64, BITS, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    mbarrier.init(weights_ready, count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (multiply, (
                output, bias, counts, means, m2s, boxes, weights, results, ready, empty, weights_ready, turns,
                tiles, tiles_y, tiles_x, channel_blocks, height, width, channels,
                0, ACTIVATION, TILE_ROWS, TAP_ROWS, TAP_COLUMNS, STEPS, DILATION_Y, HALO, STAGES,
            )),
            (multiply, (
                output, bias, counts, means, m2s, boxes, weights, results, ready, empty, weights_ready, turns,
                tiles, tiles_y, tiles_x, channel_blocks, height, width, channels,
                1, ACTIVATION, TILE_ROWS, TAP_ROWS, TAP_COLUMNS, STEPS, DILATION_Y, HALO, STAGES,
            )),
            (copy_in, (
                input, halo, weight, boxes, weights, ready, empty, weights_ready,
                tiles, tiles_y, tiles_x, channel_blocks, shift_y, shift_x, dilation_x,
                TILE_ROWS, TAP_ROWS, TAP_COLUMNS, STEPS, HALO, HALO_ROWS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


def _descriptor(image: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of boxes of 64 channels and ``rows`` x ``columns`` pixels of a channels_last image, or of a contiguous one."""
    if is_channels_last(image):
        view, box, swizzle = image.permute(0, 2, 3, 1), [1, rows, columns, _CHANNELS], 128
    else:
        view, box, swizzle = image.permute(0, 2, 1, 3), [1, rows, _CHANNELS, columns], 64
    layout = gl.NVMMASharedLayout(swizzle, image.element_size() * 8, 4)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), box, layout)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """[KH, KW, O, C] with both channels rounded up to multiples of 64 by zeros, as [KH * KW * O, C]."""
    height, width, *channels = weight.shape
    padded = [triton.cdiv(size, _CHANNELS) * _CHANNELS for size in channels]
    packed = weight.new_zeros(height, width, *padded)
    packed[:, :, : channels[0], : channels[1]] = weight
    return packed.view(-1, padded[1])


def convolution_hopper(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    convolution: StrideOneConvolution,
    *,
    output: torch.Tensor,
    partials: PartialStatistics | None = None,
    activation: Pointwise = IDENTITY,
) -> None:
    """Write the convolution to ``output`` [N, O, OH, OW] and, where ``partials`` are given, its activated statistics.

    ``input`` [N, C, H, W] and ``output`` are as ``supports`` has them, ``weight`` is [KH, KW, O, C] in the input's
    dtype. ``partials`` are over tiles of ``tile_shape(output)``.
    """
    N, channels, height, width = output.shape
    rows, columns = tile_shape(output)
    tiles_y, tiles_x, blocks = (
        triton.cdiv(height, rows),
        triton.cdiv(width, columns),
        triton.cdiv(channels, _CHANNELS),
    )
    tiles = N * tiles_y * tiles_x * blocks
    programs = max(multiprocessor_count(input.device) // blocks, 1) * blocks
    packed = _packed(weight)
    weight_box = TensorDescriptor.from_tensor(packed, [_CHANNELS, _CHANNELS], gl.NVMMASharedLayout(128, 16, 2))
    with on_device_of(input):
        convolution_kernel[(min(tiles, programs),)](
            _descriptor(input, rows, columns),
            _descriptor(input, _HALO_ROWS, columns),
            weight_box,
            _descriptor(output, rows, columns),
            bias,
            None if partials is None else partials.counts,
            None if partials is None else partials.means,
            None if partials is None else partials.m2s,
            tiles,
            tiles_y,
            tiles_x,
            blocks,
            height,
            width,
            channels,
            *convolution.shift,
            convolution.dilation[1],
            ACTIVATION=activation.function,
            TILE_ROWS=rows,
            TAP_ROWS=convolution.kernel_size[0],
            TAP_COLUMNS=convolution.kernel_size[1],
            STEPS=packed.shape[1] // _CHANNELS,
            DILATION_Y=convolution.dilation[0],
            HALO=_halo(convolution),
            HALO_ROWS=_HALO_ROWS,
            STAGES=_stages(input, output, convolution),
            num_warps=4,
        )
