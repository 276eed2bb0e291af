"""Tuning in place: off unless asked for; then a problem that no table has is swept when it is first met."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch

from autotune_configs.problem import Problem

#: Set to 1, it turns tuning in place on from the start.
SWITCH_VARIABLE = "NORMFUSE_TUNE"
#: Seconds that one problem may take.
_BUDGET = 20.0

_is_on = os.environ.get(SWITCH_VARIABLE, "0") not in ("", "0")
_tried: set[tuple[Problem, torch.device]] = set()


def is_on() -> bool:
    """Whether a problem that no table has is to be tuned when it is first met."""
    return _is_on


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
    """Sweep the problem where it can be and no table has it; returns whether a table has changed."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing() or min(problem.sizes) < 1:
        return False
    if (problem, device) in _tried:
        return False
    from autotune_configs import lookup, sweep  # which look up configs themselves
    from autotune_configs.gpus import Gpu

    _tried.add((problem, device))
    found = lookup.find(problem, Gpu.of(device))
    if found.entry is not None and found.entry.problem == problem:
        return False
    with tune_unseen_problems(False), torch.cuda.device(device):
        try:
            sweep.sweep_and_store([problem], device, budget=_BUDGET)
        except OSError as error:
            warnings.warn(f"what tuning found cannot be kept: {error}", RuntimeWarning, stacklevel=2)
            return False
        except torch.OutOfMemoryError:
            warnings.warn(f"{problem} is not tuned: too little memory is free", RuntimeWarning, stacklevel=2)
            return False
    return True
