"""Promise: where an operand is split some rows at a time, each result is computed once, from its own rows, and what
is left is noted in its own tile.

``tests/test_gpu_split.py`` runs the kernel; here a product of PyTorch's stands in for it.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from ops import products
from triton_kernels import float32_tiles
from triton_kernels.chains import LINEAR
from triton_kernels.float32_block_split import BlockSplit, split_blocks
from triton_kernels.float32_parts import LOW_SCALE
from triton_kernels.float32_tiles import LinearSplitConfig
from triton_kernels.grid import blocks_of

DEPTH = 70


def matrix(rows, order, seed):
    values = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(seed))
    return values if order == "depth" else values.T.contiguous().T


def whole(operand):
    value = operand.high.double() + operand.low.double() / LOW_SCALE.value
    if isinstance(operand, BlockSplit):
        blocks = operand.scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return value * blocks[: value.shape[0], : value.shape[1]]
    return value * operand.scale.double()[:, None]


@pytest.mark.parametrize("in_blocks, given", [(False, None), (True, None), (True, 0), (True, 1)])
@pytest.mark.parametrize("orders", [("depth", "rows"), ("rows", "depth")], ids=str)
@pytest.mark.parametrize("size", [(900, 200), (130, 1100), (129, 129), (0, 5), (5, 0)], ids=str)
def test_every_result_once(monkeypatch, size, orders, given, in_blocks):
    (M, N), multiprocessors = size, 3
    input, weight = matrix(M, orders[0], 0), matrix(N, orders[1], 1)
    config = LinearSplitConfig(2, in_blocks=in_blocks)
    output, times, turns = torch.full((M, N), torch.nan, dtype=torch.float64), torch.zeros(M, N), []

    def linear_split(first, second, chain, config, operands, *, left, place, output):
        row, column, *whole_size = place
        assert tuple(whole_size) == size and row % config.block_m == column % config.block_n == 0
        assert (left == 0).all() and len(left) == blocks_of(M, 128) * blocks_of(N, 128)
        result = whole(first) @ whole(second).T
        output[row : row + result.shape[0], column : column + result.shape[1]] = result
        times[row : row + result.shape[0], column : column + result.shape[1]] += 1
        turns.append(place)

    monkeypatch.setitem(sys.modules, "triton_kernels.linear_split_hopper", SimpleNamespace(linear_split=linear_split))
    monkeypatch.setattr(products, "linear", lambda *arguments, **options: None)
    monkeypatch.setattr(products, "multiprocessor_count", lambda device: multiprocessors)
    monkeypatch.setattr(float32_tiles, "_KEPT_BYTES", 2**16)
    halves = [None, None]
    if given is not None and 0 not in size:
        halves[given] = split_blocks((input, weight)[given])
    products.product(input, weight, LINEAR, config, (None,), halves=halves, output=output)
    assert (times == 1).all()
    assert len(turns) > 1 or max(size) < 900 or given == (0 if M > N else 1)
    torch.testing.assert_close(output, input.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
