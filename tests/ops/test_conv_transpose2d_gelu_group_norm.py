"""L19, transposed convolution → GELU → GroupNorm, by every promise that the other chains keep: memory and numbers."""

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

import ops
from ops import convolution
from tests import images
from tests.accuracy import check, check_not_finite, draw_grad_output, run
from tests.chains import DTYPES, L19, LAYOUTS, Problem, chain_id, tensors_of, with_layout
from tests.images import GEOMETRIES, PROBLEM, arguments_of, in_format

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
by_approximation = pytest.mark.parametrize("approximate", ["none", "tanh"])
#: Our convolution or cuDNN's, by dtype, for stride 1; all others are cuDNN's in any dtype.
by_geometry_and_dtype = pytest.mark.parametrize(
    "geometry, dtype",
    [*((GEOMETRIES[0], dtype) for dtype in DTYPES), *zip(GEOMETRIES[1:], DTYPES, strict=True)],
    ids=str,
)
#: The exact GELU is another function for each dtype, the other one is not.
by_function = pytest.mark.parametrize(
    "approximate, dtype", [*(("none", dtype) for dtype in DTYPES), ("tanh", torch.float32)], ids=str
)

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)


@st.composite
def problems(draw):
    conv_groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    depth = conv_groups * draw(st.integers(1, 6))
    group_size = draw(st.integers(1, 6))
    groups = draw(st.integers(1, 5)) * (conv_groups // math.gcd(conv_groups, group_size))
    pixels = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kernel = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Problem(draw(st.integers(1, 5)), depth, groups, group_size, pixels, kernel, conv_groups)


def pairs(least, most):
    return st.integers(least, most) | st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def geometries(draw):
    return {
        "stride": draw(pairs(1, 3)),
        "padding": draw(pairs(0, 2)),
        "output_padding": draw(st.just(0) | pairs(0, 2)),
        "dilation": draw(pairs(1, 3)),
        "approximate": draw(st.sampled_from(["none", "tanh"])),
    }


def is_possible(arguments):
    """And whether the image reaches the result: if not, gradients that are zero are compared, which is to say noise."""
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    geometry = {"groups": 1, **{name: arguments[name] for name in names if name in arguments}}
    input, weight = torch.ones_like(arguments["input"]), torch.ones_like(arguments["weight"])
    try:
        convolution.check(True, input, weight, **geometry)
    except ValueError:
        return False
    return bool(torch.conv_transpose2d(input, weight, None, **geometry).any())


@given(
    data=st.data(),
    problem=problems(),
    geometry=geometries(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_any_arguments(problem, geometry, dtype, seed, data):
    """Result and every gradient by the rule of accuracy; all of them in the memory format of what they belong to."""
    absent = data.draw(st.sets(st.sampled_from(L19.vectors)), label="absent")
    arguments = arguments_of(problem, dtype, geometry=geometry, absent=tuple(absent), seed=seed)
    layout = data.draw(st.sampled_from(["channels_last", "permuted", *LAYOUTS]), label="layout")
    if layout == "channels_last":
        arguments = in_format(arguments, torch.channels_last)
    elif layout == "permuted":
        arguments["input"] = arguments["input"].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    else:
        arguments["input"] = with_layout(arguments["input"], layout)
    assume(is_possible(arguments))
    check(L19, arguments)


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "spike", "exact"])
@by_dtype
def test_kinds_of_data(dtype, kind):
    check(L19, arguments_of(Problem(16, 8, 2, 8, pixels=(5, 4)), dtype, kind=kind))


# Our convolution in both 16-bit dtypes, cuDNN's, and both kinds of GELU.
@pytest.mark.parametrize(
    "geometry, dtype",
    [
        (GEOMETRIES[0], torch.bfloat16),
        (GEOMETRIES[0], torch.float16),
        (GEOMETRIES[1], torch.float32),
        (GEOMETRIES[2], torch.bfloat16),
    ],
    ids=str,
)
def test_many_samples(geometry, dtype):
    """Here the rule is at its sharpest (see ``tests.accuracy``), with channels enough for the gradients of vectors."""
    check(L19, arguments_of(Problem(80, 4, 1, 48, pixels=(3, 2)), dtype, geometry=geometry))


@by_dtype
def test_wide_gradients(dtype):
    arguments = arguments_of(dtype=dtype)
    check(L19, arguments, draw_grad_output(L19, arguments, kind="wide"))


@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_groups_of_several_blocks(mean):
    """Groups of more than 4096 values, whose statistics are merged; a mean far from zero."""
    arguments = arguments_of(Problem(2, 3, 2, 3, pixels=(41, 47)), torch.bfloat16)
    arguments["conv_bias"] = arguments["conv_bias"] + mean
    check(L19, arguments)


@by_dtype
@pytest.mark.parametrize("absent", [*((name,) for name in L19.vectors), L19.vectors], ids=str)
def test_absent_vectors(absent, dtype):
    check(L19, arguments_of(dtype=dtype, absent=absent))


def test_images_of_one_pixel():
    check(L19, arguments_of(Problem(9, 5, 3, 4, pixels=(1, 1), kernel=(1, 1))))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=chain_id)
def test_empty_batch(training, format, dtype):
    """An empty result, gradients of zero for the parameters and an empty one for the input."""
    arguments = in_format(arguments_of(dataclasses.replace(PROBLEM, rows=0), dtype), format)
    expected = torch.empty(0, 12, 7, 9, dtype=dtype)
    if not training:
        assert L19.function(**arguments).shape == expected.shape
        return
    results = run(L19.function, arguments, expected)
    assert results["output"].shape == expected.shape and results["output"].dtype == dtype
    for name, tensor in tensors_of(arguments).items():
        assert torch.equal(results[name], torch.zeros_like(tensor)), name


# Memory


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@by_geometry_and_dtype
def test_memory_format(geometry, dtype, format):
    """Result and the input's gradient are in the input's, whatever the weight's and the incoming gradient's is."""
    arguments = in_format(arguments_of(dtype=dtype, geometry=geometry), format)
    grad_output = draw_grad_output(L19, arguments)
    for other in (torch.contiguous_format, torch.channels_last):
        arguments["weight"] = arguments["weight"].contiguous(memory_format=other)
        results = run(L19.function, arguments, grad_output.contiguous(memory_format=other))
        for name in ("output", "input"):
            assert results[name].is_contiguous(memory_format=format), name
        assert results["weight"].is_contiguous(memory_format=other)
        assert L19.function(**arguments).is_contiguous(memory_format=format)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_format_in_float64(format):
    arguments = in_format(arguments_of(dtype=torch.float64), format)
    assert L19.function(**arguments).is_contiguous(memory_format=format)


def test_scalar_grad_output():
    """What ``output.sum().backward()`` sends: one number at stride 0 throughout."""
    arguments = arguments_of()
    check(L19, arguments, torch.full((), 0.75).expand(L19.plain(**arguments).shape))


@by_dtype
def test_images_whose_rows_and_columns_are_swapped(dtype):
    """Input and gradient in a memory order that is no one run of pixels."""
    weight = torch.randn(8, 12, 3, 3, dtype=dtype, requires_grad=True)
    input, gradient = (torch.randn(shape, dtype=dtype).mT for shape in ((2, 8, 4, 5), (2, 12, 6, 7)))

    def results(input, gradient):
        leaves = input.requires_grad_(), weight
        output = ops.conv_transpose2d_gelu_group_norm(*leaves, None, 4)
        return output, *torch.autograd.grad(output, leaves, gradient)

    expected = results(input.contiguous(), gradient.contiguous())
    for result, other in zip(results(input, gradient), expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=1e-2 * other.abs().max().item())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_weight_and_vectors(layout):
    arguments = arguments_of(dtype=torch.bfloat16)
    arguments["weight"] = with_layout(arguments["weight"], layout)
    for name in L19.vectors:
        matrix = torch.stack([arguments[name]] * 2)
        arguments[name] = with_layout(matrix, layout)[1]
    check(L19, arguments)


def test_arguments_are_left_as_they_are():
    arguments = arguments_of()
    before = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    run(L19.function, arguments, draw_grad_output(L19, arguments))
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), name


def kept_for_backward(arguments):
    """The result and the bytes of each storage that autograd keeps for it but the arguments' own."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = L19.function(**{**arguments, **leaves})
    known = {tensor.untyped_storage().data_ptr() for tensor in leaves.values()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return output, [size for place, size in storages.items() if place not in known and size > 0]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@by_dtype
def test_kept_for_backward(dtype, format):
    """The values before the GELU, once and in their dtype, and two numbers a group."""
    output, kept = kept_for_backward(in_format(arguments_of(dtype=dtype), format))
    assert sorted(kept) == sorted([output.numel() * dtype.itemsize, 2 * 4 * PROBLEM.rows * PROBLEM.groups])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(context):
    with context():
        _, kept = kept_for_backward(arguments_of())
    assert kept == []


def test_autocast_keeps_one_tensor_in_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        output, kept = kept_for_backward(arguments_of())
    assert kept.count(output.numel() * 2) >= 1 and all(size <= output.numel() * 2 for size in kept)


def test_gradients_only_where_asked_for():
    arguments = arguments_of()
    grad_output = draw_grad_output(L19, arguments)
    everything = run(L19.function, arguments, grad_output)
    for name, tensor in tensors_of(arguments).items():
        leaf = tensor.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(L19.function(**{**arguments, name: leaf}), leaf, grad_output)
        assert torch.equal(gradient, everything[name]), name


@by_geometry_and_dtype
def test_determinism(geometry, dtype):
    """The same bits again, from copies, and without training."""
    arguments = arguments_of(dtype=dtype, geometry=geometry)
    grad_output = draw_grad_output(L19, arguments)
    first = run(L19.function, arguments, grad_output)
    torch.empty(10_000).fill_(math.nan)
    copies = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    second = run(L19.function, {**arguments, **copies}, grad_output.clone())
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert torch.equal(L19.function(**arguments), first["output"])


# Numbers


@by_function
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values(value, dtype, approximate):
    """They make NaN of the groups that they reach, in PyTorch as here, and change no bit of any other."""
    arguments = arguments_of(dtype=dtype, geometry={"approximate": approximate})
    clean = L19.function(**arguments)
    for name in ("input", "weight", "conv_bias", "norm_bias"):
        changed = {**arguments, name: arguments[name].clone()}
        changed[name][(1,) * changed[name].ndim] = value
        ours, theirs = L19.function(**changed), L19.plain(**changed)
        assert torch.equal(ours.isnan(), theirs.isnan()), name
        assert torch.equal(ours.isposinf(), theirs.isposinf()), name
        assert torch.equal(ours.isneginf(), theirs.isneginf()), name
        assert not theirs.isfinite().all() and theirs.isfinite().any() or name == "weight"
        assert torch.equal(ours[theirs.isfinite()], clean[theirs.isfinite()]), name
    weight = arguments["norm_weight"].clone()
    weight[1] = math.nan
    assert torch.equal(L19.function(**{**arguments, "norm_weight": weight})[:, 1].isnan(), clean[:, 1] == clean[:, 1])


@by_function
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_gradients(value, dtype, approximate):
    """What is not finite in the input or in the incoming gradient is not finite in the same gradients as PyTorch's."""
    arguments = arguments_of(dtype=dtype, geometry={"approximate": approximate})
    check_not_finite(L19, arguments, draw_grad_output(L19, arguments), value)


@by_dtype
@by_approximation
def test_huge_values(approximate, dtype):
    """GELU is the identity or zero there; nothing overflows on the way."""
    arguments = arguments_of(dtype=dtype, geometry={"approximate": approximate})
    arguments["input"] = arguments["input"] * (1e3 if dtype == torch.float16 else 1e8)
    check(L19, arguments)


@by_dtype
@pytest.mark.parametrize("value", [0.1, -1.0, 700.0])
def test_constant_groups(value, dtype):
    """Nothing is left of them but the norm's bias: 1/sqrt(eps) = 316 must have no rounding to multiply."""
    arguments = arguments_of(dtype=dtype)
    arguments["weight"] = torch.zeros_like(arguments["weight"])
    arguments["conv_bias"] = torch.full_like(arguments["conv_bias"], value)
    output = L19.function(**arguments)
    exact = arguments["norm_bias"][None, :, None, None].expand_as(output)
    rounding = 316 * abs(value) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(output, exact, rtol=torch.finfo(dtype).eps, atol=rounding)


@pytest.mark.parametrize("absent", [(), *((name,) for name in L19.vectors), L19.vectors], ids=str)
@by_geometry
def test_gradcheck(geometry, absent):
    problem = Problem(2, 2, 2, 2, pixels=(2, 3), kernel=(2, 2))
    arguments = arguments_of(problem, torch.float64, geometry=geometry, absent=absent)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}

    def function(*tensors):
        return L19.function(**{**arguments, **dict(zip(leaves, tensors, strict=True))})

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_reference():
    """PyTorch's own layers, to the bit; float64 takes them, and so do tensors that no kernel runs."""
    for dtype in (torch.float32, torch.float64):
        arguments = arguments_of(dtype=dtype, geometry=GEOMETRIES[2])
        grad_output = draw_grad_output(L19, arguments)
        theirs = run(L19.plain, arguments, grad_output)
        for function in (ops.reference.conv_transpose2d_gelu_group_norm, L19.function):
            if function is not L19.function or dtype == torch.float64:
                ours = run(function, arguments, grad_output)
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
