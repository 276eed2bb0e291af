"""Linear → pointwise → GroupNorm → pointwise as one operator: what L94 and L30 have in common."""

from collections.abc import Callable

import torch

from autotune_configs import group_norm_config
from ops import gemm, operators
from ops.chain import fused_product_config
from triton_kernels.group_norm import group_norm, group_norm_backward
from triton_kernels.pointwise import Pointwise


def define_matrix_chain(name: str, epilogue, activation: Pointwise, final: Pointwise) -> Callable[..., torch.Tensor]:
    """The chain ``final(group_norm(activation(linear(input) + bias)))``: an operator, called with its gradients.

    ``epilogue`` does all of it on a tile of the product; where that cannot be (groups that no tile holds, a product
    that the library does), the product is followed by one pass of the group norm's kernel. Both keep z = linear(input)
    + bias for the backward pass, nothing else of that size.
    """

    def forward(input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
        M, N = input.shape[0], weight.shape[0]
        group_size = N // num_groups
        output = torch.empty(M, N, dtype=input.dtype, device=input.device)
        config = fused_product_config(f"linear_{name}", input, weight, group_size, linear_bias, bias)
        if config is not None:
            z = torch.empty_like(output) if training else None
            gemm.product(
                input,
                weight,
                epilogue,
                config,
                output=output,
                saved=z,
                vectors=(linear_bias, bias, norm_weight, norm_bias),
                scalars=(min_val, max_val, eps),
                group_size=group_size,
            )
        else:
            z = gemm.affine(input, weight, linear_bias, bias)
            group_norm(
                z,
                num_groups,
                norm_weight,
                norm_bias,
                eps,
                group_norm_config("group_norm", input.dtype, M, N, group_size, input.device),
                output=output,
                activation=activation,
                final=final,
                bounds=(min_val, max_val),
            )
        return output, z if training else output.new_empty(0)

    def fake(input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val, eps, training):
        output = input.new_empty(input.shape[0], weight.shape[0])
        return output, torch.empty_like(output) if training else output.new_empty(0)

    def norm_backward(gradient, z, num_groups, norm_weight, norm_bias, min_val, max_val, eps, sums_dtype):
        """The gradient at z and, [3, N], those of norm_weight, norm_bias and linear_bias (and bias)."""
        M, N = z.shape
        gradient, z = gradient.contiguous(), z.contiguous()
        z_gradient = torch.empty_like(z)
        sums = group_norm_backward(
            gradient,
            z,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            group_norm_config("group_norm_backward", z.dtype, M, N, N // num_groups, z.device),
            input_gradient=z_gradient,
            activation=activation,
            final=final,
            bounds=(min_val, max_val),
            sums_dtype=sums_dtype,
        )
        return z_gradient, sums

    norm_parameters = "Tensor? norm_weight, Tensor? norm_bias, float min_val, float max_val, float eps"
    operator = operators.define(
        f"linear_{name}(Tensor input, Tensor weight, Tensor? linear_bias, Tensor? bias, int num_groups,"
        f" {norm_parameters}, bool training) -> (Tensor, Tensor)",
        forward,
        fake,
    )
    norm_backward_operator = operators.define(
        f"linear_{name}_backward(Tensor gradient, Tensor z, int num_groups, {norm_parameters}, ScalarType sums_dtype)"
        " -> (Tensor, Tensor)",
        norm_backward,
        lambda gradient, z, *arguments: (z.new_empty(z.shape), z.new_empty(3, z.shape[1], dtype=arguments[-1])),
    )

    def setup_context(ctx, inputs, outputs):
        input, weight, linear_bias, bias, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, training = inputs
        ctx.save_for_backward(input, weight, outputs[1], linear_bias, bias, norm_weight, norm_bias)

    def backward(ctx, gradient):
        input, weight, z, linear_bias, bias, norm_weight, norm_bias = ctx.saved_tensors
        sums_dtype = operators.sums_dtype(linear_bias, bias, norm_weight, norm_bias)
        z_gradient, sums = norm_backward_operator(
            gradient, z, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, sums_dtype
        )
        linear_bias_gradient, bias_gradient, *norm_gradients = operators.vector_gradients(
            sums, (2, linear_bias), (2, bias), (0, norm_weight), (1, norm_bias)
        )
        matrices = gemm.linear_gradients(ctx, z_gradient, input, weight)
        return *matrices, linear_bias_gradient, bias_gradient, None, *norm_gradients, None, None, None, None

    return operators.differentiable(operator, setup_context, backward)
