"""``fuse``: chains of the family in a model that runs without a compiler become calls of this project's.

Dynamo captures the model's first call, and the rewriter of the backend (``ops.rewriting``) says which chains are in it.
The smallest modules whose call holds a whole chain get a ``forward`` that Dynamo captures, and whose graph runs as it
is, with a call in the place of each chain. All others stay as they were.
"""

import functools
import inspect
import itertools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from ops import rewriting
from ops.chain import call_in_graph
from ops.submodules import has_global_hook


@dataclass(frozen=True)
class FusedChain:
    """A chain that runs fused.

    Attributes:
        module: Path of the module whose call holds it; ``""`` for the model itself.
        chain: The chain in words.
    """

    module: str
    chain: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.chain}"


@dataclass(frozen=True)
class FusionReport:
    """What runs fused in a model, as of when it is read. ``print`` shows it as a list."""

    model: nn.Module = field(repr=False)

    @property
    def chains(self) -> tuple[FusedChain, ...]:
        """Those of the calls so far: a chain is found when it is first called."""
        forwards = _forwards(self.model)
        return tuple(FusedChain(path, chain) for path, forward in forwards for chain in forward.chains.elements())

    def __str__(self) -> str:
        chains = self.chains
        if not chains and not any(forward.has_run for _, forward in _forwards(self.model)):
            return "chains are found in the model's first call"
        count = f"{len(chains)} chain{'' if len(chains) == 1 else 's'}"
        return "\n".join([count, *(f"  {each}" for each in chains)])


def fuse(model: nn.Module) -> FusionReport:
    """Let the chains of the family in a model run fused, in place.

    Chains are found when the model, or a part of it, is first called, in training and in evaluation. The smallest
    modules whose call holds a whole chain are captured by Dynamo, as ``torch.compile`` does it, and run without a
    compiler: with other shapes, dtypes or modes, and after a change of what they read, they are captured again.
    Parameters, state_dict, optimisers and hooks stay what they are.

    Results, their strides and gradients are the plain model's up to rounding.

    Args:
        model: The model to change.

    Returns:
        A report that tells, whenever it is read, which chains were found.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.

    Example::

        model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU())
        report = ops.fuse(model)
        model(torch.randn(16, 64))
        print(report)
    """
    unfuse(model)
    for module in list(model.modules()):
        if _may_hold(module):
            module.forward = FusedForward(module)
    return FusionReport(model)


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse``, in place: every module runs its class's forward again.

    A model that was never fused stays as it is.

    Args:
        model: The model to change.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if _fused_forward(module):
            del module.forward


def _forwards(model: nn.Module) -> Iterator[tuple[str, "FusedForward"]]:
    for path, module in model.named_modules():
        if forward := _fused_forward(module):
            yield path, forward


def _fused_forward(module: nn.Module) -> "FusedForward | None":
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, FusedForward) else None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it has a forward that the user set on it."""
    return "forward" in module.__dict__ and not _fused_forward(module)


def _may_hold(module: nn.Module) -> bool:
    """Whether a chain may lie in its forward: none of PyTorch's layers and wrappers, and none of ours."""
    if isinstance(module, torch.jit.ScriptModule) or _has_own_forward(module):
        return False
    kind = type(module)
    owner = getattr(kind.forward, "__module__", None) or ""
    is_container = owner.startswith("torch.nn.modules.") and module._modules
    is_method = kind.forward is not nn.Module.forward and not isinstance(
        inspect.getattr_static(kind, "forward"), (staticmethod, classmethod)
    )
    return is_method and (bool(is_container) or not owner.startswith(("torch.", "ops.")))


_numbers = itertools.count()
#: Taken while a model is looked at, which changes its modules.
_looking = threading.RLock()


def _call(module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
    return type(module).forward(module, *arguments, **options)


def captured(taker: Any, whole: bool = True) -> Callable:
    """A function of a module and its call's arguments, behind Dynamo.

    ``taker.take`` gets its graphs, and may return what is to run in a graph's place. A call is captured as one graph
    (``whole``), or Dynamo raises its error before anything was done.

    The function's code is a copy with a name of its own: Dynamo counts what it captures of each code, and remembers by
    its name which sizes changed. Dynamo keeps its backends for good: this one keeps nothing alive.
    """
    code = _call.__code__.replace(co_name=f"{_call.__name__}_{next(_numbers)}")
    copy = types.FunctionType(code, dict(_call.__globals__))
    function = torch.compile(copy, backend=functools.partial(_give, weakref.ref(taker)), fullgraph=whole)
    weakref.finalize(function, torch._dynamo.reset_code, code).atexit = False
    return function


def _give(taker: weakref.ref, graph: GraphModule, inputs: Any) -> Callable:
    alive = taker()
    result = alive and alive.take(graph)
    for each in rewriting.graphs(graph):
        for node in each.graph.nodes:
            if node.target is _CHECKPOINT and "context_fn" not in node.kwargs:
                node.target, node.kwargs = _checkpoint, {}
            elif node.target is torch.ops.normfuse.chain.default:
                node.target = call_in_graph
        each.recompile()
    return result or graph.forward


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def _checkpoint(body: GraphModule, *arguments: Any) -> Any:
    """A checkpoint in a graph that runs as it is, as eager PyTorch's. (The operator leaves random numbers to Inductor.)

    Buffers are arguments here. A checkpoint would keep those, to which its body may write.
    """
    kept = {place: each for place, each in enumerate(arguments) if getattr(each, "requires_grad", False)}

    def run(*given: torch.Tensor) -> Any:
        replaced = dict(zip(kept, given, strict=True))
        return body(*[replaced.get(place, each) for place, each in enumerate(arguments)])

    return checkpoint(run, *kept.values(), use_reentrant=False)


class FusedForward:
    """The ``forward`` attribute of a module in a model that ``fuse`` changed.

    At first it finds out which modules hold the chains of a call. Afterwards it is left to those, which run fused, to
    what is in them, which is captured with them, and to the modules that the user calls, which find out again in the
    other mode. A module that cannot be captured whole runs as it was written, and the modules in it find out for
    themselves.

    Attributes:
        module: The module that it belongs to.
        chains: Those of its calls in words, each as often as it is in one graph.
        has_run: The modes (``training``) in which chains were looked for.
        is_fused: Whether it runs fused.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.chains: Counter[str] = Counter()
        self.has_run: set[bool] = set()
        self.is_fused = False
        self._hooks: tuple = ()
        self._function: Callable | None = None

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        module = self.module
        given = (*arguments, *options.values())
        if torch.compiler.is_compiling() or has_global_hook() or any(map(_is_of_a_subclass, given)):
            return _call(module, *arguments, **options)
        if run := self._captured():
            try:
                return run(module, *arguments, **options)
            except torch._dynamo.exc.Unsupported:
                self.is_fused, self.has_run, self.chains = False, {True, False}, Counter()
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit):
                pass  # what a call raises by itself, PyTorch raises in its own words
        return _call(module, *arguments, **options)

    def _captured(self) -> Callable | None:
        """What captures the call; None where the forward runs as it was written."""
        if not self.is_fused:
            return None if self.module.training in self.has_run else self._look
        hooks = _hooks_of(self.module)  # of which Dynamo's guards know nothing
        if self._function is None:
            self._hooks, self._function, self.chains = hooks, captured(self), Counter()
        return self._function if hooks == self._hooks else None

    def take(self, graph: GraphModule) -> None:
        """Rewrite what was captured of a fused call."""
        self.chains |= Counter([each.chain for each in rewriting.rewrite(graph)])

    def _look(self, module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
        """The call, by which it is found out which modules hold chains: these are fused from the next one on."""
        search, training = _Search(module), module.training
        result = captured(search)(module, *arguments, **options)
        if search.called:
            with _looking:
                self.has_run.add(training)
                search.install()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> types.CodeType:
        """torch.export asks a forward for its file and line."""
        return type(self.module).forward.__code__


class _Search:
    """Finds out, of the graph of a module's call, which modules hold chains."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = {str(id(each)): each for each in module.modules()}
        self.called: set[nn.Module] = set()
        self._holders: dict[nn.Module, Counter[str]] = {}

    def take(self, graph: GraphModule) -> None:
        """Rewrite a graph, and note whose chains were in it."""
        for each in rewriting.graphs(graph):
            self.called.update(*[self._around(rewriting.calls(node)) for node in each.graph.nodes])
        for chain in rewriting.rewrite(graph):
            around = [each for each in self._around(chain.calls) if not _has_own_forward(each)]
            if around:
                self._holders.setdefault(around[-1], Counter())[chain.chain] += 1

    def _around(self, keys: Iterable[str]) -> list[nn.Module]:
        """The modules in whose calls something was captured, by their ids, from the outside in."""
        return [self._module, *[self._modules[key] for key in keys if key in self._modules]]

    def install(self) -> None:
        """Have those that hold chains run fused, and the others that were called as before ``fuse``."""
        within = {each for holder in self._holders for each in holder.modules() if each is not holder}
        for each in self.called - {self._module, *self._holders} - within:
            forward = _fused_forward(each)
            if forward and not forward.is_fused:
                each.__dict__.pop("forward", None)
        for holder, chains in self._holders.items():
            if holder not in within:  # else what it is within is captured, and with it this one's chains
                forward = _fused_forward(holder) or FusedForward(holder)
                forward.chains, forward.is_fused = forward.chains | chains, True
                holder.forward = forward


def _is_of_a_subclass(value: Any) -> bool:
    """Whether it is a tensor of a class that may change what functions do to it. Dynamo loses some of their classes."""
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)


def _hooks_of(module: nn.Module, seen: tuple[nn.Module, ...] = ()) -> tuple:
    """What hooks there are on the modules in it, by their numbers. (``modules()`` would take three times as long.)"""
    found = (*module._forward_pre_hooks, *module._forward_hooks, *module._backward_pre_hooks, *module._backward_hooks)
    for child in module._modules.values():
        if child is not None and child not in seen:
            found += _hooks_of(child, (*seen, module))
    return found
