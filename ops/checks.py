"""Argument checks. Each raises one ValueError or TypeError that names the argument, what was expected and what came."""

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, SupportsIndex

import torch

from ops import precision

#: The largest finite float.
_LARGEST = sys.float_info.max
_INTEGERS: tuple[Any, ...] = (int, torch.SymInt)
#: The types of almost every argument. ``plain`` returns them at once.
_AS_THEY_ARE = (int, float, bool, str, type(None))
#: The types of almost every tensor that is an argument, and of one that is missing. All others are subclasses.
PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_DTYPES = (*precision.KERNEL_DTYPES, torch.float64)


def tensors(required: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> None:
    """All tensors are dense and have a supported dtype. All are on one device and, outside autocast, have one dtype.
    An optional one may be None."""
    first_name, first = next(iter(required.items()))
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in (required | given).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be a float32, bfloat16, float16 or float64 tensor, got {tensor.dtype}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor, got {'a nested tensor' if tensor.is_nested else tensor.layout}"
            )
        if tensor.device != first.device:
            raise ValueError(f"{name} must be on {first_name}'s device {first.device}, got {tensor.device}")
        if tensor.dtype != first.dtype and not precision.autocasts(first.device):
            raise TypeError(f"{name} must have {first_name}'s dtype {first.dtype}, got {tensor.dtype}")


def linear(input: torch.Tensor, weight: torch.Tensor) -> None:
    """input is ``(*, in_features)`` and weight ``(out_features, in_features)``, with at least one feature out."""
    if weight.ndim != 2:
        raise ValueError(f"weight must be 2-D (out_features, in_features), got shape {tuple(weight.shape)}")
    if weight.shape[0] == 0:
        raise ValueError(f"weight must have at least one row, got shape {tuple(weight.shape)}")
    if input.ndim < 1:
        raise ValueError("input must have at least one dimension (*, in_features), got a 0-D tensor")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input's last dimension must be weight's in_features {weight.shape[1]}, got shape {tuple(input.shape)}"
        )


def operand(name: str, kind: str, shape: tuple[int, ...], values: Sequence[int], axis: int) -> None:
    """An operand of this kind (``triton_kernels.pointwise.Pointwise``) fits ``values``, whose channels are at ``axis``,
    counted from behind."""
    channels, last = values[axis], (1,) * (-axis - 1)
    of_channels = [(channels,), (channels, *last)]
    of_samples = [(values[0], channels), (values[0], channels, *last)]
    if kind == "scalar":
        fits = len(shape) <= max(1, len(values)) and math.prod(shape) == 1
    elif kind == "vector":
        kept = next((place for place, size in enumerate(shape) if size != 1), max(0, len(shape) - 1))
        fits = is_vector(shape, channels) or (len(shape) <= len(values) and tuple(shape[kept:]) in of_channels)
    else:
        fits = tuple(shape) in (of_samples if kind == "sample" else [tuple(values)])
    if not fits:
        expected = [tuple(values), *of_channels[:1], *(of_samples[:1] if last else [])]
        expected = of_channels[:1] if kind == "vector" else expected
        raise ValueError(f"{name} must have shape {' or '.join(map(str, expected))}, got {tuple(shape)}")


def is_vector(shape: tuple[int, ...], length: int) -> bool:
    """Whether a tensor of this shape holds one value a channel: ``(length,)``, or the same with leading ones."""
    return shape[-1:] == (length,) and math.prod(shape) == length


def is_channel_axis(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is (1, channels, 1, 1), as a row minimum's bias is."""
    return len(shape) == 4 and shape == (1, shape[1], 1, 1)


def plain(value: Any) -> Any:
    """A number of another library (NumPy, ``fractions``) as an int or a float; in a tuple or a list, each of them.

    Everything else is returned as it is: Python's numbers, tensors, PyTorch's symbolic numbers, whatever is no number,
    and numbers too large for a float.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
        return value
    if isinstance(value, (tuple, list)):
        numbers = [plain(each) for each in value]
        return numbers if isinstance(value, list) else tuple(numbers)
    try:
        if hasattr(kind, "__index__"):
            return operator.index(value)
        if not isinstance(value, Real):
            return value
        number = float(value)
    except (TypeError, OverflowError):  # an array of several numbers, a fraction beyond float
        return value
    return value if math.isinf(number) and number != value else number  # longdouble reaches beyond float too


def integer(name: str, value: SupportsIndex) -> int:
    """``value`` as an int; a symbolic int stays one. A bool is refused, as PyTorch does."""
    if type(value) is int:
        return value
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, _INTEGERS):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return number


def size(name: str, value: SupportsIndex, least: int = 1) -> int:
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def dtype(value: torch.dtype | None) -> None:
    """The dtype of a module's parameters. None stands for PyTorch's default."""
    if value is not None and value not in _DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16, float16, float64 or None, got {value!r}")


def shape(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """``value``, an int or a sequence of ints, as the shape of a tensor."""
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    return tuple([integer(name, size) for size in sizes])


def real(name: str, value: float) -> float:
    """``value`` as an int or a float, within the range of a float. A bool is refused."""
    if type(value) is float:
        return value
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        if isinstance(value, Real) and not isinstance(value, bool):
            raise ValueError(
                f"{name} must be at most {_LARGEST:.6g} in magnitude, got a {type(value).__name__} beyond it"
            )
        raise TypeError(f"{name} must be an int or a float, got {type(value).__name__}")
    if isinstance(number, int) and abs(number) > _LARGEST:
        raise ValueError(
            f"{name} must be at most {_LARGEST:.6g} in magnitude, got an int of {number.bit_length()} bits"
        )
    return number


def groups(channels: int, num_groups: int) -> int:
    num_groups = size("num_groups", num_groups)
    if channels % num_groups != 0:
        raise ValueError(f"num_groups must divide the {channels} channels, got {num_groups}")
    return num_groups


def epsilon(eps: float) -> float:
    number = real("eps", eps)
    if not number >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return float(number)


def bounds(min_val: float, max_val: float) -> tuple[float, float]:
    low, high = real("min_val", min_val), real("max_val", max_val)
    if not low <= high:
        raise ValueError(f"min_val must not be greater than max_val, got min_val={min_val} and max_val={max_val}")
    return float(low), float(high)


def approximate(value: str) -> str:
    """``value``, which names a GELU as in ``torch.nn.functional.gelu``."""
    if not isinstance(value, str):
        raise TypeError(f"approximate must be a str, got {type(value).__name__}")
    if value not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {value!r}")
    return value
