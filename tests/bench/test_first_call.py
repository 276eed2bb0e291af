"""``python -m bench first-call``: a process of its own for each chain, and what it finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import first_call
from bench import rows as measured_rows
from bench.__main__ import main
from bench.first_call_process import compiled_kernels
from bench.results import read_all
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


def test_one_chain(tmp_path):
    """In the interpreter, where nothing is compiled; the report takes its rows."""
    path = tmp_path / "first.json"
    arguments = ("first-call", "--chains", "l75", "--dtypes", "bfloat16", "--json", path)
    result = python("-m", "bench", *arguments, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    assert "L75 bfloat16 8x64x64" in result.stdout and "The times above mean nothing" in result.stdout
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["kind"], row["chain"], row["dtype"], row["shape"]) == ("first_call", "L75", "bfloat16", "8x64x64")
    assert row["import_s"] > 0 and row["first_call_s"] > 0 and row["later_call_us"] > 0
    assert (row["kernels_compiled"], row["kernels"], row["kernels_not_run"], row["failure"]) == (0, [], None, None)
    (results,) = read_all([path])
    assert [entry.key.label for entry in results.first_calls] == ["L75 bfloat16"]


def test_kernels_are_not_imported_ahead():
    """So the import that is timed is the first."""
    program = "import sys, bench.first_call_process; print(*sys.modules)"
    modules = set(python("-c", program).stdout.split())
    assert "torch" in modules and not {"ops", "triton_kernels", "triton"} & modules


@pytest.fixture
def process(monkeypatch):
    """Stands for the process that is started; returns what it was started with."""
    started = []

    def answer(returncode=0, stdout="", stderr=""):
        def run(command, *, env, **options):
            cache = Path(env["TRITON_CACHE_DIR"])
            started.append((command, cache, cache.is_dir() and not any(cache.iterdir())))
            return subprocess.CompletedProcess(command, returncode, stdout, stderr)

        monkeypatch.setattr(first_call.subprocess, "run", run)
        return started

    return answer


FOUND = {"import_s": 1.0, "first_call_s": 2.0, "kernels_compiled": 3, "kernels": ["a"] * 3, "kernels_not_run": ["a"]}


def test_an_empty_cache_for_each(process):
    started = process(stdout="noise\n" + json.dumps(FOUND | {"later_call_us": 5.0}) + "\n")
    found = [first_call.measure(chain, "float16", torch.device("cuda")) for chain in ("l94", "l19")]
    assert [cache_is_new for _, _, cache_is_new in started] == [True, True]
    assert started[0][1] != started[1][1] and not started[0][1].exists()
    assert [command[3:] for command, _, _ in started] == [
        ["l94", "float16", "1024x8192x8192", "cuda"],
        ["l19", "float16", "128x64x64x256x256x3", "cuda"],
    ]
    assert [row["memory_format"] for row in found] == [None, "contiguous"]
    assert found[0]["first_call_s"] == 2.0 and found[0]["later_call_us"] == 5.0 and found[0]["failure"] is None


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(measured_rows, "make_header", lambda device: {"device": "none", "date": "2026-01-02"})


def test_failure(process, without_gpu, tmp_path, capsys):
    """Exit status 1, the reason in a row, and the others are still measured."""
    started = process(returncode=1, stderr="Traceback:\n  in a file\nValueError: [no] such thing\n")
    path = tmp_path / "first.json"
    assert main(["first-call", "--chains", "l94,l30", "--dtypes", "float32", "--json", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert len(started) == 2
    assert [row["failure"] for row in rows] == ["ValueError: [no] such thing"] * 2
    assert all(row["first_call_s"] is None for row in rows)
    assert "L30 float32 8x64x64: failed: ValueError: [no] such thing" in capsys.readouterr().out


def test_table(process, without_gpu, capsys):
    process(stdout=json.dumps(FOUND | {"later_call_us": 5.4}))
    assert main(["first-call", "--chains", "l94", "--dtypes", "float32"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "│ L94" in line)
    values = [value.strip() for value in line.strip("│").split("│")]
    assert values == ["L94 float32 8x64x64", "1.00", "2.00", "3", "a", "5"]


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
    assert_refused(main, ["first-call", *arguments], named, "bench first-call", capsys)


def test_unwritable_json(process, without_gpu, tmp_path, capsys):
    """Known before anything is measured."""
    started = process()
    assert main(["first-call", "--json", str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert errors == f"bench first-call: cannot write {tmp_path}: Is a directory\n" and not output
    assert not started


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
from bench.first_call_process import compiled_kernels

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
