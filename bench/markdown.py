"""Results as Markdown: the page of benchmarks."""

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.results import DeviceResults
from bench.schema import (
    BARE,
    MODES,
    OURS,
    PYTORCH,
    FirstCallRow,
    Row,
    Run,
    TimesRow,
)
from bench.sizes import GRID, GRID_BATCHES, GRID_FEATURES, grid_shape
from bench.text import against, markdown_table, number, pair, quotient

NOT_MEASURED = "Not measured."
#: The batch at which the host's time is compared with eager PyTorch's.
_HOST_BATCH = 16

_INTRODUCTION = """\
# Benchmarks

After this page you know what each chain takes beside eager PyTorch, `torch.compile` and the bare product, at which \
sizes and precisions, and how exact it is. The bench's report writes this page from result files.

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
        found = {self._what(row): row.run for row in sorted(rows, key=lambda row: run_of(row).date)}
        self._numbers = {what: index for index, what in enumerate(found, 1)}

    @staticmethod
    def _what(row: Row) -> tuple[str, str]:
        return run_of(row).state, run_of(row).versions

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


def run_of(row: Row) -> Run:
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
        runs.listed() or NOT_MEASURED,
    ]


def _times(results: DeviceResults, runs: _Runs) -> list[str]:
    """A table a product and shape."""
    parts = []
    for (product, shape), rows in grouped(results.listed, lambda row: (row.product, row.shape)).items():
        peers = known_peers(rows, (BARE, *PYTORCH))
        names = ["chain", "dtype", "mode", "µs", *peers]
        cells = [
            [*names_of(row, mark), "red" if row.red else number(row.us), *(against(row.peer(peer)) for peer in peers)]
            for row, mark in zip(rows, runs.marks(rows), strict=True)
        ]
        parts += [
            f"{product}, {shape}: normfuse's µs, then for each peer the ratio and the peer's own µs.",
            markdown_table(names, cells, left=(0, 1, 2)),
        ]
    return parts or [NOT_MEASURED]


def _errors(results: DeviceResults, runs: _Runs) -> list[str]:
    """A table a product and shape, a column a tensor."""
    found = [row for row in results.listed if row.errors]
    parts = ["`norm(result - float64) / norm(float64)`, normfuse's / PyTorch's."] if found else [NOT_MEASURED]
    for (product, shape), rows in grouped(found, lambda row: (row.product, row.shape)).items():
        tensors = list(dict.fromkeys(tensor for row in rows for tensor in row.errors))
        cells = [
            [*names_of(row, mark), *(pair(row.errors.get(tensor)) for tensor in tensors)]
            for row, mark in zip(rows, runs.marks(rows), strict=True)
        ]
        names = ["chain", "dtype", "mode", *(f"`{tensor}`" for tensor in tensors)]
        parts += [f"{product}, {shape}:", markdown_table(names, cells, left=(0, 1, 2))]
    return parts


def _memory(results: DeviceResults, runs: _Runs) -> list[str]:
    rows = [row for row in results.listed if row.peer(OURS).added_mb is not None]
    if not rows:
        return [NOT_MEASURED]
    peers = known_peers(rows, (OURS, *PYTORCH))
    names = ["chain", "dtype", "shape", *map(_title, peers)]
    cells = [
        [*names_of(row, mark)[:2], row.shape, *(number(row.peer(peer).added_mb, ".1f") for peer in peers)]
        for row, mark in zip(rows, runs.marks(rows), strict=True)
    ]
    return [
        "MB at the peak of a training step, beyond weights, gradients, input and output.",
        markdown_table(names, cells, left=(0, 1, 2)),
    ]


def _growth(results: DeviceResults, runs: _Runs) -> list[str]:
    """A summary, then a table of batches by features for each chain, dtype and mode."""
    groups = grouped(results.grid, lambda row: (row.chain, row.layout, row.mode))
    if not groups:
        return [NOT_MEASURED]
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
        *names_of(rows[0]),
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
        return [NOT_MEASURED]
    peers = known_peers(rows, (OURS, BARE, *PYTORCH))
    names = ["chain", "dtype", "mode", "shape", *map(_title, peers), "normfuse / eager"]
    cells = [
        [
            *names_of(row, mark),
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
        return [NOT_MEASURED]
    names = ["chain", "dtype", "shape", "import ops, s", "first forward call, s", "kernels compiled"]
    names += ["of which not run", "later calls, µs"]
    cells = [
        [
            *names_of(row, mark)[:2],
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


def names_of(row: Row, mark: str = "") -> list[str]:
    """Chain, dtype (with precision and memory format) and mode."""
    return [row.chain + mark, row.layout, row.mode]


def known_peers(rows: Iterable[TimesRow], names: Sequence[str]) -> list[str]:
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


def grouped(rows: Iterable, group: Callable) -> dict:
    """Lists of rows by what this says of them, in the order in which they come."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    return groups
