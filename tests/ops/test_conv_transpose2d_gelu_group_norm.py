"""L19, transposed convolution → GELU → GroupNorm, by every promise that the other chains keep."""

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

import ops
from ops import precision
from ops.convolution import check_conv_transpose2d, memory_format
from tests.accuracy import check, check_not_finite, draw_grad_output, run
from tests.chains import DTYPES, L19, LAYOUTS, Problem, chain_id, doubled, make_arguments, tensors_of, with_layout

PROBLEM = Problem(rows=4, depth=6, groups=3, group_size=4, pixels=(5, 7))
#: What a call may say of its geometry.
GEOMETRIES = (
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": (1, 2), "dilation": (2, 1), "padding": (0, 2), "approximate": "tanh"},
    {"stride": 3, "dilation": 2, "output_padding": (2, 0)},
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
by_approximation = pytest.mark.parametrize("approximate", ["none", "tanh"])

# Of its setting for another maker's GPUs, which is set along.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


@pytest.fixture(autouse=True, scope="module")
def without_onednn():
    """Its bfloat16 gradients of weights hold memory never written to, for some results one pixel wide (torch 2.13)."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def arguments_of(problem=PROBLEM, dtype=torch.float32, *, geometry=None, **options):
    return {**make_arguments(L19, problem, dtype, **options), **(geometry or {})}


def in_format(arguments, format):
    """The same arguments with the input in this memory format."""
    return {**arguments, "input": arguments["input"].contiguous(memory_format=format)}


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
        check_conv_transpose2d(input, weight, **geometry)
    except ValueError:
        return False
    return bool(torch.conv_transpose2d(input, weight, None, **geometry).any())


@by_dtype
@given(data=st.data(), problem=problems(), geometry=geometries(), seed=st.integers(0, 2**16))
@settings(max_examples=30)
def test_any_arguments(dtype, problem, geometry, seed, data):
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
    check(L19, arguments_of(Problem(24, 8, 2, 8, pixels=(6, 5)), dtype, kind=kind))


@by_dtype
@pytest.mark.parametrize("geometry", GEOMETRIES[1:3], ids=str)
def test_many_samples(geometry, dtype):
    """Here the rule is at its sharpest (see ``tests.accuracy``), with channels enough for the gradients of vectors."""
    check(L19, arguments_of(Problem(80, 4, 1, 48, pixels=(3, 2)), dtype, geometry=geometry))


@by_dtype
def test_wide_gradients(dtype):
    arguments = arguments_of(dtype=dtype)
    check(L19, arguments, draw_grad_output(L19, arguments, kind="wide"))


@by_approximation
def test_groups_of_several_blocks(approximate):
    """Groups of more than 4096 values, whose statistics are merged; a mean far from zero."""
    arguments = arguments_of(
        Problem(2, 3, 2, 3, pixels=(41, 47)), torch.bfloat16, geometry={"approximate": approximate}
    )
    check(L19, arguments)
    arguments["conv_bias"] = arguments["conv_bias"] + 50.0
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
@by_dtype
@by_geometry
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


def test_gradients_only_where_asked_for():
    arguments = arguments_of()
    grad_output = draw_grad_output(L19, arguments)
    everything = run(L19.function, arguments, grad_output)
    for name, tensor in tensors_of(arguments).items():
        leaf = tensor.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(L19.function(**{**arguments, name: leaf}), leaf, grad_output)
        assert torch.equal(gradient, everything[name]), name


@by_dtype
@by_geometry
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


@by_approximation
@by_dtype
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


@by_approximation
@by_dtype
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


# Autocast, compilation, operators


@pytest.mark.parametrize("way", ["kernels", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
def test_autocast(dtype, way, monkeypatch):
    """Its dtype comes out, gradients are the parameters' own, and rounded arguments give what they give without it."""
    if way == "reference":
        monkeypatch.setattr(precision, "runs_kernels", lambda tensor: False)
    rounded = arguments_of(dtype=dtype)
    arguments = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in rounded.items()}
    grad_output = draw_grad_output(L19, rounded)

    def under_autocast(**arguments):
        with torch.autocast("cpu", dtype):
            return L19.function(**arguments)

    ours = run(under_autocast, arguments, grad_output)
    assert ours["output"].dtype == dtype
    assert all(ours[name].dtype == torch.float32 for name in tensors_of(arguments))
    if way == "kernels":
        expected = run(L19.function, rounded, grad_output)
        for name, tensor in expected.items():
            assert torch.equal(ours[name].to(dtype), tensor), name
        with torch.autocast("cpu", dtype):
            inside = run(L19.function, arguments, grad_output)
        for name in ours:
            assert torch.equal(inside[name], ours[name]), name
    else:
        theirs, exact = run(L19.plain, rounded, grad_output), run(L19.plain, doubled(rounded), grad_output.double())
        for name in exact:
            allowed = 1.5 * (theirs[name] - exact[name]).norm() + 1e-6 * exact[name].norm()
            assert (ours[name] - exact[name]).norm() <= allowed, name


def test_autocast_leaves_float64():
    arguments = arguments_of(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(L19.function(**arguments), L19.plain(**arguments))


def test_autocast_keeps_one_tensor_in_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        output, kept = kept_for_backward(arguments_of())
    assert kept.count(output.numel() * 2) >= 1 and all(size <= output.numel() * 2 for size in kept)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@by_geometry
def test_compile(geometry, format, fresh_compiler):
    """One graph for batches and images of any size, bit for bit and stride for stride what it is without."""
    compiled = torch.compile(L19.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, pixels in ((4, (5, 7)), (3, (6, 4))):
        arguments = arguments_of(dataclasses.replace(PROBLEM, rows=rows, pixels=pixels), geometry=geometry)
        arguments = in_format(arguments, format)
        grad_output = draw_grad_output(L19, arguments)
        expected, results = run(L19.function, arguments, grad_output), run(compiled, arguments, grad_output)
        for name in expected:
            assert torch.equal(results[name], expected[name]), name
            assert results[name].stride() == expected[name].stride(), name


def test_compile_without_gradients(fresh_compiler):
    arguments = arguments_of(dtype=torch.bfloat16, absent=L19.vectors)
    compiled = torch.compile(L19.function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), L19.function(**arguments))


def test_compile_under_autocast(fresh_compiler):
    def function(**arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return L19.function(**arguments)

    arguments = arguments_of()
    grad_output = draw_grad_output(L19, arguments).bfloat16()
    results = run(torch.compile(function, fullgraph=True, backend="aot_eager"), arguments, grad_output)
    for name, tensor in run(function, arguments, grad_output).items():
        assert torch.equal(results[name], tensor), name


def test_differentiated_once():
    arguments = arguments_of()
    leaf = arguments["input"].requires_grad_()
    with pytest.raises(RuntimeError, match="conv_transpose2d_gelu_group_norm can be differentiated once only"):
        torch.autograd.grad(L19.function(**arguments).sum(), leaf, create_graph=True)


def test_meta_tensors():
    arguments = arguments_of(dtype=torch.bfloat16, geometry=GEOMETRIES[1])
    expected = L19.function(**arguments)
    for name, tensor in tensors_of(arguments).items():
        arguments[name] = tensor.to("meta")
    result = L19.function(**arguments)
    assert (result.device.type, result.shape, result.dtype) == ("meta", expected.shape, expected.dtype)


# The module


class PlainL19(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, groups, num_groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride=stride)
        self.group_norm = nn.GroupNorm(num_groups=num_groups, num_channels=out_channels)

    def forward(self, x):
        return self.group_norm(nn.functional.gelu(self.conv_transpose(x)))


SETTINGS = [
    {"in_channels": 6, "out_channels": 8, "kernel_size": 3, "stride": 1, "groups": 8, "num_groups": 4},
    {"in_channels": 5, "out_channels": 6, "kernel_size": (2, 4), "stride": (2, 1), "groups": 3, "num_groups": 6},
]


def both(settings):
    models = []
    for model in (ops.ConvTranspose2dGeluGroupNorm, PlainL19):
        torch.manual_seed(7)
        models.append(model(**settings))
    return models


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_module(settings):
    """Constructor, initial draws, state_dict, result and one step of training of the plain model."""
    mine, theirs = both(settings)
    assert torch.initial_seed() == 7
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert set(mine.state_dict()) == {f"{name}.{part}" for name in mine._modules for part in ("weight", "bias")}
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key
    input = torch.randn(3, settings["in_channels"], 6, 5)
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input).square().mean().backward()
        optimizer.step()
    for (name, parameter), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(mine(input), theirs(input))
    mine.load_state_dict(theirs.state_dict())
    mine.group_norm.eps = theirs.group_norm.eps = 0.5
    torch.testing.assert_close(mine(input), theirs(input))


def test_modules_settings_are_the_layers_own():
    """A changed layer is used as it is, as in the plain model."""
    mine, theirs = both(SETTINGS[0])
    for model in (mine, theirs):
        model.conv_transpose = nn.ConvTranspose2d(
            6, 8, 2, 2, padding=1, output_padding=1, groups=2, dilation=2, bias=False
        )
        model.group_norm = nn.GroupNorm(2, 8, affine=False)
    mine.load_state_dict(theirs.state_dict())
    input = torch.randn(3, 6, 6, 5)
    torch.testing.assert_close(mine(input), theirs(input))


def test_compiled_module(fresh_compiler):
    mine, _ = both(SETTINGS[0])
    mine = mine.to(memory_format=torch.channels_last)
    input = torch.randn(3, 6, 6, 5).to(memory_format=torch.channels_last)
    expected = mine(input)
    result = torch.compile(mine, fullgraph=True, backend="aot_eager")(input)
    assert torch.equal(result, expected) and memory_format(result) is torch.channels_last
