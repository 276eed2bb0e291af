"""Promise: a call that comes again gives what the function would give, though only its launches are repeated."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from autotune_configs import lookup, tune_unseen_problems
from ops import replay
from tests.accuracy import draw_grad_output
from tests.chains import CHAINS, DTYPES, L75, L94, LINEAR, Problem, chain_id, make_arguments, redrawn, tensors_of

PROBLEM = Problem(rows=6, depth=24, groups=4, group_size=4)

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)


@pytest.fixture
def runs(monkeypatch):
    """What was returned by each repeated call."""
    results = []
    run = replay.Plan.run

    def counted(self, tensors):
        results.append(run(self, tensors))
        return results[-1]

    monkeypatch.setattr(replay.Plan, "run", counted)
    return results


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
def test_repeated_calls(chain, dtype, runs):
    arguments = make_arguments(chain, PROBLEM, dtype)
    draws = [redrawn(arguments, seed) for seed in range(4)]
    results = [chain.function(**draw) for draw in draws]
    assert len(runs) == 2, "the third and the fourth call are repeated"
    for draw, result in zip(draws, results, strict=True):
        replay.forget()
        same([result], [chain.function(**draw)])


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@by_chain
def test_repeated_training_steps(chain, dtype, runs):
    arguments = make_arguments(chain, PROBLEM, dtype)
    draws = [redrawn(arguments, seed) for seed in range(3)]
    results = [trained(chain, draw) for draw in draws]
    # cuBLAS computes the backward pass of a product alone, in 16 bits.
    assert len(runs) >= (1 if chain is LINEAR else 2), "the third step's operators are repeated"
    for draw, result in zip(draws, results, strict=True):
        replay.forget()
        same(result, trained(chain, draw))


def l94_arguments(dtype=torch.float32):
    return make_arguments(L94, PROBLEM, dtype)


def repeated(chain, arguments, runs):
    """The function, with a plan for these arguments."""
    for _ in range(3):
        chain.function(**arguments)
    assert len(runs) == 1
    return chain.function


def test_wrong_arguments_are_still_refused(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    with pytest.raises(ValueError, match="num_groups"):
        function(**{**arguments, "num_groups": 3})
    with pytest.raises(TypeError, match="num_groups"):
        function(**{**arguments, "num_groups": 4.0})
    with pytest.raises(ValueError, match="input"):
        function(**{**arguments, "input": arguments["input"][:, :-1]})
    with pytest.raises(TypeError, match="bias"):
        function(**{**arguments, "bias": arguments["bias"].to(torch.bfloat16)})


def test_one_group_is_not_true(runs):
    arguments = {**l94_arguments(), "num_groups": 1}
    function = repeated(L94, arguments, runs)
    with pytest.raises(TypeError, match="num_groups"):
        function(**{**arguments, "num_groups": True})


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
def test_other_numbers_are_other_calls(change, runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    result = function(**{**arguments, **change})
    replay.forget()
    same([result], [function(**{**arguments, **change})])
    assert len(runs) == 1


def test_other_layouts_are_other_calls(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    rows, depth = arguments["input"].shape
    storage = torch.zeros(2 * rows * depth + 1)
    for other in (
        torch.as_strided(storage, (rows, depth), (2 * depth, 1)),
        torch.as_strided(storage, (rows, depth), (1, rows)),
        torch.as_strided(storage, (rows, depth), (depth, 1), 1),  # begins at no multiple of 16 bytes
    ):
        other.copy_(arguments["input"])
        torch.testing.assert_close(function(**{**arguments, "input": other}), function(**arguments))
    assert len(runs) == 4, "of the calls beside them alone"


def test_float32_settings_are_part_of_a_call(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    torch.set_float32_matmul_precision("high")
    function(**arguments)
    assert len(runs) == 1


def test_new_tables_are_part_of_a_call(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    lookup.forget()
    function(**arguments)
    assert len(runs) == 1


def test_nothing_is_repeated_while_tuning(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    with tune_unseen_problems():
        function(**arguments)
    assert len(runs) == 1


def test_autocast_is_seen(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(**arguments).dtype == torch.bfloat16
    assert function(**arguments).dtype == torch.float32


def test_gradients_are_seen(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    arguments["norm_bias"].requires_grad_()
    assert function(**arguments).requires_grad
    with torch.no_grad():
        assert not function(**arguments).requires_grad


def test_modes_see_the_operator(runs):
    """A counter of operations or a tracer must find what it would find in the first call."""
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watching():
        function(**arguments)
    assert "normfuse.linear_hardtanh_mish_group_norm.default" in seen


def test_a_profiler_sees_the_operator(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(**arguments)
    assert "normfuse::linear_hardtanh_mish_group_norm" in {event.name for event in profile.events()}


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_an_operator_under_autocast_is_the_same(precision, runs):
    """Its dtypes are decided; a product that autocast has cast must not be repeated where there is none."""
    arguments = l94_arguments()
    torch.set_float32_matmul_precision(precision)
    names = ("input", "weight", "linear_bias", "bias", "num_groups", "norm_weight", "norm_bias")
    values = [arguments[name] for name in names]

    def call():
        operator = torch.ops.normfuse.linear_hardtanh_mish_group_norm
        return operator(*values, -1.0, 1.0, 1e-5, False)[0]

    expected = call()
    with torch.autocast("cpu", torch.bfloat16):
        same([call()], [expected])
    same([call()], [expected])


def test_a_class_of_tensors_sees_the_operator(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    seen = []

    class Marked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    function(**{**arguments, "input": arguments["input"].as_subclass(Marked)})
    assert seen


def test_one_tensor_for_two_arguments(runs):
    """Which of the two a launch is given cannot be told, so such a call is repeated for no other."""
    arguments = l94_arguments()
    shared = {**arguments, "bias": arguments["linear_bias"], "norm_bias": arguments["norm_weight"]}
    for _ in range(3):
        L94.function(**shared)
    assert not runs
    result = L94.function(**arguments)
    replay.forget()
    same([result], [L94.function(**arguments)])
    for _ in range(3):
        L94.function(**arguments)
    result = L94.function(**shared)
    assert runs
    replay.forget()
    same([result], [L94.function(**shared)])


def test_parameters_in_one_storage(runs):
    """As flattened ones lie: they share memory, but not a number of it."""
    arguments = l94_arguments()
    separate = {name: arguments[name] for name in ("linear_bias", "bias", "norm_weight", "norm_bias")}
    flat = torch.cat([vector.reshape(-1) for vector in separate.values()])
    lengths = [vector.numel() for vector in separate.values()]
    parts = dict(zip(separate, flat.split(lengths), strict=True))
    results = [L94.function(**{**arguments, **parts}) for _ in range(4)]
    assert len(runs) == 2
    same([L94.function(**arguments)], [results[-1]])
    assert len(runs) == 3, "the plan is the same for separate ones"


def test_arguments_that_overlap(runs):
    arguments = l94_arguments()
    size = arguments["linear_bias"].numel()
    flat = torch.randn(2 * size)
    for _ in range(3):
        L94.function(**{**arguments, "linear_bias": flat[:size], "bias": flat[4 : size + 4]})
    assert not runs


def test_no_tensor_is_kept(runs):
    arguments = make_arguments(L75, PROBLEM, torch.float32)
    for _ in range(4):
        result = L75.function(**arguments)
    kept = [weakref.ref(tensor) for tensor in (result, *tensors_of(arguments).values(), *runs)]
    del arguments, result
    runs.clear()
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)


def test_results_are_new_each_time(runs):
    arguments = l94_arguments()
    function = repeated(L94, arguments, runs)
    first, second = function(**arguments), function(**arguments)
    before = second.clone()
    first.fill_(torch.nan)
    assert torch.equal(second, before)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(replay, "_MOST_PLANS", 3)
    doubled = replay.Repeated(lambda input: input * 2)
    for size in range(10):
        doubled(torch.ones(size))
    assert len(doubled.plans) <= 3


def launching(function):
    """``function`` behind a call that launches a kernel: PyTorch's operations alone are not repeated."""
    return replay.Repeated(lambda input: function(ops.group_norm(input, 2)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0)[1:].t() @ x[1:],
        lambda x: torch.cat([x[:2], x.clone().mul_(3)]),
        lambda x: torch.zeros(3, 4).index_add_(0, torch.arange(2), x[:2, :4]),
        lambda x: x.max(dim=1).values.view(1, -1, 1),
        lambda x: (x.sum(), torch.empty(0), x.to(torch.bfloat16)),
        lambda x: torch.full_like(x, 2.0).t(),
        lambda x: (x.view(torch.int32)[1:] & -2).view(torch.float32) + x[1:],
    ],
)
def test_operations_of_pytorch_between_launches(function, runs):
    repeated = launching(function)
    draws = [torch.randn(5, 6) for _ in range(4)]
    results = [repeated(draw) for draw in draws]
    assert runs
    for draw, result in zip(draws, results, strict=True):
        expected = function(ops.group_norm(draw, 2))
        pairs = zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
        for each, other in pairs:
            assert torch.equal(each, other) and each.stride() == other.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum().item() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: -x if x.is_same_size(x[1:]) else x,
        lambda x: x.clone().resize_(2, 3),
    ],
)
def test_what_looks_at_values_is_not_repeated(function, runs):
    repeated = launching(function)
    for seed in range(4):
        draw = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(repeated(draw), function(ops.group_norm(draw, 2)))
    assert not any(repeated.plans.values())


def test_a_failed_call_is_not_repeated():
    def fail(input):
        raise ValueError("no")

    failing = replay.Repeated(fail)
    for _ in range(4):
        with pytest.raises(ValueError, match="no"):
            failing(torch.ones(2, 2))
    assert not any(failing.plans.values())
    doubled = launching(lambda x: x * 2)
    for _ in range(3):
        doubled(torch.ones(2, 2))
    assert any(doubled.plans.values()), "calls are watched again after a failed one"


def test_memory_that_was_freed_is_no_tensor_of_the_call():
    """A constant that no mode sees may get the address of a tensor that was freed."""

    def function(input):
        y = ops.group_norm(input, 2)
        freed = y.sum()
        del freed
        return y * torch.tensor(2.0)

    repeated = replay.Repeated(function)
    for seed in range(4):
        draw = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(repeated(draw), ops.group_norm(draw, 2) * 2.0)


def test_a_library_that_changes_its_layout():
    """As a convolution may, where cuDNN is switched off between two calls."""
    library = torch.library.Library("normfuse_test", "DEF")
    library.define("laid_out(Tensor input) -> Tensor")
    is_transposed = []

    def laid_out(input):
        return input.t().contiguous().t() if is_transposed else input.clone()

    library.impl("laid_out", laid_out, "CPU")
    repeated = launching(lambda x: torch.ops.normfuse_test.laid_out(x) + x[:1])
    draw = torch.randn(5, 6)
    expected = [repeated(draw) for _ in range(3)][-1]
    is_transposed.append(True)
    result = repeated(draw)
    assert torch.equal(result, expected) and result.stride() == expected.stride()
    library._destroy()


def test_an_integer_too_long_to_write():
    arguments = l94_arguments()
    for _ in range(3):
        with pytest.raises(ValueError, match="eps must be at most "):
            L94.function(**{**arguments, "eps": 10**5000})
