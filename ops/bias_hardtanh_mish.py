"""bias → Hardtanh → Mish in one pass, forward and backward."""

import torch

from ops import checks, operators, precision, reference, tensor_parallel
from ops.chain import as_vectors, in_reference, with_leading_shape
from ops.replay import repeated_eagerly
from triton_kernels.bias_pointwise import bias_pointwise, bias_pointwise_backward
from triton_kernels.pointwise import HARDTANH_MISH


def _forward(input, bias, min_val, max_val):
    input = input.contiguous()
    output = torch.empty_like(input)
    bias_pointwise(input, bias, HARDTANH_MISH, (min_val, max_val), output=output)
    return output


def _backward_kernel(gradient, input, bias, min_val, max_val, sums_dtype):
    gradient, input = gradient.contiguous(), input.contiguous()
    input_gradient = torch.empty_like(input)
    bounds = min_val, max_val
    sums = bias_pointwise_backward(
        gradient, input, bias, HARDTANH_MISH, bounds, input_gradient=input_gradient, sums_dtype=sums_dtype
    )
    return input_gradient, sums


_operator = operators.define(
    "bias_hardtanh_mish(Tensor input, Tensor? bias, float min_val, float max_val) -> Tensor",
    _forward,
    lambda input, bias, min_val, max_val: torch.empty_like(input, memory_format=torch.contiguous_format),
)
_backward_operator = operators.define(
    "bias_hardtanh_mish_backward(Tensor gradient, Tensor input, Tensor? bias, float min_val, float max_val,"
    " ScalarType sums_dtype) -> (Tensor, Tensor)",
    _backward_kernel,
    lambda gradient, input, bias, min_val, max_val, sums_dtype: (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty(1, input.shape[1], dtype=sums_dtype),
    ),
)


def _setup_context(ctx, inputs, output):
    input, bias, ctx.min_val, ctx.max_val = inputs
    ctx.save_for_backward(input, bias)


def _backward(ctx, gradient):
    input, bias = ctx.saved_tensors
    sums_dtype = operators.sums_dtype(bias)
    input_gradient, sums = _backward_operator(gradient, input, bias, ctx.min_val, ctx.max_val, sums_dtype)
    return input_gradient, *operators.vector_gradients(sums, (0, bias)), None, None


_differentiable = operators.differentiable(_operator, _setup_context, _backward)


@repeated_eagerly
def bias_hardtanh_mish(
    input: torch.Tensor, bias: torch.Tensor | None = None, *, min_val: float = -1.0, max_val: float = 1.0
) -> torch.Tensor:
    """``mish(hardtanh(input + bias, min_val, max_val))`` for input (*, channels) and bias (channels) or None.

    mish(z) = z * tanh(softplus(z)) (Misra, Mish: A Self Regularized Non-Monotonic Activation Function, 2019). The
    result has the input's dtype. Raises ValueError or TypeError for arguments that do not fit.
    """
    checks.tensors({"input": input}, {"bias": bias})
    if input.ndim < 1:
        raise ValueError("input must have at least one dimension (*, channels), got a scalar")
    checks.vectors(input.shape[-1], bias=bias)
    checks.bounds(min_val, max_val)
    if tensor_parallel.is_distributed(input, bias):
        tensors = {"input": input, "bias": bias}
        layout = tensor_parallel.POINTWISE
        return tensor_parallel.on_shards(bias_hardtanh_mish, layout, tensors, min_val=min_val, max_val=max_val)
    (bias,) = as_vectors(bias)
    if not precision.runs_kernels(input):
        return in_reference(reference.bias_hardtanh_mish, input, bias, min_val=min_val, max_val=max_val)
    rows = input.reshape(input.shape[:-1].numel(), input.shape[-1]).contiguous()
    result = _differentiable(rows, bias, float(min_val), float(max_val))
    return with_leading_shape(result, input)
