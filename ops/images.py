"""Chains of images as steps of plans, forward and backward: group norms of (batch, channels, *), alone or after a
transposed convolution."""

from collections.abc import Sequence
from typing import Any

import torch

from autotune_configs import image_norm_config
from ops import convolution, direct_convolution
from ops.arguments import Arguments, contiguous
from ops.calls import Call
from ops.convolution import memory_format
from ops.products import zero
from triton_kernels.image_group_norm import add_up_sums, empty_sums, image_group_norm, image_group_norm_backward
from triton_kernels.image_statistics import image_statistics
from triton_kernels.launch import call as do
from triton_kernels.pointwise import identity

Tensor = torch.Tensor


def _as_volumes(call: Call, each_steps: Sequence[Any], like: Tensor) -> tuple[Any, ...]:
    """What each step has, of which tensors are contiguous, with these in the shape [B, C, S] that ``like`` has."""
    return tuple(
        each.view(like.shape) if step.operand == "tensor" and each is not None else each
        for step, each in zip(call.chain.steps, each_steps, strict=True)
    )


def statistics(call: Call, operands: Sequence[Any], values: Tensor) -> Tensor:
    """Mean and reciprocal standard deviation [2, B * G] of what comes before the norm, for values [B, C, S]."""
    operands = _as_volumes(call, operands, values)
    config = image_norm_config("image_statistics", values.shape[1] // call.num_groups, values)
    return image_statistics(values, call.num_groups, call.eps, config, call.chain.of_dtype(values.dtype), operands)


def normalize(
    call: Call, operands: Sequence[Any], values: Tensor, output: Tensor, known: Tensor | None = None
) -> Tensor:
    """output = the chain of ``values``, both [B, C, S]; returns the statistics, which may be known."""
    found = statistics(call, operands, values) if known is None else known
    operands = _as_volumes(call, operands, values)
    config = image_norm_config("image_group_norm", values.shape[1] // call.num_groups, values, output)
    image_group_norm(values, found, call.chain.of_dtype(values.dtype), operands, config, output=output)
    return found


class Differentiation:
    """The backward pass of ``normalize``, a few samples at a time; ``finish`` makes the gradients of the operands."""

    def __init__(
        self, call: Call, operands: Sequence[Any], values: Tensor, found: Tensor, gradients: Sequence[Tensor | None]
    ):
        B, C, _ = values.shape
        self._chain, self._values = call.chain, values
        self._operands, self._gradients = (_as_volumes(call, each, values) for each in (operands, gradients))
        self._statistics = found.view(2, B, call.num_groups)
        self._config = image_norm_config("image_group_norm_backward", C // call.num_groups, values)
        self._sums = empty_sums(call.chain, self._gradients, values, self._config)

    def differentiate(self, dy: Tensor, target: Tensor, samples: slice = slice(None), stored: Any = identity) -> None:
        """target = ``stored`` of the gradient at these samples of ``values``; dy is the output's, also [B, C, S]."""
        image_group_norm_backward(
            dy,
            self._values[samples],
            self._statistics[:, samples].flatten(1),
            self._chain.of_dtype(self._values.dtype),
            [
                each[samples] if step.operand == "tensor" and each is not None else each
                for step, each in zip(self._chain.steps, self._operands, strict=True)
            ],
            self._config,
            input_gradient=target,
            sums=[None if each is None else each[samples] for each in self._sums],
            stored=stored,
        )

    def finish(self) -> None:
        if self._values.numel() > 0:
            add_up_sums(self._chain, self._sums, self._gradients)
            return
        for gradient in self._gradients:
            if gradient is not None:
                do(zero, gradient)


def as_volume(tensor: Tensor) -> Tensor:
    """View or copy as [B, C, S]: samples, channels and pixels. The pixels are all further dimensions."""
    shape = *tensor.shape[:2], tensor.shape[2:].numel()
    try:
        return tensor.view(shape)
    except RuntimeError:
        return do(Tensor.contiguous, tensor).view(shape)


def lying_as(input: Tensor, values: Tensor) -> Tensor:
    """The values in memory as the input lies, copied where they are not."""
    result = torch.empty_like(input)
    if values.stride() == result.stride():
        return values
    do(_copy, values, result)
    return result


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def norm_forward(call: Call, given: Arguments) -> list[Tensor]:
    """A group norm of (batch, channels, *), in the input's strides. Its bits do not depend on them."""
    values = as_volume(contiguous(given.input))
    output = torch.empty(given.input.shape, dtype=values.dtype, device=values.device)
    normalize(call, given.operands(call), values, as_volume(output))
    return [lying_as(given.input, output)]


def norm_backward(call: Call, gradient: Tensor, given: Arguments, wanted: Arguments) -> Arguments:
    """The gradients of a group norm of (batch, channels, *); the input's has its strides."""
    gradients, operands = wanted.empty_gradients(gradient.device), given.operands(call)
    values = as_volume(contiguous(given.input))
    result = torch.empty(given.input.shape, dtype=values.dtype, device=values.device)
    differentiation = Differentiation(call, operands, values, statistics(call, operands, values), gradients.flat)
    differentiation.differentiate(as_volume(contiguous(gradient)), as_volume(result))
    differentiation.finish()
    return Arguments(lying_as(given.input, result), None, gradients.vectors, None)


def convolution_forward(call: Call, given: Arguments, training: bool) -> list[Tensor]:
    """The result and, if ``training``, z and the statistics."""
    input, weight, geometry = given.input, given.weight, call.geometry
    operands, known = given.operands(call), None
    if direct_convolution.takes(input, weight, geometry, call.allow_tf32):
        z, partials = direct_convolution.forward(call, input, weight, operands)
        known = None if partials is None else partials.merge(call.num_groups, z.shape[2:].numel(), call.eps)
        operands = given.operands(call, with_biases=False)
    else:
        # cuDNN would add the bias in a separate pass, so the norm's passes add it.
        z = do(convolution.conv_transpose2d, input, weight, geometry)
    output = torch.empty_like(z, memory_format=memory_format(input))
    found = normalize(call, operands, z.flatten(2), output.flatten(2), known)
    return [output, z, found] if training else [output]


def convolution_backward(
    call: Call, gradient: Tensor, kept: Sequence[Tensor], given: Arguments, wanted: Arguments
) -> Arguments:
    """The gradients of a call's tensors, where ``wanted`` has something."""
    z, found = kept
    input, weight, geometry = given.input, given.weight, call.geometry
    if not z.is_contiguous(memory_format=memory_format(z)):
        z = do(Tensor.contiguous, z, memory_format=memory_format(z))
    if not found.is_contiguous():
        found = do(Tensor.contiguous, found)
    gradients = wanted.empty_gradients(gradient.device)
    is_direct = direct_convolution.takes(input, weight, geometry, call.allow_tf32)
    operands = given.operands(call, with_biases=not is_direct)
    differentiation = Differentiation(call, operands, z.flatten(2), found, gradients.flat)

    def z_gradients(samples: slice, target: Tensor, stored: Any = identity) -> None:
        # Copied first where z is channels_last and it is not: passes over mixed formats take longer.
        dy = direct_convolution.like_format(gradient[samples], z)
        differentiation.differentiate(as_volume(dy), target.flatten(2), samples, stored)

    both = bool(wanted.input), bool(wanted.weight)
    of_input = of_weight = None
    if is_direct and direct_convolution.differentiates(z, input, geometry):
        of_input, of_weight = direct_convolution.backward(z_gradients, z, input, weight, geometry, both)
    else:
        z_gradient = torch.empty_like(z)
        z_gradients(slice(None), z_gradient)
        if any(both):
            found = iter(do(convolution.conv_transpose2d_gradients, z_gradient, input, weight, geometry, both))
            of_input, of_weight = (next(found) if each else None for each in both)
    differentiation.finish()
    return Arguments(of_input, of_weight, gradients.vectors, None)
