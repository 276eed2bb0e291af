"""The repaired interpreter computes as a GPU does: else the other tests would measure Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from triton_kernels.device import INTERPRETED


@triton.jit
def _round_kernel(values, rounded, back, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(rounded + places, tl.load(values + places).to(rounded.dtype.element_ty))
    tl.store(back + places, tl.load(rounded + places).to(tl.float32))


@triton.jit
def _sum_kernel(values, over_rows, over_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(values + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(over_rows + columns, tl.sum(tile, 0))
    tl.store(over_columns + rows, tl.sum(tile, 1))


@triton.jit
def _copy_kernel(source, target, read, written, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places, mask=places < read, other=0.0), mask=places < written)


@triton.jit
def _larger(value, place, other_value, other_place):
    is_other = (other_value > value) | ((other_value == value) & (other_place < place))
    return tl.where(is_other, other_value, value), tl.where(is_other, other_place, place)


@triton.jit
def _reduce_kernel(values, greatest, places, of_all, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(values + rows[:, None] * COLUMNS + columns[None, :])
    greatest_in_rows, place = tl.reduce((tile, tl.broadcast_to(columns[None, :], tile.shape)), 1, _larger)
    tl.store(greatest + rows, greatest_in_rows)
    tl.store(places + rows, place)
    first, _ = tl.reduce((greatest_in_rows, rows), 0, _larger, keep_dims=True)
    tl.store(of_all + tl.arange(0, 1), first)


@triton.jit
def _broadcast_kernel(values, sums, wide, quotients, compared, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    places = rows * COLUMNS + columns
    of_rows, of_columns = tl.load(values + rows), tl.load(values + ROWS + columns)
    tl.store(sums + places, of_rows + of_columns * 2)
    repeated, _ = tl.broadcast(of_rows, of_columns)
    tl.store(wide + places, repeated)
    tl.store(quotients + places, of_rows / of_columns)
    tl.store(compared + places, tl.where(of_rows < of_columns, tl.minimum(of_rows, 0), of_columns))


def test_these_tests_run_in_it():
    assert INTERPRETED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding(dtype):
    """To the nearest, ties to even; subnormal numbers, infinities and NaN included; and back without loss."""
    bits = torch.randint(-(2**31), 2**31, (2**15,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0 + 2.0**-11, 3.3895e38, 65520.0, 1e-40, 9e-8, 0.0])
    values = torch.cat([bits.view(torch.float32), ties.repeat(2**15 // 9 + 1)[: 2**15]])
    rounded, back = torch.empty(2**16, dtype=dtype), torch.empty(2**16)
    _round_kernel[(1,)](values, rounded, back, SIZE=2**16)
    torch.testing.assert_close(rounded, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, rounded.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("read, written", [(6, 5), (5, 6), (8, 0), (0, 8)])
def test_what_lies_outside_is_not_touched(read, written):
    """Views of larger memory, of which a kernel may touch no more than the view; ``tests/conftest.py`` sees to it."""
    source, target = torch.ones(2, 8), torch.zeros(2, 8)
    _copy_kernel[(1,)](source[0, :5], target[0, :5], 5, 5, SIZE=8)
    assert target.sum() == 5
    with pytest.raises(InterpreterError, match="outside of all tensors"):
        _copy_kernel[(1,)](source[0, :5], target[0, :5], read, written, SIZE=8)
    assert target.sum() == 5


def test_sums_are_trees():
    """A tree of 4096 values is wrong by some 1e-7 of their size, one after the other by twenty times that."""
    values = torch.rand(4096, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    over_rows, over_columns = torch.empty(64), torch.empty(4096)
    _sum_kernel[(1,)](values, over_rows, over_columns, ROWS=4096, COLUMNS=64)
    for result, exact in ((over_rows, values.double().sum(0)), (over_columns, values.double().sum(1))):
        assert (result - exact).norm() <= 1.5e-7 * exact.norm()


def test_reductions_by_other_functions():
    """Of a tuple, along the last axis of two and along the only one; of equal values the first wins."""
    values = torch.randint(0, 9, (8, 32), generator=torch.Generator().manual_seed(0)).float()
    greatest, places, of_all = torch.empty(8), torch.empty(8, dtype=torch.int32), torch.empty(1)
    _reduce_kernel[(1,)](values, greatest, places, of_all, ROWS=8, COLUMNS=32)
    assert torch.equal(greatest, values.amax(1)) and torch.equal(places, values.argmax(1).int())
    assert torch.equal(of_all, values.amax()[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shapes_that_broadcast(dtype):
    """Rows with columns: results, and what ``tl.broadcast`` returns, are whole. Quotients of 16 bits are float32."""
    values = torch.randn(4 + 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    of_rows, of_columns = values[:4, None], values[None, 4:]
    sums, wide, compared = (torch.empty(4, 16, dtype=dtype) for _ in range(3))
    quotients = torch.empty(4, 16)
    _broadcast_kernel[(1,)](values, sums, wide, quotients, compared, ROWS=4, COLUMNS=16)
    assert torch.equal(sums, of_rows + of_columns * 2)
    assert torch.equal(wide, of_rows.expand(4, 16))
    assert torch.equal(quotients, of_rows.float() / of_columns.float())
    assert torch.equal(compared, torch.where(of_rows < of_columns, of_rows.clamp(max=0), of_columns))
