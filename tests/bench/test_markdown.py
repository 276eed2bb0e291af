"""The bench's page: what stands in which of its tables."""

from pathlib import Path

import pytest

from bench.markdown import write_page
from bench.results import read_all
from tests.bench.result_files import CONVOLUTION, TARGET, first_call, rows, write

LATER = {"date": "2026-01-02T03:30:00+00:00"}


@pytest.fixture
def page(tmp_path):
    """The page of files of these rows, as sections by heading; of one device."""

    def of(*contents, drawn=(), others=()):
        """``others``: what the headers of the files after the first say beside that they are newer."""
        paths = [write(tmp_path / "1.json", contents[0])]
        for number, (content, other) in enumerate(zip(contents[1:], others, strict=True), 2):
            paths.append(write(tmp_path / f"{number}.json", content, **{**LATER, **other}))
        text = write_page(read_all(paths), Path("bench/results"), Path("docs/page.md"), drawn)
        assert text.endswith("|\n") or text.endswith("Not measured.\n")
        return {title: body for title, _, body in (part.partition("\n\n") for part in text.split("\n#"))}

    return of


def tables(section):
    """Each a list of rows by the names of its columns."""
    found, names = [], None
    for line in section.splitlines():
        values = [value.strip() for value in line.strip("|").split("|")] if line.startswith("|") else None
        if values is None:
            names = None
        elif names is None:
            names = values
            found.append([])
        elif set(values[0]) - set("-:") or not values[0]:
            assert len(values) == len(names)
            found[-1].append(dict(zip(names, values, strict=True)))
    return found


def test_nothing_is_left_out_in_silence(page):
    """As of results that know neither host times nor a grid."""
    sections = page(rows())
    for title in ("## Added memory", "## Growth", "## Host time", "## First call"):
        assert sections[title].strip() == "Not measured."
    assert sections["## Times"].strip() != "Not measured."
    only_first_calls = page([first_call()])
    for title in ("## Times", "## Errors", "## Added memory", "## Growth", "## Host time"):
        assert only_first_calls[title].strip() == "Not measured."


def test_header(page):
    ((first, second),) = tables(
        page(rows() + rows("L30"), rows("L30") + [first_call()], others=[{"commit": None, "driver": None}])[
            "# NVIDIA H200"
        ]
    )
    assert first == {
        "": "1",
        "file": "`1.json`",
        "measured (UTC)": "2026-01-02 03:04",
        "commit": f"`{'a' * 40}`",
        "driver": "580",
        "torch": "2.11",
        "triton": "3.6",
        "cells used here": "2",
    }
    assert (second["commit"], second["driver"], second["cells used here"]) == ("`unknown`", "unknown", "3")


def test_times(page):
    """Ours over each peer, and that one's own time; what was not run, failed or was red says so."""
    content = rows(ours_us=90.0, peers={"library": 80.0, "eager": 200.0, "compile": 75.0}, tflops=1234.4)
    content += rows("L30", peers={"library": 80.0}, modes=("forward",))
    content += [row | {"failure": "no"} for row in rows("L30", peers={"compile": None}, modes=("forward",))[1:]]
    content += rows("L75", ours_us=None, peers={"eager": None}, red=True, modes=("forward",))
    (table,) = tables(page(content)["## Times"])
    assert table[0] == {
        "chain": "L94",
        "dtype": "bfloat16",
        "mode": "forward",
        "µs": "90",
        "TFLOP/s": "1234",
        "library": "1.12 (80)",
        "eager": "0.45 (200)",
        "compile": "1.20 (75)",
        "best of PyTorch": "1.20 (compile)",
    }
    assert [(row["chain"], row["mode"]) for row in table[1:]] == [
        ("L94", "training"),
        ("L75", "forward"),
        ("L30", "forward"),
    ]
    assert (table[2]["µs"], table[2]["eager"], table[2]["best of PyTorch"]) == ("red", "–", "–")
    assert (table[3]["eager"], table[3]["compile"], table[3]["TFLOP/s"]) == ("–", "failed", "–")


def test_a_table_a_product_and_shape(page):
    content = rows(shape="3x5x7") + rows()
    content += rows("L19", CONVOLUTION, product="convolution", memory_format="channels_last")
    times = page(content)["## Times"]
    assert [table[0]["dtype"] for table in tables(times)] == ["bfloat16", "bfloat16", "bfloat16 channels_last"]
    places = [times.index(f"{name}:") for name in ("GEMM, 3x5x7", f"GEMM, {TARGET}", f"convolution, {CONVOLUTION}")]
    assert places == sorted(places)


def test_which_file_where_they_differ(page):
    """Numbers of files, in tables of the same state none."""
    contents = (
        rows(peers={"library": 80.0, "eager": 200.0}),
        rows(peers={"library": 80.0, "compile": 90.0}),
        rows("L30"),
    )
    (table,) = tables(page(*contents, others=[{}, {"commit": "b" * 40}])["## Times"])
    assert {row["chain"]: row["file"] for row in table} == {"L94": "1, 2", "L30": "3"}
    (table,) = tables(page(*contents, others=[{}, {}])["## Times"])
    assert "file" not in table[0]


def test_errors(page):
    """A column a tensor of any of the cells."""
    content = rows(modes=("forward",)) + rows(
        modes=("training",), errors={"output": [1e-3, 2e-3], "d_input": [3.14e-7, 0.1]}
    )
    (table,) = tables(page(content)["## Errors"])
    assert [(row["`output`"], row["`d_input`"]) for row in table] == [
        ("1.0e-03 / 2.0e-03", "–"),
        ("1.0e-03 / 2.0e-03", "3.1e-07 / 1.0e-01"),
    ]


def test_memory(page):
    content = [
        row | {"peak_memory_mb": {"ours": 1.25, "eager": 80.0}.get(row["peer"])} for row in rows(modes=("training",))
    ]
    (table,) = tables(page(content)["## Added memory"])
    assert table == [{"chain": "L94", "dtype": "bfloat16", "shape": TARGET, "normfuse": "1.2", "eager": "80.0"}]


def test_growth(page):
    """Batches down, features across, geometric means, and the worst cell; bold where ours is slower."""
    ratios = {(1, 1024): 2.0, (1, 2048): 0.5, (16, 1024): 0.25, (4096, 16384): 1.0}
    content = [
        row
        for (batch, size), ratio in ratios.items()
        for row in rows(
            shape=f"{batch}x{size}x{size}",
            ours_us=100 * ratio,
            peers={"eager": 300.0, "compile": 100.0},
            modes=("forward",),
        )
    ]
    content += rows(shape="64x1024x1024", ours_us=None, peers={"eager": None}, modes=("forward",), red=True)
    growth = page(content)["## Growth"]
    summary, grid = tables(growth)
    assert summary == [
        {
            "chain": "L94",
            "dtype": "bfloat16",
            "mode": "forward",
            "cells": "4 of 30",
            "geometric mean": "0.71",
            "worst": "**2.00**",
            "at": "1x1024x1024 (compile)",
            "of which slower": "1",
        }
    ]
    by_batch = {row["batch"]: list(row.values())[1:] for row in grid}
    assert list(grid[0]) == ["batch", "1024", "2048", "4096", "8192", "16384", "mean"]
    assert by_batch == {
        "1": ["**2.00**", "0.50", "–", "–", "–", "1.00"],
        "16": ["0.25", "–", "–", "–", "–", "0.25"],
        "64": ["red", "–", "–", "–", "–", "–"],
        "256": ["–"] * 6,
        "1024": ["–"] * 6,
        "4096": ["–", "–", "–", "–", "1.00", "1.00"],
        "mean": ["0.71", "0.50", "–", "–", "1.00", "0.71"],
    }


def test_host_time(page):
    """At the listed shapes and at a batch of 16, beside eager's."""
    content = [
        row | {"host_us": {"ours": 30.0, "eager": 40.0}.get(row["peer"])}
        for shape in (TARGET, "16x1024x1024", "64x1024x1024")
        for row in rows(shape=shape, modes=("forward",))
    ]
    (table,) = tables(page(content)["## Host time"])
    assert [row["shape"] for row in table] == ["16x1024x1024", TARGET]
    assert (table[0]["normfuse"], table[0]["library"], table[0]["eager"]) == ("30", "–", "40")
    assert table[0]["normfuse / eager"] == "0.75"


def test_first_call(page):
    content = [
        first_call(),
        first_call("L75", kernels_not_run=["some_kernel"]),
        first_call("L30", kernels_not_run=None),
    ]
    content += [first_call("L19", first_call_s=None, kernels_not_run=None, failure="no")]
    section = page(content)["## First call"]
    (table,) = tables(section)
    assert table[0] == {
        "chain": "L94",
        "dtype": "bfloat16",
        "shape": TARGET,
        "import ops, s": "0.75",
        "first forward call, s": "3.25",
        "kernels compiled": "4",
        "of which not run": "none",
        "later calls, µs": "200",
    }
    assert [row["of which not run"] for row in table[1:3]] == ["`some_kernel`", "–"]
    assert (table[3]["import ops, s"], table[3]["first forward call, s"]) == ("failed", "–")
    assert "commit aaaaaaaaaa of 2026-01-02" in section


def test_pictures(page):
    """Those that were drawn, from where the page lies."""
    sections = page(rows(), drawn=["nvidia_h200.png", "nvidia_h200_growth_training.png"])
    assert "](../bench/results/nvidia_h200.png)" in sections["## Times"]
    assert "](../bench/results/nvidia_h200_growth_training.png)" in sections["## Growth"]
    assert "![" not in sections["## Errors"] and sections["## Growth"].count("![") == 1
