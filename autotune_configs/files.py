"""Files that are replaced in one step, and locks beside them."""

import contextlib
import errno
import fcntl
import math
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

#: Seconds to wait for another process that writes a file, which takes milliseconds.
_PATIENCE = 10.0
#: Seconds between two looks whether a lock is free.
_PAUSE = 0.05


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


class FileLock:
    """A lock that is this file. It ends with the process, however that ends, and can be held again and again.

    Raises TimeoutError where another process still holds it after ``patience`` seconds.
    """

    def __init__(self, path: Path, patience: float = math.inf):
        self._path, self._patience, self._file = path, patience, -1

    def __enter__(self) -> None:
        end = monotonic() + self._patience
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            while not self._is_free():
                if monotonic() >= end:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds this lock", str(self._path))
                sleep(_PAUSE)
        except BaseException:
            os.close(self._file)
            raise

    def _is_free(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def __exit__(self, *exception: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file, too
        os.close(self._file)


def lock_at(path: Path) -> FileLock:
    """A lock that is this file; it waits for ever. Raises OSError where there is no such file and none can be made."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK))
    return FileLock(path)


@contextlib.contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of a file, ``<path>.lock``. The lock ends with the process, however that ends.

    Raises TimeoutError where another process still holds it after ``patience`` seconds (default: 10).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock"), _PATIENCE if patience is None else patience):
        yield
