"""L94: Linear + bias → Hardtanh → Mish → GroupNorm, forward and backward."""

from collections.abc import Sequence

import torch

from ops import checks, precision, reference, submodules, tensor_parallel
from ops.bias_hardtanh_mish import bias_hardtanh_mish
from ops.chain import as_vectors, check_chain, in_reference, with_leading_shape
from ops.group_norm import fits_registers, group_norm
from ops.linear import linear
from ops.matrix_chain import define_matrix_chain
from ops.replay import repeated_eagerly
from triton_kernels.epilogues import hardtanh_mish_group_norm_epilogue
from triton_kernels.pointwise import HARDTANH_MISH, IDENTITY

_differentiable = define_matrix_chain(
    "hardtanh_mish_group_norm", hardtanh_mish_group_norm_epilogue, activation=HARDTANH_MISH, final=IDENTITY
)


@repeated_eagerly
def linear_hardtanh_mish_group_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, bias, Hardtanh, Mish and GroupNorm, fused.

    It computes::

        group_norm(mish(hardtanh(linear(input, weight, linear_bias) + bias)), num_groups, norm_weight, norm_bias)

    ``mish(z) = z * tanh(softplus(z))`` (Misra, Mish: A Self Regularized Non-Monotonic Activation Function, 2019). The
    GroupNorm is over the last dimension; each row is one sample. All tensors have one dtype (float32, bfloat16, float16
    or float64) and are on one device. Under autocast their dtypes may differ.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        bias: ``(out_features,)``, added after the linear layer, or None.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        min_val: Lower bound of the Hardtanh.
        max_val: Upper bound of the Hardtanh.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    vectors = {"linear_bias": linear_bias, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    num_groups, eps = check_chain(input, weight, num_groups, eps, **vectors)
    min_val, max_val = checks.bounds(min_val, max_val)
    if tensor_parallel.is_distributed(input, weight, linear_bias, bias, norm_weight, norm_bias):
        tensors = {"input": input, "weight": weight, **vectors}
        others = {"min_val": min_val, "max_val": max_val, "eps": eps}
        function = linear_hardtanh_mish_group_norm
        return tensor_parallel.on_shards(function, tensor_parallel.LINEAR, tensors, num_groups, **others)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    linear_bias, bias, norm_weight, norm_bias = as_vectors(linear_bias, bias, norm_weight, norm_bias)
    bounds = {"min_val": min_val, "max_val": max_val}
    if not precision.runs_kernels(input):
        return in_reference(
            reference.linear_hardtanh_mish_group_norm,
            input,
            weight,
            linear_bias,
            bias,
            num_groups,
            norm_weight,
            norm_bias,
            **bounds,
            eps=eps,
        )
    rows = input.reshape(-1, input.shape[-1])
    if fits_registers(weight.shape[0], 1, num_groups):
        training = precision.needs_gradient(input, weight, linear_bias, bias, norm_weight, norm_bias)
        result = _differentiable(
            rows, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training
        )
    else:
        activated = bias_hardtanh_mish(linear(rows, weight, linear_bias), bias, **bounds)
        result = group_norm(activated, num_groups, norm_weight, norm_bias, eps=eps)
    return with_leading_shape(result, input)


class LinearHardtanhMishGroupNorm(torch.nn.Module):
    """Linear layer, bias, Hardtanh, Mish and GroupNorm: ``groupnorm(mish(hardtanh(gemm(input) + bias)))``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``bias``, ``groupnorm.weight`` and
    ``groupnorm.bias``. The bounds are those of ``hardtanh``, -1 and 1. See :func:`ops.linear_hardtanh_mish_group_norm`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias_shape: Shape of ``bias``: ``(out_features,)``, or the same with leading ones.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearHardtanhMishGroupNorm(64, 128, bias_shape=(128,), num_groups=8)
        layer(torch.randn(16, 64))  # (16, 128)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias_shape: int | Sequence[int],
        num_groups: int,
        *,
        linear_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        in_features = checks.size("in_features", in_features)
        out_features = checks.size("out_features", out_features)
        checks.dtype(dtype)
        shape = checks.shape("bias_shape", bias_shape)
        if not checks.is_vector(shape, out_features):
            raise ValueError(f"bias_shape must be ({out_features},), got {shape}")
        num_groups, eps = checks.groups(out_features, num_groups), checks.epsilon(eps)
        self.gemm = torch.nn.Linear(in_features, out_features, bias=linear_bias, device=device, dtype=dtype)
        self.bias = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.hardtanh = torch.nn.Hardtanh()
        self.groupnorm = torch.nn.GroupNorm(num_groups, out_features, eps=eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw ``bias`` from the standard normal distribution; the layers reset their own parameters."""
        if self.bias is not None:
            torch.nn.init.normal_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(*, in_features)``; the result is ``(*, out_features)``."""
        gemm, hardtanh, norm = self.gemm, self.hardtanh, self.groupnorm
        if not submodules.are_as_made(
            self,
            gemm=(gemm, torch.nn.Linear),
            hardtanh=(hardtanh, torch.nn.Hardtanh),
            groupnorm=(norm, torch.nn.GroupNorm),
        ):
            product = gemm(input)
            biased = product if self.bias is None else product + self.bias
            activated = torch.nn.functional.mish(hardtanh(biased))
            return with_leading_shape(norm(activated.reshape(-1, activated.shape[-1])), input)
        return linear_hardtanh_mish_group_norm(
            input,
            gemm.weight,
            gemm.bias,
            self.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            min_val=hardtanh.min_val,
            max_val=hardtanh.max_val,
            eps=norm.eps,
        )
