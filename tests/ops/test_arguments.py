"""Promise: arguments that do not fit raise an error that names the argument, what was expected and what came.

It comes before anything runs: no operator of PyTorch's is called, let alone a kernel launched.
"""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops import precision
from tests.accuracy import run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    GELU_GROUP_NORM,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L19,
    L30,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

PROBLEM = Problem(rows=4, depth=8, groups=2, group_size=3)
EVERY = (*CHAINS, L19)
GROUPED = tuple(chain for chain in EVERY if chain.has_groups)
BOUNDED = tuple(chain for chain in CHAINS if chain.has_bounds)
MULTIPLYING = (*LINEAR_CHAINS, LINEAR)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class NothingRuns(TorchDispatchMode):
    """Fails on the first operator called: checks look at shapes and types, never at numbers."""

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        raise AssertionError(f"{operator} ran before the arguments were checked")


@functools.cache
def check_accepted(chain):
    chain.function(**make_arguments(chain, PROBLEM, torch.float32))


def valid_arguments(chain):
    """Arguments that nothing is wrong with but for what a test changes."""
    check_accepted(chain)
    return make_arguments(chain, PROBLEM, torch.float32)


def check_refused(chain, changes, error, message):
    arguments = valid_arguments(chain)
    assert changes.keys() <= {*arguments, "eps"}
    arguments.update(changes)
    with pytest.raises(error) as raised, NothingRuns():
        chain.function(**arguments)
    assert str(raised.value) == message


def optional_vectors(*chains):
    return [(chain, name) for chain in chains for name in chain.vectors if not (chain is L75 and name == "bias")]


@pytest.mark.parametrize(
    "chain, name",
    [(chain, name) for chain in EVERY for name in tensors_of(make_arguments(chain, PROBLEM, torch.float32))],
)
class TestTensors:
    """What every tensor argument of every function must be."""

    @pytest.mark.parametrize("value", [1.5, [1.0, 2.0], "weight"], ids=["float", "list", "str"])
    def test_no_tensor(self, chain, name, value):
        message = f"{name} must be a torch.Tensor, got {type(value).__name__}"
        check_refused(chain, {name: value}, TypeError, message)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, *FLOAT8], ids=chain_id)
    def test_dtypes_that_are_not_taken(self, chain, name, dtype):
        value = make_arguments(chain, PROBLEM, torch.float32)[name].to(dtype)
        message = f"{name} must be a float32, bfloat16, float16 or float64 tensor, got {dtype}"
        check_refused(chain, {name: value}, TypeError, message)

    def test_sparse(self, chain, name):
        value = make_arguments(chain, PROBLEM, torch.float32)[name].to_sparse()
        check_refused(chain, {name: value}, TypeError, f"{name} must be a dense tensor, got torch.sparse_coo")

    def test_nested(self, chain, name):
        value = make_arguments(chain, PROBLEM, torch.float32)[name]
        value = torch.nested.nested_tensor([value, value], layout=torch.jagged)
        check_refused(chain, {name: value}, TypeError, f"{name} must be a dense tensor, got a nested tensor")

    def test_other_device(self, chain, name):
        arguments = make_arguments(chain, PROBLEM, torch.float32)
        first, *others = tensors_of(arguments)
        message = f"{name} must be on input's device cpu, got meta"
        if name == first:
            message = f"{others[0]} must be on input's device meta, got cpu"
        check_refused(chain, {name: arguments[name].to("meta")}, ValueError, message)

    def test_other_dtype(self, chain, name):
        arguments = make_arguments(chain, PROBLEM, torch.float32)
        first, *others = tensors_of(arguments)
        message = f"{name} must have input's dtype torch.float32, got torch.bfloat16"
        if name == first:
            message = f"{others[0]} must have input's dtype torch.bfloat16, got torch.float32"
        check_refused(chain, {name: arguments[name].bfloat16()}, TypeError, message)


@pytest.mark.parametrize("chain", EVERY, ids=chain_id)
def test_no_input(chain):
    check_refused(chain, {"input": None}, TypeError, "input must be a torch.Tensor, got NoneType")


@pytest.mark.parametrize("chain", [*MULTIPLYING, L19], ids=chain_id)
def test_no_weight(chain):
    """Only the vectors may be None."""
    check_refused(chain, {"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType")


@pytest.mark.parametrize("shape", [(), (8,), (1, 6, 8)], ids=str)
@pytest.mark.parametrize("chain", MULTIPLYING, ids=chain_id)
def test_weight_dimensions(chain, shape):
    message = f"weight must be 2-D (out_features, in_features), got shape {shape}"
    check_refused(chain, {"weight": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("shape", [(0, 8), (0, 0)], ids=str)
@pytest.mark.parametrize("chain", MULTIPLYING, ids=chain_id)
def test_empty_weight(chain, shape):
    message = f"weight must have at least one row, got shape {shape}"
    check_refused(chain, {"weight": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("shape", [(4, 7), (8, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("chain", MULTIPLYING, ids=chain_id)
def test_features_differ(chain, shape):
    message = f"input's last dimension must be weight's in_features 8, got shape {shape}"
    check_refused(chain, {"input": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("chain", [*MULTIPLYING, BIAS_HARDTANH_MISH], ids=chain_id)
def test_scalar_input(chain):
    axes = "channels" if chain is BIAS_HARDTANH_MISH else "in_features"
    message = f"input must have at least one dimension (*, {axes}), got a 0-D tensor"
    check_refused(chain, {"input": torch.tensor(1.0)}, ValueError, message)


@pytest.mark.parametrize("shape", [(8,), (2, 4, 8)], ids=str)
def test_minimum_takes_matrices_only(shape):
    message = f"input must be 2-D (batch, in_features), got shape {shape}"
    check_refused(L75, {"input": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("shape", [(), (6,)], ids=str)
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_norm_input_dimensions(chain, shape):
    message = f"input must be at least 2-D (batch, channels, *), got shape {shape}"
    check_refused(chain, {"input": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (7,), (6, 1), (2, 6), (3, 2), (0,)], ids=str)
@pytest.mark.parametrize("chain, name", optional_vectors(*EVERY))
def test_vector_shapes(chain, name, shape):
    """PyTorch's addition would broadcast some of these."""
    check_refused(chain, {name: torch.ones(shape)}, ValueError, f"{name} must have shape (6,), got {shape}")


@pytest.mark.parametrize("shape", [(), (6,), (1, 6), (1, 6, 1), (2, 6, 1, 1), (1, 6, 4, 1), (1, 6, 1, 2)], ids=str)
def test_minimum_bias_shape(shape):
    message = f"bias must have shape (1, channels, 1, 1), got {shape}"
    check_refused(L75, {"bias": torch.ones(shape)}, ValueError, message)


@pytest.mark.parametrize("num_groups", [0, -1, -6])
@pytest.mark.parametrize("chain", GROUPED, ids=chain_id)
def test_no_groups(chain, num_groups):
    check_refused(chain, {"num_groups": num_groups}, ValueError, f"num_groups must be at least 1, got {num_groups}")


@pytest.mark.parametrize("num_groups", [4, 5, 7, 12])
@pytest.mark.parametrize("chain", GROUPED, ids=chain_id)
def test_groups_do_not_divide(chain, num_groups):
    message = f"num_groups must divide the 6 channels, got {num_groups}"
    check_refused(chain, {"num_groups": num_groups}, ValueError, message)


@pytest.mark.parametrize("num_groups", [2.0, "2", None, True, torch.tensor(2), (2,)], ids=repr)
@pytest.mark.parametrize("chain", GROUPED, ids=chain_id)
def test_groups_are_no_integer(chain, num_groups):
    message = f"num_groups must be an int, got {type(num_groups).__name__}"
    check_refused(chain, {"num_groups": num_groups}, TypeError, message)


@pytest.mark.parametrize(
    "bounds", [(1.0, -1.0), (2, 1), (math.inf, -math.inf), (0.0, math.nan), (math.nan, 0.0)], ids=str
)
@pytest.mark.parametrize("chain", BOUNDED, ids=chain_id)
def test_bounds_in_disorder(chain, bounds):
    min_val, max_val = bounds
    message = f"min_val must not be greater than max_val, got min_val={min_val} and max_val={max_val}"
    check_refused(chain, {"min_val": min_val, "max_val": max_val}, ValueError, message)


@pytest.mark.parametrize("name", ["min_val", "max_val"])
@pytest.mark.parametrize("value", [None, "1", torch.tensor(1.0), False], ids=repr)
@pytest.mark.parametrize("chain", BOUNDED, ids=chain_id)
def test_bounds_are_no_numbers(chain, value, name):
    check_refused(chain, {name: value}, TypeError, f"{name} must be an int or a float, got {type(value).__name__}")


@pytest.mark.parametrize("name", ["min_val", "max_val", "eps"])
@pytest.mark.parametrize("value", [10**400, 10**5000, 2**1024], ids=["10**400", "10**5000", "2**1024"])
@pytest.mark.parametrize("chain", [GROUP_NORM_HARDTANH, L94, L30], ids=chain_id)
def test_integers_beyond_float(chain, value, name):
    message = f"{name} must be at most 1.79769e+308 in magnitude, got an int of {value.bit_length()} bits"
    check_refused(chain, {name: value}, ValueError, message)
    check_refused(chain, {name: -value}, ValueError, message)


@pytest.mark.parametrize("eps", [-1e-5, -1, -math.inf, math.nan])
@pytest.mark.parametrize("chain", GROUPED, ids=chain_id)
def test_negative_eps(chain, eps):
    check_refused(chain, {"eps": eps}, ValueError, f"eps must not be negative, got {eps}")


@pytest.mark.parametrize("eps", [None, "1e-5", torch.tensor(1e-5), True], ids=repr)
@pytest.mark.parametrize("chain", GROUPED, ids=chain_id)
def test_eps_is_no_number(chain, eps):
    check_refused(chain, {"eps": eps}, TypeError, f"eps must be an int or a float, got {type(eps).__name__}")


@pytest.mark.parametrize(
    "chain, order",
    [
        (L94, "input weight linear_bias bias num_groups norm_weight norm_bias"),
        (L75, "input weight linear_bias num_groups norm_weight norm_bias bias"),
        (L30, "input weight linear_bias num_groups norm_weight norm_bias"),
        (LINEAR, "input weight bias"),
        (BIAS_HARDTANH_MISH, "input bias"),
        (L19, "input weight conv_bias num_groups norm_weight norm_bias"),
        (GROUP_NORM, "input num_groups weight bias"),
        (GROUP_NORM_HARDTANH, "input num_groups weight bias"),
        (GELU_GROUP_NORM, "input num_groups weight bias"),
    ],
    ids=chain_id,
)
def test_order(chain, order):
    """Tensors and num_groups come in this order; bounds and eps are given by name alone."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    by_name = {name: arguments.pop(name) for name in ("min_val", "max_val") if name in arguments}
    in_order = [arguments[name] for name in order.split()]
    assert len(in_order) == len(arguments)
    assert torch.equal(chain.function(*in_order, **by_name), chain.function(**arguments, **by_name))
    with pytest.raises(TypeError, match="positional argument"):
        chain.function(*in_order, 1.0)


def test_integers_are_fine_as_numbers():
    """Where a float is expected an int does."""
    input = torch.randn(3, 6)
    assert torch.equal(
        ops.group_norm_hardtanh(input, 2, min_val=-1, max_val=1, eps=1),
        ops.group_norm_hardtanh(input, 2, min_val=-1.0, max_val=1.0, eps=1.0),
    )


def test_equal_bounds_are_fine():
    assert torch.equal(ops.group_norm_hardtanh(torch.randn(3, 6), 2, min_val=0.5, max_val=0.5), torch.full((3, 6), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=chain_id)
@pytest.mark.parametrize("chain", BOUNDED, ids=chain_id)
def test_bounds_beyond_the_dtype_are_fine(chain, dtype, monkeypatch):
    """In PyTorch's own layers too, which refuse a number that the dtype cannot hold: it bounds nothing."""
    monkeypatch.setattr(precision, "runs_kernels", lambda tensor: False)
    arguments = make_arguments(chain, PROBLEM, dtype)
    for bounds, infinite in (((-1e40, 0.5), (-math.inf, 0.5)), ((-0.5, 10**300), (-0.5, math.inf))):
        far, expected = (
            run(chain.function, {**arguments, "min_val": low, "max_val": high}, torch.ones(4, 6, dtype=dtype))
            for low, high in (bounds, infinite)
        )
        for name in expected:
            assert torch.equal(far[name], expected[name]), name


@pytest.mark.parametrize("chain, name", optional_vectors(*EVERY))
def test_vectors_may_have_leading_ones(chain, name):
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    expected = chain.function(**arguments)
    arguments[name] = arguments[name].view(1, 1, -1).requires_grad_()
    output = chain.function(**arguments)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert arguments[name].grad.shape == (1, 1, 6)
