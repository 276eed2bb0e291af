"""Round float32 numbers to TF32, which has ten bits of mantissa. Tensor cores would truncate, with twice the error.

Rounding is to nearest, ties away from zero, as in cuDNN and in ``cvt.rna.tf32.f32``: half a step is added to the bits,
and the 13 bits that TF32 lacks are cleared. A number that rounds beyond the largest one becomes infinite. Infinities
stay as they are. A NaN becomes a quiet NaN, whose truncation is still a NaN.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def nearest_tf32(value, operand):
    """``value`` (float32) rounded; a pointwise function of the form that ``triton_kernels.pointwise`` describes."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value + value)


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The same for a small float32 tensor of any shape, in PyTorch."""
    rounded = torch.bitwise_and(tensor.view(torch.int32) + 0x1000, -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor + tensor)
