"""What the Linear chains share: checking their arguments, and whether the norm runs inside the product's kernel."""

import torch

from ops import checks, precision
from triton_kernels.linear import LinearConfig


def check_chain(
    input: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float, **vectors: torch.Tensor | None
) -> None:
    """Check a chain's tensors, groups and eps; ``vectors`` are over weight's out_features."""
    checks.tensors(input=input, weight=weight, **vectors)
    checks.linear(input, weight)
    checks.vectors(weight.shape[0], **vectors)
    checks.groups(weight.shape[0], num_groups)
    checks.epsilon(eps)


def as_vectors(input: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Contiguous and 1-D; in ``input``'s dtype where the reference runs (the kernels take any float dtype)."""
    dtype = None if precision.runs_kernels(input) else input.dtype
    return tuple(
        None if tensor is None else tensor.reshape(-1).contiguous().to(dtype or tensor.dtype) for tensor in tensors
    )


def fuses_into_product(config: LinearConfig, group_size: int, input: torch.Tensor) -> bool:
    """Whether the product's kernel can do all the rest: its tiles hold whole groups, and it does the product at all."""
    return config.holds_groups_of(group_size) and not precision.library_multiplies(input.dtype, input.shape[-1])
