"""Launching kernels: with programmatic dependent launch, and so that a watcher can take a launch over.

From compute capability 9.0 on, a kernel is launched while the kernel before it in the stream is ending (programmatic
dependent launch, CUDA C++ Programming Guide). Its first statement, ``wait_for_launch_before``, waits until that
kernel's results are written.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from triton_kernels.device import INTERPRETED, architecture

_INTERPRETED = tl.constexpr(INTERPRETED)
#: Called instead of launching, with the kernel, the grid, the arguments and the options.
Watcher = Callable[[triton.runtime.JITFunction, tuple[int, ...], tuple, dict[str, Any]], None]


class _Thread(threading.local):
    watcher: Watcher | None = None


_thread = _Thread()


@triton.jit
def wait_for_launch_before():
    """The first statement of every kernel: nothing may be read or written before it.

    No kernel triggers the next launch earlier (``gdc_launch_dependents``). The next kernel's programs would gather on
    multiprocessors that have nothing to do, and stay there (6% of L75's time at 256 x 8192 x 8192, H200).
    """
    if not _INTERPRETED:
        if cuda_capability_geq(9, 0):
            gdc_wait()


def launch(
    kernel: triton.runtime.JITFunction, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any
) -> None:
    """``kernel[grid](*arguments, **options)`` on ``device``. Triton itself would launch on the current device."""
    if not INTERPRETED:
        options["enable_fp_fusion"] = True  # the interpreter has no such option
        if architecture(device) >= 90:
            options["launch_pdl"] = True
    with current(device):
        if _thread.watcher is None:
            kernel[grid](*arguments, **options)
        else:
            _thread.watcher(kernel, grid, arguments, options)


def is_watched() -> bool:
    """Whether a watcher takes over this thread's launches."""
    return _thread.watcher is not None


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within this context, ``watcher`` takes over each launch of this thread."""
    before, _thread.watcher = _thread.watcher, watcher
    try:
        yield
    finally:
        _thread.watcher = before


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make ``device`` the current CUDA device, where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
