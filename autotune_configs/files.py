"""Files that are replaced in one step."""

import errno
import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, and its folder if there is none, in one step: no reader, and no interruption, meets half of it.

    One process at a time. Raises OSError where that cannot be done; nothing is left behind then.
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
