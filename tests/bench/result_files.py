"""Small results as the bench writes them, made by hand."""

import json

RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "a" * 40,
    "driver": "580",
    "torch": "2.11",
    "triton": "3.6",
}
DEVICE = "NVIDIA H200"
TARGET = "1024x8192x8192"
CONVOLUTION = "128x64x64x256x256x3"
#: Two chains of the family.
NORM, LINEAR = "group_norm_silu", "linear_relu_mul_add"


def header(experiment="times", device=DEVICE):
    return {"schema": 1, "experiment": experiment, "device": device}


def cell(chain="L94", shape=TARGET, mode="forward", **others):
    """What identifies a row."""
    product = "convolution" if chain == "L19" else "norm" if chain == NORM else "GEMM"
    return {"chain": chain, "product": product, "shape": shape, "dtype": "bfloat16", "mode": mode} | others


def rows(chain="L94", shape=TARGET, ours_us=100.0, peers=None, modes=("forward", "training"), **others):
    """A row for each mode: ours and each peer, by their microseconds; training takes twice as long."""
    peers = {"bare": 80.0, "eager": 200.0} if peers is None else peers
    return [
        cell(chain, shape, mode, errors={"output": [1e-3, 2e-3]}, rounds=20)
        | {
            "peers": {"ours": {"us": ours_us * factor}}
            | {peer: {"us": time * factor, "ours_over": ours_us / time} for peer, time in peers.items()}
        }
        | others
        for mode, factor in (("forward", 1), ("training", 2))
        if mode in modes
    ]


def red(chain="L94", shape=TARGET, mode="forward"):
    return cell(chain, shape, mode, red=True, peers={"ours": {"failure": "no"}})


def first_call(chain="L94", **others):
    row = {"import_s": 0.75, "first_call_s": 3.25, "kernels": ["a", "b"], "kernels_not_run": [], "later_call_us": 199.6}
    return cell(chain) | row | others


def lines(*parts):
    return "".join(json.dumps(part) + "\n" for part in parts)


def write(path, rows, experiment="times", device=DEVICE, **run):
    """A file of these rows, with this in their run; returns its path."""
    path.write_text(lines(header(experiment, device), {"run": RUN | run}, *rows))
    return path
