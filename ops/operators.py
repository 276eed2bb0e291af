"""How the kernels become PyTorch operators: ``torch.ops.normfuse.*``, with fakes, and autograd Functions over them."""

from collections.abc import Callable, Sequence

import torch
from torch._ops import OpOverload

from ops import precision, replay

_NAMESPACE = "normfuse"
_FORWARD_MODE = "forward-mode differentiation"


class Operator:
    """An operator of PyTorch's, ``overload``; in eager PyTorch its implementation is called without the dispatcher."""

    def __init__(self, overload: OpOverload, eagerly: replay.Repeated):
        self.overload = overload
        self._eagerly = eagerly

    def __call__(self, *arguments):
        return (self._eagerly if replay.is_unobserved() else self.overload)(*arguments)


def define(schema: str, implementation: Callable, fake: Callable) -> Operator:
    """Register an operator for CUDA (and the CPU, for the interpreter) with its fake; returns it, callable.

    ``implementation`` gets contiguous vectors, as its kernels take them, of any that the operator is given: a caller's,
    or what a hook made of a saved one.
    """
    name = f"{_NAMESPACE}::{schema.split('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)

    def with_contiguous_vectors(*arguments):
        return implementation(
            *[each.contiguous() if isinstance(each, torch.Tensor) and each.ndim == 1 else each for each in arguments]
        )

    repeated = replay.Repeated(with_contiguous_vectors)

    def without_autocast(input, *arguments):
        # All dtypes are decided by now; a product of the library's would be cast to autocast's.
        with precision.without_autocast(input.device):
            return repeated(input, *arguments)

    torch.library.impl(name, ("cuda", "cpu"), without_autocast)

    def fake_in_reverse_mode(*arguments):
        # A trace of torch.func.jvp would meet the operator without its Function, and find no change at all.
        if torch.autograd.forward_ad._current_level >= 0:
            raise RuntimeError(_refusal(name, _FORWARD_MODE))
        return fake(*arguments)

    torch.library.register_fake(name, fake_in_reverse_mode)
    overload = getattr(getattr(torch.ops, _NAMESPACE), schema.split("(")[0]).default
    replay.IMPLEMENTATIONS[overload] = with_contiguous_vectors
    return Operator(overload, repeated.sharing_plans(otherwise=overload))


def differentiable(operator: Operator, setup_context: Callable, backward: Callable) -> Callable[..., torch.Tensor]:
    """A function that calls ``operator`` and returns its first output, the result; others are kept for backward.

    ``setup_context(ctx, inputs, outputs)`` saves and ``backward(ctx, gradient)`` returns a gradient for each input. The
    operator itself gets the same formula, so that it can be differentiated where it is met alone, as in a compiled or
    exported graph. There is a first derivative in reverse mode alone; anything else raises a RuntimeError.
    """
    overload = operator.overload
    parameters = [argument.name for argument in overload._schema.arguments]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs = operator(*inputs)
            setup_context(ctx, inputs, outputs)
            return _first(outputs)

        @staticmethod
        def backward(ctx, gradient):
            return differentiated_once(ctx, gradient)

        @staticmethod
        def jvp(ctx, *tangents):
            raise RuntimeError(_refusal(overload.name(), _FORWARD_MODE))

    def differentiated_once(ctx, gradient):
        # once_differentiable would let create_graph=True pass silently where the gradient itself needs none.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{overload.name()} can be differentiated once only: create_graph=True is not supported; the functions "
                "of ops.reference, which are plain PyTorch, take it"
            )
        # All that a gradient is made of has its dtype already, whether or not the forward pass was autocast.
        with precision.without_autocast(gradient.device):
            return backward(ctx, gradient)

    def register_setup_context(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.kept_nothing = "training" in parameters and not inputs[parameters.index("training")]
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])

    def register_backward(ctx, gradient, *others):
        if ctx.kept_nothing:
            raise RuntimeError(
                f"{overload.name()} cannot be differentiated here: it was traced or exported where no gradient was "
                "needed (under torch.no_grad, say), and saved nothing for one; export the model with gradients enabled"
            )
        return differentiated_once(ctx, gradient)

    torch.library.register_autograd(overload, register_backward, setup_context=register_setup_context)

    def differentiable_operator(*inputs):
        # torch.compile takes no Function two of whose inputs are one tensor, as where modules share a parameter.
        if torch.compiler.is_compiling():
            return _first(overload(*inputs))
        # PyTorch's own refusal would ask for a setup_context, with which it looks up forward's signature in every call.
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(_refusal(overload.name(), "torch.func (vmap, grad, jvp, ...)"))
        return Function.apply(*inputs)

    return differentiable_operator


def _first(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _refusal(name: str, what: str) -> str:
    return (
        f"{name} does not support {what}: differentiate it with torch.autograd, give it batches as dimensions"
        " of its input, or use the functions of ops.reference, which are plain PyTorch"
    )


def dtypes_of(*vectors: torch.Tensor | None) -> tuple[torch.dtype | None, ...]:
    """What a backward pass needs to know of vectors that its formula does not read: to save them would have autograd
    watch them for changes."""
    return tuple([None if vector is None else vector.dtype for vector in vectors])


def wanted_dtypes(ctx, *places: int) -> list[torch.dtype | None]:
    """``ctx.dtypes``, which are of the inputs at these places; None where autograd asks for no gradient."""
    return [dtype if ctx.needs_input_grad[place] else None for place, dtype in zip(places, ctx.dtypes, strict=True)]


def empty_vectors(
    like: torch.Tensor, length: int, dtypes: Sequence[torch.dtype | None]
) -> tuple[torch.Tensor | None, ...]:
    """Memory for the gradients of vectors, each its own: autograd keeps what it gets, and adds to it in place."""
    return tuple([None if dtype is None else like.new_empty(length, dtype=dtype) for dtype in dtypes])


def or_empty(like: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """As an operator returns them: what is not there is empty."""
    return [like.new_empty(0) if tensor is None else tensor for tensor in tensors]


def where_wanted(gradients: Sequence[torch.Tensor], wanted: Sequence[object]) -> list[torch.Tensor | None]:
    """As autograd takes what an operator returned: None where a gradient was not wanted (None or False)."""
    return [gradient if each else None for gradient, each in zip(gradients, wanted, strict=True)]
