"""Promise: on a GPU, weight gradients of narrow convolutions are float64's, rounded, and a model's are as precise as
PyTorch's."""

import math

import pytest
import torch

from ops import backend, narrow_convolutions
from tests import gpu
from tests.gpu import DEVICE, on_hopper
from tests.ops.test_narrow_weight_gradients import LAST, Net
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
