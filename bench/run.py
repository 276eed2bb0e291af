"""The run: every cell checked, warmed up, timed and reported."""

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autotune_configs.command_line import cannot_write
from bench import tables
from bench.cells import Cell, Problem, make_problem
from bench.checking import check
from bench.device import NO_GPU
from bench.device import header as make_header
from bench.measurement import Measurement
from bench.peers import LIBRARY, OURS, bind_ours, bind_reference, make_call, measure_memory
from bench.rows import write_json
from bench.timing import time_host, time_rounds, warm_up
from bench.turns import turn

_WIDTH_WHEN_NO_TERMINAL = 200


def run(
    cells: list[Cell],
    peers: list[str],
    rounds: int,
    device: torch.device,
    json_path: Path | None,
    turns: Path | None = None,
) -> int:
    """Measure the cells and print what was found; returns the exit status, 1 if a check is red.

    ``turns`` is the file whose lock is held to check and time: see ``bench.turns``.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WHEN_NO_TERMINAL)
    header = make_header(device)
    measurements: list[Measurement] = []

    def save():
        write_json(json_path, header, [row for entry in measurements for row in entry.rows(peers)])

    try:
        save()
    except OSError as error:
        return cannot_write("bench", json_path, error)
    try:
        with turn(turns):
            pass
    except OSError as error:
        return cannot_write("bench", turns, error)
    console.print(escape(", ".join(f"{name} {value}" for name, value in header.items() if value)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(cells))
            for cell in cells:
                progress.update(task, description=str(cell))
                measurements.append(_measure(cell, peers, rounds, device, turns))
                save()
                progress.console.print(tables.summary(measurements[-1]))
                progress.advance(task)
    finally:
        if measurements:
            console.print(tables.error_table(measurements), tables.time_table(measurements, peers))
            console.print(*map(escape, tables.failures(measurements)), sep="\n", highlight=False)
        if device.type != "cuda":
            console.print(NO_GPU)
    return int(any(measurement.is_red for measurement in measurements))


def _measure(cell: Cell, peers: list[str], rounds: int, device: torch.device, turns: Path | None) -> Measurement:
    torch._dynamo.reset()
    measurement = Measurement(cell)
    with cell.chain.float32_precision(cell.precision):
        try:
            problem = make_problem(cell, device)
            with turn(turns):
                measurement.check = check(cell, problem, bind_ours(cell), bind_reference(cell))
        except Exception as error:  # a kernel may fail in any way; the other cells are still worth having
            measurement.failures[OURS] = _reason(error)
        if not measurement.is_red:
            torch.cuda.empty_cache()  # what float64 took, which libraries could want for workspaces
            _time(measurement, problem, peers, rounds, device, turns)
    return measurement


def _time(
    measurement: Measurement,
    problem: Problem,
    peers: list[str],
    rounds: int,
    device: torch.device,
    turns: Path | None = None,
) -> None:
    calls = {}
    for peer in (OURS, *peers):
        try:
            call = make_call(peer, measurement.cell, problem)
            warm_up(call, device)
            if device.type == "cuda" and measurement.cell.mode == "training" and peer != LIBRARY:
                measurement.memory[peer] = measure_memory(call)
        except Exception as error:  # so may a compiler, and then the others are still timed
            measurement.failures[peer] = _reason(error)
        else:
            calls[peer] = call
    if OURS in calls:
        with turn(turns):
            measurement.times = time_rounds(calls, rounds, device)
            if device.type == "cuda":
                measurement.host_times = time_host(calls, torch.cuda.synchronize)


def _reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
