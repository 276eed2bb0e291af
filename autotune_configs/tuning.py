"""Tuning in place: off unless asked for; then a problem that no table has is swept when it is first met."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

import torch

from autotune_configs import tables
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem

#: Set to 1, it turns tuning in place on from the start.
SWITCH_VARIABLE = "NORMFUSE_TUNE"
#: Seconds that one problem may take.
_BUDGET = 20.0

_is_on = os.environ.get(SWITCH_VARIABLE, "").lower() in ("1", "true", "yes", "on")
_tried: set[tuple[Problem, torch.device]] = set()
_is_possible = True  # until the folder of the tables fails
#: One thread sweeps at a time; what it runs itself is not tuned.
_lock = threading.Lock()
_thread = threading.local()


def is_on() -> bool:
    """Whether a problem that no table has is to be tuned when it is first met."""
    return _is_on and _is_possible and not getattr(_thread, "sweeps", False)


@contextlib.contextmanager
def tune_unseen_problems(enabled: bool = True) -> Iterator[None]:
    """Within this context ``ops`` tunes each problem that no table has when it first meets it.

    That takes some seconds a problem (at most 20). What is found goes to the user's own table (``python -m
    autotune_configs show`` tells where) and serves from then on, without this context too. Nothing is tuned while a
    CUDA graph is being captured, or where there is no GPU. The switch is the process's, as a backward pass runs in
    threads of its own; the environment variable ``NORMFUSE_TUNE=1`` turns it on from the start.
    """
    global _is_on
    before, _is_on = _is_on, bool(enabled)
    try:
        yield
    finally:
        _is_on = before


def tune_unseen(problem: Problem, device: torch.device) -> bool:
    """Sweep the problem where it can be and no table has it; returns whether a table has changed.

    Whatever goes wrong costs a warning, and not the call that met the problem. Where the tables can be neither read nor
    written, that is the last one: the next problem's sweep would be in vain too.
    """
    global _is_possible
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or min(problem.sizes) < 1:
        return False
    with _lock:
        if (problem, device) in _tried:
            return False
        _tried.add((problem, device))
        _thread.sweeps = True
        try:
            return _sweep(problem, device)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            message = f"{problem} is not tuned: {type(error).__name__}: {reason}"
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                _is_possible = False
                tables.warn_once(error.filename, f"{message}. Nor is any other in this process.")
            else:
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return False
        finally:
            _thread.sweeps = False


def _sweep(problem: Problem, device: torch.device) -> bool:
    from autotune_configs import lookup, sweep  # which look up configs themselves

    gpu = Gpu.of(device)
    found = lookup.find(problem, gpu)
    # A table that is another GPU's says what to begin with, no more.
    if found.entry is not None and found.entry.problem == problem and found.is_of(gpu):
        return False
    with torch.cuda.device(device):
        (result,) = sweep.sweep_and_store([problem], device, budget=_BUDGET)
    if result.error is not None:
        raise result.error
    if result.failed:
        raise RuntimeError(result.skipped)
    return True
