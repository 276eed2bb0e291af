"""Convolutions whose kernel is one pixel, as products of matrices: the operators of PyTorch that do the same.

What they are called with may be tensors, or nodes of a graph: ``do`` calls an operator with them, and ``value`` tells
the tensor that one stands for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ops import precision
from ops.convolution import CHANNELS_LAST
from ops.matrix_products import PRODUCT, pays

aten = torch.ops.aten


class DoesNotPay(Exception):
    """One of the products is cuBLAS's, or the convolution none that is meant here."""


class Pixels:
    """Calls operators on images and their pixels' matrices."""

    def __init__(self, do: Callable[..., Any], value: Callable[[Any], torch.Tensor]):
        self.do, self._value = do, value

    def convolution(self, input: Any, weight: Any, bias: Any, *geometry: Any) -> Any:
        """``aten.convolution``'s result. Raises DoesNotPay where that is to stay."""
        self._check([input], weight, *geometry)
        matrix, channels = self._matrix(weight), self._value(weight).shape[0]
        if self._has_rows(input):
            operands = [self._rows(input), self._turned(matrix), *([] if bias is None else [bias])]
            return self._image(self._product(self._that_pay(operands)), input)
        operands = self._that_pay([self._repeated(matrix, input), self._planes(input)])
        result = self.do(aten.view.default, self._product(operands), self._shape(input, channels))
        if bias is None:
            return result
        ones = [1] * (self._value(input).ndim - 2)
        return self.do(aten.add.Tensor, result, self.do(aten.view.default, bias, [1, channels, *ones]))

    def backward(self, gradient: Any, input: Any, weight: Any, bias_sizes: Any, *geometry: Any) -> tuple[Any, Any, Any]:
        """``aten.convolution_backward``'s results. Raises DoesNotPay where that is to stay."""
        *geometry, wanted = geometry
        self._check([gradient, input], weight, *geometry)
        of_input = self._that_pay(self._operands_of_input(gradient, weight)) if wanted[0] else None
        of_weight = self._that_pay(self._operands_of_weight(gradient, input)) if wanted[1] else None
        places = [0, *range(2, self._value(gradient).ndim)]
        return (
            self._of_input(of_input, gradient, weight) if of_input else None,
            self._of_weight(of_weight, gradient, weight) if of_weight else None,
            self.do(aten.sum.dim_IntList, gradient, places) if wanted[2] else None,
        )

    def _operands_of_input(self, gradient: Any, weight: Any) -> list[Any]:
        matrix = self._matrix(weight)
        if self._has_rows(gradient):
            return [self._rows(gradient), matrix]
        return [self._repeated(self._turned(matrix), gradient), self._planes(gradient)]

    def _of_input(self, operands: list[Any], gradient: Any, weight: Any) -> Any:
        result = self._product(operands)
        if self._has_rows(gradient):
            return self._image(result, gradient)
        return self.do(aten.view.default, result, self._shape(gradient, self._value(weight).shape[1]))

    def _operands_of_weight(self, gradient: Any, input: Any) -> list[Any]:
        if self._has_rows(gradient):
            return [self._turned(self._rows(gradient)), self._rows(input)]
        planes = self._planes(gradient), self._planes(input)
        of_gradient, of_input = (self._value(each).shape for each in planes)
        if of_gradient[1] * of_input[1] > of_gradient.numel() // len(self._value(gradient)) + of_input[1] * of_input[2]:
            raise DoesNotPay  # the samples' own gradients take more memory than their images
        return [planes[0], self.do(aten.permute.default, planes[1], [0, 2, 1])]

    def _of_weight(self, operands: list[Any], gradient: Any, weight: Any) -> Any:
        """As cuDNN, in the images' memory format."""
        result = self._product(operands)
        if self._value(result).ndim == 3:
            result = self.do(aten.sum.dim_IntList, result, [0])
        shape = self._value(weight).shape
        format = CHANNELS_LAST[len(shape)] if self._has_rows(gradient) else torch.contiguous_format
        return self.do(aten.as_strided.default, result, list(shape), list(_strides(shape, format)))

    def _check(
        self,
        images: Sequence[Any],
        weight: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> None:
        values = [self._value(each) for each in (*images, weight)]
        sizes = [size for each in values for size in (*each.shape, *each.stride())]
        is_one_pixel = {*values[-1].shape[2:], *stride} == {1} and set(padding) == {0}
        if not is_one_pixel or transposed or groups != 1 or precision.convolutions_allow_tf32():
            raise DoesNotPay
        if not all(type(size) is int for size in sizes) or any(each.dtype != torch.float32 for each in values):
            raise DoesNotPay
        if not all(each.numel() for each in values):
            raise DoesNotPay
        formats = [_format(each) for each in values]
        if None in formats or len({*formats[:-1]}) > 1 or (formats[0] == torch.contiguous_format != formats[-1]):
            raise DoesNotPay

    def _that_pay(self, operands: list[Any]) -> list[Any]:
        if not pays([self._value(each) for each in operands]):
            raise DoesNotPay
        return operands

    def _product(self, operands: list[Any]) -> Any:
        return self.do(PRODUCT, operands)

    def _has_rows(self, image: Any) -> bool:
        """Whether pixels are the rows of a matrix."""
        return _format(self._value(image)) != torch.contiguous_format

    def _shape(self, image: Any, channels: int) -> list[int]:
        batch, _, *pixels = self._value(image).shape
        return [batch, channels, *pixels]

    def _rows(self, image: Any) -> Any:
        """[B * pixels, C]"""
        value = self._value(image)
        last = self.do(aten.permute.default, image, [0, *range(2, value.ndim), 1])
        return self.do(aten.view.default, last, [-1, value.shape[1]])

    def _image(self, rows: Any, like: Any) -> Any:
        """The image whose pixels are rows, channels_last, with the pixels of another."""
        batch, channels, *pixels = self._shape(like, self._value(rows).shape[1])
        last = self.do(aten.view.default, rows, [batch, *pixels, channels])
        return self.do(aten.permute.default, last, [0, len(pixels) + 1, *range(1, len(pixels) + 1)])

    def _planes(self, image: Any) -> Any:
        """[B, C, pixels]"""
        return self.do(aten.view.default, image, [*self._value(image).shape[:2], -1])

    def _matrix(self, weight: Any) -> Any:
        """[O, C]"""
        return self.do(aten.view.default, weight, list(self._value(weight).shape[:2]))

    def _turned(self, matrix: Any) -> Any:
        return self.do(aten.permute.default, matrix, [1, 0])

    def _repeated(self, matrix: Any, image: Any) -> Any:
        """One for each sample."""
        one = self.do(aten.unsqueeze.default, matrix, 0)
        return self.do(aten.expand.default, one, [len(self._value(image)), *self._value(matrix).shape])


def _strides(shape: Sequence[int], format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=format).stride()


def _format(value: torch.Tensor) -> torch.memory_format | None:
    """Contiguous, or channels_last, in all strides. cuDNN goes by those of dimensions of one, too."""
    known = [torch.contiguous_format, *([CHANNELS_LAST[value.ndim]] if value.ndim > 3 else [])]
    return next((each for each in known if _strides(value.shape, each) == value.stride()), None)
