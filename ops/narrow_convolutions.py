"""In graphs behind autograd, convolutions of few channels and their gradients.

cuDNN's tiles are for many channels. The first convolution of a network for images, and all in a network of 8 to 16
channels, take it 1.5 to 15 times as long as the kernel here; weight gradients, of up to 32 channels, 1.5 to 12 times
(bfloat16, channels_last, H200).
"""

import ast
import logging
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ops import plans, precision
from ops.calls import as_volume
from ops.convolution import CHANNELS_LAST
from ops.fingerprint import check, fingerprint
from ops.layouts import call_like, hold_strides, is_channels_last
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.narrow_convolution import narrow_convolution
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient

Tensor = torch.Tensor
aten = torch.ops.aten

_log = logging.getLogger("ops.backend")

#: Of the image that is convolved, whatever the result's.
_FEW_CHANNELS = 4
#: Of the image, and of the result then. With 24 cuDNN takes nearly as short, with 32 shorter.
_NARROW = 16, 32
#: Of all samples' results.
_FEWEST_RESULTS = 2**12
#: Of the input whose weight gets a gradient. With 128 cuDNN takes as long.
_MOST_CHANNELS = 32
#: Of that weight: with 11,520 cuDNN takes longer, with 27,648 as long. (That of one tap is a product of matrices.)
_MOST_WEIGHTS = 3 * 2**12
#: Of all samples' outputs: fewer take no longer than two launches.
_FEWEST_PIXELS = 2**15
#: Of a sample, as far as indices reach, and pixels of all samples: what a kernel's indices hold, with room for taps on
#: both sides.
_MOST_ELEMENTS = 2**30


def _read(words: str) -> tuple[list[ConvolvedAxis], tuple[int, ...]]:
    """The axes of pixels, and the strides of the result."""
    written_by, rows, strides = words.split(" | ")
    check(written_by)
    return [ConvolvedAxis(*row) for row in ast.literal_eval(rows)], ast.literal_eval(strides)


def _weight_shape(axes: Sequence[ConvolvedAxis], gradient: Tensor, input: Tensor) -> tuple[int, ...]:
    return gradient.shape[1], input.shape[1], *(axis.taps for axis in axes)


def _image_shape(axes: Sequence[ConvolvedAxis], image: Tensor, weight: Tensor) -> tuple[int, ...]:
    return len(image), weight.shape[1], *(axis.outputs for axis in axes)


def _empty(shape_of: Callable[..., tuple[int, ...]], words: str, *operands: Tensor) -> Tensor:
    axes, strides = _read(words)
    like = operands[0]
    return torch.empty_strided(shape_of(axes, *operands), strides, dtype=like.dtype, device=like.device)


def _in_memory(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


def _three(axes: list[ConvolvedAxis]) -> tuple[ConvolvedAxis, ConvolvedAxis, ConvolvedAxis]:
    first, second, third = [ConvolvedAxis(1, 1)] * (3 - len(axes)) + axes
    return first, second, third


_plans = plans.Kept()


def weight_gradient_plan(words: str, gradient: Tensor, input: Tensor) -> Plan:
    """The plan that the operator ``weight_gradient`` runs for these arguments."""

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        result = _empty(_weight_shape, words, *stand_ins)
        of_outputs, image = map(as_volume, stand_ins)
        narrow_weight_gradient(of_outputs, image, _in_memory(result).view(len(result), -1), _three(_read(words)[0]))
        return [result]

    key = words, *layouts_of([gradient, input])
    return _plans.get(key) or _plans.add(key, plans.made([gradient, input], write))


def convolution_plan(words: str, image: Tensor, weight: Tensor) -> Plan:
    """The plan that the operator ``narrow_convolution`` runs for these arguments."""

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        image, weight = stand_ins
        result = _empty(_image_shape, words, image, weight)
        rows = _in_memory(image).view(len(image), -1, image.shape[1])
        narrow_convolution(rows, weight, _in_memory(result).view(-1, result.shape[1]), _three(_read(words)[0]))
        return [result]

    key = words, *layouts_of([image, weight])
    return _plans.get(key) or _plans.add(key, plans.made([image, weight], write))


define(
    "weight_gradient",
    "(str words, Tensor gradient, Tensor input) -> Tensor",
    weight_gradient_plan,
    lambda *arguments: [_empty(_weight_shape, *arguments)],
    "gradient",
    lambda *arguments: f"weight of a convolution {list(_empty(_weight_shape, *arguments).shape)}",
)
define(
    "narrow_convolution",
    "(str words, Tensor image, Tensor weight) -> Tensor",
    convolution_plan,
    lambda *arguments: [_empty(_image_shape, *arguments)],
    "convolution",
    lambda words, image, weight: f"image {list(image.shape)}, weight {list(weight.shape)}",
)
WEIGHT_GRADIENT = torch.ops.normfuse.weight_gradient.default
CONVOLUTION = torch.ops.normfuse.narrow_convolution.default


def take_over(graph: Graph) -> None:
    """Let the kernels compute what they compute faster."""
    count = 0
    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            count += _take_convolution(node)
        elif node.target is aten.convolution_backward.default:
            takes = _take_input_gradient, _take_weight_gradient
            for user in list(node.users):
                if user.target is operator.getitem and user.args[1] < len(takes) and user.users:
                    count += takes[user.args[1]](node, user)
    if count:
        _log.info("%d narrow convolutions and gradients", count)
        graph.eliminate_dead_code()
        graph.lint()


def _take_convolution(node: Node) -> bool:
    image, weight, bias, *geometry = node.args
    of_image, of_weight, result = (each.meta["val"] for each in (image, weight, node))
    if not (_are_plain(geometry, of_image, of_weight, result) and _is_faster(of_image, result)):
        return False
    words = _words(of_image, result, of_weight, *_of_axes(of_image, geometry), result.stride())
    if not words:
        return False
    with node.graph.inserting_before(node):
        ours = call_like(node, CONVOLUTION, words, image, _as_matrix(node, weight, [1, 0]))
        hold_strides(ours)
        if bias is not None:  # as Inductor adds it
            vector = call_like(node, aten.view.default, bias, [-1, *[1] * (of_image.ndim - 2)])
            ours = call_like(node, aten.add.Tensor, ours, vector)
    node.replace_all_uses_with(ours)
    return True


def _take_input_gradient(node: Node, result: Node) -> bool:
    """At stride 1 it is a convolution of the outputs' gradient, whose taps lie the other way round."""
    gradient, input, weight, _, *geometry, _ = node.args
    values = [each.meta["val"] for each in (gradient, weight, result)]
    if not (_are_plain(geometry, *values) and _is_faster(values[0], values[-1])):
        return False
    stride, padding, dilation = _of_axes(values[0], geometry)
    if set(stride) != {1}:
        return False
    of_gradient, of_weight, of_input = values
    padding, dilation = ([-each for each in row] for row in (padding, dilation))
    words = _words(of_gradient, of_input, of_weight, stride, padding, dilation, of_input.stride())
    if not words:
        return False
    with node.graph.inserting_before(node):
        ours = call_like(result, CONVOLUTION, words, gradient, _as_matrix(result, weight, [0, 1]))
    _replace(node, result, ours)
    return True


def _take_weight_gradient(node: Node, result: Node) -> bool:
    gradient, input, weight, _, *geometry, _ = node.args
    values = [each.meta["val"] for each in (gradient, input, result)]
    if not _are_plain(geometry, *values):
        return False
    of_gradient, of_input, of_weight = values
    pixels = len(of_gradient) * math.prod(of_gradient.shape[2:])
    is_narrow = of_weight.shape[1] <= _MOST_CHANNELS and of_weight.numel() <= _MOST_WEIGHTS
    if not is_narrow or pixels < _FEWEST_PIXELS or not is_channels_last(of_weight):
        return False
    words = _words(of_input, of_gradient, of_weight, *_of_axes(of_input, geometry), of_weight.stride())
    if not words:
        return False
    with node.graph.inserting_before(node):
        ours = call_like(result, WEIGHT_GRADIENT, words, gradient, input)
    _replace(node, result, ours)
    return True


def _are_plain(geometry: Sequence[Any], *values: Tensor) -> bool:
    """Whether kernels take a convolution of these images and weight of more than one tap, with its known sizes."""
    *_, is_transposed, _, groups = geometry
    are_known = all(type(size) is int for each in values for size in (*each.shape, *each.stride()))
    if not are_known or is_transposed or groups != 1 or values[0].ndim not in CHANNELS_LAST:
        return False
    return len({each.dtype for each in values}) == 1 and precision.is_16_bits_on_hopper(values[0])


def _is_faster(image: Tensor, result: Tensor) -> bool:
    """Of a convolution, with this image as its input."""
    channels, others, pixels = image.shape[1], result.shape[1], len(result) * math.prod(result.shape[2:])
    is_narrow = channels <= _FEW_CHANNELS or (channels <= _NARROW[0] and others <= _NARROW[1])
    return is_narrow and _FEWEST_RESULTS <= pixels <= _MOST_ELEMENTS


def _of_axes(image: Tensor, geometry: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation of each axis."""
    dims = image.ndim - 2
    stride, padding, dilation = (list(each) * (dims if len(each) == 1 else 1) for each in geometry[:3])
    return stride, padding, dilation


def _words(
    image: Tensor,
    outputs: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    strides: Sequence[int],
) -> str:
    """The words of a call whose result has these strides, or "" where it is cuDNN's."""
    rows = list(zip(image.shape[2:], outputs.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True))
    if math.prod(weight.shape[2:]) == 1 or image.shape[1] * math.prod(_reach(*row) for row in rows) > _MOST_ELEMENTS:
        return ""
    if not (is_channels_last(image) and is_channels_last(outputs)):
        return ""
    return f"{fingerprint([])} | {rows} | {tuple(strides)}"


def _reach(size: int, outputs: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """How far a kernel's indices go along an axis of the image: with the padding, to where outputs are, and to taps."""
    return max(size + 2 * max(padding, 0), (outputs - 1) * stride - padding + 1, (taps - 1) * abs(dilation) + 1)


def _as_matrix(like: Node, weight: Node, order: list[int]) -> Node:
    """The weight [O, C, taps] as a matrix whose rows are taps and one of these, and its columns the other."""
    taps = range(2, weight.meta["val"].ndim)
    last = call_like(like, aten.permute.default, weight, [*taps, *order])
    dense = call_like(like, aten.clone.default, last, memory_format=torch.contiguous_format)
    return call_like(like, aten.view.default, dense, [-1, last.meta["val"].shape[-1]])


def _replace(node: Node, result: Node, ours: Node) -> None:
    """Let a call make one of the results of a convolution's backward pass."""
    hold_strides(ours)
    result.replace_all_uses_with(ours)
    wanted = list(node.args[-1])
    wanted[result.args[1]] = False
    node.args = (*node.args[:-1], wanted)
