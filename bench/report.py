"""What comes out: rows as data, written to a file as they come, and a table to read."""

import errno
import json
import os
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton
from rich.markup import escape
from rich.table import Table

from bench.cells import Cell
from bench.checking import Check
from bench.peers import LIBRARY, OURS, PYTORCH, Memory

#: The commit's full hash, and whether the tree differs from it.
_DESCRIBE = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


@dataclass
class Measurement:
    """What was found in one cell; times in microseconds. Nothing is timed where the check is red."""

    cell: Cell
    check: Check | None = None  # None where it failed to run
    times: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_red(self) -> bool:
        return self.check is None or self.check.is_red or OURS in self.failures

    def median_time(self, peer: str) -> float | None:
        return statistics.median(self.times[peer]) if peer in self.times else None

    def ratio(self, peer: str, to: str | None) -> float | None:
        """The median over the rounds of one peer's time over another's in the same round."""
        if peer not in self.times or to not in self.times:
            return None
        return statistics.median(a / b for a, b in zip(self.times[peer], self.times[to], strict=True))

    @property
    def best_pytorch(self) -> str | None:
        """The fastest of the peers that are the whole chain as PyTorch has it."""
        return min((peer for peer in PYTORCH if peer in self.times), key=self.median_time, default=None)

    def rows(self, peers: Iterable[str]) -> list[dict]:
        """One row for each peer, ours first; what is unknown is None."""
        return [self._row(peer) for peer in (OURS, *peers)]

    def _row(self, peer: str) -> dict:
        cell, time, memory = self.cell, self.median_time(peer), self.memory.get(peer)
        worst = self.check.worst if self.check else None
        comparisons = self.check.comparisons if self.check else []
        return {
            "chain": cell.chain.label,
            "dtype": cell.dtype,
            "precision": cell.precision,
            "mode": cell.mode,
            "shape": str(cell.shape),
            "memory_format": cell.memory_format,
            "product": cell.chain.product,
            "peer": peer,
            "median_us": time,
            "ratio": self.ratio(peer, LIBRARY),
            "ours_to_peer": self.ratio(OURS, peer),
            "best_pytorch": self.best_pytorch,
            "ours_to_best_pytorch": self.ratio(OURS, self.best_pytorch),
            "tflops": cell.operations / time / 1e6 if time else None,
            "error_ours": worst.ours if worst else None,
            "error_torch": worst.torch if worst else None,
            "error_tensor": worst.tensor if worst else None,
            "errors": {entry.tensor: [entry.ours, entry.torch] for entry in comparisons},
            "away_from_jumps": self.check.away_from_jumps if self.check else None,
            "checked_samples": self.check.samples if self.check else None,
            "float64_samples_at_once": self.check.samples_at_once if self.check else None,
            "red": self.is_red,
            "peak_memory_mb": memory.added / 1e6 if memory else None,
            "peak_memory_with_results_mb": memory.with_results / 1e6 if memory else None,
            "rounds": len(self.times.get(peer, ())),
            "failure": self.failures.get(peer),
        }


def header(device: torch.device) -> dict:
    """On what, with what and when: one dict for the whole run."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU, Triton's interpreter: the times mean nothing",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _output_of("git", "-C", str(Path(__file__).parent), *_DESCRIBE),
    }


def write_json(path: Path, header: dict, rows: list[dict]) -> None:
    """Replace the file in one step: a reader, or an interruption, never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    os.replace(partial, path)


def time_table(measurements: list[Measurement], peers: list[str]) -> Table:
    """One line a cell: ours, then ours over each peer with the peer's own time."""
    table = Table(title="Times: ours, then ours over each peer (median of the rounds' ratios) and the peer's own µs")
    table.add_column("cell", no_wrap=True)
    for column in ("µs", "TFLOP/s", *peers, "best of PyTorch", "added MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for measurement in measurements:
        row = measurement.rows(())[0]
        table.add_row(
            str(measurement.cell),
            "RED" if measurement.is_red else _optional(row["median_us"], ".0f"),
            _optional(row["tflops"], ".3g"),
            *(_against(measurement, peer) for peer in peers),
            _against_best(measurement),
            _optional(row["peak_memory_mb"], ".1f"),
            style="red" if measurement.is_red else None,
        )
    table.caption = (
        "library: the bare products, in the same memory format; best of PyTorch: the fastest of the compiled and eager "
        "chains;\nadded MB: at the peak of a training step, beyond weights, gradients, input and output"
    )
    return table


def error_table(measurements: list[Measurement]) -> Table:
    """One line a cell: the output's errors and those of the tensor that uses most of its allowance."""
    table = Table(title="Errors against float64")
    table.add_column("cell", no_wrap=True)
    for column in ("output: ours", "PyTorch", "worst: ours", "PyTorch", "of", "compared"):
        table.add_column(column, justify="left" if column == "of" else "right", no_wrap=True)
    for measurement in measurements:
        if measurement.check:
            output, worst = measurement.check.comparisons[0], measurement.check.worst
            table.add_row(
                str(measurement.cell),
                *(f"{error:.2e}" for error in (output.ours, output.torch, worst.ours, worst.torch)),
                worst.tensor,
                _optional(measurement.check.away_from_jumps, ".0%"),
                style="red" if measurement.is_red else None,
            )
    table.caption = (
        "of every element of every sample; compared: the part of the output that passes a gradient on, the rest is too "
        "near a jump to tell"
    )
    return table


def failures(measurements: list[Measurement]) -> list[str]:
    """One line for each peer that failed, and why."""
    return [f"{entry.cell}, {peer}: {reason}" for entry in measurements for peer, reason in entry.failures.items()]


def summary(measurement: Measurement) -> str:
    """One line on a cell, for while the run goes on."""
    if measurement.is_red:
        return f"[red]{measurement.cell}: RED, not timed: {escape(_red_reason(measurement))}[/]"
    ratios = {peer: measurement.ratio(OURS, peer) for peer in (LIBRARY, measurement.best_pytorch)}
    times = (f"{ratio:.2f} x {peer}" for peer, ratio in ratios.items() if ratio is not None)
    return ", ".join([f"{measurement.cell}: {measurement.median_time(OURS):.0f} µs", *times])


def _red_reason(measurement: Measurement) -> str:
    if OURS in measurement.failures:
        return measurement.failures[OURS]
    worst = measurement.check.worst
    return f"{worst.tensor} is off by {worst.ours:.1e} where PyTorch is by {worst.torch:.1e}"


def _against(measurement: Measurement, peer: str) -> str:
    if peer in measurement.failures:
        return "failed"
    ratio = measurement.ratio(OURS, peer)
    return "–" if ratio is None else f"{ratio:.2f} ({measurement.median_time(peer):.0f})"


def _against_best(measurement: Measurement) -> str:
    ratio = measurement.ratio(OURS, measurement.best_pytorch)
    return "–" if ratio is None else f"{ratio:.2f} ({measurement.best_pytorch})"


def _optional(value: float | None, format: str) -> str:
    return "–" if value is None else f"{value:{format}}"


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
