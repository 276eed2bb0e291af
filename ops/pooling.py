"""Max pooling in compiled graphs with a backward pass that gathers.

PyTorch's keeps an index of 64 bits for each output, and in 3-D its gradient is added with atomics. Here an output has
the place in its window, in 8 bits, and each input reads the windows that it is in. Where that is one, it is plain aten,
which Inductor puts into kernels with what is around it. Of several, Inductor would compute all that their gradients are
made of once for each: a kernel of ours gathers them.
"""

import ast
import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, Node

from ops import plans, precision
from ops.calls import as_volume
from ops.fingerprint import check, fingerprint
from ops.graph_nodes import example
from ops.interpolation import at
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.grid import blocks_of
from triton_kernels.max_pool import PooledAxis, max_pool_backward

Tensor = torch.Tensor
_FUNCTIONS: dict[Any, int] = {
    function: dims
    for dims, name in enumerate(("max_pool1d", "max_pool2d", "max_pool3d"), 1)
    for function in (getattr(F, name), getattr(torch, name))
}
#: Larger windows are PyTorch's, and those farther apart.
_MOST_PLACES = 16
#: So many windows that an input is in fit a thread's registers.
_MOST_WINDOWS = 9


def _at_place(input: Tensor, axes: Sequence[PooledAxis], place: Sequence[int]) -> Tensor:
    """What lies at a place of each window; beside the image, -infinity."""
    inside = None
    for number, (axis, each) in enumerate(zip(axes, place, strict=True)):
        dim, first = number + 2, each - axis.padding
        end = first + (axis.outputs - 1) * axis.stride + 1
        if first >= 0 and end <= axis.size:  # a slice is less for Inductor to write than indices
            input = torch.ops.aten.slice.Tensor(input, dim, first, end, axis.stride)
            continue
        row = torch.arange(first, end, axis.stride, device=input.device)
        input = at(input, [row.clamp(0, axis.size - 1)], dim)
        is_there = _along((row >= 0) & (row < axis.size), number, len(axes))
        inside = is_there if inside is None else inside & is_there
    return input if inside is None else torch.where(inside, input, -math.inf)


def _first(axes: Sequence[PooledAxis], device: torch.device) -> Tensor:
    """The number of the first place of each window that is in the image."""
    if not any(axis.padding for axis in axes):
        return torch.zeros([], dtype=torch.int8, device=device)
    rows = [axis.padding - torch.arange(axis.outputs, device=device) * axis.stride for axis in axes]
    return _number(axes, [_along(row.clamp(min=0), i, len(axes)) for i, row in enumerate(rows)]).to(torch.int8)


def _window(axis: PooledAxis, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """The window that each input is in: its output, the input's place in it, and whether there is one; None where all
    have one."""
    shifted = torch.arange(axis.size, device=device) + axis.padding
    output = torch.div(shifted, axis.stride, rounding_mode="floor")
    place = shifted - output * axis.stride
    if axis.stride <= axis.kernel and axis.size - 1 + axis.padding < axis.outputs * axis.stride:
        return output, place, None
    return output.clamp(max=axis.outputs - 1), place, (output < axis.outputs) & (place < axis.kernel)


def _along(each: Tensor, axis: int, dims: int) -> Tensor:
    """A vector along one of the last ``dims`` axes."""
    return each.view(-1, *[1] * (dims - 1 - axis))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, axes, written_by):
        # The first of equal values is chosen, of several NaNs the last. In 16 bits Inductor may compute a value that is
        # read twice in float32 there and rounded here: none need equal the best.
        first, *others = itertools.product(*[range(axis.kernel) for axis in axes])
        best = _at_place(input, axes, first)
        chosen = _first(axes, input.device).expand(best.shape)
        for place in others:
            values = _at_place(input, axes, place)
            chosen = torch.where((values > best) | values.isnan(), _number(axes, place), chosen)
            best = torch.maximum(best, values)
        ctx.axes, ctx.written_by = axes, written_by
        # As the input lies: what is indexed is contiguous.
        format = suggest_memory_format(input)
        ctx.save_for_backward(chosen.contiguous(memory_format=format))
        return best.contiguous(memory_format=format)

    @staticmethod
    def backward(ctx, gradient):
        (chosen,), axes = ctx.saved_tensors, ctx.axes
        if _overlaps(axes):
            words = f"{ctx.written_by} | {[dataclasses.astuple(axis) for axis in axes]}"
            return torch.ops.normfuse.max_pool_backward.default(words, gradient, chosen), None, None
        outputs, places, inside = zip(*[_window(axis, gradient.device) for axis in axes], strict=True)
        number = _number(axes, [_along(each, i, len(axes)) for i, each in enumerate(places)])
        is_chosen = at(chosen, outputs) == number
        for i, each in enumerate(inside):
            is_chosen = is_chosen if each is None else is_chosen & _along(each, i, len(axes))
        result = torch.where(is_chosen, at(gradient, outputs), 0.0)
        return result.contiguous(memory_format=suggest_memory_format(chosen)), None, None


def _overlaps(axes: Sequence[PooledAxis]) -> bool:
    return any(axis.windows > 1 for axis in axes)


def _number(axes: Sequence[PooledAxis], places: Sequence[Any]) -> Any:
    """That of a place in a window, which has one along each axis."""
    number = 0
    for axis, place in zip(axes, places, strict=True):
        number = number * axis.kernel + place
    return number


def _max_pool(input, written_by, outputs, kernel, stride, padding, ceil_mode):
    """The operator ``normfuse::max_pool``."""
    check(written_by)
    if torch.is_grad_enabled() and input.requires_grad:
        rows = zip(input.shape[2:], outputs, kernel, stride, padding, strict=True)
        return _MaxPool.apply(input, [PooledAxis(*map(int, row)) for row in rows], written_by)
    return getattr(F, f"max_pool{input.ndim - 2}d")(input, kernel, stride, padding, ceil_mode=ceil_mode)


torch.library.define(
    "normfuse::max_pool",
    "(Tensor input, str written_by, int[] outputs, int[] kernel, int[] stride, int[] padding, bool ceil_mode)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("normfuse::max_pool", "CompositeImplicitAutograd", _max_pool)


_plans = plans.Kept()


def _read(words: str) -> list[PooledAxis]:
    written_by, _, rows = words.partition(" | ")
    check(written_by)
    return [PooledAxis(*row) for row in ast.literal_eval(rows)]


def backward_plan(words: str, gradient: Tensor, chosen: Tensor) -> Plan:
    """The plan that the operator ``max_pool_backward`` runs for these arguments."""
    key = words, *layouts_of([gradient, chosen])
    return _plans.get(key) or _plans.add(key, _make_backward(_read(words), gradient, chosen))


def _make_backward(axes: list[PooledAxis], gradient: Tensor, chosen: Tensor) -> Plan:
    first, second, third = [PooledAxis(1, 1, 1, 1, 0)] * (3 - len(axes)) + axes

    def write(stand_ins):
        result = _input_gradient(axes, *stand_ins)
        max_pool_backward(*map(as_volume, (*stand_ins, result)), (first, second, third))
        return [result]

    return plans.made([gradient, chosen], write)


def _input_gradient(axes: list[PooledAxis], gradient: Tensor, chosen: Tensor) -> Tensor:
    shape, format = (*gradient.shape[:2], *[axis.size for axis in axes]), suggest_memory_format(chosen)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=format)


define(
    "max_pool_backward",
    "(str words, Tensor gradient, Tensor chosen) -> Tensor",
    backward_plan,
    lambda words, gradient, chosen: [_input_gradient(_read(words), gradient, chosen)],
    "gradient",
    lambda words, *_: f"max_pool{len(_read(words))}d",
)


def rewrite(graph: Graph) -> None:
    """Let each max pooling whose gradient a gather computes faster have that. The others are PyTorch's: of open sizes,
    with dilation or indices, of images without a batch, with large windows, and with those that overlap where no kernel
    runs."""
    for node in list(graph.nodes):
        arguments = _arguments(node) if node.op == "call_function" and node.target in _FUNCTIONS else None
        if arguments:
            node.target, node.args, node.kwargs = torch.ops.normfuse.max_pool.default, arguments, {}


def _arguments(node: Node) -> tuple | None:
    names = "input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    input, dims = example(given["input"]), _FUNCTIONS[node.target]

    def sizes(name: str, default: Any) -> list[Any]:
        value = given.get(name) or default
        return list(value) * (dims if len(value) == 1 else 1) if isinstance(value, (tuple, list)) else [value] * dims

    kernel = sizes("kernel_size", None)
    stride, padding = sizes("stride", kernel), sizes("padding", 0)
    is_plain = not given.get("return_indices") and sizes("dilation", 1) == [1] * dims
    if not (is_plain and isinstance(input, Tensor) and input.is_floating_point() and input.ndim == dims + 2):
        return None
    outputs = list(example(node).shape[2:])
    if not all(type(each) is int for each in (*input.shape[2:], *outputs, *kernel, *stride, *padding)):
        return None
    overlap = any(map(operator.gt, kernel, stride))
    if max(map(math.prod, (kernel, stride))) > _MOST_PLACES or 0 in input.shape:
        return None
    windows = math.prod(map(blocks_of, kernel, stride))
    if math.prod(kernel) == 1 or overlap and not (windows <= _MOST_WINDOWS and precision.runs_kernels(input)):
        return None
    return given["input"], fingerprint([]), outputs, kernel, stride, padding, bool(given.get("ceil_mode"))
