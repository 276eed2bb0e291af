"""The fingerprint in an operator's text: what a compiled graph depends on beside what the graph shows.

PyTorch's caches know a graph by its operators and their arguments, and live as long as their folder. So a text tells
the version of this project that wrote it, whether kernels run in Triton's interpreter, and what code a user's pointwise
functions have: ``normfuse 0.2.0, interpreted, my_silu 0f3a9c21d5``.
"""

import functools
import hashlib
import sys
import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ops import __version__
from triton_kernels.built_in import name_of, named
from triton_kernels.device import INTERPRETED
from triton_kernels.pointwise import Pointwise

_PROJECT = "normfuse"
#: What these packages and Python's own have is not looked into: their versions are in the caches' keys.
_LIBRARIES = {"builtins", "numpy", "torch", "triton", *sys.stdlib_module_names} - {"__main__"}
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device)


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
    return hashlib.sha256("\n".join(_described(functions, set())).encode()).hexdigest()[:10]


def _described(value: Any, seen: set[int]) -> Iterator[str]:
    """What a value does or is, with all that it reaches, in words that are the same in another process."""
    if isinstance(value, _CONSTANTS):
        yield repr(value)
    elif isinstance(value, types.CodeType):
        yield f"{value.co_code!r} {value.co_names} {value.co_argcount} {value.co_freevars}"
        yield from _described(value.co_consts, seen)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _described(each, seen)
    elif isinstance(value, (set, frozenset)):
        yield f"set {sorted(map(repr, value))}"
    elif isinstance(value, dict):
        yield f"dict {list(map(str, value))}"
        yield from _described(list(value.values()), seen)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    elif isinstance(value, tl.constexpr):
        yield from _described(value.value, seen)
    elif id(value) in seen:
        yield "again"
    elif (getattr(value, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES and callable(value):
        yield from _of_library(value, seen)
    else:
        seen.add(id(value))
        yield from _of_user(value, seen)


def _of_library(value: Any, seen: set[int]) -> Iterator[str]:
    """By its name, and what it holds of a user's: a jit function, a bound method, or a partial's function."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    yield f"{getattr(value, '__module__', '')}.{name}"
    if isinstance(value, triton.runtime.KernelInterface):
        yield from _described(value.fn, seen)
    elif isinstance(value, functools.partial):
        yield from _described((value.func, value.args, value.keywords), seen)
    elif not isinstance(value, (type, types.FunctionType)):
        yield from _described((getattr(value, "__self__", None), getattr(value, "__dict__", None)), seen)


def _of_user(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, triton.runtime.KernelInterface):
        yield from _described(value.fn, seen)
    elif isinstance(value, types.FunctionType):
        yield from _described((value.__code__, value.__defaults__, value.__kwdefaults__), seen)
        yield from _described([cell.cell_contents for cell in value.__closure__ or ()], seen)
        names = _names(value.__code__)
        for each in (value.__globals__[name] for name in names if name in value.__globals__):
            if not isinstance(each, types.ModuleType):
                yield from _described(each, seen)
            elif each.__name__.partition(".")[0] not in _LIBRARIES:
                yield from _described([vars(each)[name] for name in names if name in vars(each)], seen)
    elif isinstance(value, types.MethodType):
        yield from _described((value.__func__, value.__self__), seen)
    elif isinstance(value, type):
        code = (types.FunctionType, staticmethod, classmethod)
        for base in value.__mro__:
            if base.__module__.partition(".")[0] not in _LIBRARIES:
                own = [getattr(each, "__func__", each) for each in vars(base).values() if isinstance(each, code)]
                yield from _described(own, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        yield from _described((type(value), vars(value)), seen)
    else:  # what cannot be told is never found again
        yield str(uuid.uuid4())


def _names(code: types.CodeType) -> list[str]:
    """The names in a function's code, and in that of functions within it."""
    nested = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*code.co_names, *(name for each in nested for name in _names(each))]
