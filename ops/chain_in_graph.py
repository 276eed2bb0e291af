"""How a compiled graph names a chain and its arguments: those of the operator ``normfuse::chain``, written and read.

A compiler guards nothing of what the operator does. What that depends on beside tensors and numbers stands in a text,
since compiled graphs are cached by it.
"""

import functools
import itertools
from typing import Any

from ops import convolution, precision
from ops.fingerprint import check, fingerprint

#: The chains that a compiled graph may name.
by_text: dict[str, Any] = {}


def write(
    chain: Any, row: tuple, numbers: tuple, num_groups: Any, eps: Any, geometry: tuple, result: str, opens: bool = False
) -> tuple:
    """The operator's arguments for a call of a chain, or none where it does not take these."""
    sizes, are_tuples = _in_pairs(geometry), all(isinstance(step, (tuple, list)) for step in numbers)
    scalars = [each for step in numbers for each in step] if are_tuples else [None]
    if sizes is None or any(type(each) not in (int, float) for each in (num_groups, eps, *scalars)):
        return ()
    lengths = ",".join([str(len(step)) for step in numbers])
    settings = f"{precision.convolutions_allow_tf32()} {precision.autocast_dtype(row[0])}"
    form = "open" if opens else ""
    text = f"{chain.text} | {_fingerprint(chain.text)} | {lengths} | {result} | {form} | {settings}"
    return text, list(row), scalars, num_groups, eps, sizes


def opened(text: str) -> str:
    """A call's text where a compiler gets the graph, in which images' norms are open."""
    *before, _, settings = text.split(" | ")
    return " | ".join((*before, "open", settings))


def read(
    text: str, row: list, scalars: list[float], num_groups: int, eps: float, sizes: list[int]
) -> tuple[Any, tuple]:
    """The chain that the operator's arguments name, and its own arguments, the last of which is whether it is open."""
    chain, lengths, result, opens = _read(text)
    given = iter(scalars)
    numbers = tuple([tuple([next(given) for _ in range(length)]) for length in lengths])
    named = zip(convolution.DEFAULTS, sizes[::2], sizes[1::2], strict=False)
    geometry = tuple([first if name == "groups" else (first, second) for name, first, second in named])
    return chain, (tuple(row), numbers, num_groups, eps, geometry, result, opens)


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> tuple[Any, list[int], str, bool]:
    """What a text names: the chain, how many numbers each step has, the result's dtype, whether it is open."""
    name, *others = text.split(" | ")
    if name not in by_text:
        raise ValueError(f"{name!r} is no chain of this process: make it first, as an ops.Chain")
    check(others[0])
    _, lengths, result, form, _ = others
    return by_text[name], list(map(int, filter(None, lengths.split(",")))), result, form == "open"


def _fingerprint(text: str) -> str:
    """A chain's, which it has at its first graph: when it was made, its functions' module may not have been whole."""
    return fingerprint(by_text[text].steps)


# The compiler runs it while it traces. Marked by hand as in ops.precision.
_fingerprint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_pairs(geometry: tuple) -> list[int] | None:
    """A convolution's sizes in a row, two each; None where they are no ints or pairs of such."""
    pairs = list(map(pair, geometry))
    are_pairs = all(len(each) == 2 and type(each[0]) is type(each[1]) is int for each in pairs)
    return [*itertools.chain(*pairs)] if are_pairs else None


def pair(value: Any) -> tuple:
    """A convolution's argument as one number or more."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * 2 if len(values) == 1 else values
