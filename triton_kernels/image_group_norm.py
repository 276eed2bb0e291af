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
from triton_kernels.launch import wait_for_launch_before
from triton_kernels.pointwise import identity


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
    num_groups,
    channels,
    pixels,  # of a sample, in units of PIXEL_UNIT
    strips,
    CHAIN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
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
    groups = load_groups(statistics, corner, c, real, channels, num_groups, GROUP_SIZE, BLOCK_C)
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    if STRIP == 1:  # a loop of one round would take a float32 tile that is transposed 1.4 times as long (H200)
        apply_to_tile(input, output, corner, is_inside(real, corner[2], pixels, BLOCK_S), vectors, groups, CHAIN)
    else:
        end = tl.minimum(corner[2] + STRIP * BLOCK_S, pixels)
        for pixel in tl.range(corner[2], end, BLOCK_S, num_stages=STAGES):
            place = (corner[0], corner[1], pixel)
            apply_to_tile(input, output, place, is_inside(real, pixel, pixels, BLOCK_S), vectors, groups, CHAIN)


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


def image_group_norm(
    input: torch.Tensor,
    statistics: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    config: ImageNormConfig,
    *,
    output: torch.Tensor,
) -> None:
    """output = the chain of ``input``, both [B, C, S] with any strides; ``operands`` has one entry a step.

    ``statistics`` are those of ``image_statistics``.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    num_groups = statistics.shape[1] // B
    launch_tiles(
        apply_kernel,
        input,
        config.strips(S),
        config,
        as_image(input),
        image_operands(chain, operands),
        as_image(output),
        statistics.unbind(),
        num_groups,
        CHAIN=chain,
        GROUP_SIZE=C // num_groups,
        STRIP=config.strip,
        STAGES=config.stages(input, chain),
    )


def empty_sums(
    chain: Chain, gradients: Sequence[torch.Tensor | None], input: torch.Tensor, config: ImageNormConfig
) -> list[torch.Tensor | None]:
    """What ``image_group_norm_backward`` writes for ``add_up_sums``: one entry for each step before the norm.

    A vector's are the sums over each strip's pixels, [B, strips, C] in float32. Where there is one for each of its
    values, they are the gradient itself, if that is float32. A tensor's gradient is written as it is.
    """
    B, C, S = input.shape
    shape = (B, config.strips(S), C)
    sums = list(gradients[: chain.norm_place])
    for place, (kind, gradient) in enumerate(zip(chain.kinds(range(len(sums))), sums, strict=True)):
        if kind == "vector" and gradient is not None:
            if _holds_sums(gradient, shape):
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
        for kind, partial, gradient in zip(chain.kinds(range(len(sums))), sums, gradients, strict=False)
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


def image_group_norm_backward(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    statistics: torch.Tensor,
    means: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    config: ImageNormConfig,
    *,
    input_gradient: torch.Tensor,
    sums: Sequence[torch.Tensor | None],
    stored: triton.runtime.JITFunction = identity,
) -> None:
    """The gradient of ``image_group_norm``, through its statistics too. All images are [B, C, S] with any strides.

    ``means`` are those of ``image_sums``. ``sums`` are those of ``empty_sums``, or of some samples of them. Those of
    each of the chain's biases are of the gradient at ``input``, whether or not it is among ``operands``.
    ``input_gradient`` becomes ``stored`` of that gradient, a function as ``triton_kernels.pointwise`` describes them.
    """
    if input.numel() == 0:
        return
    B, C, S = input.shape
    num_groups = statistics.shape[1] // B
    kept = [place for place in range(chain.norm_place) if chain.has_gradient(place, operands)]
    images = image_operands(chain, [*sums, *[None] * (len(chain.steps) - len(sums))])
    launch_tiles(
        apply_backward_kernel,
        input,
        config.strips(S),
        config,
        as_image(output_gradient),
        as_image(input),
        image_operands(chain, operands),
        as_image(input_gradient),
        (*statistics.unbind(), *means.unbind()),
        tuple(images[place] for place in kept),
        num_groups,
        KINDS=chain.kinds(kept),
        CHAIN=chain,
        STORED=stored,
        GROUP_SIZE=C // num_groups,
        STRIP=config.strip,
        STAGES=config.stages(input, chain),
    )
