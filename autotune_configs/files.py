"""Files that are replaced in one step, and locks beside them."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

#: Seconds to wait for another process that writes a file, which takes milliseconds.
_PATIENCE = 10.0


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step, and make its folder. Nobody reads half of it, even if the writer is interrupted.

    One process at a time may do this. A link stays a link: the file behind it is written. Raises OSError if it fails,
    and for what is no regular file (a folder, a FIFO, a device), and then leaves nothing behind.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        code = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(code, os.strerror(code) if path.is_dir() else "no regular file", str(path))
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


def lock_at(path: Path) -> "FileLock":
    """A lock that is this file; it waits for ever. Raises OSError where there is no such file and none can be made:
    filelock would try again and again."""
    from filelock import FileLock  # not to be loaded by ``import ops``

    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK))
    return FileLock(path)


@contextlib.contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of a file, ``<path>.lock``. The lock ends with the process, however that ends.

    Raises TimeoutError where another process still holds it after ``patience`` seconds (default: 10).
    """
    from filelock import Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    patience = _PATIENCE if patience is None else max(0.0, patience)  # below zero, filelock would wait for ever
    try:
        held = lock_at(lock).acquire(timeout=patience)
    except Timeout:
        raise TimeoutError(errno.ETIMEDOUT, "another process holds this lock", str(lock)) from None
    with held:
        yield
