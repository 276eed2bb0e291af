"""Linear layer, forward and backward, in PyTorch's float32 precision setting."""

import torch

from ops import checks, gemm, operators, precision, reference, tensor_parallel
from ops.chain import as_vectors, in_reference, with_leading_shape
from ops.replay import repeated_eagerly

_operator = operators.define(
    "linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    lambda input, weight, bias: gemm.affine(input, weight, bias),
    lambda input, weight, bias: input.new_empty(input.shape[0], weight.shape[0]),
)


def _setup_context(ctx, inputs, output):
    input, weight, bias = inputs
    ctx.dtypes = operators.dtypes_of(bias)
    gemm.save(ctx, input, weight)


def _backward(ctx, gradient):
    input, weight = ctx.saved_tensors
    (dtype,) = operators.wanted_dtypes(ctx, 2)
    bias_gradient = None if dtype is None else gradient.sum(0, dtype=torch.float32).to(dtype)
    return *gemm.linear_gradients(ctx, gradient.contiguous(), input, weight), bias_gradient


_differentiable = operators.differentiable(_operator, _setup_context, _backward)


@repeated_eagerly
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer: ``input @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    float32 products have float32's accuracy, unless PyTorch is set to allow TF32
    (``torch.set_float32_matmul_precision``). Under autocast the layer computes in, and returns, autocast's dtype.

    Args:
        input: ``(*, in_features)``, float32, bfloat16, float16 or float64.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None for no bias.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    checks.tensors({"input": input, "weight": weight}, {"bias": bias})
    checks.linear(input, weight)
    checks.vectors(weight.shape[0], bias=bias)
    if tensor_parallel.is_distributed(input, weight, bias):
        tensors = {"input": input, "weight": weight, "bias": bias}
        return tensor_parallel.on_shards(linear, tensor_parallel.LINEAR, tensors)
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    (bias,) = as_vectors(bias)
    if not precision.runs_kernels(input):
        return in_reference(reference.linear, input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    result = _differentiable(rows, weight, bias)
    return with_leading_shape(result, input)
