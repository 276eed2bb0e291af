"""Results as Markdown: the page of benchmarks, and tables within other pages."""

import itertools
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bench.results import BadResult, DeviceResults
from bench.schema import (
    BARE,
    COMPILERS,
    MODES,
    OURS,
    PYTORCH,
    CallTimes,
    CapturedRow,
    CommitsRow,
    FirstCallRow,
    Row,
    Run,
    TensorParallelRow,
    TimesRow,
)
from bench.sizes import GRID, GRID_BATCHES, GRID_FEATURES, grid_shape
from bench.text import against, markdown_table, number, pair, quotient

AnyTimes = TimesRow | CapturedRow | TensorParallelRow | CommitsRow

_NOT_MEASURED = "Not measured."
#: The batch at which the host's time is compared with eager PyTorch's.
_HOST_BATCH = 16
#: Rows of the table ``times``, by chain's product: setting and memory format.
_MAIN = {
    "GEMM": (("bfloat16", None), ("float32 highest", None)),
    "convolution": (("bfloat16", "contiguous"), ("bfloat16", "channels_last")),
}
_DIMENSIONS = {
    "GEMM": "batch x in_features x out_features",
    "convolution": "batch x in_channels x out_channels x height x width x kernel",
}

_INTRODUCTION = """\
# Benchmarks

After this page you know what each chain takes beside eager PyTorch, `torch.compile` and the bare product, at which \
sizes and precisions, and how exact it is. `python -m bench report` writes the page from `bench/results/`.

- Every result was checked against float64 before it was timed.
- Times are of the device, of interleaved rounds with a cold L2 cache. Ratios are normfuse's time over a peer's, the \
median of the rounds' own ratios: below 1, normfuse is faster.
- `bare` is the matrix product by cuBLAS or the convolution by cuDNN alone; a training step has three of them. \
`compile` is `torch.compile`, `compile-max` its mode max-autotune-no-cudagraphs. The best of PyTorch is the peer among \
`eager`, `compile` and `compile-max` that normfuse is least ahead of.
- Sizes are batch x in_features x out_features, and for L19 batch x in_channels x out_channels x height x width x \
kernel.
- Small numbers beside a chain name the [run](#runs), where the rows of a table are of different runs."""


class _Runs:
    """The runs that a page's figures are of, numbered by date."""

    def __init__(self, rows: Iterable[Row]):
        found = {self._what(row): row.run for row in sorted(rows, key=lambda row: _run(row).date)}
        self._numbers = {what: index for index, what in enumerate(found, 1)}

    @staticmethod
    def _what(row: Row) -> tuple[str, str]:
        return _run(row).state, _run(row).versions

    def numbers(self, rows: Iterable[Row]) -> list[int]:
        return sorted({self._numbers[self._what(row)] for row in rows})

    def marks(self, rows: Sequence[Row]) -> list[str]:
        """What names each row's run; nothing where all are of one."""
        several = len(self.numbers(rows)) > 1
        return [f" <sup>{self._numbers[self._what(row)]}</sup>" if several else "" for row in rows]

    def note(self, rows: Iterable[Row]) -> str:
        """A sentence that names the runs of these rows."""
        numbers = self.numbers(rows)
        return f" Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}."

    def listed(self) -> str:
        return "\n".join(f"{index}. {versions}; {state}" for (state, versions), index in self._numbers.items())


def _run(row: Row) -> Run:
    assert row.run is not None, "a row that was read has its run"
    return row.run


def write_page(devices: Iterable[DeviceResults], pictures: Path, page: Path, drawn: Iterable[str]) -> str:
    """The whole page, to lie at ``page``, with the pictures of these names in the folder ``pictures``."""
    folder = Path(os.path.relpath(pictures, page.parent)).as_posix()
    drawn = set(drawn)
    parts = [_INTRODUCTION, *(part for results in devices for part in _device(results, folder, drawn))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _device(results: DeviceResults, folder: str, drawn: set[str]) -> list[str]:
    """The sections of one device, each a heading and what follows it."""
    runs = _Runs([*results.times, *results.first_call])

    def picture(name: str, what: str) -> str:
        light, dark = (f"{name}.{results.slug}.{theme}.png" for theme in ("light", "dark"))
        if light not in drawn:
            return ""
        return (
            f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{folder}/{dark}">\n'
            f'<img alt="{what}" src="{folder}/{light}">\n</picture>'
        )

    return [
        f"## {results.device}",
        "### Times",
        picture("speedup", "How many times as fast as PyTorch each chain is"),
        *_times(results, runs),
        "### Errors",
        picture("errors", "Error of each chain against float64, beside PyTorch's"),
        *_errors(results, runs),
        "### Added memory",
        *_memory(results, runs),
        "### Growth",
        *(picture(f"growth_{mode}", f"Growth over batch and features, {mode}") for mode in MODES),
        *_growth(results, runs),
        "### Host time",
        *_host_times(results, runs),
        "### First call",
        *_first_calls(results, runs),
        "### Runs",
        runs.listed() or _NOT_MEASURED,
    ]


def _times(results: DeviceResults, runs: _Runs) -> list[str]:
    """A table a product and shape."""
    parts = []
    for (product, shape), rows in _by(results.listed, lambda row: (row.product, row.shape)).items():
        peers = _peers(rows, (BARE, *PYTORCH))
        names = ["chain", "dtype", "mode", "µs", *peers]
        cells = [
            [*_names(row, mark), "red" if row.red else number(row.us), *(against(row.peer(peer)) for peer in peers)]
            for row, mark in zip(rows, runs.marks(rows), strict=True)
        ]
        parts += [
            f"{product}, {shape}: normfuse's µs, then for each peer the ratio and the peer's own µs.",
            markdown_table(names, cells, left=(0, 1, 2)),
        ]
    return parts or [_NOT_MEASURED]


def _errors(results: DeviceResults, runs: _Runs) -> list[str]:
    """A table a product and shape, a column a tensor."""
    found = [row for row in results.listed if row.errors]
    parts = ["`norm(result - float64) / norm(float64)`, normfuse's / PyTorch's."] if found else [_NOT_MEASURED]
    for (product, shape), rows in _by(found, lambda row: (row.product, row.shape)).items():
        tensors = list(dict.fromkeys(tensor for row in rows for tensor in row.errors))
        cells = [
            [*_names(row, mark), *(pair(row.errors.get(tensor)) for tensor in tensors)]
            for row, mark in zip(rows, runs.marks(rows), strict=True)
        ]
        names = ["chain", "dtype", "mode", *(f"`{tensor}`" for tensor in tensors)]
        parts += [f"{product}, {shape}:", markdown_table(names, cells, left=(0, 1, 2))]
    return parts


def _memory(results: DeviceResults, runs: _Runs) -> list[str]:
    rows = [row for row in results.listed if row.peer(OURS).added_mb is not None]
    if not rows:
        return [_NOT_MEASURED]
    peers = _peers(rows, (OURS, *PYTORCH))
    names = ["chain", "dtype", "shape", *map(_title, peers)]
    cells = [
        [*_names(row, mark)[:2], row.shape, *(number(row.peer(peer).added_mb, ".1f") for peer in peers)]
        for row, mark in zip(rows, runs.marks(rows), strict=True)
    ]
    return [
        "MB at the peak of a training step, beyond weights, gradients, input and output.",
        markdown_table(names, cells, left=(0, 1, 2)),
    ]


def _growth(results: DeviceResults, runs: _Runs) -> list[str]:
    """A summary, then a table of batches by features for each chain, dtype and mode."""
    groups = _by(results.grid, lambda row: (row.chain, row.layout, row.mode))
    if not groups:
        return [_NOT_MEASURED]
    names = ["chain", "dtype", "mode", "sizes", "geometric mean", "worst", "at", "of which slower"]
    parts = [
        "Batch x features, in_features = out_features: normfuse's time over that of the best of PyTorch. Means are "
        "geometric; bold: normfuse is slower." + runs.note(results.grid),
        markdown_table(names, [_summary(rows) for rows in groups.values()], left=(0, 1, 2, 6)),
    ]
    for (chain, layout, mode), rows in groups.items():
        parts += [f"{chain} {layout}, {mode}:", _grid(rows)]
    return parts


def _summary(rows: list[TimesRow]) -> list[object]:
    timed = [(closest[1], closest[0], row) for row in rows if (closest := row.closest())]
    worst = max(timed, key=lambda each: each[0], default=None)
    return [
        *_names(rows[0]),
        f"{len(timed)} of {len(GRID)}",
        _mean(ratio for ratio, _, _ in timed),
        _ratio(worst and worst[0]),
        f"{worst[2].shape} ({worst[1]})" if worst else "–",
        sum(ratio > 1 for ratio, _, _ in timed),
    ]


def _grid(rows: list[TimesRow]) -> str:
    """Batches down, features across, with the means of both."""
    by_shape = {row.shape: row for row in rows}

    def found(batches: Iterable[int], sizes: Iterable[int]) -> list[float]:
        shapes = [grid_shape(batch, size) for batch in batches for size in sizes]
        return [closest[1] for shape in shapes if shape in by_shape and (closest := by_shape[shape].closest())]

    def entry(batch: int, size: int) -> str:
        row = by_shape.get(grid_shape(batch, size))
        closest = row.closest() if row else None
        return "red" if row and row.red else _ratio(closest and closest[1])

    cells = [
        [batch, *(entry(batch, size) for size in GRID_FEATURES), _mean(found([batch], GRID_FEATURES))]
        for batch in GRID_BATCHES
    ]
    columns = (_mean(found(GRID_BATCHES, [size])) for size in GRID_FEATURES)
    cells.append(["mean", *columns, _mean(found(GRID_BATCHES, GRID_FEATURES))])
    return markdown_table(["batch", *GRID_FEATURES, "mean"], cells)


def _host_times(results: DeviceResults, runs: _Runs) -> list[str]:
    """At the target sizes, and at the grid's batch where the host's time counts."""
    at_batch = [row for row in results.grid if GRID[row.shape][0] == _HOST_BATCH]
    rows = [row for row in (*at_batch, *results.listed) if row.peer(OURS).host_us is not None]
    if not rows:
        return [_NOT_MEASURED]
    peers = _peers(rows, (OURS, BARE, *PYTORCH))
    names = ["chain", "dtype", "mode", "shape", *map(_title, peers), "normfuse / eager"]
    cells = [
        [
            *_names(row, mark),
            row.shape,
            *(number(row.peer(peer).host_us) for peer in peers),
            quotient(row.peer(OURS).host_us, row.peer("eager").host_us),
        ]
        for row, mark in zip(rows, runs.marks(rows), strict=True)
    ]
    return [
        "Microseconds that the host needs to queue a call, whatever the device takes.",
        markdown_table(names, cells, left=(0, 1, 2, 3)),
    ]


def _first_calls(results: DeviceResults, runs: _Runs) -> list[str]:
    rows = results.first_call
    if not rows:
        return [_NOT_MEASURED]
    names = ["chain", "dtype", "shape", "import ops, s", "first forward call, s", "kernels compiled"]
    names += ["of which not run", "later calls, µs"]
    cells = [
        [
            *_names(row, mark)[:2],
            row.shape,
            "failed" if row.failure else number(row.import_s, ".2f"),
            number(row.first_call_s, ".2f"),
            "–" if row.failure else len(row.kernels),
            _kernels_not_run(row),
            number(row.later_call_us),
        ]
        for row, mark in zip(rows, runs.marks(rows), strict=True)
    ]
    return [
        "A fresh process with an empty Triton cache, at PyTorch's default float32 precision: the import of `ops` after "
        "torch's, the first forward call until the device is done, and the median of later ones." + runs.note(rows),
        markdown_table(names, cells, left=(0, 1, 2)),
    ]


def _kernels_not_run(row: FirstCallRow) -> str:
    names = row.kernels_not_run
    return "–" if names is None else ", ".join(f"`{name}`" for name in names) or "none"


# Tables within other pages


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
    rounds = " or ".join(map(str, sorted({row.rounds for row in used if row.rounds})))
    sizes = "; ".join(f"{_chains(used, product)}: {_DIMENSIONS[product]} = {shape}" for product, shape in shapes)
    note = (
        f"{_setup(results, used)} {rounds} interleaved rounds. {sizes}. `compile`: `torch.compile`, the faster of its "
        "default mode and max-autotune where both were measured. Error: of the forward pass, "
        "`norm(result - float64) / norm(float64)`."
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
    for (product, setting), rows in _by(results.times, lambda row: (row.product, row.setting)).items():
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
    return f"{markdown_table(names, cells, left=(0, 1, 5))}\n\n{_setup(results, used)}"


def _captured_table(results: DeviceResults) -> str:
    rows = results.captured
    if not rows:
        return ""
    cells = []
    for row in rows:
        calls = eager, compiled, graph = [row.calls.get(name, CallTimes()) for name in ("eager", "compile", "graph")]
        ratios = [number(call.over_eager, ".3f") for call in (compiled, graph)]
        cells.append([*_names(row), number(eager.us), *ratios, ", ".join(number(call.host_us) for call in calls)])
    names = ["chain", "dtype", "mode", "eager, µs", "compiled / eager", "graph / eager"]
    names.append("host, µs: eager, compiled, graph")
    return f"{markdown_table(names, cells, left=(0, 1, 2))}\n\n{_times_setup(results, rows)}"


def _tensor_parallel_table(results: DeviceResults) -> str:
    rows = results.tensor_parallel
    cells = [
        [
            *_names(row),
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


def _other_sizes_table(results: DeviceResults) -> str:
    rows = results.other_sizes
    if not rows:
        return ""
    peers = _peers(rows, (BARE, *PYTORCH))
    names = ["chain", "dtype", "mode", "shape", "µs", *peers]
    cells = [
        [*_names(row), row.shape, "red" if row.red else number(row.us), *(against(row.peer(peer)) for peer in peers)]
        for row in rows
    ]
    return f"{markdown_table(names, cells, left=(0, 1, 2, 3))}\n\n{_times_setup(results, rows)}"


def _commits_table(results: DeviceResults) -> str:
    """One line a chain and dtype, with both modes."""
    rows = results.commits
    by_mode = _by(rows, lambda row: (row.chain, row.layout, row.shape))
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


def _setup(results: DeviceResults, rows: Iterable[Row]) -> str:
    """A sentence that says on what and with what these rows were measured."""
    return ", ".join([results.device, *dict.fromkeys(_run(row).versions for row in rows)]) + "."


def _times_setup(results: DeviceResults, rows: Sequence[AnyTimes]) -> str:
    """The same, with the rounds and the commits."""
    rounds = " or ".join(map(str, sorted({row.rounds for row in rows if row.rounds})))
    states = dict.fromkeys(_run(row).state for row in sorted(rows, key=lambda row: _run(row).date))
    return f"{_setup(results, rows)} {rounds} interleaved rounds; {'; '.join(states)}."


#: What a page asks for between ``<!-- table: NAME -->`` and ``<!-- /table -->``.
TABLES: Mapping[str, Callable[[DeviceResults], str]] = {
    "times": _main_table,
    "errors": _error_table,
    "captured": _captured_table,
    "tensor_parallel": _tensor_parallel_table,
    "other_sizes": _other_sizes_table,
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
        return "\n\n".join([_OPENING.format(name), *(tables or [_NOT_MEASURED]), _CLOSING])

    return _PLACE.sub(filled, text)


def _names(row: Row, mark: str = "") -> list[str]:
    """Chain, dtype (with precision and memory format) and mode."""
    return [row.chain + mark, row.layout, row.mode]


def _peers(rows: Iterable[TimesRow], names: Sequence[str]) -> list[str]:
    """Those of these names of which something is known."""
    known = {name for row in rows for name in row.peers}
    return [name for name in names if name in known]


def _title(peer: str) -> str:
    return "normfuse" if peer == OURS else peer


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"


def _mean(ratios: Iterable[float]) -> str:
    ratios = list(ratios)
    return _ratio(statistics.geometric_mean(ratios) if ratios else None)


def _by(rows: Iterable, group: Callable) -> dict:
    """Lists of rows by what this says of them, in the order in which they come."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    return groups
