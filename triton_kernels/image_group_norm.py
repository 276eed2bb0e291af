"""Group norm of images within a chain: passes over tiles of channels and pixels, forward and backward.

Images are [B, C, S], as in ``image_tiles``. The statistics are those of ``image_statistics``. Operands that are vectors
are over the channels, of all samples or of each; those that are tensors are images. Matrices are images of one pixel.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.chain import (
    Chain,
    add_gradients,
    apply_steps,
    load_tensors,
    load_vectors,
    no_sums,
    steps_gradient,
    store_gradients,
)
from triton_kernels.column_sums import add_up
from triton_kernels.device import multiprocessor_count
from triton_kernels.grid import blocks_of
from triton_kernels.image_statistics import PartialStatistics, merged_blocks, merged_group
from triton_kernels.image_tiles import (
    ImageNormConfig,
    as_image,
    image_operands,
    is_inside,
    launch_tiles,
    load_tile,
    place_of_program,
    place_of_sample,
    store_tile,
    tile_of_image,
)
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.pointwise import identity

#: Programs of a multiprocessor that run at once, and numbers that each of them may merge.
_PROGRAMS_AT_ONCE = 8
_MOST_MERGED = 256


@triton.jit
def load_groups(vectors, place, c, real, channels, num_groups, GROUP_SIZE: tl.constexpr, BLOCK_C: tl.constexpr):
    """The numbers of each channel's group, as columns; or those of the one group that the tile is in."""
    sample, channel, pixel = place
    loaded = ()
    for i in tl.static_range(len(vectors)):
        groups = vectors[i] + sample * num_groups
        if GROUP_SIZE % BLOCK_C == 0 and BLOCK_C > 64:  # of fewer channels, it would take more registers
            loaded = loaded + (tl.load(groups + channel // GROUP_SIZE, mask=channel < channels, other=0.0),)
        else:
            loaded = loaded + (tl.expand_dims(tl.load(groups + c // GROUP_SIZE, mask=real, other=0.0), 1),)
    return loaded


@triton.jit
def apply_to_tile(input, output, place, inside, vectors, groups, CHAIN: tl.constexpr):
    """output = CHAIN of the input for a tile. ``groups`` has the mean and the rstd of its channels' groups."""
    mean, rstd = groups
    loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
    values = load_tile(input, place, inside).to(tl.float32)
    values = apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place)
    normalized = (values - mean) * rstd
    store_tile(output, place, inside, apply_steps(normalized, loaded, CHAIN, CHAIN.norm_place, len(CHAIN.steps)))


@triton.jit
def apply_kernel(
    input,  # an image
    operands,  # of the chain's steps
    output,  # an image
    statistics,  # mean and rstd: [B * G]
    partials,  # None, or what they are made of here: as for merged_group
    places,  # of a sample, in partials
    eps,
    num_groups,
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FOLD: tl.constexpr,  # channels that are one in partials
    MERGED: tl.constexpr,  # partials that are merged at a time: channels and places
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """output = CHAIN of the input; a strip of STRIP tiles of BLOCK_S pixels per program."""
    wait_for_launch_before()
    pixels = tl.cast(pixels, INDEX) * PIXEL_UNIT
    corner, c, real = place_of_program(channels, strips, STRIP * BLOCK_S, BLOCK_C, INDEX)
    if partials is None:
        groups = load_groups(statistics, corner, c, real, channels, num_groups, GROUP_SIZE, BLOCK_C)
    else:
        group = corner[1] // GROUP_SIZE
        width = pixels.to(tl.float32) * GROUP_SIZE
        groups = merged_group(
            partials, corner[0], group, places, channels // FOLD, width, eps, GROUP_SIZE // FOLD, MERGED[1], MERGED[0]
        )
        if (corner[2] == 0) & (corner[1] % GROUP_SIZE == 0):
            tl.store(statistics[0] + corner[0] * num_groups + group, groups[0])
            tl.store(statistics[1] + corner[0] * num_groups + group, groups[1])
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    if STRIP == 1:  # a loop of one round would take a float32 tile that is transposed 1.4 times as long (H200)
        apply_to_tile(input, output, corner, is_inside(real, corner[2], pixels, BLOCK_S), vectors, groups, CHAIN)
    else:
        end = tl.minimum(corner[2] + STRIP * BLOCK_S, pixels)
        for pixel in tl.range(corner[2], end, BLOCK_S, num_stages=STAGES):
            place = (corner[0], corner[1], pixel)
            apply_to_tile(input, output, place, is_inside(real, pixel, pixels, BLOCK_S), vectors, groups, CHAIN)


@triton.jit
def last_sums_kernel(
    output_gradient,  # an image
    input,  # an image
    operands,  # of the chain's steps
    statistics,  # mean and rstd: [B * G]
    targets,  # of the gradients of the norm's weight and bias and of the operands after it: [B, strips, C], or an image
    num_groups,
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    KINDS: tl.constexpr,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A strip's part of the gradients of the operands from the norm on. A strip is STRIP tiles of BLOCK_S pixels."""
    wait_for_launch_before()
    pixels = tl.cast(pixels, INDEX) * PIXEL_UNIT
    corner, c, real = place_of_program(channels, strips, STRIP * BLOCK_S, BLOCK_C, INDEX)
    mean, rstd = load_groups(statistics, corner, c, real, channels, num_groups, GROUP_SIZE, BLOCK_C)
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    sums = no_sums(tl.zeros((BLOCK_C, BLOCK_S), tl.float32), KINDS)
    for pixel in tl.range(corner[2], tl.minimum(corner[2] + STRIP * BLOCK_S, pixels), BLOCK_S, num_stages=STAGES):
        place = (corner[0], corner[1], pixel)
        inside = is_inside(real, pixel, pixels, BLOCK_S)
        loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
        values = load_tile(input, place, inside).to(tl.float32)
        dy = load_tile(output_gradient, place, inside).to(tl.float32)
        normalized = (apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place) - mean) * rstd
        y = apply_steps(normalized, loaded, CHAIN, CHAIN.norm_place, CHAIN.norm_place + 2)
        dy, of_after = steps_gradient(dy, y, loaded, CHAIN, CHAIN.norm_place + 2, len(CHAIN.steps))
        gradients = (dy * normalized, dy) + of_after
        sums = add_gradients(sums, gradients, targets, place, inside, tile_of_image, KINDS)
    store_gradients(sums, targets, tl.program_id(0).to(tl.int64) * channels + c, real, 1, KINDS)


@triton.jit
def group_means_kernel(
    weight_sums,  # [B, strips, C]: sums over a strip's pixels of dy * normalized
    shift_sums,  # [B, strips, C]: and of dy
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
    first_channel = (tl.program_id(0) % num_groups).to(tl.int64) * GROUP_SIZE
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
    output_gradient,  # an image
    input,  # an image
    operands,  # of the chain's steps
    input_gradient,  # an image
    statistics,  # mean, rstd, projection and gradient_mean: [B * G]
    targets,  # of the gradients of the operands before the norm: [B, strips, C], or an image
    num_groups,
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    KINDS: tl.constexpr,
    CHAIN: tl.constexpr,
    STORED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """input_gradient = STORED(dz), and a strip's part of the gradients of the operands before the norm.

    With a the value before the norm, x = (a - mean) * rstd and dx the gradient at x:
    da = rstd * (dx - mean(dx) - x * mean(dx * x)), with means over each group.
    """
    wait_for_launch_before()
    pixels = tl.cast(pixels, INDEX) * PIXEL_UNIT
    corner, c, real = place_of_program(channels, strips, STRIP * BLOCK_S, BLOCK_C, INDEX)
    groups = load_groups(statistics, corner, c, real, channels, num_groups, GROUP_SIZE, BLOCK_C)
    mean, rstd, projection, gradient_mean = groups
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    sums = no_sums(tl.zeros((BLOCK_C, BLOCK_S), tl.float32), KINDS)
    for pixel in tl.range(corner[2], tl.minimum(corner[2] + STRIP * BLOCK_S, pixels), BLOCK_S, num_stages=STAGES):
        place = (corner[0], corner[1], pixel)
        inside = is_inside(real, pixel, pixels, BLOCK_S)
        loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
        z = load_tile(input, place, inside).to(tl.float32)
        dy = load_tile(output_gradient, place, inside).to(tl.float32)
        normalized = (apply_steps(z, loaded, CHAIN, 0, CHAIN.norm_place) - mean) * rstd
        dx, of_last = steps_gradient(dy, normalized, loaded, CHAIN, CHAIN.norm_place, len(CHAIN.steps))
        dz = rstd * (dx - gradient_mean - normalized * projection)
        dz, gradients = steps_gradient(dz, z, loaded, CHAIN, 0, CHAIN.norm_place)
        sums = add_gradients(sums, gradients, targets, place, inside, tile_of_image, KINDS)
        store_tile(input_gradient, place, inside, STORED(dz, None))
    store_gradients(sums, targets, tl.program_id(0).to(tl.int64) * channels + c, real, 1, KINDS)


def merges(input: torch.Tensor, num_groups: int, config: ImageNormConfig, partials: PartialStatistics) -> bool:
    """Whether ``image_group_norm`` does well to merge the statistics itself, which saves a launch.

    Each tile is in one group, all programs run at once, and what each of them merges again is little.
    """
    B, C, S = input.shape
    programs = B * config.strips(S) * blocks_of(C, config.block_c)
    numbers = partials.means[0].numel() // num_groups if B else 0
    return (
        C // num_groups % config.block_c == 0
        and programs <= _PROGRAMS_AT_ONCE * multiprocessor_count(input.device)
        and numbers <= _MOST_MERGED
    )


def image_group_norm(
    input: torch.Tensor,
    statistics: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    config: ImageNormConfig,
    *,
    output: torch.Tensor,
    partials: PartialStatistics | None = None,
    eps: float = 0.0,
) -> None:
    """output = the chain of ``input``, both [B, C, S] with any strides; ``operands`` has one entry a step.

    ``statistics`` are those of ``image_statistics``. With ``partials``, they are written: merged from these.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    num_groups = statistics.shape[1] // B
    places = partials.counts.shape[1] if partials else 0
    fold = partials.fold if partials else 1
    launch_tiles(
        apply_kernel,
        input,
        config.strips(S),
        config,
        as_image(input),
        image_operands(chain, operands),
        as_image(output),
        statistics.unbind(),
        partials and partials.tensors,
        places,
        eps,
        num_groups,
        CHAIN=chain,
        GROUP_SIZE=C // num_groups,
        FOLD=fold,
        MERGED=merged_blocks(C // num_groups // fold, places) if partials else None,
        STRIP=config.strip,
        STAGES=config.stages(input, chain),
    )


def empty_sums(
    chain: Chain, gradients: Sequence[torch.Tensor | None], input: torch.Tensor, config: ImageNormConfig
) -> list[torch.Tensor | None]:
    """The sums that ``image_group_norm_backward`` writes for ``add_up_sums``. Both lists have one entry a step.

    A vector's are those over each strip's pixels, [B, strips, C] in float32. Where there is one for each of its values,
    they are the gradient itself, if that is float32. The norm's are always needed. A tensor's gradient is written as it
    is.
    """
    B, C, S = input.shape
    shape, norm = (B, config.strips(S), C), chain.norm_place
    sums = list(gradients)
    for place, (kind, gradient) in enumerate(zip(chain.kinds(range(len(sums))), gradients, strict=True)):
        if kind == "vector" and (gradient is not None or place in (norm, norm + 1)):
            if gradient is not None and _holds_sums(gradient, shape):
                sums[place] = gradient.view(shape)
            else:
                sums[place] = torch.empty(shape, dtype=torch.float32, device=input.device)
    return sums


def _holds_sums(gradient: torch.Tensor, shape: Sequence[int]) -> bool:
    return gradient.dtype == torch.float32 and gradient.numel() == math.prod(shape)


def add_up_sums(chain: Chain, sums: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    """Each vector's gradient, [C] or [B, C] in any float dtype or None where not wanted, becomes that of its ``sums``.

    Those of one value a channel are added up over the samples too.
    """
    pairs = [
        (partial, gradient)
        for kind, partial, gradient in zip(chain.kinds(range(len(sums))), sums, gradients, strict=True)
        if kind == "vector" and partial is not None and gradient is not None
        if not _holds_sums(gradient, partial.shape)
    ]
    of_samples = [pair for pair in pairs if pair[1].ndim == 2]
    if of_samples:
        add_up(*zip(*of_samples, strict=True))
    of_channels = [pair for pair in pairs if pair[1].ndim == 1]
    if not of_channels:
        return
    partials, wanted = zip(*of_channels, strict=True)
    B, strips, C = partials[0].shape
    if B > 1 and strips > 1:  # a sample a program first, as there may be many strips
        samples = [torch.empty(B, C, dtype=torch.float32, device=each.device) for each in partials]
        add_up(partials, samples)
        partials = samples
    add_up([each.view(-1, C) for each in partials], wanted)


def _targets(
    chain: Chain, operands: Sequence[Any], sums: Sequence[torch.Tensor | None], places: range
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Where a kernel stores the gradients that ``steps_gradient`` returns for some steps, and what they are (KINDS)."""
    norm = chain.norm_place
    images = image_operands(chain, sums)
    kept = [place for place in places if place in (norm, norm + 1) or chain.has_gradient(place, operands)]
    return tuple(images[place] for place in kept), chain.kinds(kept)


def image_group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    statistics: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    config: ImageNormConfig,
    *,
    input_gradient: torch.Tensor,
    sums: Sequence[torch.Tensor | None],
    stored: triton.runtime.JITFunction = identity,
) -> None:
    """Gradients of ``image_group_norm``, through its statistics too. All images are [B, C, S] with any strides.

    ``sums`` are those of ``empty_sums``, or of some samples of them. Those of each of the chain's biases are of the
    gradient at ``input``, whether or not it is among ``operands``. ``input_gradient`` becomes ``stored`` of that
    gradient, a function as ``triton_kernels.pointwise`` describes them.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    num_groups = statistics.shape[1] // B
    group_size = C // num_groups
    strips = config.strips(S)
    norm = chain.norm_place
    weight_sums, shift_sums = sums[norm : norm + 2]
    last_targets, last_kinds = _targets(chain, operands, sums, range(norm, len(chain.steps)))
    targets, kinds = _targets(chain, operands, sums, range(norm))
    block_c, block_t = merged_blocks(group_size, strips)
    means = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device).unbind()
    images = as_image(output_gradient), as_image(input), image_operands(chain, operands)
    options = {  # of both passes over the images
        "CHAIN": chain,
        "GROUP_SIZE": group_size,
        "STRIP": config.strip,
        "STAGES": config.stages(input, chain),
    }
    launch_tiles(
        last_sums_kernel,
        input,
        strips,
        config,
        *images,
        statistics.unbind(),
        last_targets,
        num_groups,
        KINDS=last_kinds,
        **options,
    )
    launch(
        group_means_kernel,
        (B * num_groups,),
        input.device,
        weight_sums,
        shift_sums,
        operands[norm],
        *means,
        strips,
        C,
        S,
        num_groups,
        GROUP_SIZE=group_size,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    launch_tiles(
        apply_backward_kernel,
        input,
        strips,
        config,
        *images,
        as_image(input_gradient),
        (*statistics.unbind(), *means),
        targets,
        num_groups,
        STORED=stored,
        KINDS=kinds,
        **options,
    )
