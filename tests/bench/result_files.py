"""Small results as the bench writes them, made by hand."""

import json

HEADER = {
    "device": "NVIDIA H200",
    "driver": "580",
    "torch": "2.11",
    "triton": "3.6",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "a" * 40,
}
TARGET = "1024x8192x8192"
CONVOLUTION = "128x64x64x256x256x3"


def header(**others):
    return HEADER | others


def rows(chain="L94", shape=TARGET, ours_us=100.0, peers=None, modes=("forward", "training"), **others):
    """A row for ours and each peer, by their microseconds, in both modes; training takes twice as long."""
    peers = {"library": 80.0, "eager": 200.0} if peers is None else peers
    row = {"chain": chain, "dtype": "bfloat16", "precision": None, "shape": shape, "rounds": 20, "red": False}
    row |= {"error_ours": 1e-3, "error_torch": 2e-3, "error_tensor": "output", "errors": {"output": [1e-3, 2e-3]}}
    return [
        row
        | {
            "mode": mode,
            "peer": peer,
            "median_us": time and time * factor,
            "ratio": time and peers.get("library") and time / peers["library"],
            "ours_to_peer": time and ours_us / time,
        }
        | others
        for mode, factor in (("forward", 1), ("training", 2))
        if mode in modes
        for peer, time in {"ours": ours_us, **peers}.items()
    ]


def first_call(chain="L94", **others):
    row = {"kind": "first_call", "chain": chain, "dtype": "bfloat16", "precision": None, "mode": "forward"}
    row |= {"shape": TARGET, "memory_format": None, "product": "GEMM", "failure": None}
    row |= {
        "import_s": 0.75,
        "first_call_s": 3.25,
        "kernels_compiled": 4,
        "kernels_not_run": [],
        "later_call_us": 199.6,
    }
    return row | others


def write(path, rows, **others):
    """A file of these rows, with this in its header; returns its path."""
    path.write_text(json.dumps({"header": header(**others), "rows": rows}))
    return path
