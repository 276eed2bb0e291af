"""Processes that share a GPU compile side by side, and check and time in turn."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    """Holds this file's lock, which one process has at a time; without a path, nothing is waited for."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
