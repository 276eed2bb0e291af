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


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """The same of a float32 tensor of any shape, by PyTorch: for what is small."""
    rounded = torch.bitwise_and(tensor.view(torch.int32) + 0x1000, -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor + tensor)
