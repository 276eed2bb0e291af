"""In graphs behind autograd, the weight gradients of convolutions with few taps and channels.

cuDNN's tiles are for many channels. Of the first convolution of a network for images, and of all in a network of 8 to
32 channels, the weight gradient takes it 1.5 to 12 times as long as the kernel here (bfloat16, channels_last, H200).
"""

import ast
import logging
import math
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ops import plans, precision
from ops.calls import as_volume
from ops.convolution import CHANNELS_LAST
from ops.fingerprint import check, fingerprint
from ops.layouts import call_like, hold_strides, is_channels_last
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.narrow_weight_gradient import ConvolvedAxis, narrow_weight_gradient

Tensor = torch.Tensor
aten = torch.ops.aten

_log = logging.getLogger("ops.backend")

#: Of the input. With 128 cuDNN takes as long.
_MOST_CHANNELS = 32
#: Of the weight: with 11,520 cuDNN takes longer, with 27,648 as long. (That of one tap is a product of matrices.)
_MOST_WEIGHTS = 3 * 2**12
#: Of all samples' outputs: fewer take no longer than two launches.
_FEWEST_PIXELS = 2**15
#: Of a sample with its padding: what a kernel's indices hold, with room for taps on both sides.
_MOST_ELEMENTS = 2**30


def _read(words: str) -> tuple[list[ConvolvedAxis], tuple[int, ...]]:
    """The axes of pixels, and the strides of the weight's gradient."""
    written_by, rows, strides = words.split(" | ")
    check(written_by)
    return [ConvolvedAxis(*row) for row in ast.literal_eval(rows)], ast.literal_eval(strides)


def _empty(axes: Sequence[ConvolvedAxis], strides: Sequence[int], gradient: Tensor, input: Tensor) -> Tensor:
    shape = gradient.shape[1], input.shape[1], *(axis.taps for axis in axes)
    return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device)


_plans = plans.Kept()


def plan(words: str, gradient: Tensor, input: Tensor) -> Plan:
    """The plan that the operator ``weight_gradient`` runs for these arguments."""
    key = words, *layouts_of([gradient, input])

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        axes, strides = _read(words)
        result = _empty(axes, strides, *stand_ins)
        first, second, third = [ConvolvedAxis(1, 1)] * (3 - len(axes)) + axes
        in_memory = result.as_strided((result.numel(),), (1,))
        of_outputs, image = map(as_volume, stand_ins)
        narrow_weight_gradient(of_outputs, image, in_memory.view(len(result), -1), (first, second, third))
        return [result]

    return _plans.get(key) or _plans.add(key, plans.made([gradient, input], write))


define(
    "weight_gradient",
    "(str words, Tensor gradient, Tensor input) -> Tensor",
    plan,
    lambda words, *images: [_empty(*_read(words), *images)],
    "gradient",
    lambda words, *images: f"weight of a convolution {list(_empty(*_read(words), *images).shape)}",
)
WEIGHT_GRADIENT = torch.ops.normfuse.weight_gradient.default


def take_over(graph: Graph) -> None:
    """Let the kernel compute the weight gradients for which it is faster."""
    count = 0
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        for user in list(node.users):
            is_wanted = user.target is operator.getitem and user.args[1] == 1 and user.users
            if is_wanted and (words := _words(node, user)):
                count += 1
                _replace(node, user, words)
    if count:
        _log.info("%d weight gradients of narrow convolutions", count)
        graph.eliminate_dead_code()
        graph.lint()


def _words(node: Node, result: Node) -> str:
    """The words of a call that is to make this result, or "" where it is cuDNN's."""
    gradient, input, weight, _, *geometry, is_transposed, _, groups, _ = node.args
    values = [each.meta["val"] for each in (gradient, input, weight, result)]
    of_gradient, of_input, of_weight, image = values
    are_known = all(type(size) is int for each in values for size in (*each.shape, *each.stride()))
    if not are_known or is_transposed or groups != 1 or of_weight.ndim not in CHANNELS_LAST:
        return ""
    if (
        of_gradient.dtype != of_input.dtype
        or not precision.is_16_bits_on_hopper(of_input)
        or not _is_faster(of_gradient, of_weight)
    ):
        return ""
    if not all(map(is_channels_last, (of_gradient, of_input, image))):
        return ""
    stride, padding, dilation = (each * (of_input.ndim - 2) if len(each) == 1 else each for each in geometry)
    padded = [size + 2 * around for size, around in zip(of_input.shape[2:], padding, strict=True)]
    if of_input.shape[1] * math.prod(padded) > _MOST_ELEMENTS:
        return ""
    rows = zip(of_input.shape[2:], of_gradient.shape[2:], of_weight.shape[2:], stride, padding, dilation, strict=True)
    return f"{fingerprint([])} | {list(rows)} | {image.stride()}"


def _is_faster(gradient: Tensor, weight: Tensor) -> bool:
    is_narrow = weight.shape[1] <= _MOST_CHANNELS and weight.numel() <= _MOST_WEIGHTS
    pixels = len(gradient) * math.prod(gradient.shape[2:])
    return is_narrow and math.prod(weight.shape[2:]) > 1 and pixels >= _FEWEST_PIXELS


def _replace(node: Node, result: Node, words: str) -> None:
    gradient, input = node.args[:2]
    with node.graph.inserting_before(node):
        ours = call_like(result, WEIGHT_GRADIENT, words, gradient, input)
    hold_strides(ours)
    result.replace_all_uses_with(ours)
    of_input, _, of_bias = node.args[-1]
    node.args = (*node.args[:-1], [of_input, False, of_bias])
