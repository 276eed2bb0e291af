"""``python -m autotune_configs``: every command (sweeps through the interpreter), and its answers to bad input."""

import contextlib
import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from autotune_configs import __main__ as program
from autotune_configs import commands as cli
from autotune_configs import gpus, reporting, tables
from autotune_configs.chains import CHAINS
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from autotune_configs.sweep import DeviceLost, Result
from tests.autotune_configs.entries import FIRST, GPU, SECOND, entry, linear_problem
from tests.autotune_configs.test_worker_pool import wait_until
from triton_kernels.device import SHARED_MEMORY

ROOT = Path(__file__).parents[2]
CPU_TABLE = Gpu("cpu", 90, 3, SHARED_MEMORY[90])
PROBLEM = Problem("group_norm", "bfloat16", (4, 32, 8))
SMALL = ["sweep", "--names", "group_norm", "--dtypes", "bfloat16", "--shapes"]


def run(*arguments, capsys):
    status = program.main(list(arguments))
    return status, capsys.readouterr().out


def refused(*arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        program.main(list(arguments))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert exit.value.code == 2
    return line


def test_sweep_and_show(folder, capsys):
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert status == 0 and "group_norm bfloat16 4x32x8: " in output
    (stored,) = tables.read(tables.user_path(CPU_TABLE), CPU_TABLE)
    assert f"{stored.ratio:.3f} x heuristic" in output
    status, output = run(*SMALL, "4x32x8,8x32x8", capsys=capsys)
    assert "4x32x8: in the table already" in output and "8x32x8: " in output
    status, output = run("show", *SMALL[1:], "4x32x8", capsys=capsys)
    assert status == 0 and ", this problem: " in output and f"block_m={stored.config['block_m']}" in output


def test_budget(folder, capsys):
    """Too little for any problem."""
    status, output = run(*SMALL, "4x32x8,8x32x8", "--budget-seconds", "0.000001", capsys=capsys)
    assert status == 0 and output.count("no time left") == 2
    assert "Not finished: 2 problems. The same command continues." in output


def test_show_tells_where_cublas_computes_the_product(folder, capsys, monkeypatch):
    """Then only the norm behind it has a config."""
    monkeypatch.setattr(gpus, "takes_hopper_kernels", lambda architecture: architecture == 90)
    monkeypatch.setattr(reporting, "_WIDTH_WHEN_NO_TERMINAL", 400)
    command = ["show", "--gpu", GPU.name, *"--names l94 --dtypes bfloat16 --passes forward --shapes".split()]
    output = run(*command, "512x5120x5120", capsys=capsys)[1]
    assert "l94 bfloat16 512x5120x5120: cuBLAS computes the product" in output
    assert "group_norm bfloat16 512x5120x32" in output and "linear_hardtanh" not in output
    output = run(*command, "1024x8192x8192", capsys=capsys)[1]
    assert "cuBLAS" not in output and "linear_hardtanh" in output
    output = run(*command, "128x2048x16384", capsys=capsys)[1]
    assert "fuller last wave" in output
    monkeypatch.setattr(cli, "INTERPRETED", False)  # then a chain's target is what is shown where no shape is named
    output = run("show", "--gpu", "NVIDIA H100 PCIe", "--names", "l94", "--dtypes", "bfloat16", capsys=capsys)[1]
    assert "l94 bfloat16 1024x8192x8192: cuBLAS computes the product" in output


@pytest.mark.parametrize("has_views, told", [(True, 0), (False, 1)])
def test_show_tells_where_triton_cannot_compile_the_convolutions_for_hopper(
    folder, capsys, monkeypatch, has_views, told
):
    monkeypatch.setattr(gpus, "takes_hopper_kernels", lambda architecture: architecture == 90)
    monkeypatch.setattr(gpus, "takes_hopper_convolutions", lambda architecture: architecture == 90 and has_views)
    command = "show --names l19 --dtypes bfloat16 --shapes 2x8x8x16x16x3 --gpu".split()
    for gpu, expected in ((GPU.name, told), ("NVIDIA B200", 0)):
        status, output = run(*command, gpu, capsys=capsys)
        assert status == 0 and output.count("cannot compile the convolutions for Hopper") == expected


def test_quick(folder, capsys):
    status, output = run(*SMALL, "4x32x8", "--quick", "--again", capsys=capsys)
    assert status == 0 and "of 1 config " in output
    assert "Not finished: 1 problem. Without --again --quick, the same command continues" in output.replace("\n", " ")


def test_show_tells_where_a_config_is_from(folder, capsys):
    tables.store(tables.user_path(GPU), GPU, entry(FIRST, m=24))
    shapes = "24x8192x8192x1,32x8192x8192x1,24x100x8192x1"
    arguments = "show", "--gpu", "nvidia h200", "--names", "linear_bias", "--dtypes", "bfloat16", "--shapes", shapes
    status, output = run(*arguments, capsys=capsys)
    text = " ".join(output.replace("│", " ").split())
    assert status == 0
    assert (
        "your own nvidia_h200, this problem: " in text
        and "your own nvidia_h200, nearest entry 24x8192x8192x1: " in text
        and "heuristic: no table" in text
    )


def test_show_cuts_nothing_off(folder, capsys, monkeypatch):
    monkeypatch.setattr(reporting, "_WIDTH_WHEN_NO_TERMINAL", 40)
    status, output = run("show", *SMALL[1:], "4x32x8", capsys=capsys)
    columns = zip(*(line.split("│")[1:-1] for line in output.splitlines() if "│" in line), strict=True)
    problem, config, origin = ("".join(column).replace(" ", "") for column in columns)
    assert status == 0 and problem == "group_normbfloat164x32x8" and "num_warps=" in config
    assert origin == "heuristic:notablehasanentrynearit"


def test_split_products_are_not_looked_up(folder, capsys, monkeypatch):
    """Where float32 operands are split into float16 ones, their products have a fixed config."""
    arguments = "show", "--gpu", "NVIDIA H200", "--names", "l94", "--dtypes", "bfloat16,float32"
    found = {}
    for splits in (False, True):
        monkeypatch.setattr(Gpu, "splits_float32", property(lambda gpu, splits=splits: splits))
        _, output = run(*arguments, capsys=capsys)
        found[splits] = [kind for kind in ("mish_group_norm bfloat16", "mish_group_norm float32") if kind in output]
    assert found == {False: ["mish_group_norm bfloat16", "mish_group_norm float32"], True: ["mish_group_norm bfloat16"]}


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
    "processes": (["check", "--processes", "0"], "argument --processes: '0' is not a positive integer"),
    "more digits than a size has": (["sweep", "--shapes", "9" * 5000 + "x1x1"], "is no shape"),
    "groups that are not whole": (
        ["sweep", "--names", "group_norm", "--shapes", "8x64x7"],
        "argument --shapes: group_norm bfloat16 8x64x7 is no problem of the kernel: its groups must be whole",
    ),
    "a group wider than the matrix": (["sweep", "--names", "group_norm", "--shapes", "8x64x128"], "must be whole"),
    "nothing to sweep": (
        ["sweep", "--names", "l75", "--passes", "backward", "--shapes", "8x64x64"],
        "has none that is",
    ),
    "unknown GPU": (["show", "--gpu", "GT 710"], "argument --gpu: 'GT 710' is none of NVIDIA A100"),
    "several GPUs": (["show", "--gpu", "h100"], "argument --gpu: 'h100' may be any of NVIDIA H100 80GB HBM3, NVIDIA"),
    "no such table": (["check", "nowhere.json"], "nowhere.json is no file"),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(cli, "INTERPRETED", "check" not in arguments)
    assert message in refused(*arguments, capsys=capsys)


def test_a_folder_that_cannot_be_written(folder, capsys):
    folder.write_text("a file where the folder should be")
    line = refused(*SMALL, "4x32x8", capsys=capsys)
    assert "cannot write your tables" in line and str(folder) in line


def test_a_table_that_cannot_be_read(folder, capsys):
    tables.user_path(CPU_TABLE).mkdir(parents=True)
    line = refused(*SMALL, "4x32x8", capsys=capsys)
    assert "cannot write your tables" in line and str(tables.user_path(CPU_TABLE)) in line


def test_a_folder_that_is_not_known(folder, capsys, monkeypatch):
    """What needs it is refused, all else serves, with one warning."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, "~nosuchuser/x")
    line = refused(*SMALL, "4x32x8", capsys=capsys)
    assert "cannot write your tables" in line and "~nosuchuser/x" in line
    with pytest.warns(RuntimeWarning, match="~nosuchuser/x") as told:
        assert run("show", *SMALL[1:], "4x32x8,8x32x8", capsys=capsys)[0] == 0
    assert len(told) == 1
    with pytest.raises(SystemExit) as exit:
        program.main(["--help"])
    assert exit.value.code == 0 and tables.FOLDER_VARIABLE in capsys.readouterr().out


def test_what_was_not_stored_is_told(folder, capsys, monkeypatch):
    result = Result(PROBLEM, entry(FIRST), is_whole=False, skipped="not stored: no space", error=OSError("no space"))
    monkeypatch.setattr(cli.sweep, "sweep_and_store", lambda *_, on_result, **options: on_result(result))
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert status == 1 and "0.900 x heuristic" in output and "not stored: no space" in output
    assert "The same command continues" in output


@pytest.mark.offline
def test_check_names_a_table_that_cannot_be_read(folder, capsys):
    path = tables.user_path(GPU)
    folder.mkdir()
    path.write_text(" " * (tables._LARGEST_TABLE + 1))
    status, output = run("check", str(path), capsys=capsys)
    assert status == 1 and "larger than any table" in output and "1 fault" in output


def test_the_grid_is_the_linear_chains_and_others_keep_their_target(folder, capsys, monkeypatch):
    """As the README has it: every chain, also that without a grid."""
    monkeypatch.setattr(cli.sweep, "sweep_and_store", lambda problems, *arguments, **options: swept.extend(problems))
    swept = []
    assert run("sweep", "--grid", "--budget-seconds", "600", capsys=capsys)[0] == 0
    assert {problem.sizes[0] for problem in swept if problem.kernel == "linear_bias"} >= {1, 16, 64, 256, 1024, 4096}
    assert {problem.kernel for problem in swept} >= {"image_group_norm", "group_norm_backward"}


def test_a_problem_that_cannot_be_swept_is_told(folder, capsys, monkeypatch):
    result = Result(PROBLEM, skipped="too little memory is free", failed=True)
    monkeypatch.setattr(cli.sweep, "sweep_and_store", lambda *_, on_result, **options: on_result(result))
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert status == 1 and "too little memory is free" in output


def test_a_gpu_that_is_lost(folder, capsys, monkeypatch):
    def lose(*arguments, **options):
        raise DeviceLost("group_norm bfloat16 4x32x8: an illegal memory access")

    monkeypatch.setattr(cli.sweep, "sweep_and_store", lose)
    status, output = run(*SMALL, "4x32x8", capsys=capsys)
    assert (
        status == 1
        and "an illegal memory access" in output
        and "continues after this config, in a new process" in output
    )


def test_without_a_gpu(folder, capsys, monkeypatch):
    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    assert "no GPU is here" in refused(*SMALL, "4x32x8", capsys=capsys)
    for command in ("show", "sweep export -"):
        line = refused(*command.split(), capsys=capsys)
        assert line.startswith(f"python -m autotune_configs {command.removesuffix(' -')}: no GPU is here: ")
        assert "--gpu h200" in line and "show --list" in line


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


def test_a_killed_sweep_goes_on(folder, tmp_path):
    """Killed for good, not interrupted: what it had measured is not measured again."""
    command = [sys.executable, "-m", "autotune_configs", *SMALL, "16x256x8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
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
    known = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    assert len(known) >= 3 and not tables.user_path(CPU_TABLE).exists()
    for outcome in known[1:]:  # so that it shows whether the journal is believed; the first is the heuristic's
        outcome.update(ratio=None, reason="marked")
    journal.write_text("".join(json.dumps(outcome) + "\n" for outcome in known))
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert finished.returncode == 0, finished.stderr
    (stored,) = tables.read(tables.user_path(CPU_TABLE), CPU_TABLE)
    assert stored.problem.sizes == (16, 256, 8) and not journal.exists()
    assert int(re.search(r"\((\d+) refused\)", finished.stdout)[1]) == len(known) - 1


@pytest.mark.parametrize("given, processes", [([], 3), (["--processes", "2"], 2)])
def test_processes_of_a_check(given, processes, folder, monkeypatch):
    """One for each core that this process may use, unless the user says otherwise."""
    asked = []
    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(reporting, "check", lambda paths, kernels, processes, notes: asked.append(processes) or 0)
    assert program.main(["check", *given]) == 0
    assert asked == [processes]


def test_what_can_be_shown_is_listed(folder, capsys):
    tables.store(tables.user_path(GPU), GPU, entry())
    with pytest.raises(SystemExit) as exit:
        program.main(["show", "--list"])
    output = capsys.readouterr().out
    lines = [line.split() for line in output.splitlines()]
    assert exit.value.code == 0
    for name in (*CHAINS, *KERNELS, *(name for names in reporting.SIZES for name in names.split(", "))):
        assert any(name == word.rstrip(",") for line in lines for word in line), name
    assert "l75 linear_group_norm_min batch x in_features x out_features 1024x8192x8192".split() in lines
    assert "NVIDIA L4 none".split() in lines
    assert "NVIDIA H200 your own nvidia_h200, shipped nvidia_h200".split() in lines
    assert "[m, k] @ [n, k].T" in output and "float32" in output and "backward" in output


def test_every_size_has_a_meaning():
    forms = [*(chain.form for chain in CHAINS.values()), *(kernel.size_names for kernel in KERNELS.values())]
    assert {name for form in forms for name in form} == {
        name for names in reporting.SIZES for name in names.split(", ")
    }


def test_show_csv(folder, capsys):
    """One row per problem, nothing else on standard output."""
    tables.store(tables.user_path(GPU), GPU, entry(FIRST, m=24))
    shapes = "24x8192x8192x1,32x8192x8192x1,24x100x8192x1"
    arguments = "show", "--csv", "--gpu", "h200", "--names", "linear_bias", "--dtypes", "bfloat16", "--shapes", shapes
    assert program.main(list(arguments)) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["source"] for row in rows] == ["this problem", "nearest entry", "heuristic"]
    first, _, last = rows
    assert first == {
        "gpu": "NVIDIA H200",
        "kernel": "linear_bias",
        "dtype": "bfloat16",
        "precision": "",
        "layout": "",
        "sizes": "24x8192x8192x1",
        "config": " ".join(f"{name}={value}" for name, value in asdict(FIRST).items()),
        "source": "this problem",
        "table": str(tables.user_path(GPU)),
        "entry": "24x8192x8192x1",
        "ratio": "0.9",
        "microseconds": "12.5",
        "triton": "3.6.0",
        "date": "2026-11-21",
    }
    assert "block_m=" in last["config"] and not any(last[name] for name in ("table", "entry", "ratio", "date"))


@pytest.mark.parametrize("command", ["show --csv", "sweep export -"])
def test_a_reader_that_has_seen_enough(folder, command):
    """As in ``show --csv | head -1``."""
    tables.store(tables.user_path(GPU), GPU, entry())
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune_configs", *command.split(), "--gpu", "h200"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert "rror" not in process.stderr.read() and process.wait() == 1


def test_show_csv_has_notes_elsewhere(folder, capsys):
    assert program.main(["show", "--csv", *SMALL[1:], "4x32x8"]) == 0
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 2 and error == f"no table of your own for cpu in {folder}\n"


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
    assert program.main(["sweep", "export", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"python -m autotune_configs sweep export: cannot write {tmp_path}: Is a directory\n"
    )


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


@pytest.mark.parametrize("command", ["show", "check", "sweep", "sweep export -", "sweep merge x"])
def test_ctrl_c(folder, capsys, monkeypatch, command):
    """A status of its own, and no traceback, whatever it interrupts."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "INTERPRETED", command != "check")
    monkeypatch.setattr(cli.tables, "content", interrupt)
    monkeypatch.setattr(cli.sweep, "sweep_and_store", interrupt)
    assert program.main(command.split()) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_torch_loads(folder, monkeypatch):
    import builtins

    load = builtins.__import__

    def interrupted(name, *arguments, **options):
        if name == "torch":
            raise KeyboardInterrupt
        return load(name, *arguments, **options)

    for name in [name for name in sys.modules if name.startswith("autotune_configs.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("autotune_configs.commands")
    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert program.main(["show"]) == 130


@pytest.mark.parametrize(
    "script, name",
    [("/usr/bin/normfuse-autotune", "normfuse-autotune"), ("x/__main__.py", "python -m autotune_configs")],
)
def test_it_is_named_as_it_was_called(folder, capsys, monkeypatch, script, name):
    monkeypatch.setattr(sys, "argv", [script])
    assert refused("show", "--gpu", "a100", capsys=capsys).startswith(f"{name} show: argument --gpu: ")


def test_help_has_no_default_that_says_nothing(folder, capsys):
    for command in ("", "sweep", "sweep export", "sweep merge", "show", "check"):
        with pytest.raises(SystemExit):
            program.main([*command.split(), "--help"])
        output = capsys.readouterr().out
        assert "None" not in output and "False" not in output and "[]" not in output


def test_a_warning_is_one_line():
    process = subprocess.run(
        [sys.executable, "-m", "autotune_configs", "show", *SMALL[1:], "4x32x8"],
        env={**os.environ, "PYTHONPATH": str(ROOT), tables.FOLDER_VARIABLE: "~nosuchuser/x"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = process.stderr.splitlines()
    assert line.startswith("python -m autotune_configs show: ~nosuchuser/x is skipped: ")
    assert tables.FOLDER_VARIABLE in line


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
