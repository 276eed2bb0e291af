"""Tiled persistent GEMM. Loads, stores and the chain are passed to one kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.chain import Chain
from triton_kernels.device import IN_INTERPRETER, has_tensor_descriptors, multiprocessor_count
from triton_kernels.epilogues import chain_epilogue
from triton_kernels.grid import blocks_of, indices
from triton_kernels.launch import launch, wait_for_launch_before

#: float32 accuracy on tensor cores: three TF32 products, added in float32.
FLOAT32_INPUT_PRECISION = "tf32x3"
_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class LinearConfig:
    """Block sizes of ``linear_kernel``. ``group_m`` consecutive row tiles share a column tile's weights in L2."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    #: Number of column strips that the epilogue divides a tile into. Each needs 1/epilogue_strips of the registers and
    #: of the staging.
    epilogue_strips: int = 1
    #: Number of column strips, 1 or 2, that results are stored in. Each needs 1/store_strips of the staging.
    store_strips: int = 1

    @property
    def epilogue_columns(self) -> int:
        return self.block_n // self.epilogue_strips

    @property
    def stored_columns(self) -> int:
        return self.epilogue_columns // self.store_strips

    @property
    def stacks_warps(self) -> bool:
        """Whether the warps lie one above the other in a tile, so that each has whole rows to divide."""
        return self.block_m >= 16 * self.num_warps

    def holds_groups_of(self, group_size: int) -> bool:
        """Whether what the epilogue sees holds whole groups, so that it can normalise them in registers."""
        return self.epilogue_columns % group_size == 0

    def shared_memory(self, element_size: int, staged_columns: int | None = None) -> int:
        """Bytes of shared memory that the pipelined operands and the epilogue's staging need, at most.

        The epilogue stages its part of the output's tile, or ``staged_columns`` elements of each row.
        """
        operands = self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size
        if self.epilogue_strips * self.store_strips > 1 and not self.stacks_warps:
            # Warps lie side by side there, and exchange the whole tile in float32 to divide it into strips.
            return operands + self.block_m * self.block_n * 4
        staged_columns = self.stored_columns if staged_columns is None else staged_columns
        return operands + self.block_m * staged_columns * element_size


@triton.jit
def load_descriptor(operand, row, depth, row_count, depth_count, BLOCK_ROWS: tl.constexpr, BLOCK_DEPTH: tl.constexpr):
    """Load a [BLOCK_ROWS, BLOCK_DEPTH] tile through a tensor descriptor. The hardware fills in zeros outside."""
    return operand.load([row, depth])


@triton.jit
def load_descriptor_transposed(
    operand, row, depth, row_count, depth_count, BLOCK_ROWS: tl.constexpr, BLOCK_DEPTH: tl.constexpr
):
    """The same for an operand that is stored as [depth, row]."""
    return operand.load([depth, row]).T


@triton.jit
def load_pointers(operand, row, depth, row_count, depth_count, BLOCK_ROWS: tl.constexpr, BLOCK_DEPTH: tl.constexpr):
    """The same through pointers, at any strides and alignment. ``operand`` is (pointer, row stride, depth stride)."""
    pointer, row_stride, depth_stride = operand
    # int64 within the tile too: rows with a large int32 stride may be further apart than int32 can count.
    rows = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    depths = tl.arange(0, BLOCK_DEPTH).to(tl.int64)
    corner = pointer + row.to(tl.int64) * row_stride + tl.cast(depth, tl.int64) * depth_stride
    inside = (rows < row_count - row)[:, None] & (depths < depth_count - depth)[None, :]
    return tl.load(corner + rows[:, None] * row_stride + depths[None, :] * depth_stride, mask=inside, other=0.0)


@triton.jit
def store_descriptor(target, place, tile):
    """Store a tile at place = (row, column, M, N) through a tensor descriptor, rounded once to its dtype."""
    row, column, M, N = place
    target.store([row, column], tile.to(target.dtype))


@triton.jit
def halves(tile):
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def store_descriptor_halves(target, place, tile):
    """The same in two halves, one after the other, through a descriptor with half as many columns."""
    row, column, M, N = place
    first, second = halves(tile.to(target.dtype))
    target.store([row, column], first)
    target.store([row, column + tile.shape[1] // 2], second)


@triton.jit
def store_pointers(target, place, tile):
    """The same through a pointer to a contiguous [M, N] matrix."""
    row, column, M, N = place
    rows = tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    inside = (rows < M - row)[:, None] & (columns < N - column)[None, :]
    corner = target + row.to(tl.int64) * N + column
    tl.store(corner + rows.to(tl.int64)[:, None] * N + columns[None, :], tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_count(M, N, CONFIG: tl.constexpr):
    return tl.cdiv(M, CONFIG.block_m) * tl.cdiv(N, CONFIG.block_n)


@triton.jit
def tile_place(tile, M, N, CONFIG: tl.constexpr):
    """Row and column of a tile. ``group_m`` row tiles go through the column tiles together, and share weights in L2."""
    tiles_m = tl.cdiv(M, CONFIG.block_m)
    tiles_n = tl.cdiv(N, CONFIG.block_n)
    first_m = tile // (CONFIG.group_m * tiles_n) * CONFIG.group_m
    group_m = tl.minimum(tiles_m - first_m, CONFIG.group_m)
    tile %= CONFIG.group_m * tiles_n
    return (first_m + tile % group_m) * CONFIG.block_m, tile // group_m * CONFIG.block_n


@triton.jit
def tile_at(row, column, M, N, CONFIG: tl.constexpr):
    """The tile of which ``tile_place`` is this."""
    tile_m, tile_n = row // CONFIG.block_m, column // CONFIG.block_n
    first_m = tile_m // CONFIG.group_m * CONFIG.group_m
    group_m = tl.minimum(tl.cdiv(M, CONFIG.block_m) - first_m, CONFIG.group_m)
    return first_m * tl.cdiv(N, CONFIG.block_n) + tile_n * group_m + tile_m - first_m


@triton.jit
def multiply_tile(
    input,
    weight,
    place,
    steps,
    K,
    LOAD_INPUT: tl.constexpr,
    LOAD_WEIGHT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The tile of input @ weight.T at place = (row, column, M, N), in float32."""
    row, column, M, N = place
    BLOCK_M: tl.constexpr = CONFIG.block_m
    BLOCK_N: tl.constexpr = CONFIG.block_n
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        a = LOAD_INPUT(input, row, step * CONFIG.block_k, M, K, BLOCK_M, CONFIG.block_k)
        b = LOAD_WEIGHT(weight, column, step * CONFIG.block_k, N, K, BLOCK_N, CONFIG.block_k)
        if IN_INTERPRETER:  # which would multiply the bit patterns of bfloat16 numbers
            a, b = a.to(tl.float32), b.to(tl.float32)
        accumulator = tl.dot(a, b.T, accumulator, input_precision=INPUT_PRECISION)
    return accumulator


@triton.jit
def linear_kernel(
    input,  # [M, K]: a descriptor, or (pointer, row stride, depth stride)
    weight,  # [N, K]: likewise
    output,  # [M, N]: a descriptor or a pointer, for the epilogue
    saved,  # [M, N]: what the backward pass needs, likewise; None where nothing is saved
    operands,  # of the chain's steps, for the epilogue
    eps,
    M,
    N,
    K,
    LOAD_INPUT: tl.constexpr,
    LOAD_WEIGHT: tl.constexpr,
    STORE: tl.constexpr,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute input @ weight.T in float32, tile by tile, and apply CHAIN's other parts to each tile."""
    wait_for_launch_before()
    tiles = tile_count(M, N, CONFIG)
    steps = tl.cdiv(K, CONFIG.block_k)
    tl.assume(steps > 0)
    # One flat loop over (tile, k), so that the next tile is loaded while the epilogue runs.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile_place(tile, M, N, CONFIG)
        place = (row, column, M, N)
        product = multiply_tile(input, weight, place, steps, K, LOAD_INPUT, LOAD_WEIGHT, INPUT_PRECISION, CONFIG)
        strips = (product,) if CONFIG.epilogue_strips == 1 else halves(product)
        for i in tl.static_range(len(strips)):
            place = (row, column + i * CONFIG.epilogue_columns, M, N)
            chain_epilogue(strips[i], place, output, saved, operands, eps, STORE, indices, CHAIN, GROUP_SIZE, DTYPE)


#: Of how many of its tiles a program reads at once whether they are left.
_TURNS = tl.constexpr(64)


@triton.jit
def linear_rest_kernel(
    input,
    weight,
    output,
    saved,
    left,  # int32 [tiles]: 0 for those that were computed
    operands,
    eps,
    M,
    N,
    K,
    LOAD_INPUT: tl.constexpr,
    LOAD_WEIGHT: tl.constexpr,
    STORE: tl.constexpr,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """``linear_kernel`` for the tiles that a product of split operands could not compute (``float32_split``)."""
    wait_for_launch_before()
    tiles, steps = tile_count(M, N, CONFIG), tl.cdiv(K, CONFIG.block_k)
    turns = tl.arange(0, _TURNS)
    for turn in range(0, tl.cdiv(tiles, tl.num_programs(0)), _TURNS):
        each = tl.program_id(0) + (turn + turns) * tl.num_programs(0)
        are_left = tl.load(left + each, mask=each < tiles, other=0)
        while tl.max(are_left) != 0:
            first = tl.min(tl.where(are_left != 0, turns, _TURNS))
            are_left = tl.where(turns == first, 0, are_left)
            tile = tl.program_id(0) + (turn + first) * tl.num_programs(0)
            row, column = tile_place(tile, M, N, CONFIG)
            place = (row, column, M, N)
            product = multiply_tile(input, weight, place, steps, K, LOAD_INPUT, LOAD_WEIGHT, INPUT_PRECISION, CONFIG)
            chain_epilogue(product, place, output, saved, operands, eps, STORE, indices, CHAIN, GROUP_SIZE, DTYPE)


def _operand(tensor: torch.Tensor, block_rows: int, block_depth: int):
    """How the kernel reads ``tensor``: the argument to pass, and the jit function that loads a tile."""
    if has_tensor_descriptors(tensor.device) and tensor.data_ptr() % 16 == 0 and tensor.numel() > 0:
        alignment = 16 // tensor.element_size()
        row_stride, depth_stride = tensor.stride()
        if depth_stride == 1 and row_stride % alignment == 0 and row_stride >= tensor.shape[1]:
            return TensorDescriptor.from_tensor(tensor, [block_rows, block_depth]), load_descriptor
        if row_stride == 1 and depth_stride % alignment == 0 and depth_stride >= tensor.shape[0]:
            return TensorDescriptor.from_tensor(tensor.T, [block_depth, block_rows]), load_descriptor_transposed
    return (tensor, *tensor.stride()), load_pointers


def _may_describe(matrix: torch.Tensor, columns: int) -> bool:
    return matrix.data_ptr() % 16 == columns * matrix.element_size() % 16 == 0


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    chain: Chain,
    config: LinearConfig,
    operands: Sequence[Any],
    *,
    output: torch.Tensor,
    saved: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    eps: float = 0.0,
    group_size: int = 1,
    input_precision: str = "ieee",
    left: torch.Tensor | None = None,
) -> None:
    """output = the chain that begins with ``input @ weight.T`` (see ``triton_kernels.epilogues``).

    ``input`` [M, K] and ``weight`` [N, K] may have any strides and have one dtype. All else is contiguous. ``operands``
    has one entry a step of the chain. ``input_precision`` is ``tl.dot``'s and matters for float32 only. K must not be
    0. With ``left``, as ``linear_rest_kernel`` describes it, only the tiles noted there are computed; the config takes
    them in one strip.
    """
    (M, K), N = input.shape, weight.shape[0]
    if M == 0 or N == 0:
        return
    input_operand, load_input = _operand(input, config.block_m, config.block_k)
    weight_operand, load_weight = _operand(weight, config.block_n, config.block_k)
    by_descriptor = (
        output.shape == (M, N)
        and has_tensor_descriptors(output.device)
        and all(t is None or _may_describe(t, N) for t in (output, saved))  # type: ignore[arg-type]
    )
    if by_descriptor:
        tile = [config.block_m, config.stored_columns]
        output = TensorDescriptor.from_tensor(output, tile)
        saved = None if saved is None else TensorDescriptor.from_tensor(saved, tile)
    tiles = blocks_of(M, config.block_m) * blocks_of(N, config.block_n)
    store_tile = store_descriptor_halves if config.store_strips == 2 else store_descriptor
    kernel, which = (linear_kernel, ()) if left is None else (linear_rest_kernel, (left,))
    launch(
        kernel,
        (min(tiles, multiprocessor_count(input.device)),),
        input.device,
        input_operand,
        weight_operand,
        output,
        saved,
        *which,
        tuple(operands),
        eps,
        M,
        N,
        K,
        LOAD_INPUT=load_input,
        LOAD_WEIGHT=load_weight,
        STORE=store_tile if by_descriptor else store_pointers,
        CHAIN=chain,
        GROUP_SIZE=group_size,
        DTYPE=_TRITON_DTYPES[input.dtype],
        INPUT_PRECISION=input_precision,
        CONFIG=config,
        config=config,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
