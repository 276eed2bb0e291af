"""How numbers and tables are written, on the console and in Markdown."""

from collections.abc import Iterable, Sequence

from bench.schema import PeerTimes


def number(value: float | None, format: str = ".0f") -> str:
    return "–" if value is None else f"{value:{format}}"


def pair(values: Sequence[float | None] | None) -> str:
    """Two errors, ours and PyTorch's."""
    return "–" if values is None else " / ".join(number(value, ".1e") for value in values)


def against(peer: PeerTimes) -> str:
    """Our time over the peer's, and the peer's own microseconds."""
    if peer.failure:
        return "failed"
    return "–" if peer.ours_over is None else f"{peer.ours_over:.2f} ({number(peer.us)})"


def quotient(above: float | None, below: float | None) -> str:
    return "–" if above is None or not below else f"{above / below:.2f}"


def markdown_table(names: Sequence[object], rows: Iterable[Sequence[object]], left: Sequence[int] = ()) -> str:
    """Columns ``left`` by number are aligned to the left, the others, numbers, to the right."""
    rules = ["---" if index in left else "---:" for index in range(len(names))]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (names, rules, *rows))
