"""``python -m bench first-call``: what the first forward call of a fresh process costs, with nothing compiled yet."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from autotune_configs.command_line import Parser, names
from bench.cells import CHAINS, DTYPES, MEMORY_FORMATS
from bench.device import has_gpu
from bench.rows import device_to_measure, keep_and_show
from bench.sizes import SMALL, TARGET

_ROOT = Path(__file__).parents[1]
_FOUND = ("import_s", "first_call_s", "kernels_compiled", "kernels", "kernels_not_run", "later_call_us")
#: Seconds after which a process has failed.
_LONGEST = 600


def main(arguments: list[str]) -> int:
    """Measure each chain and dtype in a process of its own; returns the exit status, 1 if one failed."""
    parser = Parser(
        prog="bench first-call",
        description="Time import and first forward call of each chain and dtype, each in a fresh process with an empty "
        "Triton cache, at the target size and PyTorch's default float32 precision. Exit status: 0, 1 if a process "
        "failed, 2 for a bad argument.",
    )
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default=",".join(DTYPES), help="of " + ", ".join(DTYPES))
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the rows here; rewritten after every process")
    options = parser.parse_args(arguments)
    device = device_to_measure(has_gpu())

    def measured():
        for dtype in options.dtypes:
            for chain in options.chains:
                row = measure(chain, dtype, device)
                yield [row], [_summary(row)]

    return keep_and_show(parser.prog, options.json, device, measured(), table, "failure")


def measure(chain_name: str, dtype: str, device: torch.device) -> dict:
    """A row: what a fresh process with an empty cache says, or why it failed. Times in the units of their names."""
    chain = CHAINS[chain_name]
    shape = (TARGET if device.type == "cuda" else SMALL)[chain.product]
    row = {
        "kind": "first_call",
        "chain": chain.label,
        "dtype": dtype,
        "precision": None,
        "mode": "forward",
        "shape": shape,
        "memory_format": next(iter(MEMORY_FORMATS)) if chain.has_memory_format else None,
        "product": chain.product,
        **dict.fromkeys(_FOUND),
        "failure": None,
    }
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "bench.first_call_process", chain_name, dtype, shape, device.type]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        try:
            process = subprocess.run(
                command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_LONGEST
            )
        except subprocess.TimeoutExpired:
            return row | {"failure": f"not done after {_LONGEST} s"}
    if process.returncode:
        return row | {"failure": _last_line(process.stderr) or f"exit status {process.returncode}"}
    return row | json.loads(_last_line(process.stdout))


def table(rows: Sequence[dict]) -> Table:
    """One line a process."""
    columns = ("import ops, s", "first call, s", "kernels compiled", "of which not run", "later calls, µs")
    result = Table(title="First forward call of a fresh process, nothing compiled before")
    result.add_column("chain", no_wrap=True)
    for column in columns:
        result.add_column(column, justify="right")
    for row in rows:
        label = " ".join(filter(None, (row["chain"], row["dtype"], row["shape"], row["memory_format"])))
        if row["failure"]:
            result.add_row(label, "failed", style="red")
            continue
        not_run = row["kernels_not_run"]
        result.add_row(
            label,
            f"{row['import_s']:.2f}",
            f"{row['first_call_s']:.2f}",
            str(row["kernels_compiled"]),
            "–" if not_run is None else ", ".join(not_run) or "none",
            f"{row['later_call_us']:.0f}",
        )
    result.caption = "import ops: after torch's; calls: until the device is done; not run: by a later call's profile"
    return result


def _summary(row: dict) -> str:
    label = f"{row['chain']} {row['dtype']} {row['shape']}"
    if row["failure"]:
        return f"{label}: failed: {row['failure']}"
    return f"{label}: first call {row['first_call_s']:.2f} s, {row['kernels_compiled']} kernels compiled"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
