"""``python -m bench captured``: which cells and calls, when results count as the same, which times make a row."""

import json

import pytest
import torch

from bench import captured
from bench import rows as measured_rows
from bench.captured import CALLS, COMPILED, EAGER, difference, main, make_cells, timed
from tests.bench.refusals import assert_refused

CPU = torch.device("cpu")


def test_cells():
    cells = make_cells(["l94", "l19"], ["bfloat16", "float32"], ["forward", "training"], on_gpu=True)
    assert [str(cell) for cell in cells] == [
        "L94 bfloat16 forward 1024x8192x8192",
        "L94 bfloat16 training 1024x8192x8192",
        "L19 bfloat16 forward 128x64x64x256x256x3 contiguous",
        "L19 bfloat16 training 128x64x64x256x256x3 contiguous",
        "L94 float32 highest forward 1024x8192x8192",
        "L94 float32 highest training 1024x8192x8192",
        "L19 float32 highest forward 128x64x64x256x256x3 contiguous",
        "L19 float32 highest training 128x64x64x256x256x3 contiguous",
    ]
    assert str(make_cells(["l75"], ["float16"], ["forward"], on_gpu=False)[0]) == "L75 float16 forward 8x64x64"


def test_times():
    """A ratio is of one round, since a device that warms slows for all."""
    times = {EAGER: [10.0, 20.0, 40.0], COMPILED: [11.0, 20.0, 36.0]}
    row = timed(times, {COMPILED: 7.0}, COMPILED)
    assert row == {"median_us": 20.0, "ratio": 1.0, "host_us": 7.0, "rounds": 3}
    assert timed(times, {}, EAGER) == {"median_us": 20.0, "ratio": 1.0, "host_us": None, "rounds": 3}


def test_difference():
    expected = torch.full((4,), 100.0), torch.full((9,), 1.0)
    assert difference(expected, expected) is None
    nearly = expected[0], expected[1] + torch.finfo(torch.float32).eps / 2
    assert difference(nearly, expected) is None
    further = expected[0], expected[1] + 1e-3
    assert difference(further, expected) == "gradient 1 differs from the eager call's by 3.00e-03 of 3.00e+00"
    assert difference((expected[0] * torch.nan, expected[1]), expected).startswith("the output differs")


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_measure(mode):
    """In the interpreter, where there are no graphs."""
    (cell,) = make_cells(["l75"], ["bfloat16"], [mode], on_gpu=False)
    rows = captured.measure(cell, 2, CPU)
    assert [row["call"] for row in rows] == list(CALLS)[:2]
    for row in rows:
        assert (row["kind"], row["chain"], row["mode"], row["shape"]) == ("captured", "L75", mode, "8x64x64")
        assert row["median_us"] > 0 and row["ratio"] > 0 and row["rounds"] == 2
        assert row["host_us"] is None and row["failure"] is None
    assert rows[0]["ratio"] == 1.0


@pytest.fixture
def calls(monkeypatch):
    """Stand for the cell's work: by name the output's value, or an error."""
    outputs = {}

    def make_call(name, cell, problem):
        def call():
            if isinstance(outputs[name], Exception):
                raise outputs[name]
            return torch.full((3,), outputs[name]), ()

        return call

    monkeypatch.setattr(captured, "make_call", make_call)
    monkeypatch.setattr(measured_rows, "make_header", lambda device: {"device": "none", "date": "2026-01-02"})
    monkeypatch.setattr(captured, "has_gpu", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return outputs


def rows_of(path):
    return {row["call"]: row for row in json.loads(path.read_text())["rows"]}


ONE = ["--chains", "l94", "--dtypes", "float32", "--modes", "forward"]


def test_run(calls, tmp_path, capsys):
    calls.update({EAGER: 1.0, COMPILED: 1.0})
    path = tmp_path / "rows.json"
    assert main([*ONE, "--rounds", "3", "--json", str(path)]) == 0
    rows = rows_of(path)
    assert list(rows) == [EAGER, COMPILED] and rows[COMPILED]["rounds"] == 3
    output = capsys.readouterr().out
    assert "L94 float32 highest forward 8x64x64 compile: " in output and "The times above mean nothing" in output


@pytest.mark.parametrize(
    "compiled, failure",
    [
        (2.0, "the output differs from the eager call's by 1.73e+00 of 1.73e+00"),
        (ValueError("no\nmore"), "ValueError: no"),
    ],
    ids=["another result", "an error"],
)
def test_failure_of_one(calls, compiled, failure, tmp_path, capsys):
    """The others are still timed, and the exit status says it."""
    calls.update({EAGER: 1.0, COMPILED: compiled})
    path = tmp_path / "rows.json"
    assert main([*ONE, "--json", str(path)]) == 1
    rows = rows_of(path)
    assert rows[EAGER]["failure"] is None and rows[EAGER]["median_us"] > 0
    assert rows[COMPILED]["failure"] == failure and rows[COMPILED]["median_us"] is None
    assert f"compile: failed: {failure}" in capsys.readouterr().out


def test_failure_of_the_eager_call(calls, tmp_path):
    calls.update({EAGER: ValueError("none"), COMPILED: 1.0})
    path = tmp_path / "rows.json"
    assert main([*ONE, "--json", str(path)]) == 1
    assert {row["failure"] for row in rows_of(path).values()} == {"ValueError: none"}


def test_table_marks_what_is_slower(calls, capsys):
    row = {"chain": "L94", "dtype": "float32", "precision": None, "mode": "forward", "shape": "8x64x64"}
    row |= {"memory_format": None, "median_us": 5.4, "host_us": 3.0, "failure": None}
    rows = [{**row, "call": EAGER, "ratio": 1.0}, {**row, "call": COMPILED, "ratio": 1.03}]
    assert [line.style for line in captured.table(rows).rows] == [None, "red"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--chains", "l95"], "--chains: 'l95' is not one of l94, l75, l30, l19"),
        (["--rounds", "0"], "--rounds: '0' is not a positive integer"),
        (["--peers", "eager"], "unrecognized arguments: --peers eager"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, capsys):
    assert_refused(main, arguments, named, "bench captured", capsys)


def test_unwritable_json(calls, tmp_path, capsys):
    """Known before anything is measured."""
    assert main([*ONE, "--json", str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert errors == f"bench captured: cannot write {tmp_path}: Is a directory\n" and not output
