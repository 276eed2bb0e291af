"""A sweep loses nothing when it is stopped, and nothing of another one's is in its way: its journal and its table."""

import errno
import os

import pytest
import torch

from autotune_configs import sweep, tables
from autotune_configs.files import locked
from tests.autotune_configs.sweeps import BEST, GPU, HEURISTIC, OTHER, PROBLEM, run, stored
from triton_kernels.group_norm import GroupNormConfig


@pytest.mark.parametrize("interrupt_after", range(11))
def test_an_interrupted_sweep_goes_on_where_it_stopped(bench, interrupt_after):
    """At most the interrupted config is tried again."""
    bench.interrupt_after = interrupt_after
    with pytest.raises(KeyboardInterrupt):
        run(bench)
    assert stored() == {}
    tried, bench.launched, bench.interrupt_after = bench.launched[:-1], [], None
    run(bench)
    assert not set(tried) & set(bench.launched)
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST


def test_a_journal_cut_off_within_a_line(bench):
    bench.interrupt_after = 6
    with pytest.raises(KeyboardInterrupt):
        run(bench)
    path = sweep.journal_path(PROBLEM, GPU)
    path.write_text(path.read_text()[:-20])
    tried, bench.launched, bench.interrupt_after = bench.launched[:-2], [], None
    run(bench)
    assert not set(tried) & set(bench.launched)
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST
    assert not path.exists(), "a sweep that is through needs it no more"


def test_a_journal_of_another_triton_is_not_believed(bench, monkeypatch):
    bench.interrupt_after = 6
    with pytest.raises(KeyboardInterrupt):
        run(bench)
    tried, bench.launched, bench.interrupt_after = bench.launched[:-1], [], None
    monkeypatch.setattr(sweep.triton, "__version__", "3.99")
    run(bench)
    assert set(tried) <= set(bench.launched)


def test_what_the_table_has_is_passed_over(bench):
    run(bench)
    bench.launched.clear()
    (result,) = run(bench)
    assert result.skipped == "in the table already" and not bench.launched
    run(bench, again=True)
    assert bench.launched


def test_each_problem_is_stored_as_soon_as_it_is_known(bench):
    seen = []
    run(bench, [PROBLEM, OTHER], on_result=lambda result: seen.append(set(stored())))
    assert seen == [{PROBLEM}, {PROBLEM, OTHER}]


def test_too_large_a_problem_is_no_fault_of_a_config(bench):
    """Nothing of it is stored, and the next problem is swept."""
    bench.faults[HEURISTIC] = torch.OutOfMemoryError("CUDA out of memory")
    bench.fault_once = True
    first, second = run(bench, [PROBLEM, OTHER])
    assert first.failed and first.is_red and first.entry is None and "too little memory" in first.skipped
    assert set(stored()) == {OTHER} and second.entry is not None
    (again,) = run(bench)
    assert again.entry is not None, "it is tried again"


def test_a_sweep_cut_short_replaces_nothing_better(bench):
    run(bench)
    best = stored()[PROBLEM]
    (result,) = run(bench, again=True, budget=1)
    assert not result.is_whole and result.entry.ratio > best.ratio
    assert stored()[PROBLEM] == best


def test_a_lost_gpu_ends_the_sweep(bench, monkeypatch):
    """The journal has the config that lost the GPU, so that the next sweep skips it, and no later one."""
    bench.faults[BEST] = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(sweep.Search, "_check_device", lose)
    with pytest.raises(sweep.DeviceLost):
        run(bench)
    assert bench.launched[-1] == BEST
    tried, bench.launched = bench.launched[:], []
    (result,) = run(bench)
    assert not set(tried) & set(bench.launched)
    assert GroupNormConfig(**result.entry.config) != BEST


def lose(search, outcome):
    raise sweep.DeviceLost(outcome.reason)


@pytest.mark.parametrize(
    "line",
    ["[" * 5000, "[]", "5", "notes", '{"triton": null}', b"\xff\xfe", '{"ratio": 1' + "0" * 400 + ', "reason": ""}'],
)
def test_other_lines_in_a_journal_are_passed_over(bench, line):
    path = sweep.journal_path(PROBLEM, GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(line if isinstance(line, bytes) else line.encode())
    run(bench)
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST


def test_a_table_that_cannot_be_written_for_once(bench, monkeypatch):
    """The sweep says so and continues. The next one stores what this one measured."""
    store, errors = tables.store, [OSError(errno.EMFILE, "Too many open files")]

    def store_later(*arguments):
        if errors:
            raise errors.pop()
        store(*arguments)

    monkeypatch.setattr(tables, "store", store_later)
    first, second = run(bench, [PROBLEM, OTHER])
    assert first.is_red and not first.is_whole and "Too many open files" in first.skipped
    assert GroupNormConfig(**first.entry.config) == BEST
    assert set(stored()) == {OTHER} and not second.is_red
    bench.launched.clear()
    (result,) = run(bench)
    assert not bench.launched and result.is_whole and set(stored()) == {PROBLEM, OTHER}


def test_nothing_is_measured_where_the_table_cannot_be_read(bench):
    """The table may have the entry, and could not be written."""
    tables.user_path(GPU).mkdir(parents=True)
    for result in run(bench, [PROBLEM, OTHER]):
        assert result.is_red and not result.is_whole and str(tables.user_path(GPU)) in result.skipped
    assert not bench.launched


def test_a_sweep_puts_a_damaged_table_aside(bench):
    path = tables.user_path(GPU)
    path.parent.mkdir()
    path.write_text("notes of mine")
    with pytest.warns(RuntimeWarning, match=str(path)) as told:
        run(bench, [PROBLEM, OTHER])
    assert set(stored()) == {PROBLEM, OTHER} and len(told) == 1
    assert path.with_name(path.name + ".damaged").read_text() == "notes of mine"


def test_a_journal_that_is_no_file(bench):
    path = sweep.journal_path(PROBLEM, GPU)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    first, second = run(bench, [PROBLEM, OTHER])
    assert first.is_red and str(path) in first.skipped
    assert set(stored()) == {OTHER}


def test_another_sweep_that_does_not_end(bench, monkeypatch):
    """With a budget, the wait for another sweep is limited, too."""
    monkeypatch.setattr(sweep, "_LONGER", 0.0)
    with locked(sweep.journal_path(PROBLEM, GPU)):
        (result,) = run(bench, budget=0)  # the clock of the bench stands still
    assert not result.is_whole and "another process" in result.skipped
