"""Promise: any sizes, group sizes and numbers of dimensions work, with or without each of the optional vectors."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import ops
from tests.accuracy import check, draw_grad_output, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    BLOCKS,
    CHAINS,
    DTYPES,
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

pytestmark = pytest.mark.usefixtures("poisoned_memory")

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


@st.composite
def problems(draw):
    """Up to about 300 in each size, few of them large; groups of 1, of a power of two or not, of up to all channels."""
    rows = draw(st.integers(1, 8) | st.integers(1, 70))
    depth = draw(st.integers(1, 40) | st.integers(1, 300))
    group_size = draw(st.sampled_from([1, 10, 16, 32, 48]) | st.integers(5, 300))
    groups = draw(st.integers(1, max(1, 300 // group_size)))
    return Problem(rows, depth, groups, group_size)


@by_dtype
@by_chain
@given(data=st.data(), problem=problems(), seed=st.integers(0, 2**16))
@settings(max_examples=12)
def test_any_sizes(chain, dtype, problem, seed, data):
    absent = data.draw(st.sets(st.sampled_from(chain.vectors)), label="absent")
    check(chain, make_arguments(chain, problem, dtype, absent=tuple(absent), seed=seed))


#: Every size in one dtype, and in the others one that a tile of the product holds and two that none does.
GROUP_SIZES = [
    *((size, torch.bfloat16) for size in (1, 10, 16, 32, 48, 512)),
    *((size, torch.float32) for size in (10, 32, 512)),
    *((size, torch.float16) for size in (16, 48)),
]


@pytest.mark.parametrize("group_size, dtype", GROUP_SIZES, ids=str)
@pytest.mark.parametrize("chain", [L94, L75, L30, *NORMS], ids=chain_id)
def test_group_sizes(chain, group_size, dtype):
    groups = 2 if group_size == 512 else 11
    check(chain, make_arguments(chain, Problem(rows=23, depth=45, groups=groups, group_size=group_size), dtype))


@pytest.mark.parametrize("channels", [1, 7, 64, 257, 1000])
@pytest.mark.parametrize("chain", [L94, L75, L30, *NORMS], ids=chain_id)
def test_one_group(chain, channels):
    check(chain, make_arguments(chain, Problem(rows=23, depth=19, groups=1, group_size=channels), torch.bfloat16))


@pytest.mark.parametrize("chain", [L94, L75, L30, *NORMS], ids=chain_id)
def test_group_wider_than_registers(chain):
    """8192 channels are what one program holds; a group of 8200 takes the way of partial statistics."""
    check(chain, make_arguments(chain, Problem(rows=2, depth=5, groups=1, group_size=8200), torch.float32))


@pytest.mark.parametrize("rows, depth, channels", [(1, 1, 1), (1, 300, 3), (260, 1, 2), (2, 7, 301), (131, 129, 65)])
@by_chain
def test_odd_sizes(chain, rows, depth, channels):
    group_size = channels if channels in (1, 3) else 1 if channels == 2 else 5 if channels == 65 else 7
    problem = Problem(rows, depth, channels // group_size, group_size)
    # Of one row, the lines of the weight's gradient are all as wrong as one number happens to be.
    check(chain, make_arguments(chain, problem, torch.float32), by_element=rows > 1)


@pytest.mark.parametrize("absent", ["linear_bias", "bias", "norm_weight", "norm_bias", "weight"])
@by_chain
def test_one_absent_vector(chain, absent):
    if absent in chain.vectors:
        arguments = make_arguments(chain, Problem(13, 24, 4, 8), torch.float16, absent=(absent,))
        check(chain, arguments)


@by_chain
def test_no_vectors(chain):
    check(chain, make_arguments(chain, Problem(13, 24, 4, 8), torch.bfloat16, absent=chain.vectors))


@pytest.mark.parametrize("leading", [(), (1,), (3, 4), (2, 1, 5)])
@pytest.mark.parametrize("chain", [L94, L30, LINEAR, BIAS_HARDTANH_MISH], ids=chain_id)
def test_leading_dimensions(chain, leading):
    """The functions over the last dimension take any number of others, and none."""
    arguments = make_arguments(chain, Problem(torch.Size(leading).numel(), 24, 4, 8), torch.float32)
    arguments["input"] = arguments["input"].reshape(*leading, -1)
    check(chain, arguments)


# Kernels see pixels as one axis: every dtype where they are few, and two where a group's statistics are merged.
@pytest.mark.parametrize(
    "pixels, dtype",
    [
        ((1,), torch.float32),
        ((7,), torch.bfloat16),
        ((5, 3), torch.float32),
        ((5, 3), torch.bfloat16),
        ((5, 3), torch.float16),
        ((2, 3, 4), torch.float16),
        ((41, 37), torch.float32),
        ((41, 37), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_pixels(chain, pixels, dtype):
    problem = Problem(rows=5, depth=1, groups=3, group_size=4, pixels=pixels)
    check(chain, make_arguments(chain, problem, dtype))
    check(chain, make_arguments(chain, dataclasses.replace(problem, groups=1), dtype, absent=("weight",)))


@pytest.mark.parametrize("training", [False, True])
@by_chain
def test_no_rows(chain, training):
    """An empty batch gives an empty result, gradients of zero for the parameters and an empty one for the input."""
    arguments = make_arguments(chain, Problem(rows=0, depth=24, groups=4, group_size=8), torch.float32)
    expected = torch.empty((1, 32, 0, 1) if chain is L75 else (0, 32))
    if not training:
        assert chain.function(**arguments).shape == expected.shape
        return
    results = run(chain.function, arguments, expected)
    assert results["output"].shape == expected.shape
    for name, tensor in tensors_of(arguments).items():
        assert torch.equal(results[name], torch.zeros_like(tensor)), name


@pytest.mark.parametrize("groups, group_size", [(4, 8), (20, 8), (2, 300), (1, 8200)])
def test_minimum_with_a_bias_of_no_channels(groups, group_size):
    """An empty result, and gradients of zero."""
    arguments = make_arguments(L75, Problem(5, 24, groups, group_size), torch.float32)
    arguments["bias"] = torch.empty(1, 0, 1, 1)
    results = run(L75.function, arguments, torch.empty(1, 0, 5, 1))
    assert results["output"].shape == (1, 0, 5, 1)
    for name, tensor in tensors_of(arguments).items():
        assert torch.equal(results[name], torch.zeros_like(tensor)), name


@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_no_pixels(chain):
    arguments = make_arguments(chain, Problem(rows=3, depth=1, groups=2, group_size=4, pixels=(0, 5)), torch.float32)
    results = run(chain.function, arguments, torch.empty(3, 8, 0, 5))
    assert results["output"].shape == (3, 8, 0, 5)
    assert not results["weight"].any() and not results["bias"].any()


@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_no_channels(chain, shape):
    """Nothing, of the input's shape, with and without vectors, and a gradient."""
    for vector in (None, torch.empty(0)):
        arguments = {"input": torch.empty(shape), "num_groups": 1, "weight": vector, "bias": vector}
        results = run(chain.function, arguments, torch.empty(shape))
        assert results["output"].shape == results["input"].shape == shape


@pytest.mark.parametrize("chain", LINEAR_CHAINS + BLOCKS, ids=chain_id)
def test_gradients_only_where_asked_for(chain):
    """Each tensor alone may want a gradient; it is the one that it gets among all."""
    arguments = make_arguments(chain, Problem(rows=9, depth=24, groups=4, group_size=8), torch.float32)
    grad_output = draw_grad_output(chain, arguments)
    everything = run(chain.function, arguments, grad_output)
    for name, tensor in tensors_of(arguments).items():
        leaf = tensor.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(chain.function(**{**arguments, name: leaf}), leaf, grad_output)
        assert torch.equal(gradient, everything[name]), name


def test_minimum_of_one_channel():
    """The smallest chain of all: its result is the norm's bias and nothing moves it but the biases."""
    arguments = make_arguments(L75, Problem(1, 1, 1, 1), torch.float32)
    check(L75, arguments)
    expected = arguments["norm_bias"] + arguments["bias"].flatten()
    assert torch.equal(ops.linear_group_norm_min(**arguments).flatten(), expected)


def test_linear_alone_equals_torch_where_sums_are_exact():
    arguments = make_arguments(LINEAR, Problem(50, 70, 6, 11), torch.float16, kind="exact")
    assert torch.equal(ops.linear(**arguments), LINEAR.plain(**arguments))
