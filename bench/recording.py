"""The rows of one run: kept in a file as they come, and shown at the end."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import results
from bench.device import NO_GPU, current_run, name_of
from bench.schema import SCHEMA, Header, Row

_WIDTH_WHEN_NO_TERMINAL = 200


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="keep the rows here, as JSON Lines, after every cell; a row of the same cell is replaced",
    )


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

    def add(self, *rows: Row) -> None:
        """Rows of one cell, measured to the end."""
        self.rows += rows
        self._progress.advance(self._task)
        if self._path is not None:
            self._entries += [results.Entry(self._run, results.plain(row), str(row)) for row in rows]
            self._save()

    def say(self, line: str, style: str | None = None) -> None:
        self._progress.console.print(escape(line), style=style)

    def _save(self) -> None:
        assert self._path is not None
        results.replace(self._path, self._header, self._entries)


def reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
