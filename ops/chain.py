"""What the Linear chains share: the argument check, and the choice between one kernel and two."""

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
    """The tensors as 1-D vectors, in their own dtype, as the operators take them."""
    return tuple(tensor if tensor is None or tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors)


def with_leading_shape(rows: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A result ``[rows, channels]`` in the shape ``(*, channels)`` of an input ``(*, features)``.

    For a matrix it is returned as it is, not as a view.
    """
    return rows if input.ndim == 2 else rows.view(*input.shape[:-1], rows.shape[-1])


def in_reference(function: Callable[..., torch.Tensor], input: torch.Tensor, *arguments, **scalars) -> torch.Tensor:
    """Call ``function`` of ``ops.reference`` in the widest of its arguments' dtypes. They differ only under autocast.

    PyTorch refuses a bound beyond the range of that dtype. The kernels take it for infinity, so here it becomes
    infinity.
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
    """The config of the product's kernel where that kernel does the whole chain, else None.

    It is None where no tile of the kernel holds whole groups, and where cuBLAS multiplies. A second kernel then
    normalises the product.
    """
    if precision.library_multiplies(input, weight.shape[0], *biases):
        return None
    config = gemm.product_config(kernel, input, weight, group_size)
    return config if config.holds_groups_of(group_size) else None
