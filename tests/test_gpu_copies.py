"""Promise: on a GPU, copies of weights and gradients are bit by bit those that are made one by one."""

import itertools

import pytest
import torch
from torch import nn

from ops import backend, copies
from tests import gpu
from tests.gpu import DEVICE
from triton_kernels.copies import MOST_COPIES, copy_all

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory", "fresh_compiler")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Of whole blocks, of parts of them, and of a single element.
SHAPES = [(1,), (4096,), (3072, 768), (129, 65), (64, 64, 3, 3), (1, 3, 7, 7), (256, 33, 1, 1), (32, 17, 3, 3, 3)]


def turned(tensor, is_turned):
    return tensor.contiguous(memory_format=LAST[tensor.ndim]) if is_turned and tensor.ndim in LAST else tensor


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel(dtype, target_dtype):
    cells = list(itertools.product(SHAPES, (False, True), (False, True)))
    torch.manual_seed(0)
    sources = [turned(torch.randn(shape, device=DEVICE).to(dtype), first) for shape, first, _ in cells]
    targets = [
        turned(torch.empty_like(each, dtype=target_dtype), last)
        for each, (*_, last) in zip(sources, cells, strict=True)
    ]
    copy_all(sources * 3, targets + [torch.empty_like(each) for each in targets * 2])
    assert len(sources) * 3 > MOST_COPIES
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target_dtype)), (source.shape, source.stride(), target.stride())


def test_unaligned_memory():
    """Of parameters that share one tensor, as some optimizers have them."""
    memory = torch.randn(20_000, device=DEVICE)
    sources = [memory[first : first + 3000] for first in (1, 3002, 6004, 9008)]
    targets = [torch.empty(3000, dtype=torch.bfloat16, device=DEVICE) for _ in sources]
    copy_all(sources, targets)
    assert all(torch.equal(target, source.bfloat16()) for source, target in zip(sources, targets, strict=True))


class Model(nn.Module):
    """Convolutions with norms, whose weights are laid out, then layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1) for _ in range(5)])
        self.norm = nn.GroupNorm(4, 32)
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])

    def forward(self, x):
        for convolution in self.convolutions:
            x = torch.relu(self.norm(convolution(x)))
        return self.layers(x.mean((2, 3)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_models(format, mode, monkeypatch):
    """With the calls and without them, in both memory formats; replayed with new weights and images."""
    passes = backend._PASSES["post_grad_custom_post_pass"]
    results, names = [], []
    for is_on in (True, False):
        torch._dynamo.reset()
        own = [each for each in passes if is_on or each is not copies.join]
        monkeypatch.setitem(backend._PASSES, "post_grad_custom_post_pass", own)
        model = Model().to(DEVICE).to(memory_format=format)
        compiled = torch.compile(model, backend=backend.normfuse, mode=mode)
        torch.manual_seed(1)
        results.append([])
        for _ in range(5):
            image = torch.randn(8, 32, 24, 24, device=DEVICE).to(memory_format=format)
            model.zero_grad()
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(0.01)
            with torch.autocast("cuda", torch.bfloat16), torch.profiler.profile() as profile:
                result = compiled(image)
                result.float().square().sum().backward()
                torch.cuda.synchronize()
            kept = [result.detach().clone(), *(each.grad.clone() for each in model.parameters())]
            results[-1].append(kept)
            strides = [each.grad.stride() for each in model.parameters()]
            assert strides == [each.stride() for each in model.parameters()]
        names.append([event.name for event in profile.events() if "copies_kernel" in event.name])
    assert names[0] and not names[1]
    for one, other in zip(*results, strict=True):
        for each, expected in zip(one, other, strict=True):
            torch.testing.assert_close(each, expected, rtol=0, atol=0)
