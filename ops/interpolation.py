"""``F.interpolate`` in compiled graphs with a backward pass that gathers.

PyTorch's adds each output's gradient to the inputs that it was made of, with atomics. Here each input adds up the
outputs that it is part of: a window of a fixed size along each axis. It is plain aten, which Inductor puts into one
kernel with what is around it. The forward pass is PyTorch's, which gathers already.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, Node

from ops.fingerprint import check, fingerprint
from ops.graph_nodes import example

Tensor = torch.Tensor
_aten = torch.ops.aten
#: How many inputs an output is made of along an axis, by mode.
_TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}
#: An input's gradient has at most so many terms, or it is made along one axis after another.
_MOST_TERMS = 16
#: Wider windows are PyTorch's: with a scale of more than 8 (nearest), 4 (linear) or 2 (cubic). Where sizes shrink,
#: windows are narrow.
_WIDEST_WINDOW = 8
_CUBIC = -0.75  # the kernel's parameter in PyTorch


@dataclass(frozen=True)
class _Axis:
    """How PyTorch interpolates along one axis: output ``o`` is made of the inputs beside ``(o + offset) * step``."""

    mode: str
    size: int
    outputs: int
    align_corners: bool
    scale: float | None

    @property
    def step(self) -> float:
        if self.align_corners:
            return (self.size - 1) / (self.outputs - 1) if self.outputs > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.outputs

    @property
    def taps(self) -> int:
        return _TAPS[self.mode]

    def source(self, output: Any) -> Any:
        """Where outputs lie among the inputs, for floating-point tensors and arrays."""
        if self.taps == 1:
            return (output + (0.5 if self.mode == "nearest-exact" else 0.0)) * self.step
        place = output * self.step if self.align_corners else (output + 0.5) * self.step - 0.5
        return place if self.taps == 4 else place.clip(0)

    @functools.cached_property
    def window(self) -> tuple[int, int, int, int]:
        """(rise, run, shift, width): the outputs with a part of input ``i`` are among ``(i * rise + shift) // run`` and
        the ``width - 1`` behind it."""
        dtype = numpy.float32 if self.taps == 1 else numpy.float64
        inputs, places = numpy.arange(self.size), self.source(numpy.arange(self.outputs, dtype=dtype))
        # At a whole number float32 may round to either side, but for the ends, beyond which the weight is 0.
        slack = 0 if self.taps == 1 else 1e-4
        before, behind = numpy.floor(places - slack), numpy.floor(places + slack)
        if self.taps == 2:
            behind[places <= 0] = -1
            before[places >= self.size - 1 - 1e-9] = self.size - 1
        reach = self.taps // 2  # an output's inputs are at floor(place) + 1 - reach, ..., floor(place) + reach
        firsts = numpy.searchsorted(behind, inputs - reach)
        lasts = numpy.searchsorted(before, inputs + max(reach - 1, 0), side="right") - 1
        lasts[-1] = self.outputs - 1  # what lies beyond an end is the input there
        if self.taps > 1:
            firsts[0] = 0
        common = math.gcd(self.outputs, self.size)
        rise, run = self.outputs // common, self.size // common
        shift = int((firsts * run + run - 1 - inputs * rise).min())
        width = int((lasts - (inputs * rise + shift) // run).max()) + 1
        return rise, run, shift, max(width, 1)

    def parts(self, output: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
        """The inputs that outputs are made of, with their weights; None for 1."""
        last = self.size - 1
        if self.taps == 1:  # in float32, whatever is interpolated
            return [(self.source(output.to(torch.float32)).to(torch.int64).clamp(max=last), None)]
        place = self.source(output.to(dtype))
        first = place.floor()
        t, first = place - first, first.to(torch.int64)
        weights = [_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]
        return [((first - 1 + i).clamp(0, last), weight) for i, weight in enumerate(weights)]

    def terms(self, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """For each place of the windows: which output is there for each input, whether that has a part of it, and how
        large a part; None for all."""
        rise, run, shift, width = self.window
        input = torch.arange(self.size, device=device)
        first = torch.div(input * rise + shift, run, rounding_mode="floor")
        found = []
        for i in range(width):
            output = first + i
            inside = (output >= 0) & (output < self.outputs)
            output = torch.where(inside, output, 0)
            if self.taps == 2:  # a few operations instead of many: Inductor handles each again for each term
                distance = (self.source(output.to(dtype)).clip(max=self.size - 1) - input).abs()
                found.append((output, inside & (distance < 1), 1 - distance))
                continue
            parts = [(inside & (part == input), weight) for part, weight in self.parts(output, dtype)]
            is_part = functools.reduce(torch.logical_or, [each for each, _ in parts])
            weights = [torch.where(each, weight, 0.0) for each, weight in parts if weight is not None]
            found.append((output, is_part, functools.reduce(torch.add, weights) if weights else None))
        return found


def _gather(gradient: Tensor, axes: Sequence[_Axis], dim: int) -> Tensor:
    """The gradient of the inputs along these axes, of which ``dim`` is the first, from that of the outputs."""
    terms = [axis.terms(gradient.dtype, gradient.device) for axis in axes]

    def total(*places: Tensor) -> Tensor:
        """The sum over the windows of the axes that have no place yet."""
        if len(places) == len(axes):
            return at(gradient, places, dim)
        behind = [1] * (gradient.ndim - dim - len(places) - 1)
        found: Any = 0.0
        for output, is_part, weight in terms[len(places)]:
            values = total(*places, output)
            values = values if weight is None else values * weight.view(-1, *behind)
            found = found + torch.where(is_part.view(-1, *behind), values, 0.0)
        return found

    return total()


def at(image: Tensor, places: Sequence[Tensor], dim: int = 2) -> Tensor:
    """The image at these places along its axes from ``dim`` on, one row of indices an axis, without a check of them."""
    rows = [each.view(-1, *[1] * behind) for behind, each in enumerate(reversed(places))][::-1]
    values: Tensor = _aten._unsafe_index.Tensor(image, [None] * dim + rows)
    return values


def _near(t: Tensor) -> Tensor:
    """The cubic kernel within a distance of 1."""
    return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1


def _far(t: Tensor) -> Tensor:
    """The cubic kernel at a distance of 1 to 2."""
    return ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC


def _terms(axes: Sequence[_Axis]) -> int:
    return math.prod([axis.window[-1] for axis in axes])


class _Interpolate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, axes, options):
        ctx.axes, ctx.dtype = axes, input.dtype
        return F.interpolate(input, **options)

    @staticmethod
    def backward(ctx, gradient):
        result = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        axes = ctx.axes
        while axes:
            last = len(axes) - 1
            first = next((i for i in range(last) if _terms(axes[i:]) <= _MOST_TERMS), last)
            result, axes = _gather(result, axes[first:], 2 + first), axes[:first]
        format = suggest_memory_format(gradient)
        return result.to(ctx.dtype).contiguous(memory_format=format), None, None


def _interpolate(input, text, size, scale_factor, align_corners, recompute_scale_factor):
    """The operator ``normfuse::interpolate``. Its text is the mode and a fingerprint."""
    mode, written_by = text.split(" | ")
    check(written_by)
    options = {
        "size": size,
        "scale_factor": scale_factor,
        "mode": mode,
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
    }
    if not (torch.is_grad_enabled() and input.requires_grad):
        return F.interpolate(input, **options)
    return _Interpolate.apply(input, _axes(input.shape[2:], options), options)


torch.library.define(
    "normfuse::interpolate",
    "(Tensor input, str mode, int[]? size, float[]? scale_factor, bool? align_corners, bool? recompute_scale_factor)"
    " -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("normfuse::interpolate", "CompositeImplicitAutograd", _interpolate)


def _axes(sizes, options) -> list[_Axis]:
    scales = options["scale_factor"] or [None] * len(sizes)
    outputs = options["size"] or [math.floor(size * scale) for size, scale in zip(sizes, scales, strict=True)]
    if options["recompute_scale_factor"]:
        scales = [None] * len(sizes)
    return [
        _Axis(options["mode"], int(size), int(output), bool(options["align_corners"]), scale)
        for size, output, scale in zip(sizes, outputs, scales, strict=True)
    ]


def rewrite(graph: Graph) -> None:
    """Let each ``F.interpolate`` whose gradient a gather computes faster have that. The others are PyTorch's: of open
    sizes, with antialiasing, by area (which gathers in PyTorch), and wide windows."""
    for node in graph.find_nodes(op="call_function", target=F.interpolate):
        arguments = _arguments(node)
        if arguments:
            node.target, node.args, node.kwargs = torch.ops.normfuse.interpolate.default, arguments, {}


def _arguments(node: Node) -> tuple | None:
    names = "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    input, mode = example(given["input"]), given.get("mode", "nearest")
    if mode not in _TAPS or given.get("antialias") or not (isinstance(input, Tensor) and input.is_floating_point()):
        return None
    sizes, outputs = input.shape[2:], example(node).shape[2:]
    if not all(type(size) is int and size > 0 for size in (*sizes, *outputs)):
        return None
    size, scale = given.get("size"), example(given.get("scale_factor"))
    scales = None if scale is None else list(scale) if isinstance(scale, (tuple, list)) else [scale] * len(sizes)
    if scales and not all(type(each) in (int, float) for each in scales):
        return None
    options = {
        "size": None if size is None else list(outputs),
        "scale_factor": None if scales is None else list(map(float, scales)),
        "align_corners": given.get("align_corners"),
        "recompute_scale_factor": given.get("recompute_scale_factor"),
    }
    axes = _axes(sizes, {**options, "mode": mode})
    if any(axis.outputs != output for axis, output in zip(axes, outputs, strict=True)):
        return None
    if any(axis.window[-1] > _WIDEST_WINDOW for axis in axes):
        return None
    return given["input"], f"{mode} | {fingerprint([])}", *options.values()
