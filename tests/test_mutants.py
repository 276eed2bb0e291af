"""Mutation testing itself: it finds what no test holds, and an edit elsewhere does not change what is drawn."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"
TOY = '''
def held(value):
    return value + 3


def loose(value):
    """A docstring, whose 1 + 1 is left alone."""
    return value * 5
'''
TESTS = """
from ops.toy import held


def test_held():
    assert held(4) == 7
"""


@pytest.fixture
def toy(tmp_path):
    """A project of one file, with the script; returns what runs the script in it."""
    files = {"ops/__init__.py": "", "ops/toy.py": TOY, "tests/ops/test_toy.py": TESTS, "tests/mutants.txt": ""}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")

    def run(*arguments):
        command = [sys.executable, tmp_path / "scripts" / "mutants.py", "--count", "100", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    return tmp_path, run


def keys(output):
    return [line for line in output.splitlines() if line]


def test_survivors_are_found_and_explained(toy):
    folder, run = toy
    result = run("--processes", "2")
    survivors = [line.removeprefix("survived: ") for line in keys(result.stdout) if line.startswith("survived: ")]
    assert result.returncode == 1, result.stdout + result.stderr
    assert sorted(survivors) == [
        "ops/toy.py loose: return value * 5 [5 to 4, 1]",
        "ops/toy.py loose: return value * 5 [5 to 6, 1]",
        "ops/toy.py loose: return value * 5 [Mult to Add, 1]",
    ]
    assert (folder / "ops" / "toy.py").read_text() == TOY

    gone = "ops/toy.py gone: return 1 [1 to 2, 1]"
    explained = [f"{key} => nobody calls it" for key in [*survivors, gone]]
    (folder / "tests" / "mutants.txt").write_text("\n".join(["# mutant => why", *explained]))
    result = run("--only", "loose")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("    nobody calls it") == 3
    assert [line for line in keys(result.stdout) if line.startswith("stale: ")] == [f"stale: {gone}"]


def test_tests_that_fail_anyway_tell_nothing(toy):
    folder, run = toy
    (folder / "tests" / "ops" / "test_toy.py").write_text(TESTS.replace("7", "8"))
    result = run()
    assert result.returncode == 1 and "tests/ops/test_toy.py" in result.stderr and "survived" not in result.stdout


def test_an_edit_elsewhere_draws_the_same(toy):
    folder, run = toy
    drawn = keys(run("--list").stdout)
    assert len(drawn) == 6 and keys(run("--list", "--seed", "2").stdout) != drawn
    (folder / "ops" / "toy.py").write_text(f"ONE = True\n\n{TOY}")
    assert [key for key in keys(run("--list").stdout) if "module" not in key] == drawn


def test_changed_lines(toy):
    """With a commit, mutants of the lines that it has not alone."""
    folder, run = toy

    def git(*arguments):
        name = ["-c", "user.name=toy", "-c", "user.email=toy@example.org"]
        subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "--message", "all")
    assert keys(run("--list", "--since", "HEAD").stdout) == []
    (folder / "ops" / "toy.py").write_text(TOY.replace("value * 5", "value * 6"))
    drawn = keys(run("--list", "--since", "HEAD").stdout)
    assert len(drawn) == 3 and all(" loose: return value * 6 " in key for key in drawn)
    assert set(drawn) < set(keys(run("--list").stdout))
