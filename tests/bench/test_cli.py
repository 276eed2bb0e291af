"""The command line of the bench: what it refuses, and what a run without a GPU prints, writes and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_configs.command_line import names
from bench.__main__ import main
from bench.results import read_all
from tests.bench.refusals import assert_refused

ROOT = Path(__file__).parents[2]
ONE_CELL = ["--chains", "l75", "--dtypes", "float32", "--precisions", "highest", "--shapes", "3x32x64", "--rounds", "1"]


def python(*arguments, check=True):
    """Run Python as a user without a GPU does."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--chains", "l94,l95"], "--chains: 'l95' is not one of l94, l75, l30, l19"),
        (["--chains", ""], "--chains: '' is not one of"),
        (["--chains"], "--chains: expected one argument"),
        (["--dtypes", "int8"], "--dtypes: 'int8' is not one of bfloat16, float16, float32"),
        (["--precisions", "low"], "--precisions: 'low' is not one of highest, high, medium"),
        (["--modes", "backward"], "--modes: 'backward' is not one of forward, training"),
        (["--peers", "jax"], "--peers: 'jax' is not one of bare, eager, compile, compile-max"),
        (["--shapes", "8x64"], "--shapes: '8x64' is not batch x in_features x out_features"),
        (["--shapes", "8x64x64,0x64x64"], "--shapes: '0x64x64' is not batch x"),
        (["--shapes", "8x64x-64"], "--shapes: '8x64x-64' is not batch x"),
        (
            ["--convolution-shapes", "2x8x8x4x4"],
            "'2x8x8x4x4' is not batch x in_channels x out_channels x height x width",
        ),
        (["--convolution-shapes", "2x8x8x4x4x0"], "--convolution-shapes: '2x8x8x4x4x0' is not batch x"),
        (["--memory-formats", "nhwc"], "--memory-formats: 'nhwc' is not one of contiguous, channels_last"),
        (["--chains", "l19", "--dtypes", "float32", "--precisions", "medium"], "--precisions: l19 has no medium"),
        (
            ["--chains", "group_norm_silu", "--norm-shapes", "1x32x2x3x4", "--memory-formats", "channels_last"],
            "--memory-formats: group_norm_silu has no channels_last",
        ),
        (["--norm-shapes", "32"], "--norm-shapes: '32' is not batch x channels x ..., all positive integers"),
        (["--norm-shapes", "2x32x0"], "--norm-shapes: '2x32x0' is not batch x channels"),
        (["--rounds", "0"], "--rounds: '0' is not a positive integer"),
        (["--rounds", "2.5"], "--rounds: '2.5' is not a positive integer"),
        (["--warm-up", "3"], "unrecognized arguments: --warm-up 3"),
        (
            ["l94"],
            "'l94' is no command: there are captured, first-call, merge, models, products, report, tensor-parallel",
        ),
        (["--grid", "--shapes", "8x64x64"], "--shapes: not allowed with argument --grid"),
        (["--grid", "--chains", "l94,l19"], "--grid: l19 has no grid"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, capsys):
    assert_refused(main, arguments, named, "python -m bench", capsys)


def test_bad_argument_of_the_module():
    result = python("-m", "bench", "--rounds", "many", check=False)
    assert result.returncode == 2
    assert result.stderr == "python -m bench: argument --rounds: 'many' is not a positive integer\n"
    assert not result.stdout


#: What each command needs to be short.
COMMANDS = {
    "": ONE_CELL,
    "captured": ["--chains", "l75", "--dtypes", "float32"],
    "tensor-parallel": ["--chains", "l75"],
}


def test_help():
    """No help text shows an empty default."""
    for command in ("", "captured", "first-call", "merge", "products", "report", "tensor-parallel"):
        result = python("-m", "bench", *command.split(), "--help")
        assert result.stdout.startswith(f"usage: python -m bench {command}".rstrip()), result.stdout
        assert "default: None" not in result.stdout and "default: []" not in result.stdout


def test_name_of_the_console_script():
    program = "import sys; sys.argv = ['/bin/normfuse-bench', 'merge']; from bench.__main__ import main; main()"
    result = python("-c", program, check=False)
    assert result.stderr.startswith("normfuse-bench merge: the following arguments are required: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_output(command, tmp_path):
    """It is refused before anything is measured. A folder is left alone."""
    (tmp_path / "file").touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "file" / "rows.jsonl", folder):
        result = python("-m", "bench", *command.split(), *COMMANDS[command], "--output", path, check=False)
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and not result.stdout
        assert result.stderr.startswith(f"python -m bench {command}".rstrip() + f": cannot write {path}: ")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", folder] and not list(folder.iterdir())


def test_unwritable_turns(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "gpu0"
    result = python("-m", "bench", *ONE_CELL, "--turns", path, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not result.stdout
    assert result.stderr.startswith(f"python -m bench: cannot write {path}: ")


def test_small_run(tmp_path):
    """Both modes of one chain: the errors as a table and as rows, and no times."""
    path = tmp_path / "new" / "results.jsonl"
    result = python("-m", "bench", *ONE_CELL, "--turns", tmp_path / "gpu0", "--output", path)
    assert "L75 float32 highest training 3x32x64" in result.stdout and "Errors against float64" in result.stdout
    assert "RED" not in result.stdout and "µs" not in result.stdout
    assert result.stdout.endswith("Times need a GPU.\n")
    (results,) = read_all([path])
    assert results.device == "CPU, Triton's interpreter"
    forward, training = results.times
    for row in (forward, training):
        assert (row.chain, row.dtype, row.precision, row.shape) == ("L75", "float32", "highest", "3x32x64")
        assert (row.red, row.rounds, row.peers) == (False, None, {})
        assert all(0 < ours <= 1.1 * torch + 2e-7 for ours, torch in row.errors.values())
    tensors = {"output", "d_input", "d_weight", "d_linear_bias", "d_norm_weight", "d_norm_bias", "d_bias"}
    assert set(forward.errors) == {"output"} and set(training.errors) == tensors
    assert [entry.name for entry in path.parent.iterdir()] == ["results.jsonl"]


def test_small_run_of_the_convolution(tmp_path):
    """Both memory formats. The options of the Linear chains have no effect."""
    path = tmp_path / "results.jsonl"
    arguments = ["--chains", "l19", "--dtypes", "float32,bfloat16", "--precisions", "highest,high,medium"]
    arguments += ["--convolution-shapes", "2x8x16x4x5x3", "--output", path]
    result = python("-m", "bench", *arguments)
    assert "L19 float32 highest training 2x8x16x4x5x3 channels_last" in result.stdout
    assert "RED" not in result.stdout
    rows = read_all([path])[0].times
    assert {(row.setting, row.mode, row.memory_format) for row in rows} == {
        (setting, mode, memory_format)
        for setting in ("float32 highest", "float32 high", "bfloat16")
        for mode in ("forward", "training")
        for memory_format in ("contiguous", "channels_last")
    }
    assert len(rows) == 12
    tensors = {"output", "d_input", "d_weight", "d_conv_bias", "d_norm_weight", "d_norm_bias"}
    for row in rows:
        assert (row.chain, row.shape, row.product) == ("L19", "2x8x16x4x5x3", "convolution")
        assert set(row.errors) == (tensors if row.mode == "training" else {"output"})


#: A chain that is 1% wrong.
WRONG = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import ops
right = ops.linear_group_norm_min
ops.linear_group_norm_min = lambda *arguments, **options: 1.01 * right(*arguments, **options)
from autotune_configs.command_line import names
from bench.__main__ import main
from bench.results import read_all
sys.exit(main(sys.argv[1:]))
"""

#: One that fails.
FAILING = WRONG.replace("1.01 *", "1 / 0 *")


@pytest.mark.parametrize(
    "program, reason",
    [(WRONG, "the error of output is "), (FAILING, "ZeroDivisionError")],
    ids=["wrong", "failing"],
)
def test_red_check(program, reason, tmp_path):
    """The exit status is 1, and the row is red."""
    path = tmp_path / "results.jsonl"
    result = python("-c", program, *ONE_CELL, "--modes", "forward", "--output", path, check=False)
    assert result.returncode == 1
    assert "RED, not timed" in result.stdout and reason in result.stdout
    (row,) = read_all([path])[0].times
    assert row.red and row.us is None


@pytest.mark.parametrize("arguments", [["--chains", "l30"], ["merge", "a", "--into", "b"]])
def test_interrupted_while_it_loads(arguments, monkeypatch, capsys):
    """No traceback: what is loaded first takes seconds."""

    class Interrupt:
        def find_spec(self, name, *_):
            if name in ("bench.times", "bench.results"):
                raise KeyboardInterrupt

    for name in ("bench.times", "bench.results"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert main(arguments) == 130
    assert capsys.readouterr() == ("", "")


def test_names_in_any_case():
    """L94, as the README has it; a blank after a comma."""
    assert names(("l94", "l75"))("L94, l75") == ["l94", "l75"]
