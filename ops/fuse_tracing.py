"""Trace one module's forward, or say why a trace would not do the same as the forward does.

The forward runs once on proxies for the module and its arguments. Each operation on them becomes a node of a
``torch.fx`` graph. What the forward reads from its module, the graph reads at each call. That holds only for
straight-line code, so the bytecode is checked first. Only code that uses the module, its arguments and PyTorch's
functions is run at all.
"""

import dis
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, Proxy
from torch.fx.proxy import Attribute, GraphAppendingTracer

#: All that straight-line code needs, in Python 3.10 to 3.14; what is not here is refused.
_STRAIGHT = re.compile(
    "LOAD_(FAST|CONST|SMALL_INT|ATTR|METHOD|GLOBAL)|(STORE|DELETE)_FAST|CALL(?!_INTRINSIC)|PRECALL|KW_NAMES"
    "|BINARY_|INPLACE_|UNARY_(?!NOT)|COMPARE_OP|BUILD_(TUPLE|LIST|SLICE|MAP|CONST_KEY_MAP)|LIST_EXTEND|UNPACK_SEQUENCE"
    "|RETURN_(VALUE|CONST)|POP_TOP|DUP_TOP|ROT_|SWAP|COPY(?!_FREE)|RESUME|NOP|PUSH_NULL|EXTENDED_ARG"
)
#: Attributes of the proxies themselves, which would hide those of the values.
_OF_PROXIES = ("node", "tracer", "root", "attr", "_node", "keys")
_NUMBERS = (int, float, complex, np.integer, np.floating)
_PLAIN = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class NotTraceable(Exception):
    """Why a forward is not rewritten."""


def is_sequential(module: nn.Module) -> bool:
    """Whether its forward is that of ``nn.Sequential``, one child after the other."""
    iterates = getattr(type(module), "__iter__", None)
    return type(module).forward is nn.Sequential.forward and iterates is nn.Sequential.__iter__


def in_place(operation: str, left: Any, right: Any) -> Any:
    """``left += right`` and the like. PyTorch's own proxies would record ``left + right``."""
    return getattr(operator, operation)(left, right)


def unpacked(value: Any, count: int) -> tuple[Any, ...]:
    """``a, b = value`` with ``count`` targets. PyTorch's own proxies would not notice that there are more values."""
    values = tuple(value)
    if len(values) != count:
        raise ValueError(f"expected {count} values to unpack, got {len(values)}")
    return values


class _Value(Proxy):
    """Stands for an argument, an attribute of the module, or what is computed with them."""

    def __getattr__(self, name):
        return _Attribute(self, name)

    def __iter__(self):
        frame = inspect.currentframe().f_back
        here = next(each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti)
        if here.opname != "UNPACK_SEQUENCE":
            return super().__iter__()  # which raises an error
        values = self.tracer.create_proxy("call_function", unpacked, (self, here.argval), {})
        return iter([values[i] for i in range(here.argval)])

    # Python uses their results at once, as in "%s" % value or {1: x}.get(value). A graph could not record that.

    def __repr__(self):
        raise NotTraceable("it makes text of a value")

    def __hash__(self):
        raise NotTraceable("it looks a value up in a dictionary")


class _Attribute(Attribute, _Value):
    """Stands for an attribute of a value, read where the forward reads it, or for a method to be called."""

    def __init__(self, root, name):
        super().__init__(root, name)
        self.node  # noqa: B018 - makes the node here: what is written to the value later may change the attribute

    def __call__(self, *args, **kwargs):
        if self._node is not None and not self._node.users:
            self.tracer.graph.erase_node(self._node)
            self._node = None
        return super().__call__(*args, **kwargs)


for _name in "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split():
    setattr(
        _Value,
        f"__{_name}__",
        lambda left, right, name=_name: left.tracer.create_proxy("call_function", in_place, (name, left, right), {}),
    )


class _Tracer(GraphAppendingTracer):
    def proxy(self, node):
        return _Value(node, self)


def _stand_in_for_child(name: str, call: Callable[..., Any]) -> Any:
    """Stands for a child module, which can be called."""

    class Child:
        def __call__(self, *args, **kwargs):
            return call(args, kwargs)

        def __getattribute__(self, attribute):
            raise NotTraceable(f"it does more with {name} than to call it")

        __getitem__ = __getattribute__

    return Child()


def _stand_in_for_self(module: nn.Module, tracer: _Tracer) -> Any:
    """Stands for the module: its children can be called, its tensors and numbers are read."""

    class Self:
        def __getattribute__(self, name):
            of_class = inspect.getattr_static(type(module), name, None)
            if not isinstance(of_class, _PLAIN):
                raise NotTraceable(f"it uses its class's {name}, a {type(of_class).__name__}")
            value = getattr(module, name)
            if isinstance(value, nn.Module):
                return _stand_in_for_child(name, functools.partial(tracer.create_proxy, "call_module", name))
            if isinstance(value, (torch.Tensor, *_PLAIN)):
                return tracer.create_proxy("get_attr", name, (), {})
            raise NotTraceable(f"it reads {name}, a {type(value).__name__}")

    return Self()


@functools.cache
def _functions() -> set[int]:
    """The ids of PyTorch's functions that a proxy can record."""
    return {id(each) for functions in torch.overrides.get_overridable_functions().values() for each in functions}


def _check_code(forward: types.FunctionType) -> None:
    """Raise NotTraceable where code is not straight, or uses anything of Python's or the user's beside its module."""
    found: Any = None
    dotted = ""
    for instruction in dis.get_instructions(forward.__code__):
        operation, name = instruction.opname, instruction.argval
        if operation == "EXTENDED_ARG":
            continue
        reads = operation.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        if reads and isinstance(found, types.ModuleType) and found.__name__.split(".")[0] == "torch":
            found, dotted = getattr(found, name, None), f"{dotted}.{name}"
            continue
        if dotted and not (id(found) in _functions() or isinstance(found, (torch.dtype, torch.memory_format))):
            raise NotTraceable(f"it uses {dotted}, where a trace can use functions of tensors in torch alone")
        if operation in ("STORE_ATTR", "STORE_GLOBAL"):
            raise NotTraceable(f"it assigns to {name}")
        if not _STRAIGHT.match(operation):
            raise NotTraceable(f"it is not straight-line code: it branches, loops, assigns or the like ({operation})")
        if reads and (name in _OF_PROXIES or (name.startswith("__") and name.endswith("__"))):
            raise NotTraceable(f"it reads an attribute of the name {name}")
        found, dotted = (forward.__globals__.get(name), name) if operation == "LOAD_GLOBAL" else (None, "")


def parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters, but for the first, which is the module."""
    return tuple(inspect.signature(forward, follow_wrapped=False).parameters)[1:]


def _check(module: nn.Module) -> None:
    """Raise NotTraceable for a forward that a trace cannot stand for, without running it."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise NotTraceable("it is compiled by TorchScript")
    if type(module.__dict__.get("forward")).__name__ not in ("NoneType", "FusedForward"):
        raise NotTraceable("it has a forward of its own, beside its class's")
    if not isinstance(kind.forward, types.FunctionType):
        raise NotTraceable(f"its forward is a {type(kind.forward).__name__}, not a function")
    if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
        raise NotTraceable("its class looks attributes up in a way of its own")
    for parameter in list(inspect.signature(kind.forward, follow_wrapped=False).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            reason = "it has a default" if parameter.default is not parameter.empty else str(parameter.kind.description)
            raise NotTraceable(f"its forward's parameter {parameter.name} is not a plain one: {reason}")
    if not is_sequential(module):
        _check_code(kind.forward)


def trace(module: nn.Module) -> Graph:
    """The graph of a module's forward, NotTraceable where it cannot be had. The module is left as it was."""
    _check(module)
    forward = type(module).forward
    tracer = _Tracer(Graph())
    # Of the names that the generated code may have, none is one of the parameters'.
    tracer.graph.placeholder("self")
    arguments = [
        tracer.create_proxy("placeholder", f"argument_{i}", (), {}, name)
        for i, name in enumerate(parameters_of(forward))
    ]
    try:
        if is_sequential(module):
            (result,) = arguments
            for name in module._modules:
                result = tracer.create_proxy("call_module", name, (result,), {})
        else:
            result = forward(_stand_in_for_self(module, tracer), *arguments)
        tracer.graph.output(tracer.create_arg(result))
    except NotTraceable:
        raise
    except Exception as error:  # whatever comes of proxies that are no tensors
        raise NotTraceable(f"torch.fx cannot trace it: {type(error).__name__}: {error}") from error
    return tracer.graph
