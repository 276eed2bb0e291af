"""Which convolutions are made by the project's own kernels, and what float32 images become between them.

The kernels for Hopper do not run in the interpreter: PyTorch stands in for their products here, and refuses float32
numbers that are not TF32's. All around them is what runs on a GPU.
"""

import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import direct_convolution, precision
from ops import pointwise as p
from ops.calls import Call
from ops.convolution import Geometry
from tests.accuracy import check, check_not_finite, draw_grad_output, run
from tests.chains import L19, Problem, doubled, make_arguments
from tests.images import CONV2D_GELU, round_to_tf32
from tests.ops.opened import Opened
from triton_kernels import convolution_hopper, hopper, weight_gradient_hopper
from triton_kernels.chains import CONV_TRANSPOSE2D_GELU_GROUP_NORM
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.launch import call

FORMATS = (torch.contiguous_format, torch.channels_last)
GEOMETRY = Geometry((3, 3), (1, 1), (0, 0), (0, 0), (1, 1), 1)
PROBLEM = Problem(rows=5, depth=8, groups=3, group_size=8, pixels=(6, 7))

by_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def multiplied(input, weight, problem, size):
    """The stride-1 convolution [N, O, *size] in float64, of ``weight`` [KH, KW, O, C]."""
    margins = []
    for axis in (1, 0):
        reach = (problem.kernel_size[axis] - 1) * problem.dilation[axis]
        shift = problem.shift[axis]
        margins += [-shift, size[axis] + reach + shift - input.shape[2 + axis]]
    padded = F.pad(input.double(), margins)
    return F.conv2d(padded, weight.double().permute(2, 3, 0, 1), dilation=problem.dilation)


def convolved(input, weight, bias, problem, *, output, partials=None, chain=None, operands=()):
    assert hopper.takes_input(input)
    of_partials = (None, None, None) if partials is None else (partials.counts, partials.means, partials.m2s)
    biases = [bias] if chain is None else operands[: len(chain.biases)]
    assert biases[0] is bias
    call(_convolve, input, weight, [each for each in biases if each is not None], problem, output, *of_partials)


def _convolve(input, weight, biases, problem, output, counts, means, m2s):
    if input.is_meta:
        return
    if input.dtype == torch.float32:
        for each in (input, weight):
            assert not (each.view(torch.int32) & 0x1FFF)[each.isfinite()].any(), "TF32's numbers"
    values = multiplied(input, weight, problem, output.shape[2:])
    output.copy_(sum([each.double()[:, None, None] for each in biases], values))
    if counts is not None:
        activated = F.gelu(output.double()).flatten(2)
        counts.fill_(activated.shape[2])
        means.copy_(activated.mean(2)[:, None])
        m2s.copy_(activated.var(2, correction=0)[:, None] * activated.shape[2])


def add_weight_gradient(
    input, gradient, partials, *, input_first, gradient_first, count, kernel_size, dilation, shift, accumulate
):
    assert weight_gradient_hopper.supports(input, gradient, kernel_size, dilation)
    assert (input_first, gradient_first, count) == (0, 0, len(gradient))
    call(_add_weight_gradient, input, gradient, partials, kernel_size, dilation, shift, accumulate)


def _add_weight_gradient(input, gradient, partials, kernel_size, dilation, shift, accumulate):
    if input.is_meta:
        return
    problem = hopper_problem(kernel_size, dilation, shift)
    weight = torch.zeros(*kernel_size, gradient.shape[3], input.shape[3], dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        output = multiplied(input.permute(0, 3, 1, 2), weight, problem, gradient.shape[1:3])
    (sums,) = torch.autograd.grad(output, weight, gradient.permute(0, 3, 1, 2).double())
    partials.copy_(sums.flatten() + (partials if accumulate else 0.0))


def hopper_problem(kernel_size, dilation, shift):
    return types.SimpleNamespace(kernel_size=kernel_size, dilation=dilation, shift=shift)


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a GPU that has them; all else of their modules is their own."""
    for module in (direct_convolution, convolution_hopper, weight_gradient_hopper):
        monkeypatch.setattr(module, "runs_hopper_kernels", lambda device: True)
    convolutions = types.SimpleNamespace(
        supports=convolution_hopper.supports,
        partial_count=lambda input, output, convolution: 1,
        convolution_hopper=convolved,
    )
    weight_gradients = types.SimpleNamespace(
        supports=weight_gradient_hopper.supports,
        partials_shape=lambda input, gradient, kernel_size: (
            *(1, 1, kernel_size[0] * kernel_size[1] * gradient.shape[3] * input.shape[3]),
        ),
        convolution_weight_gradient=add_weight_gradient,
        by_taps=lambda sums, input_shape, gradient_shape, *, kernel_size: sums.view(
            *kernel_size, gradient_shape[3], input_shape[3]
        ),
    )
    monkeypatch.setattr(direct_convolution, "_hopper_kernels", lambda: (convolutions, weight_gradients))


@pytest.fixture
def allow_tf32(monkeypatch):
    """Whether PyTorch is set to; a function that sets it."""

    def allow(allowed):
        monkeypatch.setattr(precision, "convolutions_allow_tf32", lambda: allowed)

    allow(True)
    return allow


# What is taken


def images(shape, dtype=torch.float32, format=torch.channels_last):
    return torch.empty(shape, dtype=dtype).contiguous(memory_format=format)


def takes(input, channels=64, allowed=True, **geometry):
    geometry = dataclasses.replace(GEOMETRY, **geometry)
    weight = torch.empty(input.shape[1], channels, *geometry.kernel_size)
    return direct_convolution.takes(input, weight, geometry, allowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", [(3, 2), (1, 1), (2, 5)], ids=str)
@pytest.mark.parametrize("way", ["contiguous", "channels_last", "swapped"])
def test_taps(way, kernel, dtype):
    """Of a weight that lies in memory in any way; reversed for the forward pass, and TF32's numbers in float32."""
    weight = torch.randn(5, 12, *kernel, generator=torch.Generator().manual_seed(0)).to(dtype)
    if way == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif way == "swapped":
        weight = weight.transpose(2, 3)
    rounded = round_to_tf32(weight.contiguous()) if dtype == torch.float32 else weight
    forward, backward = (direct_convolution._taps(weight, each) for each in (True, False))
    assert torch.equal(forward, rounded.flip(2, 3).permute(2, 3, 1, 0)) and forward.is_contiguous()
    assert torch.equal(backward, rounded.permute(2, 3, 0, 1)) and backward.is_contiguous()


@by_format
@pytest.mark.parametrize("transposed", [False, True])
def test_short_numbers(on_hopper, monkeypatch, transposed, format):
    """Those in 16 bits that the kernel for Hopper takes, of stride 1, one group and up to 256 channels, whatever is set
    of TF32.

    Both axes of the weight are bounded, whichever is the input's.
    """

    def takes(in_channels, out_channels, dtype=torch.bfloat16, samples=2, **geometry):
        geometry = dataclasses.replace(GEOMETRY, transposed=transposed, **geometry)
        channels = (in_channels, out_channels // geometry.groups)
        if not transposed:
            channels = (out_channels, in_channels // geometry.groups)
        weight, input = (
            torch.empty(*channels, *geometry.kernel_size),
            images((samples, in_channels, 7, 5), dtype, format),
        )
        with_tf32, without = (direct_convolution.takes(input, weight, geometry, each) for each in (True, False))
        assert with_tf32 == without or dtype == torch.float32
        return without

    assert takes(64, 64) and takes(128, 64) and takes(64, 128) and takes(32, 40, torch.float16, padding=(1, 1))
    assert takes(64, 64, kernel_size=(1, 1)) and takes(64, 64, dilation=(2, 1))
    assert takes(8, 32) and takes(64, 16) and takes(64, 256) and not takes(64, 320) and not takes(256, 64)
    assert not takes(72, 44) and not takes(44, 72)  # rows that TMA does not copy
    assert not takes(64, 64, kernel_size=(5, 5)) and not takes(64, 64, dilation=(9, 1))
    assert not takes(64, 64, stride=(2, 2)) and not takes(64, 64, groups=2) and not takes(64, 64, torch.float32)
    assert not takes(64, 64, samples=0)
    monkeypatch.setattr(direct_convolution, "runs_hopper_kernels", lambda device: False)
    assert not takes(64, 64)


def test_float32_is_the_librarys_without_the_kernels_for_hopper():
    assert not takes(images((4, 64, 72, 64)))
    assert not takes(images((4, 64, 72, 64)).double())


def test_float32_in_channels_last(on_hopper):
    """Of any size that the kernel takes, with the taps that are known: there cuDNN's convolutions are TF32; with 1 x 1
    taps only large ones surely are."""
    for shape in ((4, 64, 72, 64), (1, 4, 2, 3)):
        input = images(shape)
        assert takes(input) and not takes(input, channels=5) and takes(input, padding=(1, 2))
        assert takes(input, kernel_size=(1, 1)) == (shape[0] == 4) and not takes(input, dilation=(2, 1))
        assert not any(takes(input, kernel_size=size) for size in ((2, 2), (3, 1), (1, 5), (5, 5)))
        assert not takes(input, allowed=False) and not takes(input, stride=(1, 2)) and not takes(input, groups=2)
        assert not takes(input[:0]) and not takes(input.double())
        assert not takes(input, output_padding=(1, 0), dilation=(2, 2))  # not cuDNN's
    assert takes(images((4, 72, 9, 8))[:, 3:67])  # as any is copied
    for refused in (images((4, 3, 72, 64)), images((4, 37, 72, 64)), images((4, 512, 8, 8))):
        assert not takes(refused)


@pytest.mark.parametrize(
    "shape, channels, taken",
    [
        ((4, 64, 64, 64), 64, True),
        ((1, 64, 128, 128), 64, True),
        ((4, 128, 64, 64), 64, False),  # more weights than fit
        ((4, 64, 64, 64), 200, True),
        ((4, 64, 64, 63), 64, False),
        ((4, 64, 64, 64), 63, False),
        ((4, 60, 64, 64), 64, False),
        ((8, 8, 128, 128), 8, False),
    ],
    ids=str,
)
def test_contiguous_float32(on_hopper, shape, channels, taken):
    """Where cuDNN's are TF32 for certain: with channels and pixels enough."""
    input = images(shape, format=torch.contiguous_format)
    assert takes(input, channels) is taken
    assert not takes(input, channels, allowed=False) and not takes(input, channels, dilation=(1, 2))
    assert not takes(input, channels, kernel_size=(2, 2))


# What they become


def as_tf32(arguments, grad_output):
    """The largest relative error that rounding the convolution's operands to TF32 makes of each result, about."""
    exact = run(L19.plain, doubled(arguments), grad_output.double())
    rounded = {name: round_to_tf32(arguments[name]) for name in ("input", "weight")}
    return exact, run(L19.plain, doubled({**arguments, **rounded}), grad_output.double())


def arguments_of(format, problem=PROBLEM, **geometry):
    arguments = {**make_arguments(L19, problem, torch.float32), **geometry}
    return {**arguments, "input": arguments["input"].contiguous(memory_format=format)}


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Samples, two or three, and images of any kind as if cuDNN took them as TF32."""
    monkeypatch.setattr(direct_convolution, "_BYTES_AT_ONCE", 20000)
    monkeypatch.setattr(direct_convolution, "_is_tf32_in_cudnn", lambda *arguments: True)


GEOMETRIES = {
    "plain": (PROBLEM, {}),
    "padding": (dataclasses.replace(PROBLEM, kernel=(2, 3)), {"padding": (1, 2), "approximate": "tanh"}),
    "dilation": (PROBLEM, {"dilation": (2, 1)}),
    "odd channels": (dataclasses.replace(PROBLEM, groups=3, group_size=3), {}),
    "wide taps": (dataclasses.replace(PROBLEM, kernel=(1, 5)), {}),
}


@by_format
@pytest.mark.parametrize("name", GEOMETRIES)
def test_float32(on_hopper, allow_tf32, few_at_a_time, name, format):
    """Wrong by TF32's rounding and no more; weight gradients by less; in the formats of what they belong to."""
    problem, geometry = GEOMETRIES[name]
    arguments = arguments_of(format, problem, **geometry)
    for gradient_format in FORMATS:
        grad_output = draw_grad_output(L19, arguments).contiguous(memory_format=gradient_format)
        exact, rounded = as_tf32(arguments, grad_output)
        results = run(L19.function, arguments, grad_output)
        for each in results:
            error, expected = (results[each] - exact[each]).norm(), (rounded[each] - exact[each]).norm()
            assert error <= 2 * expected + 1e-6 * exact[each].norm(), each
        for each in ("output", "input"):
            assert results[each].is_contiguous(memory_format=format), each
        output_error = (results["output"] - exact["output"]).norm() / exact["output"].norm()
        taken = direct_convolution.takes(
            arguments["input"], arguments["weight"], dataclasses.replace(GEOMETRY, **shape_of(problem, geometry)), True
        )
        assert bool(output_error > 5e-5) is taken, "rounded, where it should be, and nowhere else"


PLAIN_GEOMETRIES = {
    "plain": ((3, 3), {}),
    "padding": ((2, 3), {"padding": (1, 2)}),
    "wide padding": ((3, 3), {"padding": 4}),
    "dilation": ((3, 3), {"dilation": (2, 1), "padding": 1}),
    "same": ((2, 3), {"padding": "same", "dilation": (1, 2)}),
    "1x1": ((1, 1), {}),
}


@by_format
@pytest.mark.parametrize("name", PLAIN_GEOMETRIES)
def test_plain_convolutions_and_their_gradients(on_hopper, few_at_a_time, monkeypatch, name, format):
    """By the kernels for Hopper, both ways, with a weight gradient in either format."""
    kernel, geometry = PLAIN_GEOMETRIES[name]
    ran = []
    backward = direct_convolution.backward
    monkeypatch.setattr(direct_convolution, "backward", lambda *each: ran.append(1) or backward(*each))
    problem = dataclasses.replace(PROBLEM, groups=2, kernel=kernel)
    arguments = CONV2D_GELU.arguments(problem, torch.bfloat16, geometry=geometry, format=format)
    arguments["weight"] = arguments["weight"].contiguous(memory_format=format)
    check(CONV2D_GELU, arguments)
    results = run(CONV2D_GELU.function, arguments, draw_grad_output(CONV2D_GELU, arguments))
    assert ran
    for each in ("output", "input", "weight"):
        assert results[each].is_contiguous(memory_format=format), each


def shape_of(problem, geometry):
    return {"kernel_size": problem.kernel, "dilation": geometry.get("dilation", (1, 1))}


@by_format
@pytest.mark.parametrize("allowed", [True, False])
def test_the_setting_of_the_forward_pass_counts(on_hopper, allow_tf32, few_at_a_time, format, allowed):
    """Also in the backward pass, whatever is set by then."""
    arguments = arguments_of(format)
    grad_output = draw_grad_output(L19, arguments)
    allow_tf32(allowed)
    expected = run(L19.function, arguments, grad_output)

    def changes(**arguments):
        allow_tf32(allowed)
        output = L19.function(**arguments)
        allow_tf32(not allowed)
        return output

    results = run(changes, arguments, grad_output)
    for name in expected:
        assert torch.equal(results[name], expected[name]), name
    allow_tf32(not allowed)
    assert not torch.equal(L19.function(**arguments), expected["output"])


@pytest.mark.parametrize(
    "format, allowed",
    [(torch.contiguous_format, True), (torch.channels_last, True), (torch.channels_last, False)],
    ids=str,
)
def test_compiled(on_hopper, allow_tf32, few_at_a_time, format, allowed):
    """One graph, whose fakes come to the same answer; bit for bit what it is without, in the arguments' formats."""
    torch._dynamo.reset()
    allow_tf32(allowed)
    compiled = torch.compile(L19.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, pixels in ((5, (6, 7)), (3, (6, 4))):
        arguments = arguments_of(format, dataclasses.replace(PROBLEM, rows=rows, pixels=pixels))
        arguments["weight"] = arguments["weight"].contiguous(memory_format=format)
        grad_output = draw_grad_output(L19, arguments)
        expected, results = run(L19.function, arguments, grad_output), run(compiled, arguments, grad_output)
        for name in expected:
            assert torch.equal(results[name], expected[name]), name
            assert results[name].stride() == expected[name].stride(), name
        assert results["weight"].stride() == arguments["weight"].stride()
    torch._dynamo.reset()


@pytest.mark.parametrize("contraction", [nn.ConvTranspose2d, nn.Conv2d])
def test_a_transposed_convolution_stays_closed(on_hopper, contraction):
    """In a compiled graph, where the kernels here win more than an open norm; a plain one is PyTorch's there."""
    opened = Opened(nn.Sequential(contraction(16, 16, 3), nn.GELU(), nn.GroupNorm(4, 16)).bfloat16())
    input = torch.randn(2, 16, 6, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    opened(input.requires_grad_()).sum().backward()
    text = "gelu -> group_norm -> mul -> add"
    is_closed = contraction is nn.ConvTranspose2d
    assert opened.chains == [f"conv_transpose2d -> add -> {text}" if is_closed else text]
    assert ("normfuse.statistics.default" in opened.names()) is not is_closed


def test_gradients_only_where_asked_for(on_hopper, allow_tf32, few_at_a_time):
    arguments = arguments_of(torch.channels_last)
    grad_output = draw_grad_output(L19, arguments)
    everything = run(L19.function, arguments, grad_output)
    for name in ("input", "weight", "conv_bias"):
        leaf = arguments[name].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(L19.function(**{**arguments, name: leaf}), leaf, grad_output)
        assert torch.equal(gradient, everything[name]), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite(on_hopper, allow_tf32, few_at_a_time, value):
    """In a sample or in its gradient, it shows in the same results as PyTorch's."""
    arguments = arguments_of(torch.channels_last)
    check_not_finite(L19, arguments, draw_grad_output(L19, arguments), value)


@by_format
@pytest.mark.parametrize("name", ["conv2d_group_norm", "conv_transpose2d_group_norm"])
def test_biases_without_statistics(on_hopper, name, format):
    """A tensor before the norm takes the statistics from the convolution, which adds both biases all the same."""
    generator = torch.Generator().manual_seed(0)
    input, added = (torch.randn(2, 8, 5, 6, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(8, 8, 3, 3, generator=generator).bfloat16()
    bias, more = torch.randn(2, 8, generator=generator).bfloat16()
    input = input.contiguous(memory_format=format)

    def apply(functions, input, weight, bias, more, added):
        return getattr(functions, name)(input, weight, bias, 2, padding=1, before=(p.add(more), p.add(added)))

    given = input, weight, bias, more, added
    exact = apply(ops.reference, *(each.double() for each in given))
    torch.testing.assert_close(apply(ops, *given).double(), exact, rtol=1e-2, atol=1e-2)


def test_partial_statistics_are_those_of_each_span(on_hopper):
    """None is left as it was."""
    input, weight = torch.randn(5, 8, 6, 7), torch.randn(8, 24, 3, 3)
    chain, absent = CONV_TRANSPOSE2D_GELU_GROUP_NORM, (None,) * 4
    given = Call(chain, absent, (False, True, False, False), 3, geometry=GEOMETRY), input, weight, absent
    whole = direct_convolution.forward(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_convolution, "_BYTES_AT_ONCE", 1)
        z, partials = direct_convolution.forward(*given)
    assert isinstance(partials, PartialStatistics) and torch.equal(z, whole[0])
    assert torch.equal(partials.means, whole[1].means) and torch.equal(partials.m2s, whole[1].m2s)
