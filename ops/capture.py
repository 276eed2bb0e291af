"""A module's call behind Dynamo, as ``torch.compile`` has it, whose graphs run in eager PyTorch."""

import contextlib
import functools
import itertools
import math
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from ops import rewriting
from ops.chain import call_in_graph
from ops.submodules import has_global_hook


class NotCaptured(Exception):
    """A call was not captured, for this reason. Nothing of it was done."""


def observer(given: tuple[Any, ...]) -> str:
    """What sees the functions of a call with these arguments, so that it has to run as it was written; "" if nothing
    does."""
    if has_global_hook():
        return "a hook is set for all modules"
    if is_in_torch_dispatch_mode(include_infra_modes=False) or get_proxy_mode():  # which is PyTorch's own: make_fx's
        return "a TorchDispatchMode is on"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "it is transformed by torch.func or differentiated forward"
    # Dynamo loses some of their classes.
    if any(isinstance(each, (torch.Tensor, Proxy)) and type(each) not in _PLAIN_TENSORS for each in given):
        return "an argument is a tensor of a class of its own"
    return "torch.jit traces it" if torch._C._get_tracing_state() else ""


_PLAIN_TENSORS = torch.Tensor, nn.Parameter, FakeTensor


_SKIPPED = "Dynamo does not capture it now"


def _whole(forward: Callable, module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
    if not torch.compiler.is_compiling():
        raise NotCaptured(_SKIPPED)
    return forward(module, *arguments, **options)


def _in_parts(forward: Callable, module: nn.Module, /, *arguments: Any, **options: Any) -> Any:
    return forward(module, *arguments, **options)


_numbers = itertools.count()


def in_parts(taker: Any) -> Callable:
    """A function of a forward, its module and a call's arguments. ``taker.take`` gets what Dynamo captures of the call,
    a graph at a time; all else runs as it was written."""
    return _compiled(_copy(_in_parts), taker, fullgraph=False)


def _copy(function: Any) -> types.FunctionType:
    """Has code with a name of its own: Dynamo counts what it captures of each code, and remembers by its name which
    sizes changed."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, dict(function.__globals__))


#: The seconds that attempts to capture calls may take a model in all, and the share of the time since the first.
_ATTEMPTS_SECONDS, _ATTEMPTS_SHARE = 2.0, 0.01


@dataclass
class _Refusal:
    """Why calls of a kind were not captured, how often in a row, and how many more are not to be tried."""

    reason: str
    count: int = 0
    rest: int = 0


@dataclass
class Attempts:
    """To capture calls of a model's modules, in vain: when the first began, and the seconds that all took."""

    begin: float = math.inf
    seconds: float = 0.0

    def __reduce__(self) -> tuple:
        """That of a copied model begins anew: the clock is the process's."""
        return Attempts, ()

    def note(self, begin: float) -> None:
        self.begin = min(self.begin, begin)
        self.seconds += time.perf_counter() - begin

    @property
    def are_costly(self) -> bool:
        return self.seconds > max(_ATTEMPTS_SECONDS, _ATTEMPTS_SHARE * (time.perf_counter() - self.begin))


class Captured:
    """Calls of a module, each captured as one graph, or else not made.

    ``taker.take`` gets the graphs, and may return what is to run in a graph's place. What is captured is kept until a
    guard of Dynamo's fails. To find out that a call cannot be captured may take seconds. So it is tried again with the
    next of its kind, and then behind 1, 3, 7, 15, ... others that were not captured either; once all attempts in the
    model have taken two seconds, only while they are under a hundredth of the time. A kind has the same types of
    arguments, the same flags among them, and the same modes.

    Args:
        taker: What gets the graphs.
        refusals: By their kinds, the calls of the module that were not captured.
        attempts: Those in the module's model.
    """

    def __init__(self, taker: Any, refusals: dict[tuple, _Refusal], attempts: Attempts) -> None:
        self._taker, self._refusals, self._attempts = taker, refusals, attempts

    @functools.cached_property
    def _runs(self) -> tuple[Callable, Callable]:
        """What captures a call, and what runs it by the graphs that are there."""
        function = _copy(_whole)
        weakref.finalize(self, torch._dynamo.reset_code, function.__code__).atexit = False
        return _compiled(function, self._taker, fullgraph=True), torch._dynamo.run(function)

    def __call__(self, module: nn.Module, arguments: tuple, options: dict[str, Any]) -> Any:
        """The call. Raises NotCaptured where that has no graph."""
        forward = type(module).forward
        kind = _kind(module, arguments, options) if self._refusals else ()
        if refusal := self._refusals.get(kind):
            if "_runs" in self.__dict__:
                with contextlib.suppress(NotCaptured):
                    return self._runs[1](forward, module, *arguments, **options)
            if refusal.count > 1 and self._attempts.are_costly:
                raise NotCaptured(refusal.reason)
            if refusal.rest:  # counted while others may be tried alone, so that each has its turn
                refusal.rest -= 1
                raise NotCaptured(refusal.reason)
            if refusal.reason == _SKIPPED:  # Dynamo may have marked the code as one to skip
                self.__dict__.pop("_runs", None)
        start = time.perf_counter()
        try:
            result = self._runs[0](forward, module, *arguments, **options)
        except NotCaptured as error:
            reason = str(error)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = _reason(error)
        else:
            if refusal:
                del self._refusals[kind]
            return result
        refusal = self._refusals.setdefault(_kind(module, arguments, options), _Refusal(reason))
        refusal.reason, refusal.count, refusal.rest = reason, refusal.count + 1, 2**refusal.count - 1
        self._attempts.note(start)
        raise NotCaptured(reason)


def _reason(error: Exception) -> str:
    """What Dynamo says first: what it is, and why."""
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        return "Dynamo captures no more of it: its recompile_limit is reached"
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return f"Dynamo does not capture it: {'. '.join(filter(None, lines))[:300]}"


def _kind(module: nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple:
    given = [each if type(each) is bool else type(each) for each in (*arguments, *options.values())]
    return module.training, torch.is_grad_enabled(), *options, *given


def _compiled(function: Callable, taker: Any, fullgraph: bool) -> Callable:
    """Dynamo keeps its backends for good: this one keeps nothing alive. It has a name: behind others Dynamo leaves weak
    references to parameters, and what has one cannot be swapped, as ``Module.to`` does with quantised weights."""
    return torch.compile(function, backend=_backend(), options={"taker": weakref.ref(taker)}, fullgraph=fullgraph)


@functools.cache
def _backend() -> str:
    name = "normfuse_eager"
    given: Any = _give
    torch._dynamo.register_backend(given, name=name, tags=("debug",))  # which torch._dynamo.list_backends passes over
    return name


def _give(graph: GraphModule, inputs: Any, *, options: dict[str, Any]) -> Callable:
    taker = options["taker"]()
    result = taker and taker.take(graph)
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
