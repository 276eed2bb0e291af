"""``python -m bench first-call``: what the first forward call of a fresh process costs, with nothing compiled yet."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.cells import Cell, Step, default_shapes, make_cells, make_problem, make_step
from bench.chains import CHAINS
from bench.columns import FIRST_CALL, console_table
from bench.recording import Recording, device_to_measure, experiment_parser, has_gpu
from bench.schema import FirstCallRow

_ROOT = Path(__file__).parents[1]
#: Seconds after which a process has failed.
_LONGEST = 600
_LATER_CALLS = 10


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
    recording = Recording(options.output, "first_call", device_to_measure(), show, len(cells))
    return recording.run(cells, measure, _summary)


def measure(cell: Cell) -> FirstCallRow:
    """What a fresh process with an empty cache says, or why it failed. The precision is PyTorch's default."""
    identity = cell.identity | {"precision": None}
    with tempfile.TemporaryDirectory() as cache:
        words = (cell.chain.name, cell.dtype, cell.shape, "cuda")
        found = answer_of("bench.first_call", words, {"TRITON_CACHE_DIR": cache})
    return FirstCallRow(**identity, **found)


def answer_of(module: str, words: Sequence[str], environment: dict[str, str], longest: float = _LONGEST) -> dict:
    """What a process of its own prints as its last line, as JSON; or why there is none, as the ``failure``."""
    command = [sys.executable, "-m", module, *words]
    try:
        process = subprocess.run(
            command,
            cwd=_ROOT,
            env={**os.environ, **environment},
            timeout=longest,
            check=True,
            capture_output=True,
            text=True,
        )
        return json.loads(_last_line(process.stdout))
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {longest:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"failure": _last_line(error.stderr) or f"exit status {error.returncode}"}


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


def run(chain_name: str, dtype: str, shape: str, device_name: str) -> None:
    """The fresh process: ``python -m bench.first_call CHAIN DTYPE SHAPE DEVICE``, with an empty folder in
    TRITON_CACHE_DIR. It prints one line of JSON. Neither ``ops`` nor triton is imported before the time is taken."""
    device = torch.device(device_name)
    cell = Cell(CHAINS[chain_name], dtype, None, "forward", shape)
    problem = make_problem(cell, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()

    start = time.perf_counter()
    import ops  # noqa: F401

    import_s = time.perf_counter() - start
    step = make_step("forward", cell.by_ops(), problem.tensors, problem.output_gradient)
    first_call_s = _seconds(step, synchronize)
    compiled = compiled_kernels(Path(os.environ["TRITON_CACHE_DIR"]))
    later = [_seconds(step, synchronize) for _ in range(_LATER_CALLS)]
    run = _kernels_run(step) if device.type == "cuda" else None
    found = {
        "import_s": import_s,
        "first_call_s": first_call_s,
        "kernels": compiled,
        "kernels_not_run": sorted(set(compiled) - run) if run else None,
        "later_call_us": statistics.median(later) * 1e6,
    }
    print(json.dumps(found))


def compiled_kernels(cache: Path) -> list[str]:
    """The name of every kernel that Triton compiled into this cache, one name for each of a kernel's variants."""
    return sorted(_kernel_name(binary) for binary in cache.rglob("*.cubin"))


def _kernel_name(binary: Path) -> str:
    """What the device calls it, which the description beside it says; the file's name may be shortened."""
    description = binary.with_suffix(".json")
    return json.loads(description.read_text()).get("name", binary.stem) if description.exists() else binary.stem


def _seconds(step: Step, synchronize: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def _kernels_run(step: Step) -> set[str] | None:
    """The kernels of one call by name, None where the profiler sees none."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    except RuntimeError as error:  # a machine may forbid profiling; the times are still worth having
        print(f"no profile: {error}", file=sys.stderr)
        return None
    return {event.name for event in on_device} or None


if __name__ == "__main__":
    run(*sys.argv[1:])
