"""Promise: an operand that is split in turns costs no more waves of tiles than one that is split at once, and each of
its tiles has one number."""

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.float32_tiles import rows_at_a_time
from triton_kernels.grid import blocks_of
from triton_kernels.linear import LinearConfig, tile_at, tile_place

MIB = 2**20


@pytest.mark.parametrize(
    "rows, others, depth, expected",
    [
        (8192, 1024, 8192, 2048),
        (8192, 4096, 8192, 3072),
        (8192, 512, 8192, 4224),  # fewer would leave multiprocessors without tiles
        (8192, 768, 8192, 2816),
        (8192, 128, 8192, 8192),  # all at once
        (4096, 4096, 4096, 4096),  # 64 MiB
        (12544, 768, 3072, 5632),
        (1000, 10**6, 8192, 1000),
    ],
)
def test_rows_at_a_time(rows, others, depth, expected):
    assert rows_at_a_time(rows, 128, blocks_of(others, 128), 4 * depth, 132) == expected


@pytest.mark.parametrize("multiprocessors", [1, 3, 114, 132])
def test_turns_take_no_more_waves(multiprocessors):
    for rows in (1, 128, 1000, 5000, 9999, 40000):
        for others in (1, 7, 64, 131, 132, 133, 500):
            some = rows_at_a_time(rows, 128, others, MIB // 8, multiprocessors)
            assert some == rows or some % 128 == 0
            turns = [min(some, rows - first) for first in range(0, rows, some)]
            waves = sum(blocks_of(blocks_of(each, 128) * others, multiprocessors) for each in turns)
            assert waves <= blocks_of(blocks_of(rows, 128) * others, multiprocessors)


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
