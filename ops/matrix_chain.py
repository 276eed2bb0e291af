"""Linear → pointwise → GroupNorm → pointwise as one operator, which L94 and L30 share."""

from collections.abc import Callable

import torch

from autotune_configs import group_norm_config
from ops import gemm, operators
from ops.chain import fused_product_config
from triton_kernels.group_norm import group_norm, group_norm_backward
from triton_kernels.pointwise import IDENTITY, Pointwise


def define_matrix_chain(name: str, epilogue, activation: Pointwise, final: Pointwise) -> Callable[..., torch.Tensor]:
    """Define the chain ``final(group_norm(activation(linear(input) + bias)))`` as a differentiable operator.

    ``epilogue`` does all of it on a tile of the product. Where that is not possible, the product is followed by one
    pass of the group norm's kernel: for groups that no tile holds whole, and where cuBLAS multiplies. Either way, only
    z = linear(input) + bias is kept for the backward pass, nothing else of that size.
    """

    reads_norm_bias = final is not IDENTITY

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

    def norm_backward(gradient, z, num_groups, norm_weight, norm_bias, min_val, max_val, eps, *dtypes):
        """The gradient at z and, in these dtypes, those of norm_weight, norm_bias, linear_bias and bias."""
        M, N = z.shape
        gradient, z = gradient.contiguous(), z.contiguous()
        z_gradient = torch.empty_like(z)
        vector_gradients = operators.empty_vectors(z, N, dtypes)
        group_norm_backward(
            gradient,
            z,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            group_norm_config("group_norm_backward", z.dtype, M, N, N // num_groups, z.device),
            input_gradient=z_gradient,
            vector_gradients=vector_gradients,
            activation=activation,
            final=final,
            bounds=(min_val, max_val),
        )
        return z_gradient, *operators.or_empty(z, *vector_gradients)

    def fake_norm_backward(gradient, z, *arguments):
        vector_gradients = operators.empty_vectors(z, z.shape[1], arguments[-4:])
        return z.new_empty(z.shape), *operators.or_empty(z, *vector_gradients)

    norm_parameters = "Tensor? norm_weight, Tensor? norm_bias, float min_val, float max_val, float eps"
    operator = operators.define(
        f"linear_{name}(Tensor input, Tensor weight, Tensor? linear_bias, Tensor? bias, int num_groups,"
        f" {norm_parameters}, bool training) -> (Tensor, Tensor)",
        forward,
        fake,
    )
    norm_backward_operator = operators.define(
        f"linear_{name}_backward(Tensor gradient, Tensor z, int num_groups, {norm_parameters},"
        " ScalarType? norm_weight_dtype, ScalarType? norm_bias_dtype, ScalarType? linear_bias_dtype,"
        " ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        norm_backward,
        fake_norm_backward,
    )

    def setup_context(ctx, inputs, outputs):
        input, weight, linear_bias, bias, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, training = inputs
        ctx.dtypes = operators.dtypes_of(norm_weight, norm_bias, linear_bias, bias)
        gemm.save(ctx, input, weight, outputs[1], norm_weight, norm_bias if reads_norm_bias else None)

    def backward(ctx, gradient):
        input, weight, z, norm_weight, norm_bias = ctx.saved_tensors
        dtypes = operators.wanted_dtypes(ctx, 5, 6, 2, 3)
        z_gradient, *vector_gradients = norm_backward_operator(
            gradient, z, ctx.num_groups, norm_weight, norm_bias, *ctx.scalars, *dtypes
        )
        *norm_gradients, linear_bias_gradient, bias_gradient = operators.where_wanted(vector_gradients, dtypes)
        matrices = gemm.linear_gradients(ctx, z_gradient, input, weight)
        return *matrices, linear_bias_gradient, bias_gradient, None, *norm_gradients, None, None, None, None

    return operators.differentiable(operator, setup_context, backward)
