"""Draw a JSON result of the bench: each peer's time over the bare library GEMM's. ``python -m bench.chart JSON PNG``"""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot

matplotlib.use("Agg")

#: Names and colours by peer, in the order they are drawn (a palette that colour-blind readers can tell apart).
_PEERS = {
    "ours": ("normfuse", "#0072b2"),
    "compile-max": ("torch.compile, max-autotune", "#56b4e9"),
    "compile": ("torch.compile", "#e69f00"),
    "eager": ("PyTorch eager", "#999999"),
}
_MODES = {"forward": "Forward, over one library GEMM", "training": "Training step, over its three library GEMMs"}


def draw(result: dict, path: Path) -> None:
    """One panel a mode, one group of bars a chain and dtype; the line at 1 is the bare library GEMM."""
    rows = [row for row in result["rows"] if row["ratio"] is not None and row["peer"] in _PEERS]
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 7), sharey=True, layout="constrained")
    labels = list(dict.fromkeys(_label(row) for row in rows))
    peers = [peer for peer in _PEERS if any(row["peer"] == peer for row in rows)]
    height = 0.8 / len(peers)
    for panel, (mode, title) in zip(panels, _MODES.items(), strict=True):
        for index, peer in enumerate(peers):
            name, colour = _PEERS[peer]
            bars = [
                (labels.index(_label(row)), row["ratio"]) for row in rows if (row["mode"], row["peer"]) == (mode, peer)
            ]
            places = [place + (index - (len(peers) - 1) / 2) * height for place, _ in bars]
            drawn = panel.barh(places, [ratio for _, ratio in bars], height, color=colour, label=name)
            if peer == "ours":
                panel.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
        panel.axvline(1.0, color="black", linewidth=1)
        panel.set_title(title)
        panel.set_xlabel("time / bare library GEMM (lower is better)")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].invert_yaxis()
    panels[1].legend(frameon=False, loc="lower right")
    header = result["header"]
    rounds = max(row["rounds"] for row in rows)
    figure.suptitle(
        f"{header['device']}, torch {header['torch']}, triton {header['triton']}, {rows[0]['shape']}, "
        f"median of {rounds} interleaved rounds",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _label(row: dict) -> str:
    return f"{row['chain']} {row['dtype']}" + (f" {row['precision']}" if row["precision"] else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.chart", description=__doc__)
    parser.add_argument("json", type=Path, help="what python -m bench --json wrote")
    parser.add_argument("png", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    draw(json.loads(arguments.json.read_text()), arguments.png)
