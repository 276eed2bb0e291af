"""``python -m bench`` without a command: every cell is checked, and on a GPU timed beside its peers."""

import argparse
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.markup import escape

from autotune_configs.files import lock_at
from bench.cells import (
    DTYPES,
    MEMORY_FORMATS,
    Call,
    Cell,
    Problem,
    Step,
    default_shapes,
    make_bare_step,
    make_cells,
    make_problem,
    make_step,
)
from bench.chains import CHAINS, NAMED
from bench.checking import check, worst_of
from bench.columns import TIMES, Column, console_table, number
from bench.compositions import PRECISIONS
from bench.recording import Recording, add_list, device_to_measure, experiment_parser, reason
from bench.results import BadResult
from bench.schema import BARE, OURS, PYTORCH, CallTimes, TimesRow
from bench.sizes import FORMS, GRID, GRID_BATCHES, GRID_DTYPES, GRID_FEATURES
from bench.timing import median_ratio, time_calls, warm_up

PEERS = (BARE, *PYTORCH)


def _shapes(product: str):
    """An argument type: shapes of this product, separated by commas."""
    form = FORMS[product]
    pattern = "x".join(r"[1-9]\d*" for _ in form.removesuffix(" x ...").split(" x "))
    pattern += r"(x[1-9]\d*)*" if form.endswith("...") else ""

    def parse(text: str) -> list[str]:
        for item in text.split(","):
            if not re.fullmatch(pattern, item):
                raise argparse.ArgumentTypeError(f"{item!r} is not {form}, all positive integers")
        return text.split(",")

    return parse


def _parse(arguments: list[str], prog: str, on_gpu: bool) -> argparse.Namespace:
    parser = experiment_parser(
        prog,
        "Check the chains against float64, then time them beside their peers on a GPU. Lists are separated by commas. "
        "Exit status: 0, 1 if a check is red, 2 for a bad argument.",
        chains=None,
        dtypes=None,
        rounds=20,
        epilog="Other commands: report (tables and pictures of results), merge (several results files into one), "
        "first-call (a fresh process with nothing compiled), captured (compiled and captured calls beside eager ones), "
        f"tensor-parallel (chains on shards). {prog} COMMAND --help describes each.",
    )
    more = "; for float32 alone. For a convolution high allows TF32, highest does not, and there is no medium"
    add_list(parser, "--precisions", PRECISIONS, PRECISIONS[:2], more)
    shapes = parser.add_mutually_exclusive_group()
    options_of_products = {"GEMM": "--shapes", "convolution": "--convolution-shapes", "norm": "--norm-shapes"}
    for product, option in options_of_products.items():
        group = shapes if product == "GEMM" else parser
        group.add_argument(
            option,
            type=_shapes(product),
            dest=product,
            metavar="SHAPES",
            help=f"{FORMS[product]}; else the chains' own",
        )
    batches, features = (", ".join(map(str, sizes)) for sizes in (GRID_BATCHES, GRID_FEATURES))
    shapes.add_argument(
        "--grid",
        action="store_const",
        const=GRID,
        dest="GEMM",
        help=f"instead of --shapes: batches of {batches}, each with {features} features in and out; the Linear chains, "
        f"and {' and '.join(GRID_DTYPES)}, where no others are given",
    )
    add_list(parser, "--memory-formats", MEMORY_FORMATS, None, "; of images; the chains' own where not given")
    more = ": the product or convolution alone (by cuBLAS or cuDNN; for a norm, a copy), PyTorch's chain, "
    more += "the same with torch.compile, and "
    add_list(parser, "--peers", PEERS, PEERS[:-1], more + "with its max-autotune, which tunes for minutes")
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="hold this file's lock to check and time, so that processes that share a GPU compile side by side; give "
        "each process an --output of its own and merge them",
    )
    options = parser.parse_args(arguments)
    is_grid = options.GEMM is GRID
    known = [name for name, chain in CHAINS.items() if chain.product == "GEMM" or not is_grid]
    options.chains = options.chains or [name for name in known if name in NAMED or not is_grid]
    options.dtypes = options.dtypes or (GRID_DTYPES if is_grid else DTYPES)
    if without := [name for name in options.chains if name not in known]:
        parser.error(f"argument --grid: {', '.join(without)} has no grid")
    own = default_shapes(on_gpu)
    sizes = {name: getattr(options, CHAINS[name].product) or own[name] for name in options.chains}
    make = partial(make_cells, options.chains, options.dtypes, options.modes, sizes, options.precisions)
    options.cells = make(options.memory_formats)
    if not options.cells:
        option, given = ("memory-formats", options.memory_formats) if make(None) else ("precisions", options.precisions)
        parser.error(f"argument --{option}: {','.join(options.chains)} has no {','.join(given)}")
    return options


def main(arguments: list[str], prog: str) -> int:
    device = device_to_measure()
    options = _parse(arguments, prog, device.type == "cuda")
    try:
        turn = lock_at(options.turns) if options.turns else contextlib.nullcontext()
    except OSError as error:
        raise BadResult(f"cannot write {options.turns}: {error.strerror}") from None

    def measured(cell: Cell) -> TimesRow:
        return measure(cell, options.peers, options.rounds, device, turn)

    return Recording(options.output, "times", device, show, len(options.cells)).run(options.cells, measured, summary)


def make_call(peer: str, cell: Cell, problem: Problem) -> Call:
    if peer == BARE:
        return make_bare_step(cell, problem)
    forward = cell.by_ops() if peer == OURS else cell.by_pytorch()
    if peer == "compile":
        forward = torch.compile(forward)
    elif peer == "compile-max":
        from torch._inductor import select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False  # it prints each of its trials
        forward = torch.compile(forward, mode="max-autotune-no-cudagraphs")
    return make_step(cell.mode, forward, problem.tensors, problem.output_gradient)


def measure(
    cell: Cell, peers: Sequence[str], rounds: int, device: torch.device, turn: contextlib.AbstractContextManager
) -> TimesRow:
    """The row of a cell. Nothing is timed without a GPU, nor where the check is red.

    ``turn`` is held to check and time, so that processes that share a GPU compile side by side.
    """
    torch._dynamo.reset()
    with cell.float32_precision:
        try:
            problem = make_problem(cell, device)
            with turn:
                row = check(cell, problem, cell.by_ops(), cell.by_pytorch())
        except Exception as error:  # a kernel may fail in any way; the other cells are still worth having
            return TimesRow(**cell.identity, red=True, peers={OURS: CallTimes(failure=reason(error))})
        if row.red or device.type != "cuda":
            return row
        torch.cuda.empty_cache()  # what float64 took, which cuBLAS and cuDNN could want for workspaces
        return replace(row, **time_peers(cell, problem, (OURS, *peers), rounds, device, turn))


def time_peers(
    cell: Cell,
    problem: Problem,
    peers: Sequence[str],
    rounds: int,
    device: torch.device,
    turn: contextlib.AbstractContextManager,
) -> dict:
    """What a row says of times: of every peer, or of the failures alone where ours is one of them."""
    found, memory, calls = {}, {}, {}
    for peer in peers:
        try:
            call = make_call(peer, cell, problem)
            warm_up(call)
            if cell.mode == "training" and peer != BARE:
                memory[peer] = measure_memory(call) / 1e6
        except Exception as error:  # so may a compiler, and then the others are still timed
            found[peer] = CallTimes(failure=reason(error))
        else:
            calls[peer] = call
    if OURS in found:
        return {"red": True, "peers": found}
    with turn:
        in_rounds, times = time_calls(calls, rounds, device)
    ratios = {peer: None if peer == OURS else median_ratio(in_rounds, OURS, peer) for peer in calls}
    found |= {peer: CallTimes(**times[peer], ours_over=ratios[peer], added_mb=memory.get(peer)) for peer in calls}
    return {"rounds": rounds, "peers": {peer: found[peer] for peer in peers}}


def measure_memory(step: Step) -> int:
    """Bytes that a training step adds at its peak, without its output and gradients. It has run before (CUDA)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output, gradients = step()
    storages = [tensor.untyped_storage() for tensor in (output, *gradients)]
    results = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return torch.cuda.max_memory_allocated() - before - sum(results.values())


def show(rows: Sequence[TimesRow]) -> list:
    errors = console_table(
        "Errors against float64",
        _ERRORS,
        [row for row in rows if row.errors],
        "of every element of every sample; compared: the part of the output that passes a gradient on, away from jumps",
    )
    times = console_table(
        "Times: ours, then ours over each peer (median of the rounds' ratios) and the peer's own µs",
        [*TIMES, *_MORE_TIMES],
        rows,
        "bare: the product or convolution alone, by cuBLAS or cuDNN, in the same memory format, or a copy for a norm;\n"
        "host µs: what the host needs to queue a call; wall µs: of whole calls in a loop (eager PyTorch's);\n"
        "added MB: at the peak of a training step, beyond weights, gradients, input and output",
    )
    failures = [
        escape(f"{row}, {name}: {peer.failure}") for row in rows for name, peer in row.peers.items() if peer.failure
    ]
    return [errors, *([times] if any(row.peers for row in rows) else []), *failures]


def _beside_eager(of: str, row: TimesRow) -> str | None:
    ours, eager = (getattr(row.peer(peer), of) for peer in (OURS, "eager"))
    return ours and number(ours) + (f" ({number(eager)})" if eager else "")


_MORE_TIMES: list[Column] = [
    ("host µs", partial(_beside_eager, "host_us")),
    ("wall µs", partial(_beside_eager, "wall_us")),
    ("added MB", lambda row: (added := row.peer(OURS).added_mb) and number(added, ".1f")),
]
#: The output's errors and those of the tensor that uses most of its allowance.
_ERRORS: list[Column] = [
    ("output: ours", lambda row: number(row.errors["output"][0], ".2e")),
    ("PyTorch", lambda row: number(row.errors["output"][1], ".2e")),
    ("worst: ours", lambda row: number(worst_of(row.errors).ours, ".2e")),
    ("PyTorch", lambda row: number(worst_of(row.errors).torch, ".2e")),
    ("of", lambda row: worst_of(row.errors).tensor),
    ("compared", lambda row: number(row.away_from_jumps, ".0%")),
]


def summary(row: TimesRow) -> str:
    if row.red:
        return f"{row}: RED, not timed: {row.peer(OURS).failure or _what_is_wrong(row)}"
    if row.us is None:
        return f"{row}: right"
    closest = row.closest()
    ratios = {BARE: row.peer(BARE).ours_over} | ({closest[0]: closest[1]} if closest else {})
    times = (f"{ratio:.2f} x {peer}" for peer, ratio in ratios.items() if ratio is not None)
    return ", ".join([f"{row}: {row.us:.0f} µs", *times])


def _what_is_wrong(row: TimesRow) -> str:
    worst = worst_of(row.errors)
    return f"the error of {worst.tensor} is {worst.ours:.1e}, PyTorch's {worst.torch:.1e}"
