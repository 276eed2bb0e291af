"""Configs that run everywhere, for GPUs and problems that no table has."""

import functools
import math
from dataclasses import replace

from autotune_configs.gpus import Gpu
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, ImageNormConfig, ImageSumsConfig
from triton_kernels.linear import LinearConfig

#: The widest group that a tile of the product can hold. A second kernel normalises wider ones.
WIDEST_TILE = 256
#: In wider groups, keeping the group of a row's minimum takes more shared memory than a block of the kernel has left.
WIDEST_REDUCED_GROUP = 64

#: Tiles (block_m, block_n, block_k, num_warps) by element size, the best first.
#:
#: These are for tensor cores that read shared memory (Hopper's wgmma, Blackwell's tcgen05), with operands loaded
#: through tensor descriptors; measured on the H200. float32 has no 64 x 256: triton 3.7.1 compiles it for sm_100 to
#: nothing but a trap.
_SHARED_MEMORY_TILES = {
    2: ((128, 256, 64, 8), (128, 128, 128, 8), (64, 256, 64, 8), (64, 128, 128, 8), (64, 64, 128, 4), (64, 32, 128, 4)),
    4: ((128, 128, 32, 8), (32, 256, 16, 8), (64, 128, 32, 8), (64, 64, 32, 4), (64, 32, 32, 4)),
}
#: Tiles for tensor cores that read registers.
_REGISTER_TILES = {
    2: ((128, 128, 32, 8), (64, 256, 32, 8), (64, 64, 32, 4), (64, 32, 32, 4)),
    4: ((128, 64, 16, 8), (32, 256, 16, 8), (64, 64, 16, 4), (64, 32, 16, 4)),
}
#: Tiles for operands loaded element by element, whose addresses need many registers. These are the largest that spill
#: nothing, or almost nothing, with any epilogue on any architecture (compiled offline, triton 3.7.1).
_UNALIGNED_TILES = {
    2: ((64, 64, 32, 4), (64, 256, 32, 8), (64, 32, 32, 4)),
    4: ((64, 64, 16, 4), (32, 256, 16, 8), (64, 32, 16, 4)),
}
#: The share of the multiprocessors that must have a tile. With less, twice as many tiles of half the size would still
#: run at once; with more, they take two waves, and each half as long as this one. 128 tiles on 132 multiprocessors take
#: 0.49 to 0.77 of the time of 256 (H100, bfloat16, 1 x 8192 x 8192 to 4096 x 1024 x 1024), 72 to 96 of them 0.7 to 0.8.
_FILLED = 0.5


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def may_hold_groups(group_size: int, reduces: bool) -> bool:
    """Whether some tile of the product can hold whole groups of a chain, which ends in a row minimum or not."""
    return is_power_of_two(group_size) and group_size <= (WIDEST_REDUCED_GROUP if reduces else WIDEST_TILE)


@functools.lru_cache(maxsize=4096)
def heuristic_linear_config(element_size: int, M: int, N: int, K: int, group_size: int, gpu: Gpu) -> LinearConfig:
    """The largest tile that fits into shared memory and leaves few multiprocessors without a tile.

    It holds whole groups where a tile can. The exception is a problem whose tiles would then occupy less than half of
    the multiprocessors: a second kernel for the norm is faster (1 x 2048 x 2048, groups of 128: 21 us in one kernel, 13
    in two; H200).
    """
    narrowest = group_size if is_power_of_two(group_size) and group_size <= WIDEST_TILE else 1
    config = _largest_tile(element_size, M, N, K, narrowest, gpu)
    fills_half = _tiles(config, M, N) >= gpu.multiprocessors // 2
    return config if fills_half else _largest_tile(element_size, M, N, K, 1, gpu)


def _largest_tile(element_size: int, M: int, N: int, K: int, narrowest: int, gpu: Gpu) -> LinearConfig:
    """The largest tile of at least ``narrowest`` columns that gives ``_FILLED`` of the multiprocessors one, else the
    smallest."""
    is_aligned = K * element_size % 16 == 0
    if not is_aligned:
        tiles = _UNALIGNED_TILES
    elif 90 <= gpu.architecture < 120:
        tiles = _SHARED_MEMORY_TILES
    else:
        tiles = _REGISTER_TILES
    tallest = max(16, next_power_of_2(M))
    fitting: list[LinearConfig] = []
    for block_m, block_n, block_k, num_warps in tiles[element_size]:
        tile = LinearConfig(min(block_m, tallest), block_n, block_k, num_warps=num_warps)
        configs = (
            replace(tile, num_stages=num_stages, store_strips=store_strips)
            for num_stages, store_strips in _stages(tile.block_m, block_n, element_size, is_aligned, gpu)
        )
        fits = (config for config in configs if config.shared_memory(element_size) <= gpu.shared_memory)
        fitting += [config for config in fits if block_n >= narrowest][:1]
    smallest = fitting[-1]  # which fits into any GPU
    return next((config for config in fitting if _tiles(config, M, N) >= _FILLED * gpu.multiprocessors), smallest)


def _tiles(config: LinearConfig, M: int, N: int) -> int:
    return blocks_of(M, config.block_m) * blocks_of(N, config.block_n)


def _stages(block_m: int, block_n: int, element_size: int, is_aligned: bool, gpu: Gpu) -> tuple[tuple[int, int], ...]:
    """(num_stages, store_strips) to try, the best first.

    On Hopper the largest tiles have room for a fourth stage if they are stored in two halves. That takes 0.975 to 1.003
    of the time at 256 to 4096 rows (H200). On Blackwell the addresses of a third stage of operands that are loaded
    element by element are spilled.
    """
    usual = ((2, 1),) if gpu.architecture == 100 and not is_aligned else ((3, 1), (2, 1))
    largest = (block_m, block_n, element_size, gpu.architecture) == (128, WIDEST_TILE, 2, 90)
    return ((4, 2), *usual) if largest else usual


def heuristic_group_norm_config(
    kernel: str, element_size: int, M: int, C: int, group_size: int, gpu: Gpu
) -> GroupNormConfig:
    """Two rows of 1024 columns or more, or one of wider groups; of narrow groups four rows of 256. In the backward pass
    see ``_BACKWARD_TILES``.

    Measured at 4096 and 8192 x 4096 in bfloat16 on an H200, with GELU or SiLU after the norm: 21 and 38 us forward and
    48 and 86 backward for groups of 4096 (a copy takes 19 and 35), 24 and 45, 45 and 83 for groups of 128.
    """
    block_group = next_power_of_2(group_size)
    holds_rows = C <= (_WIDEST_ROW if group_size == C else _WIDEST_ROW_OF_GROUPS)
    if kernel == "group_norm":
        block_columns = max(min(256 if block_group <= 64 else 1024, next_power_of_2(C)), block_group)
        block_m = 4 if block_columns <= 256 else 2 if block_columns <= 4096 else 1
        num_warps = 4 if block_columns <= 2048 else 8
        if holds_rows and C <= block_columns <= _VALUES_OF_ROWS:
            enough = next_power_of_2(max(1, blocks_of(M, _ENOUGH_PROGRAMS_OF_ROWS)))
            block_m, num_warps = min(_VALUES_OF_ROWS // block_columns, enough), element_size // 2
        return GroupNormConfig(block_m, block_columns, block_m, num_warps)
    tiles, width = (_BACKWARD_TILES_OF_ROWS, next_power_of_2(C)) if holds_rows else (_BACKWARD_TILES, block_group)
    block_m, block_columns, num_warps, programs, stages = next(tile for widest, *tile in tiles if width <= widest)
    if holds_rows:  # of few rows, for as many programs as there are multiprocessors
        block_m = min(block_m, max(4, next_power_of_2(blocks_of(M, gpu.multiprocessors))))
    block_columns = max(min(block_columns, next_power_of_2(C)), block_group)
    chunks = programs // blocks_of(C // group_size, block_columns // block_group)
    rows = max(1, blocks_of(M, max(1, chunks if holds_rows else min(_MOST_CHUNKS, chunks))))
    config = GroupNormConfig(block_m, block_columns, blocks_of(rows, block_m) * block_m, num_warps, stages)
    while config.num_stages > 1 and config.shared_memory(group_size, element_size) > gpu.shared_memory:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


#: The widest group, and for it block_m, block_columns, num_warps, programs and num_stages. With narrow groups most of
#: the time is the chain's arithmetic, which needs many warps.
_BACKWARD_TILES = (
    (64, 4, 256, 4, 512, 1),
    (256, 1, 1024, 4, 528, 3),
    (512, 4, 512, 4, 512, 3),
    (2048, 1, 2048, 4, 264, 3),
    (4096, 2, 4096, 8, 132, 3),
    (8192, 1, 8192, 16, 132, 1),
)
#: Of rows that a tile holds whole it takes many, up to these widths. (Layer norm in bfloat16 on an H200, forward at
#: 401408 x 96: 48 us where a tile of four rows took 73 and a copy takes 40, at 50176 x 768 42 for 56; backward 120 for
#: 4112, and 121 for 429. PyTorch's own backward pass takes 318 at the first of these.)
_WIDEST_ROW, _WIDEST_ROW_OF_GROUPS = 4096, 256
_VALUES_OF_ROWS, _ENOUGH_PROGRAMS_OF_ROWS = 1024, 512
_BACKWARD_TILES_OF_ROWS = (
    (32, 64, 32, 8, 264, 1),
    (64, 32, 64, 4, 528, 3),
    (128, 16, 128, 8, 264, 3),
    (256, 16, 256, 8, 264, 1),
    (512, 4, 512, 4, 264, 3),
    (1024, 4, 1024, 4, 264, 3),
    (2048, 2, 2048, 4, 264, 3),
    (4096, 1, 4096, 4, 264, 3),
)
#: Of the rows. Each has sums of its own, to be added up.
_MOST_CHUNKS = 132


#: Programs that occupy a GPU well enough for each to loop over more tiles.
_ENOUGH_PROGRAMS = 160
#: Pixels of the longest contiguous images whose backward pass has strips of four tiles.
_LONGEST_IN_SHORT_STRIPS = 2**20


def heuristic_image_config(kernel: str, samples: int, channels: int, pixels: int, layout: str) -> ImageNormConfig:
    """Tiles of 1024 to 4096 values, in strips while there are enough of these.

    The best of some forty settings at each of (2, 320, 64 x 64), (8, 640, 32 x 32), (1, 128, 512 x 512) and
    (8, 256, 128 x 128), in bfloat16 on an H200; of the backward pass also in float32.
    """
    is_backward = kernel == "image_group_norm_backward"
    usual = ImageNormConfig.of_shape(channels, pixels, layout == CONTIGUOUS)
    if pixels < 16:
        return usual
    if layout not in (CONTIGUOUS, CHANNELS_LAST):  # a tile is transposed
        return replace(usual, strip=1)
    most, enough_programs = 16 if is_backward else 4, _ENOUGH_PROGRAMS
    if is_backward and layout == CHANNELS_LAST:
        config, enough_programs = usual, 2 * _ENOUGH_PROGRAMS
    elif layout == CHANNELS_LAST:
        block_c = min(64, next_power_of_2(channels))
        block_s = min(2048 // block_c, next_power_of_2(pixels))
        config = ImageNormConfig(block_c, block_s)
    else:
        block_s = min(1024, next_power_of_2(pixels))
        config = ImageNormConfig(min(1024 // block_s, next_power_of_2(channels)), block_s, num_warps=2)
        if is_backward:  # shorter strips are more sums to add up
            return replace(config, num_warps=4, strip=4 if pixels <= _LONGEST_IN_SHORT_STRIPS else most)
    programs = samples * blocks_of(channels, config.block_c) * config.tiles(pixels)
    strip = min(most, 1 << max(0, (programs // enough_programs).bit_length() - 1))
    return replace(config, strip=strip)


#: Channels of all samples for each multiprocessor, below which an image is divided into many strips; and values of an
#: image that is short of work.
_FEW_CHANNELS, _SMALL = 16, 2**22
#: Rows of a few pixels that fill a GPU with small tiles.
_MANY_ROWS = 2**14
#: Tiles of a row that keep enough loads on their way.
_FEWEST_TILES = 6


def heuristic_image_sums_config(
    kernel: str,
    element_size: int,
    samples: int,
    channels: int,
    pixels: int,
    group_size: int,
    layout: str,
    gpu: Gpu,
) -> ImageSumsConfig:
    """Many small programs that each have a whole unit of groups (``Parts``), where there are enough of these.

    The best of some twenty settings at each of ten images of 1 to 100 MB: in bfloat16 within 4% of the best, with ReLU
    and with SiLU after the norm (H200; or the best of a hundred with ReLU, where an H100 is named). In float32 these
    were measured with an older kernel, and few images of it.
    """
    if layout.startswith(CHANNELS_LAST):
        config = _channels_last_sums(kernel, element_size, samples * channels, channels, pixels, gpu)
    elif kernel == "image_statistics":  # of rows: each group is one
        channels, pixels = channels // group_size, pixels * group_size
        config = _row_statistics(pixels, gpu)
    else:
        config = _row_sums(element_size, samples * channels, pixels, gpu)
    values, block_c = config.block_c * config.block_s, min(config.block_c, next_power_of_2(channels))
    block_s = min(values // block_c, max(4, next_power_of_2(pixels)))
    block_c = min(values // block_s, next_power_of_2(channels), 512)
    programs = 33 << max(0, (config.programs // 33).bit_length() - 1)  # as a sweep has them
    return replace(config, block_c=block_c, block_s=block_s, programs=programs)


def _channels_last_sums(
    kernel: str, element_size: int, of_samples: int, channels: int, pixels: int, gpu: Gpu
) -> ImageSumsConfig:
    """``of_samples``: the channels of all samples.

    Two images are on their way in the sums, one in the statistics, so these take fewer warps. (64 x 1024 x 14 x 14: 9.8
    us with one warp, 11.2 with two, at least 11.5 with four. The sums of 64 x 512 x 28 x 28: 34 us with four, 37 with
    one.)
    """
    is_sums, processors = kernel == "image_sums", gpu.multiprocessors
    if of_samples < _FEW_CHANNELS * processors:  # 1 x 128 x 512 x 512: 24 us, with one warp a program at least 26
        most = max(1, of_samples * pixels // 2**13)
        if channels <= 32:  # 1 x 32 x 96**3: 21 and 33 us, in tiles of 64 pixels 22 and 34
            return ImageSumsConfig(32, 128, 8, programs=min(2 * processors, most))
        return ImageSumsConfig(32, 64, programs=min((2 if is_sums else 4) * processors, most))
    blocks = blocks_of(of_samples, 64)
    widest = 64 if gpu.architecture == 90 else 32  # on sm_100 the sums of GELU would spill
    # A short strip is not worth its part of the merge. (32 x 192 x 32 x 32: 8 and 13 us, in two strips 10 and 14.)
    if 2 * processors <= 3 * blocks <= 3 * processors and pixels <= 1024:
        return ImageSumsConfig(64, widest, num_stages=3, programs=processors)
    block_s = max(8, min(widest, _power_of_2_below(2**14 // blocks)))  # more programs, as many values
    if block_s == 8 and element_size == 4:  # 64 x 2048 x 7 x 7: 12 and 25 us, with 64 channels 18 and 32
        return ImageSumsConfig(256, 4, programs=2 * processors)
    if is_sums and block_s >= 32:
        return ImageSumsConfig(64, block_s, programs=2 * processors)
    if is_sums:  # 64 x 1024 x 14 x 14: 34 us on an H100, in tiles of 32 channels and 16 pixels 38
        return ImageSumsConfig(64, 8, 1, programs=processors)
    return ImageSumsConfig(64, min(16, block_s), 1, programs=8 * processors)


def _row_statistics(pixels: int, gpu: Gpu) -> ImageSumsConfig:
    """The longest tile that divides a row into not too few.

    The rows of 64 x 512 x 28 x 28 are 49 tiles of 256: 14.5 us, and 16.7 in tiles of 512.
    """
    longest = max(64, min(2048, _power_of_2_below(pixels // _FEWEST_TILES)))
    block_s = math.gcd(pixels, longest)
    if block_s < min(longest, max(64, pixels // 128)):  # too short. A part of the last tile is wasted, up to an eighth
        block_s = next((i for i in (2048, 1024, 512, 256) if i <= longest and -pixels % i <= pixels // 8), 128)
    if block_s <= 128:
        # On an H100 64 x 1024 x 14 x 14 takes 18 us and 64 x 2048 x 7 x 7 takes 11, in tiles of eight rows 30 and 16.
        tile = (2, 256) if longest >= 256 else (8, 64)
        return ImageSumsConfig(*tile, 2, programs=2 * gpu.multiprocessors)
    # On sm_80 GELU before the norm would spill in as many values, and in four stages too.
    values, stages = (4096, 4) if gpu.architecture == 90 else (2048, 3)
    return ImageSumsConfig(values // block_s, block_s, num_stages=stages, programs=2 * gpu.multiprocessors)


def _row_sums(element_size: int, of_samples: int, pixels: int, gpu: Gpu) -> ImageSumsConfig:
    """``of_samples``: the channels of all samples."""
    programs = 2 * gpu.multiprocessors
    if pixels <= 64:  # H100: 64 x 1024 x 8 x 8 18 us, in whole rows 23; 2 x 1280 x 8 x 8 in whole rows 8.2, else 8.8
        tile = (32, 32, 2) if of_samples >= _MANY_ROWS else (64, 64, 8)
        return ImageSumsConfig(*tile, programs=programs)
    if of_samples * pixels < _SMALL:  # 2 x 320 x 64 x 64: 8.0 us, with 128 pixels 8.8; in float32 13.1 and 11.7
        of_floats = ImageSumsConfig(16, 128, programs=2 * programs)
        return of_floats if element_size == 4 else ImageSumsConfig(16, 256, programs=programs)
    if of_samples <= programs:  # 1 x 32 x 96**3: 31 us, in tiles of 512 pixels up to 37
        return ImageSumsConfig(4, 1024, programs=programs)
    # Neither much of the last tile is wasted nor are there few. (64 x 512 x 28 x 28: 34 us in tiles of 128, 39 of 256.)
    block_s = max(64, min(256, _power_of_2_below(pixels // _FEWEST_TILES)))
    return ImageSumsConfig(2048 // block_s, block_s, programs=2 * programs)


def _power_of_2_below(number: int) -> int:
    """The largest power of two that is at most ``number``, or 1."""
    return 1 << max(0, number.bit_length() - 1)
