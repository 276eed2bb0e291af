"""L30: Linear → GroupNorm → Hardtanh, forward and backward."""

import torch

from autotune_configs import group_norm_config, linear_config
from ops import checks, gemm, operators, precision, reference
from ops.chain import as_vectors, check_chain, fuses_into_product
from ops.group_norm import fits_registers, group_norm_hardtanh
from ops.linear import linear
from triton_kernels.epilogues import group_norm_hardtanh_epilogue
from triton_kernels.group_norm import group_norm as group_norm_kernel
from triton_kernels.group_norm import group_norm_backward
from triton_kernels.linear import linear as launch_linear
from triton_kernels.pointwise import HARDTANH


def _forward(input, weight, linear_bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
    """Returns the chain's result [M, N] and z = linear(input), which the backward pass needs (else empty)."""
    (M, K), N = input.shape, weight.shape[0]
    group_size = N // num_groups
    output = torch.empty(M, N, dtype=input.dtype, device=input.device)
    config = linear_config("group_norm_hardtanh", input.dtype, M, N, K, group_size, input.device)
    if fuses_into_product(config, group_size, input.dtype):
        z = torch.empty_like(output) if training else None
        launch_linear(
            gemm.depth_contiguous(input),
            gemm.depth_contiguous(weight),
            group_norm_hardtanh_epilogue,
            config,
            output=output,
            saved=z,
            vectors=(linear_bias, None, norm_weight, norm_bias),
            scalars=(min_val, max_val, eps),
            group_size=group_size,
            input_precision=precision.FLOAT32_INPUT_PRECISION,
        )
    else:
        z = gemm.affine(input, weight, linear_bias)
        group_norm_kernel(
            z,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            group_norm_config(M, N, group_size),
            output=output,
            final=HARDTANH,
            bounds=(min_val, max_val),
        )
    return output, z if training else output.new_empty(0)


def _fake(input, weight, linear_bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
    output = input.new_empty(input.shape[0], weight.shape[0])
    return output, torch.empty_like(output) if training else output.new_empty(0)


def _norm_backward(gradient, z, num_groups, norm_weight, norm_bias, min_val, max_val, eps):
    """Returns the gradient at z and, [3, N], those of linear_bias, norm_weight and norm_bias."""
    M, N = z.shape
    z_gradient = torch.empty_like(z)
    sums = group_norm_backward(
        gradient,
        z,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        group_norm_config(M, N, N // num_groups),
        input_gradient=z_gradient,
        final=HARDTANH,
        bounds=(min_val, max_val),
    )
    return z_gradient, sums


_operator = operators.define(
    "linear_group_norm_hardtanh(Tensor input, Tensor weight, Tensor? linear_bias, int num_groups, Tensor? norm_weight,"
    " Tensor? norm_bias, float min_val, float max_val, float eps, bool training) -> (Tensor, Tensor)",
    _forward,
    _fake,
)
_norm_backward_operator = operators.define(
    "linear_group_norm_hardtanh_backward(Tensor gradient, Tensor z, int num_groups, Tensor? norm_weight,"
    " Tensor? norm_bias, float min_val, float max_val, float eps) -> (Tensor, Tensor)",
    _norm_backward,
    lambda gradient, z, *arguments: (torch.empty_like(z), z.new_empty(3, z.shape[1], dtype=torch.float32)),
)


def _setup_context(ctx, inputs, outputs):
    input, weight, linear_bias, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, training = inputs
    ctx.save_for_backward(input, weight, outputs[1], linear_bias, norm_weight, norm_bias)


def _backward(ctx, gradient):
    input, weight, z, linear_bias, norm_weight, norm_bias = ctx.saved_tensors
    z_gradient, sums = _norm_backward_operator(
        gradient.contiguous(), z, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars
    )
    linear_bias_gradient, *norm_gradients = operators.vector_gradients(
        sums, (0, linear_bias), (1, norm_weight), (2, norm_bias)
    )
    matrices = gemm.linear_gradients(ctx, z_gradient, input, weight)
    return *matrices, linear_bias_gradient, None, *norm_gradients, None, None, None, None


LinearGroupNormHardtanhFunction = operators.differentiable(_operator, _setup_context, _backward)


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
    """``hardtanh(group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias), min_val, max_val)``

    input (*, in_features), weight (out_features, in_features), the three vectors (out_features) or None; float32, bfloat16,
    float16 or float64, all of one dtype outside autocast. Returns (*, out_features) in the input's dtype, or autocast's.
    The norm is over the last dimension's groups, one sample a row. Raises ValueError or TypeError naming an argument that
    does not fit.
    """
    check_chain(input, weight, num_groups, eps, linear_bias=linear_bias, norm_weight=norm_weight, norm_bias=norm_bias)
    checks.bounds(min_val, max_val)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    linear_bias, norm_weight, norm_bias = as_vectors(input, linear_bias, norm_weight, norm_bias)
    bounds = {"min_val": min_val, "max_val": max_val}
    if not precision.runs_kernels(input):
        return reference.linear_group_norm_hardtanh(
            input, weight, linear_bias, num_groups, norm_weight, norm_bias, **bounds, eps=eps
        )
    rows = input.reshape(-1, input.shape[-1])
    if fits_registers(weight.shape[0], 1, num_groups):
        training = precision.needs_gradient(input, weight, linear_bias, norm_weight, norm_bias)
        scalars = float(min_val), float(max_val), float(eps)
        result = LinearGroupNormHardtanhFunction.apply(
            rows, weight, linear_bias, num_groups, norm_weight, norm_bias, *scalars, training
        )
    else:
        z = linear(rows, weight, linear_bias)
        result = group_norm_hardtanh(z, num_groups, norm_weight, norm_bias, **bounds, eps=eps)
    return result.view(*input.shape[:-1], weight.shape[0])


class LinearGroupNormHardtanh(torch.nn.Module):
    """``hardtanh(group_norm(gemm(x)))`` with the parameters ``gemm.*`` and ``group_norm.*``."""

    def __init__(self, in_features: int, out_features: int, num_groups: int, hardtanh_min: float, hardtanh_max: float):
        super().__init__()
        self.gemm = torch.nn.Linear(in_features, out_features)
        self.group_norm = torch.nn.GroupNorm(num_groups, out_features)
        self.hardtanh = torch.nn.Hardtanh(min_val=hardtanh_min, max_val=hardtanh_max)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear_group_norm_hardtanh(
            input,
            self.gemm.weight,
            self.gemm.bias,
            self.group_norm.num_groups,
            self.group_norm.weight,
            self.group_norm.bias,
            min_val=self.hardtanh.min_val,
            max_val=self.hardtanh.max_val,
            eps=self.group_norm.eps,
        )
