"""Draw results of the bench, one message a picture, for light and dark pages."""

import hashlib
import io
import math
import statistics
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.columns import number
from bench.results import BadResult, DeviceResults, chains_by_shape, model_ratios
from bench.schema import COMPILERS, MODES, PYTORCH, TimesRow
from bench.sizes import GRID, GRID_BATCHES, GRID_FEATURES

#: Inches, and dots an inch. A page shows the picture 830 pixels wide, so it has two dots a pixel, for sharp text.
_WIDTH, _DPI = 8.3, 200
_MODE_TITLES = {"forward": "Forward", "training": "Training step"}


#: Colours of the page and of what is drawn. Colour-blind readers can tell them apart.
Theme = namedtuple("Theme", "page text faint ours second slower")
THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d0d7de", "#0072b2", "#8c959f", "#d55e00"),
    "dark": Theme("#0d1117", "#e6edf3", "#3d444d", "#4da3e0", "#9198a1", "#f0883e"),
}


@dataclass(frozen=True)
class Picture:
    """All that a picture shows; ``draw`` makes it, in one theme."""

    title: str
    caption: str
    #: What is plotted, one tuple a cell.
    values: tuple[Any, ...]
    draw: Callable[["Picture", Theme], Any]

    @property
    def digest(self) -> str:
        """Changes with what is shown, whatever drew it. It is kept in the file."""
        return hashlib.sha256(repr((self.title, self.caption, self.values)).encode()).hexdigest()


def pictures_of(results: DeviceResults) -> dict[str, Picture]:
    """By name; a picture of which nothing was measured is left out."""
    growth = {f"growth_{mode}": _growth(results, mode) for mode in MODES}
    found = {
        "speedup": _speedup(results),
        "family": _family(results),
        "errors": _errors(results),
        "models": _models(results),
        **growth,
    }
    return {f"{name}.{results.slug}": picture for name, picture in found.items() if picture}


def files_of(results: DeviceResults) -> dict[str, tuple[Picture, Theme]]:
    """What each file shows, by the file's name."""
    return {
        f"{name}.{theme}.png": (picture, colours)
        for name, picture in pictures_of(results).items()
        for theme, colours in THEMES.items()
    }


def draw_all(results: DeviceResults) -> dict[str, bytes]:
    """PNG files by name, in both themes; BadResult where matplotlib is missing."""
    try:
        return {name: _png(*shown) for name, shown in files_of(results).items()}
    except ModuleNotFoundError as error:
        raise BadResult(f'drawing needs {error.name}: pip install "normfuse[bench]"') from None


def not_current(results: DeviceResults, folder: Path) -> list[Path]:
    """The files that do not show these results, or are missing."""
    found = ((folder / name, picture) for name, (picture, _) in files_of(results).items())
    return [path for path, picture in found if not (path.is_file() and picture.digest.encode() in path.read_bytes())]


def _contiguous(rows: Iterable[TimesRow]) -> list[TimesRow]:
    """Those without images, and those with contiguous ones."""
    return [row for row in rows if row.memory_format in (None, "contiguous")]


# How many times as fast as PyTorch


def _speedup(results: DeviceResults) -> Picture | None:
    rows = [row for row in _contiguous(results.target) if row.dtype == "bfloat16" and row.us]
    values: Any = tuple((row.mode, row.chain, _over(row, COMPILERS), _over(row, ("eager",))) for row in rows)
    compiled, eager = ([value[place] for value in values if value[place] is not None] for place in (2, 3))
    if not compiled or not eager:
        return None
    title = f"{_span(compiled)} times as fast as torch.compile, {_span(eager)} times as fast as eager PyTorch"
    shapes = "; ".join(f"{chains} at {shape}" for (_, shape), chains in chains_by_shape(rows).items())
    return Picture(title, f"bfloat16, {shapes}\n{results.setup(rows)}", values, _draw_speedup)


def _over(row: TimesRow, peers: tuple[str, ...]) -> float | None:
    closest = row.closest(peers)
    return None if closest is None else round(1 / closest[1], 3)


def _span(values: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def _draw_speedup(picture: Picture, theme: Theme):
    chains = list(dict.fromkeys(value[1] for value in picture.values))
    figure, panels = _labelled_panels(chains, 3.5)
    series = ((2, -0.19, "over torch.compile", theme.ours), (3, 0.19, "over eager PyTorch", theme.second))
    for panel, (mode, title) in zip(panels, _MODE_TITLES.items(), strict=True):
        for place, offset, label, colour in series:
            found = [value for value in picture.values if value[0] == mode and value[place] is not None]
            heights = [chains.index(value[1]) + offset for value in found]
            bars = panel.barh(heights, [value[place] for value in found], 0.36, color=colour, label=label)
            panel.bar_label(bars, fmt="%.2f×", padding=3)
        panel.axvline(1.0, color=theme.text, linewidth=1)
        panel.set(title=title, xlabel="times as fast (1: as fast as PyTorch)")
        panel.tick_params(length=0)
    most = max(over for value in picture.values for over in value[2:] if over is not None)
    panels[0].set(xlim=(0, 1.18 * most))
    panels[0].legend(loc="upper right", frameon=False)
    return figure


# The family


def _family(results: DeviceResults) -> Picture | None:
    """Over the best of PyTorch, in every memory format: a bar a cell, below the name of its chain."""
    rows = [row for row in results.family if row.dtype == "bfloat16" and row.closest()]
    values: Any = tuple(
        (row.mode, row.chain, " ".join(filter(None, (row.shape, row.memory_format))), _over(row, PYTORCH))
        for row in rows
    )
    if not values:
        return None
    title = f"The family: {_span([value[3] for value in values])} times as fast as the best of PyTorch"
    caption = f"bfloat16; the best of eager PyTorch and torch.compile; orange: slower\n{results.setup(rows)}"
    return Picture(title, caption, values, _draw_family)


def _draw_family(picture: Picture, theme: Theme):
    chains = list(dict.fromkeys(value[1] for value in picture.values))
    lines = [
        line
        for chain in chains
        for line in dict.fromkeys([(chain, ""), *(value[1:3] for value in picture.values if value[1] == chain)])
    ]
    figure, panels = _labelled_panels([cell or chain for chain, cell in lines], 1.2 + 0.22 * len(lines))
    for label, (_, cell) in zip(panels[0].get_yticklabels(), lines, strict=True):
        label.set(fontweight="normal" if cell else "bold", fontsize=8.5)
    for panel, (mode, title) in zip(panels, _MODE_TITLES.items(), strict=True):
        found = [value for value in picture.values if value[0] == mode]
        over = [value[3] for value in found]
        colours = [theme.ours if each >= 1 else theme.slower for each in over]
        bars = panel.barh([lines.index(value[1:3]) for value in found], over, 0.72, color=colours)
        panel.bar_label(bars, fmt="%.2f×", padding=4, fontsize=8.5, bbox={"color": theme.page, "pad": 1})
        panel.axvline(1.0, color=theme.text, linewidth=1)
        panel.set(title=title, xlabel="times as fast (1: as fast as PyTorch)")
        panel.tick_params(length=0)
    most = max(value[3] for value in picture.values)
    panels[0].set(xlim=(0, 1.25 * most), ylim=(len(lines) - 0.5, -0.5))  # the first line is a name, without a bar
    return figure


# Errors beside PyTorch's


def _errors(results: DeviceResults) -> Picture | None:
    """Of the forward pass, the output's errors. Of a training step, those whose ratio to PyTorch's is the largest."""
    used = [(row, tensor) for row in _contiguous(results.target) if (tensor := row.worst_tensor)]
    if not used:
        return None
    values: Any = tuple(
        (row.mode, f"{row.chain} {row.setting}", tensor, *(float(number(error, ".3g")) for error in row.errors[tensor]))
        for row, tensor in used
    )
    ratios = [ours / torch for *_, ours, torch in values]
    title = f"Errors are {statistics.geometric_mean(ratios):.2f} of PyTorch's on average, at most {max(ratios):.2f}"
    setup = results.setup(row for row, _ in used)
    return Picture(title, f"norm(result - float64) / norm(float64), lower is better\n{setup}", values, _draw_errors)


def _draw_errors(picture: Picture, theme: Theme):
    labels = list(dict.fromkeys(value[1] for value in picture.values))
    figure, panels = _labelled_panels(labels, 1.9 + 0.24 * len(labels))
    titles = {"forward": "Forward: output", "training": "Training step: tensor of the largest ratio"}
    for panel, (mode, title) in zip(panels, titles.items(), strict=True):
        found = [value for value in picture.values if value[0] == mode]
        places = [labels.index(value[1]) for value in found]
        ours, torch = ([value[place] for value in found] for place in (3, 4))
        panel.hlines(places, ours, torch, color=theme.faint, linewidth=2, zorder=1)
        panel.scatter(torch, places, s=38, color=theme.second, marker="s", label="PyTorch")
        panel.scatter(ours, places, s=34, color=theme.ours, label="normfuse")
        if mode == "training":
            for place, value in zip(places, found, strict=True):
                at = (max(value[3:]), place)
                panel.annotate(value[2], at, (7, 0), textcoords="offset points", va="center", fontsize=8)
        panel.set(title=title, xscale="log", axisbelow=True)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color=theme.faint, linewidth=0.6)
    errors = [error for value in picture.values for error in value[3:]]
    panels[0].set(xlim=(min(errors) / 3, max(errors) * 60))  # room for the tensors' names
    panels[0].legend(loc="upper left", facecolor=theme.page, edgecolor=theme.faint, framealpha=1)
    return figure


# Whole models


def _models(results: DeviceResults) -> Picture | None:
    """The backend's time over Inductor's, and beside it Inductor's with torch 2.15's group norm."""
    found = model_ratios(results)
    values = tuple(
        (f"{row.chain} {row.mode} {row.layout}", name, round(device, 3), round(wall, 3))
        for row, name, device, wall in found
    )
    ours = [value[2:] for value in values if value[1] == "normfuse"]
    if not ours:
        return None
    means = [f"{statistics.geometric_mean(ratios):.2f}" for ratios in zip(*ours, strict=True)]
    title = f"Whole models take {means[0]} of Inductor's time on the device, {means[1]} on the wall clock"
    caption = "Time of a step over Inductor's, geometric means above; orange: slower; |: Inductor as of torch 2.15\n"
    return Picture(title, caption + results.setup(row for row, *_ in found), values, _draw_models)


def _draw_models(picture: Picture, theme: Theme):
    labels = list(dict.fromkeys(value[0] for value in picture.values))
    figure, panels = _labelled_panels(labels, 1.4 + 0.28 * len(labels))
    for panel, (place, title) in zip(panels, ((2, "Device"), (3, "Wall clock")), strict=True):
        ours, newer = (
            [(labels.index(value[0]), value[place]) for value in picture.values if value[1] == name]
            for name in ("normfuse", "inductor-2.15")
        )
        colours = [theme.ours if ratio <= 1 else theme.slower for _, ratio in ours]
        bars = panel.barh([at for at, _ in ours], [ratio for _, ratio in ours], 0.66, color=colours)
        panel.bar_label(bars, fmt="%.2f", padding=4, fontsize=8.5, bbox={"color": theme.page, "pad": 1})
        panel.scatter([ratio for _, ratio in newer], [at for at, _ in newer], 90, theme.text, marker="|", linewidths=2)
        panel.axvline(1.0, color=theme.text, linewidth=1)
        panel.set(title=title, xlabel="time over Inductor's")
        panel.tick_params(length=0)
    most = max(1.0, *(ratio for value in picture.values for ratio in value[2:]))
    panels[0].set(xlim=(0, 1.2 * most), ylim=(len(labels) - 0.4, -0.6))
    return figure


# Growth over batch and features


def _growth(results: DeviceResults, mode: str) -> Picture | None:
    """Of the chains with a name: the tables have the family's."""
    rows = [row for row in results.grid if row.mode == mode and not row.is_of_family]
    found = [(row, closest[1]) for row in rows if (closest := row.closest())]
    values = tuple((row.setting, row.chain, *GRID[row.shape], round(ratio, 2)) for row, ratio in found)
    if not values:
        return None
    faster = sum(value[-1] <= 1 for value in values)
    title = f"{_MODE_TITLES[mode]}: as fast as PyTorch or faster at {faster} of {len(values)} sizes"
    caption = "Time over the best of eager PyTorch and torch.compile; below 1 (blue), normfuse is faster\n"
    return Picture(title, caption + results.setup((row for row, _ in found)), values, _draw_growth)


def _draw_growth(picture: Picture, theme: Theme):
    """A panel a dtype and chain; batches down, features across, a number a size."""
    from matplotlib.colors import LinearSegmentedColormap

    settings, chains = (list(dict.fromkeys(value[place] for value in picture.values)) for place in (0, 1))
    figure, panels = _figure(len(settings), len(chains), 0.9 + 2.3 * len(settings))
    colours = LinearSegmentedColormap.from_list("ratio", [theme.ours, theme.page, theme.slower])
    for setting, row in zip(settings, panels, strict=True):
        for chain, panel in zip(chains, row, strict=True):
            ratios = {value[2:4]: value[4] for value in picture.values if value[:2] == (setting, chain)}
            image = [
                [math.log2(ratios.get((batch, size), math.nan)) for size in GRID_FEATURES] for batch in GRID_BATCHES
            ]
            panel.imshow(image, cmap=colours, vmin=-2, vmax=2, aspect="auto")
            for (batch, size), ratio in ratios.items():
                at = GRID_FEATURES.index(size), GRID_BATCHES.index(batch)
                colour = theme.text if abs(math.log2(ratio)) < 1.3 else theme.page  # for contrast
                panel.text(*at, f"{ratio:.2f}", ha="center", va="center", fontsize=8, color=colour)
            panel.set(title=f"{chain} {setting}", xlabel="features", ylabel="batch")
            panel.set_xticks(range(len(GRID_FEATURES)), [f"{size // 1024}k" for size in GRID_FEATURES])
            panel.set_yticks(range(len(GRID_BATCHES)), GRID_BATCHES)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            panel.label_outer()
    return figure


def _labelled_panels(labels: Sequence[str], height: float):
    figure, (panels,) = _figure(1, len(MODES), height)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].invert_yaxis()
    for panel in panels:
        panel.spines[["top", "right", "left"]].set_visible(False)
    return figure, panels


def _figure(rows: int, columns: int, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)


def _png(picture: Picture, theme: Theme) -> bytes:
    """The same bytes for the same picture and versions."""
    import matplotlib

    text = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    page = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    sizes = {"font.size": 9.5, "axes.titlesize": 10.5}
    style: dict[Any, Any] = dict.fromkeys(text, theme.text) | dict.fromkeys(page, theme.page) | sizes
    with matplotlib.rc_context(style):
        figure = picture.draw(picture, theme)
        figure.suptitle(picture.title, fontsize=11, fontweight="bold")
        figure.supxlabel(picture.caption, fontsize=8.5)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=_DPI, metadata={"Software": None, "Data": picture.digest})
    return content.getvalue()
