"""``python -m bench tensor-parallel``: where tensors lie, what is counted as sent, which times make a row, the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import rows as measured_rows
from bench import tensor_parallel
from bench.cells import CHAINS
from bench.tensor_parallel import ALONE, ON_SHARDS, main
from tests.bench.refusals import assert_refused

ROOT = Path(__file__).parents[2]


def test_run(tmp_path):
    """Two processes, without a GPU: checked, timed, and what is sent counted."""
    path = tmp_path / "rows.json"
    arguments = ["--chains", "l94,l75,l30", "--modes", "training", "--rounds", "1", "--json", str(path)]
    result = subprocess.run(
        [sys.executable, "-m", "bench.tensor_parallel", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    content = json.loads(path.read_text())
    assert content["header"]["torch"] == torch.__version__
    rows = {(row["chain"], row["divided"]): row for row in content["rows"]}
    # The one group of L30's small problem cannot be shared.
    assert list(rows) == [(chain, divided) for chain in ("L94", "L75") for divided in ("channels", "batch")] + [
        ("L30", "batch")
    ]
    assert "L30 bfloat16 training 8x64x64: not by channels: 1 group of channels" in result.stdout
    for row in rows.values():
        assert (row["kind"], row["gpus"], row["rounds"], row["red"]) == ("tensor_parallel", 2, 1, False)
        assert row["speedup"] == row["alone_us"] / row["median_us"] > 0
        assert row["in_a_row_us"] > 0 and row["alone_in_a_row_us"] > 0 and row["error_ours"] > 0
    # The input's gradient [8, 64]; all parameters' of L94, the weight's and four of a channel each; for L75 the minima
    # of both shards, and the gradient at the minimum.
    assert rows["L94", "channels"]["collectives"] == {"all_reduce": {"count": 1, "bytes": 2 * 8 * 64}}
    assert rows["L94", "batch"]["collectives"] == {"all_reduce": {"count": 5, "bytes": 2 * (64 * 64 + 4 * 64)}}
    assert rows["L75", "channels"]["collectives"] == {
        "all_gather_into_tensor": {"count": 1, "bytes": 2 * 2 * 8},
        "all_reduce": {"count": 2, "bytes": 2 * (8 * 64 + 8)},
    }


@pytest.mark.parametrize(
    "name, chain, shape, channels",
    [
        ("weight", "l94", (64, 32), 0),
        ("bias", "l94", (64,), 0),
        ("bias", "l75", (1, 64, 1, 1), 1),
        ("weight", "l19", (16, 64, 3, 3), 1),
        ("norm_weight", "l19", (64,), 0),
    ],
)
def test_placements(name, chain, shape, channels):
    tensor = torch.empty(shape)
    assert tensor_parallel.placement(CHAINS[chain], name, tensor, "channels") == tensor_parallel.Shard(channels)
    assert tensor_parallel.placement(CHAINS[chain], name, tensor, "batch") == tensor_parallel.Replicate()


def test_placement_of_the_input():
    input = torch.empty(8, 64)
    assert tensor_parallel.placement(CHAINS["l94"], "input", input, "channels") == tensor_parallel.Replicate()
    assert tensor_parallel.placement(CHAINS["l94"], "input", input, "batch") == tensor_parallel.Shard(0)


def test_times():
    """A round lasts until its slowest rank is done, and a ratio is of one round."""
    first = {ALONE: [10.0, 20.0, 30.0], ON_SHARDS: [5.0, 5.0, 20.0]}
    second = {ALONE: [12.0, 18.0, 30.0], ON_SHARDS: [4.0, 10.0, 10.0]}
    rounds = tensor_parallel.slowest([first, second])
    assert rounds == {ALONE: [12.0, 20.0, 30.0], ON_SHARDS: [5.0, 10.0, 20.0]}
    row = tensor_parallel.timed(rounds, {ALONE: [7.0], ON_SHARDS: [6.0]})
    assert row == {
        "median_us": 10.0,
        "alone_us": 20.0,
        "speedup": 2.0,
        "in_a_row_us": 6.0,
        "alone_in_a_row_us": 7.0,
        "rounds": 3,
    }


def test_cells():
    names = [str(cell) for cell in tensor_parallel.make_cells(["l94", "l19"], ["float32"], ["training"], on_gpu=True)]
    assert names == [
        "L94 float32 highest training 1024x8192x8192",
        "L19 float32 highest training 128x64x64x256x256x3 contiguous",
    ]


def test_cannot_divide():
    (cell,) = tensor_parallel.make_cells(["l30"], ["bfloat16"], ["forward"], on_gpu=True)
    assert tensor_parallel.cannot_divide(cell, "channels", 2) is None
    assert tensor_parallel.cannot_divide(cell, "batch", 3) is None
    reason = "16 groups of channels cannot be divided by 3"
    assert tensor_parallel.cannot_divide(cell, "channels", 3) == reason


@pytest.fixture
def red_rows(monkeypatch):
    """Stands for the processes; each row that they write is red, with errors alone."""
    monkeypatch.setattr(measured_rows, "make_header", lambda device: {"device": "none"})
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def spawn(function, arguments, nprocs):
        options, folder = arguments
        rows = [
            {
                "chain": cell.chain.label,
                **{"dtype": cell.dtype, "precision": None, "mode": cell.mode, "shape": str(cell.shape)},
                **{"memory_format": None, "gpus": nprocs, "divided": divided},
                **{"red": True, "error_ours": 0.5, "error_torch": 0.25},
            }
            for cell, divided in options.work
        ]
        (Path(folder) / "rows.0").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return spawn


def test_red(red_rows, capsys):
    """A result that is wrong makes the exit status 1, and has no times."""
    assert main(["--chains", "l94", "--modes", "forward", "--divided", "batch", "--gpus", "4"], red_rows) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "│ L94" in line)
    values = [value.strip() for value in line.strip("│").split("│")]
    assert values == ["L94 bfloat16 forward 8x64x64", "", "4", "batch", *[""] * 5, "5.00e-01", "2.50e-01"]


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
    assert_refused(main, arguments, named, "bench tensor-parallel", capsys)


def test_too_few_gpus(monkeypatch, capsys):
    monkeypatch.setattr(tensor_parallel, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as exit:
        main(["--gpus", "2"])
    assert exit.value.code == 2
    assert capsys.readouterr().err == "bench tensor-parallel: argument --gpus: there are 1, not 2\n"


def test_unwritable_json(red_rows, tmp_path, capsys):
    """Known before anything is measured."""
    assert main(["--json", str(tmp_path)], lambda *arguments, **options: pytest.fail("it measured")) == 2
    output, errors = capsys.readouterr()
    assert errors == f"bench tensor-parallel: cannot write {tmp_path}: Is a directory\n" and not output
