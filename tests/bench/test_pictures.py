"""The bench's pictures: which panel and place each figure has."""

import math

import pytest
from matplotlib import pyplot

from bench.pictures import draw_all, draw_errors, draw_growth, draw_ratios
from bench.results import read_all
from bench.sizes import GRID_BATCHES
from tests.bench.result_files import CONVOLUTION, TARGET, first_call, rows, write

LINEAR = rows(ours_us=110.0, peers={"library": 100.0, "eager": 230.0})  # as before rows named a product
L19 = [
    row
    for name, ours in (("contiguous", 70.0), ("channels_last", 90.0))
    for row in rows(
        "L19",
        CONVOLUTION,
        ours,
        {"library": 100.0, "eager": 160.0, "compile": None},
        memory_format=name,
        product="convolution",
    )
]


@pytest.fixture
def results(tmp_path):
    """The results of one device with these rows."""

    def of(rows, **header):
        (found,) = read_all([write(tmp_path / "a.json", rows, **header)])
        return found

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


def test_linear_chains_alone(results):
    forward, training = draw_ratios(results(LINEAR + rows("L30", peers={"library": 50.0}))).axes
    expected = {("L94 bfloat16", "normfuse"): 1.1, ("L94 bfloat16", "PyTorch eager"): 2.3}
    expected |= {("L30 bfloat16", "normfuse"): 2.0}
    assert bars(forward) == expected and bars(training, forward) == expected
    assert "one library GEMM" in forward.get_title() and "three library GEMMs" in training.get_title()


def test_modes_have_panels_of_their_own(results):
    forward, training = draw_ratios(results(rows(modes=("forward",)) + rows(ours_us=160.0, modes=("training",)))).axes
    assert bars(forward)["L94 bfloat16", "normfuse"] == 1.25
    assert bars(training, forward)["L94 bfloat16", "normfuse"] == 2.0


def test_convolution_has_panels_of_its_own(results):
    linear_forward, _, forward, training = draw_ratios(results(LINEAR + L19)).axes
    assert set(bars(linear_forward)) == {("L94 bfloat16", "normfuse"), ("L94 bfloat16", "PyTorch eager")}
    expected = {("L19 bfloat16 contiguous", "normfuse"): 0.7, ("L19 bfloat16 channels_last", "normfuse"): 0.9}
    expected |= {(f"L19 bfloat16 {name}", "PyTorch eager"): 1.6 for name in ("contiguous", "channels_last")}
    assert bars(forward) == bars(training, forward) == expected
    assert "library convolution" in forward.get_xlabel() and "library GEMM" in linear_forward.get_xlabel()
    assert forward.get_ylabel() == CONVOLUTION


def grid(ratio=0.5, **others):
    """Two batches of two feature sizes; the ratio grows with the features, and is larger in the forward pass."""
    return [
        row
        for batch in (64, 1)
        for size, factor in ((2048, 1), (4096, 2))
        for mode, of_mode in (("forward", 3), ("training", 1))
        for row in rows(
            shape=f"{batch}x{size}x{size}",
            ours_us=100 * ratio * factor * of_mode,
            peers={"library": 50.0, "eager": 100.0},
            modes=(mode,),
            **others,
        )
    ]


def points_of(line):
    """Batch and ratio of each cell that is there; a line is broken at the others."""
    assert list(line.get_xdata()) == list(GRID_BATCHES)
    return {batch: ratio for batch, ratio in zip(*line.get_data(), strict=True) if not math.isnan(ratio)}


def test_growth(results):
    """A panel a chain and dtype, a line a feature size, a point a batch, in their order."""
    content = grid() + grid(1.0, dtype="float32", precision="high") + rows("L30", "1x2048x2048")
    figure = draw_growth(results(content + LINEAR), "training")
    panels = {panel.get_title(): panel for panel in figure.axes}
    assert list(panels) == ["L94 bfloat16", "L30 bfloat16", "L94 float32 high", "L30 float32 high"]
    lines = {line.get_label(): line for line in panels["L94 bfloat16"].get_lines()}
    assert points_of(lines["2048 features"]) == {1: 0.5, 64: 0.5}
    assert list(points_of(lines["4096 features"]).values()) == [1.0, 1.0]
    assert list(points_of(lines["8192 features"])) == [1024]  # the target's
    (high,) = (line for line in panels["L94 float32 high"].get_lines() if line.get_label() == "4096 features")
    assert list(points_of(high).values()) == [2.0, 2.0]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["2048 features", "4096 features", "8192 features"]


def test_growth_of_each_mode(results):
    found = results(grid())
    for mode, expected in (("forward", 1.5), ("training", 0.5)):
        (panel,) = draw_growth(found, mode).axes
        assert list(points_of(panel.get_lines()[0]).values()) == [expected, expected]


def test_grid_stays_out_of_the_others(results):
    panels = draw_ratios(results(LINEAR + grid())).axes + draw_errors(results(LINEAR + grid())).axes
    assert {panel.get_ylabel() for panel in panels} == {TARGET, ""}


def points(panel, labelled):
    labels = [label.get_text() for label in labelled.get_yticklabels()]
    return {
        (labels[round(place)], series.get_label()): error
        for series in panel.collections
        for error, place in series.get_offsets()
    }


def test_errors(results):
    worst = {"error_ours": 3e-4, "error_torch": 2e-4, "error_tensor": "d_weight"}
    content = rows(modes=("forward",)) + rows(modes=("training",), **worst)
    forward, training = draw_errors(results(content)).axes
    assert points(forward, forward) == {("L94 bfloat16", "normfuse"): 1e-3, ("L94 bfloat16", "PyTorch"): 2e-3}
    assert points(training, forward) == {("L94 bfloat16", "normfuse"): 3e-4, ("L94 bfloat16", "PyTorch"): 2e-4}
    assert [text.get_text() for text in training.texts] == ["d_weight"] and not forward.texts
    assert forward.get_xscale() == training.get_xscale() == "log"


def test_captions(results):
    """What it ran on, with what, and what was measured."""
    found = results(LINEAR + grid())
    figures = [draw_ratios(found), draw_errors(found), draw_growth(found, "forward")]
    for figure in figures:
        caption = figure.get_suptitle()
        for part in ("NVIDIA H200", "driver 580", "torch 2.11", "triton 3.6", "commit aaaaaaaaaa of 2026-01-02"):
            assert part in caption
    assert "median of 20 interleaved rounds" in figures[0].get_suptitle()


def test_what_was_not_measured_is_not_drawn(results):
    assert set(draw_all(results(LINEAR))) == {"nvidia_h200.png", "nvidia_h200_errors.png"}
    assert not draw_all(results([first_call()]))
    red = rows(ours_us=None, peers={"eager": None}, error_ours=None, error_torch=None, errors={}, red=True)
    assert not draw_all(results(red))


def test_red_cells_are_drawn_as_far_as_they_go(results):
    """An error that is no number, or zero, has no place on a log scale."""
    content = LINEAR + rows(
        "L30", ours_us=None, peers={"eager": None}, error_ours=float("nan"), error_torch=0.0, red=True
    )
    assert set(draw_all(results(content))) == {"nvidia_h200.png", "nvidia_h200_errors.png"}


def test_files(results):
    """The same bytes every time, and no figure is left open."""
    first, second = (draw_all(results(LINEAR + grid())) for _ in range(2))
    assert first == second
    assert set(first) == {
        "nvidia_h200.png",
        "nvidia_h200_growth_forward.png",
        "nvidia_h200_growth_training.png",
        "nvidia_h200_errors.png",
    }
    assert all(picture.startswith(b"\x89PNG") for picture in first.values())
    assert not pyplot.get_fignums()
