"""Draw JSON results of the bench: each peer's time over the library product's. ``python -m bench.chart JSON PNG``"""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Patch

matplotlib.use("Agg")

#: Names and colours by peer, in the order they are drawn (a palette that colour-blind readers can tell apart).
_PEERS = {
    "ours": ("normfuse", "#0072b2"),
    "compile-max": ("torch.compile, max-autotune", "#56b4e9"),
    "compile": ("torch.compile", "#e69f00"),
    "eager": ("PyTorch eager", "#999999"),
}
_MODES = {"forward": "Forward, over one library {}", "training": "Training step, over its three library {}s"}


def draw(result: dict) -> Figure:
    """A row of panels a product (GEMM, convolution) and shape, a panel a mode, a group of bars a chain and dtype.

    The line at 1 is the bare library product.
    """
    rows = [row for row in result["rows"] if row["ratio"] is not None and row["peer"] in _PEERS]
    blocks = {}
    for row in rows:
        blocks.setdefault((_product(row), row["shape"]), []).append(row)
    heights = [len(_labels(block)) for block in blocks.values()]
    figure, panels = pyplot.subplots(
        len(blocks),
        2,
        figsize=(12, 1 + 0.5 * sum(heights) + 0.5 * len(blocks)),
        height_ratios=heights,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    peers = [peer for peer in _PEERS if any(row["peer"] == peer for row in rows)]
    for ((product, shape), block), pair in zip(blocks.items(), panels, strict=True):
        for panel, (mode, title) in zip(pair, _MODES.items(), strict=True):
            present = [peer for peer in peers if any(row["peer"] == peer for row in block)]
            _draw_panel(panel, [row for row in block if row["mode"] == mode], _labels(block), present)
            panel.set_title(title.format(product))
            panel.set_xlabel(f"time / bare library {product} (lower is better)")
        pair[0].set_yticks(range(len(_labels(block))), _labels(block))
        pair[0].set_ylabel(shape)
        pair[0].invert_yaxis()
    figure.align_ylabels(panels[:, 0])
    # From colours, not from bars: a peer may have none in a panel.
    handles = [Patch(color=colour, label=name) for name, colour in (_PEERS[peer] for peer in peers)]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=len(handles))
    header = result["header"]
    rounds = max(row["rounds"] for row in rows)
    figure.suptitle(
        f"{header['device']}, torch {header['torch']}, triton {header['triton']}, "
        f"median of {rounds} interleaved rounds",
        fontsize=10,
    )
    return figure


def _draw_panel(panel, rows: list[dict], labels: list[str], peers: list[str]) -> None:
    height = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        name, colour = _PEERS[peer]
        bars = [(labels.index(_label(row)), row["ratio"]) for row in rows if row["peer"] == peer]
        places = [place + (index - (len(peers) - 1) / 2) * height for place, _ in bars]
        drawn = panel.barh(places, [ratio for _, ratio in bars], height, color=colour, label=name)
        if peer == "ours":
            panel.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    panel.axvline(1.0, color="black", linewidth=1)
    panel.spines[["top", "right"]].set_visible(False)


def _product(row: dict) -> str:
    return row.get("product", "GEMM")  # the only one there was before the rows named it


def _labels(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(map(_label, rows)))


def _label(row: dict) -> str:
    parts = (row["chain"], row["dtype"], row["precision"], row.get("memory_format"))
    return " ".join(part for part in parts if part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.chart", description=__doc__)
    parser.add_argument(
        "json",
        type=Path,
        nargs="+",
        help="what python -m bench --json wrote; several, if of one device, setup and different cells",
    )
    parser.add_argument("png", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in arguments.json]
    rows = [row for result in results for row in result["rows"]]
    draw({"header": results[0]["header"], "rows": rows}).savefig(arguments.png, dpi=110)
