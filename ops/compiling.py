"""Threads make plans, and compile and load kernels: those of a plan side by side, and what two plans need once.

Triton compiles a kernel where it is called first, and again in each thread that calls it meanwhile. It loads a kernel
where it is run first, for which Triton 3.6 has a C compiler build what launches it.
"""

import functools
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from triton_kernels.launch import current

_MOST_THREADS = 8


def may_parse(version: tuple[int, ...]) -> bool:
    """Whether threads of this Python may parse at once, as Triton does to compile: before 3.11.8, 3.11 raises
    SystemErrors now and then (https://github.com/python/cpython/issues/106905)."""
    return not (3, 11) <= version < (3, 11, 8)


#: Whether threads compile. Else kernels are compiled where they are called.
IN_THREADS = may_parse(sys.version_info[:3])
#: By what tells specializations apart, and by compiled kernels: one thread compiles or loads, others wait and find what
#: it did. A kernel that is being loaded looks as if it were loaded.
_locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
_finding = threading.Lock()
_compiled: set[Hashable] = set()


def _lock(key: Hashable) -> threading.Lock:
    with _finding:
        return _locks[key]


@functools.cache
def threads(purpose: str) -> ThreadPoolExecutor:
    """Those of one purpose, which may wait for those of another."""
    return ThreadPoolExecutor(_MOST_THREADS, f"normfuse-{purpose}")


def _after_fork() -> None:
    """A child has none of the threads."""
    global _finding
    threads.cache_clear()
    _locks.clear()
    _finding = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def begin(
    device: torch.device, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """A kernel that was compiled for arguments like these and is loaded on the device, or the future that it is."""
    kinds = map(_kind, [parameter.is_constexpr for parameter in kernel.params], arguments)
    key = kernel, device, *kinds, *sorted(options.items())

    def compile() -> Any:
        with current(device):
            with _lock(key):
                compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            if compiled is not None:  # as where kernels are compiled offline
                with _lock(compiled):
                    _ = compiled[grid]  # it is loaded for this, a function that launches it
        _compiled.add(key)
        return compiled

    if key in _compiled or not IN_THREADS:
        return compile()
    try:
        return threads("kernels").submit(compile)
    except RuntimeError:  # the interpreter ends, and starts no threads
        return compile()


def finished(kernels: Iterable[Any]) -> list[Any]:
    """The kernels that ``begin`` began. Where one fails, those that are not begun yet are given up."""
    begun = list(kernels)
    try:
        return [each.result() if isinstance(each, Future) else each for each in begun]
    except BaseException:
        for each in begun:
            if isinstance(each, Future):
                each.cancel()
        raise


def _kind(is_constexpr: bool, value: Any) -> Hashable:
    """About what Triton compiles anew for. Where it is less, one thread waits in vain; where more, both compile."""
    if is_constexpr:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, value.bit_length() > 31
    if type(value) is float:
        return float
    if isinstance(value, (tuple, list)):
        return tuple(_kind(False, each) for each in value)
    if hasattr(value, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        return value.base.dtype, tuple(value.block_shape), str(getattr(value, "layout", ""))
    return value
