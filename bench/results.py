"""Results as JSON Lines: written and merged with ``json`` alone, and read for the report as ``bench.schema`` has them.

A file is of one experiment on one device. Its first line is the header. A line ``{"run": ...}`` says with what the rows
below it were measured.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from autotune_configs.command_line import Parser
from autotune_configs.files import replace_file
from bench.chains import FAMILY
from bench.schema import (
    ROWS,
    SCHEMA,
    CapturedRow,
    CommitsRow,
    FirstCallRow,
    Header,
    ModelRow,
    ProductRow,
    Row,
    Run,
    TensorParallelRow,
    TimesRow,
    TritonsRow,
)
from bench.sizes import GRID, TARGET

#: Significant digits of every number that is written.
_DIGITS = 6


class BadResult(ValueError):
    """A file that cannot be read, or is not the bench's; says which, where and why, in one line."""


class Entry(NamedTuple):
    """A row and its run as they stand in a file, and the place: file and line."""

    run: dict
    row: dict
    place: str


def read(path: Path) -> tuple[Header, list[Entry]]:
    """A file's header, and its rows as plain data; BadResult where it is not the bench's."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadResult(f"cannot read {path}: {error.strerror}") from None
    header, *rest = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)] or [{}]
    place = f"{path}, line 1"
    schema, experiment, device = map(header.get, ("schema", "experiment", "device"))
    _require(schema == SCHEMA, place, f"no header of schema {SCHEMA}, got {json.dumps(schema)[:40]}")
    is_known = isinstance(experiment, str) and experiment in ROWS and isinstance(device, str)
    _require(is_known, place, f"the header names no known experiment ({', '.join(ROWS)}) and device")
    known = {each.name for each in fields(ROWS[experiment])}
    run: Any = None
    entries = []
    for number, line in enumerate(rest, 2):
        place = f"{path}, line {number}"
        if "run" in line:
            run = line["run"]
            is_dated = isinstance(run, dict) and _is_date(run.get("date"))
            _require(is_dated, place, "the run has no date, as in 2026-01-02T03:04:05+00:00")
            continue
        _require(run is not None, place, "a row without a run above it")
        _require(line.keys() <= known, place, f"unknown field {min(line.keys() - known, default='')[:40]!r}")
        for name in ("chain", "product", "shape", "dtype", "mode"):
            _require(isinstance(line.get(name), str), place, f"no text {name!r}")
        entries.append(Entry(run, line, place))
    return Header(SCHEMA, experiment, device), entries


def _require(holds: bool, place: str, message: str) -> None:
    if not holds:
        raise BadResult(f"{place}: {message}")


def _parsed(line: bytes, place: str) -> Any:
    try:
        parsed = json.loads(line)
        json.dumps(parsed, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written again
    except (ValueError, RecursionError) as error:
        raise BadResult(f"{place}: no JSON: {error}") from None
    _require(isinstance(parsed, dict), place, f"{type(parsed).__name__} where an object is right")
    return parsed


def _is_date(text: object) -> bool:
    """Whether it is a date with a time zone, so that any two can be compared."""
    try:
        return datetime.fromisoformat(str(text)).tzinfo is not None
    except ValueError:
        return False


def newest(header: Header, entries: Iterable[Entry]) -> list[Entry]:
    """One entry for each cell, that of the newest run, and of one run the last; in the order of the runs."""

    def time(entry: Entry) -> tuple[datetime, str]:  # runs of the same second are not mixed
        return datetime.fromisoformat(entry.run["date"]), json.dumps(entry.run, sort_keys=True)

    found: dict[tuple, Entry] = {}
    for entry in sorted(entries, key=time):
        key = tuple(str(entry.row.get(name)) for name in ROWS[header.experiment].KEY)
        found.pop(key, None)
        found[key] = entry
    return list(found.values())


def lines_of(header: Header, entries: Iterable[Entry]) -> bytes:
    """A file of the newest of these entries, each run's below its line."""
    lines: list[dict] = [asdict(header)]
    for run, of_run in groupby(newest(header, entries), attrgetter("run")):
        lines += [{"run": run}, *(entry.row for entry in of_run)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def plain(value: Any) -> Any:
    """A dataclass as JSON has it: without default values, with rounded numbers, and None for NaN and infinity."""
    match value:
        case dict():
            return {name: plain(part) for name, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case float():
            return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
        case datetime():
            return value.isoformat()
    if is_dataclass(value):
        pairs = ((each, getattr(value, each.name)) for each in fields(value))
        return {each.name: plain(part) for each, part in pairs if part != _default(each)}
    return value


def _default(of: Field) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def merge(paths: Iterable[Path], into: Path) -> None:
    """Put all rows into one file, with those that it already has. BadResult where experiment or device differ."""
    contents = [(path, *read(path)) for path in ([into] if into.exists() else []) + list(paths)]
    first, header, _ = contents[0]
    for path, other, _ in contents:
        require_same(first, header, path, other)
    replace(into, lines_of(header, [entry for *_, entries in contents for entry in entries]))


def main(arguments: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Put the rows of several results files, of one experiment on one device, into one file, with those "
        "that it already has. Of each cell the newest run is kept.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what --output wrote")
    parser.add_argument("--into", type=Path, metavar="FILE", required=True, help="the file to write")
    options = parser.parse_args(arguments)
    merge(options.files, options.into)
    print(f"wrote {options.into}")
    return 0


def require_same(source: object, header: Header, other_source: object, other: Header) -> None:
    """BadResult unless these rows belong in one file."""
    if header != other:
        one, two = (f"{each.experiment!r} of {each.device}" for each in (header, other))
        raise BadResult(f"{source} holds {one}, and {other_source} {two}: they cannot be in one file")


def replace(path: Path, content: bytes) -> bool:
    """Write the file, unless it is current; BadResult where that cannot be done."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return False
        replace_file(path, content)
    except OSError as error:
        raise BadResult(f"cannot write {path}: {error.strerror}") from None
    return True


def runs_of(rows: Iterable[Row]) -> Iterable[Run]:
    """The runs that these rows are of, each once."""
    return dict.fromkeys(row.run for row in rows if row.run)


def grouped(rows: Collection, group: Callable) -> dict:
    """Lists of rows by what this says of them, in the order in which they come."""
    return {name: [row for row in rows if group(row) == name] for name in dict.fromkeys(map(group, rows))}


by_shape = attrgetter("product", "shape")
#: What the growth grid has a table of.
series = attrgetter("chain", "layout", "mode")


def chains_by_shape(rows: Collection[Row]) -> dict[tuple[str, str], str]:
    """By product and shape, the names of the chains."""
    return {at: ", ".join(dict.fromkeys(row.chain for row in group)) for at, group in grouped(rows, by_shape).items()}


@dataclass
class DeviceResults:
    """All that is known of one device: the newest row of each cell, in the order in which tables list them."""

    device: str
    times: list[TimesRow] = field(default_factory=list)
    captured: list[CapturedRow] = field(default_factory=list)
    first_call: list[FirstCallRow] = field(default_factory=list)
    tensor_parallel: list[TensorParallelRow] = field(default_factory=list)
    commits: list[CommitsRow] = field(default_factory=list)
    tritons: list[TritonsRow] = field(default_factory=list)
    models: list[ModelRow] = field(default_factory=list)
    products: list[ProductRow] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """What the device's files are named after."""
        return re.sub("[^a-z0-9]+", "_", self.device.partition(",")[0].lower()).strip("_")

    def setup(self, rows: Iterable[Row]) -> str:
        """The device, and the versions that these of its rows were measured with."""
        return ", ".join([self.device, *dict.fromkeys(run.versions for run in runs_of(rows))])

    @property
    def target(self) -> list[TimesRow]:
        """Of the four chains with a name: the rows of their own size."""
        return [row for row in self.listed if row.shape == TARGET.get(row.product)]

    @property
    def listed(self) -> list[TimesRow]:
        """All but the family's, and those that are there for the growth grid alone."""
        return [row for row in self._of_single_sizes if not row.is_of_family]

    @property
    def family(self) -> list[TimesRow]:
        """The same of the family, chain by chain."""
        rows = [row for row in self._of_single_sizes if row.is_of_family]
        return sorted(rows, key=lambda row: FAMILY.index(row.chain))

    @property
    def _of_single_sizes(self) -> list[TimesRow]:
        return [row for row in self.times if row.shape not in GRID or row.shape == TARGET["GEMM"]]

    @property
    def grid(self) -> list[TimesRow]:
        """The growth grid, with the target shape where more than that was measured."""
        grown = {series(row) for row in self.times if row.shape in GRID and row.shape != TARGET["GEMM"]}
        return [row for row in self.times if row.shape in GRID and series(row) in grown]


def model_ratios(results: DeviceResults) -> list[tuple[ModelRow, str, float, float]]:
    """What the backend and Inductor with torch 2.15's group norm take over Inductor, of the device and on the wall."""
    return [
        (row, name, device, wall)
        for row in results.models
        for name in ("normfuse", "inductor-2.15")
        for device, wall in [row.way(name).over.get("inductor", (None, None))]
        if device and wall
    ]


def read_all(paths: Iterable[Path]) -> list[DeviceResults]:
    """What these files say, by device; BadResult where one of them is not the bench's."""
    contents = [read(path) for path in paths]
    devices: dict[str, dict[str, Any]] = {}
    for header, of_one in grouped(contents, itemgetter(0)).items():
        entries = [entry for _, found in of_one for entry in found]
        rows = [_typed(ROWS[header.experiment], entry) for entry in newest(header, entries)]
        devices.setdefault(header.device, {})[header.experiment] = sorted(rows, key=attrgetter("order"))
    return [DeviceResults(device, **devices[device]) for device in sorted(devices)]


def _typed(row_class: type[Row], entry: Entry) -> Row:
    try:
        import msgspec
    except ModuleNotFoundError:
        raise BadResult('reading results needs msgspec: pip install "normfuse[bench]"') from None

    try:
        return msgspec.convert(entry.row | {"run": entry.run}, row_class)
    except msgspec.ValidationError as error:
        raise BadResult(f"{entry.place}: {error}") from None
