"""How every kernel is launched: beside the end of the one before it; and where launches can be watched.

From compute capability 9.0 on a kernel is launched as the one before it in the stream ends, not once it has ended
(programmatic dependent launch, CUDA C++ Programming Guide): its first statement, ``wait_for_launch_before``, waits for
what that one has written.
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
#: Launches instead: it is given the kernel, the grid, the arguments and the options.
Watcher = Callable[[triton.runtime.JITFunction, tuple[int, ...], tuple, dict[str, Any]], None]


class _Thread(threading.local):
    watcher: Watcher | None = None


_thread = _Thread()


@triton.jit
def wait_for_launch_before():
    """Every kernel's first statement: nothing may be read or written before.

    No kernel lets the next begin any earlier (``gdc_launch_dependents``): that one's programs would crowd where a
    multiprocessor has nothing to do, and stay there (6% of L75's time at 256 x 8192 x 8192, H200).
    """
    if not _INTERPRETED:
        if cuda_capability_geq(9, 0):
            gdc_wait()


def launch(
    kernel: triton.runtime.JITFunction, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any
) -> None:
    """``kernel[grid](*arguments, **options)`` on ``device``: Triton would take the current one."""
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
    """Whether this thread's launches are left to a watcher."""
    return _thread.watcher is not None


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within this context each launch in this thread is left to ``watcher``."""
    before, _thread.watcher = _thread.watcher, watcher
    try:
        yield
    finally:
        _thread.watcher = before


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes ``device`` the current CUDA device, where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
