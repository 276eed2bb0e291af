"""``python -m bench captured``: each chain called eagerly, by ``torch.compile``, and replayed from a CUDA graph."""

from collections.abc import Sequence

import torch

from bench.cells import Cell, Problem, Step, default_shapes, make_cells, make_problem, make_step
from bench.columns import CAPTURED as COLUMNS
from bench.columns import console_table
from bench.recording import Recording, device_to_measure, experiment_parser, reason
from bench.schema import CALLS, CAPTURED, COMPILED, EAGER, CallTimes, CapturedRow
from bench.timing import median_ratio, time_calls, warm_up

#: Of the eager call's time: what a compiled or captured one may take.
MOST = 1.02


def capture(step: Step) -> Step:
    """The step as one CUDA graph. Each replay writes the same tensors."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay():
        graph.replay()
        return results

    return replay


def make_call(name: str, cell: Cell, problem: Problem) -> Step:
    forward = cell.by_ops()
    if name == COMPILED:
        # Inductor would need a C++ compiler where there is no GPU.
        backend = "inductor" if problem.output_gradient.is_cuda else "aot_eager"
        forward = torch.compile(forward, fullgraph=True, backend=backend)
    step = make_step(cell.mode, forward, problem.tensors, problem.output_gradient)
    return capture(step) if name == CAPTURED else step


def difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """Which tensor is further from the expected one than its dtype's epsilon, and how far; None if none is."""
    for index, (result, other) in enumerate(zip(results, expected, strict=True)):
        size = other.float().norm().item()
        error = (result.float() - other.float()).norm().item()
        if not error <= torch.finfo(other.dtype).eps * size:
            what = f"gradient {index}" if index else "the output"
            return f"{what} differs from the eager call's by {error:.2e} of {size:.2e}"
    return None


def measure(cell: Cell, rounds: int, device: torch.device) -> CapturedRow:
    """Each way to call the cell, timed (on a GPU, for without one there are no graphs) where its results are right."""
    on_gpu = device.type == "cuda"
    found: dict[str, CallTimes] = {}
    calls: dict[str, Step] = {}
    torch._dynamo.reset()
    problem = make_problem(cell, device)
    with cell.float32_precision:
        for name in CALLS if on_gpu else (EAGER, COMPILED):
            try:
                call = make_call(name, cell, problem)
                if on_gpu:
                    warm_up(call)
                (output, gradients), (expected, expected_gradients) = call(), calls.get(EAGER, call)()
                failure = difference((output, *gradients), (expected, *expected_gradients))
            except Exception as error:  # a compiler may fail in any way; the other calls are still worth having
                failure = reason(error)
            found[name] = CallTimes(failure=failure)
            if failure is None:
                calls[name] = call
            elif name == EAGER:  # nothing to compare with
                break
        if not (on_gpu and calls):
            return CapturedRow(**cell.identity, calls=found)
        in_rounds, times = time_calls(calls, rounds, device)
    ratios = {name: None if name == EAGER else median_ratio(in_rounds, name, EAGER) for name in calls}
    found |= {name: CallTimes(**times[name], over_eager=ratios[name]) for name in calls}
    return CapturedRow(**cell.identity, rounds=rounds, calls=found)


def show(rows: Sequence[CapturedRow]) -> list:
    title = f"Called eagerly, compiled, and replayed from a CUDA graph; red above {MOST} of the eager call"
    return [console_table(title, COLUMNS, rows, is_red=is_slow)] if any(row.rounds for row in rows) else []


def is_slow(row: CapturedRow) -> bool:
    return row.failed or any((call.over_eager or 0) > MOST for call in row.calls.values())


def main(arguments: list[str], prog: str) -> int:
    parser = experiment_parser(
        prog,
        "Time each chain called eagerly, through torch.compile and replayed from a CUDA graph, at the target size. "
        "Results must be the eager call's. Exit status: 0, 1 if a call fails or its results differ, 2 for a bad "
        "argument.",
        dtypes=("bfloat16", "float32"),
        rounds=30,
    )
    options = parser.parse_args(arguments)
    device = device_to_measure()
    cells = make_cells(options.chains, options.dtypes, options.modes, default_shapes(device.type == "cuda"))
    recording = Recording(options.output, "captured", device, show, len(cells))
    return recording.run(cells, lambda cell: measure(cell, options.rounds, device), summary)


def summary(row: CapturedRow) -> str:
    return "\n".join(f"{row} {name}: {_outcome(call)}" for name, call in row.calls.items())


def _outcome(call: CallTimes) -> str:
    if call.failure or call.us is None:
        return f"failed: {call.failure}" if call.failure else "right"
    return f"{call.us:.0f} µs" + (f", {call.over_eager:.3f} of eager" if call.over_eager else "")
