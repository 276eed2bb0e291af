"""Promise: on a GPU, at real sizes, L19 keeps what the interpreter's tests promise.

As in ``tests/test_gpu.py``, uninitialised memory is NaN, and what is "small" is for compute-sanitizer. The kernels of
its convolutions are tested in ``tests/test_gpu_convolutions.py``.
"""

import dataclasses
import math

import pytest
import torch

import ops
from autotune_configs import kernels, lookup
from ops import convolution, direct_convolution, precision
from tests import gpu
from tests.accuracy import check, check_inference, check_not_finite, draw_grad_output, run
from tests.chains import DTYPES, L19, Problem, chain_id
from tests.gpu import DEVICE, FORMATS, RUNS_HOPPER_KERNELS, arguments_of, assert_same_bits, by_format, on_hopper

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]

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

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


def image_arguments(problem, geometry, dtype, format, **options):
    arguments = {**arguments_of(L19, problem, dtype, **options), **geometry}
    return {**arguments, "input": arguments["input"].to(memory_format=format)}


def check_images(arguments, format, chain=L19):
    """The accuracy rule, with a gradient in either memory format, and the formats of what the chain returns."""
    for gradient_format in FORMATS:
        grad_output = draw_grad_output(chain, arguments).contiguous(memory_format=gradient_format)
        check(chain, arguments, grad_output)
    check_inference(chain, arguments)
    results = run(chain.function, arguments, grad_output)
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
    report = ops.fuse(model, everything=True)
    for _ in range(2):
        result = model(input)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, atol=0.1, rtol=0.1)
    assert report.chains
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


@on_hopper
@by_format
@pytest.mark.parametrize("name", ["64-64-3x3", "64-64-1x1"])
def test_float32_images_take_the_kernels_for_hopper(name, format):
    """In either format, where PyTorch allows TF32; at these sizes its own contiguous convolutions are TF32 too."""
    problem, options = CONVOLUTIONS[name]
    input, weight = (image_arguments(problem, {}, torch.float32, format)[each] for each in ("input", "weight"))
    geometry = convolution.check(True, input, weight, 1, 0, 0, 1, 1)
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
    if RUNS_HOPPER_KERNELS:
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

    Bit by bit, so with settings and a number of programs for each image that do not depend on the batch, as the
    heuristic's do, and with them the order of sums.
    """
    batch, last, needed = 520, 3, 60 * 2**30
    monkeypatch.setattr(lookup, "_entries", lambda gpu: {})
    passes, sums = kernels.heuristic_image_config, kernels.heuristic_image_sums_config

    def sums_of_last(name, size, images, *others):
        config = sums(name, size, last, *others)
        return dataclasses.replace(config, programs=config.programs * images // last)

    monkeypatch.setattr(kernels, "heuristic_image_config", lambda name, _, *sizes: passes(name, last, *sizes))
    monkeypatch.setattr(kernels, "heuristic_image_sums_config", sums_of_last)
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
