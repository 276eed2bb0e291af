"""Group norm of images: passes over tiles of channels and pixels, forward and backward.

Images are [B, C, S], as in ``image_tiles``. The statistics are those of ``image_statistics``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of, grid_of, second_place
from triton_kernels.image_statistics import merged_blocks
from triton_kernels.image_tiles import (
    ImageNormConfig,
    load_rows,
    size_unit,
    strides_in_units,
    tile_of_program,
    tile_offsets,
)
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import IDENTITY, Pointwise, identity


@triton.jit
def apply_kernel(
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    output,  # [B, C, S]
    output_strides,
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    tiles,
    num_groups,
    min_val,
    max_val,
    INPUT_UNITS: tl.constexpr,
    OUTPUT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """output = FINAL((ACTIVATION(input) - mean) * rstd * norm_weight + norm_bias); one tile per program."""
    wait_for_launch_before()
    pixels = pixels * PIXEL_UNIT
    sample, channel, pixel, c, inside = tile_of_program(tiles, channels, pixels, BLOCK_C, BLOCK_S)
    group = sample * num_groups + c // GROUP_SIZE
    source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    values = tl.load(input + source, mask=inside, other=0.0).to(tl.float32)
    values = ACTIVATION(values + load_rows(input_bias, c, c < channels, 0.0), 0.0, 0.0)
    normalized = (values - load_rows(mean, group, c < channels, 0.0)) * load_rows(rstd, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    y = FINAL(normalized * weight + shift, min_val, max_val)
    target = tile_offsets(output_strides, OUTPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
    tl.store(output + target, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def channel_sums_kernel(
    output_gradient,  # [B, C, S]
    gradient_strides,
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    mean,  # [B * G]
    rstd,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    weight_sums,  # [B, strips, C]: sums over a strip's pixels of dy * normalized
    shift_sums,  # [B, strips, C]: and of dy
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    num_groups,
    min_val,
    max_val,
    GRADIENT_UNITS: tl.constexpr,
    INPUT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STRIP: tl.constexpr,
):
    """A strip's part of the gradients of the norm's weight and bias. A strip is STRIP tiles of BLOCK_S pixels."""
    wait_for_launch_before()
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // strips
    first_pixel = tl.program_id(0) % strips * (STRIP * BLOCK_S)
    channel = second_place() * BLOCK_C
    c = channel + tl.arange(0, BLOCK_C)
    group = sample * num_groups + c // GROUP_SIZE
    group_mean = load_rows(mean, group, c < channels, 0.0)
    group_rstd = load_rows(rstd, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    before = load_rows(input_bias, c, c < channels, 0.0)
    weight_sum = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    shift_sum = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for pixel in range(first_pixel, tl.minimum(first_pixel + STRIP * BLOCK_S, pixels), BLOCK_S):
        inside = (c < channels)[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
        source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        values = ACTIVATION(tl.load(input + source, mask=inside, other=0.0).to(tl.float32) + before, 0.0, 0.0)
        normalized = (values - group_mean) * group_rstd
        source = tile_offsets(gradient_strides, GRADIENT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        dy = tl.load(output_gradient + source, mask=inside, other=0.0).to(tl.float32)
        dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
        weight_sum += tl.where(inside, dy * normalized, 0.0)
        shift_sum += tl.where(inside, dy, 0.0)
    target = tl.program_id(0).to(tl.int64) * channels + c
    tl.store(weight_sums + target, tl.sum(weight_sum, 1), mask=c < channels)
    tl.store(shift_sums + target, tl.sum(shift_sum, 1), mask=c < channels)


@triton.jit
def group_means_kernel(
    weight_sums,  # [B, strips, C]
    shift_sums,  # [B, strips, C]
    norm_weight,  # [C] or None
    projection,  # [B * G]: mean of norm_weight * dy * normalized
    gradient_mean,  # [B * G]: mean of norm_weight * dy
    strips,
    channels,
    pixels,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A group's means over its channels and pixels, from the sums of its strips."""
    wait_for_launch_before()
    sample = (tl.program_id(0) // num_groups).to(tl.int64)
    first_channel = tl.program_id(0) % num_groups * GROUP_SIZE
    projections = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    means = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for channel in range(0, GROUP_SIZE, BLOCK_C):
        c = channel + tl.arange(0, BLOCK_C)
        weight = tl.full((BLOCK_C,), 1.0, tl.float32)
        if norm_weight is not None:
            weight = tl.load(norm_weight + first_channel + c, mask=c < GROUP_SIZE, other=0.0).to(tl.float32)
        for strip in range(0, strips, BLOCK_T):
            t = strip + tl.arange(0, BLOCK_T)
            inside = (t < strips)[:, None] & (c < GROUP_SIZE)[None, :]
            source = (sample * strips + t)[:, None] * channels + (first_channel + c)[None, :]
            projections += weight[None, :] * tl.load(weight_sums + source, mask=inside, other=0.0)
            means += weight[None, :] * tl.load(shift_sums + source, mask=inside, other=0.0)
    width = tl.cast(pixels, tl.float32) * GROUP_SIZE
    tl.store(projection + tl.program_id(0), tl.sum(tl.sum(projections, 1), 0) / width)
    tl.store(gradient_mean + tl.program_id(0), tl.sum(tl.sum(means, 1), 0) / width)


@triton.jit
def apply_backward_kernel(
    output_gradient,  # [B, C, S]
    gradient_strides,
    input,  # [B, C, S]
    input_strides,
    input_bias,  # [C] or None: added to the input
    input_gradient,  # [B, C, S]
    result_strides,
    mean,  # [B * G]
    rstd,  # [B * G]
    projection,  # [B * G]
    gradient_mean,  # [B * G]
    norm_weight,  # [C] or None
    norm_bias,  # [C] or None
    bias_sums,  # [B, strips, C]: sums over a strip's pixels of what STORED takes; or None
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    num_groups,
    min_val,
    max_val,
    GRADIENT_UNITS: tl.constexpr,
    INPUT_UNITS: tl.constexpr,
    RESULT_UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACTIVATION_GRADIENT: tl.constexpr,
    FINAL_GRADIENT: tl.constexpr,
    STORED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STRIP: tl.constexpr,
):
    """input_gradient = STORED(ACTIVATION'(input) * rstd * (g - mean(g) - x * mean(g * x)))

    x is the normalised activated input, and g = norm_weight * dy.
    """
    wait_for_launch_before()
    pixels = pixels * PIXEL_UNIT
    sample = tl.program_id(0) // strips
    first_pixel = tl.program_id(0) % strips * (STRIP * BLOCK_S)
    channel = second_place() * BLOCK_C
    c = channel + tl.arange(0, BLOCK_C)
    group = sample * num_groups + c // GROUP_SIZE
    group_mean = load_rows(mean, group, c < channels, 0.0)
    group_rstd = load_rows(rstd, group, c < channels, 0.0)
    group_projection = load_rows(projection, group, c < channels, 0.0)
    group_gradient_mean = load_rows(gradient_mean, group, c < channels, 0.0)
    weight = load_rows(norm_weight, c, c < channels, 1.0)
    shift = load_rows(norm_bias, c, c < channels, 0.0)
    before = load_rows(input_bias, c, c < channels, 0.0)
    total = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    for pixel in range(first_pixel, tl.minimum(first_pixel + STRIP * BLOCK_S, pixels), BLOCK_S):
        inside = (c < channels)[:, None] & (tl.arange(0, BLOCK_S) < pixels - pixel)[None, :]
        source = tile_offsets(input_strides, INPUT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        values = tl.load(input + source, mask=inside, other=0.0).to(tl.float32) + before
        normalized = (ACTIVATION(values, 0.0, 0.0) - group_mean) * group_rstd
        source = tile_offsets(gradient_strides, GRADIENT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        dy = tl.load(output_gradient + source, mask=inside, other=0.0).to(tl.float32)
        dy = FINAL_GRADIENT(dy, normalized * weight + shift, min_val, max_val)
        gradient = group_rstd * (dy * weight - group_gradient_mean - normalized * group_projection)
        gradient = ACTIVATION_GRADIENT(gradient, values, 0.0, 0.0)
        if bias_sums is not None:
            total += tl.where(inside, gradient, 0.0)
        target = tile_offsets(result_strides, RESULT_UNITS, sample, channel, pixel, BLOCK_C, BLOCK_S)
        stored = STORED(gradient, 0.0, 0.0)
        tl.store(input_gradient + target, stored.to(input_gradient.dtype.element_ty), mask=inside)
    if bias_sums is not None:
        target = tl.program_id(0).to(tl.int64) * channels + c
        tl.store(bias_sums + target, tl.sum(total, 1), mask=c < channels)


def image_group_norm(
    input: torch.Tensor,
    statistics: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    config: ImageNormConfig,
    *,
    output: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> None:
    """output = final((activation(input) - mean) * rstd * norm_weight + norm_bias), both [B, C, S] with any strides.

    ``statistics`` are those of ``image_statistics``. ``input_bias`` [C] is added to the input first.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    mean, rstd = statistics.unbind()
    num_groups = mean.numel() // B
    tiles = config.tiles(S)
    input_strides, input_units = strides_in_units(input.stride())
    output_strides, output_units = strides_in_units(output.stride())
    launch(
        apply_kernel,
        grid_of(B * tiles, blocks_of(C, config.block_c)),
        input.device,
        input,
        input_strides,
        input_bias,
        output,
        output_strides,
        mean,
        rstd,
        norm_weight,
        norm_bias,
        C,
        S // size_unit(S),
        tiles,
        num_groups,
        *bounds,
        INPUT_UNITS=input_units,
        OUTPUT_UNITS=output_units,
        ACTIVATION=activation.function,
        FINAL=final.function,
        GROUP_SIZE=C // num_groups,
        PIXEL_UNIT=size_unit(S),
        BLOCK_C=config.block_c,
        BLOCK_S=config.block_s,
        num_warps=config.num_warps,
    )


def image_group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    statistics: torch.Tensor,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    config: ImageNormConfig,
    *,
    input_gradient: torch.Tensor,
    norm_sums: Sequence[torch.Tensor],
    bias_sums: torch.Tensor | None = None,
    input_bias: torch.Tensor | None = None,
    activation: Pointwise = IDENTITY,
    final: Pointwise = IDENTITY,
    bounds: tuple[float, float] = (0.0, 0.0),
    stored: triton.runtime.JITFunction = identity,
) -> None:
    """The gradient of ``image_group_norm`` at ``input``, through its statistics too.

    All images are [B, C, S] with any strides. ``norm_sums``, two of [B, config.strips(S), C], become the partial sums
    of the gradients of norm_weight and norm_bias. ``bias_sums`` [B, config.strips(S), C] become those of the gradient
    at ``input`` over the pixels (float32). ``input_gradient`` becomes ``stored`` of that gradient, a function as
    ``triton_kernels.pointwise`` describes them.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    mean, rstd = statistics.unbind()
    num_groups = mean.numel() // B
    group_size = C // num_groups
    strips = config.strips(S)
    block_c, block_t = merged_blocks(group_size, strips)
    projection, gradient_mean = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device).unbind()
    gradient_strides, gradient_units = strides_in_units(output_gradient.stride())
    input_strides, input_units = strides_in_units(input.stride())
    result_strides, result_units = strides_in_units(input_gradient.stride())
    # The arguments that both passes over the images share.
    images = (output_gradient, gradient_strides, input, input_strides, input_bias)
    sizes = (C, S // size_unit(S), strips, num_groups, *bounds)
    options = {
        "GRADIENT_UNITS": gradient_units,
        "INPUT_UNITS": input_units,
        "ACTIVATION": activation.function,
        "FINAL_GRADIENT": final.gradient,
        "GROUP_SIZE": group_size,
        "PIXEL_UNIT": size_unit(S),
        "BLOCK_C": config.block_c,
        "BLOCK_S": config.block_s,
        "STRIP": config.strip,
        "num_warps": config.num_warps,
    }
    launch(
        channel_sums_kernel,
        grid_of(B * strips, blocks_of(C, config.block_c)),
        input.device,
        *images,
        mean,
        rstd,
        norm_weight,
        norm_bias,
        *norm_sums,
        *sizes,
        **options,
    )
    launch(
        group_means_kernel,
        (B * num_groups,),
        input.device,
        *norm_sums,
        norm_weight,
        projection,
        gradient_mean,
        strips,
        C,
        S,
        num_groups,
        GROUP_SIZE=group_size,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    launch(
        apply_backward_kernel,
        grid_of(B * strips, blocks_of(C, config.block_c)),
        input.device,
        *images,
        input_gradient,
        result_strides,
        mean,
        rstd,
        projection,
        gradient_mean,
        norm_weight,
        norm_bias,
        bias_sums,
        *sizes,
        RESULT_UNITS=result_units,
        ACTIVATION_GRADIENT=activation.gradient,
        STORED=stored,
        **options,
    )
