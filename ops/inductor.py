"""Direct calls: graphs that Inductor compiled run a plan's own function, without PyTorch's dispatcher and a lookup.

Such a graph's tensors lie in memory as they did when it was compiled, so a plan that was found once is the plan of all
its calls. Where a size is open, or an address may have any alignment, the plan is looked up in each call. Plans are
made by threads, and their kernels compiled by Inductor's workers, while Inductor compiles the rest of the graph: of
open sizes those of the call that it is compiled for.

Inductor asks a registry how an operator's call is written. Where that is gone, graphs call the operators.
"""

import ast
import concurrent.futures
import contextlib
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autotune_configs import tuning
from ops import compile_worker, compiling
from ops.plan import Plan

#: What finds the plan of a call of an operator, by the operator's name. It takes the operator's arguments. The plan
#: takes the tensors among them in a row.
PLANS: dict[str, Callable[..., Plan]] = {}

_REGISTRY = "torch._inductor.codegen.custom_extern_kernel_codegen"


class _Calls(dict[str, Callable[..., list[torch.Tensor]]]):
    """By the words that a graph has for a call: a function of its tensors in a row.

    Attributes:
        watcher: What is told of each call its operator's name, that operator's arguments and the plan; None if nothing.
    """

    watcher: Callable[[str, list[Any], Plan], None] | None = None

    def __missing__(self, words: str) -> Callable[..., list[torch.Tensor]]:
        name, arguments, layouts = ast.literal_eval(words)

        def look_up(*tensors: torch.Tensor) -> list[torch.Tensor]:
            if (begun := _begun.pop(words, None)) is not None:
                concurrent.futures.wait(begun.values())  # what went wrong there is told by what is made here
            plan = _plan_of(name, arguments, tensors)
            if self.watcher:
                self.watcher(name, _filled(arguments, iter(tensors)), plan)
            elif layouts:
                self[words] = plan.function
            return plan.run(tensors)

        self[words] = look_up
        return look_up


calls = _Calls()


@contextlib.contextmanager
def watched(watcher: Callable[[str, list[Any], Plan], None]) -> Iterator[None]:
    """Let a function be told of all calls of compiled graphs."""
    calls.clear()
    calls.watcher = watcher
    try:
        yield
    finally:
        calls.watcher = None


#: By the same words, and by how the tensors lie in memory: the plans that threads make.
_begun: dict[str, dict[str, concurrent.futures.Future[Plan]]] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begun.clear)  # a child has none of the threads


@dataclass(frozen=True)
class _Described:
    """What a plan depends on of a tensor that is not there yet."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """Modulo 16: memory begins at multiples of that."""
        return self.offset * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape, *self.strides, self.offset]}"


def tensors_in(arguments: Any) -> list[Any]:
    """The tensors among an operator's arguments, or what stands for them, in a row."""
    rows = [each if isinstance(each, (list, tuple)) else [each] for each in arguments]
    return [each for row in rows for each in row if not isinstance(each, (str, bool))]


def _without_tensors(arguments: Any) -> list[Any]:
    # fmt: off
    return [
        [None] * len(each) if isinstance(each, (list, tuple)) else each if isinstance(each, (str, bool)) else None
        for each in arguments
    ]
    # fmt: on


def _filled(arguments: Any, tensors: Iterator[Any]) -> list[Any]:
    """An operator's arguments, of which the tensors were left out."""
    return [
        next(tensors) if each is None else _filled(each, tensors) if isinstance(each, list) else each
        for each in arguments
    ]


def register() -> None:
    """Let Inductor, once it is loaded, write the calls of the operators in ``PLANS``."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        for name in PLANS:
            custom = registry.CustomCodegen(python=_write)
            registry.CUSTOM_EXTERN_KERNEL_CODEGEN.setdefault(f"torch.ops.normfuse.{name}", custom)


def reset() -> None:
    """Forget what compiled graphs hold on to: the functions that they call, and CUDA graphs with their memory."""
    calls.clear()
    for begun in _begun.values():
        for each in begun.values():
            each.cancel()
    _begun.clear()
    compile_worker.forget()
    if trees := sys.modules.get("torch._inductor.cudagraph_trees"):
        trees.reset_cudagraph_trees()


def begin(graph: torch.fx.Graph) -> None:
    """Let Inductor's workers compile the kernels of a graph's calls, as their tensors lie in memory so far."""
    if not _may_begin():
        return
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "normfuse":
            name = node.target.__name__
            described = [_of_fake(each.meta.get("val")) for each in tensors_in(node.args)]
            known = [each for each in described if each is not None]
            if name in PLANS and known and len(known) == len(described):
                call = name, _without_tensors(node.args), known
                compile_worker.ask(known[0].device, _plan_of, *call, is_early=True)


def _may_begin() -> bool:
    """Whether others than the thread that runs a graph may compile for it."""
    from torch._inductor import config

    return compiling.IN_THREADS and config.compile_threads != 1 and not tuning.is_on()  # which would sweep there


def _write(node: Any, writeline: Callable[[str], None]) -> None:
    """Write a call of one of the operators, a ``FallbackKernel`` of Inductor's."""
    from torch._inductor.virtualized import V

    arguments, _ = node.unflatten_args(node.inputs, node.constant_args)
    tensors = tensors_in(arguments)
    without_tensors = _without_tensors(arguments)
    name, described, are_known = node.op_overload.__name__, *_described(tensors, V.graph.unaligned_buffers)
    layouts = f"{described[0].device}: {', '.join(map(str, described))}" if described else ""
    words = repr((name, without_tensors, layouts if are_known else ""))
    is_made = (are_known and words in calls) or layouts in _begun.get(words, {})
    if described and not is_made and _may_begin():
        call = name, without_tensors, described
        asked = compile_worker.ask(described[0].device, _plan_of, *call)
        _begun.setdefault(words, {})[layouts] = compiling.threads("plans").submit(_make, asked, *call)
    V.graph.wrapper_code.add_import_once("from ops import inductor as normfuse")
    given = ", ".join([each.codegen_reference() for each in tensors])
    is_list = isinstance(node.op_overload._schema.returns[0].type, torch.ListType)
    writeline(f"{node.get_name()} = normfuse.calls[{words!r}]({given}){'' if is_list else '[0]'}")


def _make(asked: concurrent.futures.Future | None, *call: Any) -> Plan:
    """The plan of a call, made by a thread."""
    compile_worker.wait(asked)
    return _plan_of(*call)


def _plan_of(name: str, arguments: list[Any], tensors: Iterable[Any]) -> Plan:
    """The plan of an operator's call with these tensors, or with what stands for them."""
    return PLANS[name](*_filled(arguments, iter(tensors)))


def _described(tensors: list[Any], unaligned: Container[str]) -> tuple[list[_Described], bool]:
    """Inductor's tensors as they lie in memory in the call that it compiles for, and whether that is the same in all
    calls. No tensors, where values decide a size."""
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    def number(size: Any) -> int:
        return int(size) if _is_known(size) else V.graph.sizevars.optimization_hint(size)

    found, are_known = [], True
    for each in tensors:
        shape, strides, offset = each.get_size(), each.get_stride(), each.get_layout().offset
        numbers = (*shape, *strides, offset)
        if free_unbacked_symbols(numbers):
            return [], False
        are_known &= each.get_name() not in unaligned and all(map(_is_known, numbers))
        places = torch.Size(map(number, shape)), tuple(map(number, strides))
        found.append(_Described(*places, each.get_dtype(), each.get_device(), number(offset)))
    return found, are_known


def as_called(sizes: Iterable[Any]) -> list[int] | None:
    """A fake tensor's sizes in the call that is compiled for, without guards on them; None where values decide one."""
    numbers = [each if type(each) is int else each.node.hint for each in sizes]
    return None if None in numbers else numbers


def _of_fake(tensor: Any) -> _Described | None:
    """A fake tensor as it lies in memory in the call that is compiled for; None where values decide a size."""
    if not isinstance(tensor, torch.Tensor):
        return None
    numbers = as_called((*tensor.shape, *tensor.stride(), tensor.storage_offset()))
    if numbers is None:
        return None
    shape, strides = numbers[: tensor.ndim], numbers[tensor.ndim : -1]
    return _Described(torch.Size(shape), tuple(strides), tensor.dtype, tensor.device, numbers[-1])


def _is_known(size: Any) -> bool:
    return isinstance(size, int) or size.is_number
