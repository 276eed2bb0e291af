"""Products of one matrix by many others in one launch."""

import itertools

import pytest
import torch

from triton_kernels import grid
from triton_kernels.grouped_products import MOST_PRODUCTS, multiply_all

DTYPES = (torch.bfloat16, torch.float16)


def turned(tensor, is_turned):
    """The same values, column by column in memory where it is turned."""
    return tensor.T.contiguous().T if is_turned else tensor.contiguous()


def check(
    rows, depth, widths, dtype=torch.bfloat16, others_turned=True, targets_turned=False, has_bias=True, matrix=None
):
    torch.manual_seed(0)
    matrix = torch.randn(rows, depth).to(dtype) if matrix is None else matrix
    others = [turned(torch.randn(depth, width).to(dtype), others_turned) for width in widths]
    biases = [torch.randn(width).to(dtype) for width in widths] if has_bias else []
    targets = [turned(torch.full((rows, width), torch.nan, dtype=dtype), targets_turned) for width in widths]
    multiply_all(matrix, others, biases, targets)
    for place, (other, target) in enumerate(zip(others, targets, strict=True)):
        expected = matrix.double() @ other.double() + (biases[place].double() if has_bias else 0)
        torch.testing.assert_close(target.double(), expected.to(dtype).double(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 130])
def test_rows(rows, dtype):
    check(rows, 80, [48, 16, 160], dtype)


@pytest.mark.parametrize("others_turned, targets_turned, has_bias", [*itertools.product((False, True), repeat=3)])
def test_layouts(others_turned, targets_turned, has_bias):
    """Of sizes that are multiples of a tile's, of 16, and of nothing."""
    for rows, depth, widths in (64, 128, [64, 128]), (48, 16, [32, 16, 80]), (7, 3, [5, 1, 33, 16]):
        check(rows, depth, widths, torch.bfloat16, others_turned, targets_turned, has_bias)


@pytest.mark.parametrize("count", [1, 8, 9, MOST_PRODUCTS, MOST_PRODUCTS + 1, 2 * MOST_PRODUCTS + 3])
def test_any_number(count):
    check(2, 16, [16 * (1 + place % 3) for place in range(count)])


def test_matrices_of_any_strides():
    memory = torch.randn(40, 60).bfloat16()
    for matrix in memory[:, :20], memory[:20].T, memory[::2, 3:43:2], memory[:1].expand(20, 60):
        check(*matrix.shape, [16, 48], matrix=matrix)


def test_more_rows_than_the_grids_second_axis_holds(monkeypatch):
    monkeypatch.setattr(grid, "_MOST_ALONG_Y", 2)
    check(330, 16, [16, 48])


@pytest.mark.parametrize("rows, depth", [(0, 16), (4, 0)])
def test_empty_matrices(rows, depth):
    """A sum of nothing is 0."""
    check(rows, depth, [16, 32])


def test_what_is_not_finite_stays_in_its_row_and_column():
    matrix, others = torch.randn(20, 70).bfloat16(), [torch.randn(70, width).bfloat16() for width in (16, 40)]
    matrix[3, 5], others[1][69, 39] = torch.inf, torch.nan
    targets = [torch.full((20, width), 7.0).bfloat16() for width in (16, 40)]
    multiply_all(matrix, others, [], targets)
    for other, target in zip(others, targets, strict=True):
        assert torch.equal(target.isfinite(), (matrix.double() @ other.double()).isfinite())


def test_nothing_beside_is_written():
    memory = torch.full((3, 200), 7.0).bfloat16()
    targets = [memory[1, :150].view(3, 50), memory[2, :60].view(3, 20)]
    multiply_all(
        torch.randn(3, 9).bfloat16(), [torch.randn(9, 50).bfloat16(), torch.randn(9, 20).bfloat16()], [], targets
    )
    assert (memory[0] == 7).all() and (memory[1, 150:] == 7).all() and (memory[2, 60:] == 7).all()
    assert (memory[1, :150] != 7).any()


@pytest.mark.parametrize("place", ["others", "targets"])
def test_refused_layouts(place):
    """Some row by row, some column by column, and with gaps between rows."""
    plain, wide = torch.ones(8, 8).bfloat16(), torch.ones(8, 16).bfloat16()
    for matrices in [turned(torch.ones(8, 16).bfloat16(), True), wide], [plain, wide[:, ::2]]:
        others = targets = [torch.ones(8, each.shape[1]).bfloat16() for each in matrices]
        given = {"others": others, "targets": targets} | {place: matrices}
        with pytest.raises(ValueError, match="all lie row by row, or all column by column"):
            multiply_all(plain, given["others"], [], given["targets"])
    with pytest.raises(ValueError, match="biases must be contiguous"):
        multiply_all(plain, [plain], [torch.ones(16).bfloat16()[::2]], [plain.clone()])
