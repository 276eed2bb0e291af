"""Statistics merged from blocks, and what is done with them."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from triton_kernels import wide_group_norm as kernels
from triton_kernels.pointwise import GELU, GELU_TANH, HARDTANH, IDENTITY
from triton_kernels.wide_group_norm import group_statistics, wide_group_norm, wide_group_norm_backward


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e6])
@pytest.mark.parametrize("width", [1, 100, 4096, 4097, 3 * 4096 + 5])
def test_merged_statistics(width, offset):
    """Blocks of 4096, the last one shorter. Means are rounded to float32; the deviation (1) may be as wrong.

    E[x^2] - E[x]^2 would be wrong by the rounding of the square.
    """
    values = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width)) + offset
    mean, rstd = group_statistics(values, 3, 1e-5)
    exact = values.double().view(6, width)
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=1e-6)
    rounding = torch.finfo(torch.float32).eps / 2 * abs(offset)
    expected_rstd = (exact.var(1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=2e-6 + rounding, atol=0)


def test_means_that_differ_between_blocks():
    """Nearly all of the variance is that of the blocks' means."""
    values = torch.arange(3 * 4096 + 100).div(4096, rounding_mode="floor").float().view(1, 1, -1) * 100
    mean, rstd = group_statistics(values, 1, 1e-5)
    exact = values.double().flatten()
    torch.testing.assert_close(mean[0].double(), exact.mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd[0].double(), (exact.var(correction=0) + 1e-5).rsqrt(), rtol=1e-6, atol=0)


def test_statistics_of_activated_values():
    values = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0))
    for activation, approximate in ((GELU, "none"), (GELU_TANH, "tanh")):
        mean, rstd = group_statistics(values, 3, 1e-5, activation=activation)
        exact = F.gelu(values.double(), approximate=approximate).view(6, -1)
        torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(rstd.double(), (exact.var(1, correction=0) + 1e-5).rsqrt(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("pixels", [4096, 5000, 12345])
@pytest.mark.parametrize("value", [0.1, 12345.678, 1000.3])
def test_constant_groups(value, pixels):
    """They stay their norm's bias: 1/sqrt(eps) = 316 must have nothing to multiply."""
    values = torch.full((1, 3, pixels), value)
    output = torch.empty_like(values)
    wide_group_norm(values, 1, None, None, 1e-5, output=output)
    assert (output == 0.0).all()


SIZES = [(2, 3, 5, 7), (1, 1, 3, 2000), (3, 2, 1, 5000), (2, 2, 5000, 1)]
ACTIVATIONS = {"identity": IDENTITY, "gelu": GELU, "gelu_tanh": GELU_TANH}
#: Every size with both functions, and every pair of functions: these see one element at a time.
PROBLEMS = [
    *((size, "gelu", True) for size in SIZES),
    *((SIZES[0], name, hardtanh) for name in ACTIVATIONS for hardtanh in (False, True)),
]


@pytest.mark.parametrize("size, name, hardtanh", dict.fromkeys(PROBLEMS), ids=str)
def test_against_autograd(size, name, hardtanh):
    """The gradients, with the statistics kept and without, of PyTorch's own operations in float64."""
    (samples, num_groups, group_size, pixels), activation = size, ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(pixels)
    channels = num_groups * group_size
    values, gradient = torch.randn(2, samples, channels, pixels, generator=generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    leaves = [tensor.double().requires_grad_() for tensor in (values, weight, bias)]
    activated = leaves[0]
    if activation is not IDENTITY:
        activated = F.gelu(activated, approximate="none" if activation is GELU else "tanh")
    expected = torch.group_norm(activated, num_groups, leaves[1], leaves[2])
    expected = F.hardtanh(expected, -0.75, 1.5) if hardtanh else expected
    expected_gradients = torch.autograd.grad(expected, leaves, gradient.double())

    options = {"activation": activation, "final": HARDTANH if hardtanh else IDENTITY, "bounds": (-0.75, 1.5)}
    output, input_gradient = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    statistics = wide_group_norm(values, num_groups, weight, bias, 1e-5, output=output, **options)
    truths = (expected, *expected_gradients)
    for kept in (statistics, None):
        sums = torch.full((2, channels), torch.nan)
        wide_group_norm_backward(
            gradient,
            values,
            num_groups,
            weight,
            bias,
            1e-5,
            input_gradient=input_gradient,
            vector_gradients=sums.unbind(),
            statistics=kept,
            **options,
        )
        for result, truth in zip((output, input_gradient, *sums), truths, strict=True):
            torch.testing.assert_close(result.double(), truth.detach(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("has_weight, has_bias", [(False, False), (False, True), (True, False)])
def test_absent_vectors_are_ones_and_zeros(has_weight, has_bias):
    """Bit for bit, before and behind a function that cuts off at values that the bias moves."""
    values, gradient = torch.randn(2, 2, 6, 1000, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for absent in (False, True):
        vectors = (
            weight if has_weight else None if absent else torch.ones(6),
            bias if has_bias else None if absent else torch.zeros(6),
        )
        options = {"activation": GELU, "final": HARDTANH, "bounds": (-0.75, 0.75)}
        output, input_gradient = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
        wide_group_norm(values, 2, *vectors, 1e-5, output=output, **options)
        sums = torch.full((2, 6), torch.nan)
        options |= {"input_gradient": input_gradient, "vector_gradients": sums.unbind()}
        wide_group_norm_backward(gradient, values, 2, *vectors, 1e-5, **options)
        results.append((output, input_gradient, sums))
    for with_vector, without in zip(*results, strict=True):
        assert torch.equal(with_vector, without)


def test_nothing_to_do():
    empty = torch.empty(2, 6, 0)
    assert wide_group_norm(empty, 3, None, None, 1e-5, output=empty).shape == (2, 6)
    sums = torch.full((2, 6), torch.nan)
    arguments = (empty, empty, 3, None, None, 1e-5)
    wide_group_norm_backward(*arguments, input_gradient=empty, vector_gradients=sums.unbind())
    assert torch.equal(sums, torch.zeros(2, 6))


@pytest.mark.parametrize("shape", [(2**18, 8, 16), (1, 1, 2**30), (3, 4, 2**28)], ids=str)
def test_grids_of_any_size(shape):
    """Many groups, and groups of many blocks: nothing but the grid's first axis, which goes up to 2**31 - 1."""
    grids = []
    with mock.patch.object(type(kernels.apply_kernel), "run", lambda *arguments, grid, **options: grids.append(grid)):
        values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        wide_group_norm(values, 1, None, None, 1e-5, output=values)
        sums = torch.empty(2, shape[1], device="meta").unbind()
        wide_group_norm_backward(values, values, 1, None, None, 1e-5, input_gradient=values, vector_gradients=sums)
    launches = 9 if shape[0] > 1 else 8  # one sample's sums are all there is to add up
    assert len(grids) == launches and all(x < 2**31 and (*others, 1)[0] <= 65535 for x, *others in grids)
