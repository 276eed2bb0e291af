"""``python -m bench tensor-parallel``: where tensors lie, what is counted as sent, which times make a row, the run."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import tensor_parallel
from bench.cells import default_shapes, make_cells
from bench.results import read_all
from bench.schema import TensorParallelRow, Traffic
from bench.tensor_parallel import ALONE, ON_SHARDS, main
from tests.bench.refusals import assert_refused

ROOT = Path(__file__).parents[2]


def test_run(tmp_path):
    """Two processes without a GPU check their results and count what is sent."""
    path = tmp_path / "rows.jsonl"
    arguments = ["--chains", "l94,l75,l30", "--modes", "training", "--output", str(path)]
    result = subprocess.run(
        [sys.executable, "-m", "bench", "tensor-parallel", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "µs" not in result.stdout and result.stdout.endswith("Times need a GPU.\n")
    (found,) = read_all([path])
    rows = {(row.chain, row.divided): row for row in found.tensor_parallel}
    # The one group of L30's small problem cannot be shared.
    assert set(rows) == {("L30", "batch"), *((chain, how) for chain in ("L94", "L75") for how in ("channels", "batch"))}
    assert "L30 bfloat16 training 8x64x64: not by channels: 1 group of channels" in result.stdout
    for row in rows.values():
        assert (row.gpus, row.red, row.rounds, row.us) == (2, False, None, None) and row.error_ours > 0
        assert row.run.torch == torch.__version__
    # The input's gradient [8, 64]; all parameters' of L94, the weight's and four of a channel each; for L75 the minima
    # of both shards, and the gradient at the minimum.
    assert rows["L94", "channels"].collectives == {"all_reduce": Traffic(count=1, bytes=2 * 8 * 64)}
    assert rows["L94", "batch"].collectives == {"all_reduce": Traffic(count=5, bytes=2 * (64 * 64 + 4 * 64))}
    assert rows["L75", "channels"].collectives == {
        "all_gather_into_tensor": Traffic(count=1, bytes=2 * 2 * 8),
        "all_reduce": Traffic(count=2, bytes=2 * (8 * 64 + 8)),
    }


@pytest.mark.parametrize(
    "name, shape, channels",
    [
        ("weight", (64, 32), 0),
        ("bias", (64,), 0),
        ("bias", (1, 64, 1, 1), 1),
        ("weight", (16, 64, 3, 3), 1),
        ("norm_weight", (64,), 0),
    ],
)
def test_placements(name, shape, channels):
    tensor = torch.empty(shape)
    assert tensor_parallel.placement(name, tensor, "channels") == tensor_parallel.Shard(channels)
    assert tensor_parallel.placement(name, tensor, "batch") == tensor_parallel.Replicate()


def test_placement_of_the_input():
    input = torch.empty(8, 64)
    assert tensor_parallel.placement("input", input, "channels") == tensor_parallel.Replicate()
    assert tensor_parallel.placement("input", input, "batch") == tensor_parallel.Shard(0)


def test_times():
    """A round takes as long as its slowest rank. Ratios are taken within a round."""
    first = {ALONE: [10.0, 20.0, 30.0], ON_SHARDS: [5.0, 5.0, 20.0]}
    second = {ALONE: [12.0, 18.0, 30.0], ON_SHARDS: [4.0, 10.0, 10.0]}
    rounds = tensor_parallel.slowest([first, second])
    assert rounds == {ALONE: [12.0, 20.0, 30.0], ON_SHARDS: [5.0, 10.0, 20.0]}
    row = tensor_parallel.timed(rounds, {ALONE: [7.0], ON_SHARDS: [6.0]})
    assert row == {
        "us": 10.0,
        "alone_us": 20.0,
        "speedup": 2.0,
        "in_a_row_us": 6.0,
        "alone_in_a_row_us": 7.0,
        "rounds": 3,
    }


def test_cells():
    names = [str(cell) for cell in make_cells(["l94", "l19"], ["float32"], ["training"], default_shapes(on_gpu=True))]
    assert names == [
        "L94 float32 highest training 1024x8192x8192",
        "L19 float32 highest training 128x64x64x256x256x3 contiguous",
    ]


def test_cannot_divide():
    (cell,) = make_cells(["l30"], ["bfloat16"], ["forward"], default_shapes(on_gpu=True))
    assert tensor_parallel.cannot_divide(cell, "channels", 2) is None
    assert tensor_parallel.cannot_divide(cell, "batch", 3) is None
    reason = "16 groups of channels cannot be divided by 3"
    assert tensor_parallel.cannot_divide(cell, "channels", 3) == reason


def spawn_of(rows, error=None):
    """Replaces the processes. They write these rows for the cells they are given, then end or are interrupted."""

    def spawn(function, arguments, nprocs):
        work, *_, folder = arguments
        with open(Path(folder) / "rows.0", "wb") as file:
            for (cell, divided), row in zip(work, rows, strict=False):
                pickle.dump(TensorParallelRow(**cell.identity, divided=divided, gpus=nprocs, **row), file)
            file.write(b"\x80")  # the next one's first byte
        if error:
            raise error

    return spawn


RED = {"red": True, "error_ours": 0.5, "error_torch": 0.25}
PROG = "python -m bench tensor-parallel"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def line_of(output):
    (line,) = (line for line in output.splitlines() if "│ L94" in line)
    return [value.strip() for value in line.strip("│").split("│")]


def test_red(capsys):
    """A result that is wrong makes the exit status 1, and has no times."""
    arguments = ["--chains", "l94", "--modes", "forward", "--divided", "batch", "--gpus", "4"]
    assert main(arguments, PROG, spawn_of([RED])) == 1
    values = ["L94 bfloat16 forward 8x64x64", "batch", "4", "red", "red", "nothing", "5.00e-01", "2.50e-01"]
    assert line_of(capsys.readouterr().out) == values


def test_table(capsys):
    """With the times of GPUs."""
    times = {"us": 116.0, "alone_us": 191.0, "speedup": 1.64, "in_a_row_us": 332.0, "alone_in_a_row_us": 192.0}
    row = {"rounds": 30, "collectives": {"all_reduce": Traffic(5, 134_000_000), "all_gather": Traffic(1, 4)}, **times}
    arguments = ["--chains", "l94", "--modes", "forward", "--divided", "batch"]
    assert main(arguments, PROG, spawn_of([row])) == 0
    assert line_of(capsys.readouterr().out)[1:] == [
        *("batch", "2", "191", "116", "1.64", "192, 332"),
        "134 MB in 5 `all_reduce`, 4e-06 MB in 1 `all_gather`",
    ]


def test_interruption(tmp_path):
    """What was measured is kept."""
    path = tmp_path / "rows.jsonl"
    arguments = ["--chains", "l94", "--modes", "forward", "--output", str(path)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments, PROG, spawn_of([RED], KeyboardInterrupt()))
    assert [row.divided for row in read_all([path])[0].tensor_parallel] == ["channels"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--chains", "l95"], "--chains: 'l95' is not one of l94, l75, l30, l19"),
        (["--dtypes", "int8"], "--dtypes: 'int8' is not one of bfloat16, float16, float32"),
        (["--divided", "rows"], "--divided: 'rows' is not one of channels, batch"),
        (["--gpus", "0"], "--gpus: '0' is not a positive integer"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, capsys):
    assert_refused(lambda arguments: main(arguments, PROG), arguments, named, PROG, capsys)


def test_too_few_gpus(monkeypatch, capsys):
    monkeypatch.setattr(tensor_parallel, "device_to_measure", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    named = "argument --gpus: there are 1, not 2\n"
    assert_refused(lambda arguments: main(arguments, PROG), ["--gpus", "2"], named, PROG, capsys)
