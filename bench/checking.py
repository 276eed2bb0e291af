"""Is a result right: its error against float64, held against the error of PyTorch's own result."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bench.cells import Cell, Forward, Problem, make_step

#: Ours may be this many times as wrong as PyTorch ...
ALLOWANCE = 1.1
#: ... plus one unit in float32's last place: a result that is right to float32 is right whatever PyTorch's error is.
FLOOR = torch.finfo(torch.float32).eps

#: How near a jump an element may come, relative to the value there, before rounding decides on which side it lands:
#: two units in the last place of the values on the way (bfloat16 and TF32 products: of their operands). For float32
#: products 128 units, over five standard deviations of a sum of 8192 products (relative error 1.6e-6).
_MARGINS = {
    ("bfloat16", None): 2 * torch.finfo(torch.bfloat16).eps,
    ("float16", None): 2 * torch.finfo(torch.float16).eps,
    ("float32", "highest"): 128 * torch.finfo(torch.float32).eps,
    ("float32", "high"): 2 * torch.finfo(torch.float16).eps,  # TF32 has float16's mantissa
    ("float32", "medium"): 2 * torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True)
class Comparison:
    """One tensor's error ``norm(result - float64) / norm(float64)``, ours and PyTorch's."""

    tensor: str
    ours: float
    torch: float

    @property
    def allowance_used(self) -> float:
        """Our error over the largest allowed one; above 1, or NaN, is red."""
        return self.ours / (ALLOWANCE * self.torch + FLOOR)

    @property
    def is_red(self) -> bool:
        return not self.allowance_used <= 1


@dataclass(frozen=True)
class Check:
    """Every tensor's comparison, the output first, and the share of the output's gradient that was let through."""

    comparisons: list[Comparison]
    away_from_jumps: float | None

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda comparison: (comparison.is_red, comparison.allowance_used))

    @property
    def is_red(self) -> bool:
        return self.worst.is_red


def check(cell: Cell, problem: Problem, ours: Forward, reference: Forward) -> Check:
    """Compare ``ours`` and ``reference`` at the cell's dtype with ``reference`` in float64.

    A jump (hardtanh's bounds, which index is a row's minimum) can be taken either way where rounding decides it, and
    one such flip outweighs every other error. So the gradient at the output is zero where one would count: what is
    compared is the derivative away from the jumps, in full.
    """
    exact = {name: tensor.double() for name, tensor in problem.tensors.items()}
    output_gradient, away = problem.output_gradient, None
    if cell.mode == "training":
        mask = _AWAY_FROM_JUMPS[cell.chain.label](cell, exact)
        output_gradient, away = output_gradient * mask, mask.double().mean().item()

    def results(forward, tensors):
        output, gradients = make_step(cell.mode, forward, tensors, output_gradient.to(tensors["input"].dtype))()
        return {"output": output} | {f"d_{name}": gradient for name, gradient in zip(tensors, gradients, strict=False)}

    expected = results(reference, exact)
    our_errors = _errors(results(ours, problem.tensors), expected)
    torch_errors = _errors(results(reference, problem.tensors), expected)
    return Check([Comparison(name, our_errors[name], torch_errors[name]) for name in expected], away)


def _errors(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors; absolute where the expected tensor is all zeros."""
    errors = {}
    for name, tensor in expected.items():
        if results[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(results[name].shape)} where {tuple(tensor.shape)} is right")
        error, norm = (results[name].double() - tensor).norm().item(), tensor.norm().item()
        errors[name] = error / norm if norm else error
    return errors


def _groups_off_bounds(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The norm after the hardtanh spreads an element's gradient over its group: the whole group must be clear."""
    values = F.linear(tensors["input"], tensors["weight"], tensors["linear_bias"]) + tensors["bias"]
    clear = _off_bounds(cell, values).unflatten(1, (cell.chain.num_groups(values.shape[1]), -1))
    return clear.all(dim=2, keepdim=True).expand_as(clear).flatten(1)


def _elements_off_bounds(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return _off_bounds(cell, _normalized(cell, tensors))


def _rows_with_clear_minimum(cell: Cell, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows whose second smallest element is well above the smallest, along dim 2 of the output."""
    values = _normalized(cell, tensors)
    values = F.pad(values, (0, 1), value=torch.inf)  # a single channel has a clear minimum too
    smallest, second = values.topk(2, dim=1, largest=False).values.unbind(1)
    return (second - smallest > _margin(cell) * smallest.abs()).view(1, 1, -1, 1)


#: By chain: where the output's gradient reaches no jump that rounding could decide; broadcasts to the output.
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
