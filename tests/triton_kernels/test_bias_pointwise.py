"""A pointwise function of a matrix plus a bias: sizes around the blocks of 16 rows, 64 rows a program, 128 columns."""

import pytest
import torch
import torch.nn.functional as F

from triton_kernels.bias_pointwise import bias_pointwise, bias_pointwise_backward
from triton_kernels.pointwise import HARDTANH, HARDTANH_MISH, IDENTITY

FUNCTIONS = {
    "identity": (IDENTITY, lambda z: z * 1),
    "hardtanh": (HARDTANH, lambda z: F.hardtanh(z, -0.75, 1.5)),
    "hardtanh_mish": (HARDTANH_MISH, lambda z: F.mish(F.hardtanh(z, -0.75, 1.5))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows, channels", [(1, 1), (16, 128), (17, 129), (64, 5), (65, 300), (200, 3)])
def test_against_autograd(rows, channels, name):
    pointwise, function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(rows)
    values, gradient = torch.randn(2, rows, channels, generator=generator)
    for bias in (torch.randn(channels, generator=generator), None):
        leaf = values.double().requires_grad_()
        expected = function(leaf if bias is None else leaf + bias.double())
        (expected_gradient,) = torch.autograd.grad(expected, leaf, gradient.double())
        output, input_gradient = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
        bias_pointwise(values, bias, pointwise, (-0.75, 1.5), output=output)
        sums, arguments = torch.full((channels,), torch.nan), (gradient, values, bias, pointwise, (-0.75, 1.5))
        bias_pointwise_backward(*arguments, input_gradient=input_gradient, bias_gradient=sums)
        torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(input_gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.double(), expected_gradient.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, channels", [(0, 5), (5, 0)])
def test_nothing_to_do(rows, channels):
    empty = torch.empty(rows, channels)
    bias_pointwise(empty, None, HARDTANH, (-1.0, 1.0), output=empty)
    sums, arguments = torch.full((channels,), torch.nan), (empty, empty, None, HARDTANH, (-1.0, 1.0))
    bias_pointwise_backward(*arguments, input_gradient=empty, bias_gradient=sums)
    assert torch.equal(sums, torch.zeros(channels))
