"""The bench's chart: which panel and place each bar has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

from bench.chart import draw

ROOT = Path(__file__).parents[2]
HEADER = {"device": "a GPU", "torch": "2", "triton": "3"}


def rows(chain, shape, ratios, **others):
    """Rows of both modes; training takes twice as long."""
    row = {"chain": chain, "dtype": "bfloat16", "precision": None, "shape": shape, "rounds": 20} | others
    return [
        row | {"mode": mode, "peer": peer, "ratio": ratio and ratio * factor}
        for mode, factor in (("forward", 1), ("training", 2))
        for peer, ratio in ratios.items()
    ]


LINEAR = rows("L94", "1024x8192x8192", {"ours": 1.1, "library": 1.0, "eager": 2.3})  # as before rows named a product
L19 = [
    row
    for name, ours in (("contiguous", 0.7), ("channels_last", 0.9))
    for row in rows(
        "L19",
        "128x64x64x256x256x3",
        {"ours": ours, "library": 1.0, "eager": 1.6, "compile": None},
        memory_format=name,
        product="convolution",
    )
]


@pytest.fixture
def panels():
    def of(rows):
        return draw({"header": HEADER, "rows": rows}).axes

    yield of
    pyplot.close("all")


def bars(panel, labelled=None):
    """Widths by label of the group, which stand at the left panel alone, and name of the peer."""
    labels = [label.get_text() for label in (labelled or panel).get_yticklabels()]
    return {
        (labels[round(bar.get_y() + bar.get_height() / 2)], container.get_label()): bar.get_width()
        for container in panel.containers
        for bar in container
    }


def test_linear_chains_alone(panels):
    forward, training = panels(LINEAR)
    expected = {("L94 bfloat16", "normfuse"): 1.1, ("L94 bfloat16", "PyTorch eager"): 2.3}
    assert bars(forward) == expected
    assert bars(training, forward) == {place: 2 * ratio for place, ratio in expected.items()}
    assert "one library GEMM" in forward.get_title() and "three library GEMMs" in training.get_title()


def test_convolution_has_panels_of_its_own(panels):
    linear_forward, _, forward, training = panels(LINEAR + L19)
    assert set(bars(linear_forward)) == {("L94 bfloat16", "normfuse"), ("L94 bfloat16", "PyTorch eager")}
    expected = {("L19 bfloat16 contiguous", "normfuse"): 0.7, ("L19 bfloat16 channels_last", "normfuse"): 0.9}
    expected |= {(f"L19 bfloat16 {name}", "PyTorch eager"): 1.6 for name in ("contiguous", "channels_last")}
    assert bars(forward) == expected
    assert bars(training, forward) == {place: 2 * ratio for place, ratio in expected.items()}
    assert "library convolution" in forward.get_xlabel() and "library GEMM" in linear_forward.get_xlabel()
    assert forward.get_ylabel() == "128x64x64x256x256x3"


def test_command_line(tmp_path):
    """Of several files."""
    for name, content in (("linear", LINEAR), ("l19", L19)):
        (tmp_path / name).write_text(json.dumps({"header": HEADER, "rows": content}))
    command = [sys.executable, "-m", "bench.chart", tmp_path / "linear", tmp_path / "l19", tmp_path / "chart.png"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
