"""What the Linear chains share: whether the norm runs inside the product's kernel."""

import torch

import ops
from ops import precision, products
from triton_kernels.chains import LINEAR_GROUP_NORM_HARDTANH as CHAIN


def test_the_product_normalises_groups_that_its_tiles_hold():
    input, weight = torch.empty(8, 64), torch.empty(96, 64)
    assert products.fused_config(CHAIN, input, weight, 16, ()).holds_groups_of(16)
    assert products.fused_config(CHAIN, input, weight, 48, ()) is None, "no power of two"


def test_a_product_of_cublass_normalises_nothing(monkeypatch):
    """It is asked of this product, with its biases."""
    input, weight, bias = torch.empty(8, 64), torch.empty(96, 64), torch.empty(96)
    asked = []
    monkeypatch.setattr(precision, "multiplies_by_cublas", lambda *arguments, **_: asked.append(arguments) or True)
    assert products.fused_config(CHAIN, input, weight, 16, (bias, None)) is None
    assert asked == [(input, 96, bias, None)]


def test_what_it_is_written_as():
    """What it consists of, and not by what compiled graphs know it."""
    chain = ops.Chain("linear", after=(ops.pointwise.relu()[0],))
    assert repr(chain).startswith("Chain(contraction='linear'") and "fingerprint" not in repr(chain)
