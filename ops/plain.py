"""Calls of chains in plain PyTorch: what runs on the CPU and for float64."""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ops import precision
from ops.contractions import contraction_of
from ops.convolution import memory_format
from triton_kernels import reference
from triton_kernels.chain import Chain

Tensor = torch.Tensor


def apply(
    chain: Chain, row: Sequence[Any], numbers: Sequence, num_groups: int, eps: float, geometry: dict[str, Any]
) -> Tensor:
    """The chain of tensors in a row (``ops.calls.Arguments``), with the numbers of its steps."""
    input, weight, *others, last = row
    tensors, given = iter(others), iter(numbers)
    operands = [
        next(tensors) if step.has_tensor else next(given) if step.operand == "numbers" else None for step in chain.steps
    ]
    contraction, bias = contraction_of(chain), None
    if chain.contraction and operands[0] is not None:
        bias, operands[0] = operands[0].reshape(-1), None
    z = values = contraction.plain(input, weight, bias, **geometry)
    if chain.has_rows:
        values = z.reshape(math.prod(z.shape[:-1]), z.shape[-1])
        operands = [
            each.reshape(values.shape) if step.operand == "tensor" and each is not None else each
            for step, each in zip(chain.steps, operands, strict=True)
        ]
    result = reference.plain(chain, values, operands, num_groups, eps)
    if chain.has_rows:
        result = result.view(*z.shape[:-1], result.shape[-1])
    return result if last is None else result + last


#: What gets each chain that runs here in this thread, its input, and why it does.
watcher: ContextVar[Callable[[Chain, Tensor, str], None] | None] = ContextVar("watcher", default=None)


def tell(chain: Chain, input: Tensor, reason: str = "") -> None:
    """Tell the watcher, if there is one."""
    if not torch.compiler.is_compiling() and (note := watcher.get()):
        note(chain, input, reason or precision.why_no_kernels(input) or "an operand has no elements")


def in_widest_dtype(
    chain: Chain, row: Sequence[Any], numbers: Sequence, num_groups: int, eps: float, geometry: Any, result: torch.dtype
) -> Tensor:
    """The same in the widest of the tensors' dtypes, which differ only under autocast, with a result of this dtype."""
    input = row[0]
    tell(chain, input)
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in row if each is not None), result)
    widened = [each if each is None else each.to(dtype) for each in row]
    with precision.without_autocast(input.device):
        values = apply(chain, widened, numbers, num_groups, eps, geometry.arguments if geometry else {}).to(result)
    if geometry:
        return values.contiguous(memory_format=memory_format(input))
    return values if chain.contraction else _lying_as(input, values)


def _lying_as(input: Tensor, values: Tensor) -> Tensor:
    """The values with the strides that kernels give to a norm of this input, which are the input's own."""
    strides = torch.empty_like(input, device="meta").stride()
    if values.stride() == strides:
        return values
    order = sorted(range(input.ndim), key=lambda axis: -strides[axis])
    return values.permute(order).contiguous().permute([order.index(axis) for axis in range(input.ndim)])
