"""float32 numbers rounded to TF32's ten bits of mantissa: tensor cores would cut the rest off, with twice the error.

To nearest, ties away from zero, as cuDNN rounds and ``cvt.rna.tf32.f32`` does: half a step is added to the bits, and
the 13 that TF32 lacks are cleared. What rounds past the largest number becomes infinite; infinities stay, and a NaN
becomes a quiet one, which stays a NaN where the tensor cores cut it off.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def nearest_tf32(value, min_val, max_val):
    """``value`` (float32) rounded; a pointwise function of the form that ``triton_kernels.pointwise`` describes."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value + value)


#: Numbers from here on would round to infinity.
_ROUNDS_TO_INFINITY = tl.constexpr(float.fromhex("0x1.ffep127"))


@triton.jit
def split_tf32(value):
    """Two numbers whose sum is ``value`` (float32): TF32's nearest, and the rest, which the tensor cores cut off.

    Were the first cut off as well, the rest would have its sign, and what is lost of it too: sums of such products are
    too small by 2.2e-7 of themselves, where these are off by 6e-8, in no direction (normal data, in float64).
    """
    bits = value.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    cut_off = (bits & -0x2000).to(tl.float32, bitcast=True)
    high = tl.where(tl.abs(value) < _ROUNDS_TO_INFINITY, nearest, tl.where(value == value, cut_off, value))
    return high, value - high


@triton.jit
def dot_as_tf32_products(a, b, accumulator):
    """accumulator + a @ b, of float32 matrices, to float32's accuracy on tensor cores: three TF32 products.

    They are added up by themselves, and then to the accumulator: the tensor cores' own sums are cut off, not rounded.
    Where a number is not finite, or a product beyond float32, the sum of the rests is not finite either, perhaps of the
    other sign, and does not count. (A product within 2**-11 of the largest float32 may round to infinity.)
    """
    a_high, a_low = split_tf32(a)
    b_high, b_low = split_tf32(b)
    rest = tl.dot(a_low, b_high, input_precision="tf32")
    rest = tl.dot(a_high, b_low, rest, input_precision="tf32")
    rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)
    return accumulator + tl.dot(a_high, b_high, rest, input_precision="tf32")


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The same of a float32 tensor of any shape, by PyTorch: for what is small."""
    rounded = torch.bitwise_and(tensor.view(torch.int32) + 0x1000, -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor + tensor)
