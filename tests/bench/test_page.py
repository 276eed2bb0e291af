"""The page of benchmarks, and the tables in other pages."""

from pathlib import Path

import pytest

from bench.page import write_page
from bench.results import read_all
from bench.tables import fill_tables
from tests.bench.result_files import CONVOLUTION, TARGET, cell, first_call, red, rows, write

LATER = {"date": "2026-01-02T03:30:00+00:00"}


@pytest.fixture
def read(tmp_path):
    """Results of files with these rows, each newer than the one before. ``others`` changes the runs after the first."""

    def of(*contents, experiment="times", others=()):
        paths = [write(tmp_path / "1", contents[0], experiment)]
        for index, (content, other) in enumerate(zip(contents[1:], others, strict=True), 2):
            paths.append(write(tmp_path / str(index), content, experiment, **{**LATER, **other}))
        return read_all(paths)

    return of


@pytest.fixture
def page(read):
    """The page of these rows on one device, as sections by heading."""

    def of(*contents, drawn=(), **options):
        text = write_page(read(*contents, **options), Path("docs/pictures"), Path("docs/page.md"), drawn)
        return {title: body for title, _, body in (part.partition("\n\n") for part in text.split("\n#"))}

    return of


@pytest.fixture
def table(read):
    """A table in another page: its rows by column, and the note below."""

    def of(name, *contents, **options):
        text = fill_tables(f"<!-- table: {name} -->\n<!-- /table -->", read(*contents, **options), Path("page.md"))
        (found,) = tables(text)
        return found, text.split("\n\n")[-2]

    return of


def tables(section):
    """Each table as a list of rows by column. A column's name that comes again gets a number."""
    found, names = [], None
    for line in section.splitlines():
        values = [value.strip() for value in line.strip("|").split("|")] if line.startswith("|") else None
        if values is None:
            names = None
        elif names is None:
            names = [
                f"{name} {values[:index].count(name) + 1}" if name in values[:index] else name
                for index, name in enumerate(values)
            ]
            found.append([])
        elif set(values[0]) - set("-:") or not values[0]:
            assert len(values) == len(names)
            found[-1].append(dict(zip(names, values, strict=True)))
    return found


def with_peers(content, **by_peer):
    """The rows with another field of their peers, as in ``host_us={"ours": 3.0}``."""
    for name, values in by_peer.items():
        content = [
            row
            | {
                "peers": {
                    peer: times | ({name: values[peer]} if peer in values else {})
                    for peer, times in row["peers"].items()
                }
            }
            for row in content
        ]
    return content


def test_nothing_is_left_out_in_silence(page):
    """Sections without results say so."""
    sections = page(rows())
    for title in ("## Added memory", "## Growth", "## Host time", "## Wall clock", "## First call"):
        assert sections[title].strip() == "Not measured."
    assert sections["## Times"].strip() != "Not measured."
    only_first_calls = page([first_call()], experiment="first_call")
    for title in ("## Times", "## Errors", "## Added memory", "## Growth", "## Host time", "## Wall clock"):
        assert only_first_calls[title].strip() == "Not measured."


def test_times(page):
    """The ratio to each peer, and the peer's own time. Cells that are missing, failed or red are marked."""
    content = rows(ours_us=90.0, peers={"bare": 80.0, "eager": 200.0, "compile": 75.0})
    (failed,) = rows("L30", peers={"bare": 80.0}, modes=("forward",))
    failed["peers"]["compile"] = {"failure": "no"}
    (table,) = tables(page([*content, failed, red("L75")])["## Times"])
    assert table[0] == {
        "chain": "L94",
        "dtype": "bfloat16",
        "mode": "forward",
        "µs": "90",
        "bare": "1.12 (80)",
        "eager": "0.45 (200)",
        "compile": "1.20 (75)",
    }
    assert [(row["chain"], row["mode"]) for row in table[1:]] == [
        ("L94", "training"),
        ("L75", "forward"),
        ("L30", "forward"),
    ]
    assert (table[2]["µs"], table[2]["eager"]) == ("red", "–")
    assert (table[3]["eager"], table[3]["compile"]) == ("–", "failed")


def test_a_table_a_product_and_shape(page):
    content = rows(shape="3x5x7") + rows() + rows("L19", CONVOLUTION, memory_format="channels_last")
    times = page(content)["## Times"]
    assert [table[0]["dtype"] for table in tables(times)] == ["bfloat16", "bfloat16", "bfloat16 channels_last"]
    places = [times.index(f"{name}:") for name in ("GEMM, 3x5x7", f"GEMM, {TARGET}", f"convolution, {CONVOLUTION}")]
    assert places == sorted(places)


def test_which_run_where_they_differ(page):
    """Rows of different runs are numbered. The list of runs comes last."""
    contents = rows(), rows("L30"), rows("L75")
    sections = page(*contents, others=[{"commit": "b" * 40}, {"commit": "b" * 40}])
    (table,) = tables(sections["## Times"])
    assert [row["chain"] for row in table[::2]] == ["L94 <sup>1</sup>", "L75 <sup>2</sup>", "L30 <sup>2</sup>"]
    assert sections["## Runs"].splitlines() == [
        "1. driver 580, torch 2.11, triton 3.6; commit aaaaaaaaaa, 2026-01-02",
        "2. driver 580, torch 2.11, triton 3.6; commit bbbbbbbbbb, 2026-01-02",
    ]
    sections = page(*contents, others=[{}, {}])
    assert [row["chain"] for row in tables(sections["## Times"])[0][::2]] == ["L94", "L75", "L30"]
    assert sections["## Runs"].count("\n") == 1


def test_errors(page):
    """One column for each tensor that any row has."""
    content = rows(modes=("forward",)) + rows(
        modes=("training",), errors={"output": [1e-3, 2e-3], "d_input": [3.14e-7, 0.1]}
    )
    (table,) = tables(page(content)["## Errors"])
    assert [(row["`output`"], row["`d_input`"]) for row in table] == [
        ("1.0e-03 / 2.0e-03", "–"),
        ("1.0e-03 / 2.0e-03", "3.1e-07 / 1.0e-01"),
    ]


def test_memory(page):
    content = with_peers(rows(modes=("training",)), added_mb={"ours": 1.25, "eager": 80.0})
    (table,) = tables(page(content)["## Added memory"])
    assert table == [{"chain": "L94", "dtype": "bfloat16", "shape": TARGET, "normfuse": "1.2", "eager": "80.0"}]


def test_growth(page):
    """Batches down, features across, with geometric means and the worst cell. Bold where ours is slower."""
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
    content.append(red(shape="64x1024x1024"))
    growth = page(content)["## Growth"]
    summary, grid = tables(growth)
    assert summary == [
        {
            "chain": "L94",
            "dtype": "bfloat16",
            "mode": "forward",
            "sizes": "4 of 30",
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


@pytest.mark.parametrize("title, field", [("Host time", "host_us"), ("Wall clock", "wall_us")])
def test_host_time_and_wall_clock(title, field, page):
    """At the listed shapes and at a batch of 16, with the ratio to eager PyTorch's."""
    content = with_peers(
        [row for shape in (TARGET, "16x1024x1024", "64x1024x1024") for row in rows(shape=shape, modes=("forward",))],
        **{field: {"ours": 30.0, "eager": 40.0}},
    )
    (table,) = tables(page(content)[f"## {title}"])
    assert [row["shape"] for row in table] == ["16x1024x1024", TARGET]
    assert (table[0]["normfuse"], table[0]["bare"], table[0]["eager"]) == ("30", "–", "40")
    assert table[0]["normfuse / eager"] == "0.75"


def test_first_call(page):
    failed = cell("L19", CONVOLUTION, failure="no")
    content = [first_call(), first_call("L75", kernels_not_run=["some_kernel"])]
    section = page([*content, first_call("L30", kernels_not_run=None), failed], experiment="first_call")[
        "## First call"
    ]
    (table,) = tables(section)
    assert table[0] == {
        "chain": "L94",
        "dtype": "bfloat16",
        "shape": TARGET,
        "import ops, s": "0.75",
        "first forward call, s": "3.25",
        "kernels compiled": "2",
        "of which not run": "none",
        "later calls, µs": "200",
    }
    assert [row["of which not run"] for row in table[1:3]] == ["`some_kernel`", "–"]
    assert (table[3]["import ops, s"], table[3]["first forward call, s"], table[3]["kernels compiled"]) == (
        "failed",
        "–",
        "–",
    )
    assert "later ones. Run 1." in section


def test_another_triton(page):
    row = {"before": "triton 3.5", "before_us": 99.0, "after_us": 100.0}
    row |= {"device_ratio": 1.01, "wall_ratio": 0.9, "rounds": 12}
    section = page([cell(**row), cell("L30", mode="training", **row)], experiment="tritons")["## Another Triton"]
    (table,) = tables(section)
    assert [list(line.values()) for line in table] == [
        ["L94", "bfloat16", TARGET, "forward", "99", "100", "1.010", "0.900"],
        ["L30", "bfloat16", TARGET, "training", "99", "100", "1.010", "0.900"],
    ]
    assert list(table[0])[4:6] == ["triton 3.5", "triton 3.6"] and "took turns. Run 1." in section


def test_pictures(page):
    """Links to the pictures that exist, relative to the page, in both themes."""
    names = [
        f"{name}.nvidia_h200.{theme}.png" for name in ("speedup", "growth_training") for theme in ("light", "dark")
    ]
    sections = page(rows(), drawn=names)
    assert 'src="pictures/speedup.nvidia_h200.light.png"' in sections["## Times"]
    assert 'srcset="pictures/speedup.nvidia_h200.dark.png"' in sections["## Times"]
    assert 'src="pictures/growth_training.nvidia_h200.light.png"' in sections["## Growth"]
    assert "<img" not in sections["## Errors"] and sections["## Growth"].count("<img") == 1


def test_table_of_times(table):
    """The main cells with both modes, and the faster compiler. A cell without one of the modes is left out."""
    peers = {"compile": 120.0, "compile-max": 110.0, "eager": 200.0}
    content = rows(peers=peers) + rows("L30", peers=peers, modes=("forward",)) + rows(dtype="float16")
    content += rows("L94", dtype="float32", precision="highest", peers={"compile": 300.0})
    content += rows("L19", CONVOLUTION, memory_format="channels_last", ours_us=50.0, peers=peers)
    lines, note = table("times", content)
    assert [(line["chain"], line["dtype"]) for line in lines] == [
        ("L94", "bfloat16"),
        ("L94", "float32 highest"),
        ("L19", "bfloat16 channels_last"),
    ]
    assert list(lines[0].values())[2:] == ["**100**", "110", "200", "**200**", "220", "400", "1.0e-03 / 2.0e-03"]
    assert list(lines[1].values())[2:5] == ["**100**", "300", "–"]
    assert note.startswith("NVIDIA H200, driver 580, torch 2.11, triton 3.6. Device time in 20 interleaved rounds; ")
    assert f" L94: batch x in_features x out_features = {TARGET}; L19: " in note and f"kernel = {CONVOLUTION}." in note


def test_table_of_errors(table):
    """One line a setting: how many pairs, their mean, the largest ratio and its cell. Exact results do not count."""
    errors = {"output": [1e-3, 2e-3], "d_weight": [4e-3, 2e-3], "d_bias": [0.0, 1e-3], "d_input": [None, 1.0]}
    content = rows(errors=errors, modes=("training",)) + rows("L30", dtype="float16", errors={})
    lines, note = table("errors", content)
    assert [list(line.values()) for line in lines] == [
        ["GEMM", "bfloat16", "2", "1.00", "2.00", f"L94 {TARGET}, `d_weight`: 4.0e-03 / 2.0e-03"]
    ]
    assert note == "NVIDIA H200, driver 580, torch 2.11, triton 3.6."


def test_table_of_captured_calls(table):
    calls = {"eager": {"us": 184.2, "host_us": 218.0}, "compile": {"us": 184.0, "over_eager": 0.998, "host_us": 232.0}}
    lines, note = table("captured", [cell(calls=calls, rounds=30)], experiment="captured")
    assert [list(line.values()) for line in lines] == [
        ["L94", "bfloat16", "forward", "184", "0.998", "–", "218, 232, –"]
    ]
    assert note.endswith("triton 3.6. 30 interleaved rounds; commit aaaaaaaaaa, 2026-01-02.")


def test_table_of_captured_calls_with_their_wall_clock(table):
    """Older results lack it, and then there is no such column."""
    calls = {"eager": {"us": 184.2, "wall_us": 220.0}, "graph": {"us": 183.0, "over_eager": 0.99, "wall_us": 190.4}}
    (line,), _ = table("captured", [cell(calls=calls, rounds=30)], experiment="captured")
    assert list(line)[-1] == "wall clock, µs: eager, compiled, graph"
    assert list(line.values())[3:] == ["184", "–", "0.990", "220, –, 190"]


def test_table_of_shards(table):
    row = cell(
        divided="batch", gpus=2, us=116.0, alone_us=191.0, speedup=1.64, in_a_row_us=332.0, alone_in_a_row_us=192.0
    )
    traffic = {"all_reduce": {"count": 5, "bytes": 134_000_000}, "all_gather": {"count": 1, "bytes": 4096}}
    content = [row | {"collectives": traffic, "rounds": 30}, cell(divided="channels", gpus=2, red=True)]
    lines, _ = table("tensor_parallel", content, experiment="tensor_parallel")
    assert list(lines[0].values())[3:] == [
        *("batch", "2", "191", "116", "1.64", "192, 332"),
        "134 MB in 5 `all_reduce`, 0.0041 MB in 1 `all_gather`",
    ]
    assert list(lines[1].values())[3:] == ["channels", "2", "red", "red", "–", "–", "nothing"]


def test_table_of_commits(table):
    row = {
        "before": "c" * 40,
        "before_us": 99.0,
        "after_us": 100.0,
        "device_ratio": 1.01,
        "wall_ratio": 0.9,
        "rounds": 12,
    }
    content = [cell(**row), cell("L30", mode="training", **row)]
    lines, note = table("commits", content, experiment="commits")
    assert [list(line.values()) for line in lines] == [
        ["L94", "bfloat16", TARGET, "100", "1.010", "–", "–", "0.90, –"],
        ["L30", "bfloat16", TARGET, "–", "–", "100", "1.010", "–, 0.90"],
    ]
    assert note.endswith("12 interleaved rounds; commit aaaaaaaaaa, 2026-01-02. Before: commit cccccccccc.")


def test_a_table_a_device(tmp_path):
    """Devices without such results are left out. Where no device has any, the page says so."""
    paths = [write(tmp_path / name, rows(), device=name) for name in ("NVIDIA B200", "NVIDIA H200")]
    devices = read_all([*paths, write(tmp_path / "CPU", [first_call()], "first_call", device="CPU")])
    text = "A <!-- table: errors -->x<!-- /table --> B <!-- table: captured -->\n<!-- /table --> C"
    filled = fill_tables(text, devices, Path("page.md"))
    assert filled.count("| GEMM | bfloat16 |") == 2 and "NVIDIA B200, driver" in filled and "CPU" not in filled
    assert filled.startswith("A <!-- table: errors -->\n\n| product") and filled.endswith(
        "<!-- /table --> B <!-- table: captured -->\n\nNot measured.\n\n<!-- /table --> C"
    )
    assert fill_tables(filled, devices, Path("page.md")) == filled
