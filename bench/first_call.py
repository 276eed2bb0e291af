"""``python -m bench first-call``: what the first forward call of a fresh process costs, with nothing compiled yet."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from autotune_configs.command_line import Parser, names
from bench.cells import CHAINS, DTYPES, Cell, make_cells
from bench.device import device_to_measure, has_gpu
from bench.recording import Recording, add_output
from bench.schema import FirstCallRow
from bench.tables import table
from bench.text import number

_ROOT = Path(__file__).parents[1]
#: Seconds after which a process has failed.
_LONGEST = 600


def main(arguments: list[str], prog: str) -> int:
    """Measure each chain and dtype in a process of its own; returns the exit status, 1 if one failed."""
    parser = Parser(
        prog=prog,
        description="Time import and first forward call of each chain and dtype, each in a fresh process with an empty "
        "Triton cache, at the target size and PyTorch's default float32 precision. Needs a GPU. Exit status: 0, 1 if a "
        "process failed, 2 for a bad argument or without a GPU.",
    )
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default=",".join(DTYPES), help="of " + ", ".join(DTYPES))
    add_output(parser)
    options = parser.parse_args(arguments)
    if not has_gpu():
        parser.error("needs a GPU; in Triton's interpreter nothing is compiled")
    cells = make_cells(options.chains, options.dtypes, ["forward"], on_gpu=True)
    with Recording(options.output, "first_call", device_to_measure(), show, len(cells)) as recording:
        for cell in cells:
            recording.begin(cell)
            row = measure(cell)
            recording.add(row)
            recording.say(_summary(row))
    return int(any(row.failure for row in recording.rows))


def measure(cell: Cell) -> FirstCallRow:
    """What a fresh process with an empty cache says, or why it failed. The precision is PyTorch's default."""
    identity = cell.identity | {"precision": None}
    name = next(name for name, chain in CHAINS.items() if chain is cell.chain)
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "bench.first_call_process", name, cell.dtype, str(cell.shape), "cuda"]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        try:
            process = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_LONGEST
            )
        except subprocess.TimeoutExpired:
            return FirstCallRow(**identity, failure=f"not done after {_LONGEST} s")
    if process.returncode:
        failure = _last_line(process.stderr) or f"exit status {process.returncode}"
        return FirstCallRow(**identity, failure=failure)
    return FirstCallRow(**identity, **json.loads(_last_line(process.stdout)))


def show(rows: Sequence[FirstCallRow]) -> list[Table]:
    """One line a process."""
    result = table(
        "First forward call of a fresh process, nothing compiled before",
        "chain",
        ("import ops, s", "first call, s", "kernels compiled", "of which not run", "later calls, µs"),
        "import ops: after torch's; calls: until the device is done; not run: by a later call's profile",
    )
    for row in rows:
        if row.failure:
            result.add_row(str(row), "failed", style="red")
            continue
        result.add_row(
            str(row),
            number(row.import_s, ".2f"),
            number(row.first_call_s, ".2f"),
            str(len(row.kernels)),
            "–" if row.kernels_not_run is None else ", ".join(row.kernels_not_run) or "none",
            number(row.later_call_us),
        )
    return [result]


def _summary(row: FirstCallRow) -> str:
    if row.failure:
        return f"{row}: failed: {row.failure}"
    return f"{row}: first call {row.first_call_s:.2f} s, {len(row.kernels)} kernels compiled"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
