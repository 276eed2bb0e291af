"""Pointwise functions with their operands, as the functions of ``ops`` take them in ``before`` and ``after``.

They have the names and arguments of PyTorch's functions::

    from ops import pointwise as p

    ops.linear_group_norm(input, weight, None, 32, before=(p.add(bias), p.mish()), after=(p.mul(2.0), p.add(residual)))
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ops import checks
from triton_kernels import activations, arithmetic, pointwise
from triton_kernels.pointwise import Pointwise

__all__ = [
    "Earlier", "Step", "add", "apply", "clamp", "div", "earlier", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh",
    "leaky_relu", "mish", "mul", "relu", "relu6", "sigmoid", "silu", "softplus", "sub", "tanh",
]  # fmt: skip

#: By name and the kind of the operand.
_ARITHMETIC = {(each.name, each.operand): each for each in arithmetic.ARITHMETIC}


class Earlier(NamedTuple):
    """The value as it was some steps ago. ``earlier`` makes it."""

    steps: int

    @property
    def kind(self) -> str:
        """What a ``Pointwise`` calls such an operand."""
        return f"earlier {self.steps}"


class Step(NamedTuple):
    """A pointwise function with its operand. The functions of this module make it.

    It is a tuple, so PyTorch finds the tensor in it.

    Args:
        pointwise: The function.
        operand: None, a tuple of floats, a tensor or an ``Earlier``, of the kind that the function takes. Arithmetic
            takes a tensor of each kind.
    """

    pointwise: Pointwise
    operand: Any = None


def apply(pointwise: Pointwise, operand: Any = None) -> Step:
    """Apply a pointwise function of your own.

    Args:
        pointwise: The function.
        operand: What it takes: None, a number or a tuple of numbers, or a tensor. One that takes tensors of the value's
            shape, ``operand="tensor"``, also takes smaller ones, as ``add`` does, and ``earlier``.

    Raises:
        TypeError: ``pointwise`` is no ``Pointwise``, or ``operand`` is not what it takes.
        ValueError: A number is beyond the range of a float.
    """
    if not isinstance(pointwise, Pointwise):
        raise TypeError(f"pointwise must be a Pointwise, got {type(pointwise).__name__}")
    if pointwise.operand == "numbers":
        numbers = operand if isinstance(operand, (tuple, list)) else (operand,)
        return Step(pointwise, tuple([float(checks.real("operand", each)) for each in numbers]))
    if isinstance(operand, Earlier) and pointwise.operand == "tensor":
        return Step(pointwise, operand)
    if pointwise.has_tensor and not isinstance(operand, torch.Tensor):
        raise TypeError(f"operand must be a torch.Tensor for {pointwise.name}, got {type(operand).__name__}")
    if not pointwise.operand and operand is not None:
        raise TypeError(f"operand must be None for {pointwise.name}, which takes none, got {type(operand).__name__}")
    return Step(pointwise, operand)


def earlier(steps: int = 1) -> Earlier:
    """The value as it was ``steps`` steps ago: an operand of ``add``, ``sub``, ``mul``, ``div``, and of functions of
    your own that take a tensor.

    It reaches back within ``before``, or within ``after``, at most to what the first step there is applied to.

    Args:
        steps: How many of the last steps are not applied. At least 1.

    Raises:
        TypeError: ``steps`` is no int.
        ValueError: ``steps`` is less than 1.

    Example::

        ops.group_norm(input, 8, after=(p.silu(), p.add(p.earlier())))  # silu(y) + y
        ops.group_norm(input, 8, after=(p.sigmoid(), p.mul(p.earlier())))  # sigmoid(y) * y
    """
    return Earlier(checks.size("steps", steps))


def _with_other(name: str, other: Any) -> Step:
    """The arithmetic of this name that takes ``other``."""
    if isinstance(other, Earlier):
        return Step(_ARITHMETIC[name, "tensor"], other)
    if not isinstance(other, torch.Tensor):
        try:
            return Step(_ARITHMETIC[name, "numbers"], (float(checks.real("other", other)),))
        except TypeError:
            kind = type(other).__name__
            raise TypeError(f"other must be an int, a float, a torch.Tensor or p.earlier(), got {kind}") from None
    return Step(_ARITHMETIC[name, "tensor"], other)


def _with_numbers(function: Pointwise, **numbers: Any) -> Step:
    return Step(function, tuple([float(checks.real(*named)) for named in numbers.items()]))


def relu() -> Step:
    """``torch.nn.functional.relu``: ``max(value, 0)``."""
    return Step(activations.RELU)


def relu6() -> Step:
    """``torch.nn.functional.relu6``: ``min(max(value, 0), 6)``."""
    return Step(activations.RELU6)


def leaky_relu(negative_slope: float = 0.01) -> Step:
    """``torch.nn.functional.leaky_relu``: the value above 0, else ``negative_slope * value``."""
    return _with_numbers(activations.LEAKY_RELU, negative_slope=negative_slope)


def elu(alpha: float = 1.0) -> Step:
    """``torch.nn.functional.elu``: the value above 0, else ``alpha * (exp(value) - 1)``."""
    return _with_numbers(activations.ELU, alpha=alpha)


def silu() -> Step:
    """``torch.nn.functional.silu``: ``value * sigmoid(value)``."""
    return Step(activations.SILU)


def gelu(approximate: str = "none") -> Step:
    """``torch.nn.functional.gelu``: ``value * (1 + erf(value / sqrt(2))) / 2``, or with a tanh in place of the erf."""
    return Step(pointwise.GELU if checks.approximate(approximate) == "none" else pointwise.GELU_TANH)


def mish() -> Step:
    """``torch.nn.functional.mish``: ``value * tanh(softplus(value))``."""
    return Step(pointwise.MISH)


def tanh() -> Step:
    """``torch.tanh``."""
    return Step(activations.TANH)


def sigmoid() -> Step:
    """``torch.sigmoid``: ``1 / (1 + exp(-value))``."""
    return Step(activations.SIGMOID)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> Step:
    """``torch.nn.functional.hardtanh``: the value, limited to ``min_val`` ... ``max_val``. At these its gradient is
    0."""
    return Step(pointwise.HARDTANH, checks.bounds(min_val, max_val))


def clamp(min: float | None = None, max: float | None = None) -> Step:
    """``torch.clamp``: the value, limited to ``min`` ... ``max``, None for no bound. At these its gradient is 1."""
    if min is None and max is None:
        raise ValueError("min or max must be a number, got None for both")
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return _with_numbers(activations.CLAMP, min=low, max=high)


def hardsigmoid() -> Step:
    """``torch.nn.functional.hardsigmoid``: ``min(max(value + 3, 0), 6) / 6``."""
    return Step(activations.HARDSIGMOID)


def hardswish() -> Step:
    """``torch.nn.functional.hardswish``: ``value * hardsigmoid(value)``."""
    return Step(activations.HARDSWISH)


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Step:
    """``torch.nn.functional.softplus``: ``log(1 + exp(beta * value)) / beta``, or the value where ``beta * value`` is
    above ``threshold``."""
    return _with_numbers(activations.SOFTPLUS, beta=beta, threshold=threshold)


def kind_of(shape: Sequence[int], dimensions: int, has_rows: bool) -> str:
    """What a tensor of this shape is to values of so many dimensions, as the operand of a ``Pointwise``.

    It is broadcast as in PyTorch, with two exceptions where channels are not the last dimension: (C,) has a value a
    channel, and (N, C) one a channel of each sample. ``has_rows``: the channels are the last dimension. The sizes that
    are not 1 are checked later.
    """
    if all(size == 1 for size in shape):
        return "scalar"
    if len(shape) == 1:
        return "vector"
    if has_rows or dimensions <= 2:
        return "vector" if len(shape) <= dimensions and all(size == 1 for size in shape[:-1]) else "tensor"
    first = len(shape) - dimensions + 1  # the place of the channels
    if first in (0, 1) and all(size == 1 for size in shape[first + 1 :]):
        return "vector" if all(size == 1 for size in shape[:first]) else "sample"
    return "sample" if len(shape) == 2 else "tensor"


def add(other: float | torch.Tensor | Earlier) -> Step:
    """``value + other``. ``other`` is a number, a tensor with one value for all, one a channel, one a channel of each
    sample or one a value, or ``earlier``."""
    return _with_other("add", other)


def sub(other: float | torch.Tensor | Earlier) -> Step:
    """``value - other``, with ``other`` as in ``add``."""
    return _with_other("sub", other)


def mul(other: float | torch.Tensor | Earlier) -> Step:
    """``value * other``, with ``other`` as in ``add``."""
    return _with_other("mul", other)


def div(other: float | torch.Tensor | Earlier) -> Step:
    """``value / other``, with ``other`` as in ``add``."""
    return _with_other("div", other)
