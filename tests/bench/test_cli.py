"""The command line of the bench: what it refuses, and what a run without a GPU prints, writes and returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from tests.bench.refusals import assert_refused

ROOT = Path(__file__).parents[2]
ONE_CELL = ["--chains", "l75", "--dtypes", "float32", "--precisions", "highest", "--shapes", "3x32x64", "--rounds", "1"]


def python(*arguments, check=True):
    """Run it as a user without a GPU would."""
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
        (["--peers", "jax"], "--peers: 'jax' is not one of library, eager, compile, compile-max"),
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
        (["--rounds", "0"], "--rounds: '0' is not a positive integer"),
        (["--rounds", "2.5"], "--rounds: '2.5' is not a positive integer"),
        (["--warm-up", "3"], "unrecognized arguments: --warm-up 3"),
        (["l94"], "unrecognized arguments: l94"),
        (["--grid", "--shapes", "8x64x64"], "--shapes: not allowed with argument --grid"),
        (["--grid", "--chains", "l94,l19"], "--grid: l19 has no grid"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, capsys):
    assert_refused(main, arguments, named, "bench", capsys)


def test_bad_argument_of_the_module():
    result = python("-m", "bench", "--rounds", "many", check=False)
    assert result.returncode == 2
    assert result.stderr == "bench: argument --rounds: 'many' is not a positive integer\n"
    assert not result.stdout


def test_unwritable_json(tmp_path):
    """Known before anything is measured."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "results.json"
    result = python("-m", "bench", *ONE_CELL, "--json", path, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"bench: cannot write {path}: ") and result.stderr.count("\n") == 1
    assert not result.stdout


def test_json_that_is_a_folder_is_left_alone(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    result = python("-m", "bench", *ONE_CELL, "--json", folder, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_small_run(tmp_path):
    """Both modes of one chain beside two peers: a table to read, the same as JSON, and what the times are worth."""
    path = tmp_path / "new" / "results.json"
    result = python("-m", "bench", *ONE_CELL, "--peers", "library,eager", "--rounds", "3", "--json", path)
    assert "The times above mean nothing" in result.stdout
    assert "L75 float32 highest training 3x32x64" in result.stdout
    assert "RED" not in result.stdout
    content = json.loads(path.read_text())
    assert "the times mean nothing" in content["header"]["device"]
    rows = content["rows"]
    assert [(row["mode"], row["peer"]) for row in rows] == [
        (mode, peer) for mode in ("forward", "training") for peer in ("ours", "library", "eager")
    ]
    for row in rows:
        assert (row["chain"], row["dtype"], row["precision"], row["shape"]) == ("L75", "float32", "highest", "3x32x64")
        assert row["red"] is False and row["failure"] is None and row["rounds"] == 3
        assert row["median_us"] > 0 and row["ratio"] > 0 and row["tflops"] > 0 and row["host_us"] is None
        assert 0 < row["error_ours"] <= 1.1 * row["error_torch"] + 2e-7
    tensors = {"output", "d_input", "d_weight", "d_linear_bias", "d_norm_weight", "d_norm_bias", "d_bias"}
    assert set(rows[0]["errors"]) == {"output"} and set(rows[-1]["errors"]) == tensors
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_small_run_of_the_convolution(tmp_path):
    """Both memory formats, each beside peers in the same one; the linear chains' options pass it by."""
    path = tmp_path / "results.json"
    arguments = ["--chains", "l19", "--dtypes", "float32,bfloat16", "--precisions", "highest,high,medium"]
    arguments += ["--convolution-shapes", "2x8x16x4x5x3", "--peers", "library,eager", "--json", path]
    result = python("-m", "bench", *arguments)
    assert "L19 float32 highest training 2x8x16x4x5x3 channels_last" in result.stdout
    assert "RED" not in result.stdout
    rows = json.loads(path.read_text())["rows"]
    cells = [(row["dtype"], row["precision"], row["mode"], row["memory_format"]) for row in rows[::3]]
    assert cells == [
        (dtype, precision, mode, memory_format)
        for dtype, precision in (("float32", "highest"), ("float32", "high"), ("bfloat16", None))
        for mode in ("forward", "training")
        for memory_format in ("contiguous", "channels_last")
    ]
    for row in rows:
        assert (row["chain"], row["shape"], row["product"]) == ("L19", "2x8x16x4x5x3", "convolution")
        assert (row["best_pytorch"], row["checked_samples"]) == ("eager", 2)
        assert row["median_us"] > 0 and row["ratio"] > 0 and row["ours_to_best_pytorch"] > 0
    tensors = {"output", "d_input", "d_weight", "d_conv_bias", "d_norm_weight", "d_norm_bias"}
    assert set(rows[0]["errors"]) == {"output"} and set(rows[-1]["errors"]) == tensors


#: A chain that is 1% wrong.
WRONG = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import ops
right = ops.linear_group_norm_min
ops.linear_group_norm_min = lambda *arguments, **options: 1.01 * right(*arguments, **options)
from bench.__main__ import main
sys.exit(main(sys.argv[1:]))
"""

#: One that fails.
FAILING = WRONG.replace("1.01 *", "1 / 0 *")


@pytest.mark.parametrize(
    "program, reason", [(WRONG, "is off by"), (FAILING, "ZeroDivisionError")], ids=["wrong", "failing"]
)
def test_no_times_on_a_red_check(program, reason, tmp_path):
    path = tmp_path / "results.json"
    result = python("-c", program, *ONE_CELL, "--modes", "forward", "--json", path, check=False)
    assert result.returncode == 1
    assert "RED, not timed" in result.stdout and reason in result.stdout
    rows = json.loads(path.read_text())["rows"]
    assert rows and all(row["red"] and row["median_us"] is None and row["ratio"] is None for row in rows)
