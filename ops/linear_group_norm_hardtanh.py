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
    """``hardtanh(group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias))``

    input (*, in_features), weight (out_features, in_features), the three vectors (out_features) or None; float32,
    bfloat16, float16 or float64, all of one dtype outside autocast. Returns (*, out_features) in the input's dtype, or
    autocast's. The norm is over the last dimension's groups, one sample a row. Raises ValueError or TypeError naming an
    argument that does not fit.
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
    """``hardtanh(group_norm(gemm(x)))`` with the parameters ``gemm.*`` and ``group_norm.*``."""

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
        in_features = checks.integer("in_features", in_features)
        out_features = checks.integer("out_features", out_features)
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
