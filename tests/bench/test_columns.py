"""Columns, and the console's tables of a run."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from bench import times
from bench.columns import console_table, lines_of, markdown_table
from bench.schema import CallTimes, TimesRow

CELL = {"chain": "L19", "product": "convolution", "shape": "128x64x64x256x256x3", "dtype": "float32"}
CELL |= {"precision": "high", "mode": "training", "memory_format": "channels_last"}
NAME = "L19 float32 high training 128x64x64x256x256x3 channels_last"
ERRORS = {"output": (1e-4, 2e-4), "d_weight": (1e-4, 1e-4)}
ROW = TimesRow(
    **CELL,
    errors=ERRORS,
    away_from_jumps=0.96,
    rounds=3,
    peers={
        "ours": CallTimes(us=9000.4, host_us=41.4, wall_us=9020.3, added_mb=2.0),
        "bare": CallTimes(us=5000.0, ours_over=1.8),
        "eager": CallTimes(us=18000.0, ours_over=0.5, host_us=99.0, wall_us=18040.0),
        "compile": CallTimes(us=10000.0, ours_over=0.9),
        "compile-max": CallTimes(failure="[no] compiler"),
    },
)
RED = TimesRow(**CELL, errors=ERRORS | {"d_bias": (math.nan, 1e-4)}, red=True)


def shown(table):
    console = Console(width=240, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def values_of(table):
    """The line of the cell."""
    (line,) = (line for line in shown(table) if NAME in line)
    return [value.strip() for value in line.strip("│").split("│")][1:]


def test_times():
    errors, table, failure = times.show([ROW])
    expected = ["9000", "1.80 (5000)", "0.50 (18000)", "0.90 (10000)", "failed", "41 (99)", "9020 (18040)", "2.0"]
    assert values_of(table) == expected


def test_times_of_a_red_cell():
    """There is no table of times where nothing was timed."""
    (red,) = [line for line in shown(times.show([ROW, replace(RED, chain="L94")])[1]) if "L94 float32" in line]
    assert [value.strip() for value in red.strip("│").split("│")][1:] == ["red", *["–"] * 7]
    assert len(times.show([RED])) == 1


def test_errors():
    """The output's errors, and those of the tensor that uses most of its allowance."""
    (errors, *_) = times.show([ROW])
    assert values_of(errors) == [*("1.00e-04", "2.00e-04"), *("1.00e-04",) * 2, "d_weight", "96%"]
    assert values_of(times.show([RED])[0])[2:] == ["nan", "1.00e-04", "d_bias", "–"]


def test_failures():
    """A bracket in an error is not taken for markup."""
    console = Console(width=240, file=io.StringIO())
    console.print(*times.show([ROW])[2:])
    assert console.file.getvalue() == f"{NAME}, compile-max: [no] compiler\n"


NUMBERS = [("mode", str), ("a", lambda value: value * 2), ("b", lambda value: None), ("a", lambda value: value or None)]


def test_columns():
    """One of which nothing is known is left out. What a row does not know is a dash. Names may come twice."""
    assert lines_of(NUMBERS, [0, 3]) == [["mode", "a", "a"], ["0", "0", "–"], ["3", "6", "3"]]
    assert lines_of(NUMBERS, []) == [[]]


def test_alignment():
    """Words to the left, numbers to the right."""
    assert markdown_table(NUMBERS[:2], [3]) == "| mode | a |\n| --- | ---: |\n| 3 | 6 |"
    table = console_table("title", NUMBERS[:2], [3], is_red=lambda value: value == 3)
    assert [column.justify for column in table.columns] == ["left", "left", "right"]
    assert [line.style for line in table.rows] == ["red"]


@pytest.mark.parametrize(
    "row, line",
    [
        (ROW, "9000 µs, 1.80 x bare, 0.90 x compile"),
        (TimesRow(**CELL, errors=ERRORS), "right"),
        (RED, "RED, not timed: the error of d_bias is nan, PyTorch's 1.0e-04"),
        (TimesRow(**CELL, red=True, peers={"ours": CallTimes(failure="no")}), "RED, not timed: no"),
    ],
    ids=["timed", "not timed", "red", "failed"],
)
def test_summary(row, line):
    assert times.summary(row) == f"{NAME}: {line}"
