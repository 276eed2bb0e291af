"""``python -m bench tensor-parallel``: the chains on shards over several GPUs, beside the same chain on one of them.

Every GPU has a process. Each process runs the whole chain by itself, and all of them run the chain on shards together.
A training step on shards ends when each gradient has its tensor's placement. Where the channels are divided, the
input's gradient is summed over the GPUs for that; where the batch is, the parameters' gradients are.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from rich.table import Table
from torch import distributed, multiprocessing
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from autotune_configs.command_line import Parser, names, positive
from bench.cells import CHAINS, DTYPES, Cell, Problem, Step, make_cells, make_problem, make_step
from bench.chain import Call, Chain, Forward
from bench.checking import check
from bench.device import device_to_measure
from bench.recording import Recording, add_output
from bench.results import plain
from bench.schema import MODES, TensorParallelRow, Traffic
from bench.tables import table
from bench.text import number
from bench.timing import FLUSH_BYTES, median_ratio, warm_up

#: What the mesh divides.
DIVIDED = ("channels", "batch")
#: The calls that are timed: the chain on one GPU, and on the shards of all.
ALONE, ON_SHARDS = "alone", "on shards"
#: Cycles that the device waits while the host queues a call on shards: some 10 ms, which a call of DTensors needs.
_WAIT = 20_000_000
#: Calls in a row that the host's clock times, and at most how many rows.
_CALLS_IN_A_ROW, _MOST_ROWS = 20, 5
#: One rank's longest wait for another, which may still compile.
_LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Options:
    """What every process is told to measure: cells, and what the mesh divides of each."""

    work: tuple[tuple[Cell, str], ...]
    processes: int
    rounds: int
    on_gpu: bool


class TrafficCounter(CommDebugMode):
    """Also counts the bytes of each collective: those of its input or of its output, whichever is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        before = self.get_total_counts()
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is not NotImplemented and self.get_total_counts() > before:
            name = operator.__name__.partition(".")[0]
            self.counts[name] += 1
            self.sizes[name] += max(_bytes(arguments[0]), _bytes(result))
        return result

    @property
    def collectives(self) -> dict[str, Traffic]:
        """By name: how often, and of how many bytes together."""
        return {name: Traffic(self.counts[name], self.sizes[name]) for name in sorted(self.counts)}


def _bytes(tensors: object) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0


def placement(chain: Chain, name: str, tensor: torch.Tensor, divided: str) -> Placement:
    """A tensor's placement when the mesh divides the channels, or the batch."""
    if name == "input":
        return Shard(0) if divided == "batch" else Replicate()
    if divided == "batch":
        return Replicate()
    # A vector's channels are its only axis, or the second of (1, channels, 1, 1); a filter is (in, out, height, width).
    return Shard(1 if tensor.ndim == 4 else 0)


def through_shards(chain: Chain, forward: Forward, mesh: DeviceMesh, divided: str) -> Forward:
    """``forward`` on shards, from whole tensors to a whole result."""

    def whole(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast(DTensor, forward(distribute(chain, tensors, mesh, divided))).full_tensor()

    return whole


def distribute(chain: Chain, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, divided: str) -> dict[str, DTensor]:
    """The shards of tensors that every rank has."""
    return {
        name: DTensor.from_local(tensor, mesh, [Replicate()]).redistribute(
            placements=[placement(chain, name, tensor, divided)]
        )
        for name, tensor in tensors.items()
    }


def step_on_shards(cell: Cell, problem: Problem, forward: Forward, mesh: DeviceMesh, divided: str) -> Step:
    """One call on shards. Each gradient gets its tensor's placement."""
    with torch.no_grad():
        tensors = distribute(cell.chain, problem.tensors, mesh, divided)
        output = cast(DTensor, forward(tensors))
    gradient = DTensor.from_local(problem.output_gradient, mesh, [Replicate()])
    step = make_step(cell.mode, forward, tensors, gradient.redistribute(placements=output.placements))

    def settled() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        output, gradients = step()
        of_tensors = zip(cast(tuple[DTensor, ...], gradients), tensors.values(), strict=cell.mode == "training")
        return output, tuple(gradient.redistribute(placements=tensor.placements) for gradient, tensor in of_tensors)

    return settled


class _Clock:
    """Times a call that all ranks make at once: on the device, with all ranks started together, or by the host."""

    def __init__(self, device: torch.device):
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._signal = torch.zeros(1, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def microseconds(self, call: Call) -> float:
        """Of one call, with a cold L2 cache."""
        torch.cuda._sleep(_WAIT)
        self._flush.zero_()
        distributed.all_reduce(self._signal)  # no rank's device goes on before all are here
        self._start.record()
        call()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1e3

    def microseconds_in_a_row(self, call: Call) -> float:
        """Of one of several calls, until the device is done with all: what a call costs where the host is slower."""
        torch.cuda.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(_CALLS_IN_A_ROW):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / _CALLS_IN_A_ROW * 1e6


def slowest(times_of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By call and round: the time of the rank that took longest."""
    return {
        name: [max(times) for times in zip(*(each[name] for each in times_of_ranks), strict=True)]
        for name in times_of_ranks[0]
    }


def timed(in_rounds: Mapping[str, Sequence[float]], in_a_row: Mapping[str, Sequence[float]]) -> dict:
    """What a row says of times."""
    return {
        "us": statistics.median(in_rounds[ON_SHARDS]),
        "alone_us": statistics.median(in_rounds[ALONE]),
        "speedup": median_ratio(in_rounds, ALONE, ON_SHARDS),
        "in_a_row_us": statistics.median(in_a_row[ON_SHARDS]),
        "alone_in_a_row_us": statistics.median(in_a_row[ALONE]),
        "rounds": len(in_rounds[ALONE]),
    }


def measure(cell: Cell, divided: str, rounds: int, mesh: DeviceMesh) -> TensorParallelRow:
    """The row, the same on every rank: checked, and timed on GPUs where the result is right on every rank."""
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    forward, pytorch = _forwards(cell, mesh, divided)
    with cell.chain.float32_precision(cell.precision) if cell.precision else nullcontext():
        problem = make_problem(cell, device)
        found = _check(cell, problem, through_shards(cell.chain, forward, mesh, divided), pytorch)
        row = TensorParallelRow(**cell.identity, divided=divided, gpus=mesh.size(), **found)
        if row.red:
            return row
        calls = {
            ALONE: make_step(cell.mode, forward, problem.tensors, problem.output_gradient),
            ON_SHARDS: step_on_shards(cell, problem, forward, mesh, divided),
        }
        if on_gpu:
            for call in calls.values():
                warm_up(call)
        with TrafficCounter() as traffic:
            calls[ON_SHARDS]()
        row = replace(row, collectives=traffic.collectives)
        if not on_gpu:
            return row
        clock = _Clock(device)
        in_rounds: dict[str, list[float]] = {name: [] for name in calls}
        in_a_row: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(rounds):
            for name in list(calls)[:: 1 if index % 2 else -1]:  # none always goes first
                in_rounds[name].append(clock.microseconds(calls[name]))
        for _ in range(min(rounds, _MOST_ROWS)):
            for name, call in calls.items():
                in_a_row[name].append(clock.microseconds_in_a_row(call))
    return replace(row, **timed(slowest(_from_all(in_rounds)), slowest(_from_all(in_a_row))))


def _forwards(cell: Cell, mesh: DeviceMesh, divided: str) -> tuple[Forward, Forward]:
    """The chain by the kernels, and by PyTorch: float64 on whole tensors, other dtypes on the same shards.

    A gradient that is pending a sum over the ranks is rounded once more than on one GPU, in PyTorch's chain as well.
    """
    import ops
    from ops import precision, reference

    forward = cell.chain.bind(ops, cell.shape.channels)
    on_shards = through_shards(cell.chain, forward, mesh, divided)
    whole = cell.chain.bind(reference, cell.shape.channels)

    def pytorch(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if tensors["input"].dtype == torch.float64:
            return whole(tensors)
        with mock.patch.object(precision, "runs_kernels", lambda tensor: False):
            return on_shards(tensors)

    return forward, pytorch


def _check(cell: Cell, problem: Problem, forward: Forward, pytorch: Forward) -> dict:
    """The worst tensor's error of all ranks, beside PyTorch's."""
    worst = check(cell, problem, forward, pytorch).worst
    found = {"red": worst.is_red, "error_ours": worst.ours, "error_torch": worst.torch, "error_tensor": worst.tensor}
    return max(_from_all(found), key=lambda each: (each["red"], each["error_ours"]))


def _from_all(found: dict) -> list[dict]:
    """What every rank has found, on every rank."""
    results: list[dict] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(results, found)
    return results


def run(rank: int, options: Options, folder: str) -> None:
    """One rank's process. It writes its rows as they come, one a line, and ends."""
    device = torch.device("cuda", rank) if options.on_gpu else torch.device("cpu")
    if options.on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if options.on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=options.processes,
        timeout=_LONGEST_WAIT,
    )
    mesh = init_device_mesh(device.type, (options.processes,))
    with open(Path(folder) / f"rows.{rank}", "w", encoding="utf-8") as file:
        for cell, divided in options.work:
            file.write(json.dumps(plain(measure(cell, divided, options.rounds, mesh))) + "\n")
            file.flush()
    distributed.destroy_process_group()
    # The rows are written. Python's own exit waits for gloo's threads, and one in ten times that ends in an abort.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def cannot_divide(cell: Cell, divided: str, processes: int) -> str | None:
    """Why a cell cannot be divided among so many processes, None if it can."""
    groups = cell.chain.num_groups(cell.shape.channels)
    if divided == "channels" and groups % processes:
        return f"{groups} group{'s' if groups > 1 else ''} of channels cannot be divided by {processes}"
    return None


def show(rows: Sequence[TensorParallelRow]) -> list[Table]:
    """One line a row. Without GPUs there are errors alone."""
    timed = any(row.rounds for row in rows)
    times = ("one GPU, µs", "µs", "speed", "in a row: one", "all") if timed else ()
    caption = "µs: of the device, ranks started together; in a row: by the host's clock; " if timed else ""
    result = table(
        "On shards, beside one GPU",
        "cell",
        ("GPUs", "divided", *times, "sent", "error", "PyTorch's"),
        caption + "sent: in so many collectives",
    )
    for row in rows:
        found = (row.alone_us, ".0f"), (row.us, ".0f"), (row.speedup, ".2f")
        found += (row.alone_in_a_row_us, ".0f"), (row.in_a_row_us, ".0f")
        result.add_row(
            str(row),
            str(row.gpus),
            row.divided,
            *(number(*each) for each in found[: len(times)]),
            "–" if row.red else _sent(row.collectives),
            number(row.error_ours, ".2e"),
            number(row.error_torch, ".2e"),
            style="red" if row.red else None,
        )
    return [result]


def _sent(collectives: Mapping[str, Traffic]) -> str:
    count, size = sum(each.count for each in collectives.values()), sum(each.bytes for each in collectives.values())
    return f"{size / 1e6:.3g} MB in {count}" if count else "nothing"


def main(arguments: list[str], prog: str, spawn: Callable = multiprocessing.spawn) -> int:
    """Measure and print; returns the exit status."""
    parser = Parser(
        prog=prog,
        description="Time each chain on shards over several GPUs beside the whole of it on one, at the target size, "
        "each result checked against float64 first, with the bytes that the GPUs send each other. "
        "Exit status: 0, 1 if a check is red, 2 for a bad argument.",
    )
    parser.add_argument("--gpus", type=positive, default=2, help="how many")
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default="bfloat16", help="of " + ", ".join(DTYPES))
    parser.add_argument("--modes", type=names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--divided", type=names(DIVIDED), default=",".join(DIVIDED), help="of " + ", ".join(DIVIDED))
    parser.add_argument("--rounds", type=positive, default=30, help="timed calls of each, interleaved")
    add_output(parser)
    options = parser.parse_args(arguments)
    device = device_to_measure()
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.device_count() < options.gpus:
        parser.error(f"argument --gpus: there are {torch.cuda.device_count()}, not {options.gpus}")
    cells = make_cells(options.chains, options.dtypes, options.modes, on_gpu)
    pairs = [(cell, divided) for cell in cells for divided in options.divided]
    with Recording(options.output, "tensor_parallel", device, show, len(pairs)) as recording:
        work = []
        for cell, divided in pairs:
            why_not = cannot_divide(cell, divided, options.gpus)
            if why_not:
                recording.say(f"{cell}: not by {divided}: {why_not}")
            else:
                work.append((cell, divided))
        with tempfile.TemporaryDirectory() as folder:
            try:
                if work:
                    spawn(
                        run, (Options(tuple(work), options.gpus, options.rounds, on_gpu), folder), nprocs=options.gpus
                    )
            finally:  # an interruption keeps what was measured
                path = Path(folder) / "rows.0"
                for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
                    recording.add(_from_json(json.loads(line)))
    return int(any(row.red for row in recording.rows))


def _from_json(row: dict) -> TensorParallelRow:
    collectives = {name: Traffic(**traffic) for name, traffic in row.pop("collectives", {}).items()}
    return TensorParallelRow(**row, collectives=collectives)
