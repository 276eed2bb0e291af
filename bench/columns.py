"""Rows as tables, on the console and in Markdown: a table is columns, and a column says what it shows of a row."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from rich.markup import escape
from rich.table import Table

from bench.schema import (
    BARE,
    CALLS,
    KINDS,
    OURS,
    PRODUCT_WAYS,
    PYTORCH,
    CapturedRow,
    FirstCallRow,
    ProductRow,
    TensorParallelRow,
    TimesRow,
)

#: A column's name, and what it shows of a row. A column that is None for every row is left out.
Column = tuple[object, Callable[[Any], object]]

#: In the place of a table of which nothing is known.
NOT_MEASURED = "Not measured."

#: Columns of words. They are aligned to the left, the others, numbers, to the right.
_WORDS = set("cell chain dtype mode shape divided sent product setting of at model way".split())


def number(value: float | None, format: str = ".0f") -> str:
    return "–" if value is None else f"{value:{format}}"


def pair(values: Sequence[float | None] | None) -> str:
    """Two errors, ours and PyTorch's."""
    return "–" if values is None else " / ".join(number(value, ".1e") for value in values)


def of_ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"


def of_first(column: Column) -> Column:
    """A column of lists of rows, which shows what this one does of the first row."""
    name, read = column
    return name, lambda rows: read(rows[0])


def picture_of(folder: str, name: str, what: str) -> str:
    light, dark = (f"{folder}/{name}.{theme}.png" for theme in ("light", "dark"))
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img alt="{what}" src="{light}">\n</picture>'
    )


def lines_of(columns: Iterable[Column], rows: Collection[object]) -> list[list[str]]:
    """The names of the columns of which something is known, then what they show of each row."""
    shown = ([name, *map(read, rows)] for name, read in columns)
    known = [values for values in shown if any(value is not None for value in values[1:])]
    return [["–" if value is None else str(value) for value in line] for line in zip(*known, strict=True)] or [[]]


def markdown_table(columns: Iterable[Column], rows: Collection[object]) -> str:
    names, *lines = lines_of(columns, rows)
    rules = ["---" if name in _WORDS else "---:" for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rules, *lines))


def console_table(
    title: str,
    columns: Iterable[Column],
    rows: Sequence[Any],
    caption: str = "",
    is_red: Callable[[Any], bool] = attrgetter("failed"),
) -> Table:
    names, *lines = lines_of([("cell", str), *columns], rows)
    result = Table(title=title, caption=caption)
    for name in names:
        result.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        result.add_row(*map(escape, line), style="red" if is_red(row) else None)
    return result


CHAIN: Column = ("chain", attrgetter("chain"))
DTYPE: Column = ("dtype", attrgetter("layout"))
MODE: Column = ("mode", attrgetter("mode"))
SHAPE: Column = ("shape", attrgetter("shape"))


def field(name: str, of: str, format: str = ".0f") -> Column:
    return name, lambda row: None if (value := getattr(row, of)) is None else number(value, format)


def of_peer(peer: str, of: str, format: str = ".0f") -> Column:
    title = "normfuse" if peer == OURS else peer
    return title, lambda row: number(getattr(row.peers[peer], of), format) if peer in row.peers else None


def _against(peer: str, row: TimesRow) -> str | None:
    """Our time over the peer's, and the peer's own microseconds."""
    times = row.peer(peer)
    if times.ours_over is None:
        return "failed" if times.failure else "–" if peer in row.peers else None
    return f"{times.ours_over:.2f} ({number(times.us)})"


#: Of rows of ``python -m bench``.
TIMES: list[Column] = [
    ("µs", lambda row: "red" if row.red else number(row.us)),
    *((peer, partial(_against, peer)) for peer in (BARE, *PYTORCH)),
]


def _of_call(row: CapturedRow, name: str, of: str, format: str) -> str:
    call = row.call(name)
    return "failed" if call.failure else number(getattr(call, of), format)


def _of_calls(row: CapturedRow, of: str) -> str | None:
    values = [getattr(row.call(name), of) for name in CALLS]
    return ", ".join(map(number, values)) if any(values) else None


CAPTURED: list[Column] = [
    ("eager, µs", lambda row: _of_call(row, "eager", "us", ".0f")),
    ("compiled / eager", lambda row: _of_call(row, "compile", "over_eager", ".3f")),
    ("graph / eager", lambda row: _of_call(row, "graph", "over_eager", ".3f")),
    ("host, µs: eager, compiled, graph", lambda row: _of_calls(row, "host_us")),
    ("wall clock, µs: eager, compiled, graph", lambda row: _of_calls(row, "wall_us")),
]


def _kernels_not_run(row: FirstCallRow) -> str | None:
    names = row.kernels_not_run
    return None if names is None else ", ".join(f"`{name}`" for name in names) or "none"


FIRST_CALL: list[Column] = [
    ("import ops, s", lambda row: "failed" if row.failure else number(row.import_s, ".2f")),
    field("first forward call, s", "first_call_s", ".2f"),
    ("kernels compiled", lambda row: None if row.failure else len(row.kernels)),
    ("of which not run", _kernels_not_run),
    field("later calls, µs", "later_call_us"),
]


def _sent(row: TensorParallelRow) -> str:
    sent = (f"{each.bytes / 1e6:.3g} MB in {each.count} `{name}`" for name, each in row.collectives.items())
    return ", ".join(sent) or "nothing"


def _in_a_row(row: TensorParallelRow) -> str | None:
    return f"{number(row.alone_in_a_row_us)}, {number(row.in_a_row_us)}" if row.rounds else None


TENSOR_PARALLEL: list[Column] = [
    ("divided", attrgetter("divided")),
    ("GPUs", attrgetter("gpus")),
    ("one GPU, µs", lambda row: "red" if row.red else row.rounds and number(row.alone_us)),
    ("all, µs", lambda row: "red" if row.red else row.rounds and number(row.us)),
    field("speed-up", "speedup", ".2f"),
    ("by the host's clock: one, all, µs", _in_a_row),
    ("sent", _sent),
]


def of_way(name: str, of: str, format: str, scale: float = 1.0) -> Column:
    """A field of ``WayFigures``, of a line that is one way of a model's row."""

    def read(line: Any) -> str | None:
        value = getattr(line.figures, of)
        return None if value is None else number(value * scale, format)

    return name, read


def _over(other: str, line: Any) -> str | None:
    ratios = line.figures.over.get(other)
    return ratios and ", ".join(number(ratio, ".2f") for ratio in ratios)


def _error(what: str, line: Any) -> str | None:
    errors = line.figures.errors.get(what)
    return pair(errors) if errors else None


def _kernels(kind: str, line: Any) -> str | None:
    times = line.figures.kernels.get(kind)
    return times and f"{times.us / 1e3:.2f} ({times.launches})"


WAY_TIMES: list[Column] = [
    of_way("device, ms", "us", ".2f", 1e-3),
    of_way("wall clock, ms", "wall_us", ".2f", 1e-3),
    *((f"over {other}", partial(_over, other)) for other in ("inductor", "inductor-2.15", "inductor-graphs", "eager")),
]
WAY_COSTS: list[Column] = [
    of_way("first call, s", "first_call_s", ".1f"),
    of_way("peak, MB", "peak_mb", ".0f"),
    of_way("saved, MB", "saved_mb", ".1f"),
    *((f"error: {what}", partial(_error, what)) for what in ("output", "gradients")),
    of_way("chains", "chains", ".0f"),
    of_way("open norms", "open_norms", ".0f"),
]
WAY_KERNELS: list[Column] = [(kind, partial(_kernels, kind)) for kind in KINDS]
#: Of a line that is one way of a model's row.
WAY: list[Column] = [*WAY_TIMES, *WAY_COSTS, *WAY_KERNELS]


def _of_product(name: str, row: ProductRow) -> str:
    """A way's microseconds, and ours over them."""
    figures = row.way(name)
    ratio = "" if figures.ours_over is None or name == OURS else f" ({figures.ours_over:.2f})"
    return f"{number(figures.us)}{ratio}"


def _product_errors(what: str, row: ProductRow) -> str:
    return pair([getattr(row.way(name), what) for name in (OURS, "cublas")])


PRODUCTS: list[Column] = [
    *((f"{name}, µs", partial(_of_product, name)) for name in PRODUCT_WAYS),
    *(
        (name, partial(_product_errors, what))
        for name, what in (("error", "error"), ("of positive numbers", "positive_error"), ("bias", "bias"))
    ),
]
