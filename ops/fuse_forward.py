"""A module's forward with its chains fused, and the checks at each call that the module is still as it was traced."""

import inspect
import keyword
import operator
import re
import types
from typing import Any

import torch
from torch import nn
from torch.fx.graph import PythonCode

from ops import fuse_matching, submodules
from ops.fuse_matching import Match
from ops.fuse_tracing import is_sequential, parameters_of


class FusedForward:
    """Stands where a module's ``forward`` is looked up, on the module itself; the class's own stays as it is.

    The trace took for given the class's forward, of an ``nn.Sequential`` the children's names and order, and that the
    modules of these names in the chains are of PyTorch's classes and run as PyTorch made them. Where one of these no
    longer holds, the class's forward runs as it is then. Nothing else is kept, no other module: what the forward reads
    and calls, the function made of the trace reads and calls too.
    """

    def __init__(self, module: nn.Module, graph: torch.fx.Graph, chains: list[Match], entries: tuple[Any, ...]):
        self.module = module
        self.entries = entries
        self.original: Any = type(module).forward
        self.parameters = parameters_of(self.original)
        self.sequence = tuple(module._modules) if is_sequential(module) else None
        nodes = [step.nodes[-1] for match in chains for step in match.steps]
        called = [str(node.target) for node in nodes if node.op == "call_module"]
        self.called = {name: type(getattr(module, name)) for name in called}
        # The chains as they were written, and the forward with a call in the place of each.
        plain = [fuse_matching.written_out(graph, match) for match in chains]
        graph = _with_calls(graph, chains)
        codes = [_code(each) for each in (*plain, graph)]
        self.functions = [(code.src, code.globals) for code in codes]
        self._compile()

    def _compile(self) -> None:
        *plain, self._function = [_function(*each) for each in self.functions]
        self._plain = tuple(types.MethodType(function, self.module) for function in plain)

    def _holds(self) -> bool:
        module = self.module
        if submodules.has_global_hook() or type(module).forward is not self.original:
            return False
        if self.sequence is not None and tuple(module._modules) != self.sequence:
            return False
        for name, kind in self.called.items():
            present: Any = getattr(module, name, None)
            if type(present) is not kind or submodules.change(present, kind):
                return False
        return True

    def __call__(self, *args, **kwargs):
        named = [kwargs[name] for name in self.parameters[len(args) :] if name in kwargs]
        fits = len(args) + len(named) == len(args) + len(kwargs) == len(self.parameters)
        if fits and self._holds():
            return self._function(self.module, self._plain, *args, *named)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_function", "_plain", "original")
        state = {name: value for name, value in self.__dict__.items() if name not in made}
        # Modules are no data; every graph's code has the same ones.
        functions = [
            (source, {name: value for name, value in names.items() if not isinstance(value, types.ModuleType)})
            for source, names in self.functions
        ]
        return state | {"functions": functions, "code": _fingerprint(self.original)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        code = state.pop("code")
        self.__dict__.update(state)
        # Of other code than that of the class as it is loaded, this is no trace, and holds for no forward.
        present = type(self.module).forward
        self.original = present if _fingerprint(present) == code else None
        modules = torch.fx.Graph().python_code("self").globals
        self.functions = [(source, {**modules, **names}) for source, names in self.functions]
        self._compile()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> types.CodeType:
        """torch.export asks a forward for its file and line."""
        return type(self.module).forward.__code__


def _with_calls(graph: torch.fx.Graph, chains: list[Match]) -> torch.fx.Graph:
    """The graph, changed: with a call in the place of each chain, and an argument more, after the module, that has the
    chains as they were written."""
    module = next(iter(graph.nodes))
    with graph.inserting_after(module):
        plain = graph.placeholder("chains_as_written")
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    # From the last on, since a chain's input may be the result of the one before it.
    for i, match in reversed(list(enumerate(chains))):
        with graph.inserting_after(last):
            which = graph.call_function(operator.getitem, (plain, i))
        fuse_matching.replace(graph, match, which)
    return graph


def _code(graph: torch.fx.Graph) -> PythonCode:
    """The graph's code, changing the graph: torch.fx writes the names of children into it as they are, so all but plain
    ones are spelled in a way in which any may stand there, be it ``in`` or ``it's``."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            node.target = ".".join(_spelled(name) for name in str(node.target).split("."))
    return graph.python_code("self")


def _spelled(name: str) -> str:
    is_plain = re.fullmatch("[A-Za-z0-9_]+", name) and not keyword.iskeyword(name)
    return name if is_plain else "".join(f"\\U{ord(character):08x}" for character in name)


def _function(source: str, global_names: dict[str, Any]) -> types.FunctionType:
    namespace = dict(global_names)
    exec(compile(source, "<ops.fuse>", "exec"), namespace)
    return namespace["forward"]


def _fingerprint(function: Any) -> tuple[Any, ...]:
    """What of a function's code a trace depends on, in a form that can be pickled."""
    if function is None:
        return ()
    code = function.__code__
    return code.co_code, code.co_names, code.co_varnames, repr(code.co_consts)
