"""``python -m autotune_configs``: every command (sweeps through the interpreter), and its answers to bad input."""

import csv
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from autotune_configs import __main__ as program
from autotune_configs import commands as cli
from autotune_configs import gpus, reporting, tables
from autotune_configs.chains import CHAINS
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.sweep import Result
from tests.autotune_configs.commands import CPU_TABLE, PROBLEM, ROOT, SMALL, refused, run
from tests.autotune_configs.entries import FIRST, GPU, entry


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
        ["sweep", "--names", "l75", "--passes", "backward", "--shapes", "8x64x256"],
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


def test_without_a_gpu(folder, capsys, monkeypatch):
    monkeypatch.setattr(cli, "INTERPRETED", False)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    assert "no GPU is here" in refused(*SMALL, "4x32x8", capsys=capsys)
    for command in ("show", "sweep export -"):
        line = refused(*command.split(), capsys=capsys)
        assert line.startswith(f"python -m autotune_configs {command.removesuffix(' -')}: no GPU is here: ")
        assert "--gpu h200" in line and "show --list" in line


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
    assert "NVIDIA H200 your own nvidia_h200, shipped nvidia_h200, shipped nvidia_h100_80gb_hbm3".split() in lines
    assert "[m, k] @ [n, k].T" in output and "float32" in output and "backward" in output


def test_every_size_has_a_meaning():
    forms = [each.size_names for each in (*CHAINS.values(), *KERNELS.values())]
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


def test_show_csv_has_notes_elsewhere(folder, capsys):
    assert program.main(["show", "--csv", *SMALL[1:], "4x32x8"]) == 0
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == 2 and error == f"no table of your own for cpu in {folder}\n"


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


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "ascii:strict"])
def test_an_output_without_greek_letters(folder, encoding):
    """A sweep goes on: what the encoding lacks is a question mark."""
    process = subprocess.run(
        [sys.executable, "-m", "autotune_configs", *SMALL, "4x32x8,8x32x8", "--quick"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert process.stdout.count(b" x heuristic, ") == 2 and b" ?s, of 1 config" in process.stdout
