"""Keys in Triton's cache that do not depend on what a process compiled before."""

import inspect
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

#: An attribute of functions that were hashed. (They hash themselves by their keys.)
_IS_HASHED = "_normfuse_is_hashed"


def hash_in_order(function: Any, above: tuple[Any, ...] = ()) -> None:
    """Have Triton hash the functions that a jit function calls before it hashes that.

    Before 3.8, a key has the constants of a called function only if that was hashed before. So one process would
    compile again what another one did, in another order.

    Args:
        function: Anything; what is no jit function stays as it is.
        above: Those that call it, which are being hashed.
    """
    if (
        not isinstance(function, JITCallable)
        or hasattr(function, _IS_HASHED)
        or any(function is each for each in above)
    ):
        return
    for each in _called(function.fn):
        hash_in_order(each, (*above, function))
    _ = function.cache_key
    setattr(function, _IS_HASHED, True)


def _called(function: Any) -> list[Any]:
    """What a function's names stand for, those of its modules' functions among them."""
    names, known = function.__code__.co_names, function.__globals__
    found = [*(known[name] for name in names if name in known), *inspect.getclosurevars(function).nonlocals.values()]
    modules = [each for each in found if isinstance(each, ModuleType)]
    return found + [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
