"""L94: Linear + bias → Hardtanh → Mish → GroupNorm, forward and backward."""

import torch

from autotune_configs import group_norm_config, linear_config
from ops import checks, gemm, operators, precision, reference
from ops.bias_hardtanh_mish import bias_hardtanh_mish
from ops.chain import as_vectors, check_chain, fuses_into_product
from ops.group_norm import fits_registers, group_norm
from ops.linear import linear
from triton_kernels.epilogues import hardtanh_mish_group_norm_epilogue
from triton_kernels.group_norm import group_norm as group_norm_kernel
from triton_kernels.group_norm import group_norm_backward
from triton_kernels.linear import linear as launch_linear
from triton_kernels.pointwise import HARDTANH_MISH


def _forward(input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
    """Returns the chain's result [M, N] and z = linear(input) + bias, which the backward pass needs (else empty)."""
    (M, K), N = input.shape, weight.shape[0]
    group_size = N // num_groups
    output = torch.empty(M, N, dtype=input.dtype, device=input.device)
    config = linear_config("hardtanh_mish_group_norm", input.dtype, M, N, K, group_size, input.device)
    if fuses_into_product(config, group_size, input.dtype):
        z = torch.empty_like(output) if training else None
        launch_linear(
            gemm.depth_contiguous(input),
            gemm.depth_contiguous(weight),
            hardtanh_mish_group_norm_epilogue,
            config,
            output=output,
            saved=z,
            vectors=(linear_bias, bias, norm_weight, norm_bias),
            scalars=(min_val, max_val, eps),
            group_size=group_size,
            input_precision=precision.FLOAT32_INPUT_PRECISION,
        )
    else:
        z = gemm.affine(input, weight, linear_bias, bias)
        group_norm_kernel(
            z,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            group_norm_config(M, N, group_size),
            output=output,
            activation=HARDTANH_MISH,
            bounds=(min_val, max_val),
        )
    return output, z if training else output.new_empty(0)


def _fake(input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
    output = input.new_empty(input.shape[0], weight.shape[0])
    return output, torch.empty_like(output) if training else output.new_empty(0)


def _norm_backward(gradient, z, num_groups, norm_weight, norm_bias, min_val, max_val, eps):
    """Returns the gradient at z and, [3, N], those of linear_bias (and bias), norm_weight and norm_bias."""
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
        activation=HARDTANH_MISH,
        bounds=(min_val, max_val),
    )
    return z_gradient, sums


_operator = operators.define(
    "linear_hardtanh_mish_group_norm(Tensor input, Tensor weight, Tensor? linear_bias, Tensor? bias, int num_groups,"
    " Tensor? norm_weight, Tensor? norm_bias, float min_val, float max_val, float eps, bool training)"
    " -> (Tensor, Tensor)",
    _forward,
    _fake,
)
_norm_backward_operator = operators.define(
    "hardtanh_mish_group_norm_backward(Tensor gradient, Tensor z, int num_groups, Tensor? norm_weight,"
    " Tensor? norm_bias, float min_val, float max_val, float eps) -> (Tensor, Tensor)",
    _norm_backward,
    lambda gradient, z, *arguments: (torch.empty_like(z), z.new_empty(3, z.shape[1], dtype=torch.float32)),
)


def _setup_context(ctx, inputs, outputs):
    input, weight, linear_bias, bias, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, training = inputs
    ctx.save_for_backward(input, weight, outputs[1], linear_bias, bias, norm_weight, norm_bias)


def _backward(ctx, gradient):
    input, weight, z, linear_bias, bias, norm_weight, norm_bias = ctx.saved_tensors
    z_gradient, sums = _norm_backward_operator(
        gradient.contiguous(), z, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars
    )
    linear_bias_gradient, bias_gradient, *norm_gradients = operators.vector_gradients(
        sums, (0, linear_bias), (0, bias), (1, norm_weight), (2, norm_bias)
    )
    matrices = gemm.linear_gradients(ctx, z_gradient, input, weight)
    return *matrices, linear_bias_gradient, bias_gradient, None, *norm_gradients, None, None, None, None


LinearHardtanhMishGroupNormFunction = operators.differentiable(_operator, _setup_context, _backward)


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
    """``group_norm(mish(hardtanh(linear(input, weight, linear_bias) + bias)), num_groups, norm_weight, norm_bias)``

    input (*, in_features), weight (out_features, in_features), the four vectors (out_features) or None; float32, bfloat16,
    float16 or float64, all of one dtype outside autocast. Returns (*, out_features) in the input's dtype, or autocast's.
    The norm is over the last dimension's groups, one sample a row. Raises ValueError or TypeError naming an argument that
    does not fit.
    """
    check_chain(
        input, weight, num_groups, eps, linear_bias=linear_bias, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias
    )
    checks.bounds(min_val, max_val)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    linear_bias, bias, norm_weight, norm_bias = as_vectors(input, linear_bias, bias, norm_weight, norm_bias)
    bounds = {"min_val": min_val, "max_val": max_val}
    if not precision.runs_kernels(input):
        return reference.linear_hardtanh_mish_group_norm(
            input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, **bounds, eps=eps
        )
    rows = input.reshape(-1, input.shape[-1])
    if fits_registers(weight.shape[0], 1, num_groups):
        training = precision.needs_gradient(input, weight, linear_bias, bias, norm_weight, norm_bias)
        scalars = float(min_val), float(max_val), float(eps)
        result = LinearHardtanhMishGroupNormFunction.apply(
            rows, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, *scalars, training
        )
    else:
        activated = bias_hardtanh_mish(linear(rows, weight, linear_bias), bias, **bounds)
        result = group_norm(activated, num_groups, norm_weight, norm_bias, eps=eps)
    return result.view(*input.shape[:-1], weight.shape[0])


class LinearHardtanhMishGroupNorm(torch.nn.Module):
    """``groupnorm(mish(hardtanh(gemm(x) + bias)))`` with the parameters ``gemm.*``, ``bias`` and ``groupnorm.*``."""

    def __init__(self, in_features: int, out_features: int, bias_shape: tuple[int, ...], num_groups: int):
        super().__init__()
        self.gemm = torch.nn.Linear(in_features, out_features)
        self.bias = torch.nn.Parameter(torch.randn(bias_shape))
        self.hardtanh = torch.nn.Hardtanh()
        self.groupnorm = torch.nn.GroupNorm(num_groups=num_groups, num_channels=out_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear_hardtanh_mish_group_norm(
            input,
            self.gemm.weight,
            self.gemm.bias,
            self.bias,
            self.groupnorm.num_groups,
            self.groupnorm.weight,
            self.groupnorm.bias,
            min_val=self.hardtanh.min_val,
            max_val=self.hardtanh.max_val,
            eps=self.groupnorm.eps,
        )
