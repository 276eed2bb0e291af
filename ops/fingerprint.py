"""The fingerprint in an operator's text: what a compiled graph depends on beside what the graph shows.

PyTorch's caches know a graph by its operators and their arguments, and live as long as their folder. So a text tells
the version of this project that wrote it, whether kernels run in Triton's interpreter, and what code a user's pointwise
functions have: ``normfuse 0.2.0, interpreted, my_silu 0f3a9c21d5``.
"""

import contextlib
import dis
import functools
import hashlib
import sys
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from ops import __version__
from triton_kernels.built_in import name_of, named
from triton_kernels.device import INTERPRETED
from triton_kernels.pointwise import Pointwise

_PROJECT = "normfuse"
#: What these packages and Python's own have is not looked into: their versions are in the caches' keys. (Classes that
#: are made at run time say that they are of "types".)
_LIBRARIES = {"builtins", "numpy", "torch", "triton", *sys.stdlib_module_names} - {"__main__", "types"}
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device)
_OF_CODE = "co_code co_names co_varnames co_freevars co_argcount co_kwonlyargcount co_flags".split()
_NAMED = type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType
#: What holds functions and cannot be pickled, and where.
_HOLDERS = types.MethodType, staticmethod, classmethod, property, functools.cached_property
_HELD = "__func__ __self__ fget fset func".split()


def fingerprint(steps: Iterable[Pointwise]) -> str:
    """That of a text which names these functions."""
    own = {f"{name_of(step)} {_hash(step)}": None for step in steps if named(name_of(step)) is None}
    return ", ".join([f"{_PROJECT} {__version__}", *(["interpreted"] if INTERPRETED else []), *own])


def check(found: str) -> None:
    """Raise a ValueError where another version wrote this fingerprint."""
    project, _, version = found.partition(", ")[0].partition(" ")
    if (project, version) != (_PROJECT, __version__):
        theirs = f"{_PROJECT} {version}" if project == _PROJECT else f"an early version of {_PROJECT}"
        raise ValueError(
            f"{theirs} made this graph, and {_PROJECT} {__version__} is to run it: compile or export the model again"
        )


@functools.cache
def _hash(step: Pointwise) -> str:
    functions = step.function, step.gradient, step.plain, step.forms, step.operand
    try:
        with no_dispatch():  # a tensor's values, where a compiler traces
            words = "\n".join(_described(functions, {}))
    except Exception:  # what cannot be told is never found again
        words = str(uuid.uuid4())
    return hashlib.sha256(words.encode()).hexdigest()[:10]


def _described(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """What a value does or is, with all that it reaches, in words that are the same in another process."""
    kind = type(value)
    if kind in _CONSTANTS:
        yield repr(value)
    elif kind is types.CodeType:
        yield str([getattr(value, name) for name in _OF_CODE])
        yield from _described(value.co_consts, seen)
    elif kind is tuple:
        yield f"tuple of {len(value)}"
        for each in value:
            yield from _described(each, seen)
    elif kind in (set, frozenset):
        yield f"set {sorted(str([*_described(each, dict(seen))]) for each in value)}"
    elif id(value) in seen:
        yield f"again {seen[id(value)][0]}"
    else:
        seen[id(value)] = len(seen), value  # kept, so that no other value gets its id
        yield from _of_object(value, seen)


def _of_object(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """What is a library's by its name, code by what it names, all else by its class and what it holds."""
    kind = type(value)
    if isinstance(value, _NAMED) and _is_of_library(value):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        yield from _described(getattr(value, "__self__", None), seen)  # of a built-in method
    elif kind is types.FunctionType:
        yield from _described((value.__code__, value.__defaults__, value.__kwdefaults__, vars(value)), seen)
        for each in _reached(value):
            yield from _described(each, seen)
    elif isinstance(value, type):
        yield value.__qualname__
        yield from _described((kind, value.__bases__), seen)
        for name, each in vars(value).items():
            is_code = callable(each) or isinstance(each, _HOLDERS)
            if is_code if name.startswith("__") else name != "_abc_impl":  # Python's own notes on the class
                yield name
                yield from _described(each, seen)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        yield f"{value.dtype} {value.shape}"
        yield hashlib.sha256(value.detach().cpu().flatten().view(torch.uint8).numpy()).hexdigest()
    elif kind in (list, dict, types.MappingProxyType):
        yield kind.__name__
        yield from _described(tuple(value if kind is list else value.items()), seen)
    elif kind.__module__.startswith("triton.") and hasattr(value, "fn"):  # a jit function
        yield from _described((kind, value.fn), seen)
    elif isinstance(value, _HOLDERS):
        yield from _described((kind, *[getattr(value, name, None) for name in _HELD]), seen)
    else:  # as it is pickled, with what that may leave out
        parts = [list(each) if hasattr(each, "__next__") else each for each in value.__reduce_ex__(2)]
        yield from _described((kind, *parts, getattr(value, "__dict__", None)), seen)


def _is_of_library(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return _is_library(value.__name__)
    return _is_library(value.__module__ or ("" if isinstance(value, types.FunctionType) else "builtins"))


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _reached(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function's code reaches by name: variables, imports, and of a user's modules what has one of the names."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    quoted = [each for code in codes for each in code.co_consts if isinstance(each, str)]  # as getattr takes them
    names = dict.fromkeys(
        [*function.__code__.co_freevars, *[name for code in codes for name in code.co_names], *quoted]
    )
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    reached = [(name, variables[name]) for name in names if name in variables]
    reached += [each for code in codes for each in _imported(code, function.__globals__)]
    modules: dict[types.ModuleType, None] = {}
    for _, each in reached:
        if isinstance(each, types.ModuleType) and each not in modules and not _is_of_library(each):
            modules[each] = None
            reached += [(name, getattr(each, name)) for name in names if hasattr(each, name)]
    return [each for each in reached if not isinstance(each[1], types.ModuleType)]


def _imported(code: types.CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, types.ModuleType]]:
    """The modules that are imported where the code runs, without libraries."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and (level.argval or not _is_library(step.argval)):
            with contextlib.suppress(ImportError):
                yield step.argval, __import__(step.argval, variables, None, names.argval or (), level.argval)
