"""Promise: on a GPU, products of one matrix in one launch are as exact as cuBLAS's one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import backend, grouped_products
from tests import gpu
from tests.gpu import DEVICE
from triton_kernels.grouped_products import multiply_all

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]

#: Rows and depth of the matrix, and widths: of both tiles, of many, and of sizes that are multiples of nothing.
PROBLEMS = {
    "time embedding": (2, 1280, [320, 640, 1280] * 7),
    "text": (154, 768, [320, 640, 1280] * 10),
    "weights' gradients": (512, 32, [128, 256] * 11),
    "more than a launch": (33, 512, [16 * (1 + place % 9) for place in range(130)]),
    "odd": (67, 131, [1, 17, 65, 200]),
    "few and odd": (5, 77, [33, 2, 129]),
}


def turned(tensor, is_turned):
    return tensor.T.contiguous().T if is_turned else tensor


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("others_turned, targets_turned", [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernel(name, dtype, others_turned, targets_turned, has_bias):
    rows, depth, widths = PROBLEMS[name]
    torch.manual_seed(0)
    matrix = torch.randn(rows, depth, device=DEVICE).to(dtype)
    others = [turned(torch.randn(depth, width, device=DEVICE).to(dtype), others_turned) for width in widths]
    biases = [torch.randn(width, device=DEVICE).to(dtype) for width in widths if has_bias]
    targets = [torch.full((rows, width), torch.nan, dtype=dtype, device=DEVICE) for width in widths]
    targets = [turned(each, targets_turned) for each in targets]
    multiply_all(matrix, others, biases, targets)
    for place, (other, target) in enumerate(zip(others, targets, strict=True)):
        expected = matrix.double() @ other.double() + (biases[place].double() if has_bias else 0)
        ours, rounded = ((each.double() - expected).norm() / expected.norm() for each in (target, expected.to(dtype)))
        assert ours <= 1.01 * rounded + 1e-6, (place, ours, rounded)


class Model(nn.Module):
    """Layers that read one embedding, as a UNet's do, and text."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.GroupNorm(4, 32)
        self.convolutions = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1) for _ in range(5)])
        self.embeddings = nn.ModuleList([nn.Linear(128, 32) for _ in range(5)])
        self.texts = nn.ModuleList([nn.Linear(64, 32, bias=False) for _ in range(5)])

    def forward(self, x, embedding, text):
        for convolution, embed, read in zip(self.convolutions, self.embeddings, self.texts, strict=True):
            x = convolution(F.silu(self.norm(x))) + embed(F.silu(embedding))[:, :, None, None]
            x = x + read(text).mean(1)[:, :, None, None]
        return x


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_models(mode, monkeypatch):
    """With the calls and without them; replayed with new weights and inputs."""
    passes = backend._PASSES["post_grad_custom_post_pass"]
    results, names = [], []
    for is_on in (True, False):
        torch._dynamo.reset()
        own = [each for each in passes if is_on or each is not grouped_products.join]
        monkeypatch.setitem(backend._PASSES, "post_grad_custom_post_pass", own)
        model = Model().to(DEVICE).to(memory_format=torch.channels_last)
        compiled = torch.compile(model, backend=backend.normfuse, mode=mode)
        torch.manual_seed(1)
        results.append([])
        for _ in range(4):
            image = torch.randn(8, 32, 24, 24, device=DEVICE).to(memory_format=torch.channels_last)
            given = image, torch.randn(8, 128, device=DEVICE), torch.randn(8, 77, 64, device=DEVICE)
            model.zero_grad()
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(0.01)
            with torch.autocast("cuda", torch.bfloat16), torch.profiler.profile() as profile:
                result = compiled(*given)
                result.float().square().sum().backward()
                torch.cuda.synchronize()
            results[-1].append([result.detach().clone(), *(each.grad.clone() for each in model.parameters())])
        names.append([event.name for event in profile.events() if "grouped_products_kernel" in event.name])
    assert len(names[0]) >= 3 and not names[1]  # both forward, and the gradients of the embedding's weights
    for one, other in zip(*results, strict=True):
        for each, expected in zip(one, other, strict=True):
            assert (each - expected).float().norm() <= 2e-2 * expected.float().norm()
