"""Promise: no size asks for a grid that CUDA refuses: 2**31 - 1 programs along x, 65535 along y and z.

Huge sizes do not run: launchers are called on tensors of the "meta" device, and the grids that they ask for are kept.
"""

import math
from unittest import mock

import pytest
import torch

from autotune_configs import lookup
from tests.accuracy import draw_grad_output, run
from tests.chains import (
    BIAS_HARDTANH_MISH,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L30,
    L75,
    L94,
    Problem,
    chain_id,
    make_arguments,
)
from tests.compilation import norm_configs
from triton_kernels import chains, column_sums, grid, group_norm, row_minimum, row_minimum_backward, row_minimum_order

CPU, META = torch.device("cpu"), torch.device("meta")
LIMITS = (2**31 - 1, 65535, 65535)
#: Each axis in turn with more blocks than y takes, and both as large as a GPU holds.
SHAPES = [(2, 2**29), (2**29, 2), (2**19, 2**17)]

by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def grids():
    """What has been asked for; each is checked at the end."""
    asked = []
    kernel_type = type(column_sums.column_sums_kernel)
    with mock.patch.object(kernel_type, "run", lambda *arguments, grid, **options: asked.append(grid)):
        yield asked
    assert asked
    for sizes in asked:
        assert all(1 <= size <= limit for size, limit in zip(sizes, LIMITS, strict=False)), sizes


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)


@by_shape
def test_pointwise(grids, shape):
    matrix, vector = empty(*shape), empty(shape[1])
    arguments = (matrix, chains.BIAS_HARDTANH_MISH, (vector, (-1.0, 1.0), None))
    group_norm.pointwise(*arguments, output=matrix)
    group_norm.pointwise_backward(matrix, *arguments, input_gradient=matrix, gradients=(vector, None, None))


@pytest.mark.parametrize("group_size", [1, 32, 8192])
@by_shape
def test_group_norm(grids, shape, group_size):
    rows, channels = shape[0], max(shape[1], group_size)
    matrix, vector = empty(rows, channels), empty(channels)
    configs = norm_configs(torch.float32, rows, channels, group_size)
    groups, vectors = channels // group_size, (vector, vector, (-1.0, 1.0), None, vector, vector)
    arguments = (matrix, groups, chains.LINEAR_HARDTANH_MISH_GROUP_NORM, vectors, 1e-5)
    group_norm.group_norm(*arguments, configs[0], output=matrix)
    gradients = (vector, vector, None, None, vector, vector)
    group_norm.group_norm_backward(matrix, *arguments, configs[1], input_gradient=matrix, gradients=gradients)


@pytest.mark.parametrize("group_size", [1, 8192])
@by_shape
def test_row_minimum(grids, shape, group_size):
    """The bias's channels are no channels of the product: their number is free."""
    rows, channels = shape
    keys, saved = row_minimum.empty_tile_minimum(2, rows, group_size, META, save=True)
    winner = row_minimum.empty_winner(rows, group_size, META)
    row_minimum.finish(keys, saved, empty(channels), empty(channels, rows), winner, group_size)
    groups, bias_gradient = max(1, channels // group_size), empty(channels)
    row_minimum_order.sums_and_order(empty(channels, rows), winner[0], groups, group_size, bias_gradient)


@by_shape
def test_row_minimum_products(grids, shape):
    """Few rows and groups and a deep product, and the other way round."""
    rows, depth = shape
    for group_size in (1, 128):
        z_gradient, order = empty(rows, group_size), empty(rows, dtype=torch.int32)
        input, weight = empty(rows, depth), empty(max(rows, group_size), depth)
        row_minimum_backward.input_gradient(z_gradient, order, order, weight, input)
        row_minimum_backward.weight_gradient(z_gradient, order, order, input, weight)


@pytest.mark.parametrize("chain", [L94, L75, L30, BIAS_HARDTANH_MISH, GROUP_NORM, GROUP_NORM_HARDTANH], ids=chain_id)
@pytest.mark.parametrize("problem", [Problem(5, 1100, 33, 16), Problem(3, 70, 5, 200)], ids=str)
def test_same_bits_where_an_axis_is_laid_along_two(chain, problem, monkeypatch):
    """With y so short that z takes over, and programs past the end of the axis have nothing to do."""
    arguments = make_arguments(chain, problem, torch.float32)
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    monkeypatch.setattr(grid, "_MOST_ALONG_Y", 3)
    lookup.forget()  # and the plans with the grids of before
    results = run(chain.function, arguments, grad_output)
    for name in expected:
        assert torch.equal(results[name], expected[name]), name


def test_nothing_is_stored_past_the_end(monkeypatch):
    """Tiles of a row minimum, and blocks of its gradient's sums and ranks, that do not exist."""
    monkeypatch.setattr(grid, "_MOST_ALONG_Y", 3)
    stored = []
    empty = torch.empty

    def guarded(*shape, **options):
        memory = empty(math.prod(shape) + 999, **options).fill_(7)
        stored.append(memory[-999:])
        return memory[:-999].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    keys, saved = row_minimum.empty_tile_minimum(5, 5, 8, CPU, save=True)
    config = group_norm.GroupNormConfig(2, 8, 2)
    chain, options = chains.LINEAR_GROUP_NORM_MIN, {"output": keys, "saved": saved}
    group_norm.group_norm(torch.randn(5, 40), 5, chain, (None,) * 3, 1e-5, config, **options)
    column, bias_gradient = torch.arange(5, dtype=torch.int32), torch.empty(5 * 64)
    row_minimum_order.sums_and_order(torch.randn(5 * 64, 5), column, 5, 8, bias_gradient)
    assert len(stored) > 4 and all((memory == 7).all() for memory in stored)
