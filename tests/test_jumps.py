"""Promise: at hardtanh's bounds and at the row's minimum the gradient goes where PyTorch sends it."""

import math

import pytest
import torch
import torch.nn.functional as F

import ops
from tests.accuracy import run
from tests.chains import DTYPES, L30, L75, L94, Problem, chain_id, doubled, draw, make_arguments

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


@by_dtype
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (-2.0, 0.5), (0.25, 0.25), (0.0, math.inf)])
def test_hardtanh_gradient_at_and_beside_the_bounds(bounds, dtype):
    """0 where z <= min_val or z >= max_val; z one step inside gets mish's gradient; NaN passes it on."""
    low, high = torch.tensor(bounds, dtype=dtype)
    up, down = torch.tensor(math.inf, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)
    beside = [torch.nextafter(bound, to) for bound in (low, high) for to in (up, down)]
    z = torch.stack([low, high, *beside, up, down, torch.tensor(math.nan, dtype=dtype)]).view(1, -1)
    arguments = {"input": z, "min_val": bounds[0], "max_val": bounds[1]}
    ours = run(ops.bias_hardtanh_mish, arguments, torch.ones_like(z))["input"]
    outside = (z <= bounds[0]) | (z >= bounds[1])
    assert torch.equal(ours[outside], torch.zeros_like(ours[outside]))
    theirs = run(lambda input, **bounds: F.mish(F.hardtanh(input, **bounds)), arguments, torch.ones_like(z))["input"]
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[0, -1].isnan()


@by_dtype
def test_exactly_at_the_bounds_behind_a_product(dtype):
    """Whole numbers and bounds among them: a third of the values of z stands exactly at a bound, in every dtype."""
    arguments = make_arguments(L94, Problem(60, 9, 4, 8), dtype, kind="exact", absent=("norm_weight", "norm_bias"))
    arguments["weight"] = draw((32, 9), "exact", dtype, torch.Generator().manual_seed(7))
    arguments |= {"min_val": -2.0, "max_val": 1.0}
    z = F.linear(arguments["input"], arguments["weight"], arguments["linear_bias"]) + arguments["bias"]
    assert ((z == -2) | (z == 1)).float().mean() > 0.2 and ((z > -2) & (z < 1)).float().mean() > 0.2
    grad_output = torch.randn(60, 32, generator=torch.Generator().manual_seed(8)).to(dtype)
    exact = run(L94.plain, doubled(arguments), grad_output.double())
    ours = run(ops.linear_hardtanh_mish_group_norm, arguments, grad_output)
    theirs = run(L94.plain, arguments, grad_output)
    for name in ("input", "weight", "linear_bias", "bias"):
        # Were the bounds' elements taken in, the gradients would differ by a good part of themselves.
        ours_error, their_error = (float((result[name] - exact[name]).norm()) for result in (ours, theirs))
        assert ours_error <= 1.5 * their_error + 1e-6 * float(exact[name].norm()), name


@pytest.mark.parametrize("bound", ["min_val", "max_val"])
@by_dtype
def test_hardtanh_behind_the_norm(bound, dtype):
    """Groups of one channel are normalised to exactly 0, so y is the norm's bias; at the bound nothing gets a gradient."""
    arguments = make_arguments(L30, Problem(5, 16, 8, 1), dtype)
    arguments["norm_bias"] = torch.tensor([-2.0, 2.0, 0.0, 1.5, -1.5, 3.0, -3.0, math.nan], dtype=dtype)
    arguments |= {"min_val": -2.0, "max_val": 2.0}
    gradients = run(ops.linear_group_norm_hardtanh, arguments, torch.ones(5, 8, dtype=dtype))
    assert gradients["norm_bias"].tolist() == [0.0, 0.0, 5.0, 5.0, 5.0, 0.0, 0.0, 5.0]


def test_equal_bounds_give_a_constant():
    arguments = make_arguments(L30, Problem(5, 16, 4, 4), torch.float32) | {"min_val": 0.5, "max_val": 0.5}
    results = run(ops.linear_group_norm_hardtanh, arguments, torch.ones(5, 16))
    assert torch.equal(results["output"], torch.full((5, 16), 0.5))
    assert not any(results[name].any() for name in ("input", "weight", "linear_bias", "norm_weight", "norm_bias"))


@by_dtype
def test_minimum_gradient_goes_to_one_index(dtype):
    """Of each row one channel gets the row's whole gradient: its value is the minimum."""
    rows, channels = 50, 64
    arguments = make_arguments(L75, Problem(rows, 24, 8, 8), dtype)
    grad_output = draw((1, channels, rows, 1), "normal", dtype, torch.Generator().manual_seed(3))
    results = run(ops.linear_group_norm_min, arguments, grad_output)
    winners = _winners(arguments)
    expected = torch.zeros(channels, dtype=torch.float64)
    expected.index_add_(0, winners, grad_output.double().sum(1).flatten())
    # The winner of 16-bit arguments is decided by the kernel's float32 values, which are nearly float64's.
    torch.testing.assert_close(results["norm_bias"].double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def _winners(arguments) -> torch.Tensor:
    exact = doubled(arguments)
    z = F.linear(exact["input"], exact["weight"], exact["linear_bias"])
    return torch.group_norm(z, exact["num_groups"], exact["norm_weight"], exact["norm_bias"]).argmin(1)


@by_dtype
@pytest.mark.parametrize("groups, group_size", [(1, 12), (3, 16), (4, 10), (40, 4), (40, 1)])
def test_ties_go_to_one_index(groups, group_size, dtype):
    """Every channel of a row is the minimum; still the gradient arrives once, not once for each."""
    channels = groups * group_size
    arguments = make_arguments(L75, Problem(9, 8, groups, group_size), dtype, absent=("linear_bias", "norm_bias"))
    arguments["weight"] = torch.zeros_like(arguments["weight"])
    grad_output = torch.ones(1, channels, 9, 1, dtype=dtype)
    results = run(ops.linear_group_norm_min, arguments, grad_output)
    arguments["norm_bias"] = torch.zeros(channels, dtype=dtype)
    results = run(ops.linear_group_norm_min, arguments, grad_output)
    assert float(results["norm_bias"].sum()) == 9 * channels
    assert results["norm_bias"].count_nonzero() == 1
    assert torch.equal(results["bias"], torch.full_like(results["bias"], 9))
    assert float(results["norm_bias"][0]) == 9 * channels, "the first of equal minima wins"


def test_ties_of_zeros_of_both_signs():
    """-0.0 and 0.0 are equal: PyTorch and ours may choose either, but only one."""
    arguments = make_arguments(L75, Problem(4, 8, 4, 2), torch.float32)
    arguments["weight"] = torch.zeros_like(arguments["weight"])
    arguments["norm_bias"] = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, 0.0, -0.0, 2.0])
    results = run(ops.linear_group_norm_min, arguments, torch.ones(1, 8, 4, 1))
    assert results["norm_bias"].count_nonzero() == 1 and float(results["norm_bias"].sum()) == 32


@pytest.mark.parametrize("groups, group_size", [(2, 16), (20, 16), (20, 10), (17, 128), (3, 200)])
def test_winners_in_every_place(groups, group_size):
    """A norm's bias that makes each row of a batch win in another column: the first, the last, the tiles' edges."""
    channels = groups * group_size
    for column in sorted({0, 1, group_size - 1, group_size, channels // 2, channels - group_size, channels - 1}):
        arguments = make_arguments(L75, Problem(3, 8, groups, group_size), torch.float32)
        arguments["norm_bias"][column] = -100.0
        grad_output = torch.ones(1, channels, 3, 1)
        results = run(ops.linear_group_norm_min, arguments, grad_output)
        assert results["norm_bias"].nonzero().flatten().tolist() == [column]
        theirs = run(L75.plain, arguments, grad_output)
        for name in ("input", "weight", "linear_bias"):
            torch.testing.assert_close(results[name], theirs[name], rtol=1e-4, atol=1e-3)
