"""Backward pass of the row minimum. Its gradient is zero outside the group that holds a row's minimum.

The gradient at the GEMM's output is kept for that group alone: [M, GROUP_SIZE]. The input's gradient gathers the
group's rows of the weight. The weight's gradient adds up, for each group, the rows that chose it. ``winner`` is what
``row_minimum.finish`` kept: (column [M], rstd [M], normalized [M, GROUP_SIZE]).
"""

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import store_sums
from triton_kernels.device import IN_INTERPRETER
from triton_kernels.grid import blocks_of, grid_of, next_power_of_2, second_place
from triton_kernels.launch import launch, wait_for_launch_before

#: Below this many groups, or above this width, the gradient at the GEMM's output is dense enough for dense products.
_FEWEST_SPARSE_GROUPS = 16
_WIDEST_SPARSE_GROUP = 128


def has_sparse_gradient(num_groups: int, group_size: int) -> bool:
    """Whether the gradients of input and weight take one group a row. Else they are products of dense matrices."""
    return num_groups >= _FEWEST_SPARSE_GROUPS and group_size <= _WIDEST_SPARSE_GROUP


@triton.jit
def winner_backward_kernel(
    row_partials,  # [blocks, M] float64: sums of the output's gradient over blocks of its columns
    column,  # [M]: where the minimum was found
    rstd,  # [M]
    normalized,  # [M, GROUP_SIZE]
    norm_weight,  # [C] or None
    minimum_gradient,  # [M]: gradient at the row minimum
    z_gradient,  # [M, GROUP_SIZE]: gradient at the GEMM's output, in the winner's group
    blocks,
    M,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
):
    """The minimum's gradient, and the backward pass of a group norm whose incoming gradient has one element per row."""
    wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    members = tl.arange(0, BLOCK_GROUP)
    row_inside = rows < M
    total = tl.zeros((BLOCK_PARTIALS, BLOCK_M), tl.float64)
    for first in range(0, blocks, BLOCK_PARTIALS):
        block = first + tl.arange(0, BLOCK_PARTIALS)
        partial_inside = (block < blocks)[:, None] & row_inside[None, :]
        source = row_partials + block.to(tl.int64)[:, None] * M + rows[None, :]
        total += tl.load(source, mask=partial_inside, other=0.0)
    gradient = tl.sum(total, 0).to(tl.float32)
    tl.store(minimum_gradient + rows, gradient, mask=row_inside)
    inside = row_inside[:, None] & (members < GROUP_SIZE)[None, :]
    offset = rows.to(tl.int64)[:, None] * GROUP_SIZE + members[None, :]
    columns = tl.load(column + rows, mask=row_inside, other=0)
    if norm_weight is not None:
        gradient *= tl.load(norm_weight + columns, mask=row_inside, other=0.0).to(tl.float32)
    values = tl.load(normalized + offset, mask=inside, other=0.0)
    is_winner = members[None, :] == (columns % GROUP_SIZE)[:, None]
    mean = gradient / GROUP_SIZE
    projection = gradient * tl.sum(tl.where(is_winner, values, 0.0), 1) / GROUP_SIZE
    scattered = tl.where(is_winner, gradient[:, None], 0.0)
    scale = tl.load(rstd + rows, mask=row_inside, other=0.0)
    z = scale[:, None] * (scattered - mean[:, None] - values * projection[:, None])
    tl.store(z_gradient + offset, z, mask=inside)


@triton.jit
def input_gradient_kernel(
    z_gradient,  # [M, GROUP_SIZE]
    column,  # [M]
    order,  # [M]: rows in the order of their groups, so that neighbours read the same weights
    weight,  # [N, K]
    weight_row_stride,
    weight_column_stride,
    output,  # [M, K]
    K,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """output[m] = z_gradient[m] @ (the GROUP_SIZE rows of weight of m's winning group)."""
    wait_for_launch_before()
    row = tl.load(order + tl.program_id(0)).to(tl.int64)
    first = tl.load(column + row) // GROUP_SIZE * GROUP_SIZE
    k = second_place() * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for member in range(GROUP_SIZE):
        coefficient = tl.load(z_gradient + row * GROUP_SIZE + member)
        source = weight + (first + member).to(tl.int64) * weight_row_stride
        values = tl.load(source + k.to(tl.int64) * weight_column_stride, mask=k < K, other=0.0)
        total += coefficient * values.to(tl.float32)
    tl.store(output + row * K + k, total.to(output.dtype.element_ty), mask=k < K)


@triton.jit
def add_product(total, coefficients, values):
    """total + coefficients @ values, as precise as the values. For 16-bit values, float32 coefficients are split in
    two."""
    if values.dtype == tl.float32:
        total = tl.dot(coefficients, values, total, input_precision="tf32x3")
    elif IN_INTERPRETER:
        total = tl.dot(coefficients, values.to(tl.float32), total)
    else:
        high = coefficients.to(values.dtype)
        low = (coefficients - high.to(tl.float32)).to(values.dtype)
        total = tl.dot(high, values, tl.dot(low, values, total))
    return total


@triton.jit
def weight_gradient_kernel(
    z_gradient,  # [M, GROUP_SIZE]
    order,  # [M]: rows in the order of their groups
    offsets,  # [groups + 1]: where each group's rows begin in ``order``
    input,  # [M, K]
    input_row_stride,
    input_column_stride,
    output,  # [N, K]
    K,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """output[group] = sum of z_gradient[m].T * input[m] over the rows m whose minimum it holds; 0 without such rows.

    Rows are taken BLOCK_M at a time, as a product on tensor cores. One group may hold the minimum of nearly every row,
    and its program must not go through them one by one.
    """
    wait_for_launch_before()
    group = tl.program_id(0)
    members = tl.arange(0, BLOCK_GROUP)
    k = second_place() * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_GROUP, BLOCK_K), tl.float32)
    end = tl.load(offsets + group + 1)
    for first in range(tl.load(offsets + group), end, BLOCK_M):
        places = first + tl.arange(0, BLOCK_M)
        inside = places < end
        rows = tl.load(order + places, mask=inside, other=0).to(tl.int64)
        coefficients = tl.load(
            z_gradient + rows[None, :] * GROUP_SIZE + members[:, None],
            mask=inside[None, :] & (members < GROUP_SIZE)[:, None],
            other=0.0,
        )
        source = input + rows[:, None] * input_row_stride + k.to(tl.int64)[None, :] * input_column_stride
        values = tl.load(source, mask=inside[:, None] & (k < K)[None, :], other=0.0)
        total = add_product(total, coefficients, values)
    tl.store(
        output + (group * GROUP_SIZE + members).to(tl.int64)[:, None] * K + k[None, :],
        total.to(output.dtype.element_ty),
        mask=(members < GROUP_SIZE)[:, None] & (k < K)[None, :],
    )


@triton.jit
def column_gradients_kernel(
    minimum_gradient,  # [M]
    column,  # [M]
    normalized,  # [M, GROUP_SIZE]
    z_gradient,  # [M, GROUP_SIZE]
    order,
    offsets,
    bias_gradients,  # of the biases before the norm, which are the same: [N] each
    norm_weight_gradient,  # [N] or None, as the next
    norm_bias_gradient,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """A group's column sums over the rows whose minimum it holds, in the fixed order of ``order``."""
    wait_for_launch_before()
    group = tl.program_id(0)
    members = tl.arange(0, BLOCK_GROUP)
    zeros = tl.zeros((BLOCK_GROUP,), tl.float64)
    bias_sum, norm_weight_sum, norm_bias_sum = zeros, zeros, zeros
    end = tl.load(offsets + group + 1)
    for first in range(tl.load(offsets + group), end, BLOCK_M):
        places = first + tl.arange(0, BLOCK_M)
        place_inside = places < end
        rows = tl.load(order + places, mask=place_inside, other=0).to(tl.int64)
        inside = place_inside[:, None] & (members < GROUP_SIZE)[None, :]
        offset = rows[:, None] * GROUP_SIZE + members[None, :]
        columns = tl.load(column + rows, mask=place_inside, other=0)
        is_winner = inside & (members[None, :] == (columns % GROUP_SIZE)[:, None])
        gradient = tl.load(minimum_gradient + rows, mask=place_inside, other=0.0).to(tl.float64)[:, None]
        bias_sum += tl.sum(tl.load(z_gradient + offset, mask=inside, other=0.0).to(tl.float64), 0)
        values = tl.load(normalized + offset, mask=inside, other=0.0)
        norm_weight_sum += tl.sum(tl.where(is_winner, gradient * values, 0.0), 0)
        norm_bias_sum += tl.sum(tl.where(is_winner, gradient, 0.0), 0)
    target, member_inside = group * GROUP_SIZE + members, members < GROUP_SIZE
    # There is no conversion from float64 to 16 bits.
    for i in tl.static_range(len(bias_gradients)):
        store_sums(bias_gradients[i], target, bias_sum.to(tl.float32), member_inside)
    store_sums(norm_weight_gradient, target, norm_weight_sum.to(tl.float32), member_inside)
    store_sums(norm_bias_gradient, target, norm_bias_sum.to(tl.float32), member_inside)


def winner_backward(
    row_partials: torch.Tensor,
    winner: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_weight: torch.Tensor | None,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the row minimum [M] and of the GEMM's output in each row's winning group [M, group_size].

    The gradient of the GEMM's output is zero elsewhere. ``row_partials`` [blocks, M] add up to the first.
    """
    column, rstd, normalized = winner
    M = column.numel()
    minimum_gradient, z_gradient = torch.empty_like(rstd), torch.empty_like(normalized)
    block_group, blocks = next_power_of_2(group_size), row_partials.shape[0]
    block_m = max(1, min(8, 2048 // block_group))
    launch(
        winner_backward_kernel,
        (blocks_of(M, block_m),),
        column.device,
        row_partials,
        column,
        rstd,
        normalized,
        norm_weight,
        minimum_gradient,
        z_gradient,
        blocks,
        M,
        GROUP_SIZE=group_size,
        BLOCK_M=block_m,
        BLOCK_GROUP=block_group,
        BLOCK_PARTIALS=min(512, next_power_of_2(max(1, blocks))),
        num_warps=8,
    )
    return minimum_gradient, z_gradient


def input_gradient(z_gradient, column, order, weight, output) -> None:
    """output [M, K] = each row's z_gradient [group_size] @ the winning group's rows of weight [N, K] (any strides)."""
    M, K = output.shape
    block_k = min(1024, next_power_of_2(max(1, K)))
    launch(
        input_gradient_kernel,
        grid_of(M, blocks_of(K, block_k)),
        output.device,
        z_gradient,
        column,
        order,
        weight,
        *weight.stride(),
        output,
        K,
        GROUP_SIZE=z_gradient.shape[1],
        BLOCK_K=block_k,
    )


def weight_gradient(z_gradient, order, offsets, input, output) -> None:
    """output [N, K] = by group, the sum over rows of z_gradient's outer product with input [M, K] (any strides)."""
    group_size = z_gradient.shape[1]
    N, K = output.shape
    block_group = max(16, next_power_of_2(group_size))
    block_k = max(16, min(4096 // block_group, next_power_of_2(K)))
    launch(
        weight_gradient_kernel,
        grid_of(N // group_size, blocks_of(K, block_k)),
        output.device,
        z_gradient,
        order,
        offsets,
        input,
        *input.stride(),
        output,
        K,
        GROUP_SIZE=group_size,
        BLOCK_M=16,
        BLOCK_GROUP=block_group,
        BLOCK_K=block_k,
        num_warps=2 if block_group == 16 else 4,
        # Most groups hold a row or two. Loading the next rows early would only take room from other programs.
        num_stages=1,
    )


def column_gradients(
    minimum_gradient, winner, z_gradient, order, offsets, vector_gradients: tuple[torch.Tensor | None, ...]
) -> None:
    """``vector_gradients`` become those of the biases before the norm, of norm_weight and of norm_bias: each [N] in any
    float dtype, or None where not wanted."""
    if all(gradient is None for gradient in vector_gradients):
        return
    *bias_gradients, norm_weight_gradient, norm_bias_gradient = vector_gradients
    column, _, normalized = winner
    group_size = normalized.shape[1]
    num_groups = offsets.numel() - 1
    block_group = next_power_of_2(group_size)
    launch(
        column_gradients_kernel,
        (num_groups,),
        column.device,
        minimum_gradient,
        column,
        normalized,
        z_gradient,
        order,
        offsets,
        tuple(each for each in bias_gradients if each is not None),  # 3.6 takes no length of those with None
        norm_weight_gradient,
        norm_bias_gradient,
        GROUP_SIZE=group_size,
        BLOCK_M=max(1, 2048 // block_group),
        BLOCK_GROUP=block_group,
    )
