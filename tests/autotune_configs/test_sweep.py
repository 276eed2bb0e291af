"""A sweep finds the fastest correct config, and ends in time."""

import errno
import subprocess
from dataclasses import replace

import pytest

from autotune_configs import lookup, sweep, tables
from autotune_configs.gpus import Gpu
from tests.autotune_configs.entries import entry
from tests.autotune_configs.sweeps import BEST, CPU, GPU, HEURISTIC, OTHER, PROBLEM, cost, run, stored
from triton_kernels.group_norm import GroupNormConfig


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
    monkeypatch.setattr("tests.autotune_configs.sweeps.cost", lambda config: 1.0)
    run(bench)
    entry = stored()[PROBLEM]
    assert GroupNormConfig(**entry.config) == HEURISTIC and entry.ratio == 1.0


def test_a_warming_card_picks_no_winner(bench, monkeypatch):
    """Each timing takes 2% longer than the one before. Interleaved, that is 2% for any config."""
    bench.warming = 1.02
    run(bench)
    assert GroupNormConfig(**stored()[PROBLEM].config) == BEST
    bench.warming = 0.98  # a card that cools, where all configs are alike
    monkeypatch.setattr("tests.autotune_configs.sweeps.cost", lambda config: 1.0)
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


def test_budget_ends_in_time_with_the_best_so_far(bench):
    """The clock counts timings here. The heuristic's config is always tried."""
    first, second = run(bench, [PROBLEM, OTHER], budget=15)
    assert bench.time <= 15 + 2 * 3 + 2 * 9 + 3, "the config under way, and the last comparison"
    assert not first.is_whole and first.entry.ratio < 1
    assert second.skipped == "no time left" and second.entry is None
    first, second = run(bench, [PROBLEM, OTHER])
    assert GroupNormConfig(**first.entry.config) == BEST, "the same command goes on"
    assert first.is_whole and second.is_whole


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
