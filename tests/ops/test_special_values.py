"""Promise: NaN and infinities go where PyTorch puts them, jumps fall as PyTorch's, and extreme data stays accurate."""

import dataclasses
import math

import pytest
import torch

import ops
from tests.accuracy import check, draw_grad_output, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    DTYPES,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L30,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    doubled,
    make_arguments,
    tensors_of,
)

SMALL = Problem(rows=5, depth=16, groups=4, group_size=8)
NORMED = (*LINEAR_CHAINS, *NORMS)
#: Groups in a tile of the product, and many; groups that no tile holds; groups wider than a tile.
GROUPINGS = (Problem(5, 16, 17, 4), Problem(5, 13, 3, 10), Problem(3, 16, 2, 150))

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_grouping = pytest.mark.parametrize("problem", GROUPINGS, ids=lambda problem: f"groups_of_{problem.group_size}")
#: Every grouping in float32 and in one of the short dtypes, which are loaded alike.
by_grouping_and_dtype = pytest.mark.parametrize(
    "problem, dtype",
    [
        pytest.param(problem, dtype, id=f"groups_of_{problem.group_size}-{chain_id(dtype)}")
        for problem, short in zip(GROUPINGS, (torch.bfloat16, torch.float16, torch.bfloat16), strict=True)
        for dtype in (torch.float32, short)
    ],
)


def same_places(ours, theirs, what):
    """NaN, inf and -inf each where the other has them, and numbers about equal elsewhere."""
    assert torch.equal(ours.isnan(), theirs.isnan()), f"NaN of {what}"
    assert torch.equal(ours.isposinf(), theirs.isposinf()), f"inf of {what}"
    assert torch.equal(ours.isneginf(), theirs.isneginf()), f"-inf of {what}"


def place(arguments, name, value):
    """``value`` in the second row (or at the fourth channel) of one argument."""
    tensor = arguments[name] = arguments[name].clone()
    if name in ("input", "weight") and tensor.ndim > 1:
        tensor[1, 3] = value
    else:
        tensor.view(-1)[3] = value
    return arguments


@by_dtype
@by_chain
def test_one_special_value_anywhere(chain, dtype):
    """A NaN or an infinity in each tensor in turn."""
    for name in tensors_of(make_arguments(chain, SMALL, dtype)):
        for value in (math.nan, math.inf, -math.inf):
            if name == norm_weight_of(chain) and math.isinf(value):
                continue  # below
            arguments = place(make_arguments(chain, SMALL, dtype), name, value)
            same_places(chain.function(**arguments), chain.plain(**arguments), f"the result for {value} in {name}")


@pytest.mark.parametrize("problem", GROUPINGS, ids=lambda problem: f"groups_of_{problem.group_size}")
@pytest.mark.parametrize("chain", [L94, L75, L30], ids=chain_id)
def test_products_beyond_float16(chain, problem):
    """z is infinite where float16 has no such number, in the forward pass as in the backward pass, and in PyTorch."""
    arguments = make_arguments(chain, dataclasses.replace(problem, rows=12), torch.float16)
    arguments["weight"][3] *= 100.0
    arguments["linear_bias"][3] = 65504.0  # some rows are beyond it by more than half a step, 16, and some are not
    if chain is L94:  # else its hardtanh brings all back
        arguments["min_val"], arguments["max_val"] = -math.inf, math.inf
    grad_output = torch.ones_like(chain.plain(**arguments))
    ours, theirs = (run(function, arguments, grad_output) for function in (chain.function, chain.plain))
    finite = theirs["output"].isfinite()
    assert finite.any() and not finite.all()
    for name in ["output"] if chain is L75 else theirs:  # a minimum's gradient reaches its own group alone
        assert torch.equal(ours[name].isfinite(), theirs[name].isfinite()), name


def norm_weight_of(chain):
    return None if chain not in NORMED else "norm_weight" if chain.is_linear else "weight"


@by_dtype
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("chain", NORMED, ids=chain_id)
def test_infinite_norm_weight(chain, value, dtype):
    """(x - mean) * rstd * weight is infinite, of the sign that a huge weight gives.

    PyTorch computes x * (rstd * weight) - mean * (rstd * weight), where infinities may cancel to NaN.
    """
    name = norm_weight_of(chain)
    arguments = place(make_arguments(chain, SMALL, dtype), name, value)
    huge = place(make_arguments(chain, SMALL, torch.float64), name, math.copysign(1e60, value))
    for other, tensor in tensors_of(arguments).items():
        if other != name:
            huge[other] = tensor.double()
    huge.update({bound: arguments[bound] for bound in ("min_val", "max_val") if bound in arguments})
    exact = chain.plain(**huge)
    exact = torch.where(exact.abs() > 1e50, exact * math.inf, exact)
    same_places(chain.function(**arguments), exact, f"the result for {value} in {name}")


@by_grouping
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("chain", NORMED, ids=chain_id)
def test_special_rows(chain, problem, value):
    """It stays in its row and group: all others are what they are without it."""
    arguments = make_arguments(chain, problem, torch.float32)
    expected = chain.function(**arguments)
    place(arguments, "input", value)
    output, plain = chain.function(**arguments), chain.plain(**arguments)
    same_places(output, plain, f"the result for {value}")
    ours, before = (tensor.movedim(2, 0) if chain is L75 else tensor for tensor in (output, expected))
    others = torch.arange(problem.rows) != 1
    assert torch.equal(ours[others], before[others])
    if chain is L75:
        assert ours[1].isnan().all()


@by_dtype
@by_chain
def test_gradients_of_a_row_with_nan(chain, dtype):
    """The input's gradient is NaN for all that the NaN reached, and what it was everywhere else."""
    arguments = make_arguments(chain, SMALL, dtype)
    output = chain.plain(**arguments)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean = run(chain.function, arguments, grad_output)["input"]
    place(arguments, "input", math.nan)
    gradient = run(chain.function, arguments, grad_output)["input"]
    reached = torch.zeros_like(gradient, dtype=torch.bool)
    if chain is BIAS_HARDTANH_MISH:  # PyTorch's hardtanh on the CPU has NaN or 0 here, by the element's place in memory
        reached[1, 3] = True
    elif not chain.is_linear:
        reached[1, : SMALL.group_size] = True
    elif chain is not LINEAR:
        reached[1] = True
    assert torch.equal(gradient.isnan(), reached)
    assert torch.equal(gradient[~reached], clean[~reached])
    if chain not in (BIAS_HARDTANH_MISH, L94):
        same_places(gradient, run(chain.plain, arguments, grad_output)["input"], "the input's gradient")


@pytest.mark.parametrize("chain", [L94, L30, BIAS_HARDTANH_MISH, GROUP_NORM_HARDTANH], ids=chain_id)
def test_infinite_bounds(chain):
    """No bound at all; mish of a huge value must not overflow."""
    arguments = make_arguments(chain, SMALL, torch.float32)
    arguments["min_val"], arguments["max_val"] = -math.inf, math.inf
    for scale in (1.0, 50.0, 1e4):
        arguments["input"] = make_arguments(chain, SMALL, torch.float32)["input"] * scale
        grad_output = torch.randn(chain.plain(**arguments).shape, generator=torch.Generator().manual_seed(0))
        check(chain, arguments, grad_output)


def test_mish_of_any_number():
    """Of each power of two there is and its neighbours, both signs: value and gradient."""
    exponents = torch.arange(-149, 128)
    values = torch.ldexp(torch.ones(exponents.shape), exponents)
    values = torch.cat([values, values * 1.5, torch.linspace(0, 100, 999)]).float()
    values = torch.cat([values, -values, torch.tensor([math.inf, -0.0])])[None]
    big = {"min_val": -3.4e38, "max_val": 3.4e38}
    finite = {"input": values[:, :-2], "bias": None, **big}
    gradient = torch.ones_like(finite["input"])
    ours = run(ops.bias_hardtanh_mish, finite, gradient)
    exact = run(BIAS_HARDTANH_MISH.plain, {**finite, "input": finite["input"].double()}, gradient.double())
    torch.testing.assert_close(ours["output"].double(), exact["output"], rtol=2e-6, atol=1e-37)
    torch.testing.assert_close(ours["input"].double(), exact["input"], rtol=2e-6, atol=3e-7)
    unbounded = ops.bias_hardtanh_mish(values, min_val=-math.inf, max_val=math.inf)
    assert unbounded[0, -2] == math.inf and unbounded[0, -1] == 0


@by_dtype
def test_hardtanh_gradient_at_its_bounds(dtype):
    """0 at a bound and beyond, mish's own gradient next to it, NaN for NaN."""
    low, high = -0.5, 1.25
    inside = torch.tensor([low, high], dtype=dtype).nextafter(torch.zeros(2, dtype=dtype)).tolist()
    values = torch.tensor([low, high, *inside, -3.0, 3.0, -math.inf, math.inf, 0.0, math.nan], dtype=dtype)[None]
    arguments = {"input": values, "bias": None, "min_val": low, "max_val": high}
    gradient = torch.full_like(values, 3.0)
    ours, theirs = (run(f, arguments, gradient) for f in (ops.bias_hardtanh_mish, BIAS_HARDTANH_MISH.plain))
    assert torch.equal(ours["input"][:, :-1] == 0, theirs["input"][:, :-1] == 0)
    assert (ours["input"][0] == 0).nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 7]
    assert ours["input"][0, 9].isnan() and ours["output"][0, 9].isnan()
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(ours["input"][:, :-1], theirs["input"][:, :-1], **rounding)
    torch.testing.assert_close(ours["output"], theirs["output"], **rounding)


@by_dtype
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_special_gradient_of_a_clipped_element(special, dtype):
    """What is cut off is selected away, not multiplied by 0."""
    arguments = {"input": torch.tensor([[-1.0, 1.0, -7.0, 7.0, 0.5]], dtype=dtype), "bias": torch.zeros(5, dtype=dtype)}
    arguments.update(min_val=-1.0, max_val=1.0)
    ours, theirs = (
        run(f, arguments, torch.full((1, 5), special, dtype=dtype))
        for f in (ops.bias_hardtanh_mish, BIAS_HARDTANH_MISH.plain)
    )
    for name in ("input", "bias"):
        assert not ours[name].flatten()[:4].any(), name
        same_places(ours[name], theirs[name], name)


@by_grouping_and_dtype
@pytest.mark.parametrize("chain", [GROUP_NORM_HARDTANH, L30], ids=chain_id)
def test_special_gradients_of_clipped_norms(chain, problem, dtype):
    """The same behind a norm, whose every gradient then stays what it is without those elements."""
    arguments = make_arguments(chain, problem, dtype)
    arguments["min_val"], arguments["max_val"] = -0.75, 0.75
    clipped = (chain.before_jumps(arguments)[0][0].abs() > 0.85).nonzero()[:3].unbind(1)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    grad_output[clipped] = 0.0
    expected = run(chain.function, arguments, grad_output)
    grad_output[clipped] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    for name, result in run(chain.function, arguments, grad_output).items():
        assert torch.equal(result, expected[name]), name


@by_grouping_and_dtype
def test_special_gradient_of_a_clipped_product(problem, dtype):
    """L94 clips before its norm, which spreads an infinite gradient over its group; not to what was clipped there."""
    arguments = make_arguments(L94, Problem(1, problem.depth, problem.groups, problem.group_size), dtype)
    arguments["min_val"], arguments["max_val"] = -0.5, 0.5
    value = L94.before_jumps(arguments)[0][0][0]
    far = (value.abs() - 0.5).abs() > 0.05
    by_group = (value.abs() > 0.5).view(problem.groups, -1)
    mixed = by_group.any(1) & ~(by_group | ~far.view_as(by_group)).all(1)
    grad_output = torch.ones(1, problem.groups, problem.group_size, dtype=dtype)
    grad_output[0, mixed.nonzero()[0], 0] = math.inf
    ours, theirs = (run(f, arguments, grad_output.view(1, -1)) for f in (L94.function, L94.plain))
    # Of a single row, the gradient of the bias is that at the product.
    for name in ("linear_bias", "bias"):
        assert not ours[name][far & (value.abs() > 0.5)].any(), name
        assert torch.equal(ours[name].isfinite()[far], theirs[name].isfinite()[far]), name
        assert not ours[name][far].isfinite().all(), "nothing was infinite: this tests nothing"


@by_dtype
@pytest.mark.parametrize("bound", [-1.0, 1.0])
def test_norm_exactly_at_a_bound(bound, dtype):
    """A constant group is its bias after the norm; where that is a bound no gradient passes."""
    arguments = {"input": torch.full((3, 8), 2.0, dtype=dtype), "num_groups": 2, "min_val": -1.0, "max_val": 1.0}
    arguments["weight"] = torch.ones(8, dtype=dtype)
    arguments["bias"] = torch.tensor([bound, 0.5] * 4, dtype=dtype)
    for function in (ops.group_norm_hardtanh, GROUP_NORM_HARDTANH.plain):
        results = run(function, arguments, torch.ones(3, 8, dtype=dtype))
        assert results["bias"].tolist() == [0.0, 3.0] * 4
        assert torch.equal(results["output"], arguments["bias"].expand(3, 8))


def tied(problem, dtype, columns):
    """L75's arguments with the same, smallest, value at each of ``columns`` after the norm."""
    arguments = make_arguments(L75, problem, dtype)
    arguments["norm_weight"] = torch.ones(problem.channels, dtype=dtype)
    arguments["norm_weight"][columns] = 0.0
    arguments["norm_bias"] = torch.zeros(problem.channels, dtype=dtype)
    arguments["norm_bias"][columns] = -64.0
    return arguments


@by_grouping_and_dtype
def test_ties(problem, dtype):
    """Each row's gradient goes, whole, to one of the indices that hold its minimum, in any groups and tiles."""
    last = problem.channels - 1
    group = problem.group_size
    for columns in ([1, 2], [0, last], [group - 1, group], [last - 1, last], list(range(problem.channels))):
        arguments = tied(problem, dtype, columns)
        grad_output = torch.ones(L75.plain(**arguments).shape, dtype=dtype)
        results = run(L75.function, arguments, grad_output)
        received = results["norm_bias"]
        bias = arguments["bias"].float().flatten()[:, None]
        expected = (bias - 64.0).to(dtype).expand(problem.channels, problem.rows)
        assert torch.equal(results["output"][0, :, :, 0], expected)
        assert set(received.nonzero().flatten().tolist()) <= set(columns)
        assert received.sum() == problem.rows * problem.channels
        # Every row has the same minimum at the same places, and the same choice of them.
        assert received.count_nonzero() == 1


def test_tie_goes_to_the_first():
    arguments = tied(SMALL, torch.float32, [3, 9, 30])
    results = run(L75.function, arguments, torch.ones(1, SMALL.channels, SMALL.rows, 1))
    assert results["norm_bias"].nonzero().flatten().tolist() == [3]


@by_grouping_and_dtype
def test_argmin_holds_the_minimum(problem, dtype):
    """Of random rows, one at a time: what gets the gradient is no further from the least than rounding."""
    arguments = make_arguments(L75, problem, dtype)
    normalized = L75.before_jumps(doubled(arguments))[0][0]
    for row in range(problem.rows):
        one = {**arguments, "input": arguments["input"][row : row + 1]}
        received = run(L75.function, one, torch.ones(1, problem.channels, 1, 1, dtype=dtype))["norm_bias"]
        (index,) = received.nonzero().flatten().tolist()
        assert received[index] == problem.channels
        assert normalized[row, index] - normalized[row].min() <= 1e-2 * (1 if dtype == torch.bfloat16 else 0.1)


@by_grouping_and_dtype
def test_minimum_of_a_row_with_nan(problem, dtype):
    """A NaN is a row's minimum, wherever it stands, and the gradient goes to one of the NaNs."""
    for column in (0, problem.group_size, problem.channels - 1):
        arguments = make_arguments(L75, problem, dtype)
        arguments["norm_bias"][column] = math.nan
        results = run(L75.function, arguments, torch.ones(1, problem.channels, problem.rows, 1, dtype=dtype))
        assert results["output"].isnan().all()
        assert results["norm_bias"].nonzero().flatten().tolist() == [column]
        assert results["bias"].flatten().tolist() == [problem.rows] * problem.channels


def test_minimum_of_infinities():
    """-inf is the least of numbers, +inf the minimum only where there is nothing else."""
    arguments = make_arguments(L75, SMALL, torch.float32)
    for value, places in ((-math.inf, [5]), (math.inf, list(range(32))), (math.inf, list(range(1, 32)))):
        arguments["norm_bias"] = torch.zeros(32)
        arguments["norm_bias"][places] = value
        ours, theirs = L75.function(**arguments), L75.plain(**arguments)
        same_places(ours, theirs, f"the minimum with {value}")
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["wide", "spike", "positive"])
@by_chain
def test_extreme_data(chain, kind):
    """Groups of no power of two: elements over 2^46, one of 2^20 in a row, all of one sign."""
    problem = Problem(rows=30, depth=35, groups=3, group_size=24)
    check(chain, make_arguments(chain, problem, torch.float32, kind=kind, seed=2))


@by_dtype
@pytest.mark.parametrize("chain", [*NORMS, *LINEAR_CHAINS], ids=chain_id)
def test_mean_far_from_zero(chain, dtype):
    """A variance as mean square minus squared mean would have nothing left here."""
    arguments = make_arguments(chain, Problem(rows=12, depth=24, groups=3, group_size=20), dtype)
    if chain is L94:  # its norm comes behind bounds: between 100 and 101
        arguments["min_val"], arguments["max_val"] = 100.0, 101.0
        arguments["bias"] = arguments["bias"] / 8 + 100.5
    elif chain.is_linear:
        arguments["linear_bias"] = arguments["linear_bias"] + 200.0
    else:
        arguments["input"] = arguments["input"] + 200.0
    check(chain, arguments)


@by_grouping_and_dtype
def test_constant_groups(dtype, problem):
    """Nothing but the bias is left of a group without variance, and its gradient is finite: 1/sqrt(eps) at most."""
    arguments = make_arguments(GROUP_NORM, problem, dtype)
    values = torch.tensor([0.1, 1000.0, -3.0e-5, 0.0, 7.0], dtype=dtype)[: problem.rows, None]
    arguments["input"] = values.expand_as(arguments["input"]).contiguous()
    exact = arguments["bias"].expand_as(arguments["input"])
    gradient = draw_grad_output(GROUP_NORM, arguments)
    results = run(ops.group_norm, arguments, gradient)
    torch.testing.assert_close(results["output"], exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert all(result.isfinite().all() for result in results.values())
    check(GROUP_NORM, arguments, gradient)


@by_dtype
@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_constant_products(chain, dtype):
    """All columns of the product are one, as the rows of the weight are: only the norm's bias is left."""
    arguments = make_arguments(chain, SMALL, dtype, kind="exact", absent=chain.vectors)
    arguments["weight"] = arguments["weight"][:1].expand(32, 16).contiguous()
    arguments["norm_bias"] = torch.linspace(-0.5, 0.5, 32).to(dtype)
    output = chain.function(**arguments)
    exact = arguments["norm_bias"].expand(5, 32) if chain is not L75 else torch.full((5, 1), -0.5, dtype=dtype)
    torch.testing.assert_close(output, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_groups_of_one():
    """Every value is its own mean: the result is the bias, exactly."""
    arguments = make_arguments(GROUP_NORM, Problem(7, 1, 13, 1), torch.float32)
    assert torch.equal(ops.group_norm(**arguments), arguments["bias"].expand(7, 13))


def test_linear_infinities_cancel():
    """inf - inf within one sum is NaN, as in PyTorch."""
    arguments = make_arguments(LINEAR, SMALL, torch.float32)
    arguments["input"][0, :2] = math.inf
    arguments["input"][1, 0] = math.inf
    arguments["weight"][:, :2] = torch.tensor([1.0, -1.0])
    ours, theirs = ops.linear(**arguments), LINEAR.plain(**arguments)
    same_places(ours, theirs, "the product")
    assert ours[0].isnan().all() and ours[1].isposinf().all()
