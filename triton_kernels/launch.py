"""Launching kernels: with programmatic dependent launch, and so that a plan that is being made notes the launch.

From compute capability 9.0 on, a kernel is launched while the kernel before it in the stream is ending (programmatic
dependent launch, CUDA C++ Programming Guide). Its first statement, ``wait_for_launch_before``, waits until that
kernel's results are written. A launch that does not overlap begins when that kernel has ended.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from triton_kernels.cache_keys import hash_in_order
from triton_kernels.device import INTERPRETED, architecture
from triton_kernels.grid import blocks_of, next_power_of_2

_INTERPRETED = tl.constexpr(INTERPRETED)

#: What takes launches and calls in the place of the GPU: a plan that is being made.
_notes: ContextVar[Any] = ContextVar("_notes", default=None)


@dataclass(frozen=True)
class Counters:
    """Stands for ``count`` numbers (int32) that are 0, among the arguments of a launch. The kernel leaves them at 0."""

    count: int
    _addresses: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, device: torch.device) -> torch.Tensor:
        """Those of the device's current stream, whose launches follow one another.

        A launch that a CUDA graph captures has counters of its own, as the graph may be replayed beside other launches.
        A graph may live for ever, so they do not come back. Without any left, the graph sets some to 0 by a kernel.
        """
        stream, size = 0, blocks_of(self.count, 4) * 4  # aligned as any other memory
        with _lock:
            if device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    left = _reserves.get(device)
                    if left is None or len(left) < size:
                        return torch.zeros(size, dtype=torch.int32, device=device)
                    _reserves[device] = left[size:]
                    return left[:size]
                if device not in _reserves:  # made now, as a graph would capture that its memory is set to 0
                    _reserves[device] = _zeros(_COUNTERS_OF_GRAPHS, device)
                stream = torch._C._cuda_getCurrentRawStream(device.index)
            return _of_stream(device, stream, max(_FEWEST_COUNTERS, next_power_of_2(size)))

    def address(self, device: torch.device, stream: int) -> int:
        """Where those of a CUDA device's current stream begin, which is told again without asking for them."""
        if torch.cuda.is_current_stream_capturing():
            return self.on(device).data_ptr()
        key = device.index, stream
        found = self._addresses.get(key)
        if found is None:
            found = self._addresses[key] = self.on(device).data_ptr()
        return found

    @property
    def stand_in(self) -> torch.Tensor:
        """Their like without memory, for a kernel to be compiled."""
        return torch.empty(self.count, dtype=torch.int32, device="meta")


_FEWEST_COUNTERS, _COUNTERS_OF_GRAPHS = 2**12, 2**20
_reserves: dict[torch.device, torch.Tensor] = {}
_lock = threading.Lock()


@functools.cache
def _of_stream(device: torch.device, stream: int, count: int) -> torch.Tensor:
    """They stay for good, as launches of the stream may still use them."""
    return _zeros(count, device)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """Counters that stay for good. Another thread makes them: where this one warms up for a CUDA graph, its memory is
    from the graph's pool."""

    def make() -> torch.Tensor:
        with current(device):
            counters = torch.zeros(count, dtype=torch.int32, device=device)
            torch.cuda.current_stream().synchronize()
        return counters

    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(make).result()


def with_counters(arguments: tuple, change: Callable[[Counters], Any]) -> tuple:
    """A launch's arguments with what ``change`` makes of counters."""
    return tuple([change(each) if isinstance(each, Counters) else each for each in arguments])


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
    overlaps: bool = True,
    **options: Any,
) -> None:
    """``kernel[grid](*arguments, **options)`` on ``device``, or a note of it where a plan is being made.

    Triton itself would launch on the current device. ``config`` is what grid and options follow from; notes have it.
    Unless it ``overlaps``, the launch waits for the kernel before it. Nothing is launched on an empty grid.
    """
    if 0 in grid:
        return
    for each in (kernel, *arguments, *options.values()):
        hash_in_order(each)
    if not INTERPRETED:
        options["enable_fp_fusion"] = True  # the interpreter has no such option
        if overlaps and architecture(device) >= 90:
            options["launch_pdl"] = True
    if notes := _notes.get():
        notes.launch(kernel, grid, arguments, options, config)
        return
    with current(device):
        kernel[grid](*with_counters(arguments, lambda each: each.on(device)), **options)


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
