"""What a chain begins with, an object each: its plain form, what its calls return, and both passes as steps of plans.

z is the contraction's result. Of the results' size, it alone is kept for the backward pass. What follows it is done by
the contraction's kernel, where that can, or by ``ops.passes``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ops import convolution, direct_convolution, passes, products
from ops.arguments import Arguments, as_volume, contiguous, rows_of
from ops.calls import Call
from ops.convolution import memory_format
from triton_kernels.chain import Chain
from triton_kernels.launch import call as do
from triton_kernels.pointwise import identity

Tensor = torch.Tensor
#: Of the input and the weight; None where not wanted.
Gradients = tuple[Tensor | None, Tensor | None]


class Contraction:
    """None: z is the input."""

    def has_rows(self, chain: Chain) -> bool:
        """Whether channels are z's last dimension. Else they are the second."""
        return not chain.norm

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any]) -> Tensor:
        """z in plain PyTorch."""
        return input

    def adds_biases(self, given: Arguments) -> bool:
        """Whether z has the chain's biases."""
        return False

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        """Whether the backward pass reads input and weight, where it gives the gradients that are ``wanted``."""
        return [True, False]

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        """What ``forward`` returns, without values."""
        input = given.input
        return [torch.empty_like(input) if given.call.chain.norm else input.new_empty(input.shape)]

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """The input's (0) or the weight's (1) gradient, without values, from what ``backward`` gets."""
        return self.empty_results(given, False)[0]

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        """The result and, if ``training``, what the backward pass needs beside the call's own tensors."""
        z = contiguous(given.input)
        output = torch.empty_like(z)
        passes.forward(given.call, given.operands, self._volume(given.call, z), self._volume(given.call, output))
        return [_lying_as(given, output)]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        """The gradients of input and weight, from dy, the result's. Those of vectors and tensors are written.

        ``gradients`` has memory for these, and says of input and weight whether their gradients are wanted.
        """
        return _lying_as(given, self._z_gradient(given, dy, [given.input], gradients)), None

    def _volume(self, call: Call, tensor: Tensor) -> Tensor:
        """View or copy of a tensor of z's shape as ``passes`` take it."""
        return as_volume(rows_of(tensor) if self.has_rows(call.chain) else tensor)

    def _z_gradient(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Tensor:
        """z's gradient. ``kept`` has z, and its statistics where there are any."""
        z, *statistics = map(contiguous, kept)
        z_gradient = torch.empty_like(z)
        volumes = self._volume(given.call, z), self._volume(given.call, z_gradient)
        passes.backward(given.call, given.operands, dy, *volumes, gradients.flat, *statistics)
        return z_gradient


def _lying_as(given: Arguments, values: Tensor) -> Tensor:
    """The values in memory as the input of a norm lies, copied where they are not."""
    result = torch.empty_like(given.input)
    if values.stride() == result.stride() or not given.call.chain.norm:
        return values
    do(_copy, values, result)
    return result


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class Linear(Contraction):
    """input @ weight.T. One kernel does the whole chain where its tiles hold whole groups."""

    def has_rows(self, chain: Chain) -> bool:
        return True

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any]) -> Tensor:
        return F.linear(input, weight, bias)

    def adds_biases(self, given: Arguments) -> bool:
        return True

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        return [wanted[1], wanted[0]]  # each for the other's gradient

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        chain, (*lead, _), N = given.call.chain, given.input.shape, given.weight.shape[0]
        output = given.input.new_empty(*lead, N)
        if not training or len(chain.biases) == len(chain.steps):
            return [output]
        if not passes.keeps_statistics(given.call, N):
            return [output, torch.empty_like(output)]
        shape = 2, given.input.shape[:-1].numel() * given.call.num_groups
        return [output, torch.empty_like(output), output.new_empty(shape, dtype=torch.float32)]

    def z_shape(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Sequence[int]:
        return dy.shape

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        *lead, N = self.z_shape(given, dy, kept)
        return dy.new_empty((N, given.input.shape[-1]) if place else (*lead, given.weight.shape[1]))

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, weight = given.call, rows_of(given.input), given.weight
        output, *kept = self.empty_results(given, training)
        if len(given.biases) == len(given.operands):
            return [products.affine(input, weight, given.biases, output.shape)]
        group_size = weight.shape[0] // call.num_groups
        config = products.fused_config(call.chain, input, weight, group_size, given.biases)
        if config is None:
            z = products.affine(input, weight, given.biases, output.shape)
            volumes = self._volume(call, z), self._volume(call, output)
            statistics = passes.forward(call, given.operands_after_biases, *volumes)
            return [output, z, *statistics] if training else [output]
        products.product(
            input,
            weight,
            call.chain,
            config,
            given.operands,
            output=rows_of(output),
            saved=rows_of(kept[0]) if training else None,
            eps=call.eps,
            group_size=group_size,
        )
        return [output, *kept]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        if kept:
            return products.gradients(self._z_gradient(given, dy, kept, gradients), given, gradients)
        for bias in gradients.flat:
            if bias is not None:
                do(_sum_rows, rows_of(dy), bias)
        return products.gradients(contiguous(dy), given, gradients)


def _sum_rows(gradient: Tensor, target: Tensor) -> None:
    target.copy_(gradient.sum(0, dtype=torch.float32))


class ConvTranspose2d(Contraction):
    """A transposed convolution of images, by the project's kernels or by cuDNN. The norm takes passes."""

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: dict[str, Any]) -> Tensor:
        return F.conv_transpose2d(input, weight, bias, **geometry)

    def adds_biases(self, given: Arguments) -> bool:
        # cuDNN would add the bias in a separate pass, so the norm's passes add it.
        return direct_convolution.takes(given.input, given.weight, given.call.geometry, given.call.allow_tf32)

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        return [True, True]

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        input, weight, geometry = given.input, given.weight, given.call.geometry
        shape = input.shape[0], weight.shape[1] * geometry.groups, *geometry.output_size(*input.shape[2:])
        output = torch.empty_like(input.new_empty(shape), memory_format=memory_format(input))
        if not training:
            return [output]
        z_format = torch.channels_last if self.adds_biases(given) else memory_format(input)
        statistics = output.new_empty(2, shape[0] * given.call.num_groups, dtype=torch.float32)
        return [output, torch.empty_like(output, memory_format=z_format), statistics]

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        tensor = given.weight if place else given.input
        return torch.empty_like(tensor, memory_format=memory_format(tensor))

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, operands, statistics = given.call, given.input, given.operands, None
        if self.adds_biases(given):
            z, partials = direct_convolution.forward(call, input, given.weight, operands)
            operands = given.operands_after_biases
            if partials is not None:
                statistics = partials.merge(call.num_groups, z.shape[2:].numel(), call.eps)
        else:
            z = do(convolution.conv_transpose2d, input, given.weight, call.geometry)
        output = torch.empty_like(z, memory_format=memory_format(input))
        statistics = passes.normalize(call, operands, as_volume(z), as_volume(output), statistics)
        return [output, z, statistics] if training else [output]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        z, statistics = kept
        if not z.is_contiguous(memory_format=memory_format(z)):
            z = do(Tensor.contiguous, z, memory_format=memory_format(z))
        statistics = contiguous(statistics)
        problem = given.input, given.weight, given.call.geometry
        wanted = gradients.input is not None, gradients.weight is not None
        passes_back = passes.Differentiation(given.call, given.operands, as_volume(z), gradients.flat, statistics)

        def z_gradients(samples: slice, target: Tensor, stored: Any = identity) -> None:
            # Copied first where z is channels_last and it is not: passes over mixed formats take longer.
            of_samples = direct_convolution.like_format(dy[samples], z)
            passes_back.differentiate(as_volume(of_samples), as_volume(target), samples, stored)

        if self.adds_biases(given) and direct_convolution.differentiates(z, given.input, given.call.geometry):
            found = direct_convolution.backward(z_gradients, z, *problem, wanted)
        else:
            z_gradient = torch.empty_like(z)
            z_gradients(slice(None), z_gradient)
            rest = iter(do(convolution.conv_transpose2d_gradients, z_gradient, *problem, wanted) if any(wanted) else ())
            found = next(rest) if wanted[0] else None, next(rest) if wanted[1] else None
        passes_back.finish()
        return found


CONTRACTIONS = {"": Contraction(), "linear": Linear(), "conv_transpose2d": ConvTranspose2d()}
