"""``python -m bench tensor-parallel``: the chains on shards, over several GPUs, beside the same chain on one of them.

Every GPU has a process, and all of them run both: the whole chain, each for itself, and the chain on shards, together.
A training step on shards ends when each gradient lies as its tensor does, which takes a sum over the GPUs where it is
one: of the input's gradient where the channels are divided, and of the parameters' where the batch is.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from bench.cells import CHAINS, DTYPES, MODES, Cell, Problem, Step, make_cells, make_problem, make_step
from bench.chain import Call, Chain, Forward
from bench.checking import check
from bench.device import has_gpu
from bench.rows import device_to_measure, keep_and_show
from bench.timing import warm_up

#: What the mesh divides.
DIVIDED = ("channels", "batch")
#: The calls that are timed: the chain on one GPU, and on the shards of all.
ALONE, ON_SHARDS = "alone", "on shards"
#: How long the device waits, in cycles, while the host queues a call on shards: some 10 ms, which DTensor's need.
_WAIT = 20_000_000
#: More than any L2 cache holds.
_FLUSH_BYTES = 256 * 1024 * 1024
#: Calls in a row whose time is taken by the host's clock, and how often that is done.
_CALLS_IN_A_ROW, _MOST_ROWS = 20, 5
#: For one rank's wait for another, which may still compile.
_LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Options:
    """What every process is told to measure: cells, and what the mesh divides of each."""

    work: tuple[tuple[Cell, str], ...]
    processes: int
    rounds: int
    on_gpu: bool


class Traffic(CommDebugMode):
    """Also keeps how many bytes each collective is of: those of its larger side, what goes in or what comes out."""

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
    def collectives(self) -> dict[str, dict[str, int]]:
        """By name: how often, and of how many bytes together."""
        return {name: {"count": self.counts[name], "bytes": self.sizes[name]} for name in sorted(self.counts)}


def _bytes(tensors: object) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0


def placement(chain: Chain, name: str, tensor: torch.Tensor, divided: str) -> Placement:
    """Where a tensor of the chain lies when the mesh divides the channels, or the batch."""
    if name == "input":
        return Shard(0) if divided == "batch" else Replicate()
    if divided == "batch":
        return Replicate()
    # A vector's channels are its only axis, or the second of (1, channels, 1, 1); a filter is (in, out, height, width).
    return Shard(1 if tensor.ndim == 4 else 0)


def through_shards(chain: Chain, forward: Forward, mesh: DeviceMesh, divided: str) -> Forward:
    """``forward`` of whole tensors and with a whole result, and on the way on shards."""

    def whole(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return cast(DTensor, forward(distribute(chain, tensors, mesh, divided))).full_tensor()

    return whole


def distribute(chain: Chain, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, divided: str) -> dict[str, DTensor]:
    """As shards of tensors that every rank has."""
    return {
        name: DTensor.from_local(tensor, mesh, [Replicate()]).redistribute(
            placements=[placement(chain, name, tensor, divided)]
        )
        for name, tensor in tensors.items()
    }


def step_on_shards(cell: Cell, problem: Problem, forward: Forward, mesh: DeviceMesh, divided: str) -> Step:
    """One call on shards; its gradients lie as their tensors."""
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
    """Times a call that all ranks make at once: by the device, started together and queued ahead, or by the host."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._signal = torch.zeros(1, device=device)
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def microseconds(self, call: Call) -> float:
        """Of one call, with a cold L2 cache."""
        if self._device.type != "cuda":
            return self.microseconds_in_a_row(call, 1)
        torch.cuda._sleep(_WAIT)
        self._flush.zero_()
        distributed.all_reduce(self._signal)  # no rank's device goes on before all are here
        self._start.record()
        call()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1e3

    def microseconds_in_a_row(self, call: Call, calls: int) -> float:
        """Of one of several calls, until the device is done with all: what it costs where the host is the slower."""
        self._wait()
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return (time.perf_counter() - start) / calls * 1e6

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def slowest(times_of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By call and round: the time of the rank that took longest."""
    return {
        name: [max(times) for times in zip(*(each[name] for each in times_of_ranks), strict=True)]
        for name in times_of_ranks[0]
    }


def timed(in_rounds: Mapping[str, Sequence[float]], in_a_row: Mapping[str, Sequence[float]]) -> dict:
    """What a row says of times. ``speedup`` is the median over rounds of the ratio of both."""
    ratios = [alone / on_shards for alone, on_shards in zip(in_rounds[ALONE], in_rounds[ON_SHARDS], strict=True)]
    return {
        "median_us": statistics.median(in_rounds[ON_SHARDS]),
        "alone_us": statistics.median(in_rounds[ALONE]),
        "speedup": statistics.median(ratios),
        "in_a_row_us": statistics.median(in_a_row[ON_SHARDS]),
        "alone_in_a_row_us": statistics.median(in_a_row[ALONE]),
        "rounds": len(ratios),
    }


def measure(cell: Cell, divided: str, rounds: int, mesh: DeviceMesh) -> dict:
    """The row, the same on every rank: checked, and timed where the result is right on every rank."""
    row = {
        "kind": "tensor_parallel",
        **cell.row,
        "divided": divided,
        "gpus": mesh.size(),
    }
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    forward, pytorch = _forwards(cell, mesh, divided)
    with cell.chain.float32_precision(cell.precision) if cell.precision else nullcontext():
        problem = make_problem(cell, device)
        row |= _check(cell, problem, through_shards(cell.chain, forward, mesh, divided), pytorch)
        if row["red"]:
            return row
        calls = {
            ALONE: make_step(cell.mode, forward, problem.tensors, problem.output_gradient),
            ON_SHARDS: step_on_shards(cell, problem, forward, mesh, divided),
        }
        for call in calls.values():
            warm_up(call, device)
        with Traffic() as traffic:
            calls[ON_SHARDS]()
        clock = _Clock(device)
        in_rounds: dict[str, list[float]] = {name: [] for name in calls}
        in_a_row: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            for name in list(calls)[:: 1 if number % 2 else -1]:  # none always goes first
                in_rounds[name].append(clock.microseconds(calls[name]))
        for _ in range(min(rounds, _MOST_ROWS)):
            for name, call in calls.items():
                in_a_row[name].append(clock.microseconds_in_a_row(call, _CALLS_IN_A_ROW if on_gpu else 1))
    times = timed(slowest(_from_all(in_rounds)), slowest(_from_all(in_a_row)))
    return row | times | {"collectives": traffic.collectives}


def _forwards(cell: Cell, mesh: DeviceMesh, divided: str) -> tuple[Forward, Forward]:
    """The chain by the kernels, and by PyTorch: in float64 on the whole, and else on the same shards.

    What is pending a sum over the ranks is rounded to its dtype once more than on one GPU, whoever computes it.
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
    """One rank's process, which writes its rows, one a line, and ends."""
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
            file.write(json.dumps(measure(cell, divided, options.rounds, mesh)) + "\n")
    distributed.destroy_process_group()
    # The rows are written. Taking down what is left of gloo's threads ends in an abort, once in ten times.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def cannot_divide(cell: Cell, divided: str, processes: int) -> str | None:
    """Why so many processes cannot have their shards of a cell, None if they can."""
    groups = cell.chain.num_groups(cell.shape.channels)
    if divided == "channels" and groups % processes:
        return f"{groups} group{'s' if groups > 1 else ''} of channels cannot be divided by {processes}"
    return None


def table(rows: Sequence[dict]) -> Table:
    """One line a row."""
    result = Table(title="On shards, beside one GPU")
    result.add_column("cell", no_wrap=True)
    columns = ("one GPU, µs", "GPUs", "divided", "µs", "speed", "in a row: one", "all", "sent", "error", "PyTorch's")
    for column in columns:
        result.add_column(column, justify="right")
    for row in rows:
        parts = ("chain", "dtype", "precision", "mode", "shape", "memory_format")
        label = " ".join(row[name] for name in parts if row[name])
        errors = f"{row['error_ours']:.2e}", f"{row['error_torch']:.2e}"
        if row["red"]:
            result.add_row(label, "", str(row["gpus"]), row["divided"], *[""] * 5, *errors, style="red")
            continue
        result.add_row(
            label,
            f"{row['alone_us']:.0f}",
            str(row["gpus"]),
            row["divided"],
            f"{row['median_us']:.0f}",
            f"{row['speedup']:.2f}×",
            f"{row['alone_in_a_row_us']:.0f}",
            f"{row['in_a_row_us']:.0f}",
            _sent(row["collectives"]),
            *errors,
        )
    result.caption = (
        "µs: of the device, ranks started together; in a row: by the host's clock; sent: in so many collectives"
    )
    return result


def _sent(collectives: Mapping[str, Mapping[str, int]]) -> str:
    count, size = (sum(each[what] for each in collectives.values()) for what in ("count", "bytes"))
    return f"{size / 1e6:.3g} MB in {count}" if count else "nothing"


def _parse(arguments: list[str]) -> tuple[Parser, Namespace]:
    parser = Parser(
        prog="bench tensor-parallel",
        description="Time each chain on shards over several GPUs beside the whole of it on one, at the target size, "
        "each result checked against float64 first, with the bytes that the GPUs send each other. "
        "Exit status: 0, 1 if a check is red, 2 for a bad argument.",
    )
    parser.add_argument("--gpus", type=positive, default=2, help="how many")
    parser.add_argument("--chains", type=names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=names(DTYPES), default="bfloat16", help="of " + ", ".join(DTYPES))
    parser.add_argument("--modes", type=names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--divided", type=names(DIVIDED), default=",".join(DIVIDED), help="of " + ", ".join(DIVIDED))
    parser.add_argument("--rounds", type=positive, default=30, help="of every call, in turn")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the rows here")
    return parser, parser.parse_args(arguments)


def main(arguments: list[str], spawn: Callable = multiprocessing.spawn) -> int:
    """Measure and print; returns the exit status."""
    parser, chosen = _parse(arguments)
    on_gpu = has_gpu()
    if on_gpu and torch.cuda.device_count() < chosen.gpus:
        parser.error(f"argument --gpus: there are {torch.cuda.device_count()}, not {chosen.gpus}")
    device = device_to_measure(on_gpu)
    cells = make_cells(chosen.chains, chosen.dtypes, chosen.modes, on_gpu)

    def measured():
        work = []
        for cell in cells:
            for divided in chosen.divided:
                reason = cannot_divide(cell, divided, chosen.gpus)
                if reason:
                    yield [], [f"{cell}: not by {divided}: {reason}"]
                else:
                    work.append((cell, divided))
        if work:
            with tempfile.TemporaryDirectory() as folder:
                spawn(run, (Options(tuple(work), chosen.gpus, chosen.rounds, on_gpu), folder), nprocs=chosen.gpus)
                lines = (Path(folder) / "rows.0").read_text(encoding="utf-8").splitlines()
            yield [json.loads(line) for line in lines], []

    return keep_and_show(parser.prog, chosen.json, device, measured(), table, "red")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
