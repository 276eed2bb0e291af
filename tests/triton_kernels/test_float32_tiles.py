"""Promise: an operand that is split in turns occupies a GPU no longer than one that is split at once, and each of its
tiles has one number."""

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.float32_tiles import LinearSplitConfig, rows_at_a_time
from triton_kernels.grid import blocks_of
from triton_kernels.linear import LinearConfig, tile_at, tile_place

FORWARD, BACKWARD = LinearSplitConfig(2), LinearSplitConfig(2, divides=True, in_blocks=True)


def rows_of(rows, others, depth, config=FORWARD):
    return rows_at_a_time((rows, depth), 128, blocks_of(others, 128), config, 132)


@pytest.mark.parametrize(
    "rows, others, depth, expected",
    [
        (8192, 1024, 8192, 2048),
        (8192, 4096, 8192, 3072),
        (8192, 512, 8192, 4096),  # fewer would leave multiprocessors without tiles
        (8192, 768, 8192, 2816),
        (8192, 128, 8192, 8192),  # all in one wave
        (4096, 4096, 4096, 4096),  # 64 MiB
        (12544, 768, 3072, 8192),
        (0, 768, 3072, 1),
    ],
)
def test_rows_at_a_time(rows, others, depth, expected):
    assert rows_of(rows, others, depth) == expected


def test_turns_of_divided_products():
    """At once, 576 tiles are 4.36 waves: the last 48 are divided in two. So they are in turns."""
    assert BACKWARD.waves(9 * 64, 8192, 132) == 4.5
    assert rows_of(8192, 9 * 128, 8192, BACKWARD) == 2816


@pytest.mark.parametrize("config", [FORWARD, BACKWARD], ids=["whole", "divided"])
@pytest.mark.parametrize("multiprocessors", [1, 3, 114, 132])
def test_turns_take_no_longer(config, multiprocessors):
    for rows in (1, 128, 1000, 5000, 9999, 40000):
        for others in (1, 7, 64, 131, 132, 133, 500):
            some = rows_at_a_time((rows, 32768), 128, others, config, multiprocessors)
            assert some == rows or some % 128 == 0
            turns = [blocks_of(min(some, rows - first), 128) for first in range(0, rows, some)]
            waves, at_once = (
                sum(config.waves(each * others, 32768, multiprocessors) for each in tiles)
                for tiles in (turns, [blocks_of(rows, 128)])
            )
            assert waves <= at_once + 1e-5


@triton.jit
def numbers_kernel(found, M, N, TILES: tl.constexpr, CONFIG: tl.constexpr):
    for tile in range(TILES):
        row, column = tile_place(tile, M, N, CONFIG)
        tl.store(found + tile, tile_at(row, column, M, N, CONFIG))


@pytest.mark.parametrize("M, N", [(1, 1), (100, 70), (300, 40), (129, 200)])
def test_a_tile_at_a_place(M, N):
    config = LinearConfig(16, 32, 16, group_m=4)
    tiles = blocks_of(M, 16) * blocks_of(N, 32)
    found = torch.empty(tiles, dtype=torch.int32)
    numbers_kernel[(1,)](found, M, N, TILES=tiles, CONFIG=config)
    assert found.tolist() == list(range(tiles))
