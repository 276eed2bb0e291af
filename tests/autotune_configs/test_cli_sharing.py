"""``sweep export`` and ``sweep merge``: tables from one machine to another."""

import dataclasses

import pytest

from autotune_configs import __main__ as program
from autotune_configs import tables
from autotune_configs.problem import Problem
from tests.autotune_configs.commands import CPU_TABLE, refused, run
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry, linear_problem


def export(path, capsys, *arguments):
    status = program.main(["sweep", "export", str(path), *arguments])
    return status, capsys.readouterr().out


def test_export_and_merge(folder, tmp_path, capsys, monkeypatch):
    """From one machine to another, which has some of the problems."""
    for m in (16, 32, 64):
        tables.store(tables.user_path(GPU), GPU, entry(FIRST, m=m))
    path = tmp_path / "new" / "h200.json"
    status, output = export(path, capsys, "--gpu", "h200")
    assert status == 0 and str(path) in output
    assert path.read_text() == tables.user_path(GPU).read_text()
    assert export("-", capsys, "--gpu", "h200") == (0, path.read_text())

    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path / "other"))
    better, worse = (dataclasses.replace(entry(SECOND, m=m), ratio=ratio) for m, ratio in ((16, 0.8), (32, 0.95)))
    for each in (better, worse):
        tables.store(tables.user_path(GPU), GPU, each)
    cpu = tmp_path / "cpu.json"
    cpu.write_text(tables.render(CPU_TABLE, [entry(SECOND)]))
    status, output = run("sweep", "merge", str(path), str(cpu), capsys=capsys)
    assert status == 0 and output.splitlines() == [
        f"{path}: NVIDIA H200: 1 added, 1 replaced, 1 kept, in {tmp_path}/other/nvidia_h200.json",
        f"{cpu}: cpu: 1 added, 0 replaced, 0 kept, in {tmp_path}/other/cpu.json",
    ]
    assert tables.read(tables.user_path(GPU), GPU) == (better, entry(FIRST, m=32), entry(FIRST, m=64))
    assert tables.read(tables.user_path(CPU_TABLE), CPU_TABLE) == (entry(SECOND),)
    _, output = run("sweep", "merge", str(path), capsys=capsys)
    assert "0 added, 0 replaced, 3 kept" in output


def test_export_of_the_gpu_that_is_here(folder, tmp_path, capsys):
    tables.store(tables.user_path(CPU_TABLE), CPU_TABLE, entry())
    assert export(tmp_path / "cpu.json", capsys)[0] == 0
    assert tables.read_strictly(tmp_path / "cpu.json") == (CPU_TABLE, (entry(),))


def test_export_without_a_table(folder, tmp_path, capsys):
    path = tmp_path / "h200.json"
    line = refused("sweep", "export", str(path), "--gpu", "h200", capsys=capsys)
    assert f"no table of your own for NVIDIA H200: {tables.user_path(GPU)}: " in line
    folder.mkdir()
    tables.user_path(GPU).write_text("notes of mine")
    line = refused("sweep", "export", str(path), "--gpu", "h200", capsys=capsys)
    assert f"{tables.user_path(GPU)}: no table of configs" in line
    tables.user_path(GPU).unlink()
    tables.user_path(GPU).mkdir()
    line = refused("sweep", "export", str(path), "--gpu", "h200", capsys=capsys)
    assert f"cannot read {tables.user_path(GPU)}: " in line
    assert not path.exists()


def test_export_to_what_cannot_be_written(folder, tmp_path, capsys):
    tables.store(tables.user_path(CPU_TABLE), CPU_TABLE, entry())
    line = refused("sweep", "export", str(tmp_path), capsys=capsys)
    assert line == f"python -m autotune_configs sweep export: cannot write {tmp_path}: Is a directory"


REFUSED = {
    "no table": ("notes of mine", "no table of configs"),
    "unknown kernel": (Problem("softmax", "bfloat16", (8, 8)), "unknown kernel 'softmax'"),
    "invalid config": (linear_problem(m=8, k=100), "no valid config of linear_bias bfloat16 8x8192x100x1: "),
    "nothing": (None, "No such file"),
}


@pytest.mark.parametrize("content, message", REFUSED.values(), ids=REFUSED)
def test_merge_refuses_before_anything_is_changed(folder, tmp_path, capsys, content, message):
    sound, bad = tmp_path / "sound.json", tmp_path / "bad.json"
    sound.write_text(tables.render(GPU, [entry()]))
    if isinstance(content, Problem):
        content = tables.render(GPU, [entry(m=16), entry(problem=content)])
    if content:
        bad.write_text(content)
    line = refused("sweep", "merge", str(sound), str(bad), capsys=capsys)
    assert line.startswith(f"python -m autotune_configs sweep merge: {bad}: {message}")
    assert not folder.exists()


def test_merge_into_what_cannot_be_written(folder, tmp_path, capsys):
    folder.write_text("a file where the folder should be")
    (tmp_path / "h200.json").write_text(tables.render(GPU, [entry()]))
    line = refused("sweep", "merge", str(tmp_path / "h200.json"), capsys=capsys)
    assert f"{tmp_path}/h200.json is not merged: {folder}" in line


@pytest.mark.parametrize("command", ["export -", "merge x"])
@pytest.mark.parametrize("option", ["--quick", "--names l94", "--budget-seconds 5", "--processes 1"])
def test_options_of_a_sweep_are_not_those_of_its_commands(folder, capsys, option, command):
    line = refused("sweep", *option.split(), *command.split(), capsys=capsys)
    assert f"{option.split()[0]} is an option of a sweep" in line
