"""The row minimum's sparse backward, kernel by kernel."""

import pytest
import torch

from tests.chains import with_layout
from triton_kernels import row_minimum_backward as backward
from triton_kernels import row_minimum_order

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def winners(rows, groups, group_size, seed=0):
    """A winner's column, reciprocal deviation and normalised group for each row."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.randint(0, groups * group_size, (rows,), generator=generator, dtype=torch.int32)
    return column, torch.rand(rows, generator=generator) + 0.5, torch.randn(rows, group_size, generator=generator)


def sums_of(gradient):
    """Those over blocks of channels, and over the rows; each row's minimum lies in the first column."""
    column, over_rows = torch.zeros(gradient.shape[1], dtype=torch.int32), torch.full(gradient.shape[:1], torch.nan)
    return row_minimum_order.sums_and_order(gradient, column, 1, gradient.shape[0], over_rows)[0], over_rows


def order_of(column, groups, group_size):
    """The rows by group, and where each begins."""
    gradient = torch.zeros(groups * group_size, column.numel())
    return row_minimum_order.sums_and_order(gradient, column, groups, group_size, None)[1:]


@pytest.mark.parametrize("programs", [1, 4, 256])
@pytest.mark.parametrize("channels, rows", [(1, 1), (5, 300), (200, 3), (130, 257), (3, 2100)])
def test_output_gradient_sums(channels, rows, programs, monkeypatch):
    """Over blocks of channels, and over the rows, which may be shared out."""
    monkeypatch.setattr(row_minimum_order, "_OUTPUT_GRADIENT_PROGRAMS", programs)
    for layout in ("contiguous", "transposed", "expanded", "strided"):
        gradient = with_layout(draw(channels, rows), layout)
        over_channels, over_rows = sums_of(gradient)
        torch.testing.assert_close(over_channels.sum(0), gradient.double().sum(0), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(over_rows.double(), gradient.double().sum(1), rtol=1e-6, atol=1e-5)


def test_output_gradient_sums_of_one_number():
    """What ``output.sum().backward()`` sends."""
    over_channels, over_rows = sums_of(torch.ones(()).expand(70, 130))
    assert over_channels.sum(0).tolist() == [70.0] * 130 and over_rows.tolist() == [130.0] * 70


def test_no_rows():
    over_channels, over_rows = sums_of(torch.empty(4, 0))
    assert over_channels.shape[1] == 0 and torch.equal(over_rows, torch.zeros(4))
    order, offsets = order_of(torch.empty(0, dtype=torch.int32), 5, 4)
    assert order.shape == (0,) and offsets.tolist() == [0] * 6


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    "rows, groups, group_size, blocks", [(1, 1, 1, 1), (20, 5, 16, 3), (33, 4, 10, 70), (300, 2, 100, 64), (7, 2, 4, 0)]
)
def test_winner_backward(rows, groups, group_size, blocks, affine):
    """Of a norm's backward where the gradient is one element's a row, the sum of its parts: against autograd."""
    z = draw(rows, groups * group_size).double().requires_grad_()
    weight = draw(groups * group_size, seed=1) if affine else None
    grouped = z.view(rows, groups, group_size)
    rstd = (grouped.var(2, correction=0) + 1e-5).rsqrt()
    normalized = (grouped - grouped.mean(2, keepdim=True)) * rstd[:, :, None]
    column = winners(rows, groups, group_size)[0]
    every, group = torch.arange(rows), column.long() // group_size
    values = normalized.view(rows, -1) * (1.0 if weight is None else weight.double())
    row_partials = draw(blocks, rows, seed=2).double()
    minimum_gradient = row_partials.sum(0).float()
    (expected,) = torch.autograd.grad(values[every, column.long()], z, minimum_gradient.double())
    kept = (column, rstd[every, group].detach().float(), normalized[every, group].detach().float())
    total, result = backward.winner_backward(row_partials, kept, weight, group_size)
    torch.testing.assert_close(total, minimum_gradient)
    torch.testing.assert_close(
        result.double(), expected.view(rows, groups, group_size)[every, group], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("rows, groups, group_size", [(1, 1, 4), (200, 7, 10), (130, 64, 1), (5, 300, 16)])
def test_order(rows, groups, group_size, sorts, monkeypatch):
    """Ranked by counting, and sorted where there are more rows: a stable order by group, and where each begins."""
    if sorts:
        monkeypatch.setattr(row_minimum_order, "_MOST_RANKED_ROWS", 0)
    column = winners(rows, groups, group_size)[0]
    order, offsets = order_of(column, groups, group_size)
    assert order.dtype == offsets.dtype == torch.int32
    group = column.long() // group_size
    assert torch.equal(order.long(), group.argsort(stable=True))
    assert offsets[0] == 0 and torch.equal(offsets[1:].long(), group.bincount(minlength=groups).cumsum(0))


SIZES = [(9, 5, 16, 40), (40, 3, 10, 33), (7, 2, 100, 1)]
#: Every size in every dtype and in every layout, whose strides no dtype changes.
PRODUCTS = [
    *((size, dtype, "contiguous") for size in SIZES for dtype in DTYPES),
    *((size, torch.bfloat16, layout) for size in SIZES for layout in ("transposed", "strided", "misaligned")),
]


@pytest.mark.parametrize("size, dtype, layout", PRODUCTS, ids=str)
def test_products(size, dtype, layout):
    """The gather for the input's gradient and the sums for the weight's are the dense products over zeros."""
    rows, groups, group_size, depth = size
    column = winners(rows, groups, group_size)[0]
    if groups == 3:
        column.clamp_(max=2 * group_size - 1)  # the last group wins nowhere: zeros must be written there
    order, offsets = order_of(column, groups, group_size)
    z_gradient = draw(rows, group_size, seed=3)
    input = with_layout(draw(rows, depth, seed=4).to(dtype), layout)
    weight = with_layout(draw(groups * group_size, depth, seed=5).to(dtype), layout)
    dense = torch.zeros(rows, groups, group_size, dtype=torch.float64)
    dense[torch.arange(rows), column.long() // group_size] = z_gradient.double()
    dense = dense.view(rows, -1)
    input_gradient = torch.full((rows, depth), torch.nan, dtype=dtype)
    backward.input_gradient(z_gradient, column, order, weight, input_gradient)
    weight_gradient = torch.full((groups * group_size, depth), torch.nan, dtype=dtype)
    backward.weight_gradient(z_gradient, order, offsets, input, weight_gradient)
    rounding = torch.finfo(dtype).eps
    for result, expected in (
        (input_gradient, dense @ weight.double()),
        (weight_gradient, dense.T @ input.double()),
    ):
        assert (result.double() - expected).norm() <= max(rounding / 2, 1e-6) * expected.norm()


def test_column_gradients():
    """The biases before the norm, here two of them, have the same."""
    rows, groups, group_size = 300, 4, 10
    column, rstd, normalized = winners(rows, groups, group_size)
    column.clamp_(max=3 * group_size - 1)
    order, offsets = order_of(column, groups, group_size)
    minimum_gradient, z_gradient = draw(rows, seed=6), draw(rows, group_size, seed=7)
    kept = (column, rstd, normalized)
    sums = torch.full((4, groups * group_size), torch.nan)
    backward.column_gradients(minimum_gradient, kept, z_gradient, order, offsets, sums.unbind())
    expected = torch.zeros(4, groups * group_size, dtype=torch.float64)
    for row in range(rows):
        winner = int(column[row])
        first = winner // group_size * group_size
        expected[:2, first : first + group_size] += z_gradient[row].double()
        expected[2, winner] += minimum_gradient[row].double() * normalized[row, winner - first].double()
        expected[3, winner] += minimum_gradient[row].double()
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    one = torch.empty(groups * group_size, dtype=torch.bfloat16)
    backward.column_gradients(minimum_gradient, kept, z_gradient, order, offsets, (None, one, None))
    assert torch.equal(one, sums[2].bfloat16())
