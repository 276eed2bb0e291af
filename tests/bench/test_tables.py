"""The console's tables of a run."""

import io
import math

import pytest
from rich.console import Console

from bench import tables
from bench.schema import PeerTimes, TimesRow

PEERS = ["bare", "eager", "compile", "compile-max"]
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
        "ours": PeerTimes(us=9000.4, host_us=41.4, added_mb=2.0),
        "bare": PeerTimes(us=5000.0, ours_over=1.8),
        "eager": PeerTimes(us=18000.0, ours_over=0.5, host_us=99.0),
        "compile": PeerTimes(us=10000.0, ours_over=0.9),
        "compile-max": PeerTimes(failure="[no] compiler"),
    },
)
RED = TimesRow(**CELL, errors=ERRORS | {"d_bias": (math.nan, 1e-4)}, red=True)


def values_of(table):
    """The line of the cell."""
    console = Console(width=240, file=io.StringIO())
    console.print(table)
    (line,) = (line for line in console.file.getvalue().splitlines() if NAME in line)
    return [value.strip() for value in line.strip("│").split("│")][1:]


def test_times():
    expected = ["9000", "1.80 (5000)", "0.50 (18000)", "0.90 (10000)", "failed", "41 (99)", "2.0"]
    assert values_of(tables.time_table([ROW], PEERS)) == expected


def test_times_of_a_red_cell():
    assert values_of(tables.time_table([RED], PEERS)) == ["RED", *["–"] * 6]


def test_errors():
    """The output's errors, and those of the tensor that uses most of its allowance."""
    assert values_of(tables.error_table([ROW])) == [*("1.00e-04", "2.00e-04"), *("1.00e-04",) * 2, "d_weight", "96%"]
    assert values_of(tables.error_table([RED]))[2:] == ["nan", "1.00e-04", "d_bias", "–"]


def test_failures():
    """A bracket in an error is not taken for markup."""
    console = Console(width=240, file=io.StringIO())
    console.print(*tables.failures([ROW]))
    assert console.file.getvalue() == f"{NAME}, compile-max: [no] compiler\n"


@pytest.mark.parametrize(
    "row, line",
    [
        (ROW, "9000 µs, 1.80 x bare, 0.90 x compile"),
        (TimesRow(**CELL, errors=ERRORS), "right"),
        (RED, "RED, not timed: the error of d_bias is nan, PyTorch's 1.0e-04"),
        (TimesRow(**CELL, red=True, peers={"ours": PeerTimes(failure="no")}), "RED, not timed: no"),
    ],
    ids=["timed", "not timed", "red", "failed"],
)
def test_summary(row, line):
    assert tables.summary(row) == f"{NAME}: {line}"
