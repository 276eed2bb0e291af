"""``python -m bench captured``: which cells and calls, when results count as the same, which times make a row."""

import pytest
import torch

from bench import captured, timing
from bench.__main__ import main
from bench.captured import difference
from bench.cells import default_shapes, make_cells
from bench.results import read_all
from bench.schema import CAPTURED, COMPILED, EAGER, CallTimes, CapturedRow
from tests.bench.refusals import assert_refused

CPU = torch.device("cpu")


def test_cells():
    cells = make_cells(["l94", "l19"], ["bfloat16", "float32"], ["forward", "training"], default_shapes(on_gpu=True))
    assert [str(cell) for cell in cells] == [
        "L94 bfloat16 forward 1024x8192x8192",
        "L94 bfloat16 training 1024x8192x8192",
        "L94 float32 highest forward 1024x8192x8192",
        "L94 float32 highest training 1024x8192x8192",
        "L19 bfloat16 forward 128x64x64x256x256x3 contiguous",
        "L19 bfloat16 training 128x64x64x256x256x3 contiguous",
        "L19 float32 highest forward 128x64x64x256x256x3 contiguous",
        "L19 float32 highest training 128x64x64x256x256x3 contiguous",
    ]
    assert (
        str(make_cells(["l75"], ["float16"], ["forward"], default_shapes(on_gpu=False))[0])
        == "L75 float16 forward 8x64x64"
    )


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
    """In the interpreter, where there are no graphs and nothing is timed."""
    (cell,) = make_cells(["l75"], ["bfloat16"], [mode], default_shapes(on_gpu=False))
    assert captured.measure(cell, 2, CPU) == CapturedRow(
        **cell.identity, calls={EAGER: CallTimes(), COMPILED: CallTimes()}
    )


@pytest.fixture
def calls(monkeypatch):
    """Replaces the calls: by name, the output's value or an error."""
    outputs = {}

    def make_call(name, cell, problem):
        def call():
            if isinstance(outputs[name], Exception):
                raise outputs[name]
            return torch.full((3,), outputs[name]), ()

        return call

    monkeypatch.setattr(captured, "make_call", make_call)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return outputs


def test_times(calls, monkeypatch):
    """On a GPU. Ratios are taken within a round. A call whose result is wrong is not timed."""
    calls.update({EAGER: 1.0, COMPILED: 1.0, CAPTURED: 2.0})
    times = {EAGER: [10.0, 20.0, 40.0], COMPILED: [11.0, 20.0, 36.0]}

    def time_rounds(calls, rounds, clock):
        assert (list(calls), rounds, clock) == ([EAGER, COMPILED], 3, torch.device("cuda"))
        return times

    monkeypatch.setattr(captured, "make_problem", lambda cell, device: None)
    monkeypatch.setattr(captured, "warm_up", lambda call: call())
    loops = {EAGER: [4.0, 5.0, 9.0], COMPILED: [7.0]}, {EAGER: [25.0], COMPILED: [21.0, 24.0, 22.0]}
    monkeypatch.setattr(timing, "device_clock", lambda device: device)
    monkeypatch.setattr(timing, "time_rounds", time_rounds)
    monkeypatch.setattr(timing, "time_loops", lambda calls, synchronize: loops)
    (cell,) = make_cells(["l94"], ["bfloat16"], ["forward"], default_shapes(on_gpu=True))
    row = captured.measure(cell, 3, torch.device("cuda"))
    assert row.rounds == 3
    assert row.calls == {
        EAGER: CallTimes(us=20.0, host_us=5.0, wall_us=25.0),
        COMPILED: CallTimes(us=20.0, over_eager=1.0, host_us=7.0, wall_us=22.0),
        CAPTURED: CallTimes(failure="the output differs from the eager call's by 1.73e+00 of 1.73e+00"),
    }


ONE = ["captured", "--chains", "l94", "--dtypes", "float32", "--modes", "forward"]


def calls_of(path):
    """What the file's only row says of each call."""
    (row,) = read_all([path])[0].captured
    return row.calls


def test_run(calls, tmp_path, capsys):
    """Without a GPU, results are compared, and there is no table of times."""
    calls.update({EAGER: 1.0, COMPILED: 1.0})
    path = tmp_path / "rows.jsonl"
    assert main([*ONE, "--output", str(path)]) == 0
    assert calls_of(path) == {EAGER: CallTimes(), COMPILED: CallTimes()}
    output = capsys.readouterr().out
    assert "L94 float32 highest forward 8x64x64 compile: right" in output and output.endswith("Times need a GPU.\n")
    assert "µs" not in output


@pytest.mark.parametrize(
    "compiled, failure",
    [
        (2.0, "the output differs from the eager call's by 1.73e+00 of 1.73e+00"),
        (ValueError("no\nmore"), "ValueError: no"),
    ],
    ids=["another result", "an error"],
)
def test_failure_of_one(calls, compiled, failure, tmp_path, capsys):
    """The exit status is 1."""
    calls.update({EAGER: 1.0, COMPILED: compiled})
    path = tmp_path / "rows.jsonl"
    assert main([*ONE, "--output", str(path)]) == 1
    assert calls_of(path) == {EAGER: CallTimes(), COMPILED: CallTimes(failure=failure)}
    assert f"compile: failed: {failure}" in capsys.readouterr().out


def test_failure_of_the_eager_call(calls, tmp_path):
    calls.update({EAGER: ValueError("none"), COMPILED: 1.0})
    path = tmp_path / "rows.jsonl"
    assert main([*ONE, "--output", str(path)]) == 1
    assert calls_of(path) == {EAGER: CallTimes(failure="ValueError: none")}


def test_table():
    """One line a cell, red where a call failed or is slower than the eager one."""
    slower = {EAGER: CallTimes(us=5.4, host_us=3.0, wall_us=6.0), COMPILED: CallTimes(us=5.6, over_eager=1.03)}
    failed = {EAGER: CallTimes(us=5.4), CAPTURED: CallTimes(failure="no")}
    as_fast = {EAGER: CallTimes(us=5.4), COMPILED: CallTimes(us=5.4, over_eager=1.02)}
    (cell,) = make_cells(["l94"], ["float32"], ["forward"], default_shapes(on_gpu=False))
    rows = [CapturedRow(**cell.identity, rounds=1, calls=calls) for calls in (slower, failed, as_fast)]
    (table,) = captured.show(rows)
    assert [line.style for line in table.rows] == ["red", "red", None]
    cells = [list(column.cells) for column in table.columns]
    assert cells[1:4] == [["5", "5", "5"], ["1.030", "–", "1.020"], ["–", "failed", "–"]]
    assert cells[4:] == [["3, –, –", "–", "–"], ["6, –, –", "–", "–"]]


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
    assert_refused(main, ["captured", *arguments], named, "python -m bench captured", capsys)
