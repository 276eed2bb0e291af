"""The rows of one run: kept in a file as they come, and shown at the end."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autotune_configs.command_line import Parser, names, positive
from bench import results
from bench.cells import DTYPES, Cell
from bench.chains import CHAINS
from bench.device import NO_GPU, current_run, name_of
from bench.schema import ALL_MODES, MODES, SCHEMA, Header, Row

_WIDTH_WHEN_NO_TERMINAL = 200


def add_list(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], default: Iterable[str] | None, more: str = ""
) -> None:
    """An option that takes some of these names."""
    default = default and ",".join(default)
    parser.add_argument(option, type=names(known), default=default, help=f"of {', '.join(known)}{more}")


def experiment_parser(
    prog: str,
    description: str,
    chains: Iterable[str] | None = CHAINS,
    dtypes: Iterable[str] | None = DTYPES,
    rounds: int | None = None,
    epilog: str | None = None,
) -> Parser:
    """With the options of every experiment; those of which there are no defaults mean all where they are not given."""
    parser = Parser(prog=prog, description=description, epilog=epilog)
    add_list(parser, "--chains", CHAINS, chains, "" if chains else "; all where not given")
    add_list(parser, "--dtypes", DTYPES, dtypes, "" if dtypes else "; all where not given")
    if rounds:
        add_list(parser, "--modes", ALL_MODES, MODES, "; forward_grad keeps what a backward pass needs")
        parser.add_argument("--rounds", type=positive, default=rounds, help="timed calls of each, interleaved")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="keep the rows here, as JSON Lines, after every cell; a row of the same cell is replaced",
    )
    return parser


class Recording:
    """A context in which rows are measured, with a line for each and a bar. Its end shows the tables of all rows.

    An interruption loses nothing. Rows of the same cells that the file already has are replaced, the others are kept.
    """

    def __init__(
        self,
        path: Path | None,
        experiment: str,
        device: torch.device,
        tables: Callable[[Sequence], Sequence[RenderableType]],
        cells: int,
    ):
        """BadResult where ``path`` cannot be written, which is known before anything is measured."""
        self.rows: list[Any] = []
        self._path = path
        self._tables = tables
        self._on_gpu = device.type == "cuda"
        self._header = Header(SCHEMA, experiment, name_of(device))
        run = current_run(device)
        self._run = results.plain(run)
        self._entries: list[results.Entry] = []
        if path is not None:
            if path.is_file():
                header, self._entries = results.read(path)
                results.require_same(path, header, "this run", self._header)
            self._save()
        self._console = Console(width=None if sys.stdout.isatty() else _WIDTH_WHEN_NO_TERMINAL, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=cells)
        self._console.print(escape(f"{self._header.device}, {run.versions}, {run.state}"))

    def __enter__(self) -> "Recording":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if self.rows:
            self._console.print(*self._tables(self.rows), sep="\n")
        if self.rows and not self._on_gpu:
            self._console.print(f"[bold]{NO_GPU}[/]")

    def begin(self, cell: object) -> None:
        self._progress.update(self._task, description=escape(str(cell)))

    def add(self, row: Row) -> None:
        """The row of a cell, measured to the end."""
        self.rows.append(row)
        self._progress.advance(self._task)
        if self._path is not None:
            self._entries.append(results.Entry(self._run, results.plain(row), str(row)))
            self._save()

    @property
    def status(self) -> int:
        """The exit status: 1 if a row failed."""
        return int(any(row.failed for row in self.rows))

    def say(self, line: str, style: str | None = None) -> None:
        self._progress.console.print(escape(line), style=style)

    def _save(self) -> None:
        assert self._path is not None
        results.replace(self._path, results.lines_of(self._header, self._entries))


def record(
    path: Path | None,
    experiment: str,
    device: torch.device,
    tables: Callable[[Sequence], Sequence[RenderableType]],
    cells: Sequence[Cell],
    measure: Callable[[Cell], Any],
    summary: Callable[[Any], str],
) -> int:
    """Run an experiment, cell by cell, with a summary of each; returns the exit status."""
    with Recording(path, experiment, device, tables, len(cells)) as recording:
        for cell in cells:
            recording.begin(cell)
            row = measure(cell)
            recording.add(row)
            recording.say(summary(row), "red" if row.failed else None)
    return recording.status


def reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
