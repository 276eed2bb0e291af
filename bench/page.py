"""Results as Markdown: the page of benchmarks."""

import os
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path

from bench.chains import CHAINS, FAMILY
from bench.columns import (
    CHAIN,
    DTYPE,
    FIRST_CALL,
    MODE,
    NOT_MEASURED,
    SHAPE,
    TIMES,
    Column,
    field,
    markdown_table,
    of_first,
    of_peer,
    of_ratio,
    pair,
    picture_of,
)
from bench.results import (
    DeviceResults,
    by_shape,
    grouped,
    runs_of,
    series,
)
from bench.schema import BARE, MODES, OURS, PYTORCH, Row, TimesRow
from bench.sizes import GRID, GRID_BATCHES, GRID_FEATURES

#: The batch at which the host's time is compared with eager PyTorch's.
_HOST_BATCH = 16

_INTRODUCTION = """\
# Benchmarks

After this page you know what each chain takes beside eager PyTorch, `torch.compile` and the bare product, at which \
sizes and precisions, and how exact it is. The bench's report writes this page from result files.

- Every result was checked against float64 before it was timed.
- Times are of the device, of interleaved rounds with a cold L2 cache. Ratios are normfuse's time over a peer's, the \
median of the rounds' own ratios: below 1, normfuse is faster.
- `bare` is the matrix product by cuBLAS or the convolution by cuDNN alone; a training step has three of them. Where \
a chain begins with its norm, it is one copy of the input, also beside a training step. \
`compile` is `torch.compile`, `compile-max` its mode max-autotune-no-cudagraphs. The best of PyTorch is the peer among \
`eager`, `compile` and `compile-max` that normfuse is least ahead of.
- Sizes are batch x in_features x out_features, and for L19 batch x in_channels x out_channels x height x width x \
kernel. Where a chain begins with its norm, they are batch x channels x height x width.
- Small numbers beside a chain name the [run](#runs), where the rows of a table are of different runs."""


#: The sections of times that the host sees: the field, and what it is.
_LOOPS = {
    "Host time": ("host_us", "Microseconds that the host needs to queue a call, whatever the device takes."),
    "Wall clock": ("wall_us", "Microseconds of a whole call in a loop that waits for the device once, at its end."),
}
_HOW_TO_MEASURE = f"""\
{NOT_MEASURED} On a GPU, before the report:

```sh
python -m bench --chains {",".join(FAMILY)} --output bench/results/family.NAME.jsonl
```"""
_FAMILY = "`of the best`: the ratio to the best of PyTorch; bold where normfuse is slower. The other columns:"
_COMPOSITIONS = "Chains by the functions that take steps, beside the same in PyTorch's functions:\n\n" + "\n".join(
    f"- {chain.label}: {chain.composition.replace('->', '→')}" for chain in CHAINS.values() if chain.is_composed
)
_NORMS = "`norm(result - float64) / norm(float64)`, normfuse's / PyTorch's."
_TIMES = " normfuse's µs, then for each peer the ratio and the peer's own µs."
_FIRST_CALL = (
    "A fresh process with an empty Triton cache, at PyTorch's default float32 precision: the import of `ops` after "
    "torch's, the first forward call until the device is done, and the median of later ones."
)


class _Runs:
    """The runs that a page's figures are of, numbered by date."""

    def __init__(self, rows: Iterable[Row]):
        found = dict.fromkeys(map(str, sorted(runs_of(rows), key=attrgetter("date"))))
        self.numbers = {run: number for number, run in enumerate(found, 1)}

    def _of(self, rows: Iterable[Row]) -> list[int]:
        return sorted({self.numbers[str(row.run)] for row in rows})

    def chain(self, rows: Iterable[Row]) -> Column:
        """The chain's column, with each row's run where these are of several."""
        if len(self._of(rows)) < 2:
            return CHAIN
        return "chain", lambda row: f"{row.chain} <sup>{self.numbers[str(row.run)]}</sup>"

    def note(self, rows: Iterable[Row]) -> str:
        numbers = self._of(rows)
        return f" Run{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}."


def write_page(devices: Iterable[DeviceResults], pictures: Path, page: Path, drawn: Iterable[str]) -> str:
    """The whole page, to lie at ``page``, with the pictures of these names in the folder ``pictures``."""
    folder = Path(os.path.relpath(pictures, page.parent)).as_posix()
    drawn = set(drawn)
    measured = [results for results in devices if results.times or results.first_call or results.tritons]
    parts = [_INTRODUCTION, *(part for results in measured for part in _device(results, folder, drawn))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _device(results: DeviceResults, folder: str, drawn: set[str]) -> list[str]:
    runs = _Runs([*results.times, *results.first_call, *results.tritons])

    def picture(name: str, what: str) -> str:
        is_drawn = f"{name}.{results.slug}.light.png" in drawn
        return picture_of(folder, f"{name}.{results.slug}", what) if is_drawn else ""

    sections = {
        "Times": [
            picture("speedup", "How many times as fast as PyTorch each chain is"),
            *_tables(runs, results.listed, _TIMES, lambda _: TIMES),
        ],
        "Family": [
            _COMPOSITIONS,
            picture("family", "How many times as fast as PyTorch each chain of the family is"),
            *_family(results, runs),
        ],
        "Errors": [picture("errors", "Error of each chain against float64, beside PyTorch's"), *_errors(results, runs)],
        "Added memory": _memory(results, runs),
        "Growth": [
            *(picture(f"growth_{mode}", f"Growth over batch and features, {mode}") for mode in MODES),
            *_growth(results, runs),
        ],
        **{title: _loops(results, runs, *what) for title, what in _LOOPS.items()},
        "First call": _table(
            runs, results.first_call, _FIRST_CALL + runs.note(results.first_call), [SHAPE, *FIRST_CALL]
        ),
        "Another Triton": _tritons(results, runs),
        "Runs": ["\n".join(f"{number}. {run}" for run, number in runs.numbers.items())],
    }
    parts = ([f"### {title}", *([part for part in body if part] or [NOT_MEASURED])] for title, body in sections.items())
    return [f"## {results.device}", *(part for section in parts for part in section)]


def _family(results: DeviceResults, runs: _Runs) -> list[str]:
    """All of the family: a chain has few rows, so one table holds every shape."""
    rows = results.family
    costs = [row for row in rows if row.us is not None]
    return [
        *_table(runs, rows, _FAMILY + _TIMES, FAMILY_TIMES),
        *_table(runs, [row for row in rows if row.errors], _NORMS + " Worst: by the ratio.", _FAMILY_ERRORS),
        *_table(runs, costs, "Microseconds of a whole call in a loop; MB that a training step adds.", _FAMILY_COSTS),
    ] or [_HOW_TO_MEASURE]


def _table(runs: _Runs, rows: Sequence[Row], what: str, columns: Iterable[Column]) -> list[str]:
    return [what, markdown_table([runs.chain(rows), DTYPE, *columns], rows)] if rows else []


def _tables(runs: _Runs, rows: Collection[TimesRow], what: str, columns: Callable[[list], list[Column]]) -> list[str]:
    """A table a product and shape, each below its name."""
    return [
        part
        for (product, shape), group in grouped(rows, by_shape).items()
        for part in _table(runs, group, f"{product}, {shape}:{what}", [MODE, *columns(group)])
    ]


def _errors(results: DeviceResults, runs: _Runs) -> list[str]:
    def columns(rows: Iterable[TimesRow]) -> list[Column]:
        return [_error(tensor) for tensor in dict.fromkeys(tensor for row in rows for tensor in row.errors)]

    tables = _tables(runs, [row for row in results.listed if row.errors], "", columns)
    return [_NORMS, *tables] if tables else []


def _error(tensor: str) -> Column:
    return f"`{tensor}`", lambda row: pair(row.errors.get(tensor))


def _memory(results: DeviceResults, runs: _Runs) -> list[str]:
    rows = [row for row in results.listed if row.peer(OURS).added_mb is not None]
    columns = [SHAPE, *(of_peer(peer, "added_mb", ".1f") for peer in (OURS, *PYTORCH))]
    return _table(
        runs, rows, "MB at the peak of a training step, beyond weights, gradients, input and output.", columns
    )


def _growth(results: DeviceResults, runs: _Runs) -> list[str]:
    groups = grouped(results.grid, series)
    if not groups:
        return []
    what = (
        "Batch x features, in_features = out_features: normfuse's time over that of the best of PyTorch. Means are "
        "geometric; bold: normfuse is slower." + runs.note(results.grid)
    )
    grids = ((f"{chain} {layout}, {mode}:", _grid(rows)) for (chain, layout, mode), rows in groups.items())
    return [what, markdown_table(_SUMMARY, groups.values()), *(part for grid in grids for part in grid)]


def _tritons(results: DeviceResults, runs: _Runs) -> list[str]:
    rows = results.tritons
    if not rows:
        return []
    what = "Microseconds with each, and the later one's over the earlier one's; processes took turns."
    (before, after) = ({row.before for row in rows}, {f"triton {row.run.triton}" for row in rows if row.run})
    columns = [
        SHAPE,
        MODE,
        field(" or ".join(sorted(before)), "before_us"),
        field(" or ".join(sorted(after)), "after_us"),
        field("ratio", "device_ratio", ".3f"),
        field("ratio of the wall clock", "wall_ratio", ".3f"),
    ]
    return _table(runs, rows, what + runs.note(rows), columns)


def _ratios(rows: Iterable[TimesRow]) -> list[float]:
    return [closest[1] for row in rows if (closest := row.closest())]


def _worst(rows: Iterable[TimesRow]) -> str | None:
    timed = ((closest[1], f"{row.shape} ({closest[0]})") for row in rows if (closest := row.closest()))
    return max(timed, key=itemgetter(0), default=(0.0, None))[1]


#: Of a list of rows: the sizes of a chain, dtype and mode.
_SUMMARY: list[Column] = [
    *map(of_first, (CHAIN, DTYPE, MODE)),
    ("sizes", lambda rows: f"{len(_ratios(rows))} of {len(GRID)}"),
    ("geometric mean", lambda rows: _mean(_ratios(rows))),
    ("worst", lambda rows: of_ratio(max(_ratios(rows), default=None))),
    ("at", _worst),
    ("of which slower", lambda rows: sum(ratio > 1 for ratio in _ratios(rows))),
]


def _grid(rows: list[TimesRow]) -> str:
    """Batches down, features across, with the means of both."""

    def entry(sizes: Sequence[int], batches: Sequence[int]) -> str:
        cells = [row for row in rows if GRID[row.shape][0] in batches and GRID[row.shape][1] in sizes]
        is_red = len(batches) == len(sizes) == 1 and any(row.red for row in cells)
        return "red" if is_red else _mean(_ratios(cells))

    columns: list[Column] = [
        ("batch", lambda batches: batches[0] if len(batches) == 1 else "mean"),
        *((size, partial(entry, [size])) for size in GRID_FEATURES),
        ("mean", partial(entry, GRID_FEATURES)),
    ]
    return markdown_table(columns, [*([batch] for batch in GRID_BATCHES), GRID_BATCHES])


def _loops(results: DeviceResults, runs: _Runs, field: str, what: str) -> list[str]:
    """At the target sizes, and at the grid's batch where the host's time counts."""
    at_batch = [row for row in results.grid if GRID[row.shape][0] == _HOST_BATCH]
    rows = [row for row in (*at_batch, *results.listed) if getattr(row.peer(OURS), field) is not None]

    def over_eager(row: TimesRow) -> str | None:
        ours, eager = (getattr(row.peer(peer), field) for peer in (OURS, "eager"))
        return f"{ours / eager:.2f}" if eager else None

    peers = (of_peer(peer, field) for peer in (OURS, BARE, *PYTORCH))
    return _table(runs, rows, what, [MODE, SHAPE, *peers, ("normfuse / eager", over_eager)])


def _mean(ratios: list[float]) -> str:
    return of_ratio(statistics.geometric_mean(ratios) if ratios else None)


def _of_the_best(row: TimesRow) -> str | None:
    closest = row.closest()
    return closest and of_ratio(closest[1])


def _worst_error(row: TimesRow) -> str | None:
    tensor = row.worst_tensor
    return tensor and f"`{tensor}`: {pair(row.errors[tensor])}"


FAMILY_TIMES: list[Column] = [MODE, SHAPE, *TIMES[:1], ("of the best", _of_the_best), *TIMES[1:]]
_FAMILY_ERRORS: list[Column] = [MODE, SHAPE, _error("output"), ("worst", _worst_error)]
_FAMILY_COSTS: list[Column] = [
    MODE,
    SHAPE,
    *(
        (f"{what}: {name}" if name == "normfuse" else name, read)
        for what, of, format in (("wall clock, µs", "wall_us", ".0f"), ("added MB", "added_mb", ".1f"))
        for name, read in (of_peer(peer, of, format) for peer in (OURS, *PYTORCH))
    ),
]
