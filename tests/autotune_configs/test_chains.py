"""The chains that are swept are those that the bench measures: their groups, target shapes and grid."""

from autotune_configs.__main__ import _INTERPRETED_SHAPES
from autotune_configs.chains import CHAINS, GRID
from bench.cells import CHAINS as MEASURED
from bench.sizes import GRID as MEASURED_GRID
from bench.sizes import SMALL, TARGET


def sizes(shape):
    return tuple(map(int, shape.split("x")))


def test_groups_and_targets():
    assert CHAINS.keys() == MEASURED.keys()
    for name, chain in CHAINS.items():
        measured = MEASURED[name]
        assert chain.group_size == measured.group_size
        assert chain.target == sizes(TARGET[measured.product])
        assert _INTERPRETED_SHAPES[len(chain.target)] == sizes(SMALL[measured.product])


def test_grid():
    assert sorted(GRID) == sorted(map(sizes, MEASURED_GRID))
