"""``python -m bench tensor-parallel``: the chains on shards over several GPUs, beside the same chain on one of them.

Every GPU has a process. Each process runs the whole chain by itself, and all of them run the chain on shards together.
A training step on shards ends when each gradient has its tensor's placement. Where the channels are divided, the
input's gradient is summed over the GPUs for that; where the batch is, the parameters' gradients are.
"""

import contextlib
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from autotune_configs.command_line import positive
from bench.cells import Cell, Problem, Step, default_shapes, make_cells, make_problem, make_step
from bench.chains import NAMED
from bench.checking import check, worst_of
from bench.columns import TENSOR_PARALLEL, console_table, field
from bench.compositions import Forward
from bench.recording import Recording, add_list, device_to_measure, experiment_parser
from bench.schema import TensorParallelRow, Traffic
from bench.timing import LONGEST_WAIT, device_clock, median_ratio, time_loops, time_rounds, warm_up

#: What the mesh divides.
DIVIDED = ("channels", "batch")
#: The calls that are timed: the chain on one GPU, and on the shards of all.
ALONE, ON_SHARDS = "alone", "on shards"
#: One rank's longest wait for another, which may still compile.
_LONGEST_WAIT_FOR_RANK = timedelta(minutes=10)


class TrafficCounter(CommDebugMode):
    """Also counts the bytes of each collective: those of its input or of its output, whichever is larger."""

    def __init__(self) -> None:
        super().__init__()
        #: By the collective's name: how often, and of how many bytes together.
        self.collectives: dict[str, Traffic] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        before = self.get_total_counts()
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is not NotImplemented and self.get_total_counts() > before:
            name, size = operator.__name__.partition(".")[0], max(_bytes(arguments[0]), _bytes(result))
            so_far = self.collectives.get(name, Traffic(0, 0))
            self.collectives[name] = Traffic(so_far.count + 1, so_far.bytes + size)
        return result


def _bytes(tensors: object) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, (list, tuple)) else 0


def placement(name: str, tensor: torch.Tensor, divided: str) -> Placement:
    """A tensor's placement when the mesh divides the channels, or the batch."""
    if (name == "input") == (divided == "channels"):
        return Replicate()
    # The batch is the input's first axis. A vector's channels are its only axis, or the second of (1, channels, 1, 1),
    # and a filter is (in, out, height, width).
    return Shard(1 if tensor.ndim == 4 and divided == "channels" else 0)


def distribute(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, divided: str) -> dict[str, DTensor]:
    return {
        name: _replicated(tensor, mesh).redistribute(placements=[placement(name, tensor, divided)])
        for name, tensor in tensors.items()
    }


def _replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()])


def step_on_shards(cell: Cell, problem: Problem, forward: Forward, mesh: DeviceMesh, divided: str) -> Step:
    """One call on shards. Each gradient gets its tensor's placement."""
    with torch.no_grad():
        tensors = distribute(problem.tensors, mesh, divided)
        output = cast(DTensor, forward(tensors))
    gradient = _replicated(problem.output_gradient, mesh).redistribute(placements=output.placements)
    step = make_step(cell.mode, forward, tensors, gradient)

    def settled() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        output, gradients = step()
        of_tensors = zip(cast(tuple[DTensor, ...], gradients), tensors.values(), strict=cell.mode == "training")
        return output, tuple(gradient.redistribute(placements=tensor.placements) for gradient, tensor in of_tensors)

    return settled


def slowest(times_of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By call and round: the time of the rank that took longest."""
    return {
        name: [max(times) for times in zip(*(each[name] for each in times_of_ranks), strict=True)]
        for name in times_of_ranks[0]
    }


def timed(in_rounds: Mapping[str, Sequence[float]], in_a_row: Mapping[str, Sequence[float]]) -> dict:
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
    device = torch.device(mesh.device_type)
    on_gpu = device.type == "cuda"
    forward = cell.by_ops()

    def on_shards(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # from whole tensors to a whole result
        return cast(DTensor, forward(distribute(tensors, mesh, divided))).full_tensor()

    with cell.float32_precision:
        problem = make_problem(cell, device)
        checked = check(cell, problem, on_shards, _by_pytorch(cell, on_shards))
        worst = max(_from_all(worst_of(checked.errors)), key=lambda each: (each.is_red, each.ours))
        row = TensorParallelRow(
            **cell.identity,
            divided=divided,
            gpus=mesh.size(),
            red=worst.is_red,
            error_tensor=worst.tensor,
            error_ours=worst.ours,
            error_torch=worst.torch,
        )
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
        # All ranks wait equally long, and for as many loops: they call at once.
        signal = torch.zeros(1, device=device)
        clock = device_clock(device, LONGEST_WAIT, lambda: distributed.all_reduce(signal))
        in_rounds = time_rounds(calls, rounds, clock)
        _, in_a_row = time_loops(calls, _synchronize_ranks, seconds=0)
    return replace(row, **timed(slowest(_from_all(in_rounds)), slowest(_from_all(in_a_row))))


def _synchronize_ranks() -> None:
    torch.cuda.synchronize()
    distributed.barrier()


def _by_pytorch(cell: Cell, on_shards: Forward) -> Forward:
    """The chain by PyTorch: float64 on whole tensors, other dtypes on the same shards.

    A gradient that is pending a sum over the ranks is rounded once more than on one GPU, in PyTorch's chain as well.
    """
    whole = cell.by_pytorch()

    def pytorch(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if tensors["input"].dtype == torch.float64:
            return whole(tensors)
        with mock.patch("ops.precision.runs_kernels", lambda tensor: False):
            return on_shards(tensors)

    return pytorch


def _from_all(found: Any) -> list:
    results = [None] * distributed.get_world_size()
    distributed.all_gather_object(results, found)
    return results


def run(rank: int, work: Sequence[tuple[Cell, str]], ranks: int, rounds: int, on_gpu: bool, folder: str) -> None:
    """One rank's process. It measures cells, with what the mesh divides of each, writes the rows, and ends."""
    if on_gpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=_LONGEST_WAIT_FOR_RANK,
    )
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
    with open(Path(folder) / f"rows.{rank}", "wb", buffering=0) as file:
        for cell, divided in work:
            file.write(pickle.dumps(measure(cell, divided, rounds, mesh)))
    distributed.destroy_process_group()
    # The rows are written. Python's own exit waits for gloo's threads, and one in ten times that ends in an abort.
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def cannot_divide(cell: Cell, divided: str, processes: int) -> str | None:
    """Why a cell cannot be divided among so many processes, None if it can."""
    groups = cell.num_groups
    if divided == "channels" and groups % processes:
        return f"{groups} group{'s' if groups > 1 else ''} of channels cannot be divided by {processes}"
    return None


def show(rows: Sequence[TensorParallelRow]) -> list:
    errors = field("error", "error_ours", ".2e"), field("PyTorch's", "error_torch", ".2e")
    return [console_table("On shards, beside one GPU", [*TENSOR_PARALLEL, *errors], rows)]


def main(arguments: list[str], prog: str, spawn: Callable = multiprocessing.spawn) -> int:
    parser = experiment_parser(
        prog,
        "Time each chain on shards over several GPUs beside the whole of it on one, at the target size, each result "
        "checked against float64 first, with the bytes that the GPUs send each other. Exit status: 0, 1 if a check is "
        "red, 2 for a bad argument.",
        dtypes=("bfloat16",),
        rounds=30,
        known=NAMED,
    )
    parser.add_argument("--gpus", type=positive, default=2, help="how many")
    add_list(parser, "--divided", DIVIDED, DIVIDED)
    options = parser.parse_args(arguments)
    device = device_to_measure()
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.device_count() < options.gpus:
        parser.error(f"argument --gpus: there are {torch.cuda.device_count()}, not {options.gpus}")
    cells = make_cells(options.chains, options.dtypes, options.modes, default_shapes(on_gpu))
    pairs = [(cell, divided) for cell in cells for divided in options.divided]
    with Recording(options.output, "tensor_parallel", device, show, len(pairs)) as recording:
        work = []
        for cell, divided in pairs:
            if why_not := cannot_divide(cell, divided, options.gpus):
                recording.say(f"{cell}: not by {divided}: {why_not}")
            else:
                work.append((cell, divided))
        with tempfile.TemporaryDirectory() as folder:
            try:
                if work:
                    spawn(run, (work, options.gpus, options.rounds, on_gpu, folder), nprocs=options.gpus)
            finally:  # an interruption keeps what was measured
                for row in _rows_in(Path(folder) / "rows.0"):
                    recording.add(row)
    return recording.status


def _rows_in(path: Path) -> Iterator[TensorParallelRow]:
    """Those that a process has written to the end."""
    with contextlib.suppress(FileNotFoundError, EOFError, pickle.UnpicklingError), open(path, "rb") as file:
        while True:
            yield pickle.load(file)
