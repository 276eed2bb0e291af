"""A chain in plain PyTorch: what the kernels are compared with, and what runs where they do not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triton_kernels.chain import Chain
from triton_kernels.pointwise import Pointwise

Tensor = torch.Tensor


def group_norm(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``torch.nn.functional.group_norm``, for empty batches too, and for a single sample with groups of one value.

    PyTorch's backward fails on the CPU for a bias without a weight (seen with torch 2.13), so a weight of ones is
    passed.
    """
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    if input.numel() == 0:
        shape = (1, -1) + (1,) * (input.ndim - 2)
        scaled = input if weight is None else input * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)
    return torch.group_norm(input, num_groups, weight, bias, eps)


def plain(
    chain: Chain,
    z: Tensor,
    operands: Sequence[Any],
    num_groups: int = 1,
    eps: float = 1e-5,
    norm: Callable[..., Tensor] = group_norm,
) -> Tensor:
    """The chain of ``z``, the contraction's result [samples, channels, ...].

    ``operands`` has one entry a step, as the kernels take them. Biases that are in ``z`` already are None.
    """
    first = chain.norm_place
    value = apply_steps(chain.steps[:first], z, operands[:first])
    if chain.norm:
        weight, bias = (None if each is None else each.reshape(-1) for each in operands[first : first + 2])
        value = norm(value, num_groups, weight, bias, eps)
        first += 2
    value = apply_steps(chain.after, value, operands[first:])
    return chain.reduction.plain(value) if chain.reduction else value


def apply_steps(steps: Sequence[Pointwise], value: Tensor, operands: Sequence[Any]) -> Tensor:
    """What the steps make of values [samples, channels, ...], each with its operand. A tensor that is None leaves its
    step out."""
    values = [value]
    for step, operand in zip(steps, operands, strict=True):
        if step.earlier:
            operand = values[-1 - step.earlier]
        elif operand is not None and step.operand in _LEADING:
            operand = operand.reshape(_LEADING[step.operand](operand.shape, value.ndim))
        if operand is not None or not step.has_tensor:
            value = step.plain(value, operand)
        values.append(value)
    return value


#: The shape of an operand that is broadcast to values of so many dimensions.
_LEADING: dict[str, Callable[[torch.Size, int], tuple[int, ...]]] = {
    "scalar": lambda shape, ndim: (),
    "vector": lambda shape, ndim: (-1, *[1] * (ndim - 2)),
    "sample": lambda shape, ndim: (*shape[:2], *[1] * (ndim - 2)),
}
