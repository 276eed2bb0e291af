"""Results read from files: which are the bench's, and which of several is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import BadResult, describe, read, read_all, sources_of
from tests.bench.result_files import CONVOLUTION, HEADER, TARGET, first_call, rows, write

ROOT = Path(__file__).parents[2]
LATER = {"date": "2026-01-02T03:30:00+00:00"}


def cells(*paths):
    (results,) = read_all(paths)
    return results.cells


def test_rows_of_before(tmp_path):
    """What the first results lack is None, and their product is the only one there was."""
    (cell, _) = cells(write(tmp_path / "a.json", rows()))
    assert cell.key.product == "GEMM" and cell.key.memory_format is None
    assert cell.value("ours", "host_us") is None and cell.value("ours", "median_us") == 100.0
    assert cell.value("compile", "median_us") is None
    assert [cell.key.mode for cell in cells(tmp_path / "a.json")] == ["forward", "training"]


def test_newest_of_a_cell(tmp_path):
    """Whatever the order of the files; another commit's peers are left out."""
    old = write(tmp_path / "new_name.json", rows(peers={"library": 80.0, "compile": 90.0}))
    new = write(tmp_path / "a.json", rows(ours_us=70.0, modes=("forward",)), commit="b" * 40, **LATER)
    for paths in ((old, new), (new, old)):
        forward, training = cells(*paths)
        assert set(forward.rows) == {"ours", "library", "eager"}
        assert forward.value("ours", "median_us") == 70.0
        assert {source.file for source in forward.sources.values()} == {"a.json"}
        assert set(training.rows) == {"ours", "library", "compile"}
        assert {source.file for source in training.sources.values()} == {"new_name.json"}


def test_peers_of_the_same_commit_are_put_together(tmp_path):
    """Ours and what both have are the newest; each ratio is of its own run."""
    old = write(tmp_path / "a.json", rows(peers={"library": 80.0, "eager": 200.0}))
    new = write(tmp_path / "b.json", rows(ours_us=110.0, peers={"library": 80.0, "compile-max": 120.0}), **LATER)
    forward, _ = cells(old, new)
    assert forward.value("ours", "median_us") == 110.0
    assert forward.value("eager", "ours_to_peer") == 0.5
    assert (forward.best_pytorch, forward.ours_to_best) == ("compile-max", pytest.approx(110 / 120))
    assert {peer: source.file for peer, source in forward.sources.items()} == {
        "ours": "b.json",
        "library": "b.json",
        "compile-max": "b.json",
        "eager": "a.json",
    }


@pytest.mark.parametrize("other", [{"commit": None}, {"torch": "2.12"}, {"driver": "590"}], ids=str)
def test_another_setup_is_not_put_together(tmp_path, other):
    old = write(tmp_path / "a.json", rows(peers={"eager": 200.0}), **other)
    commit = other.get("commit", "a" * 40)  # two unknown ones are not known to be the same
    new = write(tmp_path / "b.json", rows(peers={"compile": 120.0}), commit=commit, **LATER)
    assert set(cells(old, new)[0].rows) == {"ours", "compile"}


def test_shapes_from_several_files(tmp_path):
    paths = [
        write(tmp_path / f"{batch}.json", rows(shape=f"{batch}x1024x1024"), commit=None) for batch in (4096, 16, 1, 256)
    ]
    found = [cell.key.shape for cell in cells(*paths) if cell.key.mode == "forward"]
    assert found == [f"{batch}x1024x1024" for batch in (1, 16, 256, 4096)]


def test_devices_are_apart(tmp_path):
    paths = [write(tmp_path / name, rows(), device=name) for name in ("NVIDIA B200", "CPU, Triton's interpreter")]
    results = read_all(paths)
    assert [entry.slug for entry in results] == ["cpu", "nvidia_b200"]
    assert [len(entry.cells) for entry in results] == [2, 2]


def test_order(tmp_path):
    """Product, shape, dtype, precision, chain, memory format, mode."""
    content = rows("L19", CONVOLUTION, product="convolution", memory_format="channels_last")
    content += rows("L19", CONVOLUTION, product="convolution", memory_format="contiguous")
    for dtype, precision in (("float32", "high"), ("float32", "highest"), ("bfloat16", None)):
        for chain in ("L30", "L94"):
            content += rows(chain, dtype=dtype, precision=precision, modes=("training",))
    labels = [cell.key.label for cell in cells(write(tmp_path / "a.json", content))]
    assert labels[:6] == [
        f"{chain} {dtype}" for dtype in ("bfloat16", "float32 highest", "float32 high") for chain in ("L94", "L30")
    ]
    assert labels[6::2] == ["L19 bfloat16 contiguous", "L19 bfloat16 channels_last"]


def test_grid(tmp_path):
    """The target's shape belongs to both; nothing grows where there is nothing but that, nor at any other shape."""
    content = rows() + rows(shape="16x2048x2048") + rows(shape="16x2048x1024") + rows("L30")
    (results,) = read_all([write(tmp_path / "a.json", content)])
    forward = [cell for cell in results.grid if cell.key.mode == "forward"]
    assert [(cell.key.chain, cell.key.shape) for cell in forward] == [("L94", "16x2048x2048"), ("L94", TARGET)]
    listed = {(cell.key.chain, cell.key.shape) for cell in results.listed}
    assert listed == {("L94", TARGET), ("L94", "16x2048x1024"), ("L30", TARGET)}


def test_newest_first_call(tmp_path):
    old = write(tmp_path / "a.json", [first_call(), first_call("L30")])
    new = write(tmp_path / "b.json", [first_call(first_call_s=1.5)], commit="b" * 40, **LATER)
    (results,) = read_all([new, old])
    assert [(entry.key.chain, entry.row["first_call_s"]) for entry in results.first_calls] == [
        ("L94", 1.5),
        ("L30", 3.25),
    ]
    assert not results.cells


def test_description(tmp_path):
    """Device and versions once, the commit and day of each file."""
    old = write(tmp_path / "a.json", rows())
    new = write(tmp_path / "b.json", rows("L30"), commit="b" * 40 + "-dirty", date="2026-02-03T00:00:00")
    assert describe(sources_of(cells(old, new))) == [
        "NVIDIA H200, driver 580, torch 2.11, triton 3.6",
        "a.json: commit aaaaaaaaaa of 2026-01-02; b.json: commit bbbbbbbbbb-dirty of 2026-02-03",
    ]
    newer = write(tmp_path / "c.json", rows("L75"), torch="2.12", commit=None, **LATER)
    assert describe(sources_of(cells(old, newer)))[2:] == [
        "NVIDIA H200, driver 580, torch 2.12, triton 3.6",
        "c.json: an unknown commit of 2026-01-02",
    ]


def content(**changes):
    """A sound file, but for its one row, from which a name is taken where its value is ``...``."""
    row = {name: value for name, value in (rows()[0] | changes).items() if value is not ...}
    return {"header": HEADER, "rows": [row]}


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "damaged, no JSON"),
        ('{"header": {}, "rows"', "damaged, no JSON"),
        (b"\xff\xfe", "damaged, no JSON"),
        ("[" * 100_000, "damaged, no JSON"),
        ("[]", "list where an object is right"),
        ("{}", "no 'header'"),
        ({"header": HEADER}, "no 'rows'"),
        ({"header": HEADER, "rows": {}}, "'rows' is '{}'"),
        ({"header": HEADER | {"date": "today"}, "rows": []}, "'date' is 'today'"),
        ({"header": HEADER | {"device": None}, "rows": []}, "'device' is 'None'"),
        ({"header": HEADER | {"torch": 2.11}, "rows": []}, "'torch' is '2.11'"),
        ({"header": HEADER, "rows": ["L94"]}, "row 1: str where an object is right"),
        (content(chain=...), "row 1: no 'chain'"),
        (content(peer=...), "row 1: no 'peer'"),
        (content(shape="1024x"), "row 1: 'shape' is '1024x'"),
        (content(shape="0x8x8"), "row 1: 'shape' is '0x8x8'"),
        (content(mode="backward"), "row 1: 'mode' is 'backward'"),
        (content(kind="second_call"), "row 1: 'kind' is 'second_call'"),
        (content(ratio="1.1"), "row 1: 'ratio' is '1.1'"),
        (content(median_us=True), "row 1: 'median_us' is 'True'"),
        (content(errors={"output": [1.0]}), "row 1: the errors of 'output' are [1.0]"),
        (
            {"header": HEADER, "rows": [first_call(), first_call(first_call_s="slow")]},
            "row 2: 'first_call_s' is 'slow'",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_not_the_bench_s(text, named, tmp_path):
    path = tmp_path / "a.json"
    text = json.dumps(text) if isinstance(text, dict) else text
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadResult) as raised:
        read(path)
    message = str(raised.value)
    assert str(path) in message and named in message and "\n" not in message


def test_unreadable(tmp_path):
    with pytest.raises(BadResult, match="cannot read .*missing.json: No such file"):
        read(tmp_path / "missing.json")


def test_nan(tmp_path):
    """The error of a red cell may be one, and Python's JSON has it."""
    path = write(tmp_path / "a.json", rows(error_ours=float("nan"), red=True, errors={"output": [float("nan"), 1.0]}))
    assert cells(path)[0].is_red


def test_needs_neither_torch_nor_kernels():
    program = "import bench.__main__, bench.report, bench.markdown, bench.pictures, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "ops", "triton_kernels"} & set(result.stdout.split())
