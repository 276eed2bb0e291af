"""Launching kernels: with programmatic dependent launch, and so that a plan that is being made notes the launch.

From compute capability 9.0 on, a kernel is launched while the kernel before it in the stream is ending (programmatic
dependent launch, CUDA C++ Programming Guide). Its first statement, ``wait_for_launch_before``, waits until that
kernel's results are written.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from triton_kernels.device import INTERPRETED, architecture

_INTERPRETED = tl.constexpr(INTERPRETED)

#: What takes launches and calls in the place of the GPU: a plan that is being made.
_notes: ContextVar[Any] = ContextVar("_notes", default=None)


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
    kernel: triton.runtime.JITFunction,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    config: Any = None,
    **options: Any,
) -> None:
    """``kernel[grid](*arguments, **options)`` on ``device``, or a note of it where a plan is being made.

    Triton itself would launch on the current device. ``config`` is what grid and options follow from; notes have it.
    Nothing is launched on an empty grid.
    """
    if 0 in grid:
        return
    if not INTERPRETED:
        options["enable_fp_fusion"] = True  # the interpreter has no such option
        if architecture(device) >= 90:
            options["launch_pdl"] = True
    if notes := _notes.get():
        notes.launch(kernel, grid, arguments, options, config)
        return
    with current(device):
        kernel[grid](*arguments, **options)


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``function(*arguments, **options)``, where it computes tensors without a kernel of this project's.

    It returns new tensors, or writes to one that it gets and returns None. Where a plan is being made, it is noted.
    """
    notes = _notes.get()
    return notes.call(function, arguments, options) if notes else function(*arguments, **options)


@contextlib.contextmanager
def noted_in(notes: Any) -> Iterator[None]:
    """Within this context, launches and calls of this thread are noted and not done; for None they are done.

    ``notes.launch(kernel, grid, arguments, options, config)`` notes ``kernel[grid](*arguments, **options)``, and the
    config that it follows. ``notes.call(function, arguments, options)`` returns what stands for the call's result.
    """
    before = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(before)


def is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make ``device`` the current CUDA device, where it is not."""
    return contextlib.nullcontext() if is_current(device) else torch.cuda.device(device)
