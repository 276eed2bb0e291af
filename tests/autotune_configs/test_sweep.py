"""A sweep finds the fastest correct config, loses nothing when it is stopped, and ends in time."""

import errno
import os
import subprocess
from dataclasses import dataclass, replace

import pytest
import torch

from autotune_configs import lookup, sweep, tables
from autotune_configs.files import locked
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from autotune_configs.sweep import sweep_and_store
from tests.autotune_configs.entries import entry
from triton_kernels.device import SHARED_MEMORY
from triton_kernels.group_norm import GroupNormConfig

CPU = torch.device("cpu")
GPU = Gpu("cpu", 90, 3, SHARED_MEMORY[90])  # what the interpreter runs on
PROBLEM = Problem("group_norm", "bfloat16", (1024, 8192, 32))
OTHER = Problem("group_norm", "bfloat16", (64, 8192, 32))
HEURISTIC = KERNELS["group_norm"].heuristic(PROBLEM, GPU)
BEST = GroupNormConfig(1, 1024, HEURISTIC.rows_per_program, num_warps=8)


def cost(config):
    """Milliseconds: a fifth more for each step away from the best, in any field."""
    steps = zip((config.block_m, config.block_columns, config.num_warps), (1, 1024, 8), strict=True)
    return 1.2 ** sum(abs(value.bit_length() - best.bit_length()) for value, best in steps)


@dataclass
class Bench:
    """Replaces the GPU: what runs, how long it takes, and which results are wrong."""

    launched: list
    faults: dict
    warming: float = 1.0  # how much slower each timing is than the one before
    interrupt_after: int | None = None
    fault_once: bool = False
    too_large_in_training: tuple = ()
    time: float = 0.0

    def workload_of(self, problem, device):
        return self

    def fault(self, config):
        self.launched.append(config)
        if self.interrupt_after is not None and len(self.launched) > self.interrupt_after:
            raise KeyboardInterrupt
        fault = self.faults.pop(config, None) if self.fault_once else self.faults.get(config)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def launch(self, config):
        self._last = config

    def launch_variants(self, config):
        """Also the launch that saves values for the backward pass."""
        if config in self.too_large_in_training:
            raise RuntimeError("out of resources")

    def clock(self, call):
        call()
        self.time += 1
        return cost(self._last) * self.warming**self.time


@pytest.fixture
def bench(folder, monkeypatch):
    bench = Bench([], {})
    monkeypatch.setattr(sweep, "workload_of", bench.workload_of)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: bench.time)
    return bench


def run(bench, problems=(PROBLEM,), **options):
    return sweep_and_store(problems, CPU, prepare=lambda call: call, clock=bench.clock, **options)


def stored():
    return {entry.problem: entry for entry in tables.read(tables.user_path(GPU), GPU)}


def test_the_hosts_clock(monkeypatch):
    """Milliseconds from before the call to after it."""
    now = [100.0]
    monkeypatch.setattr(sweep.time, "perf_counter", lambda: now[0])

    def quarter_of_a_second():
        now[0] += 0.25

    assert sweep.time_on_host(quarter_of_a_second) == 250.0


def test_the_interpreters_gpu():
    assert Gpu.of(CPU) == GPU


def test_climbs_to_the_best(bench):
    (result,) = run(bench)
    entry = stored()[PROBLEM]
    assert GroupNormConfig(**entry.config) == BEST
    assert entry == result.entry and result.is_whole and not result.is_red
    assert entry.ratio == pytest.approx(cost(BEST) / cost(HEURISTIC), abs=1e-4)
    assert len(bench.launched) == len(set(bench.launched)), "each config is checked once"


def test_the_heuristic_stays_where_nothing_is_faster(bench, monkeypatch):
    monkeypatch.setattr("tests.autotune_configs.test_sweep.cost", lambda config: 1.0)
    run(bench)
    entry = stored()[PROBLEM]
    assert GroupNormConfig(**entry.config) == HEURISTIC and entry.ratio == 1.0


def test_a_warming_card_picks_no_winner(bench, monkeypatch):
    """Each timing takes 2% longer than the one before. Interleaved, that is 2% for any config."""
    bench.warming = 1.02
    run(bench)
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST
    bench.warming = 0.98  # a card that cools, where all configs are alike
    monkeypatch.setattr("tests.autotune_configs.test_sweep.cost", lambda config: 1.0)
    run(bench, [OTHER])
    assert stored()[OTHER].ratio >= 0.98**2


def test_wrong_results_are_reported_and_never_chosen(bench):
    bench.faults[BEST] = "wrong by 1.0e+00"
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) != BEST
    (outcome,) = (each for each in result.outcomes if each.config == BEST)
    assert outcome.is_wrong and outcome.reason == "wrong by 1.0e+00" and result.is_red


def test_a_config_that_fails_is_passed_over(bench):
    bench.faults[BEST] = ValueError("out of resource\nmore of it")
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) != BEST
    (outcome,) = (each for each in result.outcomes if each.config == BEST)
    assert outcome.reason == "ValueError: out of resource" and not outcome.is_wrong and not result.is_red


def test_nothing_is_stored_where_the_heuristic_itself_is_wrong(bench):
    bench.faults[HEURISTIC] = "not everything is written"
    (result,) = run(bench)
    assert result.entry is None and "not everything is written" in result.skipped and result.is_red
    assert stored() == {}


def wrapped(error):
    """As Triton's interpreter raises it."""
    outer = RuntimeError("in the interpreter")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        wrapped(MemoryError()),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("can't start new thread"),
        subprocess.CalledProcessError(1, ["gcc"], stderr="no space"),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [HEURISTIC, BEST], ids=["heuristic", "best"])
def test_a_fault_of_the_machine_is_none_of_a_config(bench, error, config):
    """Nothing of it is stored, the next problem is swept, and the same command makes up for it."""
    bench.faults[config], bench.fault_once = error, True
    first, second = run(bench, [PROBLEM, OTHER])
    assert first.is_red and not first.is_whole and first.entry is None and isinstance(first.error, OSError)
    assert first.skipped == f"not stored: {first.error}" and set(stored()) == {OTHER} and not second.is_red
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) == BEST and result.is_whole and not result.is_red
    assert config in {outcome.config for outcome in result.outcomes if outcome.ratio is not None}


@pytest.mark.parametrize("all_launches", [False, True], ids=["first", "last"])
def test_nothing_is_refused_that_the_machine_did_not_compile(bench, all_launches):
    class Resources:
        errors = [OSError(errno.ENOSPC, "No space left on device")]

        def refused(self, problem, default, configs, all_launches=all_launches):
            if self.errors and all_launches is wanted:
                raise self.errors.pop()
            return {}

    wanted = all_launches
    (result,) = run(bench, resources=Resources())
    assert result.entry is None and result.is_red and "No space left" in result.skipped and stored() == {}
    (result,) = run(bench, resources=Resources())
    assert GroupNormConfig(**result.entry.config) == BEST and result.is_whole


def test_memory_that_runs_out_in_a_launch_of_training(bench, monkeypatch):
    def fail(config):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(bench, "launch_variants", fail)
        (result,) = run(bench)
    assert result.entry is None and result.is_red and stored() == {}
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) == BEST


def test_a_heuristic_that_fails_is_tried_again(bench):
    """Whatever was wrong may be right the next time: nothing of it is believed."""
    bench.faults[HEURISTIC], bench.fault_once = RuntimeError("Failed to find C compiler"), True
    (result,) = run(bench)
    assert result.failed and "Failed to find C compiler" in result.skipped and stored() == {}
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) == BEST and not result.is_red


@pytest.mark.parametrize("launch", ["fault", "launch_variants"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        KeyError("x"),
        AttributeError("'NoneType' object has no attribute 'get'"),
        TypeError("'NoneType' object is not subscriptable"),
        RuntimeError("0 compatible backends for target (none)"),
        RecursionError("maximum recursion depth exceeded"),
    ],
    ids=str,
)
def test_a_kernel_that_was_cut_off_is_compiled_again(bench, monkeypatch, error, launch):
    run_whole = getattr(bench, launch)

    def damaged(config):
        if config == BEST and not sweep.triton.knobs.compilation.always_compile:
            raise error
        return run_whole(config)

    monkeypatch.setattr(bench, launch, damaged)
    with pytest.warns(RuntimeWarning, match="Triton's cache in .* was damaged: group_norm bfloat16 1024x8192x32 is"):
        (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) == BEST


def test_what_resources_refuse_does_not_run(bench):
    class Resources:
        def refused(self, problem, default, configs, all_launches=False):
            return {config: "spills 900 bytes a thread" for config in configs if config.num_warps == 8}

    (result,) = run(bench, resources=Resources())
    assert result.entry.config["num_warps"] == 4
    assert all(config.num_warps != 8 for config in bench.launched)
    assert any(outcome.reason == "spills 900 bytes a thread" for outcome in result.outcomes)


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


def test_budget_ends_in_time_with_the_best_so_far(bench):
    """The clock counts timings here. The heuristic's config is always tried."""
    first, second = run(bench, [PROBLEM, OTHER], budget=15)
    assert bench.time <= 15 + 2 * 3 + 2 * 9 + 3, "the config under way, and the last comparison"
    assert not first.is_whole and first.entry.ratio < 1
    assert second.skipped == "no time left" and second.entry is None
    first, second = run(bench, [PROBLEM, OTHER])
    assert GroupNormConfig(**first.entry.config) == BEST, "the same command goes on"
    assert first.is_whole and second.is_whole


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


def test_the_best_must_serve_every_launch(bench):
    """Also the launch that saves values for the backward pass. Its resources are checked at the end."""

    class Resources:
        def refused(self, problem, default, configs, all_launches=False):
            return {BEST: "too much shared memory"} if all_launches and BEST in configs else {}

    (result,) = run(bench, resources=Resources())
    assert BEST in bench.launched
    assert GroupNormConfig(**result.entry.config) != BEST and result.entry.ratio < 1


def test_without_resources_every_launch_is_tried(bench):
    """As in tuning on first use, which compiles nothing ahead."""
    bench.too_large_in_training = (BEST,)
    (result,) = run(bench)
    assert GroupNormConfig(**result.entry.config) != BEST and result.entry.ratio < 1


def test_a_quick_sweep_tries_what_tables_know(bench):
    """A quick sweep is not whole. A whole one continues from its outcomes."""
    tables.store(tables.user_path(GPU), GPU, entry(BEST, replace(PROBLEM, dtype="float16")))
    lookup.forget()
    (result,) = run(bench, is_quick=True)
    assert bench.launched == [HEURISTIC, BEST] and not result.is_whole
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST
    (result,) = run(bench, is_quick=True)
    assert bench.launched == [HEURISTIC, BEST] and result.skipped == "in the table already"
    (result,) = run(bench)
    assert result.is_whole and len(bench.launched) > 2 and len(bench.launched) == len(set(bench.launched))
    run(bench, is_quick=True, again=True)
    (result,) = run(bench)
    assert result.skipped == "in the table already", "a whole sweep's entry stays one"


def test_a_sweep_begins_with_what_tables_know(bench):
    """Otherwise the search could stop at a local optimum."""
    far = GroupNormConfig(32, 32, 32, num_warps=1)
    tables.store(tables.user_path(GPU), GPU, entry(far, replace(PROBLEM, sizes=(512, 8192, 32))))
    lookup.forget()
    run(bench)
    assert far in bench.launched


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
