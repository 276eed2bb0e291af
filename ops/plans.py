"""How plans are made: one for each way in which a call's tensors may lie in memory."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from autotune_configs import lookup, tuning
from autotune_configs.configs import noted_lookups
from ops import direct_convolution, images, matrices
from ops.arguments import Arguments
from ops.calls import Call
from ops.plan import Plan, Planner, stand_in

Tensor = torch.Tensor

#: How many plans are kept: a thousand batch sizes are no calls that come again.
_MOST_PLANS = 1024


class Kept:
    """Values by what they depend on. All go where there are too many, which bounds the memory."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self.get = self._values.get

    def add(self, key: Hashable, value: Any) -> Any:
        if len(self._values) >= _MOST_PLANS:
            self._values.clear()
        self._values[key] = value
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
    return _made(tensors, lambda stand_ins: _forward(call, Arguments.of(call, stand_ins), training))


def make_backward(
    call: Call, gradient: Tensor, kept: Sequence[Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[Any]
) -> Plan:
    """The plan of a call's backward pass. Its results are the wanted gradients.

    ``tensors`` has those that the pass reads, and ``wanted`` in the same places (shape, dtype), or None. An empty shape
    is that of ``gradient``, or follows from other tensors.
    """

    def write(stand_ins):
        gradient, *others = stand_ins
        shaped = [each and (each[0] or gradient.shape, each[1]) for each in wanted]
        given, of_result = Arguments.of(call, others[: len(tensors)]), Arguments.of(call, shaped)
        gradients = _backward(call, gradient, others[len(tensors) :], given, of_result).in_a_row(call)
        return [gradient for gradient, each in zip(gradients, wanted, strict=True) if each is not None]

    return _made([gradient, *tensors, *kept], write)


def _made(tensors: Sequence[Tensor | None], write: Callable[[list], list[Tensor]]) -> Plan:
    device = next(each.device for each in tensors if each is not None)
    stand_ins = [None if each is None else stand_in(each) for each in tensors]
    planner = Planner(device, [each for each in stand_ins if each is not None])
    with torch.no_grad(), planner.planning(), noted_lookups() as lookups:
        plan = planner.plan(write(stand_ins))
    plan.lookups = lookups
    return plan


def _is_matrix(call: Call, input: Tensor) -> bool:
    """Whether a chain without a convolution works on rows that one program holds."""
    if call.chain.contraction or not call.chain.norm:
        return True
    return input.shape[2:].numel() == 1 and matrices.fits_registers(input.shape[1], call.num_groups)


def _forward(call: Call, given: Arguments, training: bool) -> list[Tensor]:
    if call.chain.contraction == "conv_transpose2d":
        return images.convolution_forward(call, given, training)
    if _is_matrix(call, given.input):
        return matrices.forward(call, given, training)
    return images.norm_forward(call, given)


def _backward(call: Call, gradient: Tensor, kept: list[Tensor], given: Arguments, wanted: Arguments) -> Arguments:
    if call.chain.contraction == "conv_transpose2d":
        return images.convolution_backward(call, gradient, kept, given, wanted)
    if _is_matrix(call, given.input):
        return matrices.backward(call, gradient, kept, given, wanted)
    return images.norm_backward(call, gradient, given, wanted)


def places_read(call: Call, tensors: Sequence[Any], wanted: Sequence[bool]) -> tuple[int, ...]:
    """Which of a call's tensors its backward pass reads, where it gives the gradients of the ``wanted`` ones."""
    chain = call.chain
    if not chain.contraction:
        read = [True, False]
    elif chain.contraction == "linear":  # each for the other's gradient
        read = [wanted[1], wanted[0]]
    else:
        read = [True, True]
    # What is added last is not read, nor are biases where z is kept with them.
    last = len(chain.steps)
    while last > 0 and chain.steps[last - 1].adds:
        last -= 1
    has_biases = chain.contraction == "linear"
    if chain.contraction == "conv_transpose2d":
        has_biases = direct_convolution.takes(tensors[0], tensors[1], call.geometry, call.allow_tf32)
    first = len(chain.biases) if has_biases else 0
    read += [first <= place < last for place, step in enumerate(chain.steps) if step.has_tensor]
    return tuple(place for place, each in enumerate([*read, False]) if each)
