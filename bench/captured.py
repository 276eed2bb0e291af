"""``python -m bench captured``: each chain called eagerly, by ``torch.compile``, and replayed from a CUDA graph."""

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from autotune_configs.command_line import Parser, names, positive
from bench.cells import CHAINS, DTYPES, MODES, Cell, Problem, Step, make_cells, make_problem, make_step
from bench.device import has_gpu
from bench.rows import device_to_measure, keep_and_show
from bench.timing import WARM_UP_CALLS, time_host, time_rounds, warm_up

#: How a chain is called; the others are compared with the first. Without a GPU there are no graphs.
CALLS = EAGER, COMPILED, CAPTURED = "eager", "compile", "graph"
#: Of the eager call's time: what a compiled or captured one may take.
MOST = 1.02


def capture(step: Step) -> Step:
    """The step as one CUDA graph; its replays write the same tensors again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay():
        graph.replay()
        return results

    return replay


def make_call(name: str, cell: Cell, problem: Problem) -> Step:
    """The cell's work, called in this way."""
    import ops  # as triton is imported, it reads whether it is to interpret

    forward = cell.chain.bind(ops, cell.shape.channels)
    if name == COMPILED:
        # Inductor would need a C++ compiler where there is no GPU.
        backend = "inductor" if problem.output_gradient.is_cuda else "aot_eager"
        forward = torch.compile(forward, fullgraph=True, backend=backend)
    step = make_step(cell.mode, forward, problem.tensors, problem.output_gradient)
    return capture(step) if name == CAPTURED else step


def difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Which tensor is further from the expected one than its dtype's epsilon, and how far; None if none is."""
    for number, (result, other) in enumerate(zip(results, expected, strict=True)):
        size = other.float().norm().item()
        error = (result.float() - other.float()).norm().item()
        if not error <= torch.finfo(other.dtype).eps * size:
            what = f"gradient {number}" if number else "the output"
            return f"{what} differs from the eager call's by {error:.2e} of {size:.2e}"
    return None


def timed(times: Mapping[str, Sequence[float]], host_times: Mapping[str, float], name: str) -> dict[str, Any]:
    """What a row says of times. ``ratio`` is the median over rounds of the ratio to the eager call's."""
    ratios = [own / eager for own, eager in zip(times[name], times[EAGER], strict=True)]
    return {
        "median_us": statistics.median(times[name]),
        "ratio": statistics.median(ratios),
        "host_us": host_times.get(name),
        "rounds": len(ratios),
    }


def measure(cell: Cell, rounds: int, device: torch.device) -> list[dict]:
    """A row for each way to call, timed in turn where its results are the eager call's."""
    on_gpu = device.type == "cuda"
    failures: dict[str, str | None] = dict.fromkeys(CALLS if on_gpu else (EAGER, COMPILED))
    calls: dict[str, Step] = {}
    torch._dynamo.reset()
    problem = make_problem(cell, device)
    with cell.chain.float32_precision(cell.precision):
        for name in failures:
            try:
                call = make_call(name, cell, problem)
                warm_up(call, device)
                if calls:
                    (output, gradients), (expected, expected_gradients) = call(), calls[EAGER]()
                    failures[name] = difference((output, *gradients), (expected, *expected_gradients))
            except Exception as error:  # a compiler may fail in any way; the other calls are still worth having
                failures[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if not failures[name]:
                calls[name] = call
            elif name == EAGER:  # nothing to compare with
                failures = dict.fromkeys(failures, failures[name])
                break
        times = time_rounds(calls, rounds, device) if calls else {}
        host_times = time_host(calls, torch.cuda.synchronize) if on_gpu else {}
    unknown = dict.fromkeys(("median_us", "ratio", "host_us", "rounds"))
    return [
        {
            "kind": "captured",
            **cell.row,
            "call": name,
            **(timed(times, host_times, name) if name in calls else unknown),
            "failure": failure,
        }
        for name, failure in failures.items()
    ]


def table(rows: Sequence[dict]) -> Table:
    """One line a row."""
    result = Table(title="Called eagerly, compiled, and replayed from a CUDA graph")
    result.add_column("cell", no_wrap=True)
    for column in ("call", "µs", "of eager", "host, µs"):
        result.add_column(column, justify="right")
    for row in rows:
        parts = ("chain", "dtype", "precision", "mode", "shape", "memory_format")
        label = " ".join(row[name] for name in parts if row[name])
        if row["failure"]:
            result.add_row(label, row["call"], "failed", style="red")
            continue
        host = "–" if row["host_us"] is None else f"{row['host_us']:.0f}"
        style = "red" if row["ratio"] > MOST else None
        result.add_row(label, row["call"], f"{row['median_us']:.0f}", f"{row['ratio']:.3f}", host, style=style)
    result.caption = f"µs: of the device; of eager: median of the rounds' ratios, red above {MOST}"
    return result


def _parse(arguments: list[str], on_gpu: bool) -> tuple[Parser, Namespace]:
    parser = Parser(
        prog="bench captured",
        description="Time each chain called eagerly, through torch.compile and replayed from a CUDA graph, in turn, at "
        "the target size; results must be the eager call's. Exit status: 0, 1 if a call fails or its results differ, 2 "
        "for a bad argument.",
    )
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default="bfloat16,float32", help="of " + ", ".join(DTYPES))
    parser.add_argument("--modes", type=names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--rounds", type=positive, default=30 if on_gpu else 1, help="timed calls of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the rows here; rewritten after every cell")
    return parser, parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure and print; returns the exit status."""
    on_gpu = has_gpu()
    parser, options = _parse(arguments, on_gpu)
    device = device_to_measure(on_gpu)

    def measured():
        for cell in make_cells(options.chains, options.dtypes, options.modes, on_gpu):
            found = measure(cell, options.rounds, device)
            yield found, [f"{cell} {row['call']}: {_outcome(row)}" for row in found]

    return keep_and_show(parser.prog, options.json, device, measured(), table, "failure")


def _outcome(row: dict) -> str:
    return f"failed: {row['failure']}" if row["failure"] else f"{row['median_us']:.0f} µs, {row['ratio']:.3f}"
