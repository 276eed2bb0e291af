"""What the Linear chains share: whether the norm runs inside the product's kernel."""

import torch

from ops import precision
from ops.chain import fused_product_config

KERNEL = "linear_group_norm_hardtanh"


def test_the_product_normalises_groups_that_its_tiles_hold():
    input, weight = torch.empty(8, 64), torch.empty(96, 64)
    assert fused_product_config(KERNEL, input, weight, 16).holds_groups_of(16)
    assert fused_product_config(KERNEL, input, weight, 48) is None, "no power of two"


def test_a_product_of_the_librarys_normalises_nothing(monkeypatch):
    """It is asked of this product, with its biases."""
    input, weight, bias = torch.empty(8, 64), torch.empty(96, 64), torch.empty(96)
    asked = []
    monkeypatch.setattr(precision, "library_multiplies", lambda *arguments: asked.append(arguments) or True)
    assert fused_product_config(KERNEL, input, weight, 16, bias, None) is None
    assert asked == [(input, 96, bias, None)]
