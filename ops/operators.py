"""Chains as PyTorch operators, ``torch.ops.normfuse.forward`` and ``backward``, and as an autograd Function over them.

An operator takes a call's text (``ops.calls``) and its tensors. Each has two overloads: ``default`` returns a list, and
``one`` the tensor where there is only one, since Inductor's C++ takes a list of one for a tensor. PyTorch's dispatcher
leads to them where something would see the call: a compiler, a mode, a profiler. Elsewhere the Function runs the same
plans without it.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ops import checks, inductor, plans, precision
from ops.calls import Arguments, Call, parse
from ops.contractions import contraction_of
from ops.plan import Plan

Tensor = torch.Tensor

_FORWARD_MODE = "forward-mode differentiation"


def spread(call: Call, tensors: Sequence[Tensor]) -> list[Any]:
    """A call's tensors in a row, None for those that are absent, from those that are there."""
    rest = iter(tensors)
    with_tensor = [present for step, present in zip(call.chain.steps, call.present, strict=True) if step.has_tensor]
    there = [True, bool(call.chain.contraction), *with_tensor, call.has_bias]
    return [next(rest) if each else None for each in there]


def present(tensors: Sequence[Any]) -> list[Tensor]:
    return [each for each in tensors if each is not None]


def is_unobserved() -> bool:
    """Whether a call now is eager PyTorch's alone: no compiler, tracer, profiler, transform or mode."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
    )


_plans = plans.Kept()


def layouts_of(tensors: Sequence[Tensor]) -> Any:
    """All of the tensors that a plan depends on; None where one has no memory of its own, as within vmap."""
    try:
        return [(each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15) for each in tensors]
    except RuntimeError:
        return None


def forward_plan(text: str, tensors: list[Tensor], training: bool) -> Plan:
    """The plan that the operator ``forward`` runs for these arguments."""
    key = text, training, plans.settings(tensors[0]), *layouts_of(tensors)
    plan = _plans.get(key)
    if plan is None:
        call = parse(text)
        plan = _plans.add(key, plans.make_forward(call, spread(call, tensors), training))
    return plan


def backward_plan(text: str, wanted: str, gradient: Tensor, tensors: list[Tensor], kept: list[Tensor]) -> Plan:
    """The plan that the operator ``backward`` runs for these arguments."""
    key = text, wanted, plans.settings(gradient), *layouts_of([gradient, *tensors, *kept])
    plan = _plans.get(key)
    if plan is None:
        specs, read = read_specs(wanted)
        rest = iter(tensors)
        row = [next(rest) if place in read else None for place in range(len(specs))]
        plan = _plans.add(key, plans.make_backward(parse(text), gradient, kept, row, specs))
    return plan


def _below_autograd(operator: Any, keyset: Any, text: str, tensors: list[Tensor], training: bool) -> list[Tensor]:
    """An overload of ``forward`` where it goes from autograd, not as another call of it."""
    with torch._C._AutoDispatchBelowAutograd():
        results = operator.redispatch(keyset & torch._C._after_autograd_keyset, text, tensors, training)
    return results if type(results) is list else [results]


#: Of a tensor: the shape and dtype of its gradient, or None where that is not wanted. Where the shape is None, it is
#: that of the result's gradient, or follows from other tensors; a size of -1 is that gradient's number of samples.
Spec = tuple[tuple[int, ...] | None, torch.dtype] | None


def specs_of(call: Call, tensors: Sequence[Any], wanted: Sequence[bool]) -> list[Spec]:
    """The specs of a call's tensors in a row, without sizes that may change."""
    kinds = ["tensor", "tensor", *(step.operand for step in call.chain.steps if step.has_tensor), "vector"]

    def shape(tensor: Tensor, kind: str) -> tuple[int, ...] | None:
        if kind == "tensor":
            return None
        return (-1, *tensor.shape[1:]) if kind == "sample" else tuple(tensor.shape)

    return [
        (shape(each, kind), each.dtype) if each is not None and is_wanted else None
        for each, kind, is_wanted in zip(tensors, kinds, wanted, strict=True)
    ]


def write_specs(specs: Sequence[Spec], read: Sequence[int]) -> str:
    """Specs in words, "-" for None; a star marks the tensors that are read."""
    # An integer that a compiler leaves open is settled here, and guarded.
    sizes = ["" if each is None or each[0] is None else f"({','.join(map(str, map(int, each[0])))})" for each in specs]
    words = [
        "-" if each is None else precision.name_of(each[1]) + size for each, size in zip(specs, sizes, strict=True)
    ]
    return " ".join([f"{word}*" if place in read else word for place, word in enumerate(words)])


def read_specs(text: str) -> tuple[list[Spec], list[int]]:
    specs: list[Spec] = []
    for word in text.split():
        name, bracket, sizes = word.rstrip("*)").partition("(")
        shape = tuple(map(int, filter(None, sizes.split(",")))) if bracket else None
        specs.append(None if name == "-" else (shape, precision.DTYPES[name]))
    return specs, [place for place, word in enumerate(text.split()) if word.endswith("*")]


def _fake_forward(text: str, tensors: list[Tensor], training: bool) -> list[Tensor]:
    call = parse(text)
    # A trace of torch.func.jvp would meet the operator without its Function, and find no change at all.
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(_refusal(call.name, _FORWARD_MODE))
    return contraction_of(call.chain).empty_results(Arguments.of(call, spread(call, tensors)), training)


def _fake_backward(text: str, wanted: str, gradient: Tensor, tensors: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    call, (specs, read), rest = parse(text), read_specs(wanted), iter(tensors)
    given = Arguments.of(call, [next(rest) if place in read else None for place in range(len(specs))])
    contraction = contraction_of(call.chain)
    return [
        plans.empty_gradient(spec, gradient) if place > 1 else contraction.empty_gradient(place, given, gradient, kept)
        for place, spec in enumerate(specs)
        if spec is not None
    ]


def _only(results: Sequence[Tensor]) -> Tensor:
    (result,) = results
    return result


#: What ``explain`` says of an operator's call, by the operator's name: its direction, and of its arguments a title.
TITLES: dict[str, tuple[str, Callable[..., str]]] = {}


def define(
    name: str,
    schema: str,
    plan_of: Callable[..., Plan],
    fake: Callable[..., list[Tensor]],
    direction: str,
    title: Callable[..., str],
) -> None:
    """Define an operator that runs plans, that compiled graphs call directly, and of which ``explain`` tells.

    Args:
        name: Its name, with an overload's if it is one.
        schema: Its arguments, which are strings, bools, tensors and lists of tensors, and its results: Tensor[], or
            Tensor where there is one.
        plan_of: What finds a call's plan, of the operator's arguments. The plan takes the tensors among them in a row.
        fake: What returns a list of the results without values.
        direction: What a call is, as ``ExplainedCall`` has it.
        title: What names a call, of the operator's arguments.
    """
    as_returned: Callable[..., Any] = list if schema.endswith("[]") else _only

    def run(*arguments: Any) -> Any:
        tensors = inductor.tensors_in(arguments)
        with precision.without_autocast(tensors[0].device):
            return as_returned(plan_of(*arguments).run(tensors))

    def without_values(*arguments: Any) -> Any:
        inductor.register()
        return as_returned(fake(*arguments))

    torch.library.define(f"normfuse::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"normfuse::{name}", ("cuda", "cpu"), run)
    torch.library.register_fake(f"normfuse::{name}", without_values)
    key = name if "." in name else f"{name}.default"
    inductor.PLANS[key], TITLES[key] = plan_of, (direction, title)


def chain_of(text: str, *_: Any) -> str:
    """The title of a call that begins with its text."""
    return parse(text).text


for overload, returned in ("", "Tensor[]"), (".one", "Tensor"):
    schema = f"(str call, Tensor[] tensors, bool training) -> {returned}"
    define(f"forward{overload}", schema, forward_plan, _fake_forward, "forward", chain_of)
    schema = f"(str call, str wanted, Tensor gradient, Tensor[] tensors, Tensor[] kept) -> {returned}"
    define(f"backward{overload}", schema, backward_plan, _fake_backward, "backward", chain_of)
FORWARD, BACKWARD = torch.ops.normfuse.forward, torch.ops.normfuse.backward


def _backward_of_each(operator: Any, batch: Tensor, words: Sequence[str], lists: Sequence[Any]) -> Any:
    """One call for each gradient of a batch. PyTorch does so by itself for operators without lists."""
    calls = [operator(*words, gradient, *lists) for gradient in batch]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls)
    return [torch.stack(gradients) for gradients in zip(*calls, strict=True)]


def _backward_under_vmap(operator, info, in_dims, text, wanted, gradient, *lists):
    gradients = _backward_of_each(operator, gradient.movedim(in_dims[2], 0), (text, wanted), lists)
    return gradients, 0 if isinstance(gradients, Tensor) else [0] * len(gradients)


def _backward_of_batch(operator, text, wanted, gradient, *lists):
    # Of ``is_grads_batched``, which has one level alone and no public rule.
    batch = torch._remove_batch_dim(gradient, 1, 1, 0)
    gradients = _backward_of_each(operator, batch, (text, wanted), lists)
    return tree_map(lambda each: torch._add_batch_dim(each, 0, 1), gradients)


for backward in BACKWARD.default, BACKWARD.one:
    torch.library.register_vmap(backward, partial(_backward_under_vmap, backward))
    torch.library.impl(backward.name(), "Batched", partial(_backward_of_batch, backward))


def _refusal(name: str, what: str) -> str:
    return (
        f"{name} does not support {what}: differentiate it with torch.autograd, give it batches as dimensions"
        " of its input, or use the functions of ops.reference, which are plain PyTorch"
    )


class Prepared:
    """A call for tensors that lie in memory in one way: its plan, and those of its backward pass.

    Without a plan, both passes are the operators, the first as ``operator`` calls it.
    """

    def __init__(
        self,
        call: Call,
        tensors: Sequence[Any],
        wanted: Sequence[bool],
        plan: Plan | None = None,
        operator: Callable[..., list[Tensor]] | None = None,
    ):
        self.call = call
        self.plan = plan
        self._operator = operator
        self.training = any(wanted)
        self.places = [place for place, each in enumerate(tensors) if each is not None]
        self.read = [place for place in plans.places_read(call, tensors, wanted) if tensors[place] is not None]
        self.specs = specs_of(call, tensors, wanted)
        self._added_last = _tensors_added_last(call)
        self._backwards = plans.Kept()

    def run(self, tensors: Sequence[Any]) -> Tensor:
        """The call's result."""
        return Function.apply(self, *tensors) if self.training else self.forward(tensors)[0]

    def forward(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The result and what the backward pass needs."""
        given = [tensors[place] for place in self.places]
        if self.plan:
            return self.plan.run(given)
        assert self._operator
        return self._operator(self.call.text_in_graph, given, self.training)

    def backward(self, gradient: Tensor, saved: Sequence[Tensor], needed: tuple[bool, ...]) -> list[Tensor | None]:
        """The gradients of the tensors in a row, None where one is not needed. ``saved``: those read, then kept."""
        computed = tuple([each and place not in self._added_last for place, each in enumerate(needed)])
        rest = iter(self._computed(gradient, saved, computed) if any(computed) else ())
        return [
            next(rest) if is_computed else gradient.to(spec[1], copy=True) if spec and each else None
            for spec, each, is_computed in zip(self.specs, needed, computed, strict=True)
        ]

    def _computed(self, gradient: Tensor, saved: Sequence[Tensor], needed: tuple[bool, ...]) -> list[Tensor]:
        """The gradients that are needed, which the operator or a plan computes."""
        given = [gradient, *saved]
        # The dispatcher's are calls that were its own before, with tensors that may be negated, and tensors of classes
        # of their own, as those still on their way from another rank.
        is_eager = self.plan is not None and checks.PLAIN_TENSORS.issuperset(map(type, given)) and is_unobserved()
        key = layouts_of(given) if is_eager else None
        if key is not None:
            key = needed, plans.settings(gradient), *key
            plan = self._backwards.get(key) or self._backwards.add(key, self._make_backward(gradient, saved, needed))
            return plan.run(given)
        read, kept = list(saved[: len(self.read)]), list(saved[len(self.read) :])
        words = write_specs(self._needed(needed), self.read)
        arguments = self.call.text_in_graph, words, gradient, read, kept
        return [BACKWARD.one(*arguments)] if sum(needed) == 1 else BACKWARD.default(*arguments)

    def _needed(self, needed: Sequence[bool]) -> list[Spec]:
        return [spec if each else None for spec, each in zip(self.specs, needed, strict=True)]

    def _make_backward(self, gradient: Tensor, saved: Sequence[Tensor], needed: Sequence[bool]) -> Any:
        row: list[Tensor | None] = [None] * len(self.specs)
        for place, each in zip(self.read, saved, strict=False):
            row[place] = each
        return plans.make_backward(self.call, gradient, saved[len(self.read) :], row, self._needed(needed))


def _tensors_added_last(call: Call) -> set[int]:
    """Which of a call's tensors in a row, of the result's shape, are added last: their gradient is the result's.

    They get a copy, of which a graph's compiler makes what it likes: a leaf keeps its gradient without one, and behind
    a view (as of rows) nothing tells that another's is the same memory.
    """
    steps = call.chain.steps
    added = itertools.takewhile(lambda step: step.adds, reversed(steps))
    end = 1 + sum(step.has_tensor for step in steps)
    return {end - place for place, step in enumerate(added) if step.operand == "tensor"}


def refuse_second_derivative(name: str) -> None:
    # once_differentiable would let create_graph=True pass silently where the gradient itself needs none.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} can be differentiated once only: create_graph=True is not supported; the functions "
            "of ops.reference, which are plain PyTorch, take it"
        )


class Function(torch.autograd.Function):
    """A prepared call with gradients. There is a first derivative alone.

    As a plan it returns the result alone, else all that the operator does, as graphs are recorded with that.
    """

    @staticmethod
    def forward(ctx, prepared: Prepared, *tensors):
        result, *kept = prepared.forward(tensors)
        ctx.prepared = prepared
        ctx.save_for_backward(*[tensors[place] for place in prepared.read], *kept)
        ctx.set_materialize_grads(False)  # what is kept has none
        if prepared.plan:
            return result
        ctx.mark_non_differentiable(*kept)
        return result, *kept

    @staticmethod
    def backward(ctx, gradient, *_):
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        prepared = ctx.prepared
        if not prepared.training:
            raise RuntimeError(
                f"{prepared.call.name} cannot be differentiated here: it was traced or exported where no gradient was "
                "needed (under torch.no_grad, say), and saved nothing for one; export the model with gradients enabled"
            )
        refuse_second_derivative(prepared.call.name)
        gradient = gradient.resolve_neg()
        # All that a gradient is made of has its dtype already, whether or not the forward pass was autocast.
        with precision.without_autocast(gradient.device):
            return None, *prepared.backward(gradient, ctx.saved_tensors, ctx.needs_input_grad[1:])


def _differentiable(operator: Any, keyset: Any, text: str, tensors: list[Tensor], training: bool) -> Any:
    """An overload of ``forward`` where autograd may see it."""
    # A tangent would be lost: what lies below autograd does not see it.
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError(_refusal(parse(text).name, _FORWARD_MODE))
    below = partial(_below_autograd, operator, keyset)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        call = parse(text)
        row = spread(call, tensors)
        wanted = [training and each is not None and each.requires_grad for each in row]
        results = list(Function.apply(Prepared(call, row, wanted, operator=below), *row))
    else:
        results = below(text, tensors, training)
    return results if operator is FORWARD.default else _only(results)


_library = torch.library.Library("normfuse", "FRAGMENT")
for forward in FORWARD.default, FORWARD.one:
    _library.impl(forward, partial(_differentiable, forward), "Autograd", with_keyset=True)


def refuse_transforms(name: str) -> None:
    """Raises RuntimeError within torch.func. PyTorch's own refusals would not say what to do instead."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise RuntimeError(_refusal(name, "torch.func (vmap, grad, jvp, ...)"))


def run(call: Call, tensors: Sequence[Any]) -> Tensor:
    """The result of a call that something of PyTorch's may see.

    A Linear chain's operators get matrices: near a convolution, Inductor takes what has four dimensions for images, and
    would copy it to channels_last and back.
    """
    refuse_transforms(call.name)
    shape = tensors[0].shape[:-1]
    if call.chain.contraction != "linear" or len(shape) < 2:
        return _run(call, tensors)
    is_tensor = [step.operand == "tensor" for step in call.chain.steps if step.has_tensor]
    pairs = zip(tensors, (True, False, *is_tensor, False), strict=True)
    result = _run(call, [each.flatten(0, -2) if flat and each is not None else each for each, flat in pairs])
    return result.view(*shape, result.shape[-1])


def _run(call: Call, tensors: Sequence[Any]) -> Tensor:
    training = torch.is_grad_enabled() and any(each.requires_grad for each in present(tensors))
    arguments = call.text_in_graph, present(tensors), training
    if training and contraction_of(call.chain).keeps(Arguments.of(call, tensors)):
        return FORWARD.default(*arguments)[0]
    return FORWARD.one(*arguments)
