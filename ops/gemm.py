"""Matrix products of the chains: which run in the project's kernel, which in the library, and how float32 is fed."""

import torch

from autotune_configs import linear_config
from ops import operators, precision
from triton_kernels.epilogues import bias_epilogue
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.linear import linear as launch_linear


def depth_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """float32 operands of the tensor cores must be contiguous along K, or the kernel takes twice as long (H200).

    The copy goes tile by tile, which takes a quarter of the time that PyTorch's takes for a transposed matrix.
    """
    if matrix.dtype != torch.float32 or matrix.is_contiguous():
        return matrix
    result = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    source, target = matrix.unsqueeze(0), result.unsqueeze(0)
    copy_image(source, target, ImageNormConfig.fit(source, target))
    return result


def add_optional(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two vectors, where None counts as zeros."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def affine(
    input: torch.Tensor, weight: torch.Tensor, linear_bias: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """input [M, K] @ weight [N, K].T + linear_bias + bias, rounded once to the input's dtype: [M, N]."""
    if precision.library_multiplies(input.dtype, *input.shape):
        shift = add_optional(linear_bias, bias)
        return torch.mm(input, weight.T) if shift is None else torch.addmm(shift, input, weight.T)
    (M, K), N = input.shape, weight.shape[0]
    output = torch.empty(M, N, dtype=input.dtype, device=input.device)
    launch_linear(
        depth_contiguous(input),
        depth_contiguous(weight),
        bias_epilogue,
        linear_config("linear_bias", input.dtype, M, N, K, 1, input.device),
        output=output,
        vectors=(linear_bias, bias, None, None),
        input_precision=precision.FLOAT32_INPUT_PRECISION,
    )
    return output


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for the backward pass: the library's, but for float32 at full precision, where the kernel is faster."""
    if a.dtype == torch.float32 and a.shape[1] > 0 and not precision.library_multiplies(a.dtype, *a.shape):
        return affine(a, b.T, None)
    return torch.mm(a, b)


input_gradient = operators.define(
    "linear_input_gradient(Tensor z_gradient, Tensor weight) -> Tensor",
    lambda z_gradient, weight: _multiply(z_gradient, weight),
    lambda z_gradient, weight: z_gradient.new_empty(z_gradient.shape[0], weight.shape[1]),
)

weight_gradient = operators.define(
    "linear_weight_gradient(Tensor z_gradient, Tensor input) -> Tensor",
    lambda z_gradient, input: _multiply(z_gradient.T, input),
    lambda z_gradient, input: z_gradient.new_empty(z_gradient.shape[1], input.shape[1]),
)


def linear_gradients(ctx, z_gradient: torch.Tensor, input: torch.Tensor, weight: torch.Tensor):
    """The gradients of a chain's first two inputs, each only where autograd asks for it."""
    input_wanted, weight_wanted = ctx.needs_input_grad[:2]
    return (
        input_gradient(z_gradient, weight) if input_wanted else None,
        weight_gradient(z_gradient, input) if weight_wanted else None,
    )
