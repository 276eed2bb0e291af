"""Replace the four chains in a model that is there already by their fused operations, and back."""

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
    """A chain, or what might have been one.

    module: path of the module in whose forward it is, "" for the model itself
    chain: name of the function of ``ops`` that computes it, "" where it is none
    steps: the submodules, by their paths from ``module``, and the functions that it is made of
    reason: why it was left, "" where it was replaced
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
    """What ``fuse`` replaced, what it left and why, or what ``unfuse`` restored. ``str()`` of it is a list to read."""

    replaced: tuple[FusionEntry, ...] = ()
    left: tuple[FusionEntry, ...] = ()
    restored: tuple[FusionEntry, ...] = ()

    def __str__(self) -> str:
        lines = []
        for name in ("replaced", "left", "restored"):
            entries = getattr(self, name)
            lines += [f"{name} {len(entries)}:"] if entries else []
            lines += [f"  {entry}" for entry in entries]
        return "\n".join(lines) or "nothing to replace, leave or restore"


def fuse(model: nn.Module) -> FusionReport:
    """Replace, in place, the chains in a model's forwards by their fused operations; returns what was done.

    Each module's forward is traced by itself, so a chain must lie in one: a ``nn.Sequential``, or straight-line code
    that uses its arguments, PyTorch's functions, and of ``self`` the child modules, which it calls, tensors and plain
    numbers. Any other is left. The modules, parameters, state_dict, hooks and the classes' forwards stay as they are: a
    module with a chain gets a ``forward`` of its own, which at each call checks that what it was traced from still
    holds (the class's forward, the classes of the chain's modules, that PyTorch's own forward is all that these run,
    and the order of a Sequential's), and otherwise runs the class's. A chain itself runs as it was written under
    autocast, for tensor subclasses, and wherever PyTorch would raise an error.

    Nothing is replaced whose result, its strides, or gradients would differ, beyond rounding, but for two ties:
    ``amin`` spreads a gradient over equal minima where the fused chain, like ``min``, gives it to one, and ``clamp``
    passes it at its very bounds where ``hardtanh`` does not.

    Raises ValueError or TypeError: ValueError where no forward of the model can be traced, TypeError for what is no
    ``torch.nn.Module``. Either way, and where anything else is raised, the model is as it was. Fusing again begins
    anew: it removes what an earlier ``fuse`` made, and its report is that of the model as it is now.
    """
    _require_module(model)
    entries: list[FusionEntry] = []
    refused: list[str] = []
    forwards: dict[nn.Module, FusedForward | None] = dict.fromkeys(model.modules())
    is_traced = False
    for path, module in model.named_modules():
        if not _has_forward_to_trace(module):
            continue
        try:
            forwards[module], found = _fused(module, path)
        except NotTraceable as error:
            refused.append(f"{path or 'the model'} ({type(module).__name__}): {error}")
            entries += [FusionEntry(path, "", (), str(error))] if _may_norm(module) else []
            continue
        is_traced = True
        entries += found
    if refused and not is_traced:
        raise ValueError(f"model must have a forward that can be traced, got none: {'; '.join(refused[:3])}")
    for module, forward in forwards.items():
        if isinstance(module.__dict__.get("forward"), FusedForward):
            del module.forward
        if forward is not None:
            module.forward = forward
    replaced, left = (tuple(entry for entry in entries if bool(entry.reason) is is_left) for is_left in (False, True))
    return FusionReport(replaced, left)


def unfuse(model: nn.Module) -> FusionReport:
    """Undo ``fuse``, in place: every forward is the class's own again. Returns what was restored.

    A model that was never fused stays as it is, and the report is empty. Raises TypeError for what is no
    ``torch.nn.Module``; see ``fuse``.
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
    return "group_norm" in names or any(_is_norm(child) for child in _called(module))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward may call itself: its children, and those of lists of them."""
    for child in module.children():
        yield child
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)


def _is_norm(module: nn.Module) -> bool:
    """TorchScript's modules keep the name of their class."""
    return isinstance(module, nn.GroupNorm) or getattr(module, "original_name", "") == "GroupNorm"


def _fused(module: nn.Module, path: str) -> tuple[FusedForward | None, list[FusionEntry]]:
    """The module's new forward, if it has a chain, and what was found in it; NotTraceable where it cannot be traced."""
    graph = trace(module)
    matches = fuse_matching.find(graph, module)
    entries = [
        FusionEntry(path, match.chain, tuple(step.name for step in match.steps), match.refusal) for match in matches
    ]
    chains = [match for match in matches if not match.refusal]
    replaced = tuple(entry for entry in entries if not entry.reason)
    return FusedForward(module, graph, chains, replaced) if chains else None, entries
