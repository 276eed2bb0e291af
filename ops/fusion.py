"""What becomes of the calls of a module that ``fuse`` changed.

Dynamo captures the model's first call, and the rewriter of the backend (``ops.rewriting``) says which chains are in it.
The smallest modules whose call holds a whole chain have their calls captured, and the graph runs as it is, with a call
in the place of each chain. All others stay as they were.
"""

import inspect
import itertools
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ops import rewriting
from ops.capture import Attempts, Captured, NotCaptured, observer

#: A module's attribute that has its Fusion: the one place that says that it runs fused.
_ATTRIBUTE = "_normfuse_fusion"


def of(module: nn.Module) -> "Fusion | None":
    return module.__dict__.get(_ATTRIBUTE)


def install(module: nn.Module, everything: bool, attempts: Attempts) -> "Fusion":
    """Have the module's calls captured. A forward that somebody wrapped around ours stays."""
    fusion = module.__dict__[_ATTRIBUTE] = Fusion(module, everything, attempts)
    _set_forward(module)
    return fusion


def _set_forward(module: nn.Module) -> None:
    if not _has_own_forward(module):
        module.__dict__.pop("forward", None)  # so that it stands behind the Fusion
        module.__dict__["forward"] = types.MethodType(_function(module), module)


def remove(module: nn.Module) -> None:
    """Have the module's calls as before ``fuse``. Ours within a wrapper runs the class's forward from now on."""
    module.__dict__.pop(_ATTRIBUTE, None)
    if _is_ours(module.__dict__.get("forward")):
        del module.__dict__["forward"]


def _function(module: nn.Module) -> types.FunctionType:
    """What a fused module has for a ``forward``, which tells of itself what its class's tells."""
    written = type(module).forward
    places = inspect.unwrap(written)
    function = types.FunctionType(_CODE, places.__globals__, written.__name__, None, _CLOSURE)
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        setattr(function, name, getattr(written, name))
    function.__signature__ = inspect.signature(written)  # type: ignore[attr-defined]
    return function


def _closure(call: Callable) -> Any:
    def forward(self, /, *arguments, **options):
        return call(self, arguments, options)

    return forward


def _call(module: nn.Module, arguments: tuple, options: dict[str, Any]) -> Any:
    fusion = module.__dict__.get(_ATTRIBUTE)
    if fusion is None:
        return type(module).forward(module, *arguments, **options)
    if torch.compiler.is_compiling():  # and does not take the class where that is marked by allow_in_graph
        if fusion.sought_as is not None:
            _note_compiled(fusion.sought_as)
        return fusion.written(module, *arguments, **options)
    return fusion.call(arguments, options)


#: The numbers of the Fusions to which the calls came that Dynamo is capturing.
_compiled: ContextVar[set[int]] = ContextVar("_compiled")


def _note_compiled(number: int) -> None:
    """Called while Dynamo captures, not by what it captured (``assume_constant_result``)."""
    if (compiled := _compiled.get(None)) is not None:
        compiled.add(number)


_CODE, _CLOSURE = (lambda function: (function.__code__, function.__closure__))(_closure(_call))


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, types.MethodType) and getattr(forward.__func__, "__code__", None) is _CODE


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a forward was set on it that is neither ours nor its class's, as tools leave that behind."""
    forward = module.__dict__.get("forward")
    return not (forward is None or _is_ours(forward) or forward == types.MethodType(type(module).forward, module))


def is_passed_over(module: nn.Module) -> bool:
    return _has_own_forward(module) and of(module) is None and _is_written(module)


def may_hold(module: nn.Module) -> bool:
    """Whether a chain may lie in its class's forward, and its calls go there."""
    return _is_written(module) and not _has_own_forward(module)


def _is_written(module: nn.Module) -> bool:
    """Whether its class has a forward that is none of PyTorch's layers' and wrappers', and none of ours."""
    written = inspect.getattr_static(type(module), "forward")
    owner = getattr(written, "__module__", None) or ""
    is_container = owner.startswith("torch.nn.modules.") and bool(module._modules)
    is_method = inspect.isfunction(written) and written is not nn.Module.forward
    is_users = is_container or not owner.startswith(("torch.", "ops."))
    return is_method and is_users and not isinstance(module, torch.jit.ScriptModule)


@dataclass
class _Record:
    """The chains of a module's last call, and how often it ran fused, and, by the reason, as it was written.

    It is kept by captured graphs, and keeps nothing alive."""

    chains: tuple[str, ...] = ()
    fused: int = 0
    as_written: Counter[str] = field(default_factory=Counter)

    def note(self, chains: tuple[str, ...], reason: str = "no chain is fused at these sizes") -> None:
        self.chains = chains
        if chains:
            self.fused += 1
        else:
            self.as_written[reason] += 1

    @property
    def is_counted(self) -> bool:
        return self.fused > 0 or len(self.as_written) > 0


_numbers = itertools.count()

#: Taken while a model is looked at, which changes its modules.
_looking = threading.RLock()


class Fusion:
    """What becomes of a module's calls in a model that ``fuse`` changed.

    At first it finds out which modules hold the chains of a call. Afterwards it is left to those, which run fused, to
    what is in them, which is captured with them, and to the modules that the user calls, which find out again in the
    other mode. A call that cannot be captured whole runs as it was written, and the modules in it find out for
    themselves.

    Attributes:
        sought_as: Its number while it is found out which modules hold chains. Else it has none, or compiled code, which
            is guarded by that, would be of one module alone.
        written: The forward that compilers see.
        holds: Whether chains were found of which it is the smallest module.
        looked: The modes (``training``) in which chains were looked for.
        record: What its calls ran.
        left: Path within it, chain and reason of each chain that is left to PyTorch.
    """

    def __init__(self, module: nn.Module, everything: bool, attempts: Attempts) -> None:
        self._module, self._everything, self._attempts = module, everything, attempts
        self.sought_as: int | None = None
        torch.compiler.assume_constant_result(_note_compiled)  # not before, as it loads Dynamo
        self.written = type(module).forward
        self.holds = False
        self.looked: set[bool] = set()
        self.record = _Record()
        self.left: list[tuple[str, str, str]] = []
        self._refusals: dict[tuple, Any] = {}
        #: By the hooks on what is in it, of which Dynamo's guards know nothing.
        self._captured: dict[tuple, Captured] = {}
        self._hooks: tuple = ()  # in its last call
        self._forward: Any = None  # by which that got here

    def __reduce__(self) -> tuple:
        """A copy of the module is one that was just fused. Its ``forward`` is pickled by that name: in the module's
        ``__dict__`` this stands before it."""
        return install, (self._module, self._everything, self._attempts)

    @property
    def chains(self) -> tuple[str, ...]:
        """Those of the last call, if the next one can be as that."""
        return self.record.chains if self.is_reached and self._takes(_hooks_of(self._module)) else ()

    @property
    def is_reached(self) -> bool:
        """Whether the module's calls get here, as the last one did."""
        forward = self._module.__dict__.get("forward")
        return _is_ours(forward) or (forward is not None and forward == self._forward)

    def _takes(self, hooks: tuple) -> bool:
        """Whether a call with these hooks is captured: with none, and with those that were there from the first on."""
        return not hooks or hooks in self._captured or (not self._captured and hooks == self._hooks)

    def call(self, arguments: tuple, options: dict[str, Any]) -> Any:
        """The module's call."""
        module = self._module
        self._forward = module.__dict__.get("forward")
        if self.holds or module.training not in self.looked:
            try:
                return self._call_captured(module, arguments, options)
            except NotCaptured as error:
                self.record.note((), str(error))
        return type(module).forward(module, *arguments, **options)

    def _call_captured(self, module: nn.Module, arguments: tuple, options: dict[str, Any]) -> Any:
        if reason := observer((*arguments, *options.values())):
            raise NotCaptured(reason)
        if not self.holds:
            return self._look(module, arguments, options)
        hooks = _hooks_of(module)
        takes, self._hooks = self._takes(hooks), hooks
        if not takes:
            raise NotCaptured("there are other hooks in it than in its first fused call")
        if hooks not in self._captured:
            self._captured[hooks] = self._captured_for(self)
        return self._captured[hooks](module, arguments, options)

    def hold(self, chains: tuple[str, ...]) -> None:
        """From now on the module's calls are captured, of which the last had these chains."""
        _set_forward(self._module)
        self.holds, self._hooks = True, _hooks_of(self._module)
        self._forward = self._module.__dict__["forward"]
        self.record.note(chains)

    def _captured_for(self, taker: Any) -> Captured:
        for each in self._module.modules():
            if fusion := of(each):
                fusion.written = type(each).forward
        return Captured(taker, self._refusals, self._attempts)

    def _look(self, module: nn.Module, arguments: tuple, options: dict[str, Any]) -> Any:
        """The call, by which it is found out which modules hold chains: these are fused from the next one on."""
        search, training = _Search(module, self.rewrite), module.training
        token, sought = _compiled.set(search.compiled), [fusion for each in module.modules() if (fusion := of(each))]
        for each in sought:
            each.sought_as = next(_numbers)
        try:
            result = self._captured_for(search)(module, arguments, options)
        finally:
            _compiled.reset(token)
            for each in sought:
                each.sought_as = None
        if search.called:
            with _looking:
                self.looked.add(training)
                search.install(self._everything, self._attempts)
        return result

    def take(self, graph: GraphModule) -> Callable:
        """What is to run in the place of a fused call's graph."""
        chains, record = tuple([each.chain for each in self.rewrite(graph)]), self.record

        def run(*inputs: Any) -> Any:
            record.note(chains)
            return graph.forward(*inputs)

        return run

    def rewrite(self, graph: GraphModule) -> list[rewriting.Rewritten]:
        """Put calls in the place of the graph's chains, where that is faster."""
        found = rewriting.rewrite(graph, everything=True) if self._everything else rewriting.rewrite(graph)
        paths = {str(id(module)): path for path, module in self._module.named_modules()}
        for each in found:
            if each.left:
                within = [paths[_id(key)] for key in each.calls if _id(key) in paths]
                self.left.append((within[-1] if within else "", each.chain, each.left))
        return [each for each in found if not each.left]


class _Search:
    """Finds out, of the graph of a module's call, which modules hold chains."""

    def __init__(self, module: nn.Module, rewrite: Callable) -> None:
        self._module, self._rewrite = module, rewrite
        self._modules = {str(id(each)): each for each in module.modules()}
        self.called: set[nn.Module] = set()
        self.compiled: set[int] = set()
        #: Of each chain: the calls around it, and what it is.
        self._found: list[tuple[dict[str, nn.Module], str]] = []

    def take(self, graph: GraphModule) -> None:
        """Rewrite a graph, and note whose chains were in it."""
        for each in rewriting.graphs(graph):
            self.called.update(*[self._around(rewriting.calls(node)).values() for node in each.graph.nodes])
        for chain in self._rewrite(graph):
            around = {key: each for key, each in self._around(chain.calls).items() if self._is_reached(each)}
            if around:
                self._found.append((around, chain.chain))

    def _is_reached(self, module: nn.Module) -> bool:
        """Whether its calls go to its class's forward by way of its Fusion, or can."""
        fusion = of(module)
        by_wrapper = fusion and (module is self._module or fusion.sought_as in self.compiled)
        return bool(by_wrapper) or not _has_own_forward(module)

    def _around(self, calls: Iterable[str]) -> dict[str, nn.Module]:
        """The modules in whose calls something was captured, by the calls, from the outside in."""
        return {"": self._module} | {key: self._modules[_id(key)] for key in calls if _id(key) in self._modules}

    def install(self, everything: bool, attempts: Attempts) -> None:
        """Have those that hold chains run fused, and the others that were called as before ``fuse``."""
        holders = {[*around.values()][-1] for around, _ in self._found}
        within = {each for holder in holders for each in holder.modules() if each is not holder}
        for each in self.called - {self._module} - holders - within:
            if (fusion := of(each)) and not fusion.holds:
                remove(each)
        # What is within another holder is captured with that, and so are its chains.
        ran: dict[nn.Module, dict[str, list[str]]] = {}
        for around, chain in self._found:
            call = next((key for key, each in around.items() if each in holders - within), None)
            if call is not None:
                ran.setdefault(around[call], {}).setdefault(call, []).append(chain)
        for holder, calls in ran.items():
            fusion = of(holder) or install(holder, everything, attempts)
            fusion.hold(tuple(next(iter(calls.values()))))


def _id(call: str) -> str:
    """The id of the module that was called."""
    return call.partition("@")[0]


def _hooks_of(module: nn.Module, seen: tuple[nn.Module, ...] = ()) -> tuple:
    """What hooks there are on the modules in it, by their numbers. (``modules()`` would take three times as long.)"""
    found = (*module._forward_pre_hooks, *module._forward_hooks, *module._backward_pre_hooks, *module._backward_hooks)
    for child in module._modules.values():
        if child is not None and child not in seen:
            found += _hooks_of(child, (*seen, module))
    return found
