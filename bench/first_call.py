"""``python -m bench first-call``: what the first forward call of a fresh process costs, with nothing compiled yet."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.cells import Cell, default_shapes, make_cells
from bench.columns import FIRST_CALL, console_table
from bench.recording import device_to_measure, experiment_parser, has_gpu, record
from bench.schema import FirstCallRow

_ROOT = Path(__file__).parents[1]
#: Seconds after which a process has failed.
_LONGEST = 600


def main(arguments: list[str], prog: str) -> int:
    parser = experiment_parser(
        prog,
        "Time import and first forward call of each chain and dtype, each in a fresh process with an empty Triton "
        "cache, at the target size and PyTorch's default float32 precision. Needs a GPU. Exit status: 0, 1 if a "
        "process failed, 2 for a bad argument or without a GPU.",
    )
    options = parser.parse_args(arguments)
    if not has_gpu():
        parser.error("needs a GPU; in Triton's interpreter nothing is compiled")
    cells = make_cells(options.chains, options.dtypes, ["forward"], default_shapes(on_gpu=True))
    return record(options.output, "first_call", device_to_measure(), show, cells, measure, _summary)


def measure(cell: Cell) -> FirstCallRow:
    """What a fresh process with an empty cache says, or why it failed. The precision is PyTorch's default."""
    identity = cell.identity | {"precision": None}
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "bench.first_call_process", cell.chain.name, cell.dtype, cell.shape, "cuda"]
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


def show(rows: Sequence[FirstCallRow]) -> list:
    title = "First forward call of a fresh process, nothing compiled before"
    caption = "import ops: after torch's; calls: until the device is done; not run: by a later call's profile"
    return [console_table(title, FIRST_CALL, rows, caption)]


def _summary(row: FirstCallRow) -> str:
    if row.failure:
        return f"{row}: failed: {row.failure}"
    return f"{row}: first call {row.first_call_s:.2f} s, {len(row.kernels)} kernels compiled"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
