"""Tables of configs: one JSON file a GPU, those shipped with the package and the user's own, which win."""

import contextlib
import fcntl
import functools
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem

#: More than any size of a problem or a config.
_LARGEST_SIZE = 2**40
#: Names another folder for the user's own tables.
FOLDER_VARIABLE = "NORMFUSE_TABLES"


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
        for number in (*problem.sizes, *item["config"].values()):
            if type(number) is not int or not 1 <= number <= _LARGEST_SIZE:
                raise ValueError(f"{number!r} is no size")
        ratio, microseconds = float(item["ratio"]), float(item["microseconds"])
        if not (math.isfinite(ratio) and math.isfinite(microseconds)):
            raise ValueError(f"{ratio} or {microseconds} is no measurement")
        return cls(problem, dict(item["config"]), ratio, microseconds, item["triton"], item["date"])


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
        with contextlib.suppress(ValueError):  # a damaged one is told of on its own GPU
            other, _ = read_strictly(path)
            few, many = sorted((gpu.multiprocessors, other.multiprocessors))
            if other.architecture == gpu.architecture and 2 * few > many:
                found.append((path, other))
    return sorted(found, key=lambda pair: abs(pair[1].multiprocessors - gpu.multiprocessors))


def user_folder() -> Path:
    """Where the user's own tables are: the folder that ``NORMFUSE_TABLES`` names, or in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser()
    try:
        from platformdirs import user_cache_dir  # not to be loaded by ``import ops``
    except ImportError:  # packages borrowed from a GPU machine without a network: its rule for Linux
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "normfuse" / "tables"
    return Path(user_cache_dir("normfuse")) / "tables"


def user_path(gpu: Gpu) -> Path:
    return user_folder() / f"{gpu.file_name}.json"


def read_strictly(path: Path) -> tuple[Gpu, tuple[Entry, ...]]:
    """The GPU and the entries of a table. Raises ValueError for what is none."""
    try:
        table = json.loads(path.read_text())
        gpu = Gpu(**table["gpu"])
        for value, kind in zip(asdict(gpu).values(), (str, int, int, int), strict=True):
            if type(value) is not kind:
                raise TypeError(f"{value!r} is nothing of a GPU")
        return gpu, tuple(map(Entry.from_json, table["entries"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no table of configs ({type(error).__name__}: {error})") from error


@functools.cache
def read(path: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """A table's entries; none where there is no file, or, with one warning, where it is no table, or another GPU's."""
    try:
        if not path.is_file():
            return ()
        its_gpu, entries = read_strictly(path)
        if its_gpu.name != gpu.name:
            raise ValueError(f"of another GPU, {its_gpu.name!r}")
        return entries
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is skipped: {error}", RuntimeWarning, stacklevel=2)
        return ()


def store(path: Path, gpu: Gpu, entry: Entry) -> None:
    """Put an entry into a table, in place of one for the same problem. Raises OSError where it cannot be written.

    Readers, and whoever stores at the same time, meet the table from before or from after. A damaged file is kept
    beside the new table.
    """
    with locked(path):
        entries = ()
        if path.is_file():
            try:
                entries = read_strictly(path)[1]
            except ValueError:
                os.replace(path, path.with_name(path.name + ".damaged"))
        others = [each for each in entries if each.problem != entry.problem]
        write_atomically(path, render(gpu, [*others, entry]))
        read.cache_clear()


def render(gpu: Gpu, entries: list[Entry]) -> str:
    """A table as text, its entries in order of their problems, one a line, so that versions of it can be compared."""
    ordered = sorted(entries, key=lambda entry: (str(entry.problem).split(" ")[:-1], entry.problem.sizes))
    lines = ",\n".join("  " + json.dumps(entry.to_json()) for entry in ordered)
    return f'{{\n "gpu": {json.dumps(asdict(gpu))},\n "entries": [\n{lines}\n ]\n}}\n'


def write_atomically(path: Path, text: str) -> None:
    """Write a file in one step: whoever reads it, or an interruption, never meets half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process holds this lock meanwhile; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
