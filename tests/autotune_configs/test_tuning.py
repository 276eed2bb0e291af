"""Tuning on first use: opt-in, each problem once, never while a graph is captured."""

import errno
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import torch

import autotune_configs
from autotune_configs import lookup, sweep, tables, tuning
from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem
from tests.autotune_configs.entries import GPU, entry
from triton_kernels.group_norm import GroupNormConfig

PROBLEM = Problem("group_norm", "bfloat16", (1024, 8192, 64))
CUDA = torch.device("cuda", 0)
FOUND = GroupNormConfig(2, 512, 4, num_warps=2)


@pytest.fixture
def swept(folder, monkeypatch):
    """The problems that are swept, on a pretended GPU."""
    problems = []

    def sweep_and_store(wanted, device, budget):
        assert device == CUDA and 0 < budget <= 20
        problems.extend(wanted)
        assert not tuning.is_on(), "what the sweep itself runs is not tuned"
        for problem in wanted:
            tables.store(tables.user_path(GPU), GPU, entry(FOUND, problem))
        return [sweep.Result(problem) for problem in wanted]

    monkeypatch.setattr(sweep, "sweep_and_store", sweep_and_store)
    monkeypatch.setattr(Gpu, "of", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return problems


def look_up(M=1024):
    return autotune_configs.group_norm_config("group_norm", torch.bfloat16, M, 8192, 64, CUDA)


def test_off_by_default(swept):
    assert not tuning.is_on()
    look_up()
    assert swept == []


def test_an_unseen_problem_is_tuned_once(swept):
    with autotune_configs.tune_unseen_problems():
        assert tuning.is_on()
        assert look_up() == FOUND
        assert look_up() == FOUND
        assert swept == [PROBLEM]
    assert not tuning.is_on()
    assert look_up() == FOUND, "it serves from then on"


def test_what_a_table_has_is_not_tuned(swept):
    tables.store(tables.user_path(GPU), GPU, entry(FOUND, PROBLEM))
    with autotune_configs.tune_unseen_problems():
        look_up()
    assert swept == []


def test_a_near_entry_is_not_enough(swept):
    tables.store(tables.user_path(GPU), GPU, entry(FOUND, PROBLEM))
    with autotune_configs.tune_unseen_problems():
        look_up(M=2048)
    assert [problem.sizes[0] for problem in swept] == [2048]


def test_another_gpus_entry_is_not_enough(swept, monkeypatch):
    """The table of a similar GPU is used while tuning is off."""
    folder = tables.user_folder().parent / "shipped"
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder)
    kin = replace(GPU, name="kin")
    tables.store(tables.shipped_path(kin), kin, entry(FOUND, PROBLEM))
    lookup.forget()
    assert look_up() == FOUND
    with autotune_configs.tune_unseen_problems():
        look_up()
    assert swept == [PROBLEM]


def test_never_while_a_graph_is_captured(swept, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with autotune_configs.tune_unseen_problems():
        look_up()
        assert swept == []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        look_up()
        assert swept == [PROBLEM], "but afterwards"


def test_not_without_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(sweep, "sweep_and_store", lambda *arguments, **options: pytest.fail("tuned"))
    with autotune_configs.tune_unseen_problems():
        autotune_configs.group_norm_config("group_norm", torch.bfloat16, 1024, 8192, 64, torch.device("cpu"))


def test_an_empty_problem_is_not_tuned(swept):
    with autotune_configs.tune_unseen_problems():
        look_up(M=0)
    assert swept == []


@pytest.mark.parametrize("error", [PermissionError("read-only"), RuntimeError("a stream is capturing")], ids=str)
def test_a_failure_is_told_once_and_the_call_goes_on(swept, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(sweep, "sweep_and_store", fail)
    before = lookup.find(PROBLEM, GPU).config
    with autotune_configs.tune_unseen_problems():
        with pytest.warns(RuntimeWarning, match="is not tuned"):
            assert look_up() == before
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert look_up() == before


def test_a_folder_that_fails_ends_tuning(swept, monkeypatch):
    """The next problem would fail, too, after seconds of sweeping. So there is one warning, and calls continue."""
    tried = []

    def fail(problems, device, budget):
        tried.extend(problems)
        error = PermissionError(errno.EACCES, "Permission denied", str(tables.user_folder()))
        return [sweep.Result(problem, error=error) for problem in problems]

    monkeypatch.setattr(sweep, "sweep_and_store", fail)
    with pytest.warns(RuntimeWarning, match=f"Permission denied: '{tables.user_folder()}'") as told:
        for M in (1024, 2048, 4096):
            with autotune_configs.tune_unseen_problems():
                look_up(M=M)
    assert len(told) == 1 and [problem.sizes[0] for problem in tried] == [1024]


def test_another_process_that_does_not_let_go_costs_one_problem(swept, monkeypatch):
    sweep_and_store = sweep.sweep_and_store

    def fail(problems, device, budget):
        return [sweep.Result(problem, error=TimeoutError("another process holds it")) for problem in problems]

    monkeypatch.setattr(sweep, "sweep_and_store", fail)
    with autotune_configs.tune_unseen_problems():
        with pytest.warns(RuntimeWarning, match="another process holds it"):
            look_up()
        monkeypatch.setattr(sweep, "sweep_and_store", sweep_and_store)
        assert look_up(M=2048) == FOUND


def test_without_a_folder_for_tables(swept, monkeypatch):
    """One warning says that the folder is not known."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, "~nosuchuser/x")
    with autotune_configs.tune_unseen_problems(), pytest.warns(RuntimeWarning, match="~nosuchuser/x") as told:
        look_up()
        look_up(M=2048)
    assert len(told) == 1


def test_a_problem_that_cannot_be_swept_is_told(swept, monkeypatch):
    result = sweep.Result(PROBLEM, skipped="too little memory is free", failed=True)
    monkeypatch.setattr(sweep, "sweep_and_store", lambda *arguments, **options: [result])
    with autotune_configs.tune_unseen_problems(), pytest.warns(RuntimeWarning, match="too little memory"):
        look_up()


def test_threads_tune_one_after_another(swept):
    """Each thread tunes its own problem. In the end the switch is as it was."""
    with autotune_configs.tune_unseen_problems():
        threads = [threading.Thread(target=look_up, args=(M,)) for M in (1024, 2048, 4096)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tuning.is_on()
    assert sorted(problem.sizes[0] for problem in swept) == [1024, 2048, 4096]


def test_can_be_switched_off_within(swept):
    with autotune_configs.tune_unseen_problems(), autotune_configs.tune_unseen_problems(False):
        look_up()
    assert swept == []


@pytest.mark.parametrize("value, is_on", [("1", True), ("on", True), ("0", False), ("", False), ("false", False)])
def test_environment(value, is_on):
    code = "from autotune_configs import tuning; print(tuning.is_on())"
    environment = {**os.environ, tuning.SWITCH_VARIABLE: value}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str(is_on)
