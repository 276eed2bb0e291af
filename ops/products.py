"""Matrix products of chains, as steps of plans: by the project's kernel or by cuBLAS, and how float32 is split."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from autotune_configs import linear_config
from autotune_configs.heuristics import may_hold_groups
from ops import precision
from ops.calls import Arguments, rows_of
from triton_kernels.chain import Chain
from triton_kernels.chains import LINEAR
from triton_kernels.float32_split import is_transposed, shares_rows, split
from triton_kernels.float32_tiles import LinearSplitConfig
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.launch import call as do
from triton_kernels.linear import FLOAT32_INPUT_PRECISION, LinearConfig, linear

Config = LinearConfig | LinearSplitConfig


def product_config(
    chain: Chain,
    input: torch.Tensor,
    weight: torch.Tensor,
    group_size: int = 1,
    result: torch.dtype | None = None,
    may_divide: bool = False,
) -> Config:
    """How ``product`` multiplies input [M, K] and weight [N, K]; ``result`` is the dtype of what it stores, and
    ``may_divide`` as in ``precision.multiplier``.

    Where the chain normalises groups of ``group_size`` columns, ask ``holds_groups_of`` whether a tile holds them.
    """
    if input.dtype == torch.float32 and runs_hopper_kernels(input.device):
        return LinearSplitConfig(precision.float32_parts(), divides=may_divide and is_transposed(input))
    (M, K), N = input.shape, weight.shape[0]
    return linear_config(chain.kernel, input.dtype, M, N, K, group_size, input.device, result)


def fused_config(
    chain: Chain,
    input: torch.Tensor,
    weight: torch.Tensor,
    group_size: int,
    biases: Sequence[torch.Tensor | None],
    result: torch.dtype | None = None,
) -> Config | None:
    """The config of the product's kernel where that does the whole chain; None where a second kernel has to.

    That is where no tile of the kernel holds whole groups, and where cuBLAS multiplies.
    """
    may_fuse = may_hold_groups(group_size, chain.reduction is not None)
    if not may_fuse or precision.multiplies_by_cublas(input, weight.shape[0], *biases):
        return None
    config = product_config(chain, input, weight, group_size, result)
    return config if config.holds_groups_of(group_size) else None


def product(
    input: torch.Tensor, weight: torch.Tensor, chain: Chain, config: Config, operands: Sequence[Any], **arguments
) -> None:
    """The chain of input [M, K] @ weight [N, K].T; ``arguments`` are ``linear``'s.

    Where ``config`` says so, float32 operands are split into float16 ones. Tiles with values that float16 cannot hold
    are computed again, as three TF32 products.
    """
    precisely = {"input_precision": FLOAT32_INPUT_PRECISION} | arguments
    if isinstance(config, LinearConfig):
        linear(_depth_contiguous(input), _depth_contiguous(weight), chain, config, operands, **precisely)
        return
    from triton_kernels.linear_split_hopper import linear_split  # loads Gluon

    any_rest = torch.empty(1, dtype=torch.int32, device=input.device)
    matrices, is_turned = [input, weight], shares_rows(weight) and not shares_rows(input)
    if is_turned:
        matrices.reverse()
    clears = any_rest if shares_rows(matrices[0]) else None
    if clears is None:
        do(zero, any_rest)
    halves = split(matrices[0], config.parts, any_rest, clears=clears), split(matrices[1], config.parts, any_rest)
    first, second = halves[::-1] if is_turned else halves
    linear_split(first, second, chain, config, operands, **arguments)
    rest = first.scale, second.scale, any_rest
    linear(input, weight, chain, config.rest, operands, rest=rest, **precisely)


def _depth_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, contiguous along K where it is float32: the kernel takes twice as long otherwise (H200).

    The copy goes tile by tile. That takes a quarter of the time of PyTorch's copy of a transposed matrix.
    """
    if matrix.dtype != torch.float32 or matrix.is_contiguous():
        return matrix
    result = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    source, target = matrix.unsqueeze(0), result.unsqueeze(0)
    copy_image(source, target, ImageNormConfig.fit(source, target))
    return result


def affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    may_divide: bool = False,
) -> torch.Tensor:
    """input [M, K] @ weight [N, K].T and the biases, in the input's dtype or this one: M x N values in this shape.
    ``may_divide`` as in ``precision.multiplier``.

    The result is rounded once. Where cuBLAS multiplies, which gives the input's dtype alone, or the weight is split in
    registers, the sum of two biases is rounded too.
    """
    given: list[Any] = [bias for bias in biases if bias is not None] or [None]
    by = "kernel"
    if dtype in (None, input.dtype):
        by = precision.multiplier(input, weight, *biases, may_divide=may_divide)
    if by == "kernel":
        output = torch.empty(shape, dtype=dtype or input.dtype, device=input.device)
        chain = Chain(LINEAR.contraction, LINEAR.steps * (len(given) - 1), norm="")
        config = product_config(LINEAR, input, weight, result=output.dtype, may_divide=may_divide)
        product(input, weight, chain, config, given, output=rows_of(output))
        return output
    shift = reduce(partial(do, torch.add), given)
    if by == "registers":
        output = torch.empty(shape, dtype=input.dtype, device=input.device)
        _multiply_in_registers(_as_batch(input), _as_batch(weight), shift, _as_batch(rows_of(output)))
        return output
    if shift is not None and precision.cublas_adds_bias(input, weight.shape[0]):
        return do(addmm, shift, input, weight.T, shape)
    output = do(mm, input, weight.T, shape)
    if shift is not None:
        do(add_to, output, shift)
    return output


def _as_batch(matrix: torch.Tensor) -> torch.Tensor:
    """Of one. TMA takes no stride that is not a multiple of 16 bytes, nor that of this."""
    return matrix.as_strided((1, *matrix.shape), (4 * matrix.numel(), *matrix.stride()))


def of_batches(input: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """input [B, M, K] @ matrix [B, K, N]."""
    if precision.rows_in_registers(input, matrix.mT) is None:
        return do(torch.bmm, input, matrix)
    output = torch.empty(*input.shape[:2], matrix.shape[-1], dtype=input.dtype, device=input.device)
    _multiply_in_registers(input, matrix.mT, None, output)
    return output


def _multiply_in_registers(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> None:
    """output [B, M, N] = input [B, M, K] @ weight [B, N, K].mT + bias [N]."""
    from triton_kernels.linear_registers_hopper import linear_registers  # loads Gluon

    is_transposed = precision.rows_in_registers(input, weight) == 0
    split, whole = (weight, input) if is_transposed else (input, weight)
    split = split[:1] if split.stride(0) == 0 else split  # one for all
    memory = torch.empty(whole.shape[0] * whole.shape[1] + 1, dtype=torch.int32, device=input.device)
    linear_registers(split, whole, bias, memory, output=output, transposed=is_transposed)


def zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


def mm(input: torch.Tensor, weight: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """torch.mm, in this shape."""
    result = torch.mm(input, weight)
    return result if len(shape) == 2 else result.view(shape)


def addmm(bias: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """torch.addmm, in this shape."""
    result = torch.addmm(bias, input, weight)
    return result if len(shape) == 2 else result.view(shape)


def add_to(output: torch.Tensor, bias: torch.Tensor) -> None:
    output.add_(bias)


def gradients(
    z_gradient: torch.Tensor, given: Arguments, wanted: Arguments
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of a linear layer's input and weight, from the one at its result; each is None where not wanted."""
    rows, input, weight = rows_of(z_gradient), given.input, given.weight
    return (
        multiply(rows, weight, (*z_gradient.shape[:-1], weight.shape[1])) if wanted.input else None,
        multiply(rows.T, rows_of(input), (rows.shape[1], input.shape[-1])) if wanted.weight else None,
    )


def multiply(a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """a @ b in the backward pass, in this shape: cuBLAS's, but in float32 the kernel's where that is faster."""
    if a.dtype == torch.float32 and a.shape[1] > 0:
        return affine(a, b.T, (), shape, may_divide=True)
    return do(mm, a, b, shape)
