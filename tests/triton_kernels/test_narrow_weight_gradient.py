"""Promise: the kernel's weight gradient of a narrow convolution is float64's, rounded, for all geometries."""

import math

import pytest
import torch

from triton_kernels import narrow_weight_gradient as module
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
#: B, channels of input and output, sizes, taps, stride, padding, dilation.
PROBLEMS = {
    "first": (2, 3, 20, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "gray": (2, 1, 8, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "narrow": (1, 8, 8, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strides": (3, 4, 6, (9, 70), (3, 5), (2, 3), (1, 2), (1, 1)),
    "dilated": (1, 2, 4, (12, 15), (3, 2), (1, 1), (2, 0), (3, 4)),
    "uneven": (2, 5, 7, (6, 9, 8), (2, 3, 1), (2, 1, 3), (1, 0, 0), (1, 2, 1)),
    "padding beyond the image": (1, 3, 4, (3, 2), (3, 3), (1, 1), (3, 4), (1, 1)),
    "many outputs": (1, 2, 150, (4, 5), (2, 2), (1, 1), (0, 0), (1, 1)),
    "many columns": (1, 32, 3, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "many single columns": (1, 3, 4, (9, 9), (7, 7), (2, 2), (3, 3), (1, 1)),
    "a pixel": (1, 3, 4, (3, 3), (3, 3), (1, 1), (0, 0), (1, 1)),
    "long lines": (1, 2, 3, (3, 200), (3, 3), (1, 1), (1, 1), (1, 1)),
}


def gradient_of(problem, dtype, is_contiguous=False):
    """Of the kernel, and of float64."""
    B, C, O, sizes, taps, stride, padding, dilation = problem  # noqa: E741
    dims = len(sizes)
    torch.manual_seed(0)
    format = torch.contiguous_format if is_contiguous else FORMATS[dims]
    image = torch.randn(B, C, *sizes).to(dtype).contiguous(memory_format=format)
    weight = torch.randn(O, C, *taps, dtype=torch.double)
    geometry = stride, padding, dilation, False, [0] * dims, 1
    output = torch.ops.aten.convolution(image.double(), weight, None, *geometry)
    gradient = torch.randn(output.shape).to(dtype).contiguous(memory_format=format)
    wanted = [False, True, False]
    backward = torch.ops.aten.convolution_backward
    truth = backward(gradient.double(), image.double(), weight, None, *geometry, wanted)[1]
    rows = zip(sizes, output.shape[2:], taps, stride, padding, dilation, strict=True)
    axes = [ConvolvedAxis(1, 1)] * (3 - dims) + [ConvolvedAxis(*row) for row in rows]
    target = torch.full((O, math.prod(taps), C), math.nan, dtype=dtype)
    narrow_weight_gradient(gradient.flatten(2), image.flatten(2), target, tuple(axes))
    return target.view(O, *taps, C).movedim(-1, 1).double(), truth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_values(problem, dtype):
    found, truth = gradient_of(problem, dtype)
    torch.testing.assert_close(found, truth, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("name", ["first", "narrow"])  # an odd number of pixels, and an even one
def test_other_strides(name):
    found, truth = gradient_of(PROBLEMS[name], torch.float16, is_contiguous=True)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize("problem", [PROBLEMS["strides"], (1, 32, 150, *PROBLEMS["many columns"][3:])], ids=str)
def test_shares_of_the_pixels(problem, programs, monkeypatch):
    """However many there are, all pixels count once. There may be fewer programs than tiles of the result."""
    monkeypatch.setattr(module, "_PROGRAMS_PER_MULTIPROCESSOR", programs)
    found, truth = gradient_of(problem, torch.float16)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)


def test_no_samples():
    found, _ = gradient_of((0, *PROBLEMS["first"][1:]), torch.float16)
    assert (found == 0).all()


def test_samples_far_from_each_other():
    """Beyond what 32 bits hold."""
    memory = torch.empty(2**31 + 32, dtype=torch.float16)  # of which few pages are touched
    image = memory.as_strided((3, 2, 4, 4), (2**30, 1, 8, 2))
    near = torch.randn(3, 2, 4, 4).half().contiguous(memory_format=torch.channels_last)
    image.copy_(near)
    gradient = torch.randn(3, 2, 4, 4).half().contiguous(memory_format=torch.channels_last)
    axes = ConvolvedAxis(1, 1), *[ConvolvedAxis(4, 4, 3, 1, 1)] * 2
    results = [torch.zeros(2, 9, 2).half() for _ in range(2)]
    for each, target in zip((image, near), results, strict=True):
        narrow_weight_gradient(gradient.flatten(2), each.flatten(2), target, axes)
    assert torch.equal(*results)


@pytest.mark.parametrize("width", [4, 1100])
def test_infinite_values(width):
    """What lies outside the image is no operand: 0 * inf would be NaN."""
    image = torch.full((1, 3, 4, width), math.inf).bfloat16().contiguous(memory_format=torch.channels_last)
    gradient = torch.ones(1, 2, 4, width).bfloat16().contiguous(memory_format=torch.channels_last)
    axes = ConvolvedAxis(1, 1), ConvolvedAxis(4, 4, 3, 1, 1), ConvolvedAxis(width, width, 3, 1, 1)
    target = torch.zeros(2, 9, 3).bfloat16()
    narrow_weight_gradient(gradient.flatten(2), image.flatten(2), target, axes)
    assert (target == math.inf).all()
