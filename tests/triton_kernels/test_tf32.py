"""Rounding to TF32: as a jit function, on the way of a copy, and by PyTorch."""

import pytest
import torch

from tests.images import round_to_tf32
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.pointwise import nearest_tf32

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
