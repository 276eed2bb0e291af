"""One chain's first forward call, in a process of its own. It prints one line of JSON.

``python -m bench.first_call_process CHAIN DTYPE SHAPE DEVICE``, with an empty folder in TRITON_CACHE_DIR. Neither
``ops`` nor triton is imported before the time is taken.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.cells import Cell, Step, make_problem, make_step
from bench.chains import CHAINS

_LATER_CALLS = 10


def main(arguments: list[str]) -> None:
    chain_name, dtype, shape, device_name = arguments
    device = torch.device(device_name)
    cell = Cell(CHAINS[chain_name], dtype, None, "forward", shape)
    problem = make_problem(cell, device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()

    start = time.perf_counter()
    import ops  # noqa: F401

    import_s = time.perf_counter() - start
    step = make_step("forward", cell.bind("ops"), problem.tensors, problem.output_gradient)
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
    main(sys.argv[1:])
