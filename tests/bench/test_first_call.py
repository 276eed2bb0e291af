"""``python -m bench first-call``: a process of its own for each chain, and what it finds."""

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from bench import first_call, recording
from bench.__main__ import main
from bench.cells import default_shapes, make_cells
from bench.first_call import compiled_kernels
from bench.results import read_all
from bench.schema import FirstCallRow, Run
from tests.bench.refusals import assert_refused

ROOT = Path(__file__).parents[2]


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_process():
    """The process itself, in the interpreter, where nothing is compiled. A row takes what it prints."""
    arguments = ("-m", "bench.first_call", "l75", "bfloat16", "8x64x64", "cpu")
    result = python(*arguments, TRITON_INTERPRET="1", TRITON_CACHE_DIR="/nonexistent")
    assert result.returncode == 0, result.stderr
    (cell,) = make_cells(["l75"], ["bfloat16"], ["forward"], default_shapes(on_gpu=False))
    row = FirstCallRow(**cell.identity, **json.loads(result.stdout))
    assert row.import_s > 0 and row.first_call_s > 0 and row.later_call_us > 0
    assert (row.kernels, row.kernels_not_run) == ([], None)


def test_without_a_gpu(process, monkeypatch, capsys):
    started = process()
    monkeypatch.setattr(first_call, "has_gpu", lambda: False)
    assert_refused(main, ["first-call"], "needs a GPU", "python -m bench first-call", capsys)
    assert not started


def test_kernels_are_not_imported_ahead():
    """The import that is timed must be the first."""
    program = "import sys, bench.first_call; print(*sys.modules)"
    modules = set(python("-c", program).stdout.split())
    assert "torch" in modules and not {"ops", "triton_kernels", "triton"} & modules


@pytest.fixture
def process(monkeypatch):
    """Replaces the process that is started, and returns what it was started with."""
    started = []

    def answer(returncode=0, stdout="", stderr=""):
        def run(command, *, env, **options):
            cache = Path(env["TRITON_CACHE_DIR"])
            started.append((command, cache, cache.is_dir() and not any(cache.iterdir())))
            process = subprocess.CompletedProcess(command, returncode, stdout, stderr)
            process.check_returncode()
            return process

        monkeypatch.setattr(first_call.subprocess, "run", run)
        return started

    return answer


FOUND = {"import_s": 1.0, "first_call_s": 2.0, "kernels": ["a"] * 3, "kernels_not_run": ["a"], "later_call_us": 5.4}


def test_an_empty_cache_for_each(process):
    started = process(stdout="noise\n" + json.dumps(FOUND) + "\n")
    found = [
        first_call.measure(cell)
        for cell in make_cells(["l94", "l19"], ["float32"], ["forward"], default_shapes(on_gpu=True))
    ]
    assert [cache_is_new for _, _, cache_is_new in started] == [True, True]
    assert started[0][1] != started[1][1] and not started[0][1].exists()
    assert [command[3:] for command, _, _ in started] == [
        ["l94", "float32", "1024x8192x8192", "cuda"],
        ["l19", "float32", "128x64x64x256x256x3", "cuda"],
    ]
    assert [(row.memory_format, row.precision) for row in found] == [(None, None), ("contiguous", None)]
    assert (found[0].first_call_s, found[0].later_call_us, found[0].failure) == (2.0, 5.4, None)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU."""
    monkeypatch.setattr(first_call, "has_gpu", lambda: True)
    monkeypatch.setattr(first_call, "device_to_measure", lambda: torch.device("cuda"))
    monkeypatch.setattr(recording, "name_of", lambda device: "NVIDIA H200")
    monkeypatch.setattr(recording, "current_run", lambda device: Run(datetime.now(timezone.utc)))


def test_failure(process, gpu, tmp_path, capsys):
    """The exit status is 1, the row has the reason, and the others are still measured."""
    started = process(returncode=1, stderr="Traceback:\n  in a file\nValueError: [no] such thing\n")
    path = tmp_path / "first.jsonl"
    assert main(["first-call", "--chains", "l94,l30", "--dtypes", "float32", "--output", str(path)]) == 1
    (found,) = read_all([path])
    assert len(started) == 2
    assert [(row.failure, row.first_call_s) for row in found.first_call] == [("ValueError: [no] such thing", None)] * 2
    assert "L30 float32 forward 1024x8192x8192: failed: ValueError: [no] such thing" in capsys.readouterr().out


def test_table(process, gpu, capsys):
    process(stdout=json.dumps(FOUND))
    assert main(["first-call", "--chains", "l94", "--dtypes", "float32"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "│ L94" in line)
    values = [value.strip() for value in line.strip("│").split("│")]
    assert values == ["L94 float32 forward 1024x8192x8192", "1.00", "2.00", "3", "`a`", "5"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--chains", "l95"], "--chains: 'l95' is not one of l94, l75, l30, l19"),
        (["--dtypes", "int8"], "--dtypes: 'int8' is not one of bfloat16, float16, float32"),
        (["--shapes", "1x2x3"], "unrecognized arguments: --shapes 1x2x3"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, named, capsys):
    assert_refused(main, ["first-call", *arguments], named, "python -m bench first-call", capsys)


def test_compiled_kernels(tmp_path):
    """One for each binary, by the name that its description has."""
    for folder, file, name in (("A", "short", "a_long_name"), ("B", "other", None), ("C", "other", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{file}.cubin").touch()
        (tmp_path / folder / f"{file}.ptx").touch()
        if name:
            (tmp_path / folder / f"{file}.json").write_text(json.dumps({"name": name}))
    assert compiled_kernels(tmp_path) == ["a_long_name", "other", "other"]
    assert compiled_kernels(tmp_path / "D") == []


#: Two variants of one kernel, for Hopper.
COMPILE = """
import os
from pathlib import Path
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.first_call import compiled_kernels

@triton.jit
def fill(output, SIZE: tl.constexpr):
    tl.store(output + tl.arange(0, SIZE), 1.0)

for size in (16, 32):
    triton.compile(ASTSource(fill, {"output": "*fp32"}, {"SIZE": size}), target=GPUTarget("cuda", 90, 32))
print(*compiled_kernels(Path(os.environ["TRITON_CACHE_DIR"])))
"""


@pytest.mark.offline
def test_compiled_kernels_of_triton(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(COMPILE)
    result = python(program, TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))
    assert result.stdout.split() == ["fill", "fill"], result.stderr
