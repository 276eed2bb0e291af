"""What the Linear chains share: checking their arguments, and whether the norm runs inside the product's kernel."""

import functools
import math
from collections.abc import Callable

import torch

from ops import checks, gemm, precision


def check_chain(
    input: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float, **vectors: torch.Tensor | None
) -> tuple[int, float]:
    """Check a chain's tensors, num_groups and eps, and return the last two as Python's numbers.

    ``vectors`` have one value for each of weight's out_features.
    """
    checks.tensors({"input": input, "weight": weight}, vectors)
    checks.linear(input, weight)
    checks.vectors(weight.shape[0], **vectors)
    return checks.groups(weight.shape[0], num_groups), checks.epsilon(eps)


def as_vectors(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """1-D, in their own dtype, as the operators take them."""
    return tuple(tensor if tensor is None or tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors)


def with_leading_shape(rows: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A result [rows, channels] of input (*, features) as (*, channels); of a matrix as it is, which is no view."""
    return rows if input.ndim == 2 else rows.view(*input.shape[:-1], rows.shape[-1])


def in_reference(function: Callable[..., torch.Tensor], input: torch.Tensor, *arguments, **scalars) -> torch.Tensor:
    """``function`` of ``ops.reference`` in the widest of its arguments' dtypes, which differ under autocast alone.

    A bound beyond what that dtype reaches is infinity there, as it is for the kernels; PyTorch would refuse it.
    """
    tensors = [input, *(argument for argument in arguments if isinstance(argument, torch.Tensor))]
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    widened = (argument.to(dtype) if isinstance(argument, torch.Tensor) else argument for argument in arguments)
    for name in ("min_val", "max_val"):
        if name in scalars and abs(scalars[name]) > torch.finfo(dtype).max:
            scalars[name] = math.copysign(math.inf, scalars[name])
    with precision.without_autocast(input.device):
        return function(input.to(dtype), *widened, **scalars).to(input.dtype)


def fused_product_config(
    kernel: str, input: torch.Tensor, weight: torch.Tensor, group_size: int, *biases: torch.Tensor | None
) -> gemm.Config | None:
    """How the product's kernel multiplies and does all the rest; None where that takes a pass of its own, as no tile
    holds whole groups, or the library multiplies."""
    if precision.library_multiplies(input, weight.shape[0], *biases):
        return None
    config = gemm.product_config(kernel, input, weight, group_size)
    return config if config.holds_groups_of(group_size) else None
