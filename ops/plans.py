"""How plans are made: one for each way in which a call's tensors may lie in memory."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune_configs import lookup, tuning
from autotune_configs.configs import noted_lookups
from ops import passes
from ops.calls import Arguments, Call, as_volume
from ops.contractions import contraction_of
from ops.plan import Plan, Planner, stand_in
from triton_kernels.launch import call as do
from triton_kernels.pointwise import Pointwise

Tensor = torch.Tensor

#: How many plans are kept: a thousand batch sizes are no calls that come again.
_MOST_PLANS = 1024


class Kept(dict[Hashable, Any]):
    """Values by what they depend on. All go where there are too many, which bounds the memory."""

    def add(self, key: Hashable, value: Any) -> Any:
        if len(self) >= _MOST_PLANS:
            self.clear()
        self[key] = value
        return value


def settings(tensor: Tensor) -> tuple:
    """What plans for tensors like this one depend on beside a call: which configs there are, and PyTorch's setting for
    products. (A call knows the one for convolutions.)"""
    configs = lookup.generation(), tuning.is_on()
    return (*configs, torch.backends.cuda.matmul.fp32_precision) if tensor.dtype == torch.float32 else configs


def make_forward(call: Call, tensors: Sequence[Tensor | None], training: bool) -> Plan:
    """The plan of a call for tensors in a row, as ``Arguments.of`` takes them.

    Its results are the call's and, if ``training``, what the backward pass needs.
    """
    call = _precise(call, Arguments.of(call, tensors).dtype, tensors)
    forward = contraction_of(call.chain).forward
    return made(tensors, lambda stand_ins: forward(Arguments.of(call, stand_ins), training))


def make_backward(
    call: Call, gradient: Tensor, kept: Sequence[Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[Any]
) -> Plan:
    """The plan of a call's backward pass. Its results are the wanted gradients.

    ``tensors`` has those that the pass reads, and ``wanted`` in the same places (shape, dtype), or None. A None in the
    place of a shape stands for that of ``gradient``, or what follows from other tensors.
    """
    dtype = next(each.dtype for each in (*tensors[:2], *kept, gradient) if each is not None)
    call = _precise(call, dtype, tensors)
    contraction = contraction_of(call.chain)
    steps = [*(step for step in call.chain.steps if step.has_tensor), None]

    def write(stand_ins):
        dy, *others = stand_ins
        given, kept = Arguments.of(call, others[: len(tensors)]), others[len(tensors) :]
        found = [each and empty_gradient(each, dy) for each in wanted[2:]]
        channels = dy.shape[-1 if call.chain.has_rows else 1]
        written = [
            None if each is None else _memory_of(step, each, channels) for step, each in zip(steps, found, strict=True)
        ]
        of_matrices = contraction.backward(given, dy, kept, Arguments.of(call, [*wanted[:2], *written]))
        _add_up_scalars(steps, written, found)
        return [each for each, is_wanted in zip((*of_matrices, *found), wanted, strict=True) if is_wanted]

    return made([gradient, *tensors, *kept], write)


def empty_gradient(spec: Any, gradient: Tensor) -> Tensor:
    """Memory for the gradient that a spec of ``ops.operators`` is of; ``gradient`` is the result's."""
    sizes, dtype = spec
    shape = gradient.shape if sizes is None else [gradient.shape[0] if size == -1 else size for size in sizes]
    return torch.empty(shape, dtype=dtype, device=gradient.device)


def make_statistics(call: Call, tensors: Sequence[Tensor | None], are_apart: bool) -> Plan:
    """The plan of an open norm's statistics: mean and rstd [2, B * G], then centre and scale [2, B * C], in a row.
    ``are_apart`` as for ``passes.open_statistics``."""
    call = _precise(call, Arguments.of(call, tensors).dtype, tensors)

    def write(stand_ins):
        arguments = Arguments.of(call, stand_ins)
        image = as_volume(arguments.input)
        samples, channels, _ = image.shape
        found = torch.empty(2 * samples * (call.num_groups + channels), dtype=torch.float32, device=image.device)
        passes.open_statistics(call, arguments.operands_of_images, image, are_apart, found)
        return [found]

    return made(tensors, write)


def make_sums(
    call: Call, gradient: Tensor, statistics: Tensor, tensors: Sequence[Tensor | None], wanted: Sequence[Any]
) -> Plan:
    """The plan of an open norm's backward sums: the factors slope and shift [2, B, C], and the wanted gradients.

    ``tensors`` and ``wanted`` are as for ``make_backward``, of which the norm's and what follows it are wanted here,
    and of what is added right before the norm one at most.
    """
    call = _precise(call, Arguments.of(call, tensors).dtype, tensors)
    steps = [step for step in call.chain.steps if step.has_tensor]

    def write(stand_ins):
        dy, found, *row = stand_ins
        arguments = Arguments.of(call, row)
        image, dy = as_volume(arguments.input), as_volume(dy)
        samples, channels, _ = image.shape
        factors = torch.empty(2, samples, channels, dtype=torch.float32, device=image.device)
        gradients = [each and empty_gradient(each, dy) for each in wanted[2:-1]]
        written = [
            None if each is None else _memory_of(step, each, channels)
            for step, each in zip(steps, gradients, strict=True)
        ]
        targets = Arguments.of(call, [None, None, *written, None]).vectors
        passes.open_sums(call, arguments.operands, dy, image, found, factors, targets)
        _add_up_scalars(steps, written, gradients)
        return [factors, *(each for each in gradients if each is not None)]

    return made([gradient, statistics, *tensors], write)


def _add_up_scalars(steps: Sequence[Any], written: Sequence[Any], gradients: Sequence[Any]) -> None:
    for step, memory, each in zip(steps, written, gradients, strict=True):
        if step and step.operand == "scalar" and each is not None:
            do(_add_up, memory, each)


def _precise(call: Call, dtype: torch.dtype, tensors: Sequence[Any]) -> Call:
    """The call with functions as precise as values of this dtype and its result's are.

    What a contraction makes has this dtype, as in PyTorch. Wider vectors are not rounded with it.
    """
    chain = call.chain.of_dtype(dtype, call.result)
    added = Arguments.of(call, tensors).vectors[1 : len(chain.biases)]
    if any(each is not None and each.dtype.itemsize > dtype.itemsize for each in added):
        stores_z = not chain.reduction and len(chain.biases) < len(chain.steps)
        chain = replace(chain, adds_later=bool(chain.contraction) and stores_z)
    return replace(call, chain=chain)


def _memory_of(step: Pointwise | None, gradient: Tensor, channels: int) -> Tensor:
    """Where kernels write the gradient of a step's operand: that of one value for all is the sum of a vector's."""
    if step and step.operand == "scalar":
        return torch.empty(channels, dtype=torch.float32, device=gradient.device)
    return gradient.view(step.shape(gradient.shape) if step else -1)


def _add_up(values: Tensor, target: Tensor) -> None:
    target.copy_(values.sum(dtype=torch.float64))


def made(tensors: Sequence[Tensor | None], write: Callable[[list], list[Tensor]]) -> Plan:
    """The plan of what ``write`` does with stand-ins of the tensors, and returns."""
    device = next(each.device for each in tensors if each is not None)
    stand_ins = [None if each is None else stand_in(each) for each in tensors]
    planner = Planner(device, [each for each in stand_ins if each is not None])
    with torch.no_grad(), planner.planning(), noted_lookups() as lookups:
        plan = planner.plan(write(stand_ins))
    plan.lookups = lookups
    return plan


def places_read(call: Call, tensors: Sequence[Any], wanted: Sequence[bool]) -> tuple[int, ...]:
    """Which of a call's tensors its backward pass reads, where it gives the gradients of the ``wanted`` ones."""
    call = _precise(call, Arguments.of(call, tensors).dtype, tensors)
    *matrices, first = contraction_of(call.chain).reads(Arguments.of(call, tensors), wanted)
    steps = call.chain.steps
    end = max((place for place, step in enumerate(steps, 1) if not step.adds), default=0)  # nor what is added last
    vectors = [first <= place < end for place, step in enumerate(steps) if step.has_tensor]
    return tuple(place for place, each in enumerate([*matrices, *vectors]) if each)
