"""What was found in a cell: its rows, and its line in the console's table."""

import io

import pytest
from rich.console import Console

from bench import tables
from bench.cells import Cell
from bench.checking import Check, Comparison
from bench.convolution_chains import L19, ConvolutionShape
from bench.measurement import Measurement
from bench.peers import Memory

PEERS = ["library", "eager", "compile", "compile-max"]


@pytest.fixture
def measurement():
    cell = Cell(L19, "float32", "high", "training", ConvolutionShape(128, 64, 64, 256, 256, 3), "channels_last")
    check = Check([Comparison("output", 1e-4, 2e-4), Comparison("d_weight", 1e-4, 1e-4)], 1.0, 128, 7)
    times = {"ours": [8e3, 9e3, 1e4], "library": [5e3, 5e3, 5e3], "eager": [1.6e4, 1.8e4, 2e4]}
    times |= {"compile": [1e4, 1e4, 1e4], "compile-max": [2e4, 3e4, 1e3]}
    memory = {"ours": Memory(2_000_000, 6_500_000)}
    return Measurement(cell, check, times, host_times={"ours": 41.4, "eager": 99.0}, memory=memory)


def test_rows(measurement):
    ours, library, *others = measurement.rows(PEERS)
    assert (ours["peer"], library["peer"]) == ("ours", "library")
    for row in (ours, library, *others):
        assert (row["chain"], row["precision"], row["memory_format"]) == ("L19", "high", "channels_last")
        assert (row["product"], row["shape"]) == ("convolution", "128x64x64x256x256x3")
        # By the median; compile-max has the fastest round.
        assert (row["best_pytorch"], row["ours_to_best_pytorch"]) == ("compile", 0.9)
        assert (row["checked_samples"], row["float64_samples_at_once"]) == (128, 7)
    assert ours["ratio"] == 1.8 and ours["error_tensor"] == "d_weight"
    assert (ours["peak_memory_mb"], ours["peak_memory_with_results_mb"]) == (2.0, 6.5)
    assert [row["host_us"] for row in (ours, library, *others)] == [41.4, None, 99.0, None, None]
    assert library["peak_memory_mb"] is None and library["peak_memory_with_results_mb"] is None


def test_best_of_those_that_ran(measurement):
    """The library's products are no peer for the whole chain."""
    del measurement.times["compile"]
    assert measurement.best_pytorch == "eager"
    del measurement.times["eager"], measurement.times["compile-max"]
    assert measurement.best_pytorch is None
    assert measurement.rows(["library"])[0]["ours_to_best_pytorch"] is None


def test_rows_of_a_red_cell(measurement):
    row = Measurement(measurement.cell, failures={"ours": "no"}).rows(["eager"])[0]
    assert row["red"] and row["failure"] == "no" and row["memory_format"] == "channels_last"
    assert all(row[name] is None for name in ("best_pytorch", "ours_to_best_pytorch", "checked_samples"))


def values_of(measurement):
    console = Console(width=240, file=io.StringIO())
    console.print(tables.time_table([measurement], PEERS))
    (line,) = (line for line in console.file.getvalue().splitlines() if str(measurement.cell) in line)
    return [value.strip() for value in line.strip("│").split("│")]


def test_table(measurement):
    values = values_of(measurement)
    assert values[1] == "9000"
    assert values[3:7] == ["1.80 (5000)", "0.50 (18000)", "0.90 (10000)", "0.40 (20000)"]
    assert values[7:] == ["0.90 (compile)", "41 (99)", "2.0"]


def test_table_without_host_times(measurement):
    """As in the interpreter."""
    measurement.host_times.clear()
    assert values_of(measurement)[-2:] == ["–", "2.0"]


def test_summary(measurement):
    assert tables.summary(measurement) == f"{measurement.cell}: 9000 µs, 1.80 x library, 0.90 x compile"
