"""Results as Markdown: the page of benchmarks, and the tables within other pages."""

import os
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from bench.chains import CHAINS, FAMILY
from bench.columns import (
    CAPTURED,
    CHAIN,
    DTYPE,
    FIRST_CALL,
    MODE,
    SHAPE,
    TENSOR_PARALLEL,
    TIMES,
    WAY_COSTS,
    WAY_KERNELS,
    WAY_TIMES,
    Column,
    field,
    markdown_table,
    number,
    of_peer,
    pair,
)
from bench.results import (
    BadResult,
    DeviceResults,
    by_shape,
    chains_by_shape,
    grouped,
    model_ratios,
    runs_of,
    series,
)
from bench.schema import BARE, COMPILERS, GRAPHS, MODES, OURS, PYTORCH, CommitsRow, ModelRow, Row, TimesRow
from bench.sizes import FORMS, GRID, GRID_BATCHES, GRID_FEATURES

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
    measured = [results for results in devices if results.times or results.first_call]
    parts = [_INTRODUCTION, *(part for results in measured for part in _device(results, folder, drawn))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _device(results: DeviceResults, folder: str, drawn: set[str]) -> list[str]:
    runs = _Runs([*results.times, *results.first_call])

    def picture(name: str, what: str) -> str:
        is_drawn = f"{name}.{results.slug}.light.png" in drawn
        return _picture(folder, f"{name}.{results.slug}", what) if is_drawn else ""

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
        "Runs": ["\n".join(f"{number}. {run}" for run, number in runs.numbers.items())],
    }
    parts = ([f"### {title}", *([part for part in body if part] or [NOT_MEASURED])] for title, body in sections.items())
    return [f"## {results.device}", *(part for section in parts for part in section)]


def _picture(folder: str, name: str, what: str) -> str:
    light, dark = (f"{folder}/{name}.{theme}.png" for theme in ("light", "dark"))
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img alt="{what}" src="{light}">\n</picture>'
    )


def _family(results: DeviceResults, runs: _Runs) -> list[str]:
    """All of the family: a chain has few rows, so one table holds every shape."""
    rows = results.family
    costs = [row for row in rows if row.us is not None]
    return [
        *_table(runs, rows, _FAMILY + _TIMES, _FAMILY_TIMES),
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


def _ratios(rows: Iterable[TimesRow]) -> list[float]:
    return [closest[1] for row in rows if (closest := row.closest())]


def _worst(rows: Iterable[TimesRow]) -> str | None:
    timed = ((closest[1], f"{row.shape} ({closest[0]})") for row in rows if (closest := row.closest()))
    return max(timed, key=itemgetter(0), default=(0.0, None))[1]


def _of_first(column: Column) -> Column:
    """A column of lists of rows, which shows what this one does of the first row."""
    name, read = column
    return name, lambda rows: read(rows[0])


#: Of a list of rows: the sizes of a chain, dtype and mode.
_SUMMARY: list[Column] = [
    *map(_of_first, (CHAIN, DTYPE, MODE)),
    ("sizes", lambda rows: f"{len(_ratios(rows))} of {len(GRID)}"),
    ("geometric mean", lambda rows: _mean(_ratios(rows))),
    ("worst", lambda rows: _ratio(max(_ratios(rows), default=None))),
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


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"


def _mean(ratios: list[float]) -> str:
    return _ratio(statistics.geometric_mean(ratios) if ratios else None)


def _of_the_best(row: TimesRow) -> str | None:
    closest = row.closest()
    return closest and _ratio(closest[1])


def _worst_error(row: TimesRow) -> str | None:
    tensor = row.worst_tensor
    return tensor and f"`{tensor}`: {pair(row.errors[tensor])}"


_FAMILY_TIMES: list[Column] = [MODE, SHAPE, *TIMES[:1], ("of the best", _of_the_best), *TIMES[1:]]
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


# Tables within other pages

#: Rows of the table ``times``: a chain's product, and what ``Row.layout`` says.
_MAIN = (
    ("GEMM", "bfloat16"),
    ("GEMM", "float32 highest"),
    ("convolution", "bfloat16 contiguous"),
    ("convolution", "bfloat16 channels_last"),
)


def _with_note(columns: Iterable[Column], rows: Collection[object], note: str) -> str:
    return f"{markdown_table(columns, rows)}\n\n{note}" if rows else ""


def _of_mode(mode: str, column: Column) -> Column:
    """A column of lists of rows, which shows what this one does of the row of this mode; None where there is none."""
    name, read = column
    return name, lambda rows: next((read(row) for row in rows if row.mode == mode), None)


def _compiled(row: TimesRow) -> str:
    return number(min((us for peer in COMPILERS if (us := row.peer(peer).us) is not None), default=None))


def _times(mode: str) -> list[Column]:
    return [
        (f"{mode}, µs: normfuse", lambda row: f"**{number(row.us)}**"),
        ("compile", _compiled),
        ("eager", lambda row: number(row.peer("eager").us)),
    ]


def _main_table(results: DeviceResults) -> str:
    sound = [row for row in results.target if not row.red and row.mode in MODES and (row.product, row.layout) in _MAIN]
    sound.sort(key=lambda row: _MAIN.index((row.product, row.layout)))
    cells = [rows for rows in grouped(sound, attrgetter("chain", "layout")).values() if len(rows) == len(MODES)]
    columns = [
        *map(_of_first, (CHAIN, DTYPE)),
        *(_of_mode(mode, column) for mode in MODES for column in _times(mode)),
        _of_mode(MODES[0], ("error: normfuse / PyTorch", lambda row: pair(row.errors.get("output")))),
    ]
    used = [row for rows in cells for row in rows]
    shapes = chains_by_shape(used).items()
    sizes = "; ".join(f"{chains}: {FORMS[product]} = {shape}" for (product, shape), chains in shapes)
    note = (
        f"{results.setup(used)}. Device time in {_rounds(used)} interleaved rounds; training is a forward and a "
        f"backward pass. {sizes}. `compile`: `torch.compile` in the fastest of the modes measured. Error of the "
        "output: `norm(result - float64) / norm(float64)`."
    )
    return _with_note(columns, cells, note)


def _error_table(results: DeviceResults) -> str:
    """One line a product and setting, over all sizes; an exact result is left out, and so is one that PyTorch has."""
    compared = [
        (row, ours / torch, f"`{tensor}`: {pair((ours, torch))}")
        for row in results.times
        for tensor, (ours, torch) in row.errors.items()
        if ours and torch
    ]
    columns: list[Column] = [
        ("product", lambda group: _kind(group[0][0])),
        ("setting", lambda group: group[0][0].setting),
        ("tensors", len),
        ("mean", lambda group: f"{statistics.geometric_mean(map(itemgetter(1), group)):.2f}"),
        ("largest", lambda group: f"{max(map(itemgetter(1), group)):.2f}"),
        ("of", _largest),
    ]
    groups = grouped(compared, lambda each: (_kind(each[0]), each[0].setting)).values()
    return _with_note(columns, groups, f"{results.setup(row for row, *_ in compared)}.")


def _kind(row: TimesRow) -> str:
    return f"{row.product} of the family" if row.is_of_family else row.product


def _largest(group: Iterable[tuple[TimesRow, float, str]]) -> str:
    row, _, what = max(group, key=itemgetter(1))
    return " ".join(filter(None, (row.chain, row.shape, row.memory_format))) + f", {what}"


def _rows_table(results: DeviceResults, rows: Sequence[Row], columns: Iterable[Column]) -> str:
    return _with_note([CHAIN, DTYPE, MODE, *columns], rows, _times_setup(results, rows))


def _wall_ratios(rows: Iterable[CommitsRow]) -> str:
    by_mode: dict[str, float] = {row.mode: row.wall_ratio for row in rows}
    return ", ".join(number(by_mode.get(mode), ".2f") for mode in MODES)


def _commits_table(results: DeviceResults) -> str:
    rows = results.commits
    columns: list[Column] = [
        *map(_of_first, (CHAIN, DTYPE, SHAPE)),
        *(
            _of_mode(mode, column)
            for mode in MODES
            for column in (field(f"{mode}, µs", "after_us"), field("over before", "device_ratio", ".3f"))
        ),
        ("wall clock over before: forward, training", _wall_ratios),
    ]
    groups = grouped(rows, attrgetter("chain", "layout", "shape")).values()
    before = ", ".join(dict.fromkeys(row.before[:10] for row in rows))
    return _with_note(columns, groups, f"{_times_setup(results, rows)} Before: commit {before}.")


def _times_setup(results: DeviceResults, rows: Iterable[Any]) -> str:
    states = dict.fromkeys(run.state for run in sorted(runs_of(rows), key=attrgetter("date")))
    return f"{results.setup(rows)}. {_rounds(rows)} interleaved rounds; {'; '.join(states)}."


def _rounds(rows: Iterable[Any]) -> str:
    return " or ".join(map(str, sorted({row.rounds for row in rows if row.rounds})))


# Whole models

#: Rows of README's table: the model, and what ``Row.layout`` says.
_MAIN_MODELS = (
    ("resnet50_gn", "autocast channels_last"),
    ("segresnet", "autocast contiguous"),
    ("vae_decoder_512", "bfloat16 channels_last"),
)
_MODEL: Column = ("model", attrgetter("chain"))


def _of_row(column: Column) -> Column:
    """A column of one way's lines, which shows what this one does of the row."""
    name, read = column
    return name, lambda line: read(line.row)


def _ways_table(columns: Collection[Column], results: DeviceResults, note: str = "") -> str:
    """Of the ways of which something is known."""
    lines = [line for row in results.models for line in row.lines if any(read(line) for _, read in columns)]
    names: list[Column] = [*map(_of_row, (_MODEL, DTYPE, MODE, SHAPE)), ("way", attrgetter("name"))]
    return _with_note([*names, *columns], lines, f"{_times_setup(results, results.models)}{note}")


def _models_table(results: DeviceResults) -> str:
    picture = _picture("pictures", f"models.{results.slug}", "Time of whole models over Inductor's")
    allowed: Column = ("norms' bytes, ms", lambda line: number(line.row.norms_us and line.row.norms_us / 1e3, ".2f"))
    speeds = [row.copy_gb_s for row in results.models if row.copy_gb_s]
    note = f" A copy moves {max(speeds):.0f} GB/s." if speeds else ""
    table = _ways_table([*WAY_TIMES, allowed], results, note)
    return "\n\n".join([*([picture] if model_ratios(results) else []), *([table] if table else [])])


def _failures(results: DeviceResults) -> str:
    return "\n".join(f"- {line}: {line.figures.failure}" for row in results.models for line in row.lines if line.failed)


def _main_models(results: DeviceResults) -> str:
    """The backend beside Inductor."""

    def over(column: str, one: str, other: str, read: Callable[[Any], float | None]) -> Column:
        def ratio(row: ModelRow) -> str | None:
            ours, theirs = read(row.way(one)), read(row.way(other))
            return _ratio(ours / theirs) if ours and theirs else None

        return column, ratio

    def timed(column: str, one: str, other: str, place: int) -> Column:
        return column, lambda row: _ratio(ratios[place]) if (ratios := row.way(one).over.get(other)) else None

    rows = [row for row in results.models if (row.chain, row.layout) in _MAIN_MODELS and row.way("normfuse").us]
    rows.sort(key=lambda row: _MAIN_MODELS.index((row.chain, row.layout)))
    columns: list[Column] = [
        ("model", lambda row: f"{row.chain}, {row.mode}, {row.layout}"),
        ("Inductor, ms", lambda row: number((row.way("inductor").us or 0) / 1e3, ".1f")),
        ("normfuse, ms", lambda row: number(row.way("normfuse").us / 1e3, ".1f")),
        timed("device", "normfuse", "inductor", 0),
        timed("wall clock", "normfuse", "inductor", 1),
        timed("CUDA graphs", f"normfuse{GRAPHS}", f"inductor{GRAPHS}", 1),
        over("first call", "normfuse", "inductor", attrgetter("first_call_s")),
        over("peak memory", "normfuse", "inductor", attrgetter("peak_mb")),
    ]
    return _with_note(columns, rows, f"{results.setup(rows)}. Last columns: over Inductor's of the same run.")


#: What a page asks for between ``<!-- table: NAME -->`` and ``<!-- /table -->``.
TABLES: Mapping[str, Callable[[DeviceResults], str]] = {
    "times": _main_table,
    "errors": _error_table,
    "captured": lambda results: _rows_table(results, results.captured, CAPTURED),
    "tensor_parallel": lambda results: _rows_table(results, results.tensor_parallel, TENSOR_PARALLEL),
    "commits": _commits_table,
    "family": lambda results: _rows_table(results, results.family, _FAMILY_TIMES[1:]),
    "models": _models_table,
    "models_main": _main_models,
    "models_costs": partial(_ways_table, WAY_COSTS),
    "models_kernels": partial(_ways_table, WAY_KERNELS),
    "models_failures": _failures,
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
