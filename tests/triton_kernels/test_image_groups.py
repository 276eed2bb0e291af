"""Norm passes over groups of matrices and of few pixels: statistics of several channels at a time."""

import math
from unittest import mock

import pytest
import torch
import triton.language as tl

from tests.triton_kernels.test_image_group_norm import (
    ACTIVATIONS,
    FINALS,
    NORM,
    exact_results,
    gradients_of,
    our_results,
    problem,
    statistics_of,
)
from triton_kernels import image_group_norm as kernels
from triton_kernels.chain import Chain
from triton_kernels.image_group_norm import image_group_norm
from triton_kernels.image_tiles import ImageNormConfig


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e6])
@pytest.mark.parametrize("width", [1, 100, 4096, 4097, 3 * 4096 + 5])
@pytest.mark.parametrize("is_matrix", [False, True])
def test_merged_statistics(is_matrix, width, offset):
    """Of one long channel and of a row of a matrix: blocks of 4096, the last one shorter."""
    values = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width)) + offset
    images = values.view(2, 3 * width, 1) if is_matrix else values
    mean, rstd = statistics_of(images, 3, 1e-5, ImageNormConfig.fit(images))
    exact = values.double().view(6, width)
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=1e-6)
    rounding = torch.finfo(torch.float32).eps / 2 * abs(offset)
    expected_rstd = (exact.var(1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=2e-6 + rounding, atol=0)


@pytest.mark.parametrize("shape", [(1, 1, -1), (1, -1, 1)], ids=str)
def test_means_that_differ_between_blocks(shape):
    """Nearly all of the variance is that of the blocks' means."""
    values = (torch.arange(3 * 4096 + 100).div(4096, rounding_mode="floor").float() * 100).view(shape)
    mean, rstd = statistics_of(values, 1, 1e-5, ImageNormConfig.fit(values))
    exact = values.double().flatten()
    torch.testing.assert_close(mean[0].double(), exact.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd[0].double(), (exact.var(correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(2, 3, 5000), (2, 15000, 1), (2, 9 * 512, 5)], ids=str)
def test_statistics_of_activated_groups(shape, name):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (activation, function), config = ACTIVATIONS[name], ImageNormConfig.fit(values)
    mean, rstd = statistics_of(values, 3, 1e-5, config, Chain(before=activation))
    exact = function(values.double()).view(6, -1)
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rstd.double(), (exact.var(1, correction=0) + 1e-5).rsqrt(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("shape", [(1, 3, 4096), (1, 3, 5000), (1, 3, 12345), (1, 12345, 1), (1, 3000, 5)], ids=str)
@pytest.mark.parametrize("value", [0.1, 12345.678, 1000.3])
def test_constant_groups_of_any_shape(value, shape):
    """They stay 0: 1/sqrt(eps) = 316 must have nothing to multiply."""
    values = torch.full(shape, value)
    config, output = ImageNormConfig.fit(values), torch.empty_like(values)
    statistics = statistics_of(values, 1, 1e-5, config)
    image_group_norm(values, statistics, NORM, (None, None), config, output=output)
    assert (output == 0.0).all()


#: The same pairs for tiles as they are chosen.
GROUPS = [(2, 3, 5, 7), (1, 1, 3, 2000), (3, 2, 1, 5000), (2, 2, 5000, 1), (2, 2, 4096, 1)]
FUNCTIONS_IN_GROUPS = [
    *((size, "gelu", "hardtanh") for size in GROUPS),
    *((GROUPS[0], name, final) for name in ACTIVATIONS for final in FINALS),
]


@pytest.mark.parametrize("size, name, final", dict.fromkeys(FUNCTIONS_IN_GROUPS), ids=str)
def test_groups_against_autograd(size, name, final):
    arguments = problem(size)
    results = our_results(*arguments, ImageNormConfig.fit(arguments[0]), name=name, final=final)
    truths = exact_results(*arguments, ACTIVATIONS[name][1], FINALS[final])
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("has_weight, has_bias", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("shape", [(2, 6, 1000), (2, 6000, 1)], ids=str)
def test_absent_vectors_are_ones_and_zeros(shape, has_weight, has_bias):
    """Bit for bit, before and behind a function that cuts off at values that the bias moves."""
    values, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.randn(2, shape[1], generator=torch.Generator().manual_seed(1))
    present = (weight if has_weight else torch.ones_like(weight), bias if has_bias else torch.zeros_like(bias))
    absent = (weight if has_weight else None, bias if has_bias else None)
    config = ImageNormConfig.fit(values)
    with_vectors, without = (our_results(values, gradient, 2, *vectors, config) for vectors in (present, absent))
    for one, other in zip(with_vectors, without, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(2**18, 8, 16), (1, 1, 2**30), (3, 4, 2**28), (1, 2, 2**31), (1, 2**31, 1)], ids=str)
def test_grids_of_any_size(shape):
    """Many groups, and groups of many blocks. Indices have 64 bits where 32 do not suffice."""
    launches = []

    def run(*arguments, grid, **options):
        launches.append((grid, options))

    with mock.patch.object(type(kernels.apply_kernel), "run", run):
        values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        config = ImageNormConfig.fit(values)
        statistics = statistics_of(values, 1, 1e-5, config)
        image_group_norm(values, statistics, NORM, (None, None), config, output=values)
        gradients = torch.empty(2, shape[1], device="meta").unbind()
        gradients_of(values, values, statistics, NORM, (None, None), gradients, config, input_gradient=values)
    assert len(launches) in (4, 5)
    for grid, options in launches:
        assert 0 < grid[0] < 2**31 and all(0 < size <= 65535 for size in grid[1:])
        if "INDEX" in options:
            longest = math.prod(shape[1:]) if options.get("FOLD", 1) > 1 else max(shape)
            assert options["INDEX"] == (tl.int64 if longest >= 2**30 else tl.int32)


@pytest.mark.parametrize("channels, pixels", [(65536, 1), (16384, 1), (1, 2**20), (512, 7), (3, 100000)])
def test_tiles_hold_as_many_values_of_every_shape(channels, pixels):
    config = ImageNormConfig.fit(torch.empty(2, channels, pixels, device="meta"))
    assert 2048 <= config.block_c * config.block_s <= 4096
