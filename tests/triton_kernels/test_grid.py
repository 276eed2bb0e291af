"""Grids whose second axis continues along z."""

import pytest
import triton

from triton_kernels.grid import blocks_of, grid_of, next_power_of_2

MOST = 65535


@pytest.mark.parametrize("second", [1, 2, MOST, MOST + 1, 2 * MOST, 2 * MOST + 1, 10**6 + 7, 2**31 // 16])
def test_every_place_is_covered_once(second):
    first, y, z = grid_of(5, second)
    assert first == 5 and y <= MOST and z <= MOST
    assert second <= y * z < second + z
    assert z == 1 or second > MOST


def test_nothing_along_the_second_axis():
    assert grid_of(5, 0) == (5, 0, 1)


def test_sizes_are_rounded_as_triton_does():
    for size in (0, 1, 2, 3, 4, 5, 127, 128, 129, 2**31 - 1, 2**31, 2**31 + 1):
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        for block in (1, 3, 64):
            assert blocks_of(size, block) == triton.cdiv(size, block)
