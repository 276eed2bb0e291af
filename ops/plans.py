"""How plans are made: one for each way in which a call's tensors may lie in memory."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from autotune_configs import lookup, tuning
from autotune_configs.configs import noted_lookups
from ops.calls import Arguments, Call
from ops.contractions import contraction_of
from ops.plan import Plan, Planner, stand_in

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
    forward = contraction_of(call.chain).forward
    return _made(tensors, lambda stand_ins: forward(Arguments.of(call, stand_ins), training))


def make_backward(
    call: Call, gradient: Tensor, kept: Sequence[Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[Any]
) -> Plan:
    """The plan of a call's backward pass. Its results are the wanted gradients.

    ``tensors`` has those that the pass reads, and ``wanted`` in the same places (shape, dtype), or None. An empty shape
    is that of ``gradient``, or follows from other tensors.
    """

    def write(stand_ins):
        dy, *others = stand_ins
        given, kept = Arguments.of(call, others[: len(tensors)]), others[len(tensors) :]
        found = [each and torch.empty(each[0] or dy.shape, dtype=each[1], device=dy.device) for each in wanted[2:]]
        flat = [None if each is None else each.view(-1) for each in found]
        of_matrices = contraction_of(call.chain).backward(given, dy, kept, Arguments.of(call, [*wanted[:2], *flat]))
        return [each for each, is_wanted in zip((*of_matrices, *found), wanted, strict=True) if is_wanted]

    return _made([gradient, *tensors, *kept], write)


def _made(tensors: Sequence[Tensor | None], write: Callable[[list], list[Tensor]]) -> Plan:
    device = next(each.device for each in tensors if each is not None)
    stand_ins = [None if each is None else stand_in(each) for each in tensors]
    planner = Planner(device, [each for each in stand_ins if each is not None])
    with torch.no_grad(), planner.planning(), noted_lookups() as lookups:
        plan = planner.plan(write(stand_ins))
    plan.lookups = lookups
    return plan


def places_read(call: Call, tensors: Sequence[Any], wanted: Sequence[bool]) -> tuple[int, ...]:
    """Which of a call's tensors its backward pass reads, where it gives the gradients of the ``wanted`` ones."""
    *matrices, first = contraction_of(call.chain).reads(Arguments.of(call, tensors), wanted)
    steps = call.chain.steps
    end = max((place for place, step in enumerate(steps, 1) if not step.adds), default=0)  # nor what is added last
    vectors = [first <= place < end for place, step in enumerate(steps) if step.has_tensor]
    return tuple(place for place, each in enumerate([*matrices, *vectors]) if each)
