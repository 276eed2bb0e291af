"""Promise: on a GPU, narrow convolutions and their gradients are float64's, rounded, and a model's are as precise as
PyTorch's."""

import math

import pytest
import torch

from ops import backend, narrow_convolutions
from tests import gpu
from tests.gpu import DEVICE, on_hopper
from tests.ops.test_narrow_convolutions import Smooth, strides_of
from tests.ops.test_narrow_weight_gradients import LAST, Net
from triton_kernels.narrow_convolution import narrow_convolution
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]

#: B, channels of input and output, sizes, taps, stride, padding.
PROBLEMS = [
    (2, 1, 32, (33, 40, 47), 3, 1, 1),
    (1, 8, 8, (40, 33, 64), 3, 1, 1),
    (2, 8, 16, (33, 40, 31), 3, 2, 1),
    (4, 3, 64, (112, 100), 7, 2, 3),
    (4, 4, 320, (64, 64), 3, 1, 1),
    (4, 32, 30, (65, 64), 3, 1, 1),
    (4, 5, 7, (130, 65), 2, 1, 0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_values(problem, dtype):
    B, C, O, sizes, taps, stride, padding = problem  # noqa: E741
    dims = len(sizes)
    geometry = [stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1
    torch.manual_seed(0)
    image = torch.randn(B, C, *sizes, device=DEVICE).to(dtype).contiguous(memory_format=LAST[dims + 2])
    weight = torch.randn(O, C, *[taps] * dims, device=DEVICE).double()
    output = torch.ops.aten.convolution(image.double(), weight, None, *geometry)
    gradient = torch.randn(output.shape, device=DEVICE).to(dtype).contiguous(memory_format=LAST[dims + 2])
    backward, wanted = torch.ops.aten.convolution_backward, [False, True, False]
    truth = backward(gradient.double(), image.double(), weight, None, *geometry, wanted)[1]
    rows = [(size, outputs, taps, stride, padding) for size, outputs in zip(sizes, output.shape[2:], strict=True)]
    axes = [ConvolvedAxis(1, 1)] * (3 - dims) + [ConvolvedAxis(*row) for row in rows]
    results = [torch.full((O, taps**dims, C), math.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    for each in results:
        narrow_weight_gradient(gradient.flatten(2), image.flatten(2), each, tuple(axes))
    found = results[0].view(O, *[taps] * dims, C).movedim(-1, 1).double()
    assert torch.equal(*results)
    torch.testing.assert_close(found, truth, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4 * truth.abs().max().item())


#: As above.
CONVOLUTIONS = [
    *PROBLEMS[:5],
    (4, 16, 30, (65, 64), 3, 1, 1),
    (4, 12, 12, (65, 64), 3, 1, 1),
    (2, 6, 24, (40, 30), 3, 2, 1),
    (3, 3, 200, (96, 80), 16, 16, 0),
    (2, 3, 130, (31, 33), 7, 1, 3),
    (4, 5, 7, (130, 65), 2, 1, 0),
]


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", CONVOLUTIONS, ids=str)
def test_convolutions(problem, dtype):
    B, C, O, sizes, taps, stride, padding = problem  # noqa: E741
    dims = len(sizes)
    torch.manual_seed(0)
    image = torch.randn(B, C, *sizes, device=DEVICE).to(dtype)
    weight = torch.randn(O, C, *[taps] * dims, device=DEVICE).to(dtype)
    geometry = [stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1
    truth = torch.ops.aten.convolution(image.double(), weight.double(), None, *geometry)
    rows = [(size, outputs, taps, stride, padding) for size, outputs in zip(sizes, truth.shape[2:], strict=True)]
    axes = [ConvolvedAxis(1, 1)] * (3 - dims) + [ConvolvedAxis(*row) for row in rows]
    matrix = weight.flatten(2).permute(2, 1, 0).flatten(0, 1).contiguous()
    results = [torch.full((truth[:, 0].numel(), O), math.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    for each in results:
        narrow_convolution(image.movedim(1, -1).flatten(1, -2).contiguous(), matrix, each, tuple(axes))
    found = results[0].view(B, *truth.shape[2:], O).movedim(-1, 1).double()
    assert torch.equal(*results)
    torch.testing.assert_close(found, truth, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4 * truth.abs().max().item())


@on_hopper
def test_many_elements():
    """Beyond what 32 bits hold, in the images and in the results."""
    samples, rows, pixels = 3, 2**14, 2**14
    image = torch.randn(samples, rows * pixels, 4, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(2 * 4, 3, device=DEVICE, dtype=torch.float16)
    result = torch.full((samples * rows * pixels, 3), math.nan, device=DEVICE, dtype=torch.float16)
    axes = ConvolvedAxis(1, 1), ConvolvedAxis(rows, rows), ConvolvedAxis(pixels, pixels, 2, 1, 1)
    narrow_convolution(image, weight, result, axes)
    for line in (0, samples * rows - 1):
        values = image.view(-1, pixels, 4)[line].float()
        before = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        expected = before @ weight[:4].float() + values @ weight[4:].float()
        torch.testing.assert_close(result.view(-1, pixels, 3)[line].float(), expected, rtol=1e-3, atol=1e-2)
    assert result.isfinite().all()


@on_hopper
@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dims", [2, 3])
def test_models_of_few_channels(dims, format):
    """As near to float32 as eager PyTorch's, forward and backward, laid out as there, by the kernel."""
    torch.manual_seed(0)
    model, image = Smooth(dims).to(DEVICE), torch.randn(2, 1, *[128 if dims == 2 else 28] * dims, device=DEVICE)
    if format == "channels_last":
        model, image = (each.to(memory_format=LAST[dims + 2]) for each in (model, image))
    wanted = [image.requires_grad_(), *model.parameters()]

    def step(function, is_cast=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
            result = function(image)
        torch.manual_seed(1)
        return result, *torch.autograd.grad(result, wanted, torch.randn_like(result))

    with torch.compiler.config.patch(force_disable_caches=True), torch.profiler.profile() as profile:
        found = step(torch.compile(model, backend=backend.normfuse))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names.count("narrow_convolution_kernel") == 5  # of three convolutions, and two inputs' gradients
    for one, other, truth in zip(found, step(model), step(model, is_cast=False), strict=True):
        factor = 3 if one.ndim == 1 else 1.3  # a vector's error is as chance has it
        assert strides_of(one) == strides_of(other)
        assert (one - truth).norm() <= factor * (other - truth).norm() + 1e-3 * truth.norm()


@on_hopper
@pytest.mark.parametrize("dims", [2, 3])
def test_models(dims, monkeypatch):
    """As near to float32 as eager PyTorch's, laid out as the parameters, and the kernel runs."""
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    torch.manual_seed(0)
    model, image = Net(dims).to(DEVICE), torch.randn(2, 1, *[24] * dims, device=DEVICE)
    upstream = torch.randn(2, 8, *[12] * dims, device=DEVICE)

    def gradients(function, is_cast=True):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
            result = function(image)
        result.backward(upstream.to(result.dtype))
        return [each.grad.clone() for each in model.parameters()]

    expected = gradients(model, is_cast=False)
    with torch.compiler.config.patch(force_disable_caches=True), torch.profiler.profile() as profile:
        found = gradients(torch.compile(model, backend=backend.normfuse))
    assert "narrow_weight_gradient_kernel" in {event.name for event in profile.events()}
    eager = gradients(model)
    for one, other, truth, parameter in zip(found, eager, expected, model.parameters(), strict=True):
        strides = [zip(each.shape, each.stride(), strict=True) for each in (one, parameter)]
        given, wanted = ([stride for size, stride in each if size != 1] for each in strides)
        assert given == wanted
        if parameter.ndim == 1:
            continue  # of eight numbers, of which the error is as chance has it, with Inductor alone, too
        assert (one - truth).norm() <= 1.3 * (other - truth).norm() + 1e-3 * truth.norm()
