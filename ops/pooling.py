"""Max pooling in compiled graphs with a backward pass that gathers.

PyTorch's keeps an index of 64 bits for each output, and in 3-D its gradient is added with atomics. Here an output keeps
the place in its window, in 8 bits, and each input reads the one window that it is in. It is plain aten, which Inductor
puts into kernels with what is around it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, Node

from ops.fingerprint import check, fingerprint
from ops.graph_nodes import example
from ops.interpolation import at

Tensor = torch.Tensor
_FUNCTIONS: dict[Any, int] = {
    function: dims
    for dims, name in enumerate(("max_pool1d", "max_pool2d", "max_pool3d"), 1)
    for function in (getattr(F, name), getattr(torch, name))
}
#: Larger windows are PyTorch's.
_MOST_PLACES = 16


@dataclass(frozen=True)
class _Axis:
    """One axis, whose window of an output begins at input ``output * stride - padding``."""

    size: int
    outputs: int
    kernel: int
    stride: int
    padding: int

    def inputs(self, place: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The inputs at a place of the windows, and which there are; None for all."""
        input = torch.arange(self.outputs, device=device) * self.stride + (place - self.padding)
        if place >= self.padding and (self.outputs - 1) * self.stride + place - self.padding < self.size:
            return input, None
        return input.clamp(0, self.size - 1), (input >= 0) & (input < self.size)

    def windows(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The window that each input is in: its output, the input's place in it, and whether there is one."""
        shifted = torch.arange(self.size, device=device) + self.padding
        output = torch.div(shifted, self.stride, rounding_mode="floor")
        place = shifted - output * self.stride
        return output.clamp(max=self.outputs - 1), place, (output < self.outputs) & (place < self.kernel)


def _along(each: Tensor, axis: int, dims: int) -> Tensor:
    """A vector along one of the last ``dims`` axes."""
    return each.view(-1, *[1] * (dims - 1 - axis))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, axes):
        best = chosen = None
        # The first of equal values is chosen, of several NaNs the last: from the last place on, all that is not less.
        for place in reversed(list(itertools.product(*[range(axis.kernel) for axis in axes]))):
            found = [axis.inputs(each, input.device) for axis, each in zip(axes, place, strict=True)]
            values = at(input, [each for each, _ in found])
            if best is None:
                best, chosen = torch.full_like(values, -math.inf), torch.zeros_like(values, dtype=torch.int8)
            takes = ~((values < best) | best.isnan())
            for number, (_, inside) in enumerate(found):
                takes = takes if inside is None else takes & _along(inside, number, len(axes))
            best, chosen = torch.where(takes, values, best), torch.where(takes, _number(axes, place), chosen)
        ctx.axes = axes
        ctx.save_for_backward(chosen.to(torch.int8))
        return best.contiguous(memory_format=suggest_memory_format(input))

    @staticmethod
    def backward(ctx, gradient):
        (chosen,), axes = ctx.saved_tensors, ctx.axes
        outputs, *others = zip(*[axis.windows(gradient.device) for axis in axes], strict=True)
        places, inside = ([_along(each, i, len(axes)) for i, each in enumerate(row)] for row in others)
        is_chosen = functools.reduce(torch.logical_and, inside, at(chosen, outputs) == _number(axes, places))
        result = torch.where(is_chosen, at(gradient, outputs), 0.0)
        return result.contiguous(memory_format=suggest_memory_format(gradient)), None


def _number(axes: Sequence[_Axis], places: Sequence[Any]) -> Any:
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
        return _MaxPool.apply(input, [_Axis(*map(int, row)) for row in rows])
    return getattr(F, f"max_pool{input.ndim - 2}d")(input, kernel, stride, padding, ceil_mode=ceil_mode)


torch.library.define(
    "normfuse::max_pool",
    "(Tensor input, str written_by, int[] outputs, int[] kernel, int[] stride, int[] padding, bool ceil_mode)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("normfuse::max_pool", "CompositeImplicitAutograd", _max_pool)


def rewrite(graph: Graph) -> None:
    """Let each max pooling whose gradient a gather computes faster have that. The others are PyTorch's: of open sizes,
    with dilation or indices, of images without a batch, with large windows, and with those that overlap (Inductor would
    compute all that their gradients are made of once for each)."""
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
    overlap = any(size > step for size, step in zip(kernel, stride, strict=True))
    if overlap or math.prod(kernel) > _MOST_PLACES or 0 in input.shape:
        return None
    return given["input"], fingerprint([]), outputs, kernel, stride, padding, bool(given.get("ceil_mode"))
