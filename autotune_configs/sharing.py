"""Share tables between machines: read another one's table with care, and merge it into the user's own."""

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import triton

from autotune_configs import lookup, tables
from autotune_configs.gpus import KNOWN, Gpu
from autotune_configs.kernels import kernel_of
from autotune_configs.tables import Entry


def read(path: Path) -> tuple[Gpu, tuple[Entry, ...]]:
    """A table whose entries can all be used on its GPU.

    Raises OSError if the file cannot be read, and ValueError if it is no table, describes a GPU otherwise than it is
    known, or holds an entry that is not valid.
    """
    gpu, entries = tables.read_strictly(path)
    known = Gpu.called(gpu.name) if gpu.name in KNOWN else None
    with contextlib.suppress(OSError, ValueError):  # the user's own table goes first
        known, _ = tables.read_strictly(tables.user_path(gpu))
    if known and known != gpu:
        raise ValueError(f"it is of {gpu}, but that GPU is known as {known}")
    for entry in entries:
        if kernel_of(entry.problem.kernel).config_of(entry.config, entry.problem, gpu) is None:
            raise ValueError(f"no valid config of {entry.problem}: {entry.config}")
    return gpu, entries


def merge(gpu: Gpu, entries: Iterable[Entry]) -> Counter[str]:
    """Merge entries into the user's own table of their GPU. Returns and raises what ``tables.store`` does."""
    counts = tables.store(tables.user_path(gpu), gpu, *entries, wins=lambda new, old: _rank(new) < _rank(old))
    lookup.forget()
    return counts


def _rank(entry: Entry) -> tuple[bool, float]:
    """The lower, the better: first entries of the installed Triton, then those that gain most on the heuristic.

    A sweep measures anew what another Triton compiled. Times of two machines do not compare, as their clocks differ;
    ratios do, as each is measured interleaved with the heuristic's config on one machine. A date says nothing: an older
    sweep may have tried more configs.
    """
    return entry.triton != triton.__version__, entry.ratio
