"""The run of ``python -m bench``: every cell is checked, and timed on a GPU."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autotune_configs.files import lock_at
from bench import tables
from bench.cells import Cell, Problem, make_problem
from bench.checking import check
from bench.peers import bind_ours, bind_reference, make_call, measure_memory
from bench.recording import Recording, reason
from bench.results import BadResult
from bench.schema import BARE, OURS, Errors, PeerTimes, TimesRow
from bench.timing import median_ratio, time_host, time_rounds, warm_up


def run(
    cells: list[Cell],
    peers: list[str],
    rounds: int,
    device: torch.device,
    output: Path | None,
    turns: Path | None = None,
) -> int:
    """Measure the cells and print what was found; returns the exit status, 1 if a check is red.

    ``turns`` is the file whose lock is held to check and time, so that processes that share a GPU compile side by side.
    """
    on_gpu = device.type == "cuda"
    try:
        turn = lock_at(turns) if turns else contextlib.nullcontext()
    except OSError as error:
        raise BadResult(f"cannot write {turns}: {error.strerror}") from None

    def shown(rows: Sequence[TimesRow]) -> list:
        times = [tables.time_table(rows, peers)] if on_gpu else []
        return [tables.error_table(rows), *times, *tables.failures(rows)]

    with Recording(output, "times", device, shown, len(cells)) as recording:
        for cell in cells:
            recording.begin(cell)
            row = measure(cell, peers, rounds, device, turn)
            recording.add(row)
            recording.say(tables.summary(row), "red" if row.red else None)
    return int(any(row.red for row in recording.rows))


def measure(
    cell: Cell, peers: Sequence[str], rounds: int, device: torch.device, turn: contextlib.AbstractContextManager
) -> TimesRow:
    """The row of a cell. Nothing is timed without a GPU, nor where the check is red."""
    torch._dynamo.reset()
    row = TimesRow(**cell.identity)
    with cell.chain.float32_precision(cell.precision):
        try:
            problem = make_problem(cell, device)
            with turn:
                checked = check(cell, problem, bind_ours(cell), bind_reference(cell))
        except Exception as error:  # a kernel may fail in any way; the other cells are still worth having
            return replace(row, red=True, peers={OURS: PeerTimes(failure=reason(error))})
        errors: Errors = {each.tensor: (each.ours, each.torch) for each in checked.comparisons}
        row = replace(row, errors=errors, away_from_jumps=checked.away_from_jumps, red=checked.is_red)
        if row.red or device.type != "cuda":
            return row
        torch.cuda.empty_cache()  # what float64 took, which cuBLAS and cuDNN could want for workspaces
        return replace(row, **time_peers(cell, problem, (OURS, *peers), rounds, device, turn))


def time_peers(
    cell: Cell,
    problem: Problem,
    peers: Sequence[str],
    rounds: int,
    device: torch.device,
    turn: contextlib.AbstractContextManager,
) -> dict:
    """What a row says of times: of every peer, or of the failures alone where ours is one of them."""
    failures, memory, calls = {}, {}, {}
    for peer in peers:
        try:
            call = make_call(peer, cell, problem)
            warm_up(call)
            if cell.mode == "training" and peer != BARE:
                memory[peer] = measure_memory(call) / 1e6
        except Exception as error:  # so may a compiler, and then the others are still timed
            failures[peer] = reason(error)
        else:
            calls[peer] = call
    if OURS in failures:
        return {"red": True, "peers": {peer: PeerTimes(failure=text) for peer, text in failures.items()}}
    with turn:
        times = time_rounds(calls, rounds, device)
        host_times = time_host(calls, torch.cuda.synchronize)
    found = {
        peer: PeerTimes(
            us=statistics.median(times[peer]),
            ours_over=None if peer == OURS else median_ratio(times, OURS, peer),
            host_us=host_times[peer],
            added_mb=memory.get(peer),
        )
        if peer in calls
        else PeerTimes(failure=failures[peer])
        for peer in peers
    }
    return {"rounds": rounds, "peers": found}
