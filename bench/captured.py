"""``python -m bench captured``: each chain called eagerly, by ``torch.compile``, and replayed from a CUDA graph."""

import statistics
from collections.abc import Sequence

import torch
from rich.table import Table

from autotune_configs.command_line import Parser, names, positive
from bench.cells import CHAINS, DTYPES, Cell, Problem, Step, make_cells, make_problem, make_step
from bench.device import device_to_measure
from bench.recording import Recording, add_output, reason
from bench.schema import MODES, CallTimes, CapturedRow
from bench.tables import table
from bench.text import number
from bench.timing import WARM_UP_CALLS, median_ratio, time_host, time_rounds, warm_up

#: How a chain is called; the others are compared with the first. Without a GPU there are no graphs.
CALLS = EAGER, COMPILED, CAPTURED = "eager", "compile", "graph"
#: Of the eager call's time: what a compiled or captured one may take.
MOST = 1.02


def capture(step: Step) -> Step:
    """The step as one CUDA graph. Each replay writes the same tensors."""
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
    for index, (result, other) in enumerate(zip(results, expected, strict=True)):
        size = other.float().norm().item()
        error = (result.float() - other.float()).norm().item()
        if not error <= torch.finfo(other.dtype).eps * size:
            what = f"gradient {index}" if index else "the output"
            return f"{what} differs from the eager call's by {error:.2e} of {size:.2e}"
    return None


def measure(cell: Cell, rounds: int, device: torch.device) -> CapturedRow:
    """Each way to call the cell, timed (on a GPU) where its results are the eager call's."""
    on_gpu = device.type == "cuda"
    found: dict[str, CallTimes] = {}
    calls: dict[str, Step] = {}
    torch._dynamo.reset()
    problem = make_problem(cell, device)
    with cell.chain.float32_precision(cell.precision):
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
                return CapturedRow(**cell.identity, calls=found)
        if not on_gpu:
            return CapturedRow(**cell.identity, calls=found)
        times = time_rounds(calls, rounds, device)
        host_times = time_host(calls, torch.cuda.synchronize)
    for name in calls:
        ratio = None if name == EAGER else median_ratio(times, name, EAGER)
        found[name] = CallTimes(statistics.median(times[name]), ratio, host_times[name])
    return CapturedRow(**cell.identity, rounds=rounds, calls=found)


def show(rows: Sequence[CapturedRow]) -> list[Table]:
    """One line a call; nothing where nothing was timed."""
    result = table(
        "Called eagerly, compiled, and replayed from a CUDA graph",
        "cell",
        ("call", "µs", "of eager", "host, µs"),
        f"µs: of the device; of eager: median of the rounds' ratios, red above {MOST}",
    )
    for row in rows:
        for name, call in row.calls.items():
            if call.failure:
                result.add_row(str(row), name, "failed", style="red")
                continue
            style = "red" if call.over_eager and call.over_eager > MOST else None
            values = number(call.us), number(call.over_eager, ".3f"), number(call.host_us)
            result.add_row(str(row), name, *values, style=style)
    return [result] if any(row.rounds for row in rows) else []


def main(arguments: list[str], prog: str) -> int:
    """Measure and print; returns the exit status."""
    parser = Parser(
        prog=prog,
        description="Time each chain called eagerly, through torch.compile and replayed from a CUDA graph, at the "
        "target size. Results must be the eager call's. Exit status: 0, 1 if a call fails or its results differ, 2 for "
        "a bad argument.",
    )
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default="bfloat16,float32", help="of " + ", ".join(DTYPES))
    parser.add_argument("--modes", type=names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--rounds", type=positive, default=30, help="timed calls of each")
    add_output(parser)
    options = parser.parse_args(arguments)
    device = device_to_measure()
    cells = make_cells(options.chains, options.dtypes, options.modes, device.type == "cuda")
    with Recording(options.output, "captured", device, show, len(cells)) as recording:
        for cell in cells:
            recording.begin(cell)
            row = measure(cell, options.rounds, device)
            recording.add(row)
            for name, call in row.calls.items():
                recording.say(f"{row} {name}: {_outcome(call)}")
    return int(any(call.failure for row in recording.rows for call in row.calls.values()))


def _outcome(call: CallTimes) -> str:
    if call.failure or call.us is None:
        return f"failed: {call.failure}" if call.failure else "right"
    return f"{call.us:.0f} µs" + (f", {call.over_eager:.3f} of eager" if call.over_eager else "")
