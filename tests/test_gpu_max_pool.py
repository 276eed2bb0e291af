"""Promise: on a GPU, the gradient of max pooling is PyTorch's, in both memory formats and in compiled models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.backend import normfuse
from tests import gpu
from tests.gpu import DEVICE

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]

#: The image's sizes, kernel, stride and padding.
POOLINGS = [
    ((8, 64, 56, 56), 3, 2, 1),
    ((3, 20, 33, 47), (3, 2), (2, 1), (1, 0)),
    ((2, 7, 9, 11), 4, 3, 2),
    ((2, 16, 9, 10, 11), 2, 1, 0),
    ((4, 24, 1000), 5, 2, 2),
    ((70000, 3, 3, 3), 2, 1, 0),
]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape, kernel, stride, padding", POOLINGS, ids=str)
def test_gradients(shape, kernel, stride, padding, is_last, dtype):
    """Of equal values too: sums of small integers are exact in each dtype."""
    format = LAST.get(len(shape), torch.contiguous_format) if is_last else torch.contiguous_format
    generator = torch.Generator(DEVICE).manual_seed(0)
    image = torch.randint(-9, 9, shape, generator=generator, device=DEVICE).to(dtype).contiguous(memory_format=format)
    image.requires_grad_()

    def pool(image):
        return getattr(F, f"max_pool{len(shape) - 2}d")(image, kernel, stride, padding)

    compiled = torch.compile(pool, backend=normfuse, fullgraph=True)
    results = [each(image) for each in (compiled, pool)]
    assert torch.equal(*results)
    cotangent = torch.randint(-8, 8, results[0].shape, generator=generator, device=DEVICE).to(dtype)
    result, expected = (torch.autograd.grad(each, image, cotangent)[0] for each in results)
    assert torch.equal(result, expected) and result.stride() == expected.stride()


@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 64), nn.BatchNorm2d(64)], ids=str)
def test_the_kernel_runs_in_models(norm):
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), norm, nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 8, 3)).to(
        DEVICE
    )
    image = torch.randn(4, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    compiled, gradients = torch.compile(model, backend=normfuse), []
    for each in (model, compiled, compiled):
        model.zero_grad()
        with torch.profiler.profile() as profile:
            each(image).square().sum().backward()
        gradients.append(model[0].weight.grad)
    assert "max_pool_backward_kernel" in {event.name for event in profile.events()}
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-2, atol=1e-2 * gradients[0].abs().max().item())
