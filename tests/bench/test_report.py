"""``python -m bench report``: which files it reads and writes, and what it refuses."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import report as command
from bench.__main__ import main
from tests.bench.result_files import cell, first_call, rows, write

ROOT = Path(__file__).parents[2]
PICTURES = {f"pictures/{name}.nvidia_h200.{theme}.png" for name in ("speedup", "errors") for theme in ("light", "dark")}
#: Times beside both peers that the first picture shows.
ROWS = rows(peers={"bare": 80.0, "compile": 120.0, "eager": 200.0})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in an empty folder, as from an installed package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_RESULTS", tmp_path / "site-packages" / "bench" / "results")
    monkeypatch.setattr(command, "_ROOT", tmp_path / "site-packages")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with results and pages."""
    root = tmp_path / "repository"
    (root / "bench" / "results").mkdir(parents=True)
    (root / "docs").mkdir()
    write(root / "bench" / "results" / "target_sizes.nvidia_h200.jsonl", ROWS)
    (root / "README.md").write_text("A\n<!-- table: times -->\nold\n<!-- /table -->\nB\n")
    (root / "docs" / "numerics.md").write_text("<!-- table: errors -->\n<!-- /table -->")
    (root / "docs" / "other.md").write_text("as it was")
    monkeypatch.setattr(command, "_RESULTS", root / "bench" / "results")
    monkeypatch.setattr(command, "_ROOT", root)
    return root


def report(*arguments):
    """Run it; returns the exit status."""
    try:
        return main(["report", *map(str, arguments)])
    except SystemExit as exit:
        return exit.code


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_current_folder(tmp_path, capsys):
    """It takes all results there, and writes nothing anywhere else."""
    write(tmp_path / "b.jsonl", rows("L30"))
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "notes.txt").write_text("no result")
    assert report() == 0
    page = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert "| L94 |" in page and "| L30 |" in page and 'src="pictures/speedup.nvidia_h200.light.png"' in page
    assert files(tmp_path) == {"a.jsonl", "b.jsonl", "notes.txt", "benchmarks.md", *PICTURES}
    assert capsys.readouterr().out.splitlines() == [
        "wrote benchmarks.md",
        *(
            f"wrote pictures/{name}.nvidia_h200.{theme}.png"
            for name in ("speedup", "errors")
            for theme in ("light", "dark")
        ),
    ]


def test_chosen_results_alone(tmp_path):
    write(tmp_path / "b.jsonl", rows("L30"))
    assert report(write(tmp_path / "a.jsonl", ROWS), "--page", tmp_path / "docs" / "page.md") == 0
    page = (tmp_path / "docs" / "page.md").read_text(encoding="utf-8")
    assert "| L94 |" in page and "| L30 |" not in page
    assert files(tmp_path / "docs") == {"page.md", *PICTURES}


def test_repository(repository, tmp_path, capsys):
    """It takes the repository's results, and fills the repository's pages."""
    assert report() == 0
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("A\n<!-- table: times -->\n\n| chain |") and readme.endswith("\n\n<!-- /table -->\nB\n")
    assert "old" not in readme and "NVIDIA H200, driver 580, torch 2.11, triton 3.6" in readme
    assert "| GEMM | bfloat16 | 2 | 0.50 |" in (repository / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert (repository / "docs" / "other.md").read_text() == "as it was"
    assert PICTURES <= files(repository / "docs") and files(tmp_path) == {
        f"repository/{name}" for name in files(repository)
    }
    capsys.readouterr()
    assert report() == 0 and capsys.readouterr().out == ""  # all is current


def test_chosen_results_leave_the_repository_alone(repository, tmp_path):
    before = files(repository)
    assert report(write(tmp_path / "a.jsonl", rows("L30"))) == 0
    assert files(repository) == before and "old" in (repository / "README.md").read_text()
    assert (tmp_path / "benchmarks.md").exists()


def test_check(repository, capsys):
    """It names what is not current, and writes nothing."""
    before = files(repository)
    assert report("--check") == 1
    named = [line.partition(" is not current")[0] for line in capsys.readouterr().out.splitlines()]
    expected = {"README.md", "docs/benchmarks.md", "docs/numerics.md", *(f"docs/{name}" for name in PICTURES)}
    assert set(named) == {f"repository/{name}" for name in expected}
    assert files(repository) == before
    assert report() == 0 and report("--check") == 0


def test_check_sees_one_change(repository, capsys):
    """A changed error makes one picture stale, and an empty table its page."""
    assert report() == 0
    changed = [row | {"errors": {"output": [1e-3, 3e-3]}} for row in ROWS]
    write(repository / "bench" / "results" / "target_sizes.nvidia_h200.jsonl", changed)
    (repository / "docs" / "other.md").write_text("<!-- table: captured --><!-- /table -->")
    capsys.readouterr()
    assert report("--check") == 1
    out = capsys.readouterr().out
    assert "speedup" not in out and all(f"errors.nvidia_h200.{theme}.png" in out for theme in ("light", "dark"))
    assert all(name in out for name in ("README.md", "docs/benchmarks.md", "docs/numerics.md", "docs/other.md"))


def refused(capsys, *arguments):
    """Exit status 2 and one line, which is returned."""
    assert report(*arguments) == 2
    output, errors = capsys.readouterr()
    assert not output and errors.startswith("python -m bench report: ") and errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    "page, message",
    [
        ("<!-- table: speeds --><!-- /table -->", "no table is called 'speeds'; there are times, errors, captured"),
        ("<!-- table: times -->\n", "no <!-- /table --> behind <!-- table: times -->"),
        ("<!-- table: times --><!-- table: errors --><!-- /table -->", "behind <!-- table: times -->"),
    ],
)
def test_page_with_a_wrong_place(page, message, repository, capsys):
    """One line names the page, and nothing is written."""
    path = repository / "docs" / "other.md"
    path.write_text(page)
    before = files(repository)
    assert f"{path}: " in (errors := refused(capsys)) and message in errors
    assert files(repository) == before and path.read_text() == page


def test_damaged_result(tmp_path, capsys):
    """The old report stays as it was."""
    path = write(tmp_path / "a.jsonl", ROWS)
    assert report() == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damaged = tmp_path / "z.jsonl"
    damaged.write_bytes(before[path][:-20])
    assert "z.jsonl, line 4: no JSON" in refused(capsys)
    damaged.unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_missing_result(tmp_path, capsys):
    assert "cannot read" in refused(capsys, tmp_path / "missing.jsonl")
    assert f"cannot read {tmp_path}: Is a directory" in refused(capsys, tmp_path)


def test_no_results(tmp_path, capsys):
    assert f"no results (*.jsonl) in {tmp_path}" in refused(capsys)


def test_unwritable_page(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "file").touch()
    page = tmp_path / "file" / "page.md"
    assert f"cannot write {page}: " in refused(capsys, path, "--page", page)
    assert f"cannot write {tmp_path}: Is a directory" in refused(capsys, path, "--page", tmp_path)
    assert f"cannot write {tmp_path}: Is a directory" in refused(capsys, path, "--csv", tmp_path)


def test_bad_option(capsys):
    assert "unrecognized arguments: --png" in refused(capsys, "--png")


def test_files_are_replaced(tmp_path, monkeypatch):
    """Each file is replaced in one step."""
    replaced = {}
    replace = os.replace

    def watched(source, target):
        replaced[(tmp_path / target).relative_to(tmp_path).as_posix()] = Path(source).stat().st_size
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert report(write(tmp_path / "a.jsonl", ROWS)) == 0
    assert set(replaced) == {"benchmarks.md", *PICTURES}
    assert all((tmp_path / name).stat().st_size == size for name, size in replaced.items())


def test_csv(tmp_path):
    """One header, and one line a peer or call. What a row lacks is empty. Nothing else is written."""
    write(tmp_path / "a.jsonl", rows(modes=("forward",)))
    write(tmp_path / "b.jsonl", [first_call(kernels_not_run=["b"])], "first_call")
    calls = {"eager": {"us": 9.5, "host_us": 7.0, "wall_us": 12.5}, "compile": {"failure": "no"}}
    write(tmp_path / "c.jsonl", [cell(calls=calls, rounds=30)], "captured")
    sharded = {"divided": "batch", "gpus": 2, "collectives": {"all_reduce": {"count": 3, "bytes": 64}}}
    write(tmp_path / "d.jsonl", [cell() | sharded], "tensor_parallel")
    assert report("--csv", tmp_path / "out.csv") == 0
    assert files(tmp_path) == {"a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "out.csv"}
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(line["experiment"], line["peer"], line["call"], line["us"]) for line in found] == [
        ("times", "ours", "", "100.0"),
        ("times", "bare", "", "80.0"),
        ("times", "eager", "", "200.0"),
        ("captured", "", "eager", "9.5"),
        ("captured", "", "compile", ""),
        ("first_call", "", "", ""),
        ("tensor_parallel", "", "", ""),
    ]
    assert (found[2]["ours_over"], found[2]["errors.output.torch"], found[2]["run.torch"]) == ("0.5", "0.002", "2.11")
    assert [line["wall_us"] for line in found] == ["", "", "", "12.5", "", "", ""]
    assert (found[4]["failure"], found[5]["kernels"], found[5]["kernels_not_run"]) == ("no", "a b", "b")
    assert found[6]["collectives.all_reduce.bytes"] == "64" and {line["device"] for line in found} == {"NVIDIA H200"}


def test_csv_is_printed(tmp_path, capsys):
    path = write(tmp_path / "a", rows())
    assert main(["report", str(path), "--csv", "-"]) == 0
    assert capsys.readouterr().out.startswith("experiment,device,")
    with pytest.raises(SystemExit):
        main(["report", str(path), "--csv", "-", "--check"])
    assert "not allowed with" in capsys.readouterr().err


def test_module(tmp_path):
    """As a user runs it, with the committed results."""
    for path in (ROOT / "bench" / "results").glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    command = [
        sys.executable,
        "-m",
        "bench",
        "report",
        *sorted(tmp_path.glob("*.jsonl")),
        "--page",
        tmp_path / "page.md",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    assert (tmp_path / "pictures" / "speedup.nvidia_h200.dark.png").read_bytes().startswith(b"\x89PNG")


def test_committed_pages_are_those_of_the_committed_results():
    """If this fails, run python -m bench report."""
    command = [sys.executable, "-m", "bench", "report", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
