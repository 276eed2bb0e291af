"""Grids whose second axis continues along z."""

import pytest

from triton_kernels.grid import grid_of

MOST = 65535


@pytest.mark.parametrize("second", [1, 2, MOST, MOST + 1, 2 * MOST, 2 * MOST + 1, 10**6 + 7, 2**31 // 16])
def test_every_place_is_covered_once(second):
    first, y, z = grid_of(5, second)
    assert first == 5 and y <= MOST and z <= MOST
    assert second <= y * z < second + z
    assert z == 1 or second > MOST


def test_nothing_along_the_second_axis():
    assert grid_of(5, 0) == (5, 0, 1)
