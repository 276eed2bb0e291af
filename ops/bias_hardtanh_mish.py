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


def _backward_kernel(gradient, input, bias, min_val, max_val, bias_dtype):
    gradient, input = gradient.contiguous(), input.contiguous()
    input_gradient = torch.empty_like(input)
    (bias_gradient,) = operators.empty_vectors(input, input.shape[1], (bias_dtype,))
    bounds = min_val, max_val
    bias_pointwise_backward(
        gradient, input, bias, HARDTANH_MISH, bounds, input_gradient=input_gradient, bias_gradient=bias_gradient
    )
    return input_gradient, *operators.or_empty(input, bias_gradient)


def _backward_fake(gradient, input, bias, min_val, max_val, bias_dtype):
    input_gradient = torch.empty_like(input, memory_format=torch.contiguous_format)
    return input_gradient, *operators.or_empty(input, *operators.empty_vectors(input, input.shape[1], (bias_dtype,)))


_operator = operators.define(
    "bias_hardtanh_mish(Tensor input, Tensor? bias, float min_val, float max_val) -> Tensor",
    _forward,
    lambda input, bias, min_val, max_val: torch.empty_like(input, memory_format=torch.contiguous_format),
)
_backward_operator = operators.define(
    "bias_hardtanh_mish_backward(Tensor gradient, Tensor input, Tensor? bias, float min_val, float max_val,"
    " ScalarType? bias_dtype) -> (Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)


def _setup_context(ctx, inputs, output):
    input, bias, ctx.min_val, ctx.max_val = inputs
    ctx.dtypes = operators.dtypes_of(bias)
    ctx.save_for_backward(input, bias)


def _backward(ctx, gradient):
    input, bias = ctx.saved_tensors
    dtypes = operators.wanted_dtypes(ctx, 1)
    input_gradient, *gradients = _backward_operator(gradient, input, bias, ctx.min_val, ctx.max_val, *dtypes)
    return input_gradient, *operators.where_wanted(gradients, dtypes), None, None


_differentiable = operators.differentiable(_operator, _setup_context, _backward)


@repeated_eagerly
def bias_hardtanh_mish(
    input: torch.Tensor, bias: torch.Tensor | None = None, *, min_val: float = -1.0, max_val: float = 1.0
) -> torch.Tensor:
    """Add a bias, then apply Hardtanh and Mish, in one kernel: ``mish(hardtanh(input + bias, min_val, max_val))``.

    ``mish(z) = z * tanh(softplus(z))`` (Misra, Mish: A Self Regularized Non-Monotonic Activation Function, 2019).

    Args:
        input: ``(*, channels)``, float32, bfloat16, float16 or float64.
        bias: ``(channels,)``, or None for no bias.
        min_val: Lower bound of the Hardtanh.
        max_val: Upper bound of the Hardtanh.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    checks.tensors({"input": input}, {"bias": bias})
    if input.ndim < 1:
        raise ValueError("input must have at least one dimension (*, channels), got a 0-D tensor")
    checks.vectors(input.shape[-1], bias=bias)
    min_val, max_val = checks.bounds(min_val, max_val)
    if tensor_parallel.is_distributed(input, bias):
        tensors = {"input": input, "bias": bias}
        layout = tensor_parallel.POINTWISE
        return tensor_parallel.on_shards(bias_hardtanh_mish, layout, tensors, min_val=min_val, max_val=max_val)
    (bias,) = as_vectors(bias)
    if not precision.runs_kernels(input):
        return in_reference(reference.bias_hardtanh_mish, input, bias, min_val=min_val, max_val=max_val)
    rows = input.reshape(input.shape[:-1].numel(), input.shape[-1]).contiguous()
    result = _differentiable(rows, bias, min_val, max_val)
    return with_leading_shape(result, input)
