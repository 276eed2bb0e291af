"""``python -m bench report``: turn results into tables and pictures. Needs neither torch nor the kernels."""

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune_configs.command_line import Parser
from bench import pictures
from bench.page import write_page
from bench.results import DeviceResults, read_all, replace
from bench.schema import ROWS, Row
from bench.tables import fill_tables

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "bench" / "results"


def main(arguments: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Turn results into a page of tables, benchmarks.md, and into pictures. In the repository, without "
        "FILE or --page, its own results are taken, and the tables in README.md and docs/ are filled too; elsewhere "
        "those of the current folder. Where files share a cell, the newest run decides. Exit status: 0, 1 if --check "
        "finds something, 2 for a bad argument, result or folder.",
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="what --output wrote; default: *.jsonl")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page to write; pictures go beside it")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--csv", type=Path, metavar="FILE", help="write all rows as one table instead; - is the output"
    )
    instead.add_argument("--check", action="store_true", help="write nothing, and name what is not current")
    options = parser.parse_args(arguments)
    in_repository = _RESULTS.is_dir() and not options.files and not options.page
    folder = _RESULTS if _RESULTS.is_dir() and not options.files else Path()
    paths = options.files or sorted(folder.glob("*.jsonl"))
    if not paths:
        parser.error(f"no results (*.jsonl) in {folder.resolve()}")
    devices = read_all(paths)
    if str(options.csv) == "-":
        print(flat_table(devices), end="")
        return 0
    if options.csv:
        return _write({options.csv: flat_table(devices).encode()})
    page = _ROOT / "docs" / "benchmarks.md" if in_repository else options.page or Path("benchmarks.md")
    others = {_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")} - {page} if in_repository else set()
    folder = page.parent / "pictures"
    names = [name for device in devices for name in pictures.files_of(device)]
    texts = {page: write_page(devices, folder, page, names).encode()} | {
        other: fill_tables(other.read_text(encoding="utf-8"), devices, other).encode() for other in sorted(others)
    }
    if not options.check:
        pngs = (png for device in devices for png in pictures.draw_all(device).items())
        return _write(texts | {folder / name: content for name, content in pngs})
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_bytes() != text]
    stale += [path for device in devices for path in pictures.not_current(device, folder)]
    for path in stale:
        print(f"{os.path.relpath(path)} is not current: run the report")
    return int(bool(stale))


def _write(files: dict[Path, bytes]) -> int:
    """All is made before anything is written. What is current is left alone."""
    for path, content in files.items():
        if replace(path, content):
            print(f"wrote {os.path.relpath(path)}")
    return 0


def flat_table(devices: Sequence[DeviceResults]) -> str:
    """All rows of all experiments as CSV; a row of several peers or calls becomes several lines."""
    lines = [
        {"experiment": experiment, "device": device.device} | line
        for device in devices
        for experiment in ROWS
        for row in getattr(device, experiment)
        for line in _lines(row)
    ]
    names = list(dict.fromkeys(name for line in lines for name in line))
    content = io.StringIO()
    writer = csv.DictWriter(content, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return content.getvalue()


def _lines(row: Row) -> list[dict]:
    fields = asdict(row)
    parts = [
        {what: name} | _flat(times)
        for what in ("peer", "call", "way")
        for name, times in fields.pop(f"{what}s", {}).items()
    ]
    return [_flat(fields) | part for part in parts or [{}]]


def _flat(value: Any, name: str = "") -> dict:
    """Fields by name, with nested names joined by dots; None is left out."""
    if isinstance(value, tuple):
        value = dict(zip(("ours", "torch"), value, strict=True))
    if isinstance(value, dict):
        named = ((f"{name}.{part}" if name else part, each) for part, each in value.items())
        return {key: flat for part, each in named for key, flat in _flat(each, part).items()}
    return {} if value is None else {name: " ".join(value) if isinstance(value, list) else value}
