"""``python -m bench report``: which files it reads and writes, and what it refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.markdown import write_page
from bench.results import read_all
from tests.bench.result_files import rows, write

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


@pytest.fixture
def report(tmp_path):
    """Run it with folders of its own; returns the exit status."""
    (tmp_path / "results").mkdir()

    def run(*arguments, docs=tmp_path / "docs" / "page.md"):
        try:
            return main(["report", *map(str, arguments), "--results", str(tmp_path / "results"), "--docs", str(docs)])
        except SystemExit as exit:
            return exit.code

    return run


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


PICTURES = {"results/nvidia_h200.png", "results/nvidia_h200_errors.png"}


def test_every_result_of_the_folder(report, tmp_path, capsys):
    write(tmp_path / "results" / "b.json", rows("L30"))
    write(tmp_path / "results" / "a.json", rows())
    (tmp_path / "results" / "notes.txt").write_text("no result")
    assert report() == 0
    page = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert "| L94 |" in page and "| L30 |" in page and "](../results/nvidia_h200.png)" in page
    assert files(tmp_path) == {"results/a.json", "results/b.json", "results/notes.txt", "docs/page.md", *PICTURES}
    output = capsys.readouterr().out
    assert output.count("wrote ") == 3 and "page.md" in output


def test_chosen_results_alone(report, tmp_path):
    write(tmp_path / "results" / "b.json", rows("L30"))
    assert report(write(tmp_path / "a.json", rows())) == 0
    page = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert "| L94 |" in page and "| L30 |" not in page
    assert PICTURES <= files(tmp_path)


def refused(report, capsys, *arguments, **options):
    """Exit status 2 and one line, which is returned."""
    assert report(*arguments, **options) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.startswith("bench report: ") and errors.count("\n") == 1
    return errors


def test_damaged_result(report, tmp_path, capsys):
    """Nothing of the old report is touched, nor anything of a new one written."""
    write(tmp_path / "results" / "a.json", rows())
    assert report() == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damaged = tmp_path / "results" / "z.json"
    damaged.write_bytes(before[tmp_path / "results" / "a.json"][:-20])
    assert f"{damaged} is damaged" in refused(report, capsys)
    damaged.unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_is_not_the_bench_s(report, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"header": {"device": "a GPU"}}')
    assert f"{other} is no result of the bench: no 'date'" in refused(report, capsys, other)


def test_missing_result(report, tmp_path, capsys):
    assert "cannot read" in refused(report, capsys, tmp_path / "missing.json")
    assert f"cannot read {tmp_path}: Is a directory" in refused(report, capsys, tmp_path)


def test_no_results(report, tmp_path, capsys):
    assert f"no results in {tmp_path / 'results'}" in refused(report, capsys)


def test_unwritable_page(report, tmp_path, capsys):
    (tmp_path / "file").touch()
    page = tmp_path / "file" / "page.md"
    assert report(write(tmp_path / "a.json", rows()), docs=page) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"bench report: cannot write {page}: ") and errors.count("\n") == 1


def test_page_that_is_a_folder(report, tmp_path, capsys):
    assert report(write(tmp_path / "a.json", rows()), docs=tmp_path / "results") == 2
    assert "Is a directory" in capsys.readouterr().err


def test_unwritable_pictures(report, tmp_path, capsys):
    (tmp_path / "results" / "nvidia_h200.png").mkdir()
    assert "nvidia_h200.png: Is a directory" in refused(report, capsys, write(tmp_path / "a.json", rows()))
    assert not (tmp_path / "docs").exists()


def test_bad_option(report, capsys):
    assert "unrecognized arguments: --png" in refused(report, capsys, "--png")


def test_files_are_replaced(report, tmp_path, monkeypatch):
    """Each by one that is whole, under its name."""
    replaced = {}
    replace = os.replace

    def watched(source, target):
        replaced[Path(target).relative_to(tmp_path).as_posix()] = Path(source).stat().st_size
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert report(write(tmp_path / "a.json", rows())) == 0
    assert set(replaced) == {"docs/page.md", *PICTURES}
    assert all((tmp_path / name).stat().st_size == size for name, size in replaced.items())


def test_module(tmp_path):
    """As a user runs it, with the committed results."""
    results = tmp_path / "results"
    results.mkdir()
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, results)
    command = [sys.executable, "-m", "bench", "report", "--results", results, "--docs", tmp_path / "page.md"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    assert (results / "nvidia_h200.png").read_bytes().startswith(b"\x89PNG")


def test_committed_page_is_that_of_the_committed_results():
    """Where it is not: python -m bench report."""
    paths = sorted(RESULTS.glob("*.json"))
    drawn = [path.name for path in RESULTS.glob("*.png")]
    assert PAGE.read_text(encoding="utf-8") == write_page(read_all(paths), RESULTS, PAGE, drawn)
