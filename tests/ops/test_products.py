"""Matrix products: what cuBLAS is asked for."""

import pytest
import torch

import autotune_configs
from ops import matrix_products, precision, products


@pytest.mark.parametrize("biases", [0, 1, 2])
@pytest.mark.parametrize("by_cublas", [True, False])
def test_affine_where_cublas_multiplies(by_cublas, biases, monkeypatch):
    """The bias is added by its product or after it, and no argument is written to."""
    monkeypatch.setattr(precision, "multiplies_by_cublas", lambda *_, **__: True)
    monkeypatch.setattr(precision, "cublas_adds_bias", lambda *arguments: by_cublas)
    generator = torch.Generator().manual_seed(0)
    input, weight, *vectors = (torch.randn(shape, generator=generator) for shape in ((5, 16), (7, 16), (7,), (7,)))
    vectors = [vector if number < biases else None for number, vector in enumerate(vectors)]
    before = [tensor.clone() for tensor in (input, weight, *vectors[:biases])]
    expected = input.double() @ weight.double().T + sum(vector.double() for vector in vectors[:biases])
    torch.testing.assert_close(products.affine(input, weight, vectors, (5, 7)).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([input, weight, *vectors[:biases]], before, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [False, True])
def test_wider_biases_are_not_cublass(wide, monkeypatch):
    """As autocast has them; it would round them before they are added."""
    monkeypatch.setattr(autotune_configs, "prefers_cublas", lambda *arguments: True)
    called = []
    monkeypatch.setattr(torch, "addmm", lambda bias, a, b: called.append(bias) or (a @ b + bias))
    input, weight = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(7, 16, dtype=torch.bfloat16)
    bias = torch.full((7,), 2**-12, dtype=torch.float32 if wide else torch.bfloat16)
    output = products.affine(input, weight, (torch.ones_like(bias), bias - 17), (3, 7))
    assert output.dtype == torch.bfloat16 and len(called) == (not wide)
    assert torch.equal(output, torch.full_like(output, 2**-12 if wide else 0))


def test_where_the_depth_may_be_divided(monkeypatch):
    """In gradients and in products without a chain, whose first operand is transposed: not in a chain's own."""
    for module in (precision, products):
        monkeypatch.setattr(module, "runs_hopper_kernels", lambda device: True)
    divided = []
    monkeypatch.setattr(products, "product", lambda *arguments, **_: divided.append(arguments[3].divides))
    input, matrix, shape = torch.ones(16, 8).T, torch.ones(16, 4), (8, 4)
    products.multiply(input, matrix, shape)
    matrix_products._multiply(input, matrix)
    matrix_products._multiply(input[None], matrix[None])
    products.multiply(input.contiguous(), matrix, shape)
    products.affine(input, matrix.T, (), shape)
    assert divided == [True, True, True, False, False]
