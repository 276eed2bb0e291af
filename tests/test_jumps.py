"""Promise: at hardtanh's bounds and at the row's minimum the gradient goes where PyTorch sends it."""

import pytest
import torch
import torch.nn.functional as F

import ops
from tests.accuracy import run
from tests.chains import DTYPES, L30, L75, L94, Problem, chain_id, doubled, draw, make_arguments

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


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


def test_equal_bounds_give_a_constant():
    arguments = make_arguments(L30, Problem(5, 16, 4, 4), torch.float32) | {"min_val": 0.5, "max_val": 0.5}
    results = run(ops.linear_group_norm_hardtanh, arguments, torch.ones(5, 16))
    assert torch.equal(results["output"], torch.full((5, 16), 0.5))
    assert not any(results[name].any() for name in ("input", "weight", "linear_bias", "norm_weight", "norm_bias"))


@pytest.mark.parametrize("groups, group_size", [(4, 2), (100, 2), (3, 10)])
def test_ties_of_zeros_of_both_signs(groups, group_size):
    """-0.0 and 0.0 are equal: the first of either is the minimum."""
    channels = groups * group_size
    arguments = make_arguments(L75, Problem(4, 8, groups, group_size), torch.float32, absent=("linear_bias",))
    arguments["weight"] = torch.zeros_like(arguments["weight"])
    # The norm's result is 0.0 * 1 - 0.0 = 0.0, and in the last column 0.0 * -1 - 0.0 = -0.0.
    arguments["norm_bias"] = torch.full((channels,), -0.0)
    arguments["norm_bias"][0] = 1.0
    arguments["norm_weight"] = torch.where(torch.arange(channels) < channels - 1, 1.0, -1.0)
    results = run(ops.linear_group_norm_min, arguments, torch.ones(1, channels, 4, 1))
    assert results["norm_bias"].nonzero().tolist() == [[1]] and float(results["norm_bias"][1]) == 4 * channels


@pytest.mark.parametrize("groups, group_size", [(2, 16), (20, 16), (20, 10), (17, 64), (3, 200)])
def test_winners_in_every_place(groups, group_size):
    """A norm's bias that makes each row of a batch win in another column: the first, the last, the tiles' edges."""
    channels = groups * group_size
    for column in (0, group_size - 1, channels // 2, channels - group_size, channels - 1):
        arguments = make_arguments(L75, Problem(2, 8, groups, group_size), torch.float32)
        arguments["norm_bias"][column] = -100.0
        grad_output = torch.ones(1, channels, 2, 1)
        results = run(ops.linear_group_norm_min, arguments, grad_output)
        assert results["norm_bias"].nonzero().flatten().tolist() == [column]
        theirs = run(L75.plain, arguments, grad_output)
        for name in ("input", "weight", "linear_bias"):
            torch.testing.assert_close(results[name], theirs[name], rtol=1e-4, atol=1e-3)
