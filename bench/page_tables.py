"""Results as Markdown: tables within other pages than that of benchmarks."""

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench.markdown import NOT_MEASURED, grouped, names_of, run_of
from bench.results import BadResult, DeviceResults
from bench.schema import (
    COMPILERS,
    MODES,
    CallTimes,
    CapturedRow,
    CommitsRow,
    Row,
    TensorParallelRow,
    TimesRow,
)
from bench.text import markdown_table, number, pair

_AnyTimes = TimesRow | CapturedRow | TensorParallelRow | CommitsRow

#: Rows of the table ``times``, by chain's product: setting and memory format.
_MAIN = {
    "GEMM": (("bfloat16", None), ("float32 highest", None)),
    "convolution": (("bfloat16", "contiguous"), ("bfloat16", "channels_last")),
}
_DIMENSIONS = {
    "GEMM": "batch x in_features x out_features",
    "convolution": "batch x in_channels x out_channels x height x width x kernel",
}


def _main_table(results: DeviceResults) -> str:
    """One line a chain and dtype, with both modes."""
    sound = [row for row in results.target if not row.red]
    by_cell: dict[tuple, TimesRow] = {(row.chain, row.setting, row.memory_format, row.mode): row for row in sound}
    cells, used = [], []
    for product, settings in _MAIN.items():
        chains = dict.fromkeys(row.chain for row in results.target if row.product == product)
        for setting, memory_format in settings:
            for chain in chains:
                forward, training = (by_cell.get((chain, setting, memory_format, mode)) for mode in MODES)
                if forward and training:
                    used += [forward, training]
                    error = pair(forward.errors.get("output"))
                    times = (part for row in (forward, training) for part in (_strong(row.us), *_pytorch_times(row)))
                    cells.append([chain, forward.layout, *times, error])
    if not cells:
        return ""
    names = ["chain", "dtype", "forward, µs: normfuse", "compile", "eager"]
    names += ["training, µs: normfuse", "compile", "eager", "error: normfuse / PyTorch"]
    shapes = dict.fromkeys((row.product, row.shape) for row in used)
    sizes = "; ".join(f"{_chains(used, product)}: {_DIMENSIONS[product]} = {shape}" for product, shape in shapes)
    note = (
        f"{results.setup(used)}. Device time in {_rounds(used)} interleaved rounds; training is a forward and a "
        f"backward pass. {sizes}. `compile`: `torch.compile` in the fastest of the modes measured. Error of the "
        "output: `norm(result - float64) / norm(float64)`."
    )
    return f"{markdown_table(names, cells, left=(0, 1))}\n\n{note}"


def _chains(rows: Iterable[Row], product: str) -> str:
    return ", ".join(dict.fromkeys(row.chain for row in rows if row.product == product))


def _pytorch_times(row: TimesRow) -> tuple[str, str]:
    """The faster compiled chain's, and eager PyTorch's."""
    compiled = [us for peer in COMPILERS if (us := row.peer(peer).us) is not None]
    return number(min(compiled, default=None)), number(row.peer("eager").us)


def _strong(us: float | None) -> str:
    return f"**{number(us)}**"


def _error_table(results: DeviceResults) -> str:
    """One line a product and setting, over all sizes; an exact result is left out, and so is one that PyTorch has."""
    cells, used = [], []
    for (product, setting), rows in grouped(results.times, lambda row: (row.product, row.setting)).items():
        compared = [
            (ours / torch, ours, torch, tensor, row)
            for row in rows
            for tensor, (ours, torch) in row.errors.items()
            if ours and torch
        ]
        if not compared:
            continue
        used += rows
        ratio, ours, torch, tensor, row = max(compared, key=lambda each: each[0])
        memory_format = f" {row.memory_format}" if row.memory_format else ""
        mean = statistics.geometric_mean(each[0] for each in compared)
        largest = f"{row.chain} {row.shape}{memory_format}, `{tensor}`: {pair((ours, torch))}"
        cells.append([product, setting, len(compared), f"{mean:.2f}", f"{ratio:.2f}", largest])
    if not cells:
        return ""
    names = ["product", "setting", "tensors", "mean", "largest", "of"]
    return f"{markdown_table(names, cells, left=(0, 1, 5))}\n\n{results.setup(used)}."


def _captured_table(results: DeviceResults) -> str:
    rows = results.captured
    if not rows:
        return ""
    cells = []
    for row in rows:
        calls = eager, compiled, graph = [row.calls.get(name, CallTimes()) for name in ("eager", "compile", "graph")]
        ratios = [number(call.over_eager, ".3f") for call in (compiled, graph)]
        cells.append([*names_of(row), number(eager.us), *ratios, ", ".join(number(call.host_us) for call in calls)])
    names = ["chain", "dtype", "mode", "eager, µs", "compiled / eager", "graph / eager"]
    names.append("host, µs: eager, compiled, graph")
    return f"{markdown_table(names, cells, left=(0, 1, 2))}\n\n{_times_setup(results, rows)}"


def _tensor_parallel_table(results: DeviceResults) -> str:
    rows = results.tensor_parallel
    cells = [
        [
            *names_of(row),
            row.divided,
            row.gpus,
            *("red" if row.red else number(us) for us in (row.alone_us, row.us)),
            number(row.speedup, ".2f"),
            f"{number(row.alone_in_a_row_us)}, {number(row.in_a_row_us)}",
            _sent(row),
        ]
        for row in rows
    ]
    if not cells:
        return ""
    names = ["chain", "dtype", "mode", "divided", "GPUs", "one GPU, µs", "all, µs", "speed-up"]
    names += ["by the host's clock: one, all, µs", "sent"]
    return f"{markdown_table(names, cells, left=(0, 1, 2, 3, 9))}\n\n{_times_setup(results, rows)}"


def _sent(row: TensorParallelRow) -> str:
    sent = (f"{each.bytes / 1e6:.3g} MB in {each.count} `{name}`" for name, each in row.collectives.items())
    return ", ".join(sent) or "nothing"


def _commits_table(results: DeviceResults) -> str:
    """One line a chain and dtype, with both modes."""
    rows = results.commits
    by_mode = grouped(rows, lambda row: (row.chain, row.layout, row.shape))
    cells = []
    for (chain, layout, shape), pair_of_rows in by_mode.items():
        of_mode = {row.mode: row for row in pair_of_rows}
        found = [of_mode.get(mode) for mode in MODES]
        pairs = ((number(row and row.after_us), number(row and row.device_ratio, ".3f")) for row in found)
        wall = ", ".join(number(row and row.wall_ratio, ".2f") for row in found)
        cells.append([chain, layout, shape, *itertools.chain(*pairs), wall])
    if not cells:
        return ""
    names = ["chain", "dtype", "shape", "forward, µs", "over before", "training, µs", "over before"]
    names.append("wall clock over before: forward, training")
    before = ", ".join(dict.fromkeys(row.before[:10] for row in rows))
    setup = _times_setup(results, rows)
    return f"{markdown_table(names, cells, left=(0, 1, 2))}\n\n{setup} Before: commit {before}."


def _times_setup(results: DeviceResults, rows: Sequence[_AnyTimes]) -> str:
    """The same, with the rounds and the commits."""
    states = dict.fromkeys(run_of(row).state for row in sorted(rows, key=lambda row: run_of(row).date))
    return f"{results.setup(rows)}. {_rounds(rows)} interleaved rounds; {'; '.join(states)}."


def _rounds(rows: Iterable[_AnyTimes]) -> str:
    return " or ".join(map(str, sorted({row.rounds for row in rows if row.rounds})))


#: What a page asks for between ``<!-- table: NAME -->`` and ``<!-- /table -->``.
TABLES: Mapping[str, Callable[[DeviceResults], str]] = {
    "times": _main_table,
    "errors": _error_table,
    "captured": _captured_table,
    "tensor_parallel": _tensor_parallel_table,
    "commits": _commits_table,
}
_OPENING, _CLOSING = "<!-- table: {} -->", "<!-- /table -->"
#: A table's name, and its end. That is empty where the next table, or the page's end, comes first.
_PLACE = re.compile(r"<!-- table: ([^>]*) -->.*?(<!-- /table -->|(?=<!-- table:)|\Z)", re.DOTALL)


def fill_tables(text: str, devices: Sequence[DeviceResults], page: Path) -> str:
    """The page with each table of these results in its place; BadResult for a table that there is not."""

    def filled(place: re.Match) -> str:
        name = place[1]
        if name not in TABLES:
            raise BadResult(f"{page}: no table is called {name!r}; there are {', '.join(TABLES)}")
        if not place[2]:
            raise BadResult(f"{page}: no {_CLOSING} behind {_OPENING.format(name)}")
        tables = [table for results in devices if (table := TABLES[name](results))]
        return "\n\n".join([_OPENING.format(name), *(tables or [NOT_MEASURED]), _CLOSING])

    return _PLACE.sub(filled, text)
