"""Group norm of groups too wide for one program: partial statistics, their merge, and a pass that applies them.

Values are contiguous [B, C, S]: samples, channels, and pixels (all further dimensions; 1 where there are none). A group
is GROUP_SIZE neighbouring channels of a sample, which are GROUP_SIZE * S neighbouring values. Its statistics (count,
mean and M2, the sum of centred squares) are computed for blocks of it. Then they are merged after Chan, Golub and
LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979). One pointwise function may
come before the norm (ACTIVATION), and one after it (FINAL).

Groups and their blocks share the first axis of the grid, group by group. It is the only axis that is not limited to
65535.
"""

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import add_up, float32_partials
from triton_kernels.grid import blocks_of, next_power_of_2
from triton_kernels.group_statistics import reciprocal_deviation
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import IDENTITY, Pointwise

_BLOCK = 4096


@triton.jit
def place_block(blocks, width, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """This program's group and its places [BLOCK] in it, of the type INDEX, and which places are inside."""
    first = (tl.program_id(0) % blocks).to(INDEX) * BLOCK
    places = first + tl.arange(0, BLOCK)
    return tl.program_id(0) // blocks, places, places < width


@triton.jit
def partial_statistics_kernel(
    input,  # [B * G, width]: one group a row
    partial_mean,  # [B * G, blocks]
    partial_m2,  # [B * G, blocks]
    blocks,
    width,
    min_val,
    max_val,
    ACTIVATION: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and M2 of one block of one group. The count of values follows from the block's place."""
    wait_for_launch_before()
    sample_group, places, inside = place_block(blocks, width, INDEX, BLOCK)
    z = tl.load(input + sample_group.to(tl.int64) * width + places, mask=inside, other=0.0).to(tl.float32)
    values = tl.where(inside, ACTIVATION(z, min_val, max_val), 0.0)
    count = tl.sum(inside.to(tl.int32), 0)
    mean = tl.sum(values, 0) / count
    centred = tl.where(inside, values - mean, 0.0)
    correction = tl.sum(centred, 0) / count  # of the mean's rounding
    centred = tl.where(inside, centred - correction, 0.0)
    tl.store(partial_mean + tl.program_id(0), mean + correction)
    tl.store(partial_m2 + tl.program_id(0), tl.sum(centred * centred, 0))


@triton.jit
def merge_statistics_kernel(
    partial_mean,  # [B * G, blocks]
    partial_m2,  # [B * G, blocks]
    mean,  # [B * G]
    rstd,  # [B * G]
    blocks,
    width,
    eps,
    BLOCK: tl.constexpr,
    MERGE: tl.constexpr,
):
    """mean = sum of count_i mean_i / width, M2 = sum of M2_i + count_i (mean_i - mean)**2, rstd from M2 / width."""
    wait_for_launch_before()
    source = tl.program_id(0).to(tl.int64) * blocks
    weighted = tl.zeros((MERGE,), tl.float32)
    for first in range(0, blocks, MERGE):
        index = first + tl.arange(0, MERGE)
        share = tl.maximum(tl.minimum(width - index * BLOCK, BLOCK), 0).to(tl.float32) / width
        weighted += share * tl.load(partial_mean + source + index, mask=index < blocks, other=0.0)
    merged_mean = tl.sum(weighted, 0)
    variances = tl.zeros((MERGE,), tl.float32)
    drifts = tl.zeros((MERGE,), tl.float32)
    for first in range(0, blocks, MERGE):
        index = first + tl.arange(0, MERGE)
        share = tl.maximum(tl.minimum(width - index * BLOCK, BLOCK), 0).to(tl.float32) / width
        away = tl.load(partial_mean + source + index, mask=index < blocks, other=0.0) - merged_mean
        away = tl.where(index < blocks, away, 0.0)
        variances += tl.load(partial_m2 + source + index, mask=index < blocks, other=0.0) / width + share * away * away
        drifts += share * away
    drift = tl.sum(drifts, 0)  # of the rounding of the mean and of the shares
    variance = tl.maximum(tl.sum(variances, 0) - drift * drift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean + tl.program_id(0), merged_mean + drift)
    tl.store(rstd + tl.program_id(0), reciprocal_deviation(variance, eps))


@triton.jit
def load_channels(pointer, group, members, GROUP_SIZE: tl.constexpr, ABSENT: tl.constexpr):
    """A vector over the channels at ``members`` of a group, in float32; ABSENT where there is no vector."""
    values = tl.full(members.shape, ABSENT, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + group * GROUP_SIZE + members, mask=members < GROUP_SIZE, other=0.0).to(tl.float32)
    return values


@triton.jit
def apply_kernel(
    input,  # [B * G, width]
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    output,  # [B * G, width]
    blocks,
    width,
    pixels,
    num_groups,
    min_val,
    max_val,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output = FINAL((ACTIVATION(input) - mean) * rstd * norm_weight + norm_bias); one block of a group per program."""
    wait_for_launch_before()
    sample_group, places, inside = place_block(blocks, width, INDEX, BLOCK)
    members = places // pixels
    offsets = sample_group.to(tl.int64) * width + places
    weight = load_channels(norm_weight, sample_group % num_groups, members, GROUP_SIZE, 1.0)
    shift = load_channels(norm_bias, sample_group % num_groups, members, GROUP_SIZE, 0.0)
    z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    values = ACTIVATION(z, min_val, max_val)
    normalized = (values - tl.load(mean + sample_group)) * tl.load(rstd + sample_group)
    y = FINAL(normalized * weight + shift, min_val, max_val)
    tl.store(output + offsets, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def channel_sums_kernel(
    output_gradient,  # [B * C, pixels]
    input,  # [B * C, pixels]
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    weight_sums,  # [B, C]: sums over the pixels of dy * normalized
    shift_sums,  # [B, C]: and of dy
    rows,  # B * C
    pixels,
    channels,
    min_val,
    max_val,
    ACTIVATION: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
):
    """Each sample's and channel's part of the gradients of the norm's weight and bias."""
    wait_for_launch_before()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = row < rows
    channel = row % channels
    weight = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
    shift = tl.zeros((BLOCK_ROWS,), tl.float32)
    if norm_weight is not None:
        weight = tl.load(norm_weight + channel, mask=row_inside, other=0.0).to(tl.float32)
    if norm_bias is not None:
        shift = tl.load(norm_bias + channel, mask=row_inside, other=0.0).to(tl.float32)
    row_mean = tl.load(mean + row // GROUP_SIZE, mask=row_inside, other=0.0)
    row_rstd = tl.load(rstd + row // GROUP_SIZE, mask=row_inside, other=0.0)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_PIXELS), tl.float32)
    shift_sum = tl.zeros((BLOCK_ROWS, BLOCK_PIXELS), tl.float32)
    for first in range(0, pixels, BLOCK_PIXELS):
        pixel = first + tl.arange(0, BLOCK_PIXELS)
        inside = row_inside[:, None] & (pixel < pixels)[None, :]
        offsets = row[:, None] * pixels + pixel[None, :]
        z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        normalized = (ACTIVATION(z, min_val, max_val) - row_mean[:, None]) * row_rstd[:, None]
        dy = FINAL_GRADIENT(dy, normalized * weight[:, None] + shift[:, None], min_val, max_val)
        weight_sum += tl.where(inside, dy * normalized, 0.0)
        shift_sum += tl.where(inside, dy, 0.0)
    tl.store(weight_sums + row, tl.sum(weight_sum, 1), mask=row_inside)
    tl.store(shift_sums + row, tl.sum(shift_sum, 1), mask=row_inside)


@triton.jit
def group_means_kernel(
    weight_sums,  # [B * G, GROUP_SIZE]
    shift_sums,  # [B * G, GROUP_SIZE]
    norm_weight,  # [C] or None
    means,  # [2, B * G]
    width,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each group's means of norm_weight * dy * normalized and of norm_weight * dy."""
    wait_for_launch_before()
    sample_group = tl.program_id(0)
    groups = tl.num_programs(0)
    projection = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, GROUP_SIZE, BLOCK):
        members = first + tl.arange(0, BLOCK)
        inside = members < GROUP_SIZE
        weight = load_channels(norm_weight, sample_group % num_groups, members, GROUP_SIZE, 1.0)
        source = sample_group.to(tl.int64) * GROUP_SIZE + members
        projection += weight * tl.load(weight_sums + source, mask=inside, other=0.0)
        mean += weight * tl.load(shift_sums + source, mask=inside, other=0.0)
    tl.store(means + sample_group, tl.sum(projection, 0) / width)
    tl.store(means + groups + sample_group, tl.sum(mean, 0) / width)


@triton.jit
def apply_backward_kernel(
    output_gradient,  # [B * G, width]
    input,  # [B * G, width]
    mean,  # [B * G]
    rstd,  # [B * G]
    means,  # [2, B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    input_gradient,  # [B * G, width]
    blocks,
    width,
    pixels,
    num_groups,
    min_val,
    max_val,
    ACTIVATION: tl.constexpr,
    ACTIVATION_GRADIENT: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """input_gradient = ACTIVATION'(input) * rstd * (g - mean(g) - x * mean(g * x))

    x is the normalised activated input, and g = norm_weight * dy.
    """
    wait_for_launch_before()
    sample_group, places, inside = place_block(blocks, width, INDEX, BLOCK)
    members = places // pixels
    offsets = sample_group.to(tl.int64) * width + places
    weight = load_channels(norm_weight, sample_group % num_groups, members, GROUP_SIZE, 1.0)
    shift = load_channels(norm_bias, sample_group % num_groups, members, GROUP_SIZE, 0.0)
    group_rstd = tl.load(rstd + sample_group)
    z = tl.load(input + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(output_gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    normalized = (ACTIVATION(z, min_val, max_val) - tl.load(mean + sample_group)) * group_rstd
    dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
    projection = tl.load(means + sample_group)
    gradient_mean = tl.load(means + tl.num_programs(0) // blocks + sample_group)
    gradient = group_rstd * (dy * weight - gradient_mean - normalized * projection)
    gradient = ACTIVATION_GRADIENT(gradient, z, min_val, max_val)
    tl.store(input_gradient + offsets, gradient.to(input_gradient.dtype.element_ty), mask=inside)


def _blocks(width: int) -> tuple[int, dict]:
    """The number of blocks of a group, and what kernels need to find their own."""
    # The places of the last block may lie beyond width.
    return blocks_of(width, _BLOCK), {"INDEX": tl.int32 if width + _BLOCK < 2**31 else tl.int64, "BLOCK": _BLOCK}


def group_statistics(
    input: torch.Tensor,
    num_groups: int,
    eps: float,
    *,
    activation: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Mean and reciprocal standard deviation [2, B * num_groups], float32, of activation(input), contiguous [B, C,
    S]."""
    rows = input.shape[0] * num_groups
    statistics = torch.empty(2, rows, dtype=torch.float32, device=input.device)
    if input.numel() == 0:
        return statistics
    width = input.numel() // rows
    blocks, places = _blocks(width)
    partials = torch.empty(2, rows, blocks, dtype=torch.float32, device=input.device)
    launch(
        partial_statistics_kernel,
        (rows * blocks,),
        input.device,
        input,
        partials[0],
        partials[1],
        blocks,
        width,
        *bounds,
        ACTIVATION=activation.function,
        **places,
    )
    launch(
        merge_statistics_kernel,
        (rows,),
        input.device,
        partials[0],
        partials[1],
        statistics[0],
        statistics[1],
        blocks,
        width,
        eps,
        BLOCK=_BLOCK,
        MERGE=256,
    )
    return statistics


def wide_group_norm(
    input: torch.Tensor,
    num_groups: int,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    *,
    output: torch.Tensor,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """output = final(group_norm(activation(input))), both contiguous [B, C, S]. Returns the ``group_statistics``."""
    statistics = group_statistics(input, num_groups, eps, activation=activation, bounds=bounds)
    if input.numel() == 0:
        return statistics
    B, C, S = input.shape
    width = C // num_groups * S
    blocks, places = _blocks(width)
    launch(
        apply_kernel,
        (B * num_groups * blocks,),
        input.device,
        input,
        statistics[0],
        statistics[1],
        norm_weight,
        norm_bias,
        output,
        blocks,
        width,
        S,
        num_groups,
        *bounds,
        ACTIVATION=activation.function,
        FINAL=final.function,
        GROUP_SIZE=C // num_groups,
        **places,
    )
    return statistics


def wide_group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    num_groups: int,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    *,
    input_gradient: torch.Tensor,
    vector_gradients: tuple[torch.Tensor | None, ...],
    statistics: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Gradients of ``wide_group_norm``.

    ``vector_gradients``, each [C] in any float dtype or None where not wanted, become those of ``norm_weight`` and
    ``norm_bias``. ``norm_bias`` itself is read for ``final``'s gradient only. ``statistics`` are what the forward pass
    returned; without them they are computed again.
    """
    B, C, S = input.shape
    if input.numel() == 0:
        for vector in vector_gradients:
            if vector is not None:
                vector.zero_()
        return
    group_size = C // num_groups
    width = group_size * S
    blocks, places = _blocks(width)
    if statistics is None:
        statistics = group_statistics(input, num_groups, eps, activation=activation, bounds=bounds)
    sums = float32_partials(vector_gradients, B, C, input.device)
    means = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device)
    block_pixels = min(1024, next_power_of_2(S))
    block_rows = 1024 // block_pixels
    launch(
        channel_sums_kernel,
        (blocks_of(B * C, block_rows),),
        input.device,
        output_gradient,
        input,
        statistics[0],
        statistics[1],
        norm_weight,
        norm_bias,
        *sums,
        B * C,
        S,
        C,
        *bounds,
        ACTIVATION=activation.function,
        FINAL_GRADIENT=final.gradient,
        GROUP_SIZE=group_size,
        BLOCK_ROWS=block_rows,
        BLOCK_PIXELS=block_pixels,
    )
    launch(
        group_means_kernel,
        (B * num_groups,),
        input.device,
        *sums,
        norm_weight,
        means,
        width,
        num_groups,
        GROUP_SIZE=group_size,
        BLOCK=256,
    )
    launch(
        apply_backward_kernel,
        (B * num_groups * blocks,),
        input.device,
        output_gradient,
        input,
        statistics[0],
        statistics[1],
        means,
        norm_weight,
        norm_bias,
        input_gradient,
        blocks,
        width,
        S,
        num_groups,
        *bounds,
        ACTIVATION=activation.function,
        ACTIVATION_GRADIENT=activation.gradient,
        FINAL_GRADIENT=final.gradient,
        GROUP_SIZE=group_size,
        **places,
    )
    add_up(sums, vector_gradients)
