"""Promise: on a GPU, at real sizes, L19 and the convolutions' kernels keep what the interpreter's tests promise.

As in ``tests/test_gpu.py``, uninitialised memory is NaN, and what is "small" is for compute-sanitizer.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import ops
from autotune_configs import lookup
from ops import direct_convolution, precision
from ops.convolution import check_conv_transpose2d
from tests import gpu
from tests.accuracy import check, check_inference, check_not_finite, draw_grad_output, run
from tests.chains import DTYPES, L19, Problem, chain_id
from tests.gpu import DEVICE, arguments_of, assert_same_bits
from triton_kernels import convolution, convolution_hopper, weight_gradient_hopper
from triton_kernels.convolution import ConvolutionConfig, StrideOneConvolution
from triton_kernels.hopper import runs_hopper_convolutions
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.pointwise import FLOAT16_GELU, GELU
from triton_kernels.tf32 import round_to_tf32
from triton_kernels.weight_gradient_hopper import WeightGradientConfig

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]

FORMATS = (torch.contiguous_format, torch.channels_last)
#: L19's problems and the rest of their geometry: 64 channels are a block of Hopper's kernels, and 3 x 3 the target's
#: taps; 37 channels are no multiple of 16 bytes, and cuDNN computes strides and groups. Of float32 images in
#: contiguous format, only "64-64-3x3" and those of its size are so many pixels and channels that PyTorch takes TF32.
CONVOLUTIONS = {
    "64-64-3x3": (Problem(4, 64, 8, 8, pixels=(64, 72)), {}),
    "40-72-2x3-padding": (Problem(4, 40, 9, 8, pixels=(40, 56), kernel=(2, 3)), {"padding": (1, 2)}),
    "128-64-1x1": (Problem(4, 128, 8, 8, pixels=(33, 40), kernel=(1, 1)), {"approximate": "tanh"}),
    "dilation": (Problem(4, 64, 8, 8, pixels=(37, 48)), {"dilation": 2}),
    "odd-size": (Problem(5, 64, 4, 16, pixels=(61, 47)), {}),
    "odd-channels": (Problem(4, 37, 4, 11, pixels=(29, 31)), {"padding": 1}),
    "64-64-1x1": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(1, 1)), {}),
    "wide-taps": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(1, 5)), {}),
    "5x5": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(5, 5)), {"padding": 2}),
    "32-40-4x4": (Problem(3, 32, 4, 10, pixels=(21, 27), kernel=(4, 4)), {"padding": 1}),
    "64-136-2x2": (Problem(2, 64, 8, 17, pixels=(91, 93), kernel=(2, 2)), {}),
    "output-padding": (Problem(4, 64, 8, 8, pixels=(64, 72)), {"dilation": 2, "output_padding": (1, 0)}),
    "stride": (Problem(4, 64, 8, 8, pixels=(24, 31)), {"stride": 2, "padding": 1, "output_padding": (0, 1)}),
    "groups": (Problem(4, 64, 8, 8, pixels=(33, 34), conv_groups=2), {}),
}
#: One image, of fewer pixels than most tiles have.
SMALL_CONVOLUTIONS = {
    "64-64-3x3": (Problem(1, 64, 8, 8, pixels=(9, 11)), {}),
    "40-72-2x3-padding": (Problem(1, 40, 9, 8, pixels=(5, 16), kernel=(2, 3)), {"padding": (1, 2)}),
    "128-64-1x1": (Problem(1, 128, 8, 8, pixels=(3, 2), kernel=(1, 1)), {}),
    "odd-channels": (Problem(1, 3, 1, 5, pixels=(7, 5)), {"dilation": (1, 2)}),
    # Their strides are those of both memory formats, and not what the copy engine takes.
    "single-pixel": (Problem(4, 64, 8, 8, pixels=(1, 1)), {}),
}

by_format = pytest.mark.parametrize("format", FORMATS, ids=str)
by_short_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


@pytest.fixture
def on_hopper():
    if not runs_hopper_convolutions(torch.device(DEVICE, torch.cuda.current_device())):
        pytest.skip("needs compute capability 9.0 and a Triton with its copies")


def image_arguments(problem, geometry, dtype, format, **options):
    arguments = {**arguments_of(L19, problem, dtype, **options), **geometry}
    return {**arguments, "input": arguments["input"].to(memory_format=format)}


def check_images(arguments, format):
    """The accuracy rule for L19, with a gradient in either memory format, and the formats of what it returns."""
    for gradient_format in FORMATS:
        grad_output = draw_grad_output(L19, arguments).contiguous(memory_format=gradient_format)
        check(L19, arguments, grad_output)
    check_inference(L19, arguments)
    results = run(L19.function, arguments, grad_output)
    for name in ("output", "input"):
        assert results[name].is_contiguous(memory_format=format), name


# Small sizes, for compute-sanitizer and as a quick look.


@by_dtype
@by_format
@pytest.mark.parametrize("geometry", [{}, {"stride": 2, "padding": 1, "approximate": "tanh"}], ids=str)
def test_small_images(geometry, format, dtype):
    """Statistics of several blocks of a group, in both memory formats."""
    arguments = arguments_of(L19, Problem(rows=6, depth=16, groups=4, group_size=8, pixels=(19, 23)), dtype)
    arguments.update(geometry, input=arguments["input"].contiguous(memory_format=format))
    check(L19, arguments)
    check_inference(L19, arguments)
    assert L19.function(**arguments).is_contiguous(memory_format=format)


@by_dtype
@by_format
@pytest.mark.parametrize("name", SMALL_CONVOLUTIONS)
def test_small_convolutions(name, format, dtype):
    check_images(image_arguments(*SMALL_CONVOLUTIONS[name], dtype, format), format)


@by_format
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_strides_of_a_fused_model(weight_format, format):
    """PyTorch's, so that a view works where it does behind the plain model."""
    layers = torch.nn.ConvTranspose2d(64, 64, 3), torch.nn.GELU(), torch.nn.GroupNorm(8, 64)
    model = torch.nn.Sequential(*layers).to(DEVICE, torch.bfloat16).to(memory_format=weight_format)
    input = torch.randn(4, 64, 16, 18, dtype=torch.bfloat16, device=DEVICE).to(memory_format=format)
    expected = model(input)
    assert ops.fuse(model).replaced
    result = model(input)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, atol=0.1, rtol=0.1)
    result.sum().backward()
    assert model[0].weight.grad.isfinite().all()


# Real sizes.


@by_dtype
@by_format
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, format, dtype):
    check_images(image_arguments(*CONVOLUTIONS[name], dtype, format), format)


@by_dtype
@by_format
def test_images_of_the_target_size(format, dtype):
    """More than are copied or differentiated at a time."""
    arguments = image_arguments(Problem(20, 64, 8, 8, pixels=(256, 256)), {}, dtype, format)
    check(L19, arguments, draw_grad_output(L19, arguments).contiguous(memory_format=format))


@by_format
@pytest.mark.parametrize("name", ["64-64-3x3", "64-64-1x1"])
def test_float32_images_take_the_kernels_for_hopper(on_hopper, name, format):
    """In either format, where PyTorch allows TF32; at these sizes its own contiguous convolutions are TF32 too."""
    problem, options = CONVOLUTIONS[name]
    input, weight = (image_arguments(problem, {}, torch.float32, format)[each] for each in ("input", "weight"))
    geometry = check_conv_transpose2d(input, weight, 1, 0, 0, 1, 1)
    assert not options and precision.convolutions_allow_tf32()
    assert direct_convolution.takes(input, weight, geometry, True)
    assert not direct_convolution.takes(input, weight, geometry, False)


@by_format
def test_convolutions_in_float32(format):
    """Where PyTorch is set to use no TF32, as in its own convolutions; what is set later changes no gradient."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    grad_output = draw_grad_output(L19, arguments)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_images(arguments, format)
        in_float32 = run(L19.function, arguments, grad_output)
    as_tf32 = run(L19.function, arguments, grad_output)
    difference = (as_tf32["output"] - in_float32["output"]).norm() / in_float32["output"].norm()
    assert 1e-5 < difference < 1e-3

    def set_later(**arguments):
        output = L19.function(**arguments)
        torch.backends.cudnn.allow_tf32 = False
        return output

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        results = run(set_later, arguments, grad_output)
    if runs_hopper_convolutions(torch.device(DEVICE, torch.cuda.current_device())):
        assert_same_bits(results, as_tf32)


@by_format
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_float32_images_that_are_not_finite(format, value):
    """They show in the same samples, and in the same gradients, as PyTorch's."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    check_not_finite(L19, arguments, draw_grad_output(L19, arguments), value)


@by_format
def test_more_pixels_than_int32_counts(format, monkeypatch):
    """The last images of a batch whose result has more than 2**31 elements are those of the same images alone.

    Bit by bit, so with settings that do not depend on the batch, as a table's do, and with them the order of sums.
    """
    monkeypatch.setattr(lookup, "_entries", lambda gpu: {})
    lookup._config.cache_clear()
    batch, last, needed = 520, 3, 60 * 2**30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed} bytes of free GPU memory, has {torch.cuda.mem_get_info()[0]}")
    alone = image_arguments(Problem(last, 64, 8, 8, pixels=(256, 256)), {}, torch.bfloat16, format)
    check_inference(L19, alone)
    grad_output = draw_grad_output(L19, alone)
    expected = run(L19.function, alone, grad_output)
    shape = (batch, *alone["input"].shape[1:])
    input = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE, memory_format=format).normal_()
    input[-last:] = alone["input"]
    leaf = input.requires_grad_()
    output = L19.function(**{**alone, "input": leaf})
    assert output.numel() > 2**31
    assert torch.equal(output[-last:], expected["output"])
    full_grad_output = torch.zeros_like(output)
    full_grad_output[-last:] = grad_output
    (gradient,) = torch.autograd.grad(output, leaf, full_grad_output)
    assert torch.equal(gradient[-last:], expected["input"])
    assert not gradient[:-last].any()
    lookup._config.cache_clear()


# Repeated, compiled, and in a module.


@by_dtype
@by_format
@pytest.mark.parametrize("name", ["64-64-3x3", "odd-size", "odd-channels", "stride"])
def test_repeated_convolutions_are_equal_bit_by_bit(name, format, dtype):
    """Of more images, so that all of a GPU has work."""
    problem, geometry = CONVOLUTIONS[name]
    arguments = image_arguments(dataclasses.replace(problem, rows=24), geometry, dtype, format)
    grad_output = draw_grad_output(L19, arguments)
    poisoned = run(L19.function, arguments, grad_output)
    torch.use_deterministic_algorithms(False)
    for _ in range(2):
        assert_same_bits(run(L19.function, arguments, grad_output), poisoned)


@by_format
@pytest.mark.parametrize("allowed", [True, False])
def test_float32_images_compiled_as_one_graph(allowed, format):
    """With TF32 or without, as it is set while the graph is compiled."""
    arguments = image_arguments(*CONVOLUTIONS["64-64-3x3"], torch.float32, format)
    grad_output = draw_grad_output(L19, arguments)
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed, deterministic=True):
        expected = run(L19.function, arguments, grad_output)
        results = run(torch.compile(L19.function, fullgraph=True), arguments, grad_output)
    assert_same_bits(results, expected)
    for name in expected:
        assert results[name].stride() == expected[name].stride(), name


def test_image_module_trains():
    torch.manual_seed(0)
    module = ops.ConvTranspose2dGeluGroupNorm(64, 64, 3, 1, 8, 8).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    input = torch.randn(8, 64, 32, 32, device=DEVICE).to(torch.bfloat16)
    target = torch.randn_like(module(input))
    losses = []
    for _ in range(5):
        loss = (module(input) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


# The kernels themselves.


def among_others(shape, dtype, format, *, fill=math.nan):
    """Memory for images of this shape between two more, all of them filled; and those between."""
    memory = torch.full((shape[0] + 2, *shape[1:]), fill, dtype=dtype, device=DEVICE)
    memory = memory.contiguous(memory_format=format)
    return memory, memory[1:-1]


def random_images(shape, dtype, generator, format=torch.channels_last):
    """Between images of NaN, which nothing may read."""
    _, images = among_others(shape, dtype, format)
    return images.copy_(torch.randn(shape, generator=generator, device=DEVICE))


def forward_taps(problem, geometry) -> StrideOneConvolution:
    """A transposed convolution as a convolution by its taps in reverse."""
    dilation, padding = geometry.get("dilation", (1, 1)), geometry.get("padding", (0, 0))
    sizes = zip(problem.kernel, dilation, padding, strict=True)
    return StrideOneConvolution(problem.kernel, dilation, tuple(pad - (size - 1) * step for size, step, pad in sizes))


def check_convolution(
    problem, geometry, dtype, out_format, launch, tiles_of, *, bias=True, statistics=True, tf32=False, **options
):
    """The convolution and its partial statistics against float64, with nothing written elsewhere.

    ``launch(input, weight, bias, taps, output=, partials=)`` is what is tested; ``tiles_of(input, output, taps)`` are
    its partial statistics of a sample. The sums are float32's; rounding them is within half an epsilon of each. With
    ``tf32`` float32 operands hold TF32's numbers, of which the products are exact.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    input = random_images((problem.rows, problem.depth, *problem.pixels), dtype, generator, **options)
    if tf32:
        input.copy_(round_to_tf32(input))
    shape = (problem.depth, problem.channels, *problem.kernel)
    weight = torch.randn(shape, generator=generator, device=DEVICE) / math.sqrt(problem.depth * math.prod(shape[2:]))
    weight = round_to_tf32(weight) if tf32 else weight.to(dtype)
    vector = torch.randn(problem.channels, generator=generator, device=DEVICE).to(dtype) if bias else None
    exact = F.conv_transpose2d(*(t if t is None else t.double() for t in (input, weight, vector)), **geometry)
    taps = weight.flip(2, 3).permute(2, 3, 1, 0).contiguous()
    memory, output = among_others(exact.shape, dtype, out_format)
    convolved = forward_taps(problem, geometry)
    partials = None
    if statistics:
        tiles = tiles_of(input, output, convolved)
        partials = PartialStatistics.empty(problem.rows, tiles, problem.channels, output.device)
        for each in (partials.counts, partials.means, partials.m2s):
            each.fill_(math.nan)
    launch(input, taps, vector, convolved, output=output, partials=partials)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    torch.testing.assert_close(output.double(), exact, rtol=1.01 * rounding, atol=5e-5)
    assert memory[0].isnan().all() and memory[-1].isnan().all()
    if statistics:
        pixels = exact[0, 0].numel()
        assert torch.equal(partials.counts.sum(1), torch.full_like(partials.counts[:, 0], pixels))
        mean, rstd = partials.merge(problem.groups, pixels, 1e-5).double()
        activated = F.gelu(output.double()).reshape(len(mean), -1)
        torch.testing.assert_close(mean, activated.mean(1), rtol=0, atol=5e-6)
        torch.testing.assert_close(rstd, (activated.var(1, correction=0) + 1e-5).rsqrt(), rtol=2e-5, atol=0)
    return output


def launch_hopper(input, weight, bias, taps, *, output, partials):
    assert convolution_hopper.supports(input, output, taps)
    activation = GELU if input.dtype == torch.float32 else FLOAT16_GELU
    options = {"output": output, "partials": partials, "activation": activation}
    convolution_hopper.convolution_hopper(input, weight, bias, taps, **options)


#: (problem, geometry). Contiguous results go through the copy engine where rows are whole multiples of 16 bytes.
HOPPER_CONVOLUTIONS = {
    "small": (Problem(2, 64, 4, 16, pixels=(6, 14)), {}),
    "small-wide-taps": (Problem(3, 64, 4, 16, pixels=(3, 12), kernel=(1, 5)), {}),
    "3x3": (Problem(3, 64, 4, 16, pixels=(21, 30)), {}),
    "40-72-2x3-padding": (Problem(3, 40, 6, 12, pixels=(21, 40), kernel=(2, 3)), {"padding": (1, 1)}),
    "40-72-3x2-dilation": (Problem(3, 40, 6, 12, pixels=(21, 39), kernel=(3, 2)), {"dilation": (2, 1)}),
    "128-64-1x1": (Problem(3, 128, 4, 16, pixels=(21, 40), kernel=(1, 1)), {}),
    "more-tiles-than-programs": (Problem(5, 64, 4, 16, pixels=(254, 254)), {}),
}


def check_hopper_convolution(problem, geometry, dtype, out_format, **options):
    launcher = launch_hopper, convolution_hopper.partial_count
    return check_convolution(problem, geometry, dtype, out_format, *launcher, tf32=dtype == torch.float32, **options)


@by_dtype
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize("name", HOPPER_CONVOLUTIONS)
def test_convolution_hopper(on_hopper, name, out_format, dtype):
    problem = (*HOPPER_CONVOLUTIONS[name], dtype, out_format)
    output = check_hopper_convolution(*problem)
    assert torch.equal(check_hopper_convolution(*problem), output)
    assert torch.equal(check_hopper_convolution(*problem, statistics=False), output)
    check_hopper_convolution(*problem, bias=False)


@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@pytest.mark.parametrize("pixels", [(21, 25), (7, 5)], ids=["21x25", "small"])
@pytest.mark.parametrize("channels", [64, 44])
def test_convolution_hopper_of_odd_sizes(on_hopper, channels, pixels, out_format):
    """float32 results, which the copy engine does not write, may have any size and any number of channels."""
    problem = Problem(3, 64, 4, channels // 4, pixels=pixels)
    check_hopper_convolution(problem, {}, torch.float32, out_format)


@by_dtype
@pytest.mark.parametrize("out_format", FORMATS, ids=str)
@by_format
@pytest.mark.parametrize("pixels", [(21, 25), (3, 2)], ids=["21x25", "small"])
def test_portable_convolution(pixels, format, out_format, dtype):
    problem = Problem(3, 37, 4, 11, pixels=pixels, kernel=(2, 3))
    config = ConvolutionConfig.fit(problem.depth, problem.channels)

    def launch(*arguments, **options):
        convolution.convolution(*arguments, config, activation=GELU, **options)

    def tiles_of(input, output, taps):
        return config.tiles(output[0, 0].numel())

    geometry = {"padding": (1, 0), "dilation": (1, 2)}
    check_convolution(problem, geometry, dtype, out_format, launch, tiles_of, format=format)


#: (problem, geometry): which operand has fewer tiles, and so which is cut into them, differs.
WEIGHT_GRADIENTS = {
    "small": (Problem(2, 64, 1, 64, pixels=(4, 5)), {}),
    "3x3": (Problem(3, 64, 1, 64, pixels=(20, 27)), {}),
    "64x32": (Problem(3, 64, 1, 64, pixels=(64, 32)), {}),
    "40-72-dilation": (Problem(3, 40, 1, 72, pixels=(20, 27)), {"dilation": (2, 2), "padding": (1, 2)}),
    "128-64-2x3": (Problem(3, 128, 1, 64, pixels=(20, 27), kernel=(2, 3)), {"padding": (1, 1)}),
    "72-40-1x1": (Problem(3, 72, 1, 40, pixels=(20, 27), kernel=(1, 1)), {}),
    "64-128-3x1-dilation": (Problem(5, 64, 1, 128, pixels=(20, 27), kernel=(3, 1)), {"dilation": (2, 1)}),
    "8-136-3x2": (Problem(1, 8, 1, 136, pixels=(20, 27), kernel=(3, 2)), {}),
    "smaller-gradient": (Problem(3, 64, 1, 64, pixels=(33, 40)), {"padding": (2, 2)}),
}


@by_short_dtype
@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_weight_gradient_hopper(on_hopper, name, columns, dtype):
    """At once and a few samples at a time, from the whole gradient and from a scratch of those samples alone."""
    problem, geometry = WEIGHT_GRADIENTS[name]
    config = WeightGradientConfig(columns)
    taps = forward_taps(problem, geometry)
    generator = torch.Generator(DEVICE).manual_seed(0)
    images = random_images((problem.rows, problem.depth, *problem.pixels), dtype, generator)
    weight = torch.zeros(problem.depth, problem.channels, *problem.kernel, dtype=torch.float64, device=DEVICE)
    output = F.conv_transpose2d(images.double(), weight.requires_grad_(), **geometry)
    z_gradient = random_images(output.shape, dtype, generator)
    (exact,) = torch.autograd.grad(output, weight, z_gradient.double())
    exact = exact.flip(2, 3).permute(2, 3, 1, 0)
    input, gradient = images.permute(0, 2, 3, 1), z_gradient.permute(0, 2, 3, 1)
    assert weight_gradient_hopper.supports(input, gradient, problem.kernel, taps.dilation, config)

    def result(samples, scratch):
        """``samples`` at a time; where there is a ``scratch``, the gradient's are copied to its beginning."""
        shape = weight_gradient_hopper.partials_shape(input, gradient, problem.kernel)
        partials = torch.full(shape, math.nan, device=DEVICE)
        for first in range(0, problem.rows, samples):
            count = min(samples, problem.rows - first)
            if scratch is not None:
                scratch.fill_(math.nan)[:count] = gradient[first : first + count]
            weight_gradient_hopper.convolution_weight_gradient(
                input,
                gradient if scratch is None else scratch,
                partials,
                input_first=first,
                gradient_first=first if scratch is None else 0,
                count=count,
                kernel_size=problem.kernel,
                dilation=taps.dilation,
                shift=taps.shift,
                accumulate=first > 0,
                config=config,
            )
        return weight_gradient_hopper.finish(partials, input, gradient, kernel_size=problem.kernel, config=config)

    for samples, scratch in ((problem.rows, None), (2, None), (2, torch.empty_like(gradient[:2]))):
        sums = result(samples, scratch)
        assert sums.dtype == torch.float32 and sums.shape == exact.shape
        assert (sums - exact).norm() <= 2e-5 * exact.norm()  # float32 sums of thousands of terms
        assert torch.equal(result(samples, scratch), sums)


def test_small_weight_gradient_of_no_samples(on_hopper):
    """It zeroes the sums, or leaves them as they are."""
    input = torch.randn(2, 4, 5, 64, device=DEVICE).to(torch.bfloat16)
    partials = torch.full(weight_gradient_hopper.partials_shape(input, input, (1, 1)), math.nan, device=DEVICE)
    options = {"kernel_size": (1, 1), "dilation": (1, 1), "shift": (0, 0), "config": WeightGradientConfig()}
    for accumulate in (False, True):
        weight_gradient_hopper.convolution_weight_gradient(
            input, input, partials, input_first=0, gradient_first=0, count=0, accumulate=accumulate, **options
        )
        assert not partials.any()
