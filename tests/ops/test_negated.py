"""Promise: tensors whose sign PyTorch keeps in a bit, as parts of conjugates, are what they say."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops


def negated(*shape):
    tensor = torch.complex(*torch.randn(2, *shape).unbind()).conj().imag
    assert tensor.is_neg()
    return tensor


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_arguments(requires_grad, twice):
    """Also where the same call was made before with a tensor that is not negated."""
    input, weight = negated(4, 16), torch.randn(32, 16, requires_grad=requires_grad)
    expected = ops.linear(input.clone(), weight) if twice else ops.linear(input.resolve_neg(), weight)
    assert torch.equal(ops.linear(input, weight), expected)


def test_gradients():
    input, gradient = torch.randn(4, 16, requires_grad=True), negated(4, 16)
    output = ops.group_norm(input, 4)
    (expected,) = torch.autograd.grad(output, input, gradient.resolve_neg(), retain_graph=True)
    assert torch.equal(torch.autograd.grad(output, input, gradient)[0], expected)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("is_seen", [False, True])
def test_gradients_of_what_was_negated(is_seen):
    """What the forward pass kept is negated too; PyTorch may have seen it, or not, and does not see the backward."""
    weights = torch.randn(32, 16, requires_grad=True), negated(32).requires_grad_()
    input, gradient = negated(4, 16), negated(4, 32)

    def gradients(input, norm_weight, gradient):
        with Seen() if is_seen else contextlib.nullcontext():
            output = ops.linear_group_norm_hardtanh(input, weights[0], None, 4, norm_weight)
        return torch.autograd.grad(output, (weights[0], norm_weight), gradient)

    plain = (each.detach().resolve_neg() for each in (input, weights[1], gradient))
    expected = gradients(*(each.requires_grad_() if each.ndim == 1 else each for each in plain))
    for result, other in zip(gradients(input, weights[1], gradient), expected, strict=True):
        assert torch.equal(result, other)
