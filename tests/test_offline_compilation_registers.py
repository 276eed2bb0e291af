"""Offline compilation of products whose larger operand is split in registers: these hold nearly all of it."""

import re

import pytest
import torch

from autotune_configs.offline import compile_launches
from ops import products
from tests.compilation import META

pytestmark = pytest.mark.offline


@pytest.mark.parametrize("order", ["depth", "rows"])
@pytest.mark.parametrize("rows", [16, 32, 64, 300])
@pytest.mark.parametrize("depth", [1024, 4096])
def test_products_of_few_rows(rows, order, depth):
    """The weight is split in registers, which hold nearly all of it; tensor cores are waited for four times a step."""
    weight = torch.empty(8192, depth, device=META) if order == "depth" else torch.empty(depth, 8192, device=META).T
    input, bias = torch.empty(rows, depth, device=META), torch.empty(8192, device=META)
    kernels = compile_launches(lambda: products.affine(input, weight, (bias,), (rows, 8192)), 90)
    check_registers(kernels, consumers=2)


@pytest.mark.parametrize("orders", ["depth depth", "depth rows", "rows depth", "rows rows"])
@pytest.mark.parametrize("sizes", [(96, 512, 512, 64), (256, 512, 64, 512), (8, 32, 4096, 4096)], ids=str)
def test_products_of_batches(sizes, orders):
    """The larger operand is split in registers."""
    B, M, N, K = sizes
    input, matrix = (
        torch.empty(B, rows, K, device=META) if order == "depth" else torch.empty(B, K, rows, device=META).mT
        for rows, order in zip((M, N), orders.split(), strict=True)
    )
    kernels = compile_launches(lambda: products.of_batches(input, matrix.mT), 90)
    check_registers(kernels, consumers=1 if K <= 64 else 2)


def check_registers(kernels, consumers):
    """Where parts are added up in the output, that takes more registers than there are, but once a part alone."""
    *splitting, kernel, finishing = kernels
    assert [each.name for each in splitting] in (["split_kernel"], ["largest_kernel", "split_shared_kernel"])
    assert (kernel.name, finishing.name) == ("linear_registers_kernel", "finish_kernel")
    assert kernel.fits and not kernel.waits_for_products
    assert not re.search(r"\bF(ADD|MUL|FMA)\S*\.FTZ", kernel.sass)
    assert kernel.spilled_bytes <= 208
    assert kernel.sass.count("HGMMA") == 12 * consumers and kernel.sass.count("WARPGROUP.DEPBAR") == 4 * consumers
