"""L30: Linear → GroupNorm → Hardtanh, forward and backward."""

import torch

from ops import checks, precision, reference, submodules, tensor_parallel
from ops.chain import as_vectors, check_chain, in_reference, with_leading_shape
from ops.group_norm import fits_registers, group_norm_hardtanh
from ops.linear import linear
from ops.matrix_chain import define_matrix_chain
from ops.replay import repeated_eagerly
from triton_kernels.epilogues import group_norm_hardtanh_epilogue
from triton_kernels.pointwise import HARDTANH, IDENTITY

_differentiable = define_matrix_chain(
    "group_norm_hardtanh", group_norm_hardtanh_epilogue, activation=IDENTITY, final=HARDTANH
)


@repeated_eagerly
def linear_group_norm_hardtanh(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, GroupNorm and Hardtanh, fused.

    It computes::

        hardtanh(group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias), min_val, max_val)

    The GroupNorm is over the last dimension; each row is one sample. All tensors have one dtype (float32, bfloat16,
    float16 or float64) and are on one device. Under autocast their dtypes may differ.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        min_val: Lower bound of the result.
        max_val: Upper bound of the result.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.

    Example::

        input, weight, linear_bias = torch.randn(16, 64), torch.randn(128, 64), torch.randn(128)
        ops.linear_group_norm_hardtanh(input, weight, linear_bias, 8, min_val=-2.0, max_val=2.0)  # (16, 128)
    """
    vectors = {"linear_bias": linear_bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    num_groups, eps = check_chain(input, weight, num_groups, eps, **vectors)
    min_val, max_val = checks.bounds(min_val, max_val)
    if tensor_parallel.is_distributed(input, weight, linear_bias, norm_weight, norm_bias):
        tensors = {"input": input, "weight": weight, **vectors}
        others = {"min_val": min_val, "max_val": max_val, "eps": eps}
        function = linear_group_norm_hardtanh
        return tensor_parallel.on_shards(function, tensor_parallel.LINEAR, tensors, num_groups, **others)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    linear_bias, norm_weight, norm_bias = as_vectors(linear_bias, norm_weight, norm_bias)
    bounds = {"min_val": min_val, "max_val": max_val}
    if not precision.runs_kernels(input):
        return in_reference(
            reference.linear_group_norm_hardtanh,
            input,
            weight,
            linear_bias,
            num_groups,
            norm_weight,
            norm_bias,
            **bounds,
            eps=eps,
        )
    rows = input.reshape(-1, input.shape[-1])
    if fits_registers(weight.shape[0], 1, num_groups):
        training = precision.needs_gradient(input, weight, linear_bias, norm_weight, norm_bias)
        result = _differentiable(
            rows, weight, linear_bias, None, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training
        )
    else:
        z = linear(rows, weight, linear_bias)
        result = group_norm_hardtanh(z, num_groups, norm_weight, norm_bias, **bounds, eps=eps)
    return with_leading_shape(result, input)


class LinearGroupNormHardtanh(torch.nn.Module):
    """Linear layer, GroupNorm and Hardtanh: ``hardtanh(group_norm(gemm(input)))``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``group_norm.weight`` and
    ``group_norm.bias``. See :func:`ops.linear_group_norm_hardtanh`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        hardtanh_min: Lower bound of the result.
        hardtanh_max: Upper bound of the result.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearGroupNormHardtanh(64, 128, num_groups=8, hardtanh_min=-2.0, hardtanh_max=2.0)
        layer(torch.randn(16, 64))  # (16, 128)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        hardtanh_min: float,
        hardtanh_max: float,
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
        num_groups, eps = checks.groups(out_features, num_groups), checks.epsilon(eps)
        least, most = checks.real("hardtanh_min", hardtanh_min), checks.real("hardtanh_max", hardtanh_max)
        if not least < most:  # torch.nn.Hardtanh asserts it
            raise ValueError(
                f"hardtanh_min must be less than hardtanh_max, got {hardtanh_min} for hardtanh_max={hardtanh_max}"
            )
        self.gemm = torch.nn.Linear(in_features, out_features, bias=linear_bias, device=device, dtype=dtype)
        self.group_norm = torch.nn.GroupNorm(num_groups, out_features, eps=eps, device=device, dtype=dtype)
        self.hardtanh = torch.nn.Hardtanh(min_val=least, max_val=most)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(*, in_features)``; the result is ``(*, out_features)``."""
        gemm, norm, hardtanh = self.gemm, self.group_norm, self.hardtanh
        if not submodules.are_as_made(
            self,
            gemm=(gemm, torch.nn.Linear),
            group_norm=(norm, torch.nn.GroupNorm),
            hardtanh=(hardtanh, torch.nn.Hardtanh),
        ):
            z = gemm(input)
            return with_leading_shape(hardtanh(norm(z.reshape(-1, z.shape[-1]))), input)
        return linear_group_norm_hardtanh(
            input,
            gemm.weight,
            gemm.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            min_val=hardtanh.min_val,
            max_val=hardtanh.max_val,
            eps=norm.eps,
        )
