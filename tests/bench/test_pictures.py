"""The bench's pictures: what each shows, in both themes, and when a file is current."""

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from bench.pictures import THEMES, draw_all, not_current, pictures_of
from bench.results import read_all
from bench.sizes import GRID_BATCHES, GRID_FEATURES
from tests.bench.result_files import CONVOLUTION, TARGET, cell, first_call, red, rows, write

LIGHT = THEMES["light"]
LINEAR = rows(ours_us=100.0, peers={"compile": 120.0, "compile-max": 110.0, "eager": 230.0})
L19 = [
    row
    for name, ours in (("contiguous", 50.0), ("channels_last", 40.0))
    for row in rows("L19", CONVOLUTION, ours, {"compile": 100.0, "eager": 160.0}, memory_format=name)
]


@pytest.fixture
def results(tmp_path):
    """The results of one device with these rows."""

    def of(rows, **options):
        (found,) = read_all([write(tmp_path / "a.jsonl", rows, **options)])
        return found

    yield of
    pyplot.close("all")


@pytest.fixture
def picture(results):
    """The picture of this name, drawn from these rows, and its panels."""

    def of(name, rows):
        found = pictures_of(results(rows))[f"{name}.nvidia_h200"]
        return found, found.draw(found, LIGHT).axes

    return of


def bars(panel, labelled):
    """Widths by label of the group and by series."""
    labels = [label.get_text() for label in labelled.get_yticklabels()]
    return {
        (labels[round(bar.get_y() + bar.get_height() / 2)], container.get_label()): round(bar.get_width(), 3)
        for container in panel.containers
        for bar in container
    }


def test_speedup(picture):
    """A panel a mode, over the faster compiler and eager PyTorch, contiguous images alone. The title has the range."""
    shown, (forward, training) = picture("speedup", LINEAR + L19 + rows(dtype="float16", ours_us=1.0))
    expected = {("L94", "over torch.compile"): 1.1, ("L94", "over eager PyTorch"): 2.3}
    expected |= {("L19", "over torch.compile"): 2.0, ("L19", "over eager PyTorch"): 3.2}
    assert bars(forward, forward) == bars(training, forward) == expected
    assert shown.title == "1.10 to 2.00 times as fast as torch.compile, 2.30 to 3.20 times as fast as eager PyTorch"
    assert shown.caption.splitlines() == [
        f"bfloat16, L94 at {TARGET}; L19 at {CONVOLUTION}",
        "NVIDIA H200, driver 580, torch 2.11, triton 3.6",
    ]


def test_speedup_is_that_of_each_mode(picture):
    content = rows(peers={"compile": 150.0, "eager": 200.0}, modes=("forward",))
    content += rows(peers={"compile": 50.0, "eager": 300.0}, modes=("training",))
    shown, (forward, training) = picture("speedup", content)
    assert bars(forward, forward)["L94", "over torch.compile"] == 1.5
    assert bars(training, forward)["L94", "over torch.compile"] == 0.5
    assert shown.title.startswith("0.50 to 1.50 times as fast as torch.compile")


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
            peers={"bare": 50.0, "eager": 100.0},
            modes=(mode,),
            **others,
        )
    ]


def numbers(panel):
    """The numbers in a panel's cells, by batch and features."""
    places = ((text.get_text(), *text.get_position()) for text in panel.texts)
    return {(GRID_BATCHES[round(y)], GRID_FEATURES[round(x)]): number for number, x, y in places}


def test_growth(picture):
    """A panel a chain and dtype, a number a size that was measured. The target size is one of them."""
    content = grid() + grid(1.0, dtype="float32", precision="high") + rows("L30", "1x2048x2048") + LINEAR
    shown, panels = picture("growth_training", content)
    titles = [panel.get_title() for panel in panels]
    assert titles == ["L94 bfloat16", "L30 bfloat16", "L94 float32 high", "L30 float32 high"]
    first, _, third, fourth = map(numbers, panels)
    two_by_two = [(batch, size) for batch in (1, 64) for size in (2048, 4096)]
    assert first == dict(zip(two_by_two, ("0.50", "1.00", "0.50", "1.00"), strict=True)) | {(1024, 8192): "0.91"}
    assert third == dict(zip(two_by_two, ("1.00", "2.00", "1.00", "2.00"), strict=True)) and not fourth
    assert [label.get_text() for label in panels[2].get_xticklabels()] == ["1k", "2k", "4k", "8k", "16k"]
    assert [label.get_text() for label in panels[2].get_yticklabels()] == ["1", "16", "64", "256", "1024", "4096"]
    assert shown.title == "Training step: as fast as PyTorch or faster at 8 of 10 sizes"
    assert shown.caption.endswith("\nNVIDIA H200, driver 580, torch 2.11, triton 3.6")


def test_growth_of_each_mode(picture):
    for mode, expected in (("forward", "1.50"), ("training", "0.50")):
        _, (panel,) = picture(f"growth_{mode}", grid())
        assert numbers(panel)[1, 2048] == expected


def points(panel, labelled):
    labels = [label.get_text() for label in labelled.get_yticklabels()]
    return {
        (labels[round(place)], series.get_label()): error
        for series in panel.collections
        if series.get_label() in ("normfuse", "PyTorch")
        for error, place in series.get_offsets()
    }


def test_errors(picture):
    """The output's in the forward pass. In training, those with the largest ratio to PyTorch's."""
    errors = {"output": [1e-3, 2e-3], "d_weight": [3e-4, 4e-4], "d_bias": [0.0, 1.0]}
    content = rows(modes=("forward",)) + rows(modes=("training",), errors=errors) + grid()
    shown, (forward, training) = picture("errors", content)
    assert points(forward, forward) == {("L94 bfloat16", "normfuse"): 1e-3, ("L94 bfloat16", "PyTorch"): 2e-3}
    assert points(training, forward) == {("L94 bfloat16", "normfuse"): 3e-4, ("L94 bfloat16", "PyTorch"): 4e-4}
    assert [text.get_text() for text in training.texts] == ["d_weight"] and not forward.texts
    assert forward.get_xscale() == training.get_xscale() == "log"
    assert shown.title == "Errors are 0.61 of PyTorch's on average, at most 0.75"


def test_what_was_not_measured_is_not_drawn(results):
    assert set(pictures_of(results(LINEAR))) == {"speedup.nvidia_h200", "errors.nvidia_h200"}
    assert set(pictures_of(results(rows(peers={"bare": 50.0})))) == {"errors.nvidia_h200"}
    assert not pictures_of(results([first_call()], experiment="first_call"))
    assert not pictures_of(results([red(), cell(errors={"output": [1e-3, 1e-3]}, shape="16x1024x1024")]))


def test_errors_that_have_no_place(results):
    """None and zero cannot be drawn on a log scale."""
    assert not pictures_of(results([cell(errors={"output": [None, 0.0], "d_bias": [0.0, 1.0]}, red=True)]))
    content = [cell("L30", errors={"output": [None, 0.0]}, red=True)]
    assert len(draw_all(results(LINEAR + content))) == 4


@pytest.mark.parametrize("theme", THEMES)
def test_themes(theme, results, tmp_path):
    """The background is the page's."""
    path = tmp_path / "picture.png"
    path.write_bytes(draw_all(results(LINEAR))[f"speedup.nvidia_h200.{theme}.png"])
    image = pyplot.imread(path)
    assert to_hex(image[2, 2]) == THEMES[theme].page
    assert image.shape[1] == 1660


def test_files(results):
    """They have the same bytes every time, and no figure stays open."""
    first, second = (draw_all(results(LINEAR + grid())) for _ in range(2))
    assert first == second and len(first) == 8
    assert all(picture.startswith(b"\x89PNG") for picture in first.values())
    assert not pyplot.get_fignums()


def test_what_is_current(results, tmp_path):
    """A file is current if it shows these results."""
    shown = results(LINEAR + grid())
    for name, content in draw_all(shown).items():
        (tmp_path / name).write_bytes(content)
    assert not_current(shown, tmp_path) == []
    (tmp_path / "errors.nvidia_h200.dark.png").write_bytes(b"another")
    (tmp_path / "speedup.nvidia_h200.light.png").unlink()
    stale = not_current(results(LINEAR + grid(0.25)), tmp_path)
    assert {path.name for path in stale} == {
        "errors.nvidia_h200.dark.png",
        "speedup.nvidia_h200.light.png",
        *(f"growth_{mode}.nvidia_h200.{theme}.png" for mode in ("forward", "training") for theme in THEMES),
    }
    assert len(not_current(results(LINEAR + grid(), torch="2.12"), tmp_path)) == 8
