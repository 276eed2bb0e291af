"""Promise: a norm's result has the same strides from a GPU's kernels, in plain PyTorch and for a compiler: a layer
norm's is contiguous, as PyTorch's, a group norm's has its input's."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import ops
from ops import precision

#: shape in memory, and the order of its dimensions
LAYOUTS = {
    "contiguous": ((5, 32), (0, 1)),
    "transposed": ((32, 5), (1, 0)),
    "channels last": ((5, 7, 32), (0, 2, 1)),
    "channels_last": ((2, 4, 3, 32), (0, 3, 1, 2)),
    "rows apart": ((5, 4, 32), (1, 0, 2)),
    "all reversed": ((4, 3, 32, 2), (3, 2, 1, 0)),
}
NORMS = {
    "layer_norm": lambda input: ops.layer_norm(input, input.shape[-1]),
    "layer_norm and steps": lambda input: ops.layer_norm(
        input, input.shape[-1], before=(ops.pointwise.add(input),), after=(ops.pointwise.silu(),)
    ),
    "layer_norm over two": lambda input: ops.layer_norm(input, input.shape[-2:]),
    "LayerNorm": lambda input: ops.LayerNorm(input.shape[-1], dtype=input.dtype, device=input.device)(input),
    "group_norm": lambda input: ops.group_norm(input, 1),
    "group_norm and steps": lambda input: ops.group_norm(input, 1, after=(ops.pointwise.mul(input),)),
    "group_norm_hardtanh": lambda input: ops.group_norm_hardtanh(input, 1),
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def kernels(input):
    return input


def plain(input):
    return input.double()


def fake(input):
    with FakeTensorMode():
        return torch.empty_strided(input.shape, input.stride(), device="cuda")


@pytest.mark.parametrize("place", [kernels, plain, fake], ids=lambda place: place.__name__)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape, order", LAYOUTS.values(), ids=LAYOUTS)
def test_strides(shape, order, norm, place):
    input = torch.randn(shape, generator=seeded(1)).permute(order)
    given = place(input)
    with torch.no_grad(), getattr(given, "fake_mode", contextlib.nullcontext()):
        result = NORMS[norm](given)
    is_of_rows = norm.lower().startswith("layer")
    expected = F.layer_norm(input, input.shape[-1:]) if is_of_rows else torch.empty_like(input)
    assert result.stride() == expected.stride() and result.is_contiguous() >= is_of_rows


@pytest.mark.parametrize("shape, order", LAYOUTS.values(), ids=LAYOUTS)
def test_values_without_kernels(shape, order, monkeypatch):
    """With gradients; under vmap too, where what a norm is of has no strides of its own."""
    monkeypatch.setattr(precision, "INTERPRETED", False)
    input = torch.randn(shape, generator=seeded(1)).permute(order).requires_grad_()
    for ours, theirs in (
        (ops.layer_norm(input, input.shape[-1]), F.layer_norm(input, input.shape[-1:])),
        (ops.group_norm(input, 1), F.group_norm(input, 1)),
    ):
        torch.testing.assert_close(ours, theirs, check_stride=False)
        factors = [
            torch.empty_like(each).copy_(torch.randn(each.shape, generator=seeded(2))) for each in (ours, theirs)
        ]
        gradients = [
            torch.autograd.grad(each, input, factor)[0] for each, factor in zip((ours, theirs), factors, strict=True)
        ]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    if input.ndim == 4:
        return  # which PyTorch's own group norm does not take under vmap
    several = torch.stack([input.detach(), 2 * input.detach()])
    mapped = torch.func.vmap(lambda each: ops.group_norm(each, 1))(several)
    torch.testing.assert_close(mapped, torch.stack([F.group_norm(each, 1) for each in several]))
