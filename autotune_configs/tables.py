"""Tables of configs: one JSON file a GPU, those shipped with the package and the user's own, which win.

A lookup never fails because of a table: what cannot be read, or is no table, is skipped with one warning. What writes
tables raises OSError instead, and leaves a file that it could not read as it is.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import stat
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune_configs.files import locked, replace_file
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem

#: More than any size of a problem or a config.
_LARGEST_SIZE = 2**40
#: Bytes of 13,000 entries, 25 times the H200's shipped ones, and a second to read: a larger file is not read.
_LARGEST_TABLE = 2**22
#: Characters of a warning, at most: what is wrong may be quoted.
_LONGEST_WARNING = 600
#: Names another folder for the user's own tables.
FOLDER_VARIABLE = "NORMFUSE_TABLES"
#: The places that this process has warned of.
_told: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """The config that a sweep found best for a problem, and how it was measured.

    ``ratio`` is its time over that of the heuristic's config, ``microseconds`` the time itself; ``date`` is ISO 8601.
    """

    problem: Problem
    config: dict[str, int]
    ratio: float
    microseconds: float
    triton: str
    date: str

    def to_json(self) -> dict:
        return {**asdict(self.problem), **{name: value for name, value in asdict(self).items() if name != "problem"}}

    @classmethod
    def from_json(cls, item: dict) -> "Entry":
        """Raises KeyError, TypeError or ValueError for what is no entry."""
        problem = Problem(item["kernel"], item["dtype"], tuple(item["sizes"]), item["precision"], item["layout"])
        for text in (problem.kernel, problem.dtype, item["triton"], item["date"]):
            if not isinstance(text, str):
                raise TypeError(f"{text!r} is no text")
        for text in (problem.precision, problem.layout):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{text!r} is no text")
        _check_sizes(*problem.sizes, *item["config"].values())
        for number in (item["ratio"], item["microseconds"]):
            if type(number) not in (int, float) or not 0 <= number <= _LARGEST_SIZE:
                raise ValueError(f"{number!r} is no measurement")
        ratio, microseconds = float(item["ratio"]), float(item["microseconds"])
        return cls(problem, dict(item["config"]), ratio, microseconds, item["triton"], item["date"])


def _check_sizes(*numbers: object) -> None:
    for number in numbers:
        if type(number) is not int or not 1 <= number <= _LARGEST_SIZE:
            raise ValueError(f"{number!r} is no size")


def shipped_folder() -> Path:
    """Where the tables are that come with the package."""
    return Path(__file__).parent / "tables"


def shipped_path(gpu: Gpu) -> Path:
    return shipped_folder() / f"{gpu.file_name}.json"


def shipped_for(gpu: Gpu) -> list[tuple[Path, Gpu]]:
    """The shipped tables to look in, and whose they are: a GPU's own or, where it has none, those of its kin.

    Kin are of one architecture, so memory and tensor cores are alike, and have about as many multiprocessors (half as
    many make other tiles best); the nearest in that comes first.
    """
    if shipped_path(gpu).is_file():
        return [(shipped_path(gpu), gpu)]
    found = []
    for path in sorted(shipped_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):  # a damaged one is told of on its own GPU
            other, _ = read_strictly(path)
            few, many = sorted((gpu.multiprocessors, other.multiprocessors))
            if other.architecture == gpu.architecture and 2 * few > many:
                found.append((path, other))
    return sorted(found, key=lambda pair: abs(pair[1].multiprocessors - gpu.multiprocessors))


def user_folder() -> Path:
    """Where the user's own tables are: the folder that ``NORMFUSE_TABLES`` names, or in the user's cache folder.

    Raises OSError where that is in a home folder and none is known.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    try:
        return Path(named or _cache_folder()).expanduser()
    except RuntimeError as error:
        reason = f"no such home folder is known, and {FOLDER_VARIABLE} names no other folder"
        raise FileNotFoundError(errno.ENOENT, reason, named or "~/.cache/normfuse/tables") from error


def _cache_folder() -> str:
    try:
        from platformdirs import user_cache_dir  # not to be loaded by ``import ops``
    except ImportError:  # packages borrowed from a GPU machine without a network: its rule for Linux
        return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "normfuse", "tables")
    return os.path.join(user_cache_dir("normfuse"), "tables")


def user_path(gpu: Gpu) -> Path:
    return user_folder() / f"{gpu.file_name}.json"


def read_strictly(path: Path) -> tuple[Gpu, tuple[Entry, ...]]:
    """The GPU and the entries of a table. Raises OSError for what cannot be read, ValueError for what is no table: one
    wrong value in one entry is enough for that."""
    text = content(path)
    try:
        table = json.loads(text)
        gpu = Gpu(**table["gpu"])
        name, *numbers = asdict(gpu).values()
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no text")
        _check_sizes(*numbers)
        return gpu, tuple(map(Entry.from_json, table["entries"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no table of configs ({type(error).__name__}: {error})") from error


def content(path: Path) -> bytes:
    """A file as a whole. Raises OSError also for what is no file: reading a FIFO or a device may never return."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if status.st_size > _LARGEST_TABLE:
        raise OSError(errno.EFBIG, "larger than any table", str(path))
    return path.read_bytes()


def _refuse_link_to_nothing(path: Path) -> None:
    """Raises OSError where the table, or a folder that it is in, is a link whose target is not there (an unmounted
    disk, say): then a table may be there another time."""
    for part in (path, *path.parents):
        if os.path.islink(part) and not os.path.exists(part):
            raise FileNotFoundError(errno.ENOENT, f"{part} is a link to nothing", str(path))


def entries_of(path: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """A table's entries as they are now, none where there is no file. Raises OSError for what cannot be read,
    ValueError for what is no table, or another GPU's."""
    try:
        its_gpu, entries = read_strictly(path)
    except FileNotFoundError:
        _refuse_link_to_nothing(path)
        return ()
    if its_gpu.name != gpu.name:
        raise ValueError(f"of another GPU, {its_gpu.name!r}")
    return entries


@functools.cache
def read(path: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """A table's entries; none where there is no file, or, with one warning, where it cannot be read, is no table, or
    another GPU's."""
    with skipping(path):
        return entries_of(path, gpu)
    return ()


@contextlib.contextmanager
def skipping(place: Path | None = None) -> Iterator[None]:
    """Passes over what cannot be read or is no table, with one warning a process and place (that of the OSError)."""
    try:
        yield
    except (OSError, ValueError) as error:
        place = place or getattr(error, "filename", None)
        warn_once(place, f"{place} is skipped: {getattr(error, 'strerror', None) or error}")


def warn_once(place: object, message: str) -> None:
    """A RuntimeWarning, if this is the first one about this place in this process."""
    if str(place) not in _told:
        _told.add(str(place))
        warnings.warn(message[:_LONGEST_WARNING], RuntimeWarning, stacklevel=2)


def store(path: Path, gpu: Gpu, entry: Entry) -> None:
    """Put an entry into a table, in place of one for the same problem. Raises OSError where the table cannot be read or
    written; then no entry of it is lost.

    Readers, and whoever stores at the same time, meet the table from before or from after. A file that is no table, or
    another GPU's, is kept beside the new one, with a warning. A link stays one: the file behind it is written.
    """
    _refuse_link_to_nothing(path)
    file = Path(os.path.realpath(path))
    kept = ""
    with locked(file):
        try:
            entries = entries_of(file, gpu)
        except ValueError as error:
            entries, damaged = (), _unused_name(file)
            kept = f"{path} is kept as {damaged}: {error}"
            os.rename(file, damaged)
        others = [each for each in entries if each.problem != entry.problem]
        text = render(gpu, [*others, entry])
        if len(text) > _LARGEST_TABLE:
            raise OSError(errno.EFBIG, "larger than any table would be", str(path))
        replace_file(file, text.encode())
        read.cache_clear()
    if kept:  # told last: where warnings are errors, nothing is lost by it
        warn_once(path, kept)


def _unused_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def render(gpu: Gpu, entries: list[Entry]) -> str:
    """A table as text, its entries in order of their problems, one a line, so that versions of it can be compared."""
    ordered = sorted(entries, key=lambda entry: (str(entry.problem).split(" ")[:-1], entry.problem.sizes))
    lines = ",\n".join("  " + json.dumps(entry.to_json()) for entry in ordered)
    return f'{{\n "gpu": {json.dumps(asdict(gpu))},\n "entries": [\n{lines}\n ]\n}}\n'
