"""Threads make plans, and compile and load kernels: those of a plan side by side, and what two plans need once.

Triton compiles a kernel where it is called first, and again in each thread that calls it meanwhile. It loads a kernel,
and has a C compiler build what launches it, where it is run first.
"""

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from triton_kernels.launch import current

_MOST_THREADS = 8
#: By what tells specializations apart: one thread compiles, others wait and find what it made.
_locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
_compiled: set[Hashable] = set()
#: A kernel that another thread is loading looks as if it were loaded.
_loading = threading.Lock()


@functools.cache
def threads(purpose: str) -> ThreadPoolExecutor:
    """Those of one purpose, which may wait for those of another."""
    return ThreadPoolExecutor(_MOST_THREADS, f"normfuse-{purpose}")


def _after_fork() -> None:
    """A child has none of the threads."""
    global _loading
    threads.cache_clear()
    _locks.clear()
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def begin(
    device: torch.device, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]
) -> Any:
    """A kernel that was compiled for arguments like these and is loaded on the device, or the future that it is."""
    kinds = map(_kind, [parameter.is_constexpr for parameter in kernel.params], arguments)
    key = kernel, device, *kinds, *sorted(options.items(), key=str)

    def compile() -> Any:
        with current(device):
            with _locks[key]:
                compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            with _loading:
                _ = compiled.run  # it is loaded as this is read
        _compiled.add(key)
        return compiled

    return compile() if key in _compiled else threads("kernels").submit(compile)


def finished(kernel: Any) -> Any:
    """The kernel that ``begin`` began."""
    return kernel.result() if isinstance(kernel, Future) else kernel


def _kind(is_constexpr: bool, value: Any) -> Hashable:
    """About what Triton compiles anew for. Where it is less, one thread waits in vain; where more, both compile."""
    if is_constexpr:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if type(value) is int:
        return value == 1, value % 16 == 0, value.bit_length() > 31
    if isinstance(value, (tuple, list)):
        return tuple(_kind(False, each) for each in value)
    if hasattr(value, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        return value.base.dtype, tuple(value.block_shape), str(getattr(value, "layout", ""))
    return value
