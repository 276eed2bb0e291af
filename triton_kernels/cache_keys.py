"""Keys in Triton's cache that do not depend on what a process compiled before."""

import threading
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

#: By their ids, functions that are hashed. They hash themselves by their keys.
_hashed: set[int] = set()
_lock = threading.RLock()


def hash_in_order(function: Any) -> None:
    """Have Triton hash the functions that a jit function calls before it hashes that.

    Before 3.8, a key has the constants of a called function only if that was hashed before. So one process would
    compile again what another one did, in another order.
    """
    with _lock:
        if isinstance(function, JITCallable) and id(function) not in _hashed:
            _hashed.add(id(function))
            for each in _called(function.fn):
                hash_in_order(each)
            _ = function.cache_key


def _called(function: Any) -> list[Any]:
    """What a function's names stand for, those of its modules' functions among them."""
    names, known = function.__code__.co_names, function.__globals__
    found = [known[name] for name in names if name in known]
    modules = [each for each in found if isinstance(each, ModuleType)]
    return found + [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
