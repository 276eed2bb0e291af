"""Linear, with PyTorch's float32 precision setting, forward and backward."""

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
    """``torch.nn.functional.linear``: input (*, in_features) @ weight (out_features, in_features).T + bias, a vector.

    float32 is multiplied to float32 accuracy unless PyTorch is set to use TF32; the result has the input's dtype, or
    autocast's. Raises ValueError or TypeError for arguments that do not fit.
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
