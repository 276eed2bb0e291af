"""Matrix products of chains, as steps of plans: by the project's kernel or by cuBLAS, and how float32 is split."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from autotune_configs import linear_config
from autotune_configs.heuristics import may_hold_groups
from ops import precision
from ops.calls import Arguments, rows_of
from triton_kernels.chain import Chain
from triton_kernels.chains import LINEAR
from triton_kernels.device import multiprocessor_count
from triton_kernels.float32_block_split import BlockSplit, split_blocks
from triton_kernels.float32_split import SplitOperand, is_transposed, split
from triton_kernels.float32_tiles import LinearSplitConfig, rows_at_a_time
from triton_kernels.grid import blocks_of
from triton_kernels.hopper import runs_hopper_kernels
from triton_kernels.image_copy import copy_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.launch import call as do
from triton_kernels.linear import FLOAT32_INPUT_PRECISION, LinearConfig, linear

Config = LinearConfig | LinearSplitConfig
#: A product, and perhaps a bias.
_BARE = Chain(LINEAR.contraction, norm="")


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
        parts, divides = precision.float32_parts(), may_divide and is_transposed(input)
        return LinearSplitConfig(parts, divides=divides, in_blocks=divides and parts == 2)
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
    input: torch.Tensor,
    weight: torch.Tensor,
    chain: Chain,
    config: Config,
    operands: Sequence[Any],
    *,
    halves: Sequence[BlockSplit | None] = (None, None),
    **arguments: Any,
) -> None:
    """The chain of input [M, K] @ weight [N, K].T; ``arguments`` are ``linear``'s.

    Where ``config`` says so, float32 operands are split into float16 ones, unless one is given so in ``halves``. Tiles
    with values that float16 cannot hold are computed again, as three TF32 products.
    """
    precisely = {"input_precision": FLOAT32_INPUT_PRECISION} | arguments
    if isinstance(config, LinearConfig):
        linear(_depth_contiguous(input), _depth_contiguous(weight), chain, config, operands, **precisely)
        return
    from triton_kernels.linear_split_hopper import linear_split  # loads Gluon

    (M, _), N = input.shape, weight.shape[0]
    tiles = blocks_of(M, config.block_m) * blocks_of(N, config.block_n)
    left = torch.empty(tiles, dtype=torch.int32, device=input.device)
    turn, rows = _in_turns((input, weight), config, halves)
    larger, smaller = (input, weight) if turn == 0 else (weight, input)
    before = halves[1 - turn]
    of_smaller = before or _split(smaller, config, left)

    def multiply_some(first: int) -> None:
        some = _split(larger[first : first + rows], config, left if before and first == 0 else None)
        parts = (some, of_smaller) if turn == 0 else (of_smaller, some)
        place = (first, 0, M, N) if turn == 0 else (0, first, M, N)
        linear_split(*parts, chain, config, operands, left=left, place=place, **arguments)

    for first in range(0, larger.shape[0], rows):
        multiply_some(first)  # in whose parts' memory the next ones lie
    linear(input, weight, chain, config.rest, operands, left=left, **precisely)


def _in_turns(
    operands: tuple[torch.Tensor, torch.Tensor], config: LinearSplitConfig, halves: Sequence[BlockSplit | None]
) -> tuple[int, int]:
    """Which operand is split some rows at a time, the larger of those that were not split before, and how many."""
    turn = max((place for place in (0, 1) if halves[place] is None), key=lambda place: operands[place].shape[0])
    operand, others = operands[turn], operands[1 - turn]
    tile, of_others = (config.block_m, config.block_n) if turn == 0 else (config.block_n, config.block_m)
    tiles_of_others, multiprocessors = blocks_of(others.shape[0], of_others), multiprocessor_count(operand.device)
    rows, depth = operand.shape
    return turn, rows_at_a_time((rows, depth), tile, tiles_of_others, config, multiprocessors)


def _split(operand: torch.Tensor, config: LinearSplitConfig, clears: torch.Tensor | None) -> SplitOperand | BlockSplit:
    return split_blocks(operand, clears) if config.in_blocks else split(operand, config.parts, clears=clears)


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
        chain = replace(_BARE, before=LINEAR.steps * (len(given) - 1))
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
    rows, products = rows_of(z_gradient), []
    if wanted.input:
        products.append((given.weight, "first", (*z_gradient.shape[:-1], given.weight.shape[1])))
    if wanted.weight:
        products.append((rows_of(given.input), "first.T", (rows.shape[1], given.input.shape[-1])))
    results = iter(of_one_matrix(rows, products))
    return next(results) if wanted.input else None, next(results) if wanted.weight else None


def of_one_matrix(
    matrix: torch.Tensor, products: Sequence[tuple[torch.Tensor, str, Sequence[int]]]
) -> list[torch.Tensor]:
    """Products, in the backward pass, of a matrix: with another, and in a shape. It is their "first" operand, or
    "second", or transposed: "first.T", "second.T". Where kernels make several in float32, it is split once."""
    operands = [placed(matrix, other, place) for other, place, _ in products]
    if len(products) == 1 or not all(_takes_blocks(a, b) for a, b in operands):
        return [multiply(a, b, shape) for (a, b), (_, _, shape) in zip(operands, products, strict=True)]
    halves, results = split_blocks(matrix), []
    for (a, b), (_, place, shape) in zip(operands, products, strict=True):
        turned = halves.T if place.endswith(".T") else halves
        given = (turned, None) if place.startswith("first") else (None, turned.T)
        config = LinearSplitConfig(2, divides=True, in_blocks=True)
        results.append(torch.empty(shape, dtype=a.dtype, device=a.device))
        product(a, b.T, _BARE, config, [None], halves=given, output=rows_of(results[-1]))
    return results


def placed(matrix: torch.Tensor, other: torch.Tensor, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A product's operands [M, K] and [K, N], of which a matrix is one, as ``of_one_matrix`` says."""
    matrix = matrix.T if place.endswith(".T") else matrix
    return (matrix, other) if place.startswith("first") else (other, matrix)


def _takes_blocks(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel computes a @ b in the backward pass, of two parts."""
    if a.dtype != torch.float32 or a.shape[1] == 0 or precision.multiplier(a, b.T, may_divide=True) != "kernel":
        return False
    config = product_config(LINEAR, a, b.T)
    return isinstance(config, LinearSplitConfig) and config.parts == 2


def multiply(a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """a @ b in the backward pass, in this shape: cuBLAS's, but in float32 the kernel's where that is faster."""
    if a.dtype == torch.float32 and a.shape[1] > 0:
        return affine(a, b.T, (), shape, may_divide=True)
    return do(mm, a, b, shape)
