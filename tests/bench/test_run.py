"""The bench's run: which clock is asked for what."""

import pytest
import torch

from bench import run
from bench.cells import Cell
from bench.linear_chains import L30, LinearShape
from bench.measurement import Measurement

CELL = Cell(L30, "bfloat16", None, "forward", LinearShape(16, 64, 64))


@pytest.fixture
def clocks(monkeypatch):
    """What each clock was asked to time; the host's answers 5 microseconds for all."""
    asked = []

    def time_rounds(calls, rounds, device):
        asked.append(("rounds", *calls))
        return {peer: [20.0] * rounds for peer in calls}

    def time_host(calls, synchronize):
        assert synchronize is torch.cuda.synchronize
        asked.append(("host", *calls))
        return dict.fromkeys(calls, 5.0)

    def make_call(peer, cell, problem):
        if peer == "compile":
            raise RuntimeError("no compiler")
        return lambda: None

    monkeypatch.setattr(run, "time_rounds", time_rounds)
    monkeypatch.setattr(run, "time_host", time_host)
    monkeypatch.setattr(run, "make_call", make_call)
    monkeypatch.setattr(run, "warm_up", lambda call, device: call())
    return asked


def rows(device):
    measurement = Measurement(CELL)
    peers = ["library", "eager", "compile"]
    run._time(measurement, None, peers, 3, torch.device(device))
    return {row["peer"]: row for row in measurement.rows(peers)}


def test_host_time_on_a_gpu(clocks):
    """Of each peer that runs, after its rounds."""
    found = rows("cuda")
    assert clocks == [("rounds", "ours", "library", "eager"), ("host", "ours", "library", "eager")]
    assert {peer: row["host_us"] for peer, row in found.items()} == {
        "ours": 5.0,
        "library": 5.0,
        "eager": 5.0,
        "compile": None,
    }
    assert found["compile"]["failure"] == "RuntimeError: no compiler" and found["eager"]["median_us"] == 20.0


def test_no_host_time_in_the_interpreter(clocks):
    found = rows("cpu")
    assert clocks == [("rounds", "ours", "library", "eager")]
    assert all(row["host_us"] is None for row in found.values())
