"""What a chain begins with, an object each: its plain form, what its calls return, and both passes as steps of plans.

z is the contraction's result. Of the results' size, it alone is kept for the backward pass. What follows it is done by
the contraction's kernel, where that can, or by ``ops.passes``.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ops import convolution, direct_convolution, passes, products
from ops.calls import Arguments, Call, as_volume, contiguous, rows_of
from ops.convolution import memory_format
from triton_kernels import row_minimum, row_minimum_backward, row_minimum_order
from triton_kernels.chain import Chain
from triton_kernels.grid import blocks_of
from triton_kernels.group_norm import column_tiles, group_norm
from triton_kernels.launch import call as do
from triton_kernels.pointwise import identity

Tensor = torch.Tensor
#: Of the input and the weight; None where not wanted.
Gradients = tuple[Tensor | None, Tensor | None]


class Contraction:
    """None: z is the input."""

    #: z of input, weight, bias and geometry in plain PyTorch.
    plain: Callable[..., Tensor] = staticmethod(lambda input, *_: input)

    def reads(self, given: Arguments, wanted: Sequence[bool]) -> tuple[bool, bool, int]:
        """Whether the backward pass reads input and weight, for the ``wanted`` gradients, and the first step it reads.

        Biases are not read where z is kept with them.
        """
        return True, False, 0

    def keeps(self, given: Arguments) -> bool:
        """Whether ``forward`` returns more than the result, if ``training``."""
        return self._keeps_statistics(given.call, given.input)

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        """What ``forward`` returns, without values."""
        output = self._empty(given, given.result_dtype)
        if not (training and self.keeps(given)):
            return [output]
        groups = given.input.shape[0] * given.call.num_groups
        return [output, given.input.new_empty(2, groups, dtype=torch.float32)]

    def _empty(self, given: Arguments, dtype: torch.dtype) -> Tensor:
        norm, input = given.call.chain.norm, given.input
        return torch.empty_like(input, dtype=dtype) if norm else input.new_empty(input.shape, dtype=dtype)

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """The input's (0) or the weight's (1) gradient, without values, from what ``backward`` gets."""
        return self._empty(given, given.dtype)

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        """The result and, if ``training``, what the backward pass needs beside the call's own tensors."""
        z = self._readable(given.call, given.input)
        output = torch.empty_like(z, dtype=given.result_dtype)
        volumes = self._volume(given.call, z), self._volume(given.call, output)
        statistics = passes.forward(given.call, given.operands, *volumes)
        return [_lying_as(given, output), *(statistics if training else [])]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        """The gradients of input and weight, from dy, the result's. Those of vectors and tensors are written.

        ``gradients`` has memory for these, and says of input and weight whether their gradients are wanted.
        """
        return _lying_as(given, self._z_gradient(given, dy, [given.input, *kept], gradients)), None

    def _keeps_statistics(self, call: Call, z: Tensor) -> bool:
        return bool(call.chain.norm) and passes.keeps_statistics(call, z.shape[1], math.prod(z.shape[2:]))

    def _readable(self, call: Call, tensor: Tensor) -> Tensor:
        """A tensor of z's shape, copied where ``passes`` cannot read it as it lies: images in any memory format, all
        else contiguous."""
        if not call.chain.has_rows and self._keeps_statistics(call, tensor):
            with contextlib.suppress(RuntimeError):  # no view has all pixels in one dimension
                for each in (tensor, torch.empty_like(tensor)):
                    each.view(*each.shape[:2], math.prod(each.shape[2:]))
                return tensor
        return contiguous(tensor)

    def _volume(self, call: Call, tensor: Tensor) -> Tensor:
        """View or copy of a tensor of z's shape as ``passes`` take it."""
        return as_volume(rows_of(tensor) if call.chain.has_rows else tensor)

    def _z_gradient(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Tensor:
        """z's gradient. ``kept`` has z, and its statistics where there are any."""
        dy, z = (self._readable(given.call, each) for each in (dy, kept[0]))
        z_gradient = torch.empty_like(z)
        volume = partial(self._volume, given.call)
        targets, statistics = gradients.vectors, list(map(contiguous, kept[1:]))
        passes.backward(given.call, given.operands, volume(dy), volume(z), volume(z_gradient), targets, statistics)
        return z_gradient


def _lying_as(given: Arguments, values: Tensor) -> Tensor:
    """The values in memory as the input of a norm lies, copied where they are not."""
    result = torch.empty_like(given.input, dtype=values.dtype)
    if values.stride() == result.stride() or not given.call.chain.norm:
        return values
    do(_copy, values, result)
    return result


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class Linear(Contraction):
    """input @ weight.T. One kernel does the whole chain where its tiles hold whole groups."""

    plain = staticmethod(F.linear)

    def reads(self, given: Arguments, wanted: Sequence[bool]) -> tuple[bool, bool, int]:
        return wanted[1], wanted[0], len(given.call.chain.biases)  # each for the other's gradient

    def keeps(self, given: Arguments) -> bool:
        return not given.call.chain.is_sum

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        (*lead, _), N = given.input.shape, given.weight.shape[0]
        results = [given.input.new_empty((*lead, N), dtype=given.result_dtype)]
        if training and self.keeps(given):
            results.append(given.input.new_empty(*lead, N))
        if training and passes.keeps_statistics(given.call, N):
            groups = math.prod(given.input.shape[:-1]) * given.call.num_groups
            results.append(results[0].new_empty(2, groups, dtype=torch.float32))
        return results

    def z_shape(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Sequence[int]:
        return dy.shape

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        *lead, N = self.z_shape(given, dy, kept)
        shape = (N, given.input.shape[-1]) if place else (*lead, given.weight.shape[1])
        return dy.new_empty(shape, dtype=given.dtype)

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, weight, (biases, others) = given.call, rows_of(given.input), given.weight, given.divided
        output, *kept = self.empty_results(given, training)
        if len(biases) == len(others):
            return [products.affine(input, weight, biases, output.shape, output.dtype)]
        group_size = weight.shape[0] // call.num_groups if call.chain.norm else 1
        config = products.fused_config(call.chain, input, weight, group_size, biases, output.dtype)
        if config is None:
            z = products.affine(input, weight, biases, output.shape)
            statistics = passes.forward(call, others, self._volume(call, z), self._volume(call, output))
            return [output, z, *statistics] if kept else [output]
        targets: dict[str, Any] = {"output": rows_of(output), "saved": rows_of(kept[0]) if kept else None}
        options: dict[str, Any] = {"eps": call.eps, "group_size": group_size}
        products.product(input, weight, call.chain, config, given.operands, **options, **targets)
        return [output, *kept]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        if kept:
            return products.gradients(self._z_gradient(given, dy, kept, gradients), given, gradients)
        for step, target in zip(given.call.chain.steps, gradients.vectors, strict=True):
            if target is not None and step.operand == "tensor":
                do(_copy, dy, target)
            elif target is not None:
                do(_sum_rows, rows_of(dy), target)
        wanted = gradients.input is not None or gradients.weight is not None
        in_dtype = do(Tensor.to, dy, given.dtype) if wanted and dy.dtype != given.dtype else dy
        return products.gradients(contiguous(in_dtype), given, gradients)


def _sum_rows(gradient: Tensor, target: Tensor) -> None:
    target.copy_(gradient.sum(0, dtype=torch.float32))


class ReducedLinear(Linear):
    """A linear layer of which the chain keeps the rows' minima.

    For the backward pass, it keeps of each row what ``_winner`` divides.
    """

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        """The result is [1, C, M, 1], or [M, 1] without a bias."""
        M, group_size, bias = given.input.shape[0], given.weight.shape[0] // given.call.num_groups, given.bias
        shape = (M, 1) if bias is None else (1, bias.numel(), M, 1)
        output = given.input.new_empty(shape, dtype=given.result_dtype)
        kept = output.new_empty(max(1, M) * (group_size + 2), dtype=torch.float32) if training else None
        return [output] if kept is None else [output, kept]

    def z_shape(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Sequence[int]:
        M = dy.shape[0] if dy.ndim == 2 else dy.shape[2]
        return M, (kept[0].numel() // max(1, M) - 2) * given.call.num_groups

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, weight, bias, (biases, others) = given.call, given.input, given.weight, given.bias, given.divided
        (M, _), N = input.shape, weight.shape[0]
        group_size = N // call.num_groups
        config = products.fused_config(call.chain, input, weight, group_size, biases)
        if config is not None:
            of_product = partial(products.product, eps=call.eps, group_size=group_size)
            reduce = partial(of_product, input, weight, call.chain, config, given.operands)
            tiles = blocks_of(N, config.epilogue_columns)
        else:
            z = products.affine(input, weight, biases, (M, N))
            norm = passes.rows_config("group_norm", call, z)
            reduce = partial(group_norm, z, call.num_groups, call.chain, others, call.eps, norm)
            tiles = column_tiles(N, group_size, norm)
        keys, of_tiles = row_minimum.empty_tile_minimum(tiles, M, group_size, input.device, training)
        reduce(output=keys, saved=of_tiles)
        output, *kept = results = self.empty_results(given, training)
        winner = _winner(kept[0], M, group_size) if training else None
        if training and M == 0:
            do(products.zero, kept[0])  # which says the group size by its own
        flat_bias = None if bias is None else contiguous(bias).view(-1)
        rows = output.view(1 if bias is None else bias.numel(), M)
        row_minimum.finish(keys, of_tiles, flat_bias, rows, winner, group_size, *given.operands[-2:])
        return results

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        """The gradient at the GEMM's output is zero outside the group that holds a row's minimum.

        While groups are narrow, the input's gradient gathers that group's rows of the weight, and the weight's adds up
        the rows that chose each group.
        """
        (M, N), num_groups = self.z_shape(given, dy, kept), given.call.num_groups
        group_size = N // num_groups
        winner = column, _, _ = _winner(contiguous(kept[0]), M, group_size)
        columns = dy.squeeze(1).unsqueeze(0) if dy.ndim == 2 else dy[0, :, :, 0]
        row_partials, order, offsets = row_minimum_order.sums_and_order(
            columns, column, num_groups, group_size, gradients.bias
        )
        minimum_gradient, z_gradient = row_minimum_backward.winner_backward(
            row_partials, winner, given.operands[-2], group_size
        )
        row_minimum_backward.column_gradients(minimum_gradient, winner, z_gradient, order, offsets, gradients.vectors)
        if not row_minimum_backward.has_sparse_gradient(num_groups, group_size):
            if gradients.input is None and gradients.weight is None:
                return None, None
            return products.gradients(do(_scatter, z_gradient, column, num_groups, given.dtype), given, gradients)
        of_input = of_weight = None
        if gradients.input is not None:
            of_input = self.empty_gradient(0, given, dy, kept)
            row_minimum_backward.input_gradient(z_gradient, column, order, given.weight, of_input)
        if gradients.weight is not None:
            of_weight = self.empty_gradient(1, given, dy, kept)
            row_minimum_backward.weight_gradient(z_gradient, order, offsets, given.input, of_weight)
        return of_input, of_weight


def _winner(kept: Tensor, M: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the group that holds each row's minimum: the minimum's column [M] (int32), the group's reciprocal standard
    deviation [M] and normalised values [M, group_size]. They are one tensor, which costs the host least."""
    normalized, rstd, column, _ = kept.split([M * group_size, M, M, kept.numel() - M * (group_size + 2)])
    return column.view(torch.int32), rstd, normalized.view(M, group_size)


def _scatter(z_gradient: Tensor, column: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """The gradient at the GEMM's output [M, N], of which each row has one group, [M, group_size]."""
    M, group_size = z_gradient.shape
    dense = z_gradient.new_zeros(M, num_groups, group_size, dtype=dtype)
    group = torch.div(column, group_size, rounding_mode="floor").long()
    dense[torch.arange(M, device=dense.device), group] = z_gradient.to(dtype)
    return dense.view(M, num_groups * group_size)


class Convolution(Contraction):
    """A convolution of images, plain or transposed, by the project's kernels or by cuDNN. The norm takes passes."""

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain = plain

    def reads(self, given: Arguments, wanted: Sequence[bool]) -> tuple[bool, bool, int]:
        return True, True, len(given.call.chain.biases) if self._is_direct(given) else 0

    def keeps(self, given: Arguments) -> bool:
        return True

    def _is_direct(self, given: Arguments) -> bool:
        """Whether the project's kernels make z. These add the biases; cuDNN would do so in a pass of its own."""
        return direct_convolution.takes(given.input, given.weight, given.call.geometry, given.call.allow_tf32)

    def empty_results(self, given: Arguments, training: bool) -> list[Tensor]:
        input, weight, geometry = given.input, given.weight, given.call.geometry
        shape = input.shape[0], geometry.channels(weight), *geometry.output_size(*input.shape[2:])
        empty = input.new_empty(shape)
        output = torch.empty_like(empty, dtype=given.result_dtype, memory_format=memory_format(input))
        if not training:
            return [output]
        z_format = torch.channels_last if self._is_direct(given) else convolution.cudnn_format(input, geometry)
        statistics = output.new_empty(2, shape[0] * given.call.num_groups, dtype=torch.float32)
        return [output, torch.empty_like(empty, memory_format=z_format), statistics]

    def empty_gradient(self, place: int, given: Arguments, dy: Tensor, kept: Sequence[Tensor]) -> Tensor:
        tensor = given.weight if place else given.input
        return torch.empty_like(tensor, memory_format=memory_format(tensor))

    def forward(self, given: Arguments, training: bool) -> list[Tensor]:
        call, input, operands, partials = given.call, given.input, given.operands, None
        if self._is_direct(given):
            z, partials = direct_convolution.forward(call, input, given.weight, operands)
            _, operands = given.divided
        else:
            images = convolution.cudnn_format(input, call.geometry)
            image = direct_convolution.in_format(input, images)
            z = do(convolution.convolve, image, given.weight, call.geometry, images)
        output = torch.empty_like(z, dtype=given.result_dtype, memory_format=memory_format(input))
        statistics = passes.normalize(call, operands, as_volume(z), as_volume(output), partials)
        return [output, z, statistics] if training else [output]

    def backward(self, given: Arguments, dy: Tensor, kept: Sequence[Tensor], gradients: Arguments) -> Gradients:
        z = do(Tensor.contiguous, kept[0], memory_format=memory_format(kept[0]))
        statistics = contiguous(kept[1])
        wanted = gradients.input is not None, gradients.weight is not None
        passes_back = passes.Differentiation(given.call, given.operands, as_volume(z), statistics, gradients.vectors)

        def z_gradients(samples: slice, target: Tensor, stored: Any = identity) -> None:
            of_samples = dy[samples]
            if memory_format(z) == torch.channels_last:  # passes over mixed formats take longer
                of_samples = direct_convolution.in_channels_last(of_samples)
            passes_back.differentiate(as_volume(of_samples), as_volume(target), samples, stored)

        if self._is_direct(given) and direct_convolution.differentiates(z, given.input, given.call.geometry):
            problem = given.input, given.weight, given.call.geometry
            found = direct_convolution.backward(z_gradients, z, *problem, wanted)
        else:
            z_gradient = torch.empty_like(z)
            z_gradients(slice(None), z_gradient)
            found = self._by_cudnn(given, z_gradient, wanted)
        passes_back.finish()
        return found

    def _by_cudnn(self, given: Arguments, z_gradient: Tensor, wanted: tuple[bool, bool]) -> Gradients:
        """The gradients of input and weight by PyTorch."""
        if not any(wanted):
            return None, None
        input, geometry = given.input, given.call.geometry
        image = direct_convolution.in_format(input, convolution.cudnn_format(input, geometry))
        found = iter(do(convolution.convolution_gradients, z_gradient, image, given.weight, geometry, wanted))
        of_input = direct_convolution.in_format(next(found), memory_format(input)) if wanted[0] else None
        return of_input, next(found) if wanted[1] else None


CONTRACTIONS = {
    "": Contraction(),
    "linear": Linear(),
    "conv2d": Convolution(F.conv2d),
    "conv_transpose2d": Convolution(F.conv_transpose2d),
}
_REDUCED_LINEAR = ReducedLinear()


def contraction_of(chain: Chain) -> Contraction:
    """What makes the steps of the plans of a chain's calls."""
    return _REDUCED_LINEAR if chain.reduction else CONTRACTIONS[chain.contraction]
