"""Group norms of images in graphs that a compiler gets: open ones, of which the sums alone are operators.

An operator that does all of a norm is closed: what Inductor would compute in the same kernels (casts, residuals, masks,
sums of gradients) becomes kernels of its own around it. Here one launch makes the statistics, one the sums of the
backward pass, and all that is elementwise is PyTorch's functions, which Inductor fuses with what stands around them::

    y = after((x - centre) * scale + bias)
    d = gradient of (x - centre) * scale + bias
    gradient of x = d * scale + (x - centre) * slope + shift

``x`` is what the steps before the norm make of the input, ``centre`` the mean of a channel's group and ``scale`` its
reciprocal standard deviation times the weight. slope = -rstd**3 * mean(d * weight * (x - centre)) and
shift = -rstd * mean(d * weight), over each group. Of an image's size the backward pass needs the input alone. Vectors
that are added right before the norm of a 16-bit image are subtracted from ``centre`` instead, once for each channel.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ops import plans
from ops.calls import Arguments, Call, parse
from ops.operators import (
    Spec,
    chain_of,
    define,
    layouts_of,
    present,
    read_specs,
    refuse_second_derivative,
    specs_of,
    spread,
    write_specs,
)
from ops.plan import Plan
from triton_kernels.chain import Chain
from triton_kernels.reference import apply_steps

Tensor = torch.Tensor


def opens(call: Call, input: Tensor) -> bool:
    """Whether the call is of an image's norm that may be open: no contraction, more than a pixel, and no tensor of the
    values' shape among the operands, which Inductor reads as well in its own kernels."""
    chain = call.chain
    is_norm = bool(chain.norm) and not (chain.contraction or chain.reduction or chain.takes_tensors)
    return is_norm and has_pixels(input) and input.numel() > 0


def has_pixels(image: Tensor) -> bool:
    """Whether it has more than one. (The product of open sizes would settle them.)"""
    return any(size != 1 for size in image.shape[2:])


def _of_statistics(call: Call) -> Call:
    """The call as far as its statistics depend on it: without what follows the norm's weight."""
    end = call.chain.norm_place + 1
    chain = Chain("", call.chain.before, call.chain.norm)
    return replace(call, chain=chain, numbers=(*call.numbers[:end], None), present=(*call.present[:end], False))


_plans = plans.Kept()


def _are_apart(image: Tensor) -> bool:
    """Whether vectors that are added right before the norm of this image are subtracted from the means instead: of one
    that is less precise than these."""
    return image.dtype.itemsize == 2


def _end_of_image(call: Call, image: Tensor) -> int:
    """The step from which on, up to the norm, nothing is done to the image."""
    return call.chain.norm_place - (call.chain.added_last if _are_apart(image) else 0)


def statistics_plan(text: str, tensors: Sequence[Tensor], are_apart: bool) -> Plan:
    """The plan that the operator ``statistics`` runs for these arguments."""
    key = text, are_apart, plans.settings(tensors[0]), *layouts_of(tensors)
    if (plan := _plans.get(key)) is None:
        call = parse(text)
        plan = _plans.add(key, plans.make_statistics(call, spread(call, tensors), are_apart))
    return plan


def sums_plan(text: str, wanted: str, gradient: Tensor, statistics: Tensor, tensors: Sequence[Tensor]) -> Plan:
    """The plan that the operator ``sums`` runs for these arguments."""
    key = text, wanted, plans.settings(gradient), *layouts_of([gradient, statistics, *tensors])
    if (plan := _plans.get(key)) is None:
        call = parse(text)
        made = plans.make_sums(call, gradient, statistics, spread(call, tensors), read_specs(wanted)[0])
        plan = _plans.add(key, made)
    return plan


def _fake_statistics(text: str, tensors: list[Tensor], are_apart: bool) -> list[Tensor]:
    samples, channels = tensors[0].shape[:2]
    return [tensors[0].new_empty(2 * samples * (parse(text).num_groups + channels), dtype=torch.float32)]


def _fake_sums(text: str, wanted: str, gradient: Tensor, statistics: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    factors = gradient.new_empty(2, *gradient.shape[:2], dtype=torch.float32)
    specs, _ = read_specs(wanted)
    return [factors, *(plans.empty_gradient(spec, gradient) for spec in specs if spec is not None)]


define(
    "statistics",
    "(str call, Tensor[] tensors, bool are_apart) -> Tensor",
    statistics_plan,
    _fake_statistics,
    "statistics",
    chain_of,
)
define(
    "sums",
    "(str call, str wanted, Tensor gradient, Tensor statistics, Tensor[] tensors) -> Tensor[]",
    sums_plan,
    _fake_sums,
    "sums",
    chain_of,
)


def apply(call: Call, row: tuple[Any, ...]) -> Tensor:
    """The call's result, of tensors in a row, while a compiler traces it."""
    row = row[:1] + tuple([each if each is None else each.contiguous() for each in row[1:]])
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in row):
        return _Open.apply(call, *row)
    return _forward(call, row)[0]


def _forward(call: Call, row: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The result and the statistics."""
    of_statistics = _of_statistics(call)
    # Before the operator, which nothing is fused with: what reads an input behind such a one, the partitioner keeps.
    values = row[0].float()
    read = Arguments.of(call, row).vectors[: call.chain.norm_place + 1]
    statistics = torch.ops.normfuse.statistics.default(
        of_statistics.text_in_graph, present([row[0], *read]), _are_apart(row[0])
    )
    steps, operands, place = call.chain.steps, _operands(call, row), call.chain.norm_place
    end = _end_of_image(call, row[0])
    values = _normalized(apply_steps(steps[:end], values, operands[:end]), statistics)
    values = apply_steps(steps[place + 1 :], values, operands[place + 1 :])
    return values.to(call.result or row[0].dtype), statistics


def _operands(call: Call, row: Sequence[Any]) -> list[Any]:
    """One entry a step, in float32."""
    vectors = Arguments.of(call, row).vectors
    return [numbers if each is None else each.float() for each, numbers in zip(vectors, call.numbers, strict=True)]


def _normalized(x: Tensor, statistics: Tensor) -> Tensor:
    """x, which is what the norm takes, centred and scaled."""
    centre, scale = _of_channels(statistics, x)
    return (x - centre) * scale


def _of_channels(packed: Tensor, image: Tensor) -> tuple[Tensor, ...]:
    """The last two numbers of each channel of each sample that are packed there, as they broadcast to the image."""
    samples, channels, *pixels = image.shape
    return packed.view(-1)[-2 * samples * channels :].view(2, samples, channels, *[1] * len(pixels)).unbind()


class _Open(torch.autograd.Function):
    """An open norm with gradients. There is a first derivative alone."""

    @staticmethod
    def forward(ctx, call, *row):
        result, statistics = _forward(call, row)
        ctx.call = call
        ctx.save_for_backward(statistics, *row)
        return result

    @staticmethod
    def backward(ctx, gradient):
        call, (statistics, *row) = ctx.call, ctx.saved_tensors
        refuse_second_derivative(call.name)
        place, steps = call.chain.norm_place, call.chain.steps
        specs = specs_of(call, row, ctx.needs_input_grad[1:])
        # Those of the input, its weight, and what is before the norm are computed here, but for what is added last:
        # the sums of the input's gradient, which would be a pass over the image.
        kinds = ["", "", *(step.operand for step in steps[:place] if step.has_tensor)]
        before = len(kinds)
        of_sums: list[Spec] = [None] * before + specs[before:]
        added = [each for each in range(before - call.chain.added_last, before) if specs[each]]
        if added:
            of_each = next((each for each in added if kinds[each] == "sample"), added[0])
            of_sums[of_each] = specs[of_each][0], torch.float32
        if not any(of_sums):  # an operator that returns a list of one would crash Inductor's C++ wrapper (PyTorch 2.13)
            of_sums[before] = (row[0].shape[1],), torch.float32
        factors, *found = torch.ops.normfuse.sums.default(
            call.text_in_graph, write_specs(of_sums, ()), gradient, statistics, present(row)
        )
        of_added = found.pop(0).view(-1, row[0].shape[1]) if added else None
        gradients = iter(found)
        of_last = [None if each is None else next(gradients) for each in of_sums[before:]]
        of_first = _gradients_before(
            call, row, statistics, gradient, factors, [None if i in added else specs[i] for i in range(before)]
        )
        for each in added:
            total = of_added if kinds[each] == "sample" else of_added.sum(0)
            of_first[each] = total.view(row[each].shape).to(row[each].dtype)
        return None, *of_first, *(each if spec else None for each, spec in zip(of_last, specs[before:], strict=True))


def _gradients_before(
    call: Call, row: Sequence[Any], statistics: Tensor, gradient: Tensor, factors: Tensor, specs: Sequence[Spec]
) -> list[Tensor | None]:
    """The gradients of the input and of the steps' operands before the norm."""
    place, steps, operands = call.chain.norm_place, call.chain.steps, _operands(call, row)
    end = _end_of_image(call, row[0])
    (centre, scale), (slope, shift) = _of_channels(statistics, row[0]), _of_channels(factors, row[0])
    with torch.enable_grad():
        pairs = zip(row, specs, strict=False)
        leaves = [each.detach().float().requires_grad_() if spec else None for each, spec in pairs]
        taken = iter(leaves[2:])
        for number, step in enumerate(steps[:end]):
            leaf = next(taken) if step.has_tensor else None
            operands[number] = operands[number] if leaf is None else leaf
        input = row[0].float() if leaves[0] is None else leaves[0]
        x = apply_steps(steps[:end], input, operands[:end])
        centred = x.detach() - centre
        values = (centred * scale).requires_grad_()
        result = apply_steps(steps[place + 1 :], values, operands[place + 1 :])
    (d,) = torch.autograd.grad(result, values, gradient.float())
    dx = d * scale + centred * slope + shift
    asked = [each for each in leaves if each is not None]
    found = iter(torch.autograd.grad(x, asked, dx) if asked else ())
    return [next(found).to(spec[1]) if spec else None for spec in specs]
