"""The rows of a run, kept in a file as they come."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from bench import recording
from bench.recording import Recording
from bench.results import BadResult, read, read_all
from bench.schema import Run, TimesRow
from tests.bench.result_files import RUN, cell, header, lines, rows, write

ROOT = Path(__file__).parents[2]
DEVICE = "CPU, Triton's interpreter"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A recording in this file, at this date."""
    path = tmp_path / "folder" / "rows.jsonl"

    def of(date="2026-01-03T00:00:00+00:00", experiment="times"):
        monkeypatch.setattr(recording, "current_run", lambda device: Run(datetime.fromisoformat(date), torch="2.11"))
        return Recording(path, experiment, torch.device("cpu"), lambda rows: [f"{len(rows)} rows"], 3)

    of.path = path
    return of


def chains(path):
    return [(entry.row["chain"], entry.run["date"][:10]) for entry in read(path)[1]]


def test_rows_are_kept_as_they_come(record, capsys):
    """An interruption loses nothing, and the tables are still shown."""
    with pytest.raises(KeyboardInterrupt), record() as found:
        assert record.path.exists()
        found.add(TimesRow(**cell("L94")))
        assert chains(record.path) == [("L94", "2026-01-03")]
        found.add(TimesRow(**cell("L75")))
        raise KeyboardInterrupt
    assert chains(record.path) == [("L94", "2026-01-03"), ("L75", "2026-01-03")]
    assert [entry.name for entry in record.path.parent.iterdir()] == ["rows.jsonl"]
    output = capsys.readouterr().out
    assert "2 rows" in output and output.endswith("Times need a GPU.\n")


def test_a_second_run(record):
    """It replaces the cells that it measures again, and keeps the others."""
    with record() as found:
        for chain in ("L94", "L75", "L30"):
            found.add(TimesRow(**cell(chain), rounds=1))
    with record("2026-01-04T00:00:00+00:00") as found:
        assert len(chains(record.path)) == 3
        found.add(TimesRow(**cell("L75"), rounds=2))
    assert chains(record.path) == [("L94", "2026-01-03"), ("L30", "2026-01-03"), ("L75", "2026-01-04")]
    assert len(record.path.read_text().splitlines()) == 6


def test_a_file_of_something_else(record):
    """It is left alone."""
    record.path.parent.mkdir()
    for path in (write(record.path, rows()), write(record.path, [cell()], "captured", device=DEVICE)):
        before = path.read_bytes()
        with pytest.raises(BadResult, match=f"{path} holds .*, and this run 'times' of {DEVICE}: they cannot be"):
            record()
        assert path.read_bytes() == before


def test_a_damaged_file(record):
    record.path.parent.mkdir()
    record.path.write_text(lines(header(device=DEVICE), {"run": RUN})[:-5])
    with pytest.raises(BadResult, match="rows.jsonl, line 2: no JSON"):
        record()


def test_no_file(capsys):
    with Recording(None, "times", torch.device("cpu"), lambda rows: ["a table"], 1):
        pass
    assert "a table" not in capsys.readouterr().out  # of no rows


#: Measures one cell, and is interrupted at the second.
INTERRUPTED = """
import os, sys
sys.modules["msgspec"] = sys.modules["matplotlib"] = None
os.environ["TRITON_INTERPRET"] = "1"
from bench import times
from bench.__main__ import main
measured, measure = [], times.measure
def interrupted(cell, *arguments):
    if measured:
        raise KeyboardInterrupt
    measured.append(cell)
    return measure(cell, *arguments)
times.measure = interrupted
sys.exit(main(sys.argv[1:]))
"""


def test_interruption(tmp_path):
    """It ends quietly with exit status 130 and keeps what was measured. Neither msgspec nor matplotlib is needed."""
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", INTERRUPTED, "--chains", "l75", "--dtypes", "bfloat16", "--output", path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (130, "")
    assert "Errors against float64" in result.stdout
    (found,) = read_all([path])
    assert [str(row) for row in found.times] == ["L75 bfloat16 forward 8x64x64"]
    assert json.loads(path.read_text().splitlines()[0])["device"] == DEVICE
