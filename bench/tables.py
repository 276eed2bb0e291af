"""Results as Markdown: the tables within other pages."""

import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from bench.columns import (
    CAPTURED,
    CHAIN,
    DTYPE,
    MODE,
    NOT_MEASURED,
    PRODUCTS,
    SHAPE,
    TENSOR_PARALLEL,
    WAY_COSTS,
    WAY_KERNELS,
    WAY_TIMES,
    Column,
    field,
    markdown_table,
    number,
    of_first,
    of_ratio,
    pair,
    picture_of,
)
from bench.page import FAMILY_TIMES
from bench.results import BadResult, DeviceResults, chains_by_shape, grouped, model_ratios, runs_of
from bench.schema import COMPILERS, GRAPHS, MODES, OURS, CommitsRow, ModelRow, Row, TimesRow
from bench.sizes import FORMS, TARGET

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
        *map(of_first, (CHAIN, DTYPE)),
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
        *map(of_first, (CHAIN, DTYPE, SHAPE)),
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
    picture = picture_of("pictures", f"models.{results.slug}", "Time of whole models over Inductor's")
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
            return of_ratio(ours / theirs) if ours and theirs else None

        return column, ratio

    def timed(column: str, one: str, other: str, place: int) -> Column:
        return column, lambda row: of_ratio(ratios[place]) if (ratios := row.way(one).over.get(other)) else None

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


#: How README calls the ways to compute a float32 product.
_WAYS_OF_PRODUCTS = {"cublas": "cuBLAS", "tf32": "TF32", "tf32x3": "3xTF32", OURS: "normfuse"}


def _main_products(results: DeviceResults) -> str:
    """Of the four chains' size."""
    rows = [row for row in results.products if row.shape == TARGET["GEMM"]]
    lines = [(name, row.way(way)) for row in rows for way, name in _WAYS_OF_PRODUCTS.items()]
    columns: list[Column] = [
        ("product", itemgetter(0)),
        ("error", lambda line: number(line[1].error, ".1e")),
        ("µs", lambda line: number(line[1].us)),
    ]
    return _with_note(columns, lines, f"{results.device.partition(',')[0]}, {TARGET['GEMM']}.")


#: What a page asks for between ``<!-- table: NAME -->`` and ``<!-- /table -->``.
TABLES: Mapping[str, Callable[[DeviceResults], str]] = {
    "times": _main_table,
    "errors": _error_table,
    "captured": lambda results: _rows_table(results, results.captured, CAPTURED),
    "tensor_parallel": lambda results: _rows_table(results, results.tensor_parallel, TENSOR_PARALLEL),
    "commits": _commits_table,
    "family": lambda results: _rows_table(results, results.family, FAMILY_TIMES[1:]),
    "products": lambda results: _with_note(
        [SHAPE, *PRODUCTS], results.products, _times_setup(results, results.products)
    ),
    "products_main": _main_products,
    "models": _models_table,
    "models_main": _main_models,
    "models_costs": partial(_ways_table, WAY_COSTS),
    "models_kernels": partial(_ways_table, WAY_KERNELS),
    "models_failures": _failures,
}
#: README has room for one device: the one of which such rows were measured last.
_OF_ONE_DEVICE = {
    "times": attrgetter("target"),
    "models_main": attrgetter("models"),
    "products_main": attrgetter("products"),
}
_OPENING, _CLOSING = "<!-- table: {} -->", "<!-- /table -->"
#: A table's name, and its end. That is empty where the next table, or the page's end, comes first.
_PLACE = re.compile(r"<!-- table: ([^>]*) -->.*?(<!-- /table -->|(?=<!-- table:)|\Z)", re.DOTALL)


def _last(rows: Iterable[Row]) -> float:
    """When the last of them was measured, in seconds."""
    return max([run.date.timestamp() for run in runs_of(rows)], default=0.0)


def fill_tables(text: str, devices: Sequence[DeviceResults], page: Path) -> str:
    """The page with each table of these results in its place; BadResult for a table that there is not."""

    def filled(place: re.Match) -> str:
        name = place[1]
        if name not in TABLES:
            raise BadResult(f"{page}: no table is called {name!r}; there are {', '.join(TABLES)}")
        if not place[2]:
            raise BadResult(f"{page}: no {_CLOSING} behind {_OPENING.format(name)}")
        rows_of = _OF_ONE_DEVICE.get(name)
        shown = sorted(devices, key=lambda each: _last(rows_of(each)))[-1:] if rows_of else devices
        tables = [table for results in shown if (table := TABLES[name](results))]
        return "\n\n".join([_OPENING.format(name), *(tables or [NOT_MEASURED]), _CLOSING])

    return _PLACE.sub(filled, text)
