"""``python -m bench`` without a command: what is timed, and what a row says of it."""

import contextlib

import pytest
import torch

from bench import times, timing
from bench.cells import Cell, default_shapes, make_cells
from bench.chains import CHAINS, FAMILY
from bench.schema import CallTimes, TimesRow

FORWARD = Cell(CHAINS["l30"], "bfloat16", None, "forward", "16x64x64")
TRAINING = Cell(CHAINS["l30"], "bfloat16", None, "training", "16x64x64")
CUDA = torch.device("cuda")
TIMES = {"ours": [8e3, 9e3, 1e4], "bare": [5e3, 5e3, 5e3], "eager": [1.6e4, 1.8e4, 2e4], "compile": [2e4, 3e4, 1e3]}


@pytest.fixture
def clocks(monkeypatch):
    """Replaces the clocks, and keeps what they were asked to time. A peer that is named in it fails."""
    asked = []

    def time_rounds(calls, rounds, clock):
        asked.append(("rounds", *calls))
        return {peer: TIMES[peer] for peer in calls}

    def time_loops(calls, synchronize):
        assert synchronize is torch.cuda.synchronize
        asked.append(("loops", *calls))
        return dict.fromkeys(calls, [5.0, 5.0, 900.0]), dict.fromkeys(calls, [7.0])

    def make_call(peer, cell, problem):
        if peer in asked:
            raise RuntimeError("no compiler")
        return lambda: None

    monkeypatch.setattr(timing, "device_clock", lambda device: device)
    monkeypatch.setattr(timing, "time_rounds", time_rounds)
    monkeypatch.setattr(timing, "time_loops", time_loops)
    monkeypatch.setattr(times, "make_call", make_call)
    monkeypatch.setattr(times, "warm_up", lambda call: call())
    monkeypatch.setattr(times, "measure_memory", lambda call: 2_000_000)
    monkeypatch.setattr(times, "make_problem", lambda cell, device: None)
    return asked


def found(cell):
    return times.time_peers(cell, None, ("ours", "bare", "eager", "compile"), 3, CUDA, contextlib.nullcontext())


def test_times(clocks):
    """Medians of times and of each round's ratios. The loops come after the rounds."""
    assert found(FORWARD) == {
        "rounds": 3,
        "peers": {
            "ours": CallTimes(us=9e3, host_us=5.0, wall_us=7.0),
            "bare": CallTimes(us=5e3, ours_over=1.8, host_us=5.0, wall_us=7.0),
            "eager": CallTimes(us=1.8e4, ours_over=0.5, host_us=5.0, wall_us=7.0),
            "compile": CallTimes(us=2e4, ours_over=0.4, host_us=5.0, wall_us=7.0),
        },
    }
    assert clocks == [(what, "ours", "bare", "eager", "compile") for what in ("rounds", "loops")]


def test_memory_of_a_training_step(clocks):
    """The bare products have none."""
    memory = {peer: each.added_mb for peer, each in found(TRAINING)["peers"].items()}
    assert memory == {"ours": 2.0, "bare": None, "eager": 2.0, "compile": 2.0}


def test_peer_that_fails(clocks):
    """The others are still timed."""
    clocks.append("compile")
    peers = found(FORWARD)["peers"]
    assert peers["compile"] == CallTimes(failure="RuntimeError: no compiler") and peers["eager"].us == 1.8e4


def test_ours_that_fails(clocks):
    """The row is red, and nothing is timed."""
    clocks.append("ours")
    assert found(FORWARD) == {"red": True, "peers": {"ours": CallTimes(failure="RuntimeError: no compiler")}}
    assert clocks == ["ours"]


@pytest.fixture
def checked(monkeypatch, clocks):
    """The row of a cell whose check finds this error of ours."""

    def of(ours, device=CUDA):
        errors = {"output": (1e-4, 2e-4), "d_weight": (ours, 1e-4)}
        row = TimesRow(**TRAINING.identity, errors=errors, away_from_jumps=0.9, red=ours > 1e-4)
        monkeypatch.setattr(times, "check", lambda *arguments: row)
        return times.measure(TRAINING, ["bare"], 3, device, contextlib.nullcontext())

    return of


def test_green_cell_is_timed(checked, clocks):
    row = checked(1e-4)
    assert str(row) == str(TRAINING) and not row.red and row.us == 9e3 and row.rounds == 3
    assert row.errors == {"output": (1e-4, 2e-4), "d_weight": (1e-4, 1e-4)} and row.away_from_jumps == 0.9


def test_red_cell_is_not_timed(checked, clocks):
    row = checked(1e-3)
    assert row.red and not row.peers and row.rounds is None and row.errors["d_weight"] == (1e-3, 1e-4)
    assert not clocks


def test_nothing_is_timed_without_a_gpu(checked, clocks):
    row = checked(1e-4, torch.device("cpu"))
    assert not row.red and not row.peers and row.errors and not clocks


def test_the_lock_is_held_to_check_and_time(checked, clocks, monkeypatch, tmp_path):
    """The lock is free while calls are compiled."""
    held = []

    class Turn(contextlib.AbstractContextManager):
        def __enter__(self):
            held.append(list(clocks))

        def __exit__(self, *exception):
            held.append(list(clocks))

    checked(1e-4)
    clocks.clear()
    times.measure(TRAINING, ["bare"], 3, CUDA, Turn())
    assert held == [[], [], [], [("rounds", "ours", "bare"), ("loops", "ours", "bare")]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("mode", ["forward", "training"])
def test_family_on_a_gpu(name, mode):
    """Every peer is timed, and in training each has its memory."""
    (cell,) = make_cells([name], ["bfloat16"], [mode], default_shapes(on_gpu=False))
    peers = ("bare", "eager", "compile")
    row = times.measure(cell, peers, 2, CUDA, contextlib.nullcontext())
    assert not row.red and tuple(row.peers) == ("ours", *peers)
    assert all(peer.us > 0 and peer.wall_us > 0 and not peer.failure for peer in row.peers.values())
    assert row.closest() is not None and row.peer("bare").ours_over > 0
    assert (row.peer("ours").added_mb is not None) == (row.peer("eager").added_mb is not None) == (mode == "training")
