"""Tuning on first use, which is opt-in: a problem that no table has is swept when ``ops`` first meets it."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

import torch

from autotune_configs import lookup, tables
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem
from triton_kernels.device import standing_for
from triton_kernels.launch import noted_in

#: The environment variable that switches tuning on from the start, if it is 1.
SWITCH_VARIABLE = "NORMFUSE_TUNE"
#: The most seconds that one problem takes.
_BUDGET = 20.0

_is_on = os.environ.get(SWITCH_VARIABLE, "").lower() in ("1", "true", "yes", "on")
_tried: set[tuple[Problem, torch.device]] = set()
_is_possible = True  # until a table cannot be read or written
#: One thread sweeps at a time. The calls of a sweep are not tuned themselves.
_lock = threading.Lock()
_thread = threading.local()


def is_on() -> bool:
    """Whether a problem that no table has is tuned on first use."""
    return _is_on and _is_possible and not getattr(_thread, "sweeps", False)


@contextlib.contextmanager
def tune_unseen_problems(enabled: bool = True) -> Iterator[None]:
    """Within this context, ``ops`` tunes each problem that no table has when it first meets it.

    This takes some seconds per problem, at most 20. The entries go into the user's own table and are used from then on,
    without this context, too. (``python -m autotune_configs show`` tells where the table is.) Nothing is tuned without
    a GPU or while a CUDA graph is captured. The switch applies to the whole process, because backward passes run in
    other threads. The environment variable ``NORMFUSE_TUNE=1`` switches tuning on from the start.
    """
    global _is_on
    before, _is_on = _is_on, bool(enabled)
    try:
        yield
    finally:
        _is_on = before


def tune_unseen(problem: Problem, device: torch.device) -> None:
    """Sweep the problem if no table has it and it can be swept. The next lookup finds its entry.

    An error becomes a warning: the call that met the problem must not fail. If a table cannot be read or written, this
    process tunes nothing more, because the next sweep would be in vain, too.
    """
    global _is_possible
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or min(problem.sizes) < 1:
        return
    with _lock:
        if (problem, device) in _tried:
            return
        _tried.add((problem, device))
        _thread.sweeps = True
        try:
            _sweep(problem, device)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            message = f"{problem} is not tuned: {type(error).__name__}: {reason}"
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                _is_possible = False
                tables.warn_once(error.filename, f"{message}. This process tunes nothing more.")
            else:
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        finally:
            _thread.sweeps = False


def _sweep(problem: Problem, device: torch.device) -> None:
    from autotune_configs import sweep  # with the workloads: not to be loaded by ``import ops``

    gpu = Gpu.of(device)
    found = lookup.find(problem, gpu)
    # An entry of another GPU's table is only where the sweep starts.
    if found.entry is not None and found.entry.problem == problem and found.is_of(gpu):
        return
    # A call that meets the problem may be making a plan, which notes launches. These are to run.
    with noted_in(None), standing_for(None), torch.cuda.device(device):
        (result,) = sweep.sweep_and_store([problem], device, budget=_BUDGET)
    if result.error is not None:
        raise result.error
    if result.failed:
        raise RuntimeError(result.skipped)
    lookup.forget()  # another process may have stored the entry meanwhile
