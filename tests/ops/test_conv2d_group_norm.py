"""Promise: convolution → steps → GroupNorm → steps is PyTorch's own, whatever its geometry, forward and backward."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings

import ops
from ops import convolution, tensor_parallel
from ops import pointwise as p
from ops.calls import parse
from ops.convolution import in_numbers
from tests import images
from tests.accuracy import check, check_inference, draw_grad_output, run
from tests.chains import DTYPES, Problem, chain_id
from tests.images import CONV2D_GELU, CONV2D_SILU
from tests.ops.test_convolution import NothingRuns
from triton_kernels.activations import SILU

FORMATS = (torch.contiguous_format, torch.channels_last)
PROBLEM = Problem(rows=4, depth=6, groups=3, group_size=4, pixels=(6, 7))
#: Those of stride 1 and one group are our own convolution's in 16 bits, the others are PyTorch's.
GEOMETRIES = {
    "plain": (PROBLEM, {}),
    "1x1": (Problem(4, 6, 3, 4, (6, 7), (1, 1)), {}),
    "1x1-padding": (Problem(4, 6, 3, 4, (6, 7), (1, 1)), {"padding": (0, 1)}),
    "padding": (PROBLEM, {"padding": (1, 2)}),
    "wide-padding": (PROBLEM, {"padding": 4}),
    "5x5": (Problem(4, 6, 3, 4, (6, 7), (5, 5)), {"padding": (2, 1)}),
    "dilation": (PROBLEM, {"padding": (0, 3), "dilation": (2, 3)}),
    "same": (PROBLEM, {"padding": "same", "dilation": (1, 2)}),
    "same-even": (Problem(4, 6, 3, 4, (6, 7), (2, 4)), {"padding": "same", "dilation": (3, 1)}),
    "valid": (PROBLEM, {"padding": "valid"}),
    "stride": (PROBLEM, {"stride": 2, "padding": 1}),
    "strides": (PROBLEM, {"stride": (1, 3), "padding": (0, 2), "dilation": (2, 1)}),
    "groups": (Problem(4, 6, 3, 4, (6, 7), conv_groups=3), {"padding": 1}),
    "depthwise": (Problem(4, 6, 3, 4, (6, 7), conv_groups=6), {"padding": "same"}),
    "odd-channels": (Problem(4, 5, 3, 3, (5, 7)), {"padding": 1}),
}
pytestmark = [
    images.MARK,
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_format = pytest.mark.parametrize("format", FORMATS, ids=str)
by_geometry = pytest.mark.parametrize("name", GEOMETRIES)


def arguments_of(name, dtype=torch.float32, chain=CONV2D_SILU, **options):
    problem, geometry = GEOMETRIES[name]
    return chain.arguments(problem, dtype, geometry=geometry, **options)


@by_dtype
@by_geometry
def test_values_and_gradients(name, dtype):
    """In the memory formats of what they belong to."""
    format = FORMATS[list(GEOMETRIES).index(name) % 2]
    chain = CONV2D_GELU if format == torch.channels_last else CONV2D_SILU
    arguments = arguments_of(name, dtype, chain, format=format)
    for gradient_format in FORMATS:
        grad_output = draw_grad_output(chain, arguments).contiguous(memory_format=gradient_format)
        check(chain, arguments, grad_output)
    check_inference(chain, arguments)
    results = run(chain.function, arguments, grad_output)
    for each in ("output", "input"):
        assert results[each].is_contiguous(memory_format=format), each


def pairs(least, most):
    return st.integers(least, most) | st.tuples(st.integers(least, most), st.integers(least, most))


@given(
    conv_groups=st.sampled_from([1, 1, 2]),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    pixels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    geometry=st.fixed_dictionaries({"stride": pairs(1, 3), "padding": pairs(0, 2), "dilation": pairs(1, 3)})
    | st.fixed_dictionaries({"padding": st.just("same"), "dilation": pairs(1, 3)}),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30)
def test_any_arguments(conv_groups, sizes, pixels, kernel, geometry, format, dtype, seed):
    rows, depth, group_size = sizes
    problem = Problem(rows, depth * conv_groups, conv_groups, group_size, pixels, kernel, conv_groups)
    arguments = CONV2D_GELU.arguments(problem, dtype, geometry=geometry, format=format, seed=seed)
    try:
        reached = F.conv2d(torch.ones_like(arguments["input"]), arguments["weight"].abs(), **geometry_of(arguments))
    except RuntimeError:
        with pytest.raises(ValueError, match="padding must leave an output of at least 1 x 1 pixels"):
            CONV2D_GELU.function(**arguments)
        return
    assume(reached.any())  # else gradients that are zero are compared, which is to say noise
    check(CONV2D_GELU, arguments)


def geometry_of(arguments):
    return {name: arguments[name] for name in ("stride", "padding", "dilation", "groups") if name in arguments}


@pytest.mark.parametrize("name", ["padding", "stride"])
@by_dtype
@pytest.mark.parametrize("absent", [*((each,) for each in CONV2D_SILU.vectors), CONV2D_SILU.vectors], ids=str)
def test_absent_vectors(absent, dtype, name):
    check(CONV2D_SILU, arguments_of(name, dtype, absent=absent))


@by_dtype
@pytest.mark.parametrize("kind", ["positive", "wide", "exact"])
def test_kinds_of_data(kind, dtype):
    check(CONV2D_SILU, CONV2D_SILU.arguments(Problem(16, 8, 2, 8, (5, 4)), dtype, geometry={"padding": 1}, kind=kind))


@pytest.mark.parametrize("dtype, geometry", [(torch.bfloat16, {"padding": 1}), (torch.float32, {"stride": 2})], ids=str)
def test_many_samples(dtype, geometry):
    """Here the rule is at its sharpest (see ``tests.accuracy``)."""
    check(CONV2D_SILU, CONV2D_SILU.arguments(Problem(40, 4, 1, 48, (4, 3)), dtype, geometry=geometry))


#: As in models of images: channels and groups of a small one, with the block's own steps around the norm.
@by_dtype
@by_format
def test_block_with_embedding_and_residual(format, dtype):
    """All operands get gradients; a vector and a tensor before the norm, a number and a tensor behind it."""
    generator = torch.Generator().manual_seed(0)
    shape = 3, 16, 6, 5
    input, image, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    input = input.contiguous(memory_format=format)
    weight = (torch.randn(16, 16, 3, 3, generator=generator) / 12).to(dtype)
    vectors = [torch.randn(16, generator=generator).to(dtype) for _ in range(4)]

    def block(input, weight, bias, vector, image, norm_weight, norm_bias, residual):
        before, after = (p.add(vector), p.mul(image)), (p.silu(), p.mul(0.5), p.add(residual))
        norm = norm_weight, norm_bias
        return ops.conv2d_group_norm(input, weight, bias, 8, *norm, padding=1, before=before, after=after)

    def plain(input, weight, bias, vector, image, norm_weight, norm_bias, residual):
        z = (F.conv2d(input, weight, bias, padding=1) + vector[:, None, None]) * image
        return F.silu(F.group_norm(z, 8, norm_weight, norm_bias)) * 0.5 + residual

    names = ("input", "weight", "bias", "vector", "image", "norm_weight", "norm_bias", "residual")
    given = dict(zip(names, (input, weight, *vectors[:2], image, *vectors[2:], residual), strict=True))
    grad_output = torch.randn(shape, generator=generator).to(dtype)
    ours, theirs = run(block, given, grad_output), run(plain, given, grad_output)
    exact = run(plain, {name: each.double() for name, each in given.items()}, grad_output.double())
    for name, truth in exact.items():
        error, usual = (float((each[name] - truth).norm()) for each in (ours, theirs))
        assert error <= 1.3 * usual + 1e-6 * float(truth.norm()), name  # one case: chance is a part of both


@by_format
@by_dtype
def test_empty_batch(dtype, format):
    for name in ("padding", "stride", "same-even"):
        arguments = arguments_of(name, dtype, format=format)
        arguments["input"] = arguments["input"][:0]
        output = CONV2D_SILU.plain(**arguments)
        results = run(CONV2D_SILU.function, arguments, output)
        assert results.pop("output").shape == output.shape
        for each, gradient in results.items():
            assert gradient.shape == arguments[each].shape and not gradient.any(), each


@by_format
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=chain_id)
@pytest.mark.parametrize("name", ["same-even", "padding", "strides"])
def test_compiled(name, dtype, format):
    """The bits of the eager call in one graph, for batches and images of any size."""
    torch._dynamo.reset()
    compiled = torch.compile(CONV2D_SILU.function, backend="aot_eager", fullgraph=True, dynamic=True)
    arguments = arguments_of(name, dtype, format=format)
    for rows, width in ((None, None), (2, 6)):
        arguments["input"] = arguments["input"][:rows, :, :, :width].contiguous(memory_format=format)
        grad_output = draw_grad_output(CONV2D_SILU, arguments)
        expected, found = (run(each, arguments, grad_output) for each in (CONV2D_SILU.function, compiled))
        for each in expected:
            assert torch.equal(found[each], expected[each]), each
            assert found[each].stride() == expected[each].stride(), each
    torch._dynamo.reset()


@by_geometry
def test_text(name):
    """A call's text says all of its geometry, and whether it is transposed."""
    arguments = arguments_of(name)
    padding, extra = in_numbers(arguments["weight"], 1, arguments.get("padding", 0), arguments.get("dilation", 1))
    sizes = {"stride": 1, "dilation": 1, "groups": 1, **geometry_of(arguments)}
    geometry = convolution.check(
        False, arguments["input"], arguments["weight"], **{**sizes, "padding": padding, "output_padding": extra}
    )
    words = ", ".join(map(str, (*geometry.numbers, 0)))
    call = parse(f"conv2d({words}) -> add -> group_norm(3, 1e-05) -> no mul -> add -> silu")
    assert call.geometry == geometry and not call.geometry.transposed and call.chain.contraction == "conv2d"
    assert parse(call.text) == call
    assert parse(call.text.replace("conv2d", "conv_transpose2d")).geometry.transposed


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stride=pairs(1, 4),
    padding=pairs(0, 4) | st.sampled_from(["same", "valid"]),
    dilation=pairs(1, 4),
)
@settings(max_examples=300)
def test_output_size(kernel, size, stride, padding, dilation):
    """PyTorch's own; where it refuses, so do we."""
    input, weight = torch.zeros(1, 1, *size), torch.zeros(1, 1, *kernel)

    def geometry():
        numbers, extra = in_numbers(weight, stride, padding, dilation)
        return convolution.check(False, input, weight, stride, numbers, extra, dilation, 1)

    try:
        expected = F.conv2d(input, weight, None, stride, padding, dilation).shape[2:]
    except RuntimeError:
        with pytest.raises(ValueError):
            geometry()
        return
    assert geometry().output_size(*size) == tuple(expected)


INPUT, WEIGHT = torch.ones(2, 4, 5, 6), torch.ones(6, 4, 3, 2)
ERRORS = [
    ({"padding": "full"}, ValueError, "padding must be 'same', 'valid', an int or a pair of ints, got 'full'"),
    ({"padding": "same", "stride": (1, 2)}, ValueError, "stride must be 1 where padding is 'same', got (1, 2)"),
    ({"padding": "same", "dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
    ({"padding": None}, TypeError, "padding must be an int, got NoneType"),
    ({"padding": (1, 2, 3)}, ValueError, "padding must be an int or a pair of ints, got (1, 2, 3)"),
    ({"padding": -1}, ValueError, "padding must be at least 0, got -1"),
    ({"stride": 0}, ValueError, "stride must be at least 1, got 0"),
    ({"groups": 4}, ValueError, "groups must divide the 6 out_channels of weight, got 4"),
    ({"groups": 2}, ValueError, "input must have the 8 in_channels of weight, got shape (2, 4, 5, 6)"),
    (
        {"dilation": 3},
        ValueError,
        "padding must leave an output of at least 1 x 1 pixels, got 0, which makes it -1 x 3",
    ),
    (
        {"weight": WEIGHT[0], "padding": "same"},
        ValueError,
        "weight must be 4-D (out_channels, in_channels // groups, kernel_height, kernel_width), got shape (4, 3, 2)",
    ),
    ({"weight": None, "padding": "same"}, TypeError, "weight must be a torch.Tensor, got NoneType"),
    ({"weight": WEIGHT[:, :0]}, ValueError, "weight must have no dimension of size 0, got shape (6, 0, 3, 2)"),
    ({"num_groups": 4}, ValueError, "num_groups must divide the 6 channels, got 4"),
    ({"conv_bias": torch.ones(4)}, ValueError, "conv_bias must have shape (6,), got (4,)"),
]


@pytest.mark.parametrize("changes, error, message", ERRORS, ids=[each[2] for each in ERRORS])
def test_errors(changes, error, message):
    """Before anything runs."""
    arguments = {"input": INPUT, "weight": WEIGHT, "conv_bias": None, "num_groups": 2, **changes}
    with pytest.raises(error) as raised, NothingRuns():
        ops.conv2d_group_norm(**arguments)
    assert str(raised.value) == message


def test_own_chain():
    """A chain of one's own takes PyTorch's arguments, and no others."""
    chain = ops.Chain("conv2d", after=(SILU,))
    arguments = (INPUT, WEIGHT, None, None, None)
    expected = ops.conv2d_group_norm(INPUT, WEIGHT, None, 2, padding="same", after=(p.silu(),))
    assert torch.equal(chain(*arguments, num_groups=2, padding="same"), expected)
    with pytest.raises(TypeError, match="'output_padding' is no argument of a convolution"):
        chain(*arguments, num_groups=2, output_padding=1)


@pytest.mark.parametrize(
    "name, dtype, forward, backward",
    [
        ("padding", torch.float32, "convolve", "convolution_gradients"),
        ("stride", torch.bfloat16, "convolve", "convolution_gradients"),
        ("groups", torch.bfloat16, "convolve", "convolution_gradients"),
    ],
    ids=str,
)
def test_explained(name, dtype, forward, backward):
    arguments = arguments_of(name, dtype)
    arguments["weight"].requires_grad_()
    explanation = ops.explain(CONV2D_SILU.function, **arguments)
    for call, step in zip(explanation.calls, (forward, backward), strict=True):
        assert step in [each.name for each in call.steps]


def test_float64_runs_as_pytorch():
    arguments = arguments_of("same-even", torch.float64)
    grad_output = torch.randn(4, 12, 6, 7, dtype=torch.float64)
    ours, theirs = run(CONV2D_SILU.function, arguments, grad_output), run(CONV2D_SILU.plain, arguments, grad_output)
    for each in theirs:
        torch.testing.assert_close(ours[each], theirs[each], rtol=1e-12, atol=1e-12)


def test_channels_of_a_layer():
    """Those of a convolution's weight are its first axis, which ``shard_channels`` divides."""
    layer = torch.nn.Conv2d(4, 8, 3)
    assert [tensor_parallel._channels_in(layer, *each) for each in layer.named_parameters()] == [0, 0]
