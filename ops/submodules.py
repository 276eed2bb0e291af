"""Whether a module's layers still run what PyTorch's classes run, so that a fused call may stand for calling them."""

import warnings
from collections.abc import Callable

from torch import nn
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

#: The classes of the fused chains' layers, and the forward that each of them has.
_FORWARDS: dict[type[nn.Module], Callable] = {
    kind: kind.forward for kind in (nn.Linear, nn.ConvTranspose2d, nn.GroupNorm, nn.Hardtanh, nn.Mish, nn.GELU)
}
#: What has been said in this process; the registry of ``warnings`` forgets it whenever a filter changes.
_told: set[str] = set()


def change(layer: nn.Module | None, kind: type[nn.Module]) -> str:
    """What else a call of the layer runs than the forward of PyTorch's class ``kind``, in words; "" for nothing.

    Hooks that are set on all modules are seen by ``has_global_hook`` alone.
    """
    if type(layer) is not kind:
        return f"is a {type(layer).__module__}.{type(layer).__name__}, not torch.nn.{kind.__name__} itself"
    if _FORWARDS.get(kind) is not kind.forward or "forward" in layer.__dict__:
        return "has a forward set on it that is not its class's"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "has a hook"
    return "" if layer._compiled_call_impl is None else "was compiled with its own compile()"


def are_as_made(module: nn.Module, **layers: tuple[nn.Module, type[nn.Module]]) -> bool:
    """Whether a fused call may stand for calls of the module's layers, each given with its class; if not, says why."""
    reason = "a global hook is set for all modules" if has_global_hook() else _change_of_one(layers)
    if reason:
        _tell(f"{type(module).__name__} is not fused but runs its layers one by one: {reason}")
    return not reason


def _change_of_one(layers: dict[str, tuple[nn.Module, type[nn.Module]]]) -> str:
    for name, (layer, kind) in layers.items():
        found = change(layer, kind)
        if found:
            return f"{name} {found}"
    return ""


def _tell(text: str) -> None:
    """Warn, the first time."""
    if text not in _told:
        warnings.warn(text, RuntimeWarning, stacklevel=6)  # its caller, where that is no module itself
        _told.add(text)


# A compiler runs it where it meets it, and breaks no graph there; marked by hand as in ops.precision.
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
