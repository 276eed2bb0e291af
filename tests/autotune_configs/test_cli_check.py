"""``check``: every entry of every table is compiled, and an interruption leaves nothing behind."""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_configs import __main__ as program
from autotune_configs import commands as cli
from autotune_configs import reporting, tables
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from tests.autotune_configs.commands import ROOT, refused, run
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry, linear_problem
from tests.autotune_configs.test_worker_pool import wait_until


@pytest.mark.offline
def test_check_names_a_table_that_cannot_be_read(folder, capsys):
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_text(" " * (tables._LARGEST_TABLE + 1))
    status, output = run("check", str(path), capsys=capsys)
    assert status == 1 and "larger than any table" in output and "1 fault" in output


def test_check_needs_the_compiler(folder, capsys):
    assert "TRITON_INTERPRET" in refused("check", capsys=capsys)


@pytest.mark.offline
def test_check_compiles_the_entries(folder, capsys):
    """What cannot be compiled or fit, or is no config, is found."""
    path = tables.user_path(GPU)
    for config, m in ((FIRST, 1024), (SECOND, 2048)):
        tables.store(path, GPU, entry(config, m=m, n=256, k=256))
    status, output = run("check", str(path), "--processes", "1", capsys=capsys)
    assert status == 0 and "1 table, 2 kernel variants compiled, 0 faults" in output
    # Where tiles that hold a group are many, one that does not is not valid.
    other = linear_problem(m=8192, n=8192, k=256, kernel="linear_group_norm_hardtanh", group_size=128)
    tables.store(path, GPU, entry(SECOND, other))
    path.with_name("notes.json").write_text("notes of mine")
    status, output = run("check", str(path), str(path.with_name("notes.json")), "--processes", "1", capsys=capsys)
    assert status == 1 and "is no valid config" in output and "no table of configs" in output and "2 faults" in output


@pytest.mark.parametrize("given, processes", [([], 3), (["--processes", "2"], 2)])
def test_processes_of_a_check(given, processes, folder, monkeypatch):
    """One for each core that this process may use, unless the user says otherwise."""
    asked = []
    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(reporting, "check", lambda paths, kernels, processes, notes: asked.append(processes) or 0)
    assert program.main(["check", *given]) == 0
    assert asked == [processes]


@pytest.mark.offline
def test_check_without_tables_of_ones_own(folder, capsys, monkeypatch):
    """It says where it has looked, and that is no fault."""
    monkeypatch.setattr(tables, "shipped_folder", lambda: folder / "none")
    status, output = run("check", capsys=capsys)
    assert status == 0 and f"no tables of your own in {folder} (No such file or directory)" in output
    folder.mkdir()
    assert f"no tables of your own in {folder}\n" in run("check", capsys=capsys)[1]
    tables.store(tables.user_path(GPU), GPU, entry(m=256, n=256, k=256))
    status, output = run("check", capsys=capsys)
    assert status == 0 and output == "1 table, 1 kernel variant compiled, 0 faults\n"


@pytest.mark.offline
def test_check_of_some_names(folder, capsys):
    path = tables.user_path(GPU)
    norm = Problem("group_norm", "bfloat16", (1024, 8192, 32))
    config = KERNELS["group_norm"].heuristic(norm, GPU)
    for each in (entry(m=256, n=256, k=256), entry(config, norm), entry(problem=Problem("softmax", "bfloat16", (8,)))):
        tables.store(path, GPU, each)
    for names, compiled in (("group_norm", 1), ("l30", 2), ("linear_bias,group_norm", 2), ("l19", 0)):
        status, output = run("check", str(path), "--names", names, "--processes", "1", capsys=capsys)
        assert status == 0 and f"1 table, {compiled} kernel variant{'s' * (compiled != 1)} compiled, 0 faults" in output
    status, output = run("check", str(path), "--processes", "1", capsys=capsys)
    assert status == 1 and "softmax bfloat16 8" in output and "2 kernel variants compiled, 1 fault" in output


@pytest.mark.offline
def test_check_is_interrupted(folder, tmp_path):
    """By Ctrl-C in a terminal, which every process of the group gets: no traceback, and no process is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune_configs", "check", str(tables.shipped_path(GPU)), "--processes", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored in a shell's background job
    )
    assert wait_until(lambda: list((tmp_path / "cache").glob("*/*.cubin")))
    os.killpg(process.pid, signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == ""
    assert re.fullmatch(r"1 table, \d+ kernel variants? compiled, 0 faults, interrupted with [1-9]\d* left\n", output)
    assert wait_until(lambda: not group_is_there(process.pid))


def group_is_there(group: int) -> bool:
    """Whether a process of the group still runs (and does not only wait for its parent to notice its end)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = status.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                return True
    return False


@pytest.mark.parametrize("in_a_process", [True, False])
def test_check_tells_a_fault_of_the_machine(folder, capsys, monkeypatch, in_a_process):
    """It is no fault of the table."""
    error = OSError(errno.ENOSPC, "No space left on device")

    def compile(self, launches, all_launches=True, on_compiled=None):
        if not in_a_process:
            raise error
        for launch in launches:
            on_compiled(launch, error)

    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(reporting.Precompiler, "compile", compile)
    tables.store(tables.user_path(GPU), GPU, entry(m=256, n=256, k=256))
    status, output = run("check", str(tables.user_path(GPU)), capsys=capsys)
    assert status == 1 and "no fault of" in output and "No space left on device" in output and "1 fault" in output
