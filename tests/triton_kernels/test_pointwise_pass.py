"""A chain of pointwise functions of a matrix: sizes around the blocks of 16 rows, 64 rows a program, 128 columns."""

import pytest
import torch
import torch.nn.functional as F

from triton_kernels.chain import Chain
from triton_kernels.chains import BIAS_HARDTANH_MISH
from triton_kernels.group_norm import pointwise, pointwise_backward
from triton_kernels.pointwise import ADD, HARDTANH

BOUNDS = (-0.75, 1.5)
#: Each chain with its operands after the bias.
CHAINS = {
    "bias": (Chain(before=(ADD,), norm=""), (), lambda z: z * 1),
    "bias_hardtanh": (Chain(before=(ADD, HARDTANH), norm=""), (BOUNDS,), lambda z: F.hardtanh(z, *BOUNDS)),
    "bias_hardtanh_mish": (BIAS_HARDTANH_MISH, (BOUNDS, None), lambda z: F.mish(F.hardtanh(z, *BOUNDS))),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("rows, channels", [(1, 1), (16, 128), (17, 129), (64, 5), (65, 300), (200, 3)])
def test_against_autograd(rows, channels, name):
    chain, others, function = CHAINS[name]
    generator = torch.Generator().manual_seed(rows)
    values, gradient = torch.randn(2, rows, channels, generator=generator)
    for bias in (torch.randn(channels, generator=generator), None):
        leaf = values.double().requires_grad_()
        expected = function(leaf if bias is None else leaf + bias.double())
        (expected_gradient,) = torch.autograd.grad(expected, leaf, gradient.double())
        output, input_gradient = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
        arguments = (values, chain, (bias, *others))
        pointwise(*arguments, output=output)
        sums = torch.full((channels,), torch.nan)
        gradients = (sums, *[None] * len(others))
        pointwise_backward(gradient, *arguments, input_gradient=input_gradient, gradients=gradients)
        torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(input_gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.double(), expected_gradient.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, channels", [(0, 5), (5, 0)])
def test_nothing_to_do(rows, channels):
    empty, sums = torch.empty(rows, channels), torch.full((channels,), torch.nan)
    arguments = (empty, BIAS_HARDTANH_MISH, (None, BOUNDS, None))
    pointwise(*arguments, output=empty)
    pointwise_backward(empty, *arguments, input_gradient=empty, gradients=(sums, None, None))
    assert torch.equal(sums, torch.zeros(channels))
