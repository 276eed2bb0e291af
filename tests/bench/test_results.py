"""Results files: what is written, what is refused, and which of several rows counts."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.results import BadResult, Entry, lines_of, merge, newest, plain, read, read_all
from bench.schema import SCHEMA, CallTimes, FirstCallRow, Header, Run, TimesRow
from tests.bench.result_files import CONVOLUTION, RUN, TARGET, cell, first_call, header, lines, rows, write

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("*"))
LATER = {"date": "2026-01-02T03:30:00+00:00"}
HEADER = Header(SCHEMA, "times", "NVIDIA H200")


def times(*paths):
    (results,) = read_all(paths)
    return results.times


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results(path):
    """They are what the bench would write, every field is known, and names say what was measured and on what."""
    kept, entries = read(path)
    assert path.read_bytes() == lines_of(kept, entries)
    (results,) = read_all([path])
    assert len(getattr(results, kept.experiment)) == len(entries) > 0
    for row in getattr(results, kept.experiment):
        again = {name: value for name, value in plain(row).items() if name != "run"}
        assert again in [entry.row for entry in entries]
    name, slug, suffix = path.name.split(".")
    assert slug.startswith(results.slug) and suffix == "jsonl" and name.replace("_", "").isalpha()


def test_committed_results_are_few_lines():
    assert sum(len(path.read_bytes().splitlines()) for path in RESULTS) <= 3000


def test_typed_rows(tmp_path):
    (forward, training) = times(write(tmp_path / "a.jsonl", rows()))
    assert (forward.chain, forward.mode, forward.memory_format, training.mode) == ("L94", "forward", None, "training")
    assert (forward.us, forward.peer("eager").ours_over, forward.peer("compile").us) == (100.0, 0.5, None)
    assert forward.run == replace(forward.run, commit="a" * 40, driver="580") and forward.run.date.year == 2026
    assert forward.closest() == ("eager", 0.5) and forward.closest(("compile",)) is None


def test_newest_of_a_cell(tmp_path):
    """The newest run's row counts, whole, in any order of the files."""
    old = write(tmp_path / "new_name.jsonl", rows(peers={"bare": 80.0, "compile": 90.0}))
    new = write(tmp_path / "a.jsonl", rows(ours_us=70.0, modes=("forward",)), commit="b" * 40, **LATER)
    for paths in ((old, new), (new, old)):
        forward, training = times(*paths)
        assert set(forward.peers) == {"ours", "bare", "eager"} and forward.us == 70.0
        assert forward.run.commit == "b" * 40 and set(training.peers) == {"ours", "bare", "compile"}


def test_newest_across_time_zones():
    """Dates are compared as points in time, not as texts."""
    dates = ["2026-01-02T03:30:00+00:00", "2026-01-02T04:00:00+02:00"]
    entries = [Entry({"date": date}, cell(rounds=index), "") for index, date in enumerate(dates)]
    assert [entry.row["rounds"] for entry in newest(HEADER, entries)] == [0]


def test_devices_are_apart(tmp_path):
    paths = [write(tmp_path / name, rows(), device=name) for name in ("NVIDIA B200", "CPU, Triton's interpreter")]
    results = read_all(paths)
    assert [entry.slug for entry in results] == ["cpu", "nvidia_b200"]
    assert [len(entry.times) for entry in results] == [2, 2]


def test_experiments_are_apart(tmp_path):
    (results,) = read_all([write(tmp_path / "a", rows()), write(tmp_path / "b", [first_call()], "first_call")])
    assert len(results.times) == 2 and [row.kernels for row in results.first_call] == [["a", "b"]]
    assert isinstance(results.first_call[0], FirstCallRow)


def test_order(tmp_path):
    """Product, shape, dtype, precision, chain, memory format, mode."""
    content = rows("L19", CONVOLUTION, memory_format="channels_last")
    content += rows("L19", CONVOLUTION, memory_format="contiguous")
    for dtype, precision in (("float32", "high"), ("float32", "highest"), ("bfloat16", None)):
        for chain in ("L30", "L94"):
            content += rows(chain, dtype=dtype, precision=precision, modes=("training",))
    content += rows(shape="16x2048x2048", modes=("forward",))
    found = [f"{row.chain} {row.layout} {row.mode}" for row in times(write(tmp_path / "a", content))]
    assert found[:3] == ["L94 bfloat16 forward", "L94 bfloat16 training", "L30 bfloat16 training"]
    assert found[3:7] == [
        f"{chain} float32 {name} training" for name in ("highest", "high") for chain in ("L94", "L30")
    ]
    assert found[7::2] == ["L19 bfloat16 contiguous forward", "L19 bfloat16 channels_last forward"]


def test_grid(tmp_path):
    """The target shape is listed, and belongs to the grid where the grid was measured. Other shapes are only listed."""
    content = rows() + rows(shape="16x2048x2048") + rows(shape="16x2048x1024") + rows("L30")
    (results,) = read_all([write(tmp_path / "a", content)])

    def forward(rows):
        return {(row.chain, row.shape) for row in rows if row.mode == "forward"}

    assert forward(results.grid) == {("L94", "16x2048x2048"), ("L94", TARGET)}
    assert forward(results.target) == {("L94", TARGET), ("L30", TARGET)}
    assert forward(results.listed) == forward(results.target) | {("L94", "16x2048x1024")}


def test_plain():
    """Defaults are left out, numbers have six digits, and NaN is None."""
    row = TimesRow(**cell(), errors={"output": (math.nan, 1.23456789e-7)}, peers={"ours": CallTimes(us=1234567.8)})
    assert plain(row) == cell(errors={"output": [None, 1.23457e-7]}, peers={"ours": {"us": 1234570.0}})
    assert plain(FirstCallRow(**cell(), kernels_not_run=[]))["kernels_not_run"] == []  # known to be none
    run = read_run()
    assert plain(run) == {"date": "2026-01-02T03:04:05+00:00", "torch": "2.11"}


def read_run():
    return Run(datetime.fromisoformat(RUN["date"]), torch="2.11")


def test_state_of_a_run():
    run = replace(read_run(), commit="b" * 40 + "-dirty", driver="580", triton="3.6")
    assert (run.state, run.versions) == ("commit bbbbbbbbbb-dirty, 2026-01-02", "driver 580, torch 2.11, triton 3.6")
    assert read_run().state == "an unknown commit, 2026-01-02"


GOOD = rows()[0]


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "line 1: no header of schema 1, got null"),
        ('{"header": {}, "rows"', "line 1: no JSON"),
        (b"\xff\xfe", "line 1: no JSON"),
        ("[" * 100_000, "line 1: no JSON"),
        ("[]", "line 1: list where an object is right"),
        (lines(header() | {"schema": 2}), "line 1: no header of schema 1, got 2"),
        (lines(header("speed")), "line 1: the header names no known experiment (times, "),
        (lines(header(device=None)), "line 1: the header names no known experiment"),
        (lines(header(["times"])), "line 1: the header names no known experiment"),
        (lines(header(), GOOD), "line 2: a row without a run above it"),
        (lines(header(), {"run": RUN | {"date": "today"}}), "line 2: the run has no date, as in "),
        (lines(header(), {"run": RUN | {"date": "2026-01-02"}}), "line 2: the run has no date, as in "),
        (lines(header(), {"run": "yesterday"}), "line 2: the run has no date"),
        (lines(header(), {"run": RUN}, GOOD)[:-20], "line 3: no JSON"),
        (
            lines(header(), {"run": RUN | {"torch": 2.11}}, GOOD),
            "line 3: Expected `str | null`, got `float` - at `$.run",
        ),
        (lines(header(), {"run": RUN}, GOOD, GOOD | {"shape": "1024x"}), "line 4: the shape '1024x' is no list of"),
        (lines(header(), {"run": RUN}, GOOD | {"shape": "0x8x8"}), "line 3: the shape '0x8x8' is no list of"),
        (
            lines(header(), {"run": RUN}, GOOD | {"mode": "backward"}),
            "line 3: Invalid enum value 'backward' - at `$.mode`",
        ),
        (
            lines(header(), {"run": RUN}, GOOD | {"rounds": "20"}),
            "line 3: Expected `int | null`, got `str` - at `$.rounds`",
        ),
        (lines(header(), {"run": RUN}, GOOD | {"errors": {"output": [1.0]}}), "line 3: Expected `array` of length 2"),
        (lines(header(), {"run": RUN}, GOOD | {"hots_us": 1.0}), "line 3: unknown field 'hots_us'"),
        (lines(header(), {"run": RUN}, {"chain": "L94"}), "line 3: no text 'product'"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_not_the_bench_s(text, named, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadResult) as raised:
        read_all([path])
    message = str(raised.value)
    assert message.startswith(f"{path}, {named}") and "\n" not in message


def test_unreadable(tmp_path):
    with pytest.raises(BadResult, match="cannot read .*missing.jsonl: No such file"):
        read(tmp_path / "missing.jsonl")


def test_nan(tmp_path):
    """A red row's error may be None."""
    (row,) = times(write(tmp_path / "a", [cell(red=True, errors={"output": [None, 1.0]})]))
    assert row.red and row.errors == {"output": (None, 1.0)}


def test_merge(tmp_path):
    """Rows of a run stay together, newer rows replace older ones, and other rows are kept."""
    into = write(tmp_path / "all.jsonl", rows("L30", modes=("forward",)) + rows(modes=("forward",)))
    one = write(tmp_path / "1", rows(ours_us=70.0, modes=("forward",)), **LATER)
    two = write(tmp_path / "2", rows("L75", modes=("forward",)), **LATER)
    assert main(["merge", str(one), str(two), "--into", str(into)]) == 0
    parsed = [json.loads(line) for line in into.read_text().splitlines()]
    assert [line.get("chain") for line in parsed] == [None, None, "L30", None, "L94", "L75"]
    assert (parsed[0], parsed[1], parsed[3]) == (header(), {"run": RUN}, {"run": RUN | LATER})
    assert parsed[4]["peers"]["ours"] == {"us": 70.0}


def test_merge_into_a_new_file(tmp_path):
    one = write(tmp_path / "1", rows())
    merge([one], tmp_path / "folder" / "all.jsonl")
    assert (tmp_path / "folder" / "all.jsonl").read_bytes() == lines_of(*read(one))


@pytest.mark.parametrize("other", [{"device": "NVIDIA B200"}, {"experiment": "captured"}], ids=str)
def test_what_cannot_be_merged(other, tmp_path, capsys):
    one, two = write(tmp_path / "1", rows()), write(tmp_path / "2", [cell()], **other)
    assert main(["merge", str(one), str(two), "--into", str(tmp_path / "all")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"python -m bench merge: {one} holds 'times' of NVIDIA H200, and {two} '")
    assert errors.count("\n") == 1 and not (tmp_path / "all").exists()


def in_process(program):
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_reading_needs_neither_torch_nor_kernels():
    result = in_process("import bench.__main__, bench.report, sys; print(*sys.modules)")
    assert not {"torch", "triton", "ops", "triton_kernels", "matplotlib", "msgspec"} & set(result.stdout.split())


WITHOUT = "import sys; sys.modules[{!r}] = None; from bench.__main__ import main; sys.exit(main({!r}))"


@pytest.mark.parametrize("missing, what", [("msgspec", "reading results"), ("matplotlib", "drawing")])
def test_missing_packages(missing, what, tmp_path):
    path = write(tmp_path / "a.jsonl", rows())
    result = in_process(WITHOUT.format(missing, ["report", str(path), "--page", str(tmp_path / "page.md")]))
    message = f'python -m bench report: {what} needs {missing}: pip install "normfuse[bench]"\n'
    assert (result.returncode, result.stderr) == (2, message)
    assert sorted(tmp_path.iterdir()) == [path]


def test_merge_needs_no_msgspec(tmp_path):
    path = write(tmp_path / "a.jsonl", rows())
    result = in_process(WITHOUT.format("msgspec", ["merge", str(path), "--into", str(tmp_path / "b.jsonl")]))
    assert result.returncode == 0 and (tmp_path / "b.jsonl").exists(), result.stderr


@pytest.mark.parametrize("row", ['{"a": 1}', '{"chain": "L\\ud800"}', '{"chain": "L94", "product": "GEMM"}'])
def test_bad_rows_are_not_merged(row, tmp_path):
    """They would keep the good ones from being reported."""
    good = write(tmp_path / "good", rows())
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(f"{line}\n" for line in [*good.read_text().splitlines()[:2], row]))
    before = good.read_bytes()
    with pytest.raises(BadResult, match="bad.jsonl, line 3: "):
        merge([bad], good)
    assert good.read_bytes() == before
