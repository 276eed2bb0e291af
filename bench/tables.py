"""What a run found, as tables to read in a console."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from bench.checking import worst_of
from bench.schema import BARE, OURS, TimesRow
from bench.text import against, number


def table(title: str, first: str, columns: Sequence[str], caption: str, left: Sequence[str] = ()) -> Table:
    """The first column, and those named in ``left``, are aligned to the left."""
    result = Table(title=title, caption=caption)
    result.add_column(first, no_wrap=True)
    for column in columns:
        result.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return result


def time_table(rows: Sequence[TimesRow], peers: Sequence[str]) -> Table:
    """One line a cell: ours, then ours over each peer with the peer's own time."""
    result = table(
        "Times: ours, then ours over each peer (median of the rounds' ratios) and the peer's own µs",
        "cell",
        ("µs", *peers, "host µs", "added MB"),
        "bare: the product or convolution alone, by cuBLAS or cuDNN, in the same memory format;\n"
        "host µs: what the host needs to queue a call (and eager PyTorch's);\n"
        "added MB: at the peak of a training step, beyond weights, gradients, input and output",
    )
    for row in rows:
        ours, eager = row.peer(OURS), row.peer("eager")
        result.add_row(
            str(row),
            "RED" if row.red else number(ours.us),
            *(against(row.peer(peer)) for peer in peers),
            number(ours.host_us) + (f" ({eager.host_us:.0f})" if eager.host_us else ""),
            number(ours.added_mb, ".1f"),
            style="red" if row.red else None,
        )
    return result


def error_table(rows: Sequence[TimesRow]) -> Table:
    """One line a cell: the output's errors and those of the tensor that uses most of its allowance."""
    result = table(
        "Errors against float64",
        "cell",
        ("output: ours", "PyTorch", "worst: ours", "PyTorch", "of", "compared"),
        "of every element of every sample; compared: the part of the output that passes a gradient on, away from jumps",
        left=("of",),
    )
    for row in rows:
        if row.errors:
            worst = worst_of(row.errors)
            result.add_row(
                str(row),
                *(number(error, ".2e") for error in (*row.errors["output"], worst.ours, worst.torch)),
                worst.tensor,
                number(row.away_from_jumps, ".0%"),
                style="red" if row.red else None,
            )
    return result


def failures(rows: Sequence[TimesRow]) -> list[str]:
    """One line for each peer that failed, and why."""
    return [
        escape(f"{row}, {name}: {peer.failure}") for row in rows for name, peer in row.peers.items() if peer.failure
    ]


def summary(row: TimesRow) -> str:
    """One line on a cell, for while the run goes on."""
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
