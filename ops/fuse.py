"""Replace the four chains of an existing model by their fused operations, and undo it."""

import dataclasses
import functools
import inspect
import keyword
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ops import fuse_matching, submodules
from ops.fuse_matching import Match
from ops.fuse_tracing import NotTraceable, is_sequential, parameters_of, trace


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


class FusedForward:
    """The ``forward`` attribute of a module with chains. The class's own forward stays as it is.

    The trace assumed the class's forward, the names and order of an ``nn.Sequential``'s children, and that the chains'
    modules are of PyTorch's classes and run their own forward without hooks. Where one of these no longer holds, the
    class's forward runs. No other module is kept: the function made of the trace reads and calls what the forward does.
    """

    def __init__(self, module: nn.Module, graph: torch.fx.Graph, chains: list[Match], entries: tuple[Any, ...]):
        self.module = module
        self.entries = entries
        self.original: Any = type(module).forward
        self.parameters = parameters_of(self.original)
        self.sequence = tuple(module._modules) if is_sequential(module) else None
        called = [str(node.target) for match in chains for node in match.nodes if node.op == "call_module"]
        self.called = {name: type(getattr(module, name)) for name in called}
        self.code = _fingerprint(self.original)
        # The chains as they were written, and the forward with a call in the place of each.
        plain = [fuse_matching.written_out(match) for match in chains]
        # From the last on, since a chain's input may be the result of the one before it.
        for i, match in reversed(list(enumerate(chains))):
            fuse_matching.put_call(graph, match, f"chain_{i}_as_written")
        self.functions = [_code(each) for each in (*plain, graph)]
        self._compile()

    def _compile(self) -> None:
        *plain, function = [types.MethodType(_function(*each), self.module) for each in self.functions]
        self._function = functools.partial(function, *plain)

    def _holds(self) -> bool:
        module = self.module
        return (
            not submodules.has_global_hook()
            and type(module).forward is self.original
            and (self.sequence is None or tuple(module._modules) == self.sequence)
            and not any(submodules.change(getattr(module, name, None), kind) for name, kind in self.called.items())
        )

    def __call__(self, *args, **kwargs):
        named = [kwargs[name] for name in self.parameters[len(args) :] if name in kwargs]
        fits = len(args) + len(named) == len(args) + len(kwargs) == len(self.parameters)
        if fits and self._holds():
            return self._function(*args, *named)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_function", "original")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A trace of other code than the class has now holds for no forward.
        present = type(self.module).forward
        self.original = present if _fingerprint(present) == self.code else None
        self._compile()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> types.CodeType:
        """torch.export asks a forward for its file and line."""
        return type(self.module).forward.__code__


def _code(graph: torch.fx.Graph) -> tuple[str, dict[str, Any]]:
    """The graph's code and the global names in it but those of modules, which cannot be pickled. The graph is changed.

    torch.fx writes the names of children into the code as they are, so all but plain ones are spelled in a way in which
    any may stand there, be it ``in`` or ``it's``.
    """
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = ".".join(_spelled(name) for name in str(node.target).split("."))
    code = graph.python_code("self")
    return code.src, {name: each for name, each in code.globals.items() if not isinstance(each, types.ModuleType)}


def _spelled(name: str) -> str:
    is_plain = re.fullmatch("[A-Za-z0-9_]+", name) and not keyword.iskeyword(name)
    return name if is_plain else "".join(f"\\U{ord(character):08x}" for character in name)


def _function(source: str, global_names: dict[str, Any]) -> types.FunctionType:
    namespace = torch.fx.Graph().python_code("self").globals | global_names  # the modules are those of any graph
    exec(compile(source, "<ops.fuse>", "exec"), namespace)
    return namespace["forward"]


def _fingerprint(function: Any) -> tuple[Any, ...]:
    """What of a function's code a trace depends on, in a form that can be pickled."""
    code = function.__code__
    return code.co_code, code.co_names, code.co_varnames, repr(code.co_consts)
