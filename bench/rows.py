"""What the commands that write rows share: where they measure, and rows kept as they come and shown at last."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autotune_configs.command_line import cannot_write
from autotune_configs.files import replace_file
from bench.device import NO_GPU
from bench.device import header as make_header

_WIDTH_WHEN_NO_TERMINAL = 160


def device_to_measure(on_gpu: bool) -> torch.device:
    """The GPU, or the CPU with Triton told to interpret: it reads that when it is imported, as new processes do."""
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cuda" if on_gpu else "cpu")


def write_json(path: Path | None, header: dict, rows: Sequence[dict]) -> None:
    """Write a result file; nothing where no path was given. OSError as ``replace_file`` has it."""
    if path is not None:
        replace_file(path, (json.dumps({"header": header, "rows": rows}, indent=1) + "\n").encode())


def keep_and_show(
    program: str,
    path: Path | None,
    device: torch.device,
    measured: Iterable[tuple[Sequence[dict], Sequence[str]]],
    table: Callable[[Sequence[dict]], Table],
    spoiled_by: str,
) -> int:
    """Write the rows to ``path`` (if any) as they are ``measured``, with lines that tell of them, then their table.

    Returns the exit status: 0, 1 where a row's ``spoiled_by`` is true, 2 if nothing can be written there, which is
    known before anything is measured.
    """
    header = make_header(device)
    rows: list[dict] = []
    try:
        write_json(path, header, rows)
    except OSError as error:
        return cannot_write(program, path, error)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WHEN_NO_TERMINAL)
    for found, lines in measured:
        rows += found
        write_json(path, header, rows)
        for line in lines:
            console.print(escape(line), highlight=False)
    console.print(table(rows))
    if device.type != "cuda":
        console.print(NO_GPU)
    return int(any(row[spoiled_by] for row in rows))
