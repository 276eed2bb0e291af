"""Fused layer chains for PyTorch, forward and backward: drop-in functions and modules, and ``fuse`` for whole models.

The functions run as Triton kernels on NVIDIA GPUs, for float32, bfloat16 and float16. On the CPU, and for float64, they
run as the plain PyTorch of ``ops.reference``. They work with autograd, autocast, ``torch.compile``, ``torch.export``
and DTensor. Numbers may be Python's or NumPy's, or anything else that stands for an integer (``__index__``) or is a
``numbers.Real``.
"""

from ops.sibling_packages import require_own_siblings

__version__ = "0.2.0.dev0"
__distribution__ = "normfuse"  # by which it is told from another project's package of this name

require_own_siblings()

from ops import flops, pointwise, reference, tensor_parallel  # noqa: E402, F401
from ops.chain import Chain, decompositions  # noqa: E402
from ops.composed_functions import (  # noqa: E402
    conv2d_group_norm,
    conv_transpose2d_group_norm,
    group_norm,
    layer_norm,
    linear,
    linear_group_norm,
    linear_layer_norm,
)
from ops.composed_modules import (  # noqa: E402
    Conv2dGroupNorm,
    ConvTranspose2dGroupNorm,
    GroupNorm,
    LayerNorm,
    Linear,
    LinearGroupNorm,
    LinearLayerNorm,
)
from ops.explain import ExplainedCall, ExplainedStep, Explanation, LeftStep, explain  # noqa: E402
from ops.float32_products import faster_float32  # noqa: E402
from ops.functions import (  # noqa: E402
    bias_hardtanh_mish,
    conv_transpose2d_gelu_group_norm,
    gelu_group_norm,
    group_norm_hardtanh,
    linear_group_norm_hardtanh,
    linear_group_norm_min,
    linear_hardtanh_mish_group_norm,
)
from ops.fuse import FusedChain, FusionReport, fuse, unfuse  # noqa: E402
from ops.matrix_products import addmm, baddbmm, bmm, matmul  # noqa: E402
from ops.modules import (  # noqa: E402
    ConvTranspose2dGeluGroupNorm,
    LinearGroupNormHardtanh,
    LinearGroupNormMin,
    LinearHardtanhMishGroupNorm,
)

__all__ = [
    "Chain",
    "Conv2dGroupNorm",
    "ConvTranspose2dGeluGroupNorm",
    "ConvTranspose2dGroupNorm",
    "ExplainedCall",
    "ExplainedStep",
    "Explanation",
    "FusedChain",
    "FusionReport",
    "GroupNorm",
    "LayerNorm",
    "LeftStep",
    "Linear",
    "LinearGroupNorm",
    "LinearGroupNormHardtanh",
    "LinearGroupNormMin",
    "LinearHardtanhMishGroupNorm",
    "LinearLayerNorm",
    "addmm",
    "baddbmm",
    "bias_hardtanh_mish",
    "bmm",
    "conv2d_group_norm",
    "conv_transpose2d_gelu_group_norm",
    "conv_transpose2d_group_norm",
    "decompositions",
    "explain",
    "faster_float32",
    "fuse",
    "gelu_group_norm",
    "group_norm",
    "group_norm_hardtanh",
    "layer_norm",
    "linear",
    "linear_group_norm",
    "linear_group_norm_hardtanh",
    "linear_group_norm_min",
    "linear_hardtanh_mish_group_norm",
    "linear_layer_norm",
    "matmul",
    "pointwise",
    "reference",
    "tensor_parallel",
    "unfuse",
]
