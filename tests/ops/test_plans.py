"""Promise: a call by a plan that was made before gives what it gives by one that is made for it."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from autotune_configs import lookup, tune_unseen_problems
from ops import family, plans
from ops.contractions import Linear
from tests.accuracy import draw_grad_output
from tests.chains import CHAINS, DTYPES, L75, L94, Problem, chain_id, make_arguments, redrawn, tensors_of
from tests.ops.test_plan import copied

PROBLEM = Problem(rows=6, depth=24, groups=4, group_size=4)

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)


def trained(chain, arguments):
    """The result and every gradient."""
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = chain.function(**{**arguments, **parameters})
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    return output.detach(), *torch.autograd.grad(output, list(parameters.values()), grad_output)


def same(results, expected):
    assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@by_chain
def test_calls_that_come_again(chain, dtype, made):
    arguments = make_arguments(chain, PROBLEM, dtype)
    draws = [redrawn(arguments, seed) for seed in range(4)]
    results = [chain.function(**draw) for draw in draws]
    assert len(made) == 1
    for draw, result in zip(draws, results, strict=True):
        lookup.forget()
        same([result], [chain.function(**draw)])


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@by_chain
def test_training_steps_that_come_again(chain, dtype, made):
    arguments = make_arguments(chain, PROBLEM, dtype)
    draws = [redrawn(arguments, seed) for seed in range(3)]
    results = [trained(chain, draw) for draw in draws]
    assert len(made) == 2, "forward and backward"
    for draw, result in zip(draws, results, strict=True):
        lookup.forget()
        same(result, trained(chain, draw))


@pytest.fixture
def arguments():
    return make_arguments(L94, PROBLEM, torch.float32)


@pytest.fixture
def function(arguments, made):
    """L94, with a plan for these arguments."""
    L94.function(**arguments)
    assert len(made) == 1
    return L94.function


def test_wrong_arguments_are_still_refused(function, arguments):
    with pytest.raises(ValueError, match="num_groups"):
        function(**{**arguments, "num_groups": 3})
    with pytest.raises(TypeError, match="num_groups"):
        function(**{**arguments, "num_groups": 4.0})
    with pytest.raises(ValueError, match="input"):
        function(**{**arguments, "input": arguments["input"][:, :-1]})
    with pytest.raises(TypeError, match="bias"):
        function(**{**arguments, "bias": arguments["bias"].to(torch.bfloat16)})
    with pytest.raises(ValueError, match="weight"):
        function(**{**arguments, "weight": arguments["weight"].to("meta")})


def test_one_group_is_not_true(arguments):
    arguments["num_groups"] = 1
    L94.function(**arguments)
    with pytest.raises(TypeError, match="num_groups"):
        L94.function(**{**arguments, "num_groups": True})


@pytest.mark.parametrize(
    "change",
    [
        {"eps": 1e-3},
        {"min_val": -0.5},
        {"max_val": 0.25},
        {"norm_weight": None},
        {"bias": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_numbers_are_other_calls(change, function, arguments, made):
    result = function(**{**arguments, **change})
    assert len(made) == 2
    lookup.forget()
    same([result], [function(**{**arguments, **change})])


def test_other_layouts_are_other_calls(function, arguments, made):
    rows, depth = arguments["input"].shape
    storage = torch.zeros(2 * rows * depth + 1)
    for other in (
        torch.as_strided(storage, (rows, depth), (2 * depth, 1)),
        torch.as_strided(storage, (rows, depth), (1, rows)),
        torch.as_strided(storage, (rows, depth), (depth, 1), 1),  # begins at no multiple of 16 bytes
    ):
        other.copy_(arguments["input"])
        torch.testing.assert_close(function(**{**arguments, "input": other}), function(**arguments))
    assert len(made) == 4


def test_float32_settings_are_part_of_a_call(function, arguments, made):
    torch.set_float32_matmul_precision("high")
    function(**arguments)
    assert len(made) == 2
    torch.set_float32_matmul_precision("highest")
    function(**arguments)
    assert len(made) == 2


def test_new_tables_are_part_of_a_call(function, arguments, made):
    lookup.forget()
    function(**arguments)
    assert len(made) == 2


def test_tuning_is_part_of_a_call(function, arguments, made):
    with tune_unseen_problems():
        function(**arguments)
    assert len(made) == 2


def test_autocast_is_seen(function, arguments, made):
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert function(**arguments).dtype == torch.bfloat16
        assert function(**arguments).dtype == torch.float32
    assert len(made) == 2


def test_gradients_are_seen(function, arguments):
    arguments["norm_bias"].requires_grad_()
    assert function(**arguments).requires_grad
    with torch.no_grad():
        assert not function(**arguments).requires_grad


@pytest.mark.parametrize("training", [False, True])
def test_modes_see_the_operator(training, function, arguments):
    """A counter of operations or a tracer must find what it would find in the first call."""
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    arguments["weight"].requires_grad_(training)
    with Watching():
        output = function(**arguments)
        if training:
            output.sum().backward()
    operators = ["normfuse.forward.default", "normfuse.backward.one"] if training else ["normfuse.forward.one"]
    assert [each for each in seen if each.startswith("normfuse")] == operators


def test_a_profiler_sees_the_operator(function, arguments):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(**arguments)
    assert "normfuse::forward" in {event.name for event in profile.events()}


def test_backward_plans_of_calls_under_autocast_are_kept(arguments, made):
    """As training in mixed precision makes them: forward under autocast, backward without."""
    weight = arguments["weight"].requires_grad_()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            output = L94.function(**arguments)
        torch.autograd.grad(output.float().sum(), weight)
        assert len(made) == 2, "one forward, one backward"


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_an_operator_under_autocast_is_the_same(precision, arguments):
    """Its dtypes are decided; a product that autocast has cast must not be in a plan."""
    torch.set_float32_matmul_precision(precision)
    text = "linear -> add -> add -> hardtanh(-1.0, 1.0) -> mish -> group_norm(4, 1e-05) -> mul -> add"
    names = ("input", "weight", "linear_bias", "bias", "norm_weight", "norm_bias")
    tensors = [arguments[name] for name in names]

    def result():
        return torch.ops.normfuse.forward(text, tensors, False)[0]

    expected = result()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            same([result()], [expected])
        same([result()], [expected])
        lookup.forget()


def test_a_class_of_tensors_sees_the_operator(function, arguments):
    seen = []

    class Marked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    function(**{**arguments, "input": arguments["input"].as_subclass(Marked)})
    assert "normfuse.forward.one" in seen


def separated(arguments):
    """The same values, each tensor in memory of its own."""
    return {**arguments, **{name: tensor.clone() for name, tensor in tensors_of(arguments).items()}}


@pytest.mark.parametrize("shared_first", [True, False])
def test_one_tensor_for_two_arguments(shared_first, arguments, made):
    shared = {**arguments, "bias": arguments["linear_bias"], "norm_bias": arguments["norm_weight"]}
    order = [shared, arguments] if shared_first else [arguments, shared]
    results = [(L94.function(**each), *trained(L94, each)) for each in order]
    assert len(made) == 3, "without gradients, with them, and backward"
    for each, result in zip(order, results, strict=True):
        lookup.forget()
        same(result, [L94.function(**separated(each)), *trained(L94, separated(each))])


def test_parameters_in_one_storage(arguments, made):
    """As flattened ones lie: they share memory, but not a number of it."""
    separate = {name: arguments[name] for name in ("linear_bias", "bias", "norm_weight", "norm_bias")}
    flat = torch.cat([vector.reshape(-1) for vector in separate.values()])
    lengths = [vector.numel() for vector in separate.values()]
    parts = dict(zip(separate, flat.split(lengths), strict=True))
    result = L94.function(**{**arguments, **parts})
    same([L94.function(**arguments)], [result])
    assert len(made) == 1, "the plan is the same for separate ones"


def test_arguments_that_overlap(arguments, made):
    size = arguments["linear_bias"].numel()
    flat = torch.randn(2 * size)
    overlapping = {**arguments, "linear_bias": flat[:size], "bias": flat[4 : size + 4]}
    same([L94.function(**overlapping)], [L94.function(**separated(overlapping))])
    assert len(made) == 1


def test_no_tensor_is_kept():
    arguments = make_arguments(L75, PROBLEM, torch.float32)
    results = [L75.function(**arguments), *trained(L75, arguments)]
    kept = [weakref.ref(tensor) for tensor in (*results, *tensors_of(arguments).values())]
    del arguments, results
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)


def test_results_are_new_each_time(function, arguments):
    first, second = function(**arguments), function(**arguments)
    before = second.clone()
    first.fill_(torch.nan)
    assert torch.equal(second, before)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    kept = plans.Kept()
    for key in range(10):
        assert kept.add(key, str(key)) == str(key) == kept.get(key)
        assert sum(kept.get(each) is not None for each in range(10)) <= 3


def test_many_shapes_are_bounded(monkeypatch):
    """What has gone is made again."""
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    inputs = [torch.randn(batch, 6) for batch in range(1, 8)]
    same(*([ops.group_norm(input, 2) for input in inputs] for _ in range(2)))
    assert len(family.GROUP_NORM.bind((inputs[0], None), (None, None), (), ())[0]._prepared) <= 3


def test_a_plan_that_fails_leaves_nothing(arguments, made, monkeypatch):
    """The error is the caller's; later calls are done, and planned, as if it had not been."""

    def fail(*arguments):
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Linear, "forward", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                L94.function(**arguments)
    assert not made
    source = torch.randn(3, 4)
    assert torch.equal(copied(source), source), "launched, not noted"
    expected = ops.reference.linear_hardtanh_mish_group_norm(**arguments)
    torch.testing.assert_close(L94.function(**arguments), expected)


def test_an_integer_too_long_to_write(arguments):
    for _ in range(3):
        with pytest.raises(ValueError, match="eps must be at most "):
            L94.function(**{**arguments, "eps": 10**5000})
