"""``F.interpolate`` in compiled graphs with a backward pass that gathers.

PyTorch's adds each output's gradient to the inputs that it was made of, with atomics. Here each input adds up the
outputs that it is part of: a window of a fixed size along each axis. It is plain aten, which Inductor puts into one
kernel with what is around it. The forward pass is PyTorch's, which gathers already.
"""

import functools
import math
import operator
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
#: With a scale that is a whole number all inputs have the same parts but so many, at the ends, apart from rounding.
_MOST_OTHERS, _SLACK = 2, 1e-9


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

    def parts(self, output: Any) -> list[tuple[Any, Any]]:
        """The inputs that outputs are made of, with their weights, for floating-point tensors and arrays."""
        place, last = self.source(output), self.size - 1
        first = place // 1
        if self.taps == 1:
            return [(first.clip(0, last), 1.0)]
        t = place - first
        weights = [1 - t, t] if self.taps == 2 else [_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]
        return [((first + i + 1 - self.taps // 2).clip(0, last), weight) for i, weight in enumerate(weights)]

    def weight(self, output: Any, input: Any) -> Any:
        """How large a part outputs have of inputs, which are whole numbers."""
        return functools.reduce(operator.add, [weight * (part == input) for part, weight in self.parts(output)])

    @functools.cached_property
    def regular(self) -> list[tuple[float, dict[int, float]]] | None:
        """For each place of the windows: how large a part the output there has of each input, and of which few inputs
        another. None where that differs more, as with a scale that is no whole number."""
        rise, run, shift, width = self.window
        if run != 1:
            return None
        inputs, found = numpy.arange(self.size), []
        for place in range(width):
            outputs = inputs * rise + shift + place
            inside = (outputs >= 0) & (outputs < self.outputs)
            weights = self.weight(outputs.astype(numpy.float32 if self.taps == 1 else numpy.float64), inputs) * inside
            most = float(numpy.median(weights))
            others = numpy.flatnonzero(abs(weights - most) > _SLACK)
            if most == 0 or len(others) > _MOST_OTHERS:
                return None
            found.append((most, {int(each): float(weights[each]) for each in others}))
        return found

    def terms(self, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Any, Tensor | None]]:
        """For each place of the windows: which output is there for each input, how large a part it has of that, and
        whether it has one; None for all."""
        rise, run, shift, width = self.window
        input = torch.arange(self.size, device=device)
        if self.regular is not None:
            found = []
            for place, (most, others) in enumerate(self.regular):
                first, end = shift + place, (self.size - 1) * rise + shift + place + 1
                output = torch.arange(first, end, rise, device=device)
                output = output.clamp(min=0) if first < 0 else output
                output = output.clamp(max=self.outputs - 1) if end > self.outputs else output
                found.append((output, *_weights(input, most, others, dtype)))
            return found
        first, found = torch.div(input * rise + shift, run, rounding_mode="floor"), []
        for place in range(width):
            output = first + place
            inside = (output >= 0) & (output < self.outputs)
            output = torch.where(inside, output, 0)
            number = output.to(torch.float32 if self.taps == 1 else dtype)
            if self.taps == 2:  # a few operations instead of many: Inductor handles each again for each term
                distance = (self.source(number).clip(max=self.size - 1) - input).abs()
                found.append((output, 1 - distance, inside & (distance < 1)))
            else:
                weight = self.weight(number, input)
                found.append((output, weight, inside & (weight != 0)))
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
        for output, weight, is_part in terms[len(places)]:
            values = total(*places, output)
            if isinstance(weight, Tensor):
                values = values * weight.view(-1, *behind)
            elif weight != 1:
                values = values * weight
            found = found + (values if is_part is None else torch.where(is_part.view(-1, *behind), values, 0.0))
        return found

    return total()


def _weights(input: Tensor, most: float, others: dict[int, float], dtype: torch.dtype) -> tuple[Any, Tensor | None]:
    """How large a part each input has, and whether it has one; None for all."""
    weight, is_part = most, None
    for each, other in others.items():
        if other == 0:  # what is there may be infinite
            is_part = input != each if is_part is None else is_part & (input != each)
            continue
        if not isinstance(weight, Tensor):
            weight = torch.full([1], weight, dtype=dtype, device=input.device)
        weight = torch.where(input == each, other, weight)
    return weight, is_part


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
        axes, wide = ctx.axes, torch.promote_types(gradient.dtype, torch.float32)
        # As the image lies: what is indexed is contiguous.
        format = suggest_memory_format(gradient)
        is_last = format != torch.contiguous_format
        result = (gradient.movedim(1, -1) if is_last else gradient).to(wide)
        while axes:
            last = len(axes) - 1
            first = next((i for i in range(last) if _terms(axes[i:]) <= _MOST_TERMS), last)
            result, axes = _gather(result, axes[first:], 2 - is_last + first), axes[:first]
        result = (result.movedim(-1, 1) if is_last else result).to(ctx.dtype)
        return result.contiguous(memory_format=format), None, None


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
        if found := _bound(node):
            input, options, _ = found
            text = f"{options.pop('mode')} | {fingerprint([])}"
            node.target, node.kwargs = torch.ops.normfuse.interpolate.default, {}
            node.args = input, text, *options.values()


def doubled(node: Any) -> Node | None:
    """The image whose pixels an interpolation repeats twice along each axis; None for another node, or one whose
    gradient is left to PyTorch."""
    is_one = isinstance(node, Node) and node.op == "call_function" and node.target is F.interpolate
    if not is_one or not (found := _bound(node)):
        return None
    input, _, axes = found
    return input if all(map(_doubles, axes)) else None


def _doubles(axis: _Axis) -> bool:
    places = numpy.arange(axis.outputs, dtype=numpy.float32)
    (inputs, _), *others = axis.parts(places)
    return not others and axis.outputs == 2 * axis.size and bool((inputs == places // 2).all())


def _bound(node: Node) -> tuple[Node, dict[str, Any], list[_Axis]] | None:
    """Its image, options and axes, where a gather computes the gradient faster."""
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
        "mode": mode,
        "size": None if size is None else list(outputs),
        "scale_factor": None if scales is None else list(map(float, scales)),
        "align_corners": given.get("align_corners"),
        "recompute_scale_factor": given.get("recompute_scale_factor"),
    }
    axes = _axes(sizes, options)
    if any(axis.outputs != output for axis, output in zip(axes, outputs, strict=True)):
        return None
    if any(axis.window[-1] > _WIDEST_WINDOW for axis in axes):
        return None
    return given["input"], options, axes
