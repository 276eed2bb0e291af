"""The sums over images that the gradient of their group norm takes, in one launch.

They are each group's, and those of each channel: the gradients of the operands from the norm on, and of what is added
right before it. Images are [B, C, S], as in ``image_tiles``.
"""

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
)
from triton_kernels.column_sums import add_up
from triton_kernels.grid import next_power_of_2
from triton_kernels.image_tiles import (
    ImageSumsConfig,
    Parts,
    as_image,
    channels_of_block,
    image_operands,
    is_in_part,
    is_last,
    launch_parts,
    load_tile,
    members,
    part_of_program,
    place_of_sample,
    store_of_channels,
    tile_of_image,
)
from triton_kernels.launch import wait_for_launch_before

#: Samples that a kernel's last program adds up. Of more, a launch of many programs does.
_MOST_SAMPLES = 128


@triton.jit
def sums_of_part(
    output_gradient,
    input,
    operands,
    statistics,
    targets,
    corner,
    end,
    c,
    real,
    channels,
    num_groups,
    KINDS: tl.constexpr,
    CHAIN: tl.constexpr,
    ADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Sums [BLOCK_C] over a part's pixels, for each of KINDS: of dy * normalized, of dy, of what ``steps_gradient``
    returns for the steps after the norm and, if ADDED, of normalized. dy is the gradient behind the norm's bias."""
    groups = corner[0].to(tl.int64) * num_groups + c // GROUP_SIZE
    mean = tl.load(statistics[0] + groups, mask=real, other=0.0)[:, None]
    rstd = tl.load(statistics[1] + groups, mask=real, other=0.0)[:, None]
    vectors = load_vectors(operands, c, real, CHAIN, 1, place_of_sample(corner, channels))
    sums = no_sums(tl.zeros((c.shape[0], BLOCK_S), tl.float32), KINDS)
    for pixel in tl.range(corner[2], end, BLOCK_S, num_stages=STAGES):
        place = (corner[0], corner[1], pixel)
        inside = is_in_part(real, pixel, end, FULL, BLOCK_S)
        loaded = load_tensors(vectors, place, inside, tile_of_image, CHAIN)
        values = load_tile(input, place, inside).to(tl.float32)
        dy = load_tile(output_gradient, place, inside).to(tl.float32)
        normalized = (apply_steps(values, loaded, CHAIN, 0, CHAIN.norm_place) - mean) * rstd
        y = apply_steps(normalized, loaded, CHAIN, CHAIN.norm_place, CHAIN.norm_place + 2)
        dy, of_after = steps_gradient(dy, y, loaded, CHAIN, CHAIN.norm_place + 2, len(CHAIN.steps))
        gradients = (dy * normalized, dy) + of_after
        if ADDED:
            gradients = gradients + (normalized,)
        sums = add_gradients(sums, gradients, targets, place, inside, tile_of_image, KINDS)
    totals = ()
    for i in tl.static_range(len(KINDS)):
        totals = totals + (tl.sum(sums[i], 1),)
    return totals


@triton.jit
def added_parts(
    partials,  # of a sample: [strips, len(KINDS), C]
    targets,
    c,
    real,
    channels,
    strips,
    KINDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The strips' sums [BLOCK_C] together, for each of KINDS that is wanted.

    All loads of a block come before the first sum: the device waits for this program, which pays one latency so.
    """
    totals = no_sums(tl.zeros((c.shape[0],), tl.float32), KINDS)
    for first in tl.range(0, strips, BLOCK_T, num_stages=1):
        strip = first + tl.arange(0, BLOCK_T)
        inside = (strip < strips)[:, None] & real[None, :]
        loaded, found = (), ()
        for i in tl.static_range(len(KINDS)):
            if i < 2 or (KINDS[i] == "vector" and targets[i] is not None):
                source = partials + (strip.to(tl.int64)[:, None] * len(KINDS) + i) * channels + c[None, :]
                loaded = loaded + (tl.load(source, mask=inside, other=0.0, cache_modifier=".cg"),)
            else:
                loaded = loaded + (totals[i][None, :],)
        for i in tl.static_range(len(KINDS)):
            found = found + (totals[i] + tl.sum(loaded[i], 0),)
        totals = found
    return totals


@triton.jit
def add_up_samples(targets, totals, samples, c, real, channels, KINDS: tl.constexpr, BLOCK_T: tl.constexpr):
    """totals[i] [C] = the sum over the samples of targets[i] [B, C], in float64: there are few of them."""
    sums = no_sums(tl.zeros((c.shape[0],), tl.float64), KINDS)
    for first in tl.range(0, samples, BLOCK_T, num_stages=1):
        sample = first + tl.arange(0, BLOCK_T)
        inside = (sample < samples)[:, None] & real[None, :]
        loaded, found = (), ()
        for i in tl.static_range(len(KINDS)):  # as in added_parts
            if totals[i] is not None:
                source = targets[i] + sample.to(tl.int64)[:, None] * channels + c[None, :]
                loaded = loaded + (tl.load(source, mask=inside, other=0.0, cache_modifier=".cg"),)
            else:
                loaded = loaded + (sums[i][None, :],)
        for i in tl.static_range(len(KINDS)):
            found = found + (sums[i] + tl.sum(loaded[i].to(tl.float64), 0),)
        sums = found
    for i in tl.static_range(len(KINDS)):
        if totals[i] is not None:
            result = sums[i].to(tl.float32)  # there is no conversion from float64 to 16 bits
            tl.store(totals[i] + c, result.to(totals[i].dtype.element_ty), mask=real)


@triton.jit
def of_channel(values, real, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, LANES: tl.constexpr):
    """Of values of a unit's groups [LANES] those of a block's channels [BLOCK_C]."""
    if GROUP_SIZE == 1:
        return values
    return tl.sum(tl.where(members(real, GROUPS, GROUP_SIZE, LANES), values[:, None], 0.0), 0)


@triton.jit
def sums_kernel(
    output_gradient,  # an image
    input,  # an image
    operands,  # of the chain's steps
    statistics,  # mean and rstd: [B * G]
    means,  # [B * G] each: of norm_weight * dy * normalized, the projection, and of norm_weight * dy
    of_channels,  # None, or -rstd**2 * projection and -rstd * mean of norm_weight * dy: [B, C]
    targets,  # of the gradients of the norm's weight and bias, of the operands after it (which may be images) and, if
    # ADDED, of what is added right before it: [B, C]
    totals,  # the sums of these over the samples [C], where ADDS_UP
    partials,  # [B, strips, len(KINDS), C]
    counters,  # [B, units] where units have several parts, and [units] where there are totals
    num_groups,
    samples,
    sizes,  # channels, pixels of a sample (in units of PIXEL_UNIT), units, strips, tiles of a strip
    KINDS: tl.constexpr,
    CHAIN: tl.constexpr,
    ADDED: tl.constexpr,
    ADDS_UP: tl.constexpr,
    GROUPS: tl.constexpr,  # and the following: as in Parts
    GROUP_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    SOLE: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
    PIXEL_UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,  # parts that are added up at a time
    BLOCK_B: tl.constexpr,  # samples that are added up at a time
    BLOCK_J: tl.constexpr,  # channels of a group that are stored at a time
):
    """The sums over an image that its gradient takes, and the gradients of the operands from the norm on."""
    wait_for_launch_before()
    corner, end, unit, strip, block = part_of_program(
        sizes, PIXEL_UNIT, GROUPS, GROUP_SIZE, BLOCKS, BLOCK_C, BLOCK_S, INDEX
    )
    UNIT: tl.constexpr = GROUPS * GROUP_SIZE
    channels, strips = sizes[0], sizes[3]
    first = unit.to(INDEX) * UNIT
    c, real = channels_of_block(first, block, channels, UNIT, BLOCK_C)
    sums = sums_of_part(
        output_gradient, input, operands, statistics, targets, corner, end, c, real, channels, num_groups,
        KINDS, CHAIN, ADDED, GROUP_SIZE, STAGES, FULL, BLOCK_S,
    )  # fmt: skip
    sample = corner[0].to(tl.int64)
    finishes = True
    if not SOLE:
        of_sample = partials + sample * strips * len(KINDS) * channels
        for i in tl.static_range(len(KINDS)):
            if i < 2 or (KINDS[i] == "vector" and targets[i] is not None):
                row = strip.to(tl.int64) * len(KINDS) + i
                tl.store(of_sample + row * channels + c, sums[i], mask=real)
        finishes = is_last(counters + (sample * sizes[2] + unit), strips * BLOCKS)
    if finishes:
        projection = tl.zeros((LANES,), tl.float64)
        gradient_mean = tl.zeros((LANES,), tl.float64)
        for each in tl.range(0, BLOCKS, num_stages=1):
            c, real = channels_of_block(first, each, channels, UNIT, BLOCK_C)
            if not SOLE:
                sums = added_parts(of_sample, targets, c, real, channels, strips, KINDS, BLOCK_T)
            weight = tl.full((BLOCK_C,), 1.0, tl.float32)
            if operands[CHAIN.norm_place] is not None:
                weight = tl.load(operands[CHAIN.norm_place] + c, mask=real, other=0.0).to(tl.float32)
            weighted = (weight.to(tl.float64) * sums[0], weight.to(tl.float64) * sums[1])
            if GROUP_SIZE == 1:
                projection += weighted[0]
                gradient_mean += weighted[1]
            else:
                member = members(real, GROUPS, GROUP_SIZE, LANES)
                projection += tl.sum(tl.where(member, weighted[0][None, :], 0.0), 1)
                gradient_mean += tl.sum(tl.where(member, weighted[1][None, :], 0.0), 1)
            for i in tl.static_range(len(KINDS) - ADDED):
                if KINDS[i] == "vector" and targets[i] is not None:
                    tl.store(targets[i] + sample * channels + c, sums[i].to(targets[i].dtype.element_ty), mask=real)
        pixels = (tl.cast(sizes[1], INDEX) * PIXEL_UNIT).to(tl.float32)
        if ADDED:
            LAST: tl.constexpr = len(KINDS) - 1
            for each in tl.range(0, BLOCKS, num_stages=1):
                c, real = channels_of_block(first, each, channels, UNIT, BLOCK_C)
                if BLOCKS > 1:
                    sums = added_parts(of_sample, targets, c, real, channels, strips, KINDS, BLOCK_T)
                gradient = sums[1].to(tl.float64)
                if operands[CHAIN.norm_place] is not None:
                    gradient *= tl.load(operands[CHAIN.norm_place] + c, mask=real, other=0.0).to(tl.float64)
                gradient -= of_channel(gradient_mean, real, GROUPS, GROUP_SIZE, LANES) / GROUP_SIZE
                of_values = of_channel(projection, real, GROUPS, GROUP_SIZE, LANES) / GROUP_SIZE
                gradient -= of_values * (sums[LAST] / pixels).to(tl.float64)
                rstd = tl.load(statistics[1] + sample * num_groups + c // GROUP_SIZE, mask=real, other=0.0)
                target = targets[LAST] + sample * channels + c
                tl.store(target, (gradient.to(tl.float32) * rstd).to(target.dtype.element_ty), mask=real)
        width = pixels * GROUP_SIZE
        projection, gradient_mean = projection.to(tl.float32) / width, gradient_mean.to(tl.float32) / width
        group = unit * GROUPS + tl.arange(0, LANES)
        inside = (tl.arange(0, LANES) < GROUPS) & (group < num_groups)
        target = sample * num_groups + group
        tl.store(means[0] + target, projection, mask=inside)
        tl.store(means[1] + target, gradient_mean, mask=inside)
        if of_channels is not None:
            rstd = tl.load(statistics[1] + target, mask=inside, other=0.0)
            of_group = (-rstd * (rstd * projection), -rstd * gradient_mean)
            store_of_channels(
                of_channels,
                of_group,
                None,
                corner[0],
                unit * GROUPS,
                num_groups,
                GROUPS,
                GROUP_SIZE,
                LANES,
                BLOCK_J,
                operands,
                CHAIN,
                0,
                0,
            )
        if ADDS_UP:
            counter = counters + unit
            if not SOLE:
                counter += samples.to(tl.int64) * sizes[2]
            if is_last(counter, samples):
                for each in tl.range(0, BLOCKS, num_stages=1):
                    c, real = channels_of_block(first, each, channels, UNIT, BLOCK_C)
                    add_up_samples(targets, totals, samples, c, real, channels, KINDS, BLOCK_B)


def image_sums(
    output_gradient: torch.Tensor,
    input: torch.Tensor,
    statistics: torch.Tensor,
    chain: Chain,
    operands: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    config: ImageSumsConfig,
    *,
    channels: Sequence[torch.Tensor] | None = None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """The means [2, B * G] over groups that the gradient of ``input`` takes, in float32: with dy the gradient behind
    the norm's bias, of norm_weight * dy * normalized and of norm_weight * dy.

    Both images are [B, C, S] with any strides. ``statistics`` are those of ``image_statistics``. ``gradients`` has one
    entry a step, None where not wanted. Those from the norm on are written: [C], [B, C] or an image, of any float
    dtype. ``channels`` are two of [B, C] in float32, k2 and k3 in
    input_gradient = dy * scale + (input - centre) * k2 + k3, with scale and centre of ``image_statistics``.
    ``added`` gets the gradient of what is added to each channel right before the norm, [C] or [B, C]: the sum of
    input_gradient over the pixels, rstd * (w * sum(dy) - pixels * means[1] - means[0] * sum(normalized)).
    """
    B, C, S = input.shape
    num_groups = statistics.shape[1] // max(1, B)
    means = torch.empty(2, B * num_groups, dtype=torch.float32, device=input.device)
    norm = chain.norm_place
    kept = [place for place in range(norm, len(chain.steps)) if place < norm + 2 or chain.has_gradient(place, operands)]
    kinds, wanted = chain.kinds(kept), [gradients[place] for place in kept]
    if added is not None:
        kinds, wanted = (*kinds, "vector"), [*wanted, added]
    vectors = [each if kind == "vector" else None for kind, each in zip(kinds, wanted, strict=True)]
    if input.numel() == 0:
        for each in vectors:
            if each is not None:
                nothing = torch.empty(*each.shape[:-1], 0, C, dtype=torch.float32, device=each.device)
                add_up([nothing], [each])
        return means
    group_size = C // num_groups
    parts = Parts.of(tuple(input.shape), group_size, config)
    totals = [None if each is None or each.ndim == 2 or B == 1 else each for each in vectors]
    of_samples = [
        None if each is None else torch.empty(B, C, dtype=torch.float32, device=each.device) for each in totals
    ]
    targets = [
        sums if sums is not None else as_image(each) if kind == "tensor" and each is not None else each
        for kind, sums, each in zip(kinds, of_samples, wanted, strict=True)
    ]
    adds_up = B <= _MOST_SAMPLES and any(each is not None for each in totals)
    partials = None
    if parts.of_unit > 1:
        partials = torch.empty(B, parts.strips, len(kinds), C, dtype=torch.float32, device=input.device)
    launch_parts(
        sums_kernel,
        [input, output_gradient],
        group_size,
        parts,
        config,
        as_image(output_gradient),
        as_image(input),
        image_operands(chain, operands),
        statistics.unbind(),
        means.unbind(),
        channels and tuple(channels),
        tuple(targets),
        tuple(totals),
        partials,
        parts.counters(B, over_samples=adds_up),
        num_groups,
        B,
        is_pipelined=not chain.takes_tensors,  # there are no registers for it (compute capability 8.0)
        KINDS=kinds,
        CHAIN=chain,
        ADDED=added is not None,
        ADDS_UP=adds_up,
        BLOCK_T=min(next_power_of_2(parts.strips), max(1, 1024 * config.num_warps // parts.block_c)),
        BLOCK_B=min(next_power_of_2(B), max(1, 1024 * config.num_warps // parts.block_c)),
        BLOCK_J=min(next_power_of_2(group_size), max(1, 2048 // parts.lanes)),
    )
    if not adds_up:
        add_up(of_samples, totals)
    return means
