"""Promise: on a GPU, a convolution of an upsampled image is as precise as PyTorch's, and runs as one of the image
before."""

import pytest
import torch

from ops import backend
from tests import gpu
from tests.gpu import DEVICE, on_hopper
from tests.ops.test_upsampled_convolutions import FORMATS, Block

pytestmark = [*gpu.MARKS, on_hopper, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]


def step(function, image, wanted, gradient, dtype, is_cast):
    with torch.autocast("cuda", dtype, enabled=is_cast), torch.set_grad_enabled(bool(wanted)):
        result = function(image)
    return result, *(torch.autograd.grad(result, wanted, gradient.to(result.dtype)) if wanted else ())


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("sizes", [(2, 64, 96, 40, 33), (1, 128, 64, 64, 64)], ids=str)
def test_precision(sizes, is_trained, dtype, format):
    """Under autocast taps are rounded once, as the weight is; those of a weight in 16 bits once more."""
    samples, *channels, height, width = sizes
    model = Block(channels).to(DEVICE, memory_format=format)
    image = torch.randn(samples, channels[0], height, width, device=DEVICE).contiguous(memory_format=format)
    image = image if is_trained else image.to(dtype)
    model = model if is_trained else model.to(dtype)
    gradient = torch.randn(samples, channels[1], 2 * height, 2 * width, device=DEVICE)
    wanted = list(model.parameters()) if is_trained else []
    with torch.compiler.config.patch(force_disable_caches=True), torch.profiler.profile() as profile:
        found = step(torch.compile(model, backend=backend.normfuse), image, wanted, gradient, dtype, is_trained)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any("dgrad" in name for name in names) and not any("unsafe_index" in name for name in names)
    eager = step(model, image, wanted, gradient, dtype, is_trained)
    model.double()
    wanted = list(model.parameters()) if is_trained else []
    exact = step(model, image.double(), wanted, gradient.double(), dtype, False)
    for one, other, truth in zip(found, eager, exact, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        error, allowed = ((each.double() - truth).norm() for each in (one, other))
        factor = 1.5 if one.ndim == 1 else 1.1 if is_trained else 1.25  # a vector's error is as chance has it
        assert error <= factor * allowed + 1e-6 * truth.norm()
