"""Promise: the kernel's convolution of a narrow image is float64's, rounded, for all geometries."""

import math

import pytest
import torch

from tests.triton_kernels.test_narrow_weight_gradient import FORMATS, PROBLEMS
from triton_kernels.narrow_convolution import narrow_convolution
from triton_kernels.narrow_weight_gradient import ConvolvedAxis

MORE = {
    "runs of four": (2, 12, 5, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "wide runs": (1, 24, 9, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "two taps": (1, 1, 3, (4, 5), (2, 1), (1, 1), (0, 0), (1, 1)),
    "more taps than a step has": (1, 3, 8, (20, 20), (9, 9), (2, 2), (4, 4), (1, 1)),
    "cropped": (1, 3, 4, (9, 9), (3, 3), (1, 1), (-1, -2), (1, 1)),
    "cropped along one tap": (1, 3, 4, (9, 9), (3, 1), (1, 1), (1, -2), (1, 1)),
}


def convolution_of(problem, dtype, image=None):
    """Of the kernel, and of float64."""
    B, C, O, sizes, taps, stride, padding, dilation = problem  # noqa: E741
    dims = len(sizes)
    torch.manual_seed(0)
    image = torch.randn(B, C, *sizes).to(dtype) if image is None else image
    image = image.contiguous(memory_format=FORMATS[dims])
    weight = torch.randn(O, C, *taps).to(dtype)
    around = [each for pad in reversed(padding) for each in (pad, pad)]
    padded = torch.nn.functional.pad(image.double(), around)
    truth = torch.ops.aten.convolution(
        padded, weight.double(), None, stride, [0] * dims, dilation, False, [0] * dims, 1
    )
    rows = zip(sizes, truth.shape[2:], taps, stride, padding, dilation, strict=True)
    axes = [ConvolvedAxis(1, 1)] * (3 - dims) + [ConvolvedAxis(*row) for row in rows]
    target = torch.full((truth[:, 0].numel(), O), math.nan, dtype=dtype)
    matrix = weight.flatten(2).permute(2, 1, 0).flatten(0, 1).contiguous()
    narrow_convolution(image.movedim(1, -1).flatten(1, -2), matrix, target, tuple(axes))
    return target.view(B, *truth.shape[2:], O).movedim(-1, 1).double(), truth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", (PROBLEMS | MORE).values(), ids=PROBLEMS | MORE)
def test_values(problem, dtype):
    found, truth = convolution_of(problem, dtype)
    torch.testing.assert_close(found, truth, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("name", ["gray", "narrow", "dilated", "uneven", "padding beyond the image"])
def test_taps_the_other_way_round(name):
    """At stride 1 that is the input's gradient."""
    B, C, O, sizes, taps, _, padding, dilation = PROBLEMS[name]  # noqa: E741
    dims = len(sizes)
    torch.manual_seed(0)
    image, weight = torch.randn(B, C, *sizes, dtype=torch.double), torch.randn(O, C, *taps).half()
    geometry = [1] * dims, padding, dilation, False, [0] * dims, 1
    output = torch.ops.aten.convolution(image, weight.double(), None, *geometry)
    gradient = torch.randn(output.shape).half().contiguous(memory_format=FORMATS[dims])
    wanted = [True, False, False]
    backward = torch.ops.aten.convolution_backward
    truth = backward(gradient.double(), image, weight.double(), None, *geometry, wanted)[0]
    turned = [1] * dims, [-each for each in padding], [-each for each in dilation]
    rows = zip(output.shape[2:], sizes, taps, *turned, strict=True)
    axes = [ConvolvedAxis(1, 1)] * (3 - dims) + [ConvolvedAxis(*row) for row in rows]
    target = torch.full((image[:, 0].numel(), C), math.nan, dtype=torch.half)
    matrix = weight.flatten(2).permute(2, 0, 1).flatten(0, 1).contiguous()
    narrow_convolution(gradient.movedim(1, -1).flatten(1, -2), matrix, target, tuple(axes))
    found = target.view(B, *sizes, C).movedim(-1, 1).double()
    torch.testing.assert_close(found, truth, rtol=5e-4, atol=1e-5 * truth.abs().max().item())


def test_no_samples():
    found, _ = convolution_of((0, *PROBLEMS["first"][1:]), torch.float16)
    assert found.shape[0] == 0


def test_infinite_values():
    """A pixel's are in those that have a tap there, and make none NaN."""
    image = torch.ones(1, 3, 9, 9)
    image[:, :, 4, 4] = math.inf
    found, _ = convolution_of((1, 3, 20, (9, 9), (3, 3), (1, 1), (1, 1), (1, 1)), torch.float16, image.half())
    is_near = torch.zeros(9, 9, dtype=torch.bool)
    is_near[3:6, 3:6] = True
    assert found[..., ~is_near].isfinite().all() and not found[..., is_near].isfinite().any()
