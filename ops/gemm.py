"""Matrix products of the chains: by the project's kernel or by cuBLAS, and how float32 is split."""

import torch
import triton

from autotune_configs import linear_config
from ops import operators, precision
from triton_kernels.epilogues import bias_epilogue
from triton_kernels.float32_split import LinearSplitConfig, split
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.linear import LinearConfig, linear

Config = LinearConfig | LinearSplitConfig


def product_config(kernel: str, input: torch.Tensor, weight: torch.Tensor, group_size: int = 1) -> Config:
    """How ``product`` multiplies input [M, K] and weight [N, K]; ``kernel`` is the epilogue's name in the tables.

    Where the epilogue normalises groups of ``group_size`` columns, ask ``holds_groups_of`` whether a tile holds whole
    groups.
    """
    if input.dtype == torch.float32 and precision.splits_float32(input.device):
        return LinearSplitConfig(precision.float32_parts())
    (M, K), N = input.shape, weight.shape[0]
    return linear_config(kernel, input.dtype, M, N, K, group_size, input.device)


def product(
    input: torch.Tensor, weight: torch.Tensor, epilogue: triton.runtime.JITFunction, config: Config, **arguments
) -> None:
    """Multiply input [M, K] @ weight [N, K].T and hand each tile to ``epilogue``; ``arguments`` are ``linear``'s.

    Where ``config`` says so, float32 operands are split into float16 ones. Tiles with values that float16 cannot hold
    are computed again, as three TF32 products.
    """
    precisely = {"input_precision": precision.FLOAT32_INPUT_PRECISION} | arguments
    if isinstance(config, LinearConfig):
        linear(_depth_contiguous(input), _depth_contiguous(weight), epilogue, config, **precisely)
        return
    from triton_kernels.linear_split_hopper import linear_split  # loads Gluon

    any_left = torch.zeros(1, dtype=torch.int32, device=input.device)
    input_parts, weight_parts = (split(operand, config.parts, any_left) for operand in (input, weight))
    linear_split(input_parts, weight_parts, epilogue, config, **arguments)
    scales = input_parts.scale, weight_parts.scale
    linear(input, weight, epilogue, config.rest, left=(*scales, any_left), **precisely)


def _depth_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, contiguous along K where it is float32: the kernel takes twice as long otherwise (H200).

    The copy goes tile by tile. That takes a quarter of the time of PyTorch's copy of a transposed matrix.
    """
    if matrix.dtype != torch.float32 or matrix.is_contiguous():
        return matrix
    result = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    source, target = matrix.unsqueeze(0), result.unsqueeze(0)
    copy_image(source, target, ImageNormConfig.fit(source, target))
    return result


def add_optional(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two vectors. None counts as zeros."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def affine(
    input: torch.Tensor, weight: torch.Tensor, linear_bias: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """input [M, K] @ weight [N, K].T + linear_bias + bias in the input's dtype: [M, N].

    The result is rounded once. Where cuBLAS multiplies, the sum of two biases is rounded too.
    """
    if precision.library_multiplies(input, weight.shape[0], linear_bias, bias):
        shift = add_optional(linear_bias, bias)
        if shift is not None and precision.library_adds_bias(input, weight.shape[0]):
            return torch.addmm(shift, input, weight.T)
        output = torch.mm(input, weight.T)
        return output if shift is None else output.add_(shift)
    output = torch.empty(input.shape[0], weight.shape[0], dtype=input.dtype, device=input.device)
    config = product_config("linear_bias", input, weight)
    product(input, weight, bias_epilogue, config, output=output, vectors=(linear_bias, bias, None, None))
    return output


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in the backward pass: cuBLAS's, but in float32 the kernel's where that is faster."""
    if a.dtype == torch.float32 and a.shape[1] > 0 and not precision.library_multiplies(a, b.shape[1]):
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


def save(ctx, input: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Save what ``linear_gradients`` reads, and ``others``. Of input and weight, each is needed for the other's
    gradient."""
    input_wanted, weight_wanted = ctx.needs_input_grad[:2]
    ctx.save_for_backward(input if weight_wanted else None, weight if input_wanted else None, *others)


def linear_gradients(ctx, z_gradient: torch.Tensor, input: torch.Tensor | None, weight: torch.Tensor | None):
    """The gradients of a chain's input and weight, from what ``save`` kept; None where autograd does not ask for
    one."""
    input_wanted, weight_wanted = ctx.needs_input_grad[:2]
    return (
        input_gradient(z_gradient, weight) if input_wanted else None,
        weight_gradient(z_gradient, input) if weight_wanted else None,
    )
