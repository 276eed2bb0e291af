"""Replace the four chains of an existing model by their fused operations, and undo it."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ops import fuse_matching
from ops.fuse_forward import FusedForward
from ops.fuse_tracing import NotTraceable, trace


@dataclass(frozen=True)
class FusionEntry:
    """One chain that ``fuse`` met, or what might have been one.

    Attributes:
        module: Path of the module whose forward it is in; ``""`` for the model itself.
        chain: Name of the function of ``ops`` that computes it; ``""`` where it is none of the four chains.
        steps: What the chain is made of: its submodules, by their paths from ``module``, and its functions.
        reason: Why it was left as it is; ``""`` where it was replaced.
    """

    module: str
    chain: str
    steps: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        what = [self.module or "the model", *([", ".join(self.steps)] if self.steps else [])]
        return ": ".join([*what, self.reason]) if self.reason else f"{': '.join(what)} -> {self.chain}"


@dataclass(frozen=True)
class FusionReport:
    """What ``fuse`` replaced, what it left and why, and what ``unfuse`` restored. ``print`` shows it as a list.

    Attributes:
        replaced: The chains that now run fused.
        left: What was left as it is, each with its reason.
        restored: The chains that ``unfuse`` restored.
    """

    replaced: tuple[FusionEntry, ...] = ()
    left: tuple[FusionEntry, ...] = ()
    restored: tuple[FusionEntry, ...] = ()

    def __str__(self) -> str:
        lines = [
            line
            for name, entries in vars(self).items()
            if entries
            for line in (f"{name} {len(entries)}:", *(f"  {entry}" for entry in entries))
        ]
        return "\n".join(lines) or "nothing to replace, leave or restore"


def fuse(model: nn.Module) -> FusionReport:
    """Replace, in place, the four chains in a model by their fused operations.

    Each module's forward is traced by itself, so a chain must lie in one forward. That may be an ``nn.Sequential``, or
    straight-line code: it uses its arguments and PyTorch's functions and, of ``self``, its tensors, its plain numbers
    and its child modules, which it calls. Every other forward is left as it is.

    Modules, parameters, state_dict, hooks and the classes' forwards stay as they are. A module with a chain gets a
    ``forward`` attribute. At each call it checks that what was traced still holds: the class's forward, the classes of
    the chain's layers, that these run PyTorch's own forward and no hook, and the order of a Sequential. Otherwise the
    class's forward runs. A chain also runs as it was written under autocast, for tensor subclasses, and wherever
    PyTorch would raise an error.

    The result, its strides and the gradients are the plain model's up to rounding, with two exceptions. ``amin``
    spreads the gradient over equal minima; the fused chain gives it to one of them, as ``min`` does. ``clamp`` passes
    the gradient exactly at its bounds; the fused chain does not, as ``hardtanh``.

    Calling it again starts anew: it removes what an earlier call made, and reports the model as it is now.

    Args:
        model: The model to change.

    Returns:
        What was replaced, and what was left and why.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: No forward of the model can be traced. The model is unchanged, as after any other error.

    Example::

        model = nn.Sequential(nn.Linear(64, 128), nn.GroupNorm(8, 128), nn.Hardtanh())
        print(ops.fuse(model))
    """
    _require_module(model)
    entries: list[FusionEntry] = []
    refused: list[str] = []
    forwards: dict[nn.Module, FusedForward] = {}
    tried = {path: module for path, module in model.named_modules() if _has_forward_to_trace(module)}
    for path, module in tried.items():
        try:
            graph = trace(module)
        except NotTraceable as error:
            refused.append(f"{path or 'the model'} ({type(module).__name__}): {error}")
            entries += [FusionEntry(path, "", (), str(error))] if _may_norm(module) else []
            continue
        matches = list(fuse_matching.find(graph, module))
        found = [
            FusionEntry(path, each.chain, tuple(step.name for step in each.steps), each.refusal) for each in matches
        ]
        entries += found
        chains = [match for match in matches if not match.refusal]
        if chains:
            forwards[module] = FusedForward(module, graph, chains, tuple(entry for entry in found if not entry.reason))
    if tried and len(refused) == len(tried):
        raise ValueError(f"model must have a forward that can be traced, got none: {'; '.join(refused[:3])}")
    unfuse(model)
    for module, forward in forwards.items():
        module.forward = forward
    return FusionReport(*(tuple(each for each in entries if bool(each.reason) is is_left) for is_left in (False, True)))


def unfuse(model: nn.Module) -> FusionReport:
    """Undo ``fuse``, in place: every module runs its class's forward again.

    A model that was never fused stays as it is, and the report is empty.

    Args:
        model: The model to change.

    Returns:
        The chains that were restored.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
    """
    _require_module(model)
    restored = []
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, FusedForward):
            del module.forward
            restored += [dataclasses.replace(entry, module=path) for entry in forward.entries]
    return FusionReport(restored=tuple(restored))


def _require_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _has_forward_to_trace(module: nn.Module) -> bool:
    """Whether there is a forward to look at: no layer of PyTorch's, no wrapper, and none of ours."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    forward = type(module).forward
    owner = (getattr(forward, "__module__", None) or "").split(".")[0]
    return forward is nn.Sequential.forward or owner not in ("torch", "ops")


def _may_norm(module: nn.Module) -> bool:
    """Whether a forward that is not traced seems to hold a group norm, and so is worth an entry."""
    forward = None if isinstance(module, torch.jit.ScriptModule) else inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    # TorchScript's modules keep the name of their class.
    return "group_norm" in names or any(
        isinstance(child, nn.GroupNorm) or getattr(child, "original_name", "") == "GroupNorm"
        for child in _called(module)
    )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward may call itself: its children, and those of lists of them."""
    for child in module.children():
        yield child
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
