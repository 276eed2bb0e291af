"""A module's forward with its chains fused, and the checks at each call that the module is still as it was traced."""

import functools
import inspect
import keyword
import re
import types
from typing import Any

import torch
from torch import nn

from ops import fuse_matching, submodules
from ops.fuse_matching import Match
from ops.fuse_tracing import is_sequential, parameters_of


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
