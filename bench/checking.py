"""Whether a result is right: its error against float64, compared with the error of PyTorch's own result."""

import math
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from bench.cells import Cell, Problem, make_step
from bench.chain import Forward

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


@dataclass(frozen=True)
class Check:
    """Every tensor's comparison, the output first, and what they cover."""

    comparisons: list[Comparison]
    #: The share of the output's gradient that was let through.
    away_from_jumps: float | None
    #: All of the batch's samples are compared; this many went through float64 at a time.
    samples: int
    samples_at_once: int

    @property
    def worst(self) -> Comparison:
        return worst_of({each.tensor: (each.ours, each.torch) for each in self.comparisons})

    @property
    def is_red(self) -> bool:
        return self.worst.is_red


def worst_of(errors: Mapping[str, Any]) -> Comparison:
    """The tensor that uses most of its allowance, of errors by tensor, ours and PyTorch's."""
    comparisons = (Comparison(tensor, *pair) for tensor, pair in errors.items())
    return max(comparisons, key=lambda comparison: (comparison.is_red, comparison.allowance_used))


def check(cell: Cell, problem: Problem, ours: Forward, reference: Forward) -> Check:
    """Compare ``ours`` and ``reference`` at the cell's dtype with ``reference`` in float64.

    The gradient jumps at hardtanh's bounds and where another element becomes a row's minimum. Near a jump, rounding
    decides on which side an element lands, and one such flip outweighs every other error. So the gradient at the output
    is zero wherever it would reach an element near a jump. What is compared is the derivative away from the jumps.

    No chain mixes samples, so float64 takes some of them at a time. Their part of the output and of the input's
    gradient is compared at once. The gradients of the other tensors are sums over the samples, and added up first.
    """
    output_gradient, away = problem.output_gradient, None
    if cell.mode == "training":
        output_gradient, away = _stop_at_jumps(cell, problem)

    def results(forward, tensors, gradient):
        output, gradients = make_step(cell.mode, forward, tensors, gradient)()
        return {"output": output} | {f"d_{name}": gradient for name, gradient in zip(tensors, gradients, strict=False)}

    compared = [results(forward, problem.tensors, output_gradient) for forward in (ours, reference)]
    for name, right in compared[1].items():
        if compared[0][name].shape != right.shape:
            raise ValueError(f"{name} has shape {tuple(compared[0][name].shape)} where {tuple(right.shape)} is right")

    over_samples = {"output": cell.chain.sample_dimension, "d_input": 0}
    errors = {name: (_Error(), _Error()) for name in compared[1]}
    totals: dict[str, torch.Tensor] = {}
    samples_at_once = max(1, _ELEMENTS_AT_ONCE * cell.shape.batch // output_gradient.numel())
    for start in range(0, cell.shape.batch, samples_at_once):
        samples = slice(start, start + samples_at_once)
        tensors = {name: tensor.double() for name, tensor in problem.tensors.items() if name != "input"}
        tensors = {"input": problem.tensors["input"][samples].double()} | tensors
        with _cudnn_disabled():
            part = _along(over_samples["output"], samples, output_gradient).double()
            expected = results(reference, tensors, part)
        for name, exact in expected.items():
            if name in over_samples:
                for error, result in zip(errors[name], compared, strict=True):
                    error.add(_along(over_samples[name], samples, result[name]), exact)
            else:
                totals[name] = totals[name] + exact if name in totals else exact
    for name, exact in totals.items():
        for error, result in zip(errors[name], compared, strict=True):
            error.add(result[name], exact)
    comparisons = [Comparison(name, *(error.relative for error in errors[name])) for name in errors]
    return Check(comparisons, away, cell.shape.batch, min(samples_at_once, cell.shape.batch))


class _Error:
    """norm(result - exact) / norm(exact), added up over parts."""

    def __init__(self):
        self._difference = self._size = 0.0

    def add(self, result: torch.Tensor, exact: torch.Tensor) -> None:
        self._difference += (result.double() - exact).square().sum().item()
        self._size += exact.square().sum().item()

    @property
    def relative(self) -> float:
        """Absolute where the exact tensor is all zeros."""
        return math.sqrt(self._difference / self._size if self._size else self._difference)


def _along(dimension: int, samples: slice, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(dimension, 0)[samples].movedim(0, dimension)


@contextmanager
def _cudnn_disabled():
    """Convolutions then run in PyTorch's own code, as matrix products in float64, independent of what they judge."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _stop_at_jumps(cell: Cell, problem: Problem) -> tuple[torch.Tensor, float]:
    """The output's gradient with zeros where it would reach a jump, and the share of elements that is left."""
    if cell.chain.label not in _AWAY_FROM_JUMPS:
        return problem.output_gradient, 1.0
    exact = {name: tensor.double() for name, tensor in problem.tensors.items()}
    mask = _AWAY_FROM_JUMPS[cell.chain.label](cell, exact)
    return problem.output_gradient * mask, mask.double().mean().item()


def _groups_off_bounds(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whole groups, because the norm after the hardtanh spreads an element's gradient over its group."""
    values = F.linear(tensors["input"], tensors["weight"], tensors["linear_bias"]) + tensors["bias"]
    clear = _off_bounds(cell, values).unflatten(1, (cell.chain.num_groups(values.shape[1]), -1))
    return clear.all(dim=2, keepdim=True).expand_as(clear).flatten(1)


def _elements_off_bounds(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return _off_bounds(cell, _normalized(cell, tensors))


def _rows_with_clear_minimum(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows whose second smallest element is well above the smallest. Rows are dimension 2 of the output."""
    values = _normalized(cell, tensors)
    values = F.pad(values, (0, 1), value=torch.inf)  # a single channel has a clear minimum too
    smallest, second = values.topk(2, dim=1, largest=False).values.unbind(1)
    return (second - smallest > _margin(cell) * smallest.abs()).view(1, 1, -1, 1)


#: By chain, if it has jumps: a mask, broadcast to the output's gradient, of where it reaches no element near a jump.
_AWAY_FROM_JUMPS = {"L94": _groups_off_bounds, "L75": _rows_with_clear_minimum, "L30": _elements_off_bounds}


def _normalized(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    values = F.linear(tensors["input"], tensors["weight"], tensors["linear_bias"])
    return F.group_norm(values, cell.chain.num_groups(values.shape[1]), tensors["norm_weight"], tensors["norm_bias"])


def _off_bounds(cell: Cell, values: torch.Tensor) -> torch.Tensor:
    lower, upper = (cell.chain.scalars[name] for name in ("min_val", "max_val"))
    margin = _margin(cell)
    return ((values - lower).abs() > margin * abs(lower)) & ((values - upper).abs() > margin * abs(upper))


def _margin(cell: Cell) -> float:
    return _MARGINS[cell.dtype, cell.precision]
