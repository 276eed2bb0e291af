"""Rounding to TF32: as a jit function, on the way of a copy, and by PyTorch."""

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.image_copy import copy_image
from triton_kernels.image_group_norm import ImageNormConfig
from triton_kernels.tf32 import dot_as_tf32_products, nearest_tf32, round_to_tf32, split_tf32

#: Below, at and above a tie, with the last kept bit (0x2000) clear and set, and what carries to the exponent.
MANTISSAS = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FEFFF, 0x7FF000, 0x7FFFFF]


def from_bits(bits):
    return bits.to(torch.int32).view(torch.float32)


def numbers():
    """Of every exponent, subnormal ones and both zeros among them, and of both signs; all are finite."""
    drawn = torch.randint(0, 2**23, (50,), generator=torch.Generator().manual_seed(0))
    positive = from_bits((torch.arange(255)[:, None] << 23) + torch.cat([torch.tensor(MANTISSAS), drawn])).flatten()
    return torch.cat([positive, -positive])


def expected(values):
    """Eleven binary digits or, of subnormal numbers, multiples of 2**-136; halves away from zero."""
    values = values.double()
    step = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent.clamp(min=-125) - 11)
    return (values.sign() * torch.floor(values.abs() / step + 0.5) * step).float()


def by_kernel(values):
    result = torch.full_like(values, torch.nan)
    views = values.view(1, 2, -1), result.view(1, 2, -1)
    copy_image(*views, ImageNormConfig.fit(*views), nearest_tf32)
    return result


@pytest.mark.parametrize("rounded", [by_kernel, round_to_tf32])
def test_nearest(rounded):
    values = numbers()
    result = rounded(values)
    assert torch.equal(result, expected(values))
    assert torch.equal(result.signbit(), values.signbit())
    assert not (result.view(torch.int32) & 0x1FFF).any()
    assert torch.equal(rounded(result), result)
    assert result.isinf().any()  # the largest numbers


@pytest.mark.parametrize("rounded", [by_kernel, round_to_tf32])
def test_what_is_not_finite(rounded):
    infinities = torch.tensor([torch.inf, -torch.inf] * 4)
    assert torch.equal(rounded(infinities), infinities)
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FFFF000])
    assert rounded(from_bits(torch.cat([bits, bits - 2**31]))).isnan().all()


@triton.jit
def split_kernel(value, high, low, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    first, second = split_tf32(tl.load(value + places))
    tl.store(high + places, first)
    tl.store(low + places, second)


def split(values):
    padded = torch.zeros(triton.next_power_of_2(len(values)))
    padded[: len(values)] = values
    high, low = (torch.full_like(padded, torch.nan) for _ in range(2))
    split_kernel[(1,)](padded, high, low, SIZE=len(padded))
    return high[: len(values)], low[: len(values)]


def test_split():
    """Nothing is lost, the first is what tensor cores take whole, and the rest is as often of either sign."""
    values = numbers()
    high, low = split(values)
    assert torch.equal(high + low, values) and torch.equal(high.double() + low.double(), values.double())
    assert not (high.view(torch.int32) & 0x1FFF).any()
    assert high.isfinite().all(), "the largest numbers too"
    regular = values.abs() < 2.0**127
    assert torch.equal(high[regular], expected(values[regular]))
    drawn = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    high, low = split(drawn)
    assert ((low * drawn).sign().sum().abs() < 300).all()


def test_split_of_what_is_not_finite():
    high, _ = split(torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert high[0] == torch.inf and high[1] == -torch.inf and high[2].isnan()


@triton.jit
def dot_kernel(a, b, result, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    accumulator = tl.full((SIZE, SIZE), 1.0, tl.float32)
    tl.store(result + places, dot_as_tf32_products(tl.load(a + places), tl.load(b + places), accumulator))


def dot(a, b):
    result = torch.full_like(a, torch.nan)
    dot_kernel[(1,)](a, b, result, SIZE=len(a))
    return result


def test_dot():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator) for _ in range(2))
    torch.testing.assert_close(dot(a, b).double(), 1 + a.double() @ b.double(), rtol=1e-6, atol=2e-6)


def test_dot_of_what_is_not_finite():
    """An infinity times a number is one, as PyTorch has it, though its rest is NaN."""
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    a[0, 0], a[1, 1], a[2, 2] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    result = dot(a, b)
    assert (result[0] == torch.inf).all() and result[1].isnan().all()
    assert torch.equal(result[2:], (1 + a @ b)[2:])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_product_beyond_float32_is_infinite(sign):
    """Whatever the sign of the rests, which overflow as well."""
    a, b = torch.zeros(16, 16), torch.zeros(16, 16)
    a[:, 0], b[0] = 3e38, sign * 3.3e20 * (1 + torch.arange(16) * 1e-4)
    assert torch.equal(dot(a, b), 1 + a @ b) and dot(a, b).isinf().all()
