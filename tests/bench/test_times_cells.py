"""Which cells the options select."""

import pytest

from bench import times
from bench.chains import FAMILY


@pytest.fixture
def cells(monkeypatch):
    """The cells that these arguments select. Nothing is run."""

    def of(*arguments):
        seen = []
        monkeypatch.setattr(times.Recording, "run", lambda self, cells, *others: seen.extend(cells) or 0)
        assert times.main(list(arguments), "bench") == 0
        return seen

    return of


def test_grid(cells):
    found = cells("--grid")
    shapes = [f"{m}x{n}x{n}" for m in (1, 16, 64, 256, 1024, 4096) for n in (1024, 2048, 4096, 8192, 16384)]
    assert list(dict.fromkeys(cell.shape for cell in found)) == shapes and len(shapes) == 30
    assert {(cell.dtype, cell.precision) for cell in found} == {
        ("bfloat16", None),
        ("float32", "highest"),
        ("float32", "high"),
    }
    assert {cell.chain.label for cell in found} == {"L94", "L75", "L30"}
    assert len(found) == len(set(map(str, found))) == 30 * 3 * 3 * 2


def test_grid_of_some(cells):
    found = cells("--grid", "--chains", "l30", "--dtypes", "float16", "--modes", "training")
    assert {(cell.chain.label, cell.dtype, cell.mode) for cell in found} == {("L30", "float16", "training")}
    assert len(found) == 30


def test_modes(cells):
    """The forward pass that keeps what a backward pass needs is measured where it is asked for."""
    assert {cell.mode for cell in cells()} == {"forward", "training"}
    assert {cell.mode for cell in cells("--modes", "forward_grad")} == {"forward_grad"}


def test_all_where_nothing_is_chosen(cells):
    found = cells()
    assert {cell.chain.label for cell in found} == {"L94", "L75", "L30", "L19", *FAMILY}
    assert {cell.dtype for cell in found} == {"bfloat16", "float16", "float32"}
    assert {cell.shape for cell in found} == {"8x64x64", "2x16x16x5x6x3", "2x64x5x6"}


def test_shapes_of_each_product(cells):
    found = cells("--shapes", "8x32x64", "--norm-shapes", "2x32,3x32x4x5x6", "--convolution-shapes", "1x2x4x3x3x3")
    shapes = {(cell.chain.product, cell.shape) for cell in found}
    assert shapes == {
        ("GEMM", "8x32x64"),
        ("norm", "2x32"),
        ("norm", "3x32x4x5x6"),
        ("convolution", "1x2x4x3x3x3"),
    }


def test_memory_formats(cells):
    """Of images with two dimensions both are measured; others are contiguous."""
    found = cells("--chains", "group_norm_silu", "--dtypes", "float16", "--norm-shapes", "2x32,2x32x4x5,2x32x4x5x6")
    formats = {(cell.shape, cell.memory_format) for cell in found}
    assert formats == {
        ("2x32x4x5", "channels_last"),
        *((shape, "contiguous") for shape in ("2x32", "2x32x4x5", "2x32x4x5x6")),
    }
    (cell,) = cells(
        "--chains", "group_norm_silu", "--dtypes", "float16", "--memory-formats", "channels_last", "--modes", "forward"
    )
    assert cell.memory_format == "channels_last"
