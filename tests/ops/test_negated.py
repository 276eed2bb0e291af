"""Promise: tensors whose sign PyTorch keeps in a bit, as parts of conjugates, are what they say."""

import pytest
import torch

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
