"""One run: where it is, what it is measured with, and its rows, kept in a file as they come and shown at the end."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autotune_configs.command_line import Parser, names, positive
from bench import results
from bench.cells import DTYPES
from bench.chains import CHAINS, NAMED
from bench.schema import ALL_MODES, MODES, SCHEMA, Header, Row, Run

_WIDTH_WHEN_NO_TERMINAL = 200

_ROOT = Path(__file__).parents[1]
#: The commit's full hash, and whether the tree differs from it.
_DESCRIBE = ("git", "-C", str(_ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def has_gpu() -> bool:
    """Whether there is a GPU and the kernels are to run there."""
    return torch.cuda.is_available() and not _interprets()


def device_to_measure() -> torch.device:
    """The GPU, or the CPU with Triton told to interpret. Triton reads that when it is imported, so call this first."""
    if has_gpu():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU, Triton's interpreter" if _interprets() else "CPU"


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def current_run(device: torch.device) -> Run:
    import triton  # not before device_to_measure has decided whether it interprets

    return Run(
        date=datetime.now(timezone.utc).replace(microsecond=0),
        # An installed package may lie within another project's repository.
        commit=_output_of(*_DESCRIBE) if (_ROOT / ".git").exists() else None,
        driver=_output_of(*_DRIVER) if device.type == "cuda" else None,
        torch=torch.__version__,
        triton=triton.__version__,
    )


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def add_list(
    parser: argparse.ArgumentParser, option: str, known: Iterable[str], default: Iterable[str] | None, more: str = ""
) -> None:
    """An option that takes some of these names, and all of them where it is not given and has no default."""
    more = more or ("" if default else "; all where not given")
    default = default and ",".join(default)
    parser.add_argument(option, type=names(known), default=default, help=f"of {', '.join(known)}{more}")


def experiment_parser(
    prog: str,
    description: str,
    chains: Iterable[str] | None = NAMED,
    dtypes: Iterable[str] | None = DTYPES,
    rounds: int | None = None,
    epilog: str | None = None,
    known: Iterable[str] = CHAINS,
) -> Parser:
    parser = Parser(prog=prog, description=description, epilog=epilog)
    add_list(parser, "--chains", known, chains)
    add_list(parser, "--dtypes", DTYPES, dtypes)
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
        self._path, self._tables, self._on_gpu = path, tables, device.type == "cuda"
        self._header = Header(SCHEMA, experiment, name_of(device))
        self._entries: list[results.Entry] = []
        run = current_run(device)
        self._run = results.plain(run)
        if path and path.is_file():
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
            what_ran = "the kernels ran in Triton's interpreter" if _interprets() else "PyTorch's operations ran"
            self._console.print(f"[bold]No GPU: {what_ran}. Times need a GPU.[/]")

    def add(self, row: Row, is_whole: bool = True) -> None:
        """Keep a row, in the place of one of the same cell that was not whole yet."""
        self.rows = [*(each for each in self.rows if each.key != row.key), row]
        self._progress.advance(self._task, int(is_whole))
        self._entries.append(results.Entry(self._run, results.plain(row), str(row)))
        self._save()

    @property
    def status(self) -> int:
        """The exit status: 1 if a row failed."""
        return int(any(row.failed for row in self.rows))

    def say(self, line: str, style: str | None = None) -> None:
        self._progress.console.print(escape(line), style=style)

    def run(self, cells: Sequence[Any], measure: Callable[[Any], Any], summary: Callable[[Any], str]) -> int:
        """Measure cell by cell, with a summary of each; returns the exit status."""
        with self:
            for cell in cells:
                self._progress.update(self._task, description=escape(str(cell)))
                row = measure(cell)
                self.add(row)
                self.say(summary(row), "red" if row.failed else None)
        return self.status

    def _save(self) -> None:
        if self._path:
            results.replace(self._path, results.lines_of(self._header, self._entries))


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
