"""The chains that the project is for, and its building blocks, as data."""

from triton_kernels.chain import Chain
from triton_kernels.pointwise import ADD, GELU, GELU_TANH, HARDTANH, MISH
from triton_kernels.row_minimum import ROW_MINIMUM

#: L94: Linear + bias → Hardtanh → Mish → GroupNorm.
LINEAR_HARDTANH_MISH_GROUP_NORM = Chain("linear", before=(ADD, HARDTANH, MISH))
#: L75: Linear → GroupNorm → row minimum. Its last bias is added by the reduction.
LINEAR_GROUP_NORM_MIN = Chain("linear", reduction=ROW_MINIMUM)
#: L30: Linear → GroupNorm → Hardtanh.
LINEAR_GROUP_NORM_HARDTANH = Chain("linear", after=(HARDTANH,))
#: L19: ConvTranspose2d → GELU → GroupNorm.
CONV_TRANSPOSE2D_GELU_GROUP_NORM = Chain("conv_transpose2d", before=(GELU,))
CONV_TRANSPOSE2D_GELU_TANH_GROUP_NORM = Chain("conv_transpose2d", before=(GELU_TANH,))

LINEAR = Chain("linear", norm="")
BIAS_HARDTANH_MISH = Chain(before=(ADD, HARDTANH, MISH), norm="")
GROUP_NORM = Chain()
GROUP_NORM_HARDTANH = Chain(after=(HARDTANH,))
GELU_GROUP_NORM = Chain(before=(GELU,))
GELU_TANH_GROUP_NORM = Chain(before=(GELU_TANH,))
