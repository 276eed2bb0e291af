"""Normalising groups held in registers: padding, constant groups, means far from zero."""

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.group_statistics import normalize_groups


@triton.jit
def _normalize_kernel(values, output, rstd, eps, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    members = tl.arange(0, BLOCK)[None, None, :]
    offsets = tl.arange(0, ROWS)[:, None, None] * GROUP_SIZE + members
    real = members < GROUP_SIZE
    # What lies beyond a group belongs to the next one: the padding must not depend on it.
    groups = tl.load(values + offsets)
    if BLOCK == GROUP_SIZE:
        normalized, deviations = normalize_groups(groups, None, eps, GROUP_SIZE)
    else:
        normalized, deviations = normalize_groups(groups, real, eps, GROUP_SIZE)
    padded = tl.arange(0, ROWS)[:, None, None] * BLOCK + members
    tl.store(output + padded, normalized)
    tl.store(rstd + tl.arange(0, ROWS)[:, None], deviations)


def normalize(values, eps=1e-5):
    """Normalised [rows, group_size], its padding [rows, rest], and reciprocal deviations [rows]."""
    rows, group_size = values.shape
    block = triton.next_power_of_2(group_size)
    padded = torch.cat([values.flatten(), torch.full((block,), 1e30)])
    output, rstd = torch.full((rows, block), torch.nan), torch.empty(rows)
    _normalize_kernel[(1,)](padded, output, rstd, eps, GROUP_SIZE=group_size, ROWS=rows, BLOCK=block)
    return output[:, :group_size], output[:, group_size:], rstd


def exact(values, eps=1e-5):
    values = values.double()
    rstd = (values.var(1, correction=0) + eps).rsqrt()
    return (values - values.mean(1, keepdim=True)) * rstd[:, None], rstd


@pytest.mark.parametrize("group_size", [1, 2, 3, 10, 16, 48, 512])
def test_against_float64(group_size):
    values = torch.randn(8, group_size, generator=torch.Generator().manual_seed(group_size))
    output, padding, rstd = normalize(values)
    expected, expected_rstd = exact(values)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=5e-7, atol=0)
    assert torch.equal(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("group_size", [1, 3, 5, 10, 16, 48, 100])
def test_constant_groups_are_zero(group_size):
    """Whatever rounding leaves is multiplied by 1/sqrt(eps) = 316, so it must be next to nothing."""
    values = torch.tensor([0.1, 0.86509836, -1e4, 12345.678])[:, None].expand(4, group_size).contiguous()
    output, _, rstd = normalize(values)
    sixteenth_of_a_step = values.abs() * torch.finfo(torch.float32).eps / 16
    assert (output.abs() <= 316 * sixteenth_of_a_step).all()


@pytest.mark.parametrize("group_size", [10, 16, 48])
def test_mean_far_from_zero(group_size):
    """E[x^2] - E[x]^2 would have no digit left: squares of 1e4 against a variance of 1."""
    values = torch.randn(4, group_size, generator=torch.Generator().manual_seed(0)) + 1e4
    output, _, rstd = normalize(values)
    expected, expected_rstd = exact(values)
    torch.testing.assert_close(rstd.double(), expected_rstd, rtol=1e-3, atol=0)
    torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=2e-3)


def test_eps():
    values = torch.tensor([[1.0, -1.0], [1e-4, -1e-4]])
    for eps in (1e-12, 1e-5, 1.0):
        torch.testing.assert_close(normalize(values, eps)[0].double(), exact(values, eps)[0], rtol=1e-6, atol=1e-7)


def test_infinite_variance_gives_zero_deviation():
    """Squares beyond float32: what PyTorch does, too."""
    values = torch.tensor([[1e25, -1e25, 0.0, 5.0]])
    assert normalize(values)[2].item() == 0.0
