"""Chains with the same contraction and norm. Each combination of steps has one, which its first call makes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ops import checks, plans
from ops.chain import Chain
from ops.chain_in_graph import by_text
from ops.pointwise import Earlier, Step, kind_of
from triton_kernels.chain import has_rows
from triton_kernels.pointwise import Pointwise, by_identity

Tensor = torch.Tensor


@dataclass(frozen=True)
class Family:
    """The chains with one contraction and one norm.

    Args:
        contraction: As a chain's.
        norm: As a chain's.
        names: What error messages call the contraction's bias and the norm's weight and bias, as far as there are any.
    """

    contraction: str
    norm: str
    names: tuple[str, ...]
    #: By the identities of the pointwise functions. A chain holds its own, so none of these is another's meanwhile.
    _chains: plans.Kept = field(default_factory=plans.Kept, compare=False, repr=False)

    def apply(
        self,
        row: tuple,
        of_norm: tuple,
        before: Sequence[Step],
        after: Sequence[Step],
        num_groups: int = 1,
        eps: float = 0.0,
        geometry: tuple = (),
    ) -> Tensor:
        """Apply the chain that has the steps' functions. ``row`` and ``of_norm`` are as for ``bind``."""
        chain, whole, numbers = self.bind(row, of_norm, before, after)
        return chain.apply(whole, numbers, num_groups, eps, geometry)

    def bind(
        self, row: tuple, of_norm: tuple, before: Sequence[Step], after: Sequence[Step]
    ) -> tuple[Chain, tuple, tuple]:
        """The chain with these steps' functions, its tensors in a row, and the numbers of its steps.

        ``row`` has the input, the weight, and the contraction's bias, where there is one; ``of_norm`` the norm's weight
        and bias.
        """
        tensors: list[Any] = [*row]
        numbers: list[tuple] = []
        identities: list[int | str] = []
        rows, dimensions = has_rows(self.contraction, self.norm), getattr(row[0], "ndim", 0)
        try:
            for steps, vectors in (before, of_norm), (after, (None,)):
                for function, operand in steps:
                    identities.append(id(function))
                    if type(operand) is Earlier:
                        identities.append(operand.kind)
                    elif type(operand) is tuple:
                        numbers.append(operand)
                    elif operand is not None:
                        tensors.append(operand)
                        if function.operand == "tensor":
                            identities.append(kind_of(operand.shape, dimensions, rows))
                identities.append(0)
                tensors += vectors
            if torch.compiler.is_compiling():
                chain = by_text[_text(self.contraction, self.norm, *identities)]
            else:
                chain = self._chain(tuple(identities))
        except (KeyError, TypeError, ValueError):
            require_steps(before=before, after=after)
            raise
        return chain, tuple(tensors), tuple(numbers)

    def _chain(self, identities: tuple[int | str, ...]) -> Chain:
        """The chain of functions by their identities: those before the norm, 0, those after it, 0.

        Behind that of a function that takes different kinds of operands stands the kind.
        """
        return self._chains.get(identities) or self._make(identities)

    def _make(self, identities: tuple[int | str, ...]) -> Chain:
        parts: tuple[list[Pointwise], list[Pointwise]] = [], []
        steps, *others = parts
        for each in identities[:-1]:
            if each == 0:
                (steps,) = others
            elif isinstance(each, str):
                steps[-1] = steps[-1].with_operand(each)
            else:
                steps.append(by_identity[each])
        before, after = map(tuple, parts)
        of_steps = [
            [f"{name}[{place}].operand" for place, each in enumerate(steps) if each.is_called_with_operand]
            for name, steps in (("before", before), ("after", after))
        ]
        biases = 1 if self.contraction else 0
        names = *self.names[:biases], *of_steps[0], *self.names[biases:], *of_steps[1]
        return self._chains.add(identities, Chain(self.contraction, before, self.norm, after, names=names))


def _text(contraction: str, norm: str, *identities: int | str) -> str:
    """The text by which a graph finds the chain."""
    family = next(each for each in FAMILIES if (each.contraction, each.norm) == (contraction, norm))
    return family._chain(identities).text


# A compiler calls it while it traces, with constants. Marked by hand as in ops.precision.
_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require_steps(**named: Sequence[Step]) -> None:
    """Raises TypeError where what a name has are no steps."""
    for name, steps in named.items():
        if not isinstance(steps, (tuple, list)) or isinstance(steps, Step):
            raise TypeError(f"{name} must be a tuple of steps of ops.pointwise, got {type(steps).__name__}")
        for place, step in enumerate(steps):
            if not isinstance(step, Step):
                raise TypeError(f"{name}[{place}] must be a step of ops.pointwise, got {type(step).__name__}")


LINEAR = Family("linear", "", ("bias",))
LINEAR_GROUP_NORM = Family("linear", "group_norm", ("linear_bias", "norm_weight", "norm_bias"))
CONV2D_GROUP_NORM = Family("conv2d", "group_norm", ("conv_bias", "norm_weight", "norm_bias"))
CONV_TRANSPOSE2D_GROUP_NORM = Family("conv_transpose2d", "group_norm", ("conv_bias", "norm_weight", "norm_bias"))
GROUP_NORM = Family("", "group_norm", ("weight", "bias"))
FAMILIES: tuple[Family, ...] = LINEAR, LINEAR_GROUP_NORM, CONV2D_GROUP_NORM, CONV_TRANSPOSE2D_GROUP_NORM, GROUP_NORM


def in_rows(
    norm: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    before: Sequence[Step],
    after: Sequence[Step],
    eps: float,
) -> Tensor:
    """The layer norm by a group norm of rows."""
    checks.tensors({"input": input}, {"weight": weight, "bias": bias})
    normalized = checks.shape("normalized_shape", normalized_shape)
    if not normalized or input.shape[-len(normalized) :] != normalized:
        raise ValueError(
            f"normalized_shape must be the input's last dimensions, of {tuple(input.shape)}, got {normalized_shape}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != normalized:
            raise ValueError(f"{name} must have shape {normalized}, got {tuple(vector.shape)}")
    require_steps(before=before, after=after)
    rows = math.prod(input.shape[: -len(normalized)]), math.prod(normalized)

    def in_two_dimensions(name: str, steps: Sequence[Step]) -> list[Step]:
        found = []
        for place, (function, operand) in enumerate(steps):
            if function.operand == "tensor" and not isinstance(operand, Earlier):
                shape = operand.shape
                if len(shape) == input.ndim and shape == input.shape:
                    operand = _shaped(operand, rows)
                elif shape[-len(normalized) :] == normalized and math.prod(shape) == rows[1]:
                    operand = _shaped(operand, rows[1:])
                elif math.prod(shape) == 1 and len(shape) <= input.ndim:
                    operand = _shaped(operand, ())
                elif len(shape) != 1:
                    expected = f"{tuple(input.shape)} or {normalized}, got {tuple(shape)}"
                    raise ValueError(f"{name}[{place}].operand must have shape {expected}")
            found.append(Step(function, operand))
        return found

    weight, bias = (None if each is None else _shaped(each, rows[1:]) for each in (weight, bias))
    steps = {"before": in_two_dimensions("before", before), "after": in_two_dimensions("after", after)}
    # A matrix would keep its strides, as images do.
    in_order = input if input.is_contiguous() else input.clone(memory_format=torch.contiguous_format)
    return _shaped(norm(_shaped(in_order, rows), 1, weight, bias, **steps, eps=eps), input.shape)


def _shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(shape)
