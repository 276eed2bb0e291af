"""``python -m autotune_configs``: sweep (through the interpreter), show and check, and what it says to bad input."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune_configs import __main__ as cli
from autotune_configs import tables
from autotune_configs.gpus import Gpu
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry, linear_problem
from triton_kernels.device import SHARED_MEMORY

CPU_TABLE = Gpu("cpu", 90, 3, SHARED_MEMORY[90])
SMALL = ["sweep", "--names", "group_norm", "--dtypes", "bfloat16", "--shapes"]


def run(*arguments, capsys):
    status = cli.main(list(arguments))
    return status, capsys.readouterr().out


def refused(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(list(arguments))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert exit.value.code == 2
    return line


def test_sweep_and_show(folder, capsys):
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert status == 0 and "group_norm bfloat16 4x32x8: " in output
    (stored,) = tables.read(tables.user_path(CPU_TABLE))
    assert f"{stored.ratio:.3f} x heuristic" in output
    status, output = run(*SMALL, "4x32x8,8x32x8", capsys=capsys)
    assert "4x32x8: in the table already" in output and "8x32x8: " in output
    status, output = run("show", *SMALL[1:], "4x32x8", capsys=capsys)
    assert status == 0 and "its own entry" in output and f"block_m={stored.config['block_m']}" in output


def test_budget(folder, capsys):
    """Too little for the second problem, which the next sweep does."""
    status, output = run(*SMALL, "4x32x8,8x32x8", "--budget-seconds", "0.000001", capsys=capsys)
    assert status == 0 and output.count("no time left") == 2
    assert "2 problems are not finished" in output


def test_show_tells_where_a_config_is_from(folder, capsys):
    tables.store(tables.user_path(GPU), GPU, entry(FIRST, m=24))
    shapes = "24x8192x8192x1,32x8192x8192x1,24x100x8192x1"
    arguments = "show", "--gpu", "nvidia h200", "--names", "linear_bias", "--dtypes", "bfloat16", "--shapes", shapes
    status, output = run(*arguments, capsys=capsys)
    text = " ".join(output.replace("│", " ").split())
    assert status == 0
    assert "its own entry" in text and "nearest entry, " in text and "heuristic: no table" in text


BAD = {
    "no command": ([], "the following arguments are required: command"),
    "unknown command": (["tune"], "invalid choice: 'tune'"),
    "unknown kernel": (["sweep", "--names", "l95"], "argument --names: 'l95' is not one of l94, "),
    "unknown dtype": (["sweep", "--dtypes", "int8"], "argument --dtypes: 'int8' is not one of bfloat16, "),
    "unknown pass": (
        ["sweep", "--passes", "sideways"],
        "argument --passes: 'sideways' is not one of forward, backward",
    ),
    "malformed shape": (["sweep", "--shapes", "1024by8192"], "argument --shapes: '1024by8192' is no shape"),
    "shape with zero": (["sweep", "--shapes", "0x8x8"], "argument --shapes: '0x8x8' is no shape"),
    "too few sizes": (
        ["sweep", "--names", "l94", "--shapes", "8x8"],
        "argument --shapes: l94 takes batch x in_features x out_features",
    ),
    "sizes of another": (
        ["sweep", "--names", "l94,group_norm", "--shapes", "8x8x8x8"],
        "argument --shapes: l94 takes batch x in_features x out_features",
    ),
    "a kernel without shapes": (["sweep", "--names", "group_norm"], "argument --shapes: group_norm takes m x n x"),
    "budget": (["sweep", "--budget-seconds", "-1"], "argument --budget-seconds: "),
    "unknown GPU": (["show", "--gpu", "GT 710"], "argument --gpu: unknown GPU 'GT 710'"),
    "no such table": (["check", "nowhere.json"], "nowhere.json is no file"),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(cli, "INTERPRETED", "check" not in arguments)
    assert message in refused(*arguments, capsys=capsys)


def test_a_folder_that_cannot_be_written(folder, capsys):
    folder.write_text("a file where the folder should be")
    assert f"cannot write to {folder}" in refused(*SMALL, "4x32x8", capsys=capsys)


def test_without_a_gpu(folder, capsys, monkeypatch):
    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    assert "no GPU is here" in refused(*SMALL, "4x32x8", capsys=capsys)
    assert "name one with --gpu" in refused("show", capsys=capsys)


def test_check_needs_the_compiler(folder, capsys):
    assert "TRITON_INTERPRET" in refused("check", capsys=capsys)


@pytest.mark.offline
def test_check_compiles_the_entries(folder, capsys):
    """What cannot be compiled or fit, or is no config, is found."""
    path = tables.user_path(GPU)
    for config, m in ((FIRST, 1024), (SECOND, 2048)):
        tables.store(path, GPU, entry(config, m=m, n=256, k=256))
    status, output = run("check", str(path), "--processes", "1", capsys=capsys)
    assert status == 0 and "1 tables, 2 different launches compiled, 0 faults" in output
    tables.store(
        path, GPU, entry(SECOND, linear_problem(n=256, k=256, kernel="linear_group_norm_hardtanh", group_size=128))
    )
    path.with_name("notes.json").write_text("notes of mine")
    status, output = run("check", str(path), str(path.with_name("notes.json")), "--processes", "1", capsys=capsys)
    assert status == 1 and "is no valid config" in output and "no table of configs" in output and "2 faults" in output


def test_a_killed_sweep_goes_on(folder, tmp_path):
    """Killed for good, not interrupted: what it had measured is not measured again."""
    command = [sys.executable, "-m", "autotune_configs", *SMALL, "64x512x8"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=root)
    journals = folder / "sweeps" / "cpu"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = [line for file in journals.glob("*.jsonl") for line in file.read_text().splitlines()]
        if len(lines) >= 3:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (journal,) = journals.glob("*.jsonl")
    known = journal.read_text().splitlines()
    assert len(known) >= 3 and not tables.user_path(CPU_TABLE).exists()
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, timeout=300)
    assert finished.returncode == 0, finished.stderr
    (stored,) = tables.read(tables.user_path(CPU_TABLE))
    assert stored.problem.sizes == (64, 512, 8) and not journal.exists()
