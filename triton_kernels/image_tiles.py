"""Tiles of images, for all kernels that pass over images of either memory format.

Tensors are viewed as [B, C, S]: samples, channels and pixels, with any strides. So one kernel serves both memory
formats, and input and output of different formats. A tile is BLOCK_C channels of BLOCK_S pixels of one sample.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import Chain
from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.launch import Counters, launch

#: Tiles of images with fewer pixels have all of them, and many channels.
_FEW_PIXELS = 16
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"


@dataclass(frozen=True)
class ImageNormConfig:
    """Channels and pixels of a tile, and the number of tiles that a program loops over (a strip)."""

    block_c: int
    block_s: int
    num_warps: int = 4
    strip: int = 16

    def tiles(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s)

    def strips(self, pixels: int) -> int:
        return blocks_of(pixels, self.block_s * self.strip)

    def stages(self, image: torch.Tensor, chain: Chain) -> int:
        """Of how many tiles of an image [B, C, S] a loop over a strip loads, the one that it works on among them.

        The next two tiles are on their way to shared memory; in float32 one, for its registers. Operands that are
        images would not fit there too, and 64-bit indices take the registers.
        """
        S = image.shape[2]
        if S >= 2**30 or chain.takes_tensors:
            return 1
        return min(2 if image.dtype == torch.float32 else 3, self.strip, self.tiles(S))

    @classmethod
    @functools.lru_cache
    def of_shape(cls, channels: int, pixels: int, long_rows: bool) -> "ImageNormConfig":
        """Long rows for images with contiguous pixels, else many channels a tile; all pixels where there are few.

        These are the best of the settings tried on an H200 at the target size.
        """
        if pixels < _FEW_PIXELS:
            block_s = max(1, next_power_of_2(pixels))
            return cls(min(4096 // block_s, next_power_of_2(channels)), block_s, num_warps=4 if pixels == 1 else 8)
        if long_rows:
            # Of a few long channels, a tile has as many values as of many.
            longest = max(1024, 4096 // next_power_of_2(channels))
            block_s = min(longest, next_power_of_2(pixels))
            return cls(min(4096 // block_s, next_power_of_2(channels)), block_s, num_warps=8 if block_s <= 64 else 4)
        return cls(min(64, next_power_of_2(channels)), 64)

    @classmethod
    def fit(cls, *images: torch.Tensor) -> "ImageNormConfig":
        """For images [B, C, S] of one shape: long rows where the pixels of all are contiguous."""
        return cls.of_shape(*images[0].shape[1:], all(layout_of(image) == CONTIGUOUS for image in images))


@dataclass(frozen=True)
class ImageSumsConfig:
    """Channels and pixels of a tile, how many tiles a loop has on their way, and the programs that share an image."""

    block_c: int
    block_s: int
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 264

    @classmethod
    def fit(cls, image: torch.Tensor) -> "ImageSumsConfig":
        """For an image [B, C, S], whatever its groups: long rows where its pixels are contiguous."""
        usual = ImageNormConfig.fit(image)
        return cls(usual.block_c, usual.block_s)


@dataclass(frozen=True)
class Parts:
    """How programs share an image [B, C, S] for sums over its groups.

    A unit is as many whole groups as BLOCK_C channels hold, or one group of some blocks. The pixels of a sample's unit
    are divided into strips. So a part is a block of a unit in a strip, and what follows of a group's parts together is
    made by one program.
    """

    block_c: int
    block_s: int
    groups: int  # of a unit
    blocks: int  # of a unit
    units: int  # of a sample
    strips: int
    tiles: int  # of a strip, each of block_s pixels
    is_full: bool  # whether all of each tile is inside

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, shape: tuple[int, int, int], group_size: int, config: ImageSumsConfig) -> "Parts":
        B, C, S = shape
        # Where an image is shorter than a tile along one axis, the tile is longer along the other.
        values, most_c = config.block_c * config.block_s, next_power_of_2(C)
        block_s = min(values // min(config.block_c, most_c), next_power_of_2(S))
        block_c = min(values // block_s, most_c)
        groups = max(1, min(block_c // group_size, C // group_size))
        while groups * group_size % 8 and groups > 4:  # so that channels_last rows are loaded 16 bytes at a time
            groups -= 1
        blocks = blocks_of(group_size, block_c)
        block_c = min(block_c, next_power_of_2(groups * group_size))
        units = blocks_of(C // group_size, groups)
        strips = max(1, config.programs // (B * units * blocks))
        tiles = blocks_of(blocks_of(S, block_s), strips)
        is_full = S % block_s == 0 and groups * group_size == blocks * block_c and units * groups * group_size == C
        return cls(block_c, block_s, groups, blocks, units, blocks_of(S, tiles * block_s), tiles, is_full)

    @property
    def of_unit(self) -> int:
        """The parts of a sample's unit."""
        return self.strips * self.blocks

    @property
    def lanes(self) -> int:
        """A power of two: at least the groups of a unit."""
        return next_power_of_2(self.groups)

    def counters(self, samples: int, *, over_samples: bool = False) -> Counters | None:
        """One for each unit that has several parts, and one for each that is added up over samples."""
        count = (samples * self.units if self.of_unit > 1 else 0) + (self.units if over_samples else 0)
        return Counters(count) if count else None


def layout_of(image: torch.Tensor) -> str:
    """Whether the pixels of an image [B, C, S] are contiguous, or its channels. This affects speed only: any strides
    work."""
    return CONTIGUOUS if image.stride(2) == 1 else CHANNELS_LAST


@triton.jit
def place_of_program(channels, parts, LENGTH: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr):
    """This program's LENGTH pixels, one of ``parts`` of a sample: their corner (sample, channel, pixel), their channels
    [BLOCK_C], and which of these are real."""
    pixel = (tl.program_id(0) % parts).to(INDEX) * LENGTH
    corner = (tl.program_id(0) // parts, second_place().to(INDEX) * BLOCK_C, pixel)
    c = corner[1] + tl.arange(0, BLOCK_C)
    return corner, c, c < channels


@triton.jit
def part_of_program(
    sizes,
    PIXEL_UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    INDEX: tl.constexpr,
):
    """This program's part (``Parts``): its corner (sample, channel, pixel), the pixel where it ends, its unit, and its
    strip and its block of that."""
    channels, pixels, units, strips, tiles = sizes
    program = tl.program_id(0)
    block = program % BLOCKS
    unit = program // BLOCKS % units
    rest = program // BLOCKS // units
    strip, sample = rest % strips, rest // strips
    pixel = strip.to(INDEX) * (tiles * BLOCK_S)
    end = tl.minimum(pixel + tiles * BLOCK_S, tl.cast(pixels, INDEX) * PIXEL_UNIT)
    channel = unit.to(INDEX) * (GROUPS * GROUP_SIZE) + block * BLOCK_C
    return (sample, channel, pixel), end, unit, strip, block


@triton.jit
def channels_of_block(first, block, channels, UNIT: tl.constexpr, BLOCK_C: tl.constexpr):
    """The channels [BLOCK_C] of a block of the unit of UNIT channels from ``first`` on, and which of them are real."""
    width = BLOCK_C
    if UNIT >= 2**31:  # which no int32 holds
        width = tl.full((), BLOCK_C, tl.int64)
    place = block * width + tl.arange(0, BLOCK_C)
    return first + place, (place < UNIT) & (first + place < channels)


@triton.jit
def is_in_part(real, pixel, end, FULL: tl.constexpr, BLOCK_S: tl.constexpr):
    """``is_inside`` for a tile of a part, all of whose tiles may be FULL."""
    if FULL:
        return tl.full((real.shape[0], BLOCK_S), 1, tl.int1)
    return is_inside(real, pixel, end, BLOCK_S)


@triton.jit
def members(real, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, LANES: tl.constexpr):
    """Which of a block's channels belong to which of its unit's groups: [LANES, BLOCK_C]."""
    group = tl.arange(0, real.shape[0]) // (GROUP_SIZE if GROUPS > 1 else real.shape[0])
    return real[None, :] & (group[None, :] == tl.arange(0, LANES)[:, None])


@triton.jit
def is_last(counter, count):
    """Whether this program is the last of ``count`` that come here, which finds what the others stored before.

    It has to load that with ``cache_modifier=".cg"``. The counter is left at 0.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


@triton.jit
def store_of_channels(
    targets,  # two of [B, C], or None
    values,  # one of each group of a unit [LANES], for each target
    weight,  # [C] or None: a factor of the last values
    sample,
    group,  # the unit's first one
    num_groups,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    operands,  # of CHAIN's steps, of which FIRST to END add what is subtracted from the first values
    CHAIN: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
):
    """Store the values of each channel's group, BLOCK of its channels at a time."""
    if targets is not None:
        groups = group + tl.arange(0, LANES)
        real = (tl.arange(0, LANES) < GROUPS) & (groups < num_groups)
        for first in tl.range(0, GROUP_SIZE, BLOCK, num_stages=1):
            place = first + tl.arange(0, BLOCK)
            inside = real[:, None] & (place < GROUP_SIZE)[None, :]
            c = groups.to(tl.int64)[:, None] * GROUP_SIZE + place[None, :]
            target = sample.to(tl.int64) * num_groups * GROUP_SIZE + c
            value = tl.broadcast_to(values[0][:, None], inside.shape)
            for i in tl.static_range(FIRST, END):
                if operands[i] is not None:
                    of_channel = c if CHAIN.steps[i].operand == "vector" else target
                    value -= tl.load(operands[i] + of_channel, mask=inside, other=0.0).to(tl.float32)
            last = tl.broadcast_to(values[1][:, None], inside.shape)
            if weight is not None:
                last *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
            tl.store(targets[0] + target, value, mask=inside)
            tl.store(targets[1] + target, last, mask=inside)


@triton.jit
def place_of_sample(place, channels):
    """Where the sample's values begin in a matrix [B, C]."""
    return tl.cast(place[0], tl.int64) * channels


@triton.jit
def is_inside(real, pixel, pixels, BLOCK_S: tl.constexpr):
    """Which values [BLOCK_C, BLOCK_S] of the tile at ``pixel`` are inside, with its ``real`` channels."""
    return real[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]


@triton.jit
def tile_of_image(image, place, inside):
    """Pointers to the tile [BLOCK_C, BLOCK_S] of an image at a place; ``inside`` has the tile's shape."""
    pixels = tl.cast(place[2], tl.int64) + tl.arange(0, inside.shape[1])
    return pixels_of_image(image, place, pixels, inside.shape[0])


@triton.jit
def pixels_of_image(image, place, pixels, BLOCK_C: tl.constexpr):
    """Pointers to BLOCK_C channels from a place on of any pixels [BLOCK_S] of an image (from ``as_image``). Offsets are
    int64, as images are large."""
    tensor, strides, units = image
    corner = tl.cast(place[0], tl.int64) * strides[0] * units[0]
    channels = (tl.cast(place[1], tl.int64) + tl.arange(0, BLOCK_C)) * strides[1] * units[1]
    return tensor + (corner + channels[:, None] + (pixels.to(tl.int64) * strides[2] * units[2])[None, :])


@triton.jit
def load_tile(image, place, inside):
    return tl.load(tile_of_image(image, place, inside), mask=inside, other=0.0)


@triton.jit
def store_tile(image, place, inside, values):
    tl.store(tile_of_image(image, place, inside), values.to(image[0].dtype.element_ty), mask=inside)


def size_unit(size: int) -> int:
    """The largest power of two, up to 16, that divides ``size``. Kernels take sizes in these units, which shows
    alignment."""
    return math.gcd(size, 16)


@functools.lru_cache(maxsize=1024)
def strides_in_units(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strides divided by their units, and the units."""
    units = tuple(map(size_unit, strides))
    return tuple(stride // unit for stride, unit in zip(strides, units, strict=True)), units


def as_image(tensor: torch.Tensor, *, backwards: bool = False) -> tuple[Any, ...]:
    """A tensor [B, C, S] for kernels: with its strides, and the units of these as constants.

    ``backwards``: pixel -s is the tensor's pixel s.
    """
    strides, units = strides_in_units(tensor.stride())
    if backwards:
        strides = (*strides[:2], -strides[2])
    return tensor, strides, tuple(map(tl.constexpr, units))


def image_operands(chain: Chain, each_steps: Sequence[Any]) -> tuple[Any, ...]:
    """What each step has, with tensors as images."""
    return tuple(
        as_image(each) if step.operand == "tensor" and each is not None else each
        for step, each in zip(chain.steps, each_steps, strict=True)
    )


def tensors_of(chain: Chain, each_steps: Sequence[Any]) -> list[torch.Tensor]:
    """What steps have that is an image."""
    pairs = zip(chain.steps, each_steps, strict=True)
    return [each for step, each in pairs if step.operand == "tensor" and each is not None]


def launch_tiles(
    kernel: triton.runtime.JITFunction,
    image: torch.Tensor,
    parts: int,
    config: ImageNormConfig,
    *arguments: Any,
    **options: Any,
) -> None:
    """Launch a kernel whose programs take BLOCK_C channels of one of ``parts`` of a sample of ``image`` [B, C, S].

    The arguments that say so are added. Indices are of 64 bits where a tile may end beyond 2**31.
    """
    if image.numel() == 0:
        return
    B, C, S = image.shape
    unit = size_unit(S)
    launch(
        kernel,
        grid_of(B * parts, blocks_of(C, config.block_c)),
        image.device,
        *arguments,
        C,
        S // unit,
        parts,
        **options,
        PIXEL_UNIT=unit,
        INDEX=tl.int32 if max(C, S) < 2**30 else tl.int64,
        BLOCK_C=config.block_c,
        BLOCK_S=config.block_s,
        config=config,
        num_warps=config.num_warps,
    )


#: Bytes of tiles that loops of a program may have on their way: two programs a multiprocessor.
_MOST_BYTES_LOADED = 2**16 + 2**15


def launch_parts(
    kernel: triton.runtime.JITFunction,
    images: Sequence[torch.Tensor],
    group_size: int,
    parts: Parts,
    config: ImageSumsConfig,
    *arguments: Any,
    is_pipelined: bool = True,
    **options: Any,
) -> None:
    """Launch a kernel whose programs take ``parts`` of ``images`` [B, C, S], all that it reads. The arguments that say
    so are added. ``is_pipelined``: loads of later tiles may begin before a tile is done with.

    The launch does not overlap. A convolution of cuDNN's, which often comes before it, lets the next launch begin while
    it still runs, and small programs gather on the multiprocessors that it leaves first: behind one, a norm's forward
    pass took 3 to 7 us more, a backward pass 5 to 8, of 20 to 150; behind a pointwise kernel it takes 1 less (H100).
    """
    B, C, S = images[0].shape
    unit = size_unit(S)
    is_long = max(C, S) >= 2**30
    bytes = parts.block_c * parts.block_s * sum([image.element_size() for image in images])
    stages = min(config.num_stages, parts.tiles, _MOST_BYTES_LOADED // bytes) if is_pipelined and not is_long else 1
    launch(
        kernel,
        (B * parts.units * parts.of_unit,),
        images[0].device,
        *arguments,
        (C, S // unit, parts.units, parts.strips, parts.tiles),
        **options,
        GROUPS=parts.groups,
        GROUP_SIZE=group_size,
        BLOCKS=parts.blocks,
        LANES=parts.lanes,
        SOLE=parts.of_unit == 1,
        FULL=parts.is_full,
        STAGES=max(1, stages),
        PIXEL_UNIT=unit,
        INDEX=tl.int64 if is_long else tl.int32,
        BLOCK_C=parts.block_c,
        BLOCK_S=parts.block_s,
        config=config,
        overlaps=False,
        num_warps=config.num_warps,
    )
