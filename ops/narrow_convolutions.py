"""In graphs behind autograd, the weight gradients of convolutions with few taps and channels.

cuDNN's tiles are for many channels. Of the first convolution of a network for images, and of all in a network of 8 to
32 channels, the weight gradient takes it 1.5 to 12 times as long as the kernel here (bfloat16, channels_last, H200).
"""

import ast
import logging
import math
import operator

import torch
from torch.fx import Graph, Node

from ops import plans, precision
from ops.calls import as_volume
from ops.convolution import CHANNELS_LAST
from ops.fingerprint import check, fingerprint
from ops.layouts import call_like
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.device import architecture
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
#: What a kernel's indices within a sample hold.
_MOST_ELEMENTS = 2**30


def _write(axes: list[ConvolvedAxis], strides: tuple[int, ...]) -> str:
    rows = [(each.size, each.outputs, each.taps, each.stride, each.padding, each.dilation) for each in axes]
    return f"{fingerprint([])} | {rows} | {strides}"


def _read(words: str) -> tuple[list[ConvolvedAxis], tuple[int, ...]]:
    """The axes of pixels, and the strides of the weight's gradient."""
    written_by, rows, strides = words.split(" | ")
    check(written_by)
    return [ConvolvedAxis(*row) for row in ast.literal_eval(rows)], ast.literal_eval(strides)


def _empty(words: str, gradient: Tensor, input: Tensor) -> Tensor:
    axes, strides = _read(words)
    shape = gradient.shape[1], input.shape[1], *(axis.taps for axis in axes)
    return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device)


_plans = plans.Kept()


def plan(words: str, gradient: Tensor, input: Tensor) -> Plan:
    """The plan that the operator ``weight_gradient`` runs for these arguments."""
    key = words, *layouts_of([gradient, input])

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        result, (axes, _) = _empty(words, *stand_ins), _read(words)
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
    lambda *arguments: [_empty(*arguments)],
)
WEIGHT_GRADIENT = torch.ops.normfuse.weight_gradient.default


def take_over(graph: Graph) -> None:
    """Let the kernel compute the weight gradients for which it is faster."""
    count = 0
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and (words := _words(node)):
            count += 1
            _replace(node, words)
    if count:
        _log.info("%d weight gradients of narrow convolutions", count)
        graph.eliminate_dead_code()
        graph.lint()


def _of_weight(node: Node) -> Node | None:
    found = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
    return found[0] if found and node.args[-1][1] else None


def _words(node: Node) -> str:
    """A call's words, or "" where it is cuDNN's."""
    gradient, input, weight, _, stride, padding, dilation, is_transposed, _, groups, _ = node.args
    values = [each.meta["val"] for each in (gradient, input, weight)]
    of_gradient, of_input, of_weight = values
    found = _of_weight(node)
    if found is None or is_transposed or groups != 1 or of_weight.ndim not in CHANNELS_LAST:
        return ""
    if not all(type(size) is int for each in values for size in (*each.shape, *each.stride())):
        return ""
    is_narrow = of_weight.shape[1] <= _MOST_CHANNELS and of_weight.numel() <= _MOST_WEIGHTS
    pixels = of_gradient.numel() // max(1, of_gradient.shape[1])
    if not is_narrow or math.prod(of_weight.shape[2:]) == 1 or pixels < _FEWEST_PIXELS:
        return ""
    if of_gradient.dtype != of_input.dtype or of_input.dtype.itemsize != 2 or not _runs(of_input):
        return ""
    if math.prod(of_input.shape[1:]) > _MOST_ELEMENTS or not all(map(_has_close_channels, (of_gradient, of_input))):
        return ""
    rows = zip(of_input.shape[2:], of_gradient.shape[2:], of_weight.shape[2:], stride, padding, dilation, strict=True)
    strides = found.meta["val"].stride()
    is_written_so = _has_close_channels(found.meta["val"])
    return _write([ConvolvedAxis(*row) for row in rows], strides) if is_written_so else ""


def _runs(value: Tensor) -> bool:
    """Whether it is on a GPU where that was measured."""
    return precision.runs_kernels(value) and architecture(value.device) == 90


def _has_close_channels(value: Tensor) -> bool:
    """Whether it lies as channels_last, but for dimensions of one."""
    return value.is_contiguous(memory_format=CHANNELS_LAST[value.ndim])


def _replace(node: Node, words: str) -> None:
    gradient, input = node.args[:2]
    found = _of_weight(node)
    assert found is not None
    with node.graph.inserting_before(node):
        result = call_like(found, WEIGHT_GRADIENT, words, gradient, input)
    values = tuple(each.meta["val"] for each in (gradient, input))
    result.meta["eager_input_vals"] = (words, *values), {}
    found.replace_all_uses_with(result)
    mask = list(node.args[-1])
    mask[1] = False
    node.args = (*node.args[:-1], mask)
