"""The family in the report: its rows, its section of the page, its table in other pages, its picture."""

from pathlib import Path

import pytest
from matplotlib import pyplot

from autotune_configs.command_line import names
from bench.chains import CHAINS, FAMILY
from bench.page import write_page
from bench.pictures import THEMES, draw_all, pictures_of
from bench.results import read_all
from bench.tables import fill_tables
from tests.bench.result_files import LINEAR, NORM, TARGET, cell, rows, write

IMAGES = "2x320x64x64"
PEERS = {"bare": 40.0, "eager": 200.0, "compile": 125.0, "compile-max": 80.0}
CONTENT = rows(LINEAR, peers=PEERS) + rows(NORM, IMAGES, 50.0, PEERS, memory_format="channels_last")
FOUR = rows() + rows("L30", peers={"compile": 110.0, "eager": 150.0}) + rows(shape="16x2048x2048")


@pytest.fixture
def results(tmp_path):
    """The results of one device with these rows."""

    def of(rows):
        (found,) = read_all([write(tmp_path / "rows.jsonl", rows)])
        return found

    yield of
    pyplot.close("all")


def sections(results):
    """The page's sections by heading."""
    text = write_page([results], Path("docs/pictures"), Path("docs/page.md"), ["family.nvidia_h200.light.png"])
    return {title: body for title, _, body in (part.partition("\n\n") for part in text.split("\n### "))}


def tables(text):
    """The cells of each table's lines, its names first."""
    blocks = (part.splitlines() for part in text.split("\n\n") if part.startswith("|"))
    return [
        [[each.strip() for each in line.strip("|").split("|")] for line in lines if "---" not in line]
        for lines in blocks
    ]


def test_rows(results):
    """The four's tables have none of the family's rows, and the family's are in the order of its chains."""
    found = results(CONTENT + FOUR + rows(LINEAR, "16x2048x2048") + rows(NORM, "1x64x4x4"))
    assert {row.chain for row in found.listed} == {row.chain for row in found.target} == {"L94", "L30"}
    forward = [(row.chain, row.shape) for row in found.family if row.mode == "forward"]
    assert forward == [(NORM, "1x64x4x4"), (NORM, IMAGES), (LINEAR, TARGET)]
    assert (LINEAR, "16x2048x2048") in {(row.chain, row.shape) for row in found.grid}


def test_the_fours_sections_stay(results):
    """And so do their pictures."""
    alone, together = results(FOUR), results(CONTENT + FOUR)
    one, other = sections(alone), sections(together)
    assert list(one) == list(other)
    assert [title for title in one if one[title] != other[title]] == ["Family"]
    drawn, more = pictures_of(alone), pictures_of(together)
    assert drawn.keys() ^ more.keys() == {"family.nvidia_h200"}
    assert all(drawn[name].digest == more[name].digest for name in drawn)


def test_section(results):
    content = [dict(row) for row in CONTENT]
    content[0]["errors"] = {"output": [1e-3, 2e-3], "d_input": [3e-3, 2e-3]}
    for peer, us in (("ours", 110.0), ("eager", 220.0)):
        content[0]["peers"][peer]["wall_us"] = us
        content[1]["peers"][peer]["added_mb"] = us / 10
    section = sections(results([*content, cell(LINEAR, mode="forward", dtype="float16", red=True)]))["Family"]
    assert '<img alt="How many times as fast as PyTorch each chain of the family is"' in section
    assert all(f"- {name}: {CHAINS[name].composition.replace('->', '→')}" in section for name in FAMILY)
    times, errors, costs = tables(section)
    assert times[0][4:] == ["µs", "of the best", "bare", "eager", "compile", "compile-max"]
    assert [line[0] for line in times[1:]] == [NORM, NORM, LINEAR, LINEAR, LINEAR]
    assert times[1][1:6] == ["bfloat16 channels_last", "forward", IMAGES, "50", "0.62"]
    assert times[3][4:] == ["100", "**1.25**", "2.50 (40)", "0.50 (200)", "0.80 (125)", "1.25 (80)"]
    assert times[5][1:] == ["float16", "forward", TARGET, "red", *["–"] * 5]
    assert errors[3][4:] == ["1.0e-03 / 2.0e-03", "`d_input`: 3.0e-03 / 2.0e-03"]
    assert costs[0][4:] == ["wall clock, µs: normfuse", "eager", "compile", "compile-max", "added MB: normfuse"] + [
        "eager",
        "compile",
        "compile-max",
    ]
    assert costs[3][4:6] == ["110", "220"] and costs[4][8:10] == ["11.0", "22.0"] and len(costs) == 5


def test_how_to_measure(results):
    """Without results the section has a command that the bench takes, for all chains of the family."""
    section = sections(results(FOUR))["Family"]
    command = section.partition("```sh\n")[2].partition("\n```")[0].split()
    assert command[:4] == ["python", "-m", "bench", "--chains"] and not tables(section)
    assert tuple(names(CHAINS)(command[4])) == FAMILY


def test_table_in_another_page(results):
    text = fill_tables("<!-- table: family -->\n<!-- /table -->", [results(CONTENT + FOUR)], Path("page.md"))
    (table,) = tables(text)
    assert len(table) == 5 and table[1][:6] == [NORM, "bfloat16 channels_last", "forward", IMAGES, "50", "0.62"]
    assert "NVIDIA H200, driver 580, torch 2.11, triton 3.6. 20 interleaved rounds;" in text


def test_errors_apart_from_the_fours(results):
    text = fill_tables("<!-- table: errors -->\n<!-- /table -->", [results(CONTENT + FOUR)], Path("page.md"))
    (table,) = tables(text)
    assert [line[:3] for line in table[1:]] == [
        ["GEMM", "bfloat16", "6"],
        ["GEMM of the family", "bfloat16", "2"],
        ["norm of the family", "bfloat16", "2"],
    ]


def test_picture(results):
    """A bar a cell over the best of PyTorch, below its chain's name, in the colour of slower ones below 1."""
    content = CONTENT + FOUR + rows(LINEAR, peers=PEERS, dtype="float16", ours_us=1.0) + rows(NORM, "2x64", peers={})
    found = results(content)
    shown = pictures_of(found)["family.nvidia_h200"]
    theme = THEMES["light"]
    forward, training = shown.draw(shown, theme).axes
    labels = [label.get_text() for label in forward.get_yticklabels()]
    assert labels == [NORM, f"{IMAGES} channels_last", LINEAR, TARGET]
    for panel in (forward, training):
        (bars,) = panel.containers
        drawn = {round(bar.get_y() + bar.get_height() / 2): round(bar.get_width(), 3) for bar in bars}
        assert drawn == {1: 1.6, 3: 0.8}
        assert {bar.get_facecolor()[:3] for bar in bars} == {
            tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
            for colour in (theme.ours, theme.slower)
        }
    assert shown.title == "The family: 0.80 to 1.60 times as fast as the best of PyTorch"
    assert {name for name in draw_all(found) if name.startswith("family")} == {
        f"family.nvidia_h200.{theme}.png" for theme in THEMES
    }
