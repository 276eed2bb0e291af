"""The chains of sweeps are those of the bench: groups, target shapes and grid."""

import pytest

import ops
from autotune_configs.chains import CHAINS, GRID, linear_problems
from autotune_configs.commands import _INTERPRETED_SHAPES
from autotune_configs.compositions import kernels_of
from autotune_configs.heuristics import WIDEST_TILE
from autotune_configs.problem import Problem
from bench.chains import CHAINS as MEASURED
from bench.chains import NAMED
from bench.sizes import GRID as MEASURED_GRID
from bench.sizes import SMALL, TARGET
from triton_kernels.chains import LINEAR_GROUP_NORM_HARDTANH


def test_functions():
    assert all(callable(getattr(ops, chain.function)) for chain in CHAINS.values())


@pytest.mark.parametrize(
    "name, kernels",
    [
        ("l94", {"linear_hardtanh_mish_group_norm", "linear_bias", "group_norm", "group_norm_backward"}),
        ("l75", {"linear_group_norm_row_minimum", "group_norm"}),
        ("l30", {"linear_bias", "group_norm", "group_norm_backward"}),
        ("l19", {"image_statistics", "image_group_norm", "image_sums", "image_group_norm_backward"}),
        ("image_statistics", {"image_statistics"}),
    ],
)
def test_kernels(name, kernels):
    assert kernels_of(name) == kernels


def sizes(shape):
    return tuple(map(int, shape.split("x")))


def test_groups_and_targets():
    assert tuple(CHAINS) == NAMED
    for name, chain in CHAINS.items():
        measured = MEASURED[name]
        assert (chain.function, chain.group_size) == (measured.function, measured.group_size)
        assert measured.sizes == (TARGET[measured.product],) and chain.target == sizes(*measured.sizes)
        assert _INTERPRETED_SHAPES[len(chain.target)] == sizes(SMALL[measured.product])


def test_the_product_normalises_what_a_tile_holds():
    """Groups up to the widest tile, but no wider ones and only powers of two."""
    for group_size, is_held in ((WIDEST_TILE, True), (2 * WIDEST_TILE, False), (96, False)):
        sizes = (8, 64, 2 * group_size)
        product, *others = linear_problems(LINEAR_GROUP_NORM_HARDTANH, sizes, "bfloat16", ("forward",), group_size)
        kernel, width = ("linear_group_norm_hardtanh", group_size) if is_held else ("linear_bias", 1)
        assert product == Problem(kernel, "bfloat16", (8, 2 * group_size, 64, width))
        assert bool(others) != is_held


def test_grid():
    assert sorted(GRID) == sorted(map(sizes, MEASURED_GRID))
