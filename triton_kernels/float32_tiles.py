"""Tiles of products of split float32 operands (``float32_split``), and into what their depth is divided."""

from dataclasses import dataclass

from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.linear import LinearConfig

#: About as many bytes of an operand's parts are kept at a time. (At 8192 x 8192 weights, turns cost up to 1%; turns of
#: 33 MiB cost 3% at 12544 x 3072 inputs and 768 columns; H200.)
_KEPT_BYTES = 96 * 2**20
#: Steps of 64 terms, in which a section of a product pays for being stored. The last one may have fewer.
_FEWEST_STEPS = 8


@dataclass(frozen=True)
class LinearSplitConfig:
    """Tiles of ``linear_split_hopper`` for operands of 1 or 2 parts; ``group_m`` as in ``LinearConfig``."""

    parts: int
    block_m: int = 128
    #: Terms of a step: 128 bytes of float16, a swizzled row of shared memory.
    block_k: int = 64
    group_m: int = 8
    #: Whether K may be divided among multiprocessors.
    divides: bool = False
    #: Whether blocks of two parts share scales, or else rows do.
    in_blocks: bool = False

    @property
    def terms(self) -> int:
        """A tile's depth is a multiple of so many: of blocks, their size."""
        return self.block_k * (2 if self.in_blocks else 1)

    @property
    def block_n(self) -> int:
        """As many columns as the registers of two warpgroups hold: one accumulator for one part, three for two."""
        return 256 if self.parts == 1 else 128

    @property
    def stages(self) -> int:
        """The number of steps in flight, as many as shared memory holds."""
        return 4 if self.parts == 1 else 3

    @property
    def epilogue_columns(self) -> int:
        return self.block_n

    @property
    def rest(self) -> LinearConfig:
        """The config for the tiles that are left: the same places and sizes, with a depth of up to 32 that fits shared
        memory, and stored in halves where they are widest, so that a chain's own tensors fit beside them."""
        return LinearConfig(
            self.block_m, self.block_n, 4096 // self.block_n, self.group_m, store_strips=self.block_n // 128
        )

    def holds_groups_of(self, group_size: int) -> bool:
        return self.block_n % group_size == 0

    def waves(self, tiles: int, K: int, multiprocessors: int) -> float:
        """How long so many tiles occupy the multiprocessors, in the time of one tile."""
        whole, count, _ = sections_of(tiles, K, multiprocessors, self.terms) if self.divides else (tiles, 1, K)
        return blocks_of(whole, multiprocessors) + (1 / count if whole < tiles else 0)


@dataclass(frozen=True)
class LinearRegistersConfig:
    """Tiles of ``linear_registers_hopper``: rows of the input and the weight; ``group_m`` as in ``LinearConfig``."""

    block_m: int
    #: 64 rows of the weight for each of two warpgroups.
    block_n: int = 128
    #: Among how many partitions of warps they are divided: 1 or 2. Two need not wait for each other, but each has its
    #: instructions, for which the cache is too small where a tile has few steps.
    consumers: int = 2
    group_m: int = 8
    #: Whether results go through shared memory.
    is_staged: bool = False

    @classmethod
    def of_rows(cls, M: int, steps: int) -> "LinearRegistersConfig":
        """For M rows of the input, and so many steps of 64 terms."""
        return cls(min(max(next_power_of_2(M), 16), 128), consumers=1 if steps == 1 else 2)

    @property
    def consumer_rows(self) -> int:
        return self.block_n // self.consumers

    @property
    def stages(self) -> int:
        """The number of steps in flight, as many as shared memory holds."""
        return {16: 6, 32: 5, 64: 4, 128: 2 if self.is_staged else 3}[self.block_m]

    @property
    def most_staged_steps(self) -> int:
        """In so many steps, the results of a tile that is stored through shared memory pay for a stage less."""
        return 16 if self.block_m == 128 else 64


def steps_of_parts(rows: int, K: int, multiprocessors: int) -> int:
    """Steps of 64 terms in each part of a sum, of weights with so many rows together. They do not depend on the input:
    parts have at most 2048 terms, and at least 512 unless all have less, so that one tile of the input's rows occupies
    the GPU."""
    parts = max(blocks_of(K, 2048), min(multiprocessors // blocks_of(rows, 128), K // 512), 1)
    return blocks_of(blocks_of(K, 64), parts)


def sections_of(tiles: int, K: int, multiprocessors: int, terms: int) -> tuple[int, int, int]:
    """(whole, count, depth): so many tiles are computed whole, and each of the others in so many sections of so many
    terms, a multiple of ``terms``.

    The others are what is left when each multiprocessor has had as many tiles as any other. They get as many sections
    as multiprocessors can take at once, of at least ``_FEWEST_STEPS`` but for the last; none where that is one.
    """
    left = tiles % multiprocessors
    count = min(multiprocessors // left, blocks_of(K, 64) // _FEWEST_STEPS) if left else 1
    if count < 2:
        return tiles, 1, K
    depth = blocks_of(blocks_of(K, count), terms) * terms
    return tiles - left, blocks_of(K, depth), depth


def rows_at_a_time(
    operand: tuple[int, int], tile: int, tiles_of_others: int, config: LinearSplitConfig, multiprocessors: int
) -> int:
    """How many rows of an ``operand`` (rows, depth) are split and multiplied at a time: a multiple of a ``tile``'s, or
    all.

    Of those with which the multiprocessors are occupied no longer than with all rows at once, the most whose parts have
    ``_KEPT_BYTES``, or else the fewest.
    """
    rows, depth = operand
    tile_bytes = tile * depth * 2 * config.parts
    tiles = blocks_of(rows, tile)
    if rows * tile_bytes <= _KEPT_BYTES * tile:
        return max(rows, 1)

    def waves(some: int) -> float:
        return config.waves(some * tiles_of_others, depth, multiprocessors)

    bound = waves(tiles) + 1e-6
    fitting = [some for some in range(1, tiles) if tiles // some * waves(some) + waves(tiles % some) <= bound]
    small = [some for some in fitting if some * tile_bytes <= _KEPT_BYTES]
    return max(small, default=min(fitting, default=tiles)) * tile if fitting else rows
