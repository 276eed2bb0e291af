"""Files that are replaced in one step, and locks beside them."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

#: Seconds to wait for another process that writes a file, which takes milliseconds.
_PATIENCE = 10.0


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step, and make its folder. Nobody reads half of it, even if the writer is interrupted.

    One process at a time may do this. Raises OSError if it fails, and then leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of a file, ``<path>.lock``. The lock ends with the process, however that ends.

    Raises TimeoutError where another process still holds it after ``patience`` seconds (default: 10).
    """
    from filelock import FileLock, Timeout  # not to be loaded by ``import ops``

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    patience = _PATIENCE if patience is None else max(0.0, patience)  # below zero, filelock would wait for ever
    try:
        held = FileLock(lock, timeout=patience).acquire()
    except Timeout:
        raise TimeoutError(errno.ETIMEDOUT, "another process holds this lock", str(lock)) from None
    with held:
        yield
