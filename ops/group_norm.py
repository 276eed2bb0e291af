"""GroupNorm of an N-D input, alone, after a GELU or before a Hardtanh, forward and backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autotune_configs import group_norm_config
from ops import checks, operators, precision, reference, tensor_parallel
from ops.chain import as_vectors, in_reference
from ops.replay import repeated_eagerly
from triton_kernels import group_norm as resident
from triton_kernels import wide_group_norm as wide
from triton_kernels.pointwise import GELU, GELU_TANH, HARDTANH, IDENTITY, Pointwise


def fits_registers(channels: int, pixels: int, num_groups: int) -> bool:
    """Whether one program can normalise a whole group in registers: a matrix (one pixel) with groups that are not
    too wide."""
    return pixels == 1 and channels // num_groups <= resident.WIDEST_GROUP


def as_volume(tensor: torch.Tensor) -> torch.Tensor:
    """View or copy as ``[B, C, S]``, contiguous: samples, channels and pixels. The pixels are all further
    dimensions."""
    return tensor.reshape(*tensor.shape[:2], tensor.shape[2:].numel()).contiguous()


@contextmanager
def written_as_volume(output: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous memory ``[B, C, S]`` to write to. ``output`` has the values at the end: it is that memory, or gets
    a copy."""
    if output.is_contiguous():
        yield as_volume(output)
    else:
        volume = as_volume(torch.empty_like(output, memory_format=torch.contiguous_format))
        yield volume
        output.copy_(volume.view(output.shape))


def _forward(activation: Pointwise, final: Pointwise, input, num_groups, weight, bias, min_val, max_val, eps):
    volume = as_volume(input)
    B, C, S = volume.shape
    result = torch.empty_like(input)
    options: dict[str, Any] = {"activation": activation, "final": final, "bounds": (min_val, max_val)}
    with written_as_volume(result) as output:
        if fits_registers(C, S, num_groups):
            config = group_norm_config("group_norm", input.dtype, B, C, C // num_groups, input.device)
            resident.group_norm(
                volume.view(B, C), num_groups, weight, bias, eps, config, output=output.view(B, C), **options
            )
        else:
            wide.wide_group_norm(volume, num_groups, weight, bias, eps, output=output, **options)
    return result


def _backward_kernel(
    activation: Pointwise,
    final: Pointwise,
    gradient,
    input,
    num_groups,
    weight,
    bias,
    min_val,
    max_val,
    eps,
    *dtypes,
):
    gradient, volume = as_volume(gradient), as_volume(input)
    B, C, S = volume.shape
    result = torch.empty_like(input)
    vector_gradients = operators.empty_vectors(input, C, dtypes)
    options: dict[str, Any] = {"activation": activation, "final": final, "bounds": (min_val, max_val)}
    with written_as_volume(result) as input_gradient:
        if fits_registers(C, S, num_groups):
            resident.group_norm_backward(
                gradient.view(B, C),
                volume.view(B, C),
                num_groups,
                weight,
                bias,
                eps,
                group_norm_config("group_norm_backward", input.dtype, B, C, C // num_groups, input.device),
                input_gradient=input_gradient.view(B, C),
                vector_gradients=(*vector_gradients, None, None),
                **options,
            )
        else:
            wide.wide_group_norm_backward(
                gradient,
                volume,
                num_groups,
                weight,
                bias,
                eps,
                input_gradient=input_gradient,
                vector_gradients=vector_gradients,
                **options,
            )
    return result, *operators.or_empty(input, *vector_gradients)


def _backward_fake(gradient, input, *arguments):
    vector_gradients = operators.empty_vectors(input, input.shape[1], arguments[-2:])
    return torch.empty_like(input), *operators.or_empty(input, *vector_gradients)


def _differentiable_group_norm(
    name: str, *, activation: Pointwise = IDENTITY, final: Pointwise = IDENTITY
) -> Callable[..., torch.Tensor]:
    """Register ``final(group_norm(activation(input)))`` as the operator ``name``, and make it differentiable.

    Result and gradient have the input's strides, as those of elementwise operations have.
    """
    parameters = "int num_groups, Tensor? weight, Tensor? bias, float min_val, float max_val, float eps"
    operator = operators.define(
        f"{name}(Tensor input, {parameters}) -> Tensor",
        lambda *arguments: _forward(activation, final, *arguments),
        lambda input, *arguments: torch.empty_like(input),
    )
    backward_operator = operators.define(
        f"{name}_backward(Tensor gradient, Tensor input, {parameters}, ScalarType? weight_dtype,"
        " ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
        lambda *arguments: _backward_kernel(activation, final, *arguments),
        _backward_fake,
    )

    def setup_context(ctx, inputs, output):
        input, ctx.num_groups, weight, bias, *ctx.scalars = inputs
        ctx.dtypes = operators.dtypes_of(weight, bias)
        ctx.save_for_backward(input, weight, None if final is IDENTITY else bias)

    def backward(ctx, gradient):
        input, weight, bias = ctx.saved_tensors
        dtypes = operators.wanted_dtypes(ctx, 2, 3)
        input_gradient, *gradients = backward_operator(
            gradient, input, ctx.num_groups, weight, bias, *ctx.scalars, *dtypes
        )
        return input_gradient, None, *operators.where_wanted(gradients, dtypes), None, None, None

    return operators.differentiable(operator, setup_context, backward)


_group_norm = _differentiable_group_norm("group_norm")
_group_norm_hardtanh = _differentiable_group_norm("group_norm_hardtanh", final=HARDTANH)
_gelu_group_norm = _differentiable_group_norm("gelu_group_norm", activation=GELU)
_gelu_tanh_group_norm = _differentiable_group_norm("gelu_tanh_group_norm", activation=GELU_TANH)


def gelu_called(approximate: str) -> Pointwise:
    """The GELU of this ``approximate``, as in ``torch.nn.functional.gelu``. TypeError or ValueError where there is
    none."""
    if not isinstance(approximate, str):
        raise TypeError(f"approximate must be a str, got {type(approximate).__name__}")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return GELU if approximate == "none" else GELU_TANH


def _check(input, num_groups, weight, bias, eps) -> tuple[int, float]:
    """Check the arguments, and return num_groups and eps as Python's numbers."""
    checks.tensors({"input": input}, {"weight": weight, "bias": bias})
    if input.ndim < 2:
        raise ValueError(f"input must be at least 2-D (batch, channels, *), got shape {tuple(input.shape)}")
    num_groups = checks.groups(input.shape[1], num_groups)
    checks.vectors(input.shape[1], weight=weight, bias=bias)
    return num_groups, checks.epsilon(eps)


def _runs_kernels(input):
    """Whether kernels run. A tensor without channels has no group that a kernel could take."""
    return precision.runs_kernels(input) and input.shape[1] > 0


@repeated_eagerly
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise groups of channels, as ``torch.nn.functional.group_norm`` does.

    Each sample's channels are divided into ``num_groups`` groups of neighbours. A group is normalised with its mean and
    its biased variance, over its channels and all further dimensions (Wu and He, Group Normalization, 2018). Both are
    computed in float32, the mean first. ``weight`` and ``bias`` then scale and shift each channel.

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    num_groups, eps = _check(input, num_groups, weight, bias, eps)
    if tensor_parallel.is_distributed(input, weight, bias):
        tensors = {"input": input, "weight": weight, "bias": bias}
        return tensor_parallel.on_shards(group_norm, tensor_parallel.NORM, tensors, num_groups, eps=eps)
    weight, bias = as_vectors(weight, bias)
    if not _runs_kernels(input):
        return in_reference(reference.group_norm, input, num_groups, weight, bias, eps=eps)
    return _group_norm(input, num_groups, weight, bias, 0.0, 0.0, eps)


@repeated_eagerly
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
    """Normalise groups of channels and clip: ``hardtanh(group_norm(input, ...), min_val, max_val)``.

    See :func:`ops.group_norm` for the norm.

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        min_val: Lower bound of the result.
        max_val: Upper bound of the result.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    num_groups, eps = _check(input, num_groups, weight, bias, eps)
    min_val, max_val = checks.bounds(min_val, max_val)
    if tensor_parallel.is_distributed(input, weight, bias):
        tensors = {"input": input, "weight": weight, "bias": bias}
        others = {"min_val": min_val, "max_val": max_val, "eps": eps}
        return tensor_parallel.on_shards(group_norm_hardtanh, tensor_parallel.NORM, tensors, num_groups, **others)
    weight, bias = as_vectors(weight, bias)
    if not _runs_kernels(input):
        return in_reference(
            reference.group_norm_hardtanh, input, num_groups, weight, bias, min_val=min_val, max_val=max_val, eps=eps
        )
    return _group_norm_hardtanh(input, num_groups, weight, bias, min_val, max_val, eps)


@repeated_eagerly
def gelu_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    eps: float = 1e-5,
) -> torch.Tensor:
    """Apply GELU, then normalise groups of channels: ``group_norm(gelu(input), num_groups, weight, bias)``.

    See :func:`ops.group_norm` for the norm.

    ``gelu(z) = z * (1 + erf(z / sqrt(2))) / 2`` (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        approximate: ``"none"``, or ``"tanh"`` for the approximation of ``torch.nn.functional.gelu``.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    num_groups, eps = _check(input, num_groups, weight, bias, eps)
    gelu_called(approximate)
    if tensor_parallel.is_distributed(input, weight, bias):
        tensors, others = {"input": input, "weight": weight, "bias": bias}, {"approximate": approximate, "eps": eps}
        return tensor_parallel.on_shards(gelu_group_norm, tensor_parallel.NORM, tensors, num_groups, **others)
    weight, bias = as_vectors(weight, bias)
    if not _runs_kernels(input):
        return in_reference(
            reference.gelu_group_norm, input, num_groups, weight, bias, approximate=approximate, eps=eps
        )
    function = _gelu_group_norm if approximate == "none" else _gelu_tanh_group_norm
    return function(input, num_groups, weight, bias, 0.0, 0.0, eps)
