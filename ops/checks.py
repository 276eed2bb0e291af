"""Argument checks: one ValueError or TypeError that names the argument, what was expected and what came."""

import sys

import torch

from ops import precision

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tensors(required: dict[str, torch.Tensor], optional: dict[str, torch.Tensor | None]) -> None:
    """All are dense tensors of a dtype that is taken, the optional ones or None; of one device and, outside autocast,
    one dtype."""
    first_name, first = next(iter(required.items()))
    for name, tensor in (required | optional).items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be a float32, bfloat16, float16 or float64 tensor, got {tensor.dtype}")
        if tensor.is_nested or tensor.layout != torch.strided:
            got = "a nested one" if tensor.is_nested else tensor.layout
            raise TypeError(f"{name} must be a dense tensor, got {got}")
        if tensor.device != first.device:
            raise ValueError(f"{name} must be on {first_name}'s device {first.device}, got {tensor.device}")
        if tensor.dtype != first.dtype and not precision.autocasts(first.device):
            raise TypeError(f"{name} must have {first_name}'s dtype {first.dtype}, got {tensor.dtype}")


def linear(input: torch.Tensor, weight: torch.Tensor) -> None:
    """input (*, in_features) and weight (out_features, in_features), none of the features empty."""
    if weight.ndim != 2:
        raise ValueError(f"weight must be 2-D (out_features, in_features), got shape {tuple(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have at least one row and one column, got shape {tuple(weight.shape)}")
    if input.ndim < 1:
        raise ValueError("input must have at least one dimension (*, in_features), got a scalar")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input's last dimension must be weight's in_features {weight.shape[1]}, got shape {tuple(input.shape)}"
        )


def vectors(length: int, **arguments: torch.Tensor | None) -> None:
    """Each is None or holds one value a channel: shape (length,), or the same with leading ones."""
    for name, tensor in arguments.items():
        if tensor is not None and not _is_vector(tensor.shape, length):
            raise ValueError(f"{name} must have shape ({length},), got {tuple(tensor.shape)}")


def bias_shape(shape: torch.Size, length: int) -> None:
    """What a module makes its bias of: the shape of one value a channel, as ``vectors`` takes it."""
    if not _is_vector(shape, length):
        raise ValueError(f"bias_shape must be ({length},), got {tuple(shape)}")


def _is_vector(shape: torch.Size, length: int) -> bool:
    return shape[-1:] == (length,) and shape.numel() == length


def number(name: str, value: float, kinds: tuple[type, ...] = (int, float)) -> None:
    """A plain number of one of these types (bool is none), and no integer that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be a number that a float can hold, got an integer of {value.bit_length()} bits")


def groups(channels: int, num_groups: int) -> None:
    """num_groups >= 1 divides the number of channels."""
    number("num_groups", num_groups, (int, torch.SymInt))
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, got {num_groups}")
    if channels % num_groups != 0:
        raise ValueError(f"num_groups must divide the {channels} channels, got {num_groups}")


def epsilon(eps: float) -> None:
    """eps >= 0"""
    number("eps", eps)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")


def bounds(min_val: float, max_val: float) -> None:
    """min_val <= max_val"""
    number("min_val", min_val)
    number("max_val", max_val)
    if not min_val <= max_val:
        raise ValueError(f"min_val must not be greater than max_val, got min_val={min_val} and max_val={max_val}")
