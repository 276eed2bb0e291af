"""GroupNorm of inputs of any number of dimensions, alone and with a Hardtanh behind it, forward and backward."""

import torch

from autotune_configs import group_norm_config
from ops import checks, operators, precision, reference
from ops.chain import as_vectors, in_reference
from triton_kernels import group_norm as resident
from triton_kernels import wide_group_norm as wide
from triton_kernels.pointwise import HARDTANH, IDENTITY, Pointwise


def fits_registers(channels: int, pixels: int, num_groups: int) -> bool:
    """Whether one program normalises a whole group: a matrix (no pixels) with groups that are not too wide."""
    return pixels == 1 and channels // num_groups <= resident.WIDEST_GROUP


def _forward(input, num_groups, weight, bias, min_val, max_val, eps, final: Pointwise):
    B, C, S = input.shape
    output = torch.empty_like(input)
    options = {"final": final, "bounds": (min_val, max_val)}
    if fits_registers(C, S, num_groups):
        config = group_norm_config(B, C, C // num_groups)
        resident.group_norm(
            input.view(B, C), num_groups, weight, bias, eps, config, output=output.view(B, C), **options
        )
    else:
        wide.wide_group_norm(input, num_groups, weight, bias, eps, output=output, **options)
    return output


def _backward_kernel(gradient, input, num_groups, weight, bias, min_val, max_val, eps, final: Pointwise):
    B, C, S = input.shape
    input_gradient = torch.empty_like(input)
    options = {"final": final, "bounds": (min_val, max_val)}
    if fits_registers(C, S, num_groups):
        sums = resident.group_norm_backward(
            gradient.view(B, C),
            input.view(B, C),
            num_groups,
            weight,
            bias,
            eps,
            group_norm_config(B, C, C // num_groups),
            input_gradient=input_gradient.view(B, C),
            **options,
        )[1:]
    else:
        sums = wide.wide_group_norm_backward(
            gradient, input, num_groups, weight, bias, eps, input_gradient=input_gradient, **options
        )
    return input_gradient, sums


def _differentiable_group_norm(name: str, final: Pointwise) -> type[torch.autograd.Function]:
    """The operator ``name`` of a contiguous input [B, C, S], with its backward, as an autograd Function."""
    parameters = "int num_groups, Tensor? weight, Tensor? bias, float min_val, float max_val, float eps"
    operator = operators.define(
        f"{name}(Tensor input, {parameters}) -> Tensor",
        lambda *arguments: _forward(*arguments, final),
        lambda input, *arguments: torch.empty_like(input),
    )
    backward_operator = operators.define(
        f"{name}_backward(Tensor gradient, Tensor input, {parameters}) -> (Tensor, Tensor)",
        lambda *arguments: _backward_kernel(*arguments, final),
        lambda gradient, input, *arguments: (
            torch.empty_like(input),
            input.new_empty(2, input.shape[1], dtype=torch.float32),
        ),
    )

    def setup_context(ctx, inputs, output):
        input, ctx.num_groups, weight, bias, *ctx.scalars = inputs
        ctx.save_for_backward(input, weight, bias)

    def backward(ctx, gradient):
        input, weight, bias = ctx.saved_tensors
        input_gradient, sums = backward_operator(
            gradient.contiguous(), input, ctx.num_groups, weight, bias, *ctx.scalars
        )
        weight_gradient, bias_gradient = operators.vector_gradients(sums, (0, weight), (1, bias))
        return input_gradient, None, weight_gradient, bias_gradient, None, None, None

    return operators.differentiable(operator, setup_context, backward)


GroupNormFunction = _differentiable_group_norm("group_norm", IDENTITY)
GroupNormHardtanhFunction = _differentiable_group_norm("group_norm_hardtanh", HARDTANH)


def _check(input, num_groups, weight, bias, eps):
    checks.tensors({"input": input}, {"weight": weight, "bias": bias})
    if input.ndim < 2:
        raise ValueError(f"input must be at least 2-D (batch, channels, *), got shape {tuple(input.shape)}")
    checks.groups(input.shape[1], num_groups)
    checks.vectors(input.shape[1], weight=weight, bias=bias)
    checks.epsilon(eps)


def _apply(function, input, num_groups, weight, bias, min_val, max_val, eps):
    """Call an autograd Function of this file on an input of any shape and strides."""
    flat = input.reshape(input.shape[0], input.shape[1], input.shape[2:].numel()).contiguous()
    return function.apply(flat, num_groups, weight, bias, float(min_val), float(max_val), float(eps)).view(input.shape)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``torch.nn.functional.group_norm`` of input (batch, channels, *), weight and bias (channels) or None.

    Mean and biased variance of each sample's groups of channels, over all further dimensions (Wu and He, Group
    Normalization, 2018), in float32. The result has the input's dtype. Raises ValueError or TypeError for arguments
    that do not fit.
    """
    _check(input, num_groups, weight, bias, eps)
    weight, bias = as_vectors(weight, bias)
    if not precision.runs_kernels(input):
        return in_reference(reference.group_norm, input, num_groups, weight, bias, eps=eps)
    return _apply(GroupNormFunction, input, num_groups, weight, bias, 0.0, 0.0, eps)


def group_norm_hardtanh(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``hardtanh(group_norm(input, num_groups, weight, bias), min_val, max_val)``; see ``group_norm``."""
    _check(input, num_groups, weight, bias, eps)
    checks.bounds(min_val, max_val)
    weight, bias = as_vectors(weight, bias)
    if not precision.runs_kernels(input):
        return in_reference(
            reference.group_norm_hardtanh, input, num_groups, weight, bias, min_val=min_val, max_val=max_val, eps=eps
        )
    return _apply(GroupNormHardtanhFunction, input, num_groups, weight, bias, min_val, max_val, eps)
