"""Weight gradient of a stride-1 convolution of NHWC images, for Hopper: Gluon, split over pixels, warp-specialised.

    dW[ky, kx, o, c] = sum over n, y, x of gradient[n, y, x, o] * input[n, y + ky * dy + sy, x + kx * dx + sx, c]

For one tap this is a product of two matrices, [O, pixels] and [pixels, C], with a long sum. A program owns 64 x 64
channels, all taps and a share of the tiles of 128 pixels. One warp copies tiles into shared memory. A warpgroup per tap
column multiplies them; it has an accumulator in registers for each tap row.

One operand, "fixed", is divided into tiles. Of the other, "shifted", each tap reads the tile at its own shift. Swapping
the two only changes the order of the taps, so the operand with fewer tiles is the fixed one. TMA fills in zeros outside
the images.

A pixel's 64 channels are a 128-byte row of shared memory, swizzled by the row's address. So a tap's shift only changes
where in shared memory the operand begins. All taps share one box. Each row of a tile is a product of its own, whose
operand may begin inside a swizzle atom (8 pixels, 1024 bytes). (Tiles 8 columns wide, with a box for each tap column,
would begin at whole atoms, and copy half as much again at 3 x 3 taps.)
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.device import SHARED_MEMORY, multiprocessor_count
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.hopper_barriers import new_barriers
from triton_kernels.hopper_memory import load_box, view, window
from triton_kernels.launch import call, launch, wait_for_launch_before

#: Channels of a block, a swizzled row of shared memory: 128 bytes of a 16-bit dtype.
_CHANNELS = 64
_ROW_BYTES = 128
#: The largest number of tiles in flight.
_MOST_STAGES = 5
#: Bytes set aside for the barriers and for aligning the buffers.
_RESERVED_BYTES = 2048
#: Layout of a box: pixels of 128 bytes, swizzled.
_BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@dataclass(frozen=True)
class Taps:
    """Taps (rows, columns), their dilation, and where in shared memory each finds a tile, in pixels of 128 bytes."""

    #: A tile.
    rows: ClassVar[int] = 4
    columns: ClassVar[int] = 32
    kernel_size: tuple[int, int]
    dilation: tuple[int, int]

    @functools.cached_property
    def reach(self) -> tuple[int, int]:
        """The distance of the last tap from the first, in rows and columns."""
        rows, columns = ((size - 1) * step for size, step in zip(self.kernel_size, self.dilation, strict=True))
        return rows, columns

    @functools.cached_property
    def halo(self) -> int:
        """Columns right of the tile, as one copy takes them: 0, or a power of 2 and at least a swizzle atom of 8."""
        return max(8, next_power_of_2(self.reach[1])) if self.reach[1] else 0

    @property
    def box(self) -> tuple[int, int]:
        """Rows and columns of a box."""
        return self.rows + self.reach[0], self.columns + self.halo

    @property
    def box_pixels(self) -> int:
        return self.box[0] * self.box[1]

    @property
    def tap_pitch(self) -> tuple[int, int]:
        """The distance in pixels from a tap to the one below it, and to the one on its right."""
        return self.dilation[0] * self.box[1], self.dilation[1]

    @property
    def stage_bytes(self) -> int:
        return (self.rows * self.columns + self.box_pixels) * _ROW_BYTES

    @property
    def pixels(self) -> int:
        """All that boxes are allocated."""
        return self._pixels_of(self.stages)

    def _pixels_of(self, stages: int) -> int:
        """A multiple of any window's (``triton_kernels.hopper_memory``)."""
        widest = max(self.columns, self.halo)
        return blocks_of(stages * self.box_pixels, widest) * widest

    @functools.cached_property
    def stages(self) -> int:
        """The number of tiles in flight."""
        free = (SHARED_MEMORY[90] - _RESERVED_BYTES) // _ROW_BYTES
        tile = self.rows * self.columns
        fitting = (each for each in range(_MOST_STAGES, 0, -1) if each * tile + self._pixels_of(each) <= free)
        return next(fitting, 0)


@gluon.jit
def share_of_program(scope):
    """This program's blocks of 64 channels (fixed, shifted), its index along partials' second axis, and that axis."""
    tiles, tiles_y, tiles_x, blocks_shifted, blocks = scope
    block = gl.program_id(0) % blocks
    return block // blocks_shifted, block % blocks_shifted, gl.program_id(0) // blocks, gl.num_programs(0) // blocks


@gluon.jit
def load_tiles(sources, first, shift, scope, slots, barriers, TAPS: gl.constexpr):
    """The copying warp. For each tile it waits until a stage is free, and fills it."""
    fixed, shifted, halo = sources
    fixed_slots, pixels = slots
    ready, empty = barriers
    tiles, tiles_y, tiles_x, blocks_shifted, blocks = scope
    ROWS: gl.constexpr = TAPS.rows
    COLUMNS: gl.constexpr = TAPS.columns
    HEIGHT: gl.constexpr = TAPS.box[0]
    WIDTH: gl.constexpr = TAPS.box[1]
    block_fixed, block_shifted, share, shares = share_of_program(scope)
    step = 0
    # Different programs process neighbouring tiles at the same time, so that L2 serves what they share.
    for tile in range(share, tiles, shares):
        sample = tile // (tiles_x * tiles_y)
        y = tile // tiles_x % tiles_y * ROWS
        x = tile % tiles_x * COLUMNS
        stage = step % TAPS.stages
        full = ready.index(stage)
        mbarrier.wait(empty.index(stage), (step // TAPS.stages & 1) ^ 1)
        mbarrier.expect(full, TAPS.stage_bytes)
        load_box(fixed, [first[0] + sample, y, x, block_fixed * 64], full, fixed_slots.index(stage))
        n = first[1] + sample
        y += shift[0]
        x += shift[1]
        c = block_shifted * 64
        for row in gl.static_range(HEIGHT):
            box = window(pixels, stage, COLUMNS, 0, TAPS.box_pixels, TAPS.stages, row * WIDTH)
            load_box(shifted, [n, y + row, x, c], full, box)
            if TAPS.halo > 0:
                box = window(pixels, stage, TAPS.halo, 0, TAPS.box_pixels, TAPS.stages, row * WIDTH + COLUMNS)
                load_box(halo, [n, y + row, x + COLUMNS, c], full, box)
        step += 1


@gluon.jit
def sum_tap_column(partials, scope, slots, barriers, TAPS: gl.constexpr, TAP_X: gl.constexpr, ACCUMULATE: gl.constexpr):
    """A multiplying warpgroup. It sums the taps of column TAP_X over this program's tiles, and writes them to
    ``partials``."""
    fixed_slots, pixels = slots
    ready, empty = barriers
    tiles, tiles_y, tiles_x, blocks_shifted, blocks = scope
    KH: gl.constexpr = TAPS.kernel_size[0]
    KW: gl.constexpr = TAPS.kernel_size[1]
    ROWS: gl.constexpr = TAPS.rows
    COLUMNS: gl.constexpr = TAPS.columns
    WIDTH: gl.constexpr = TAPS.box[1]
    DOWN: gl.constexpr = TAPS.tap_pitch[0]
    CORNER: gl.constexpr = TAP_X * TAPS.tap_pitch[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FRAGMENT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    block_fixed, block_shifted, share, shares = share_of_program(scope)
    sums = ()
    for _tap_y in gl.static_range(KH):
        sums = sums + (gl.zeros((64, 64), gl.float32, layout=SUMS),)
    step = 0
    for _tile in range(share, tiles, shares):
        stage = step % TAPS.stages
        mbarrier.wait(ready.index(stage), step // TAPS.stages & 1)
        fixed = fixed_slots.index(stage).permute((1, 0))
        for row in gl.static_range(ROWS):
            # From registers: at 64 x 64 channels, two operands in shared memory would take all of its bandwidth.
            a = fixed.slice(row * COLUMNS, COLUMNS, dim=1).load(FRAGMENT)
            next_sums = ()
            for tap_y in gl.static_range(KH):
                b = window(pixels, stage, COLUMNS, 0, TAPS.box_pixels, TAPS.stages, tap_y * DOWN + CORNER + row * WIDTH)
                b = view(b, pixels.dtype, [COLUMNS, 64], SWIZZLED)
                next_sums = next_sums + (warpgroup_mma(a, b, sums[tap_y], is_async=True),)
            # This frees their operand's registers. Triton 3.9's assembler would wait for each product otherwise; before
            # 3.9 it makes no difference (0.89 ms for 0.88 at the target size, H100).
            sums = warpgroup_mma_wait(num_outstanding=0, deps=next_sums)
            if KH == 1:
                sums = (sums,)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS)), 0)
    place = (gl.program_id(0) % blocks * shares + share).to(gl.int64) * (KH * KW) + TAP_X
    target = partials + place * 4096 + (row * 64 + column)
    for tap_y in gl.static_range(KH):
        result = sums[tap_y]
        if ACCUMULATE:
            result += gl.load(target + tap_y * KW * 4096)
        gl.store(target + tap_y * KW * 4096, result)


@gluon.jit
def idle():
    pass


@gluon.jit(do_not_specialize=["fixed_first", "shifted_first", "tiles"])
def weight_gradient_kernel(
    fixed,  # [N, H, W, C]: descriptor of a tile, [1, TAPS.rows, TAPS.columns, 64]
    shifted,  # [M, OH, OW, O]: descriptor of a row of it
    halo,  # the same tensor: descriptor of what lies right of those rows; unused without a halo
    partials,  # [blocks, shares, taps, 64, 64] float32: sums over pixels, at [.., channel of fixed, channel of shifted]
    fixed_first,  # where in fixed the samples begin
    shifted_first,  # and in shifted
    row_shift,  # of the first tap: its rows of shifted minus those of fixed; and likewise its columns
    column_shift,
    tiles,  # of fixed: all samples' tiles, those along an image's height, and those along its width
    tiles_y,
    tiles_x,
    blocks_shifted,  # blocks of 64 channels of ``shifted``
    blocks,  # pairs of blocks of both
    TAPS: gl.constexpr,  # Taps
    ACCUMULATE: gl.constexpr,  # add to what ``partials`` holds; otherwise overwrite it
):
    """For each tap, sums over pixels of the products of fixed and shifted; one program for each (block, share)."""
    wait_for_launch_before()
    KW: gl.constexpr = TAPS.kernel_size[1]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    fixed_slots = gl.allocate_shared_memory(fixed.dtype, [TAPS.stages, 128, 64], SWIZZLED)
    # Allocated as swizzle atoms, which aligns them.
    pixels = gl.allocate_shared_memory(fixed.dtype, [TAPS.pixels // 8, 8, 64], SWIZZLED)
    pixels = view(pixels, fixed.dtype, [TAPS.pixels, 64], FLAT)
    barriers = (new_barriers(TAPS.stages, 1), new_barriers(TAPS.stages, KW))
    fence_async_shared()
    sources = (fixed, shifted, halo)
    first = (fixed_first, shifted_first)
    shift = (row_shift, column_shift)
    scope = (tiles, tiles_y, tiles_x, blocks_shifted, blocks)
    slots = (fixed_slots, pixels)
    # Registers: all warps, rounded up to multiples of four, share 65536. A multiplying thread holds 32 for each tap
    # row's sums and 32 of the fixed tile. The copying warp spills at 24. With one tap column, an idle warpgroup is
    # added: without it Triton asks for 256 registers a thread, which ptxas ignores.
    # fmt: off
    if KW == 1:
        gl.warp_specialize([
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 0, ACCUMULATE)),
            (idle, ()),
            (load_tiles, (sources, first, shift, scope, slots, barriers, TAPS)),
        ], [4, 1], [232, 40])
    elif KW == 2:
        gl.warp_specialize([
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 0, ACCUMULATE)),
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 1, ACCUMULATE)),
            (load_tiles, (sources, first, shift, scope, slots, barriers, TAPS)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 0, ACCUMULATE)),
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 1, ACCUMULATE)),
            (sum_tap_column, (partials, scope, slots, barriers, TAPS, 2, ACCUMULATE)),
            (load_tiles, (sources, first, shift, scope, slots, barriers, TAPS)),
        ], [4, 4, 1], [160, 160, 32])
    # fmt: on


def supports(
    input: torch.Tensor,
    gradient: torch.Tensor,
    kernel_size: tuple[int, int],
    dilation: tuple[int, int],
) -> bool:
    """Whether the kernel takes these NHWC tensors and taps.

    It takes bfloat16 and float16 on Hopper, up to 3 x 3 taps whose tiles fit into shared memory, and images that TMA
    can copy: strides and addresses in multiples of 16 bytes, so channels in multiples of 8.
    """
    return (
        runs_hopper_kernels(input.device)
        and input.dtype == gradient.dtype
        and input.dtype in (torch.bfloat16, torch.float16)
        and all(1 <= size <= 3 for size in kernel_size)
        and Taps(kernel_size, dilation).stages >= 2
        and all(
            t.numel() > 0 and t.data_ptr() % 16 == 0 and t.stride(3) == 1 and all(s % 8 == 0 for s in t.stride()[:3])
            for t in (input, gradient)
        )
    )


def partials_shape(input: torch.Tensor, gradient: torch.Tensor, kernel_size: tuple[int, int]) -> tuple[int, int, int]:
    """Shape of the float32 partial sums of all launches for one weight: [blocks, shares, taps * 64 * 64].

    ``input`` and ``gradient`` are as for ``convolution_weight_gradient``; only their channels matter.
    """
    blocks = blocks_of(input.shape[3], _CHANNELS) * blocks_of(gradient.shape[3], _CHANNELS)
    shares = max(1, multiprocessor_count(input.device) // blocks)
    return blocks, shares, kernel_size[0] * kernel_size[1] * _CHANNELS**2


def convolution_weight_gradient(
    input: torch.Tensor,
    gradient: torch.Tensor,
    partials: torch.Tensor,
    *,
    input_first: int,
    gradient_first: int,
    count: int,
    kernel_size: tuple[int, int],
    dilation: tuple[int, int],
    shift: tuple[int, int],
    accumulate: bool,
) -> None:
    """Write the weight gradient's sums over ``count`` samples to ``partials``, or add them if ``accumulate``.

    ``input`` [N, H, W, C] and ``gradient`` [M, OH, OW, O], that of the convolution's output, are as ``supports`` says.
    The samples begin at ``input_first`` in ``input`` and at ``gradient_first`` in ``gradient``. Tap (ky, kx) pairs the
    gradient's pixel (y, x) with the input's (y + shift[0] + ky * dilation[0], x + shift[1] + kx * dilation[1]), which
    is 0 outside the image. ``partials``, a contiguous float32 tensor of ``partials_shape``, is for ``finish`` to sum.
    Calls that add to one another differ only in their samples, or in tensors of the same shapes.
    """
    if count == 0:
        if not accumulate:
            call(_zero, partials)
        return
    taps = Taps(kernel_size, dilation)
    if _gradient_is_fixed(input.shape, gradient.shape):
        fixed, shifted, fixed_first, shifted_first = gradient, input, gradient_first, input_first
    else:
        # The same sums, with the taps in reverse order: seen from the input, the last tap has the smallest shift.
        fixed, shifted, fixed_first, shifted_first = input, gradient, input_first, gradient_first
        shift = tuple(-start - reach for start, reach in zip(shift, taps.reach, strict=True))
    tiles_y, tiles_x = blocks_of(fixed.shape[1], taps.rows), blocks_of(fixed.shape[2], taps.columns)
    blocks, shares, _ = partials.shape
    launch(
        weight_gradient_kernel,
        (blocks * shares,),
        input.device,
        _descriptor(fixed, taps.rows, taps.columns),
        _descriptor(shifted, 1, taps.columns),
        _descriptor(shifted, 1, taps.halo or taps.columns),
        partials,
        fixed_first,
        shifted_first,
        shift[0],
        shift[1],
        count * tiles_y * tiles_x,
        tiles_y,
        tiles_x,
        blocks_of(shifted.shape[3], _CHANNELS),
        blocks,
        TAPS=taps,
        ACCUMULATE=accumulate,
        config=taps,
        num_warps=4,
    )


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def by_taps(
    sums: torch.Tensor,
    input_shape: tuple[int, ...],
    gradient_shape: tuple[int, ...],
    *,
    kernel_size: tuple[int, int],
) -> torch.Tensor:
    """The weight gradient [KH, KW, O, C] in float32 (not contiguous): ``sums`` are ``convolution_weight_gradient``'s
    partials added up over the shares, and the shapes those of its input and gradient."""
    input_blocks, gradient_blocks = (blocks_of(shape[3], _CHANNELS) for shape in (input_shape, gradient_shape))
    if _gradient_is_fixed(input_shape, gradient_shape):
        sums = sums.view(gradient_blocks, input_blocks, *kernel_size, _CHANNELS, _CHANNELS).permute(2, 3, 0, 4, 1, 5)
    else:
        sums = sums.view(input_blocks, gradient_blocks, *kernel_size, _CHANNELS, _CHANNELS).permute(2, 3, 1, 5, 0, 4)
        sums = sums.flip(0, 1)
    sums = sums.reshape(*kernel_size, gradient_blocks * _CHANNELS, input_blocks * _CHANNELS)
    return sums[:, :, : gradient_shape[3], : input_shape[3]]


def _gradient_is_fixed(input_shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> bool:
    """Whether the gradient has no more tiles than the input."""
    of_gradient, of_input = (
        blocks_of(shape[1], Taps.rows) * blocks_of(shape[2], Taps.columns) for shape in (gradient_shape, input_shape)
    )
    return of_gradient <= of_input


def _descriptor(image: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    box = [1, rows, columns, _CHANNELS]
    return TensorDescriptor(image, list(image.shape), list(image.stride()), box, _BOX_LAYOUT)
