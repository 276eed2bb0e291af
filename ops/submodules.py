"""Whether a module's layers still run PyTorch's own forwards, so that one fused call may replace them."""

import warnings
from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

#: The forwards of PyTorch's layers when this package was imported, by their classes.
_FORWARDS: dict[type[nn.Module], Callable] = {
    kind: kind.forward for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)
}
#: The warnings given in this process. The registry of ``warnings`` forgets them whenever a filter changes.
_told: set[str] = set()


def change(layer: nn.Module | None, kind: type[nn.Module]) -> str:
    """Why a call of the layer does not just run the forward of its class ``kind``, PyTorch's or ours; "" where it does.

    Hooks that are set for all modules are not seen here, but by ``has_global_hook``.
    """
    if type(layer) is not kind:
        expected = f"{'torch.nn' if kind in _FORWARDS else kind.__module__}.{kind.__name__}"
        return f"is a {type(layer).__module__}.{type(layer).__name__}, not {expected} itself"
    if _FORWARDS.get(kind, kind.forward) is not kind.forward or "forward" in layer.__dict__:
        return "has a forward set on it that is not its class's"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "has a hook"
    return "" if layer._compiled_call_impl is None else "was compiled with its own compile()"


def are_as_made(module: nn.Module, **layers: tuple[nn.Module, type[nn.Module]]) -> bool:
    """Whether a fused call may replace the calls of the module's layers, each given with its class. If not, warns
    why, the first time only."""
    reason = "a global hook is set for all modules" if has_global_hook() else ""
    for name, (layer, kind) in layers.items():
        found = change(layer, kind)
        reason = reason or (found and f"{name} {found}")
    if reason:
        _tell(f"{type(module).__name__} is not fused but runs its layers one by one: {reason}")
    return not reason


def _tell(text: str) -> None:
    if text not in _told:
        warnings.warn(text, RuntimeWarning, stacklevel=6)  # its caller, where that is no module itself
        _told.add(text)


# The compiler runs it while it traces, without a graph break. Marked by hand as in ops.precision.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
