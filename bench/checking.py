"""Whether a result is right: its error against float64, compared with the error of PyTorch's own result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from bench.cells import Cell, Problem, make_step
from bench.chains import NORMS, ROW_MINIMUM, Part
from bench.compositions import OF_SAMPLES, Forward, attribute, jumps, plain_of, plain_product
from bench.schema import Errors, TimesRow

#: Our error may be this many times PyTorch's ...
ALLOWANCE = 1.1
#: ... plus one unit in float32's last place. A result that is exact to float32 is right whatever PyTorch's error is.
FLOOR = torch.finfo(torch.float32).eps

#: Float64 takes as many samples at a time as give the output about this many elements, of 8 bytes each.
_ELEMENTS_AT_ONCE = 2**25

#: How near a jump an element may come, relative to the value there, before rounding decides on which side it lands. Two
#: units in the last place of the intermediate values (of bfloat16 and TF32 products: of their operands). For float32
#: products 128 units, over five standard deviations of a sum of 8192 products, whose relative error is 1.6e-6.
_MARGINS = {
    ("bfloat16", None): 2 * torch.finfo(torch.bfloat16).eps,
    ("float16", None): 2 * torch.finfo(torch.float16).eps,
    ("float32", "highest"): 128 * torch.finfo(torch.float32).eps,
    ("float32", "high"): 2 * torch.finfo(torch.float16).eps,  # TF32 has float16's mantissa
    ("float32", "medium"): 2 * torch.finfo(torch.bfloat16).eps,
}


def allowed(torch_error, size):
    """The largest error that a tensor of this norm may have where PyTorch's has ``torch_error``."""
    return ALLOWANCE * torch_error + FLOOR * size


@dataclass(frozen=True)
class Comparison:
    """One tensor's error ``norm(result - float64) / norm(float64)``, ours and PyTorch's."""

    tensor: str
    ours: float
    torch: float

    @property
    def allowance_used(self) -> float:
        """Our error over the largest allowed one; above 1, or NaN, is red."""
        return self.ours / allowed(self.torch, 1.0)

    @property
    def is_red(self) -> bool:
        return not self.allowance_used <= 1


def worst_of(errors: Mapping[str, Any]) -> Comparison:
    """The tensor that uses most of its allowance, of errors by tensor, ours and PyTorch's."""
    comparisons = (Comparison(tensor, *pair) for tensor, pair in errors.items())
    return max(comparisons, key=lambda comparison: (comparison.is_red, comparison.allowance_used))


def check(cell: Cell, problem: Problem, ours: Forward, reference: Forward) -> TimesRow:
    """Compare ``ours`` and ``reference`` at the cell's dtype with ``reference`` in float64: a row without times.

    The gradient jumps where that of a step does (at hardtanh's bounds), and where another element becomes a row's
    minimum. Near a jump, rounding
    decides on which side an element lands, and one such flip outweighs every other error. So the gradient at the output
    is zero wherever it would reach an element near a jump. What is compared is the derivative away from the jumps.

    No chain mixes samples, so float64 takes some of them at a time. Their part of the output and of the input's
    gradient is compared at once. The gradients of the other tensors are sums over the samples, and added up first.
    """
    batch, output_gradient, away = cell.sizes[0], problem.output_gradient, None
    if cell.mode == "training":
        output_gradient, away = _stop_at_jumps(cell, problem)

    def results(forward, tensors, gradient):
        output, gradients = make_step(cell.mode, forward, tensors, gradient)()
        named = {f"d_{name}": gradient for name, gradient in zip(tensors, gradients, strict=False)}
        return {"output": output.detach()} | named

    compared = [results(forward, problem.tensors, output_gradient) for forward in (ours, reference)]
    for name, right in compared[1].items():
        if compared[0][name].shape != right.shape:
            raise ValueError(f"{name} has shape {tuple(compared[0][name].shape)} where {tuple(right.shape)} is right")

    over_samples = {"output": cell.chain.sample_dimension, **{f"d_{name}": 0 for name in OF_SAMPLES}}
    squares = {name: [[0.0, 0.0], [0.0, 0.0]] for name in compared[1]}  # of difference and size, ours and PyTorch's

    def add(name: str, exact: torch.Tensor, samples: slice = slice(None)) -> None:
        for sums, result in zip(squares[name], compared, strict=True):
            part = _along(over_samples.get(name, 0), samples, result[name])
            sums[0] += (part.double() - exact).square().sum().item()
            sums[1] += exact.square().sum().item()

    totals: dict[str, torch.Tensor] = {}
    samples_at_once = max(1, _ELEMENTS_AT_ONCE * batch // output_gradient.numel())
    for start in range(0, batch, samples_at_once):
        samples = slice(start, start + samples_at_once)
        tensors = {
            name: (tensor[samples] if name in OF_SAMPLES else tensor).double()
            for name, tensor in problem.tensors.items()
        }
        # Convolutions then run in PyTorch's own code, as matrix products in float64, independent of what they judge.
        with attribute(torch.backends.cudnn, "enabled", False):
            part = _along(over_samples["output"], samples, output_gradient).double()
            expected = results(reference, tensors, part)
        for name, exact in expected.items():
            if name in over_samples:
                add(name, exact, samples)
            else:
                totals[name] = totals[name] + exact if name in totals else exact
    for name, exact in totals.items():
        add(name, exact)
    errors: Errors = {name: (_relative(*sums[0]), _relative(*sums[1])) for name, sums in squares.items()}
    return TimesRow(**cell.identity, errors=errors, away_from_jumps=away, red=worst_of(errors).is_red)


def _relative(difference: float, size: float) -> float:
    """norm(result - exact) / norm(exact), of their squares. It is absolute where the exact tensor is all zeros."""
    return math.sqrt(difference / size if size else difference)


def _along(dimension: int, samples: slice, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(dimension, 0)[samples].movedim(0, dimension)


def _stop_at_jumps(cell: Cell, problem: Problem) -> tuple[torch.Tensor, float]:
    """The output's gradient with zeros where it would reach a jump, and the share of elements that is left."""
    if not any(part.name == ROW_MINIMUM or _jumps(part) for part in cell.chain.parts):
        return problem.output_gradient, 1.0
    mask = _away_from_jumps(cell, {name: tensor.double() for name, tensor in problem.tensors.items()})
    return problem.output_gradient * mask, mask.double().mean().item()


def _jumps(part: Part) -> tuple[float, ...]:
    return () if part.name in (*NORMS, ROW_MINIMUM) else jumps(part)


def _away_from_jumps(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A mask, broadcast to the output's gradient, of where that reaches no element near a jump.

    Near is relative to the jump's place, and for one at 0 to the values' size.
    """
    margin = _MARGINS[cell.dtype, cell.precision]
    values = plain_product(cell.chain)(tensors)
    clear = torch.ones_like(values, dtype=torch.bool)
    for part in cell.chain.parts:
        if part.name == ROW_MINIMUM:  # rows, dimension 2 of the output, whose second smallest element is well above
            values = F.pad(values, (0, 1), value=torch.inf)  # a single channel has a clear minimum too
            smallest, second = values.topk(2, dim=1, largest=False).values.unbind(1)
            return (second - smallest > margin * smallest.abs()).view(1, 1, -1, 1)
        if part.name in NORMS:  # whole groups, because the norm spreads an element's gradient over its group
            groups = clear.reshape(len(clear), cell.num_groups, -1)
            clear = groups.all(dim=2, keepdim=True).expand_as(groups).reshape(clear.shape)
        for place in _jumps(part):
            size = abs(place) or values.square().mean().sqrt()
            clear = clear & ((values - place).abs() > margin * size)
        values = plain_of(part, cell.num_groups)(values, tensors)
    return clear
