"""The command line of ``python -m bench``."""

import argparse
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import torch

from bench.cells import CHAINS, DTYPES, MEMORY_FORMATS, MODES, Cell
from bench.chain import PRECISIONS, Shape
from bench.convolution_chains import ConvolutionShape
from bench.linear_chains import LinearShape

PEERS = ("library", "eager", "compile", "compile-max")


class _Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def _names(known):
    """An argument type: names out of ``known``, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def _form(shape_class: type[Shape]) -> str:
    return " x ".join(field.name for field in fields(shape_class))


def _shapes(shape_class: type[Shape]):
    """An argument type: shapes of this class, separated by commas."""

    def parse(text: str) -> list[Shape]:
        shapes = []
        for item in text.split(","):
            if not re.fullmatch("x".join([r"[1-9]\d*"] * len(fields(shape_class))), item):
                raise argparse.ArgumentTypeError(f"{item!r} is not {_form(shape_class)}, all positive integers")
            shapes.append(shape_class(*map(int, item.split("x"))))
        return shapes

    return parse


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _parse(arguments: list[str] | None, on_gpu: bool) -> argparse.Namespace:
    parser = _Parser(
        prog="bench",
        description="Check the chains against float64, then time them beside their peers. Lists are separated by "
        "commas. Exit status: 0, 1 if a check is red, 2 for a bad argument.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # compile-max is left out where nobody asks for it: it tunes for minutes.
    rounds, peers = (20, PEERS[:3]) if on_gpu else (1, PEERS[:2])
    linear, convolution = ("1024x8192x8192", "128x64x64x256x256x3") if on_gpu else ("8x64x64", "2x16x16x5x6x3")
    parser.add_argument("--chains", type=_names(CHAINS), default=",".join(CHAINS), help="of " + ", ".join(CHAINS))
    parser.add_argument("--dtypes", type=_names(DTYPES), default=",".join(DTYPES), help="of " + ", ".join(DTYPES))
    parser.add_argument(
        "--precisions",
        type=_names(PRECISIONS),
        default="highest,high",
        help="for float32 alone: matmul precisions, of " + ", ".join(PRECISIONS) + "; for the convolution of l19 high "
        "allows TF32, highest does not, and there is no medium",
    )
    parser.add_argument("--modes", type=_names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--shapes", type=_shapes(LinearShape), default=linear, help=_form(LinearShape))
    parser.add_argument(
        "--convolution-shapes",
        type=_shapes(ConvolutionShape),
        default=convolution,
        help="for l19: " + _form(ConvolutionShape),
    )
    parser.add_argument(
        "--memory-formats",
        type=_names(MEMORY_FORMATS),
        default=",".join(MEMORY_FORMATS),
        help="for l19, of " + ", ".join(MEMORY_FORMATS),
    )
    parser.add_argument("--peers", type=_names(PEERS), default=",".join(peers), help="of " + ", ".join(PEERS))
    parser.add_argument("--rounds", type=_positive, default=rounds, help="timed calls of each peer")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the rows here; rewritten after every cell")
    options = parser.parse_args(arguments)
    if not _cells(options):
        parser.error(f"argument --precisions: {','.join(options.chains)} has no {','.join(options.precisions)}")
    return options


def _cells(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(chain, dtype, precision, mode, shape, memory_format)
        for shape in options.shapes + options.convolution_shapes
        for dtype in options.dtypes
        for precision in (options.precisions if dtype == "float32" else [None])
        for mode in options.modes
        for chain in map(CHAINS.get, options.chains)
        if isinstance(shape, chain.shape_class) and (precision is None or precision in chain.precisions)
        for memory_format in (options.memory_formats if chain.has_memory_format else [None])
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; returns the exit status."""
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
    options = _parse(arguments, on_gpu)
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which bench.run is the first to do
    from bench.run import run

    return run(_cells(options), options.peers, options.rounds, torch.device("cuda" if on_gpu else "cpu"), options.json)


if __name__ == "__main__":
    sys.exit(main())
