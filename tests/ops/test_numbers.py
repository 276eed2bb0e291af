"""Promise: where an int or a float is meant, NumPy's numbers and all else that stands for one do as Python's."""

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import ops
from autotune_configs import lookup
from ops import checks, plans
from tests.accuracy import run
from tests.chains import CHAINS, L19, L94, Problem, chain_id, make_arguments, tensors_of

PROBLEM = Problem(rows=4, depth=8, groups=2, group_size=4)
EVERY = (*CHAINS, L19)
NUMBERS = ("num_groups", "groups", "stride", "padding", "output_padding", "dilation", "min_val", "max_val", "eps")


class Index:
    """Of a class of somebody's own, that can stand for an index."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Size(IntEnum):
    ONE, TWO, FOUR = 1, 2, 4


def numbers_of(chain):
    """An int or a float for each number that the function takes, no default among them, but for L19's groups."""
    numbers = {"num_groups": 2, "eps": 0.25} if chain.has_groups else {}
    if chain.has_bounds:
        numbers |= {"min_val": -0.5, "max_val": 1}
    if chain is L19:
        pair = {"stride": (2, 3), "padding": (1, 2), "output_padding": [1, 0], "dilation": (1, 2), "groups": 1}
        numbers |= pair
    return numbers


def converted(value, integer, real):
    if isinstance(value, (tuple, list)):
        return type(value)(converted(each, integer, real) for each in value)
    return integer(value) if isinstance(value, int) else real(value)


#: What stands for an int, and for a float; those of the second that are not exact are compared with what they are.
KINDS = {
    "int64, float64": (np.int64, np.float64),
    "int32, float32": (np.int32, np.float32),
    "int8, float16": (np.int8, np.float16),
    "0-dim array, Fraction": (np.array, Fraction),
    "__index__, longdouble": (Index, np.longdouble),
}
by_kind = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
by_chain = pytest.mark.parametrize("chain", [c for c in EVERY if numbers_of(c)], ids=chain_id)


def arguments_of(chain, dtype=torch.float32):
    return {**make_arguments(chain, PROBLEM, dtype), **numbers_of(chain)}


def with_kinds(arguments, kinds):
    return {name: converted(value, *kinds) if name in NUMBERS else value for name, value in arguments.items()}


def same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@by_kind
@by_chain
def test_same_results(chain, kinds):
    arguments = arguments_of(chain)
    output = chain.function(**arguments)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    expected = run(chain.function, arguments, grad_output)
    same(run(chain.function, with_kinds(arguments, kinds), grad_output), expected)


@by_kind
@by_chain
def test_same_results_of_the_reference(chain, kinds):
    reference = getattr(ops.reference, chain.name)
    for dtype in (torch.float32, torch.float64):
        arguments = arguments_of(chain, dtype)
        assert torch.equal(reference(**with_kinds(arguments, kinds)), reference(**arguments))


@by_chain
def test_reference_takes_tensors_of_one_number(chain):
    """As PyTorch's own functions do, for ints and floats."""
    reference, arguments = getattr(ops.reference, chain.name), arguments_of(chain)
    given = {
        name: torch.tensor(value) if isinstance(value, (int, float)) and name in NUMBERS else value
        for name, value in arguments.items()
    }
    assert torch.equal(reference(**given), reference(**arguments))


@by_chain
def test_plans_are_made_of_plain_numbers(chain, monkeypatch):
    """Nothing behind the public function meets another type, forward or backward."""
    met = []

    def noted(make):
        def make_and_note(call, *arguments):
            met.extend([call.num_groups, call.eps, *(call.geometry.numbers if call.geometry else ())])
            met.extend(each for numbers in call.numbers for each in numbers or ())
            return make(call, *arguments)

        return make_and_note

    for name in ("make_forward", "make_backward"):
        monkeypatch.setattr(plans, name, noted(getattr(plans, name)))
    for kinds in KINDS.values():
        lookup.forget()
        met.clear()
        arguments = with_kinds(arguments_of(chain), kinds)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors_of(arguments).items()}
        chain.function(**{**arguments, **leaves}).sum().backward()
        assert met and {type(each) for each in met} <= {int, float}


@by_chain
def test_plans_of_calls_with_plain_numbers(chain, made):
    """They are the same calls, which one plan does."""
    arguments = arguments_of(chain)
    first = chain.function(**arguments)
    for kinds in KINDS.values():
        assert torch.equal(chain.function(**with_kinds(arguments, kinds)), first)
    assert len(made) == 1


def test_a_number_that_changes():
    """What stands for a number is that number, whatever its text or its place in memory is."""
    arguments, groups = arguments_of(L94), Index(2)
    for value in (2, 4, 8):
        groups.value = value
        expected = L94.function(**{**arguments, "num_groups": value})
        assert torch.equal(L94.function(**{**arguments, "num_groups": groups}), expected)


@pytest.mark.parametrize(
    "value", [Decimal("0.5"), 1j, np.complex64(1), np.True_, np.array([1.0]), np.array(0.5)], ids=repr
)
@pytest.mark.parametrize("name", ["min_val", "max_val", "eps"])
def test_no_numbers(name, value):
    with pytest.raises(TypeError) as raised:
        L94.function(**{**arguments_of(L94), name: value})
    assert str(raised.value) == f"{name} must be an int or a float, got {type(value).__name__}"


@pytest.mark.parametrize(
    "value", [Fraction(2), Decimal(2), np.float32(2), np.True_, np.array(2.0), np.array([2, 2])], ids=repr
)
def test_no_integers(value):
    with pytest.raises(TypeError) as raised:
        L94.function(**{**arguments_of(L94), "num_groups": value})
    assert str(raised.value) == f"num_groups must be an int, got {type(value).__name__}"


def test_values_that_are_refused():
    """A number of another type is looked at as closely, and is named as it was given."""
    arguments = arguments_of(L94)
    for changes, message in (
        ({"num_groups": np.int64(3)}, "num_groups must divide the 8 channels, got 3"),
        ({"num_groups": np.int8(0)}, "num_groups must be at least 1, got 0"),
        ({"eps": np.float32("nan")}, "eps must not be negative, got nan"),
        ({"eps": Fraction(-1, 3)}, "eps must not be negative, got -1/3"),
        ({"min_val": np.float64("nan")}, "min_val must not be greater than max_val, got min_val=nan and max_val=1"),
        ({"min_val": Fraction(3, 2)}, "min_val must not be greater than max_val, got min_val=3/2 and max_val=1"),
        ({"max_val": Fraction(10**400)}, "max_val must be at most 1.79769e+308 in magnitude, got a Fraction beyond it"),
    ):
        with pytest.raises(ValueError) as raised:
            L94.function(**{**arguments, **changes})
        assert str(raised.value) == message
    if np.finfo(np.longdouble).max > np.finfo(float).max:
        with pytest.raises(ValueError, match="^max_val must be at most .* in magnitude, got a longdouble beyond it$"):
            L94.function(**{**arguments, "max_val": np.finfo(np.longdouble).max})
    infinite = {"min_val": np.float32("-inf"), "max_val": np.longdouble("inf")}
    expected = L94.function(**{**arguments, "min_val": -float("inf"), "max_val": float("inf")})
    assert torch.equal(L94.function(**{**arguments, **infinite}), expected)


def test_enumerations_are_integers():
    arguments = arguments_of(L94)
    assert torch.equal(L94.function(**{**arguments, "num_groups": Size.TWO}), L94.function(**arguments))
    assert type(checks.plain(Size.TWO)) is int


@pytest.mark.parametrize("interpreted", [True, False])
@by_chain
def test_compiled(chain, interpreted, monkeypatch):
    """Of NumPy's numbers the compiler makes arrays, so there is a graph break, as for PyTorch's own functions."""
    if not interpreted:
        monkeypatch.setattr("ops.precision.runs_kernels", lambda tensor: False)
    torch._dynamo.reset()
    arguments = arguments_of(chain)
    expected = chain.function(**arguments)
    given = with_kinds(numbers_of(chain), KINDS["int64, float64"])
    tensors = {name: value for name, value in arguments.items() if name not in NUMBERS}
    compiled = torch.compile(lambda **tensors: chain.function(**tensors, **given), backend="aot_eager")
    assert torch.equal(compiled(**tensors), expected)


@by_chain
def test_compiled_with_numbers_that_change(chain):
    """Python's own: symbolic to the compiler, and still one graph with no break."""
    torch._dynamo.reset()
    compiled = torch.compile(chain.function, fullgraph=True, backend="aot_eager", dynamic=True)
    arguments = arguments_of(chain)
    for changes in ({}, {"num_groups": 4}, {"eps": 0.5}, {"min_val": -2}):
        changed = {**arguments, **{name: value for name, value in changes.items() if name in arguments}}
        torch.testing.assert_close(compiled(**changed), chain.function(**changed))


class Model(nn.Module):
    def forward(self, input, weight):
        return ops.linear_group_norm_hardtanh(
            input, weight, None, np.int64(2), max_val=np.float64(0.5), eps=np.float64(1)
        )


def test_exported():
    input, weight = torch.randn(3, 8), torch.randn(4, 8)
    program = torch.export.export(Model(), (input, weight))
    assert torch.equal(program.module()(input, weight), Model()(input, weight))
