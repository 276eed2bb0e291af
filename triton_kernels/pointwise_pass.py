"""A chain of pointwise functions of a matrix in one pass, forward and backward: ``group_norm`` without a norm."""

from collections.abc import Sequence
from typing import Any

import torch

from triton_kernels.chain import Chain
from triton_kernels.group_norm import GroupNormConfig, group_norm, group_norm_backward

_CONFIG = GroupNormConfig(block_m=16, block_columns=128, rows_per_program=64, num_warps=4)


def pointwise(input: torch.Tensor, chain: Chain, operands: Sequence[Any], *, output: torch.Tensor) -> None:
    """output = the chain of ``input``, both [M, C] and contiguous. The chain is pointwise functions alone."""
    if C := input.shape[1]:
        group_norm(input, C, chain, operands, 0.0, _CONFIG, output=output)


def pointwise_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    *,
    input_gradient: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Gradients of ``pointwise``, as those of ``group_norm``."""
    if C := input.shape[1]:
        arguments = (output_gradient, input, C, chain, operands, 0.0, _CONFIG)
        group_norm_backward(*arguments, input_gradient=input_gradient, gradients=gradients)
