"""Tables of configs: one JSON file per GPU, shipped with the package or the user's own. The user's own win.

A lookup never fails because of a table: a file that cannot be read, or is no table, is skipped with one warning.
Functions that write tables raise OSError instead. They leave a file that they could not read as it is.
"""

import atexit
import contextlib
import errno
import functools
import importlib.resources
import itertools
import json
import os
import stat
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune_configs.files import locked, replace_file
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem

#: Larger than any size of a problem or a config.
_LARGEST_SIZE = 2**40
#: A larger file is not read. 4 MiB hold 13,000 entries (25 times the shipped ones for the H200) and take a second.
_LARGEST_TABLE = 2**22
#: Characters of a GPU's name, at most: files are named after it.
_LONGEST_NAME = 100
#: The most characters of a warning, which may quote what is wrong.
_LONGEST_WARNING = 600
#: The environment variable that names another folder for the user's own tables.
FOLDER_VARIABLE = "NORMFUSE_TABLES"
#: The places that this process has warned about.
_told: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """The config that a sweep found best for a problem, and how it was measured.

    ``ratio`` is its time over that of the heuristic's config, and ``microseconds`` its time. ``triton`` is the version
    that compiled it. ``date`` is in ISO 8601.
    """

    problem: Problem
    config: dict[str, int]
    ratio: float
    microseconds: float
    triton: str
    date: str

    def to_json(self) -> dict:
        item = asdict(self)
        return {**item.pop("problem"), **item}

    @classmethod
    def from_json(cls, item: dict) -> "Entry":
        """Raises KeyError, TypeError, AttributeError or ValueError for what is no entry."""
        for name, is_right in _IS_RIGHT.items():
            if not is_right(item[name]):
                raise ValueError(f"{item[name]!r} is no {name}")
        problem = Problem(item["kernel"], item["dtype"], tuple(item["sizes"]), item["precision"], item["layout"])
        ratio, microseconds = float(item["ratio"]), float(item["microseconds"])
        return cls(problem, dict(item["config"]), ratio, microseconds, item["triton"], item["date"])


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_SIZE


#: What the values of an entry must be in a file.
_IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("kernel", "dtype", "triton", "date"), lambda text: isinstance(text, str)),
    **dict.fromkeys(("precision", "layout"), lambda text: text is None or isinstance(text, str)),
    **dict.fromkeys(("ratio", "microseconds"), lambda time: type(time) in (int, float) and 0 <= time <= _LARGEST_SIZE),
    "sizes": lambda sizes: isinstance(sizes, list) and all(map(_is_size, sizes)),
    "config": lambda config: all(map(_is_size, config.values())),
}


@functools.cache
def shipped_folder() -> Path:
    """Where the shipped tables are. Those of a package in an archive are copied out of it, until this process ends."""
    folder = importlib.resources.files("autotune_configs") / "tables"
    if isinstance(folder, Path) or not folder.is_dir():
        return Path(str(folder))
    copies = tempfile.TemporaryDirectory(prefix="normfuse-tables-")
    atexit.register(copies.cleanup)
    for table in folder.iterdir():
        (Path(copies.name) / table.name).write_bytes(table.read_bytes())
    return Path(copies.name)


def shipped_path(gpu: Gpu) -> Path:
    return shipped_folder() / f"{gpu.file_name}.json"


def _shipped_for(gpu: Gpu) -> list[tuple[Path, Gpu]]:
    """The GPU's own shipped table, and those of similar GPUs.

    Similar GPUs have the same architecture, so that their memory and tensor cores are alike. They have more than half
    and less than twice the multiprocessors: at half the number other tiles are best. Its own comes first, then the most
    similar one.
    """
    own = shipped_path(gpu)
    found = [(own, gpu)] if own.is_file() else []
    if not shipped_folder().is_dir():  # a package that was put together without its data
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(shipped_folder()))
    for path in sorted(shipped_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # the GPU that a damaged table is for gets the warning
            other, _ = read_strictly(path)
            is_similar = (
                other.architecture == gpu.architecture and 0.5 < other.multiprocessors / gpu.multiprocessors < 2
            )
            if is_similar and path != own:
                found.append((path, other))
    return sorted(found, key=lambda pair: (pair[0] != own, abs(pair[1].multiprocessors - gpu.multiprocessors)))


def searched(gpu: Gpu) -> list[tuple[Path, Gpu]]:
    """The tables that serve a GPU, each with its own GPU: the user's, if there is one, then the shipped ones."""
    found = []
    with skipping():
        found.append((user_path(gpu), gpu))
    with skipping():
        found += _shipped_for(gpu)
    return found


def user_folder() -> Path:
    """Where the user's own tables are: the folder that ``NORMFUSE_TABLES`` names, or one in the user's cache folder.

    Raises OSError if that is in a home folder that is not known.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    try:
        return Path(named or _cache_folder()).expanduser()
    except RuntimeError as error:
        reason = f"the home folder is not known; {FOLDER_VARIABLE} can name a folder outside of it"
        raise FileNotFoundError(errno.ENOENT, reason, named or "~/.cache/normfuse/tables") from error


def _cache_folder() -> str:
    try:
        from platformdirs import user_cache_dir  # not to be loaded by ``import ops``

        cache = user_cache_dir("normfuse")
    except ImportError:  # a machine without a network may lack it: this is its rule for Linux
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "normfuse")
    return os.path.join(cache, "tables")


def user_path(gpu: Gpu) -> Path:
    return user_folder() / f"{gpu.file_name}.json"


def read_strictly(path: Path) -> tuple[Gpu, tuple[Entry, ...]]:
    """The GPU and the entries of a table.

    Raises OSError if the file cannot be read, and ValueError if it is no table. One wrong value is enough for that.
    """
    try:
        table = json.loads(content(path))
        gpu = Gpu(**table["gpu"])
        name, *numbers = asdict(gpu).values()
        is_name = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()
        if not is_name or not all(map(_is_size, numbers)):
            raise ValueError(f"{str(table['gpu'])[:_LONGEST_NAME]!r} is no GPU")
        return gpu, tuple(map(Entry.from_json, table["entries"]))
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no table of configs ({type(error).__name__}: {error})") from error


def content(path: Path) -> bytes:
    """The whole content of a file. Raises OSError for a FIFO or a device, too: reading those may never return."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if status.st_size > _LARGEST_TABLE:
        raise OSError(errno.EFBIG, "larger than any table", str(path))
    return path.read_bytes()


def _refuse_link_to_nothing(path: Path) -> None:
    """Raises OSError if the table, or a folder that it is in, is a link whose target is missing.

    The target may be on a disk that is not mounted now, and hold a table.
    """
    for part in (path, *path.parents):
        if os.path.islink(part) and not os.path.exists(part):
            raise FileNotFoundError(errno.ENOENT, f"{part} is a link to nothing", str(path))


def entries_of(path: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """A table's entries as they are now; none if there is no file.

    Raises OSError if the file cannot be read, and ValueError if it is no table or another GPU's.
    """
    try:
        its_gpu, entries = read_strictly(path)
    except FileNotFoundError:
        _refuse_link_to_nothing(path)
        return ()
    if its_gpu.name != gpu.name:
        raise ValueError(f"a table of another GPU, {its_gpu.name!r}")
    return entries


def read(path: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """A table's entries; none if there is no file. One that cannot be read or used is skipped with one warning."""
    with skipping(path):
        return entries_of(path, gpu)
    return ()


@contextlib.contextmanager
def skipping(place: Path | None = None) -> Iterator[None]:
    """Skip what cannot be read or is no table, with one warning per process and place (default: the OSError's)."""
    try:
        yield
    except (OSError, ValueError) as error:
        place = place or getattr(error, "filename", None)
        warn_once(place, f"{place} is skipped: {getattr(error, 'strerror', None) or error}")


def warn_once(place: object, message: str) -> None:
    """Warn, unless this process has already warned about this place."""
    if str(place) not in _told:
        _told.add(str(place))
        warnings.warn(message[:_LONGEST_WARNING], RuntimeWarning, stacklevel=2)


def store(
    path: Path, gpu: Gpu, *entries: Entry, wins: Callable[[Entry, Entry], bool] = lambda new, old: True
) -> Counter[str]:
    """Put entries into a table, in one step; one for a problem that the table has, if it ``wins`` over that entry.

    Returns how many were "added", "replaced" one, or lost to one, which is "kept". Other processes read the table from
    before or the one from after, and wait while they write. Raises OSError if the table cannot be read or written; it
    is then as before. A file that is no table, or another GPU's, is kept beside the new one, with a warning. A link
    stays a link: the file behind it is written.
    """
    _refuse_link_to_nothing(path)
    file = Path(os.path.realpath(path))
    kept, stored = "", {}
    counts: Counter[str] = Counter()
    with locked(file):
        try:
            stored = {entry.problem: entry for entry in entries_of(file, gpu)}
        except ValueError as error:
            damaged = _unused_name(file)
            kept = f"{path} is kept as {damaged}: {error}"
            os.rename(file, damaged)
        for entry in entries:
            old = stored.get(entry.problem)
            if old is None or wins(entry, old):
                stored[entry.problem] = entry
                counts["added" if old is None else "replaced"] += 1
            else:
                counts["kept"] += 1
        text = render(gpu, stored.values()).encode()
        if len(text) > _LARGEST_TABLE:
            raise OSError(errno.EFBIG, "larger than any table would be", str(path))
        replace_file(file, text)
    if kept:  # last: where warnings are errors, nothing is lost
        warn_once(path, kept)
    return counts


def _unused_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def render(gpu: Gpu, entries: Iterable[Entry]) -> str:
    """A table as text: one entry per line, sorted by problem, so that a diff shows what changed."""
    ordered = sorted(entries, key=lambda entry: (str(entry.problem).split(" ")[:-1], entry.problem.sizes))
    lines = ",\n".join("  " + json.dumps(entry.to_json()) for entry in ordered)
    return f'{{\n "gpu": {json.dumps(asdict(gpu))},\n "entries": [\n{lines}\n ]\n}}\n'
