"""``python -m bench`` without a command: which cells to measure, and beside whom."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from autotune_configs.command_line import Parser, names, positive
from bench.cells import CHAINS, DTYPES, MEMORY_FORMATS, Cell
from bench.chain import PRECISIONS, Shape
from bench.convolution_chains import ConvolutionChain, ConvolutionShape
from bench.device import device_to_measure
from bench.linear_chains import LinearChain, LinearShape
from bench.recording import add_output
from bench.schema import BARE, MODES, PYTORCH
from bench.sizes import GRID, GRID_BATCHES, GRID_DTYPES, GRID_FEATURES, SMALL, TARGET

PEERS = (BARE, *PYTORCH)


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


def _parse(arguments: list[str], prog: str, on_gpu: bool) -> argparse.Namespace:
    parser = Parser(
        prog=prog,
        description="Check the chains against float64, then time them beside their peers on a GPU. Lists are separated "
        "by commas. Exit status: 0, 1 if a check is red, 2 for a bad argument.",
        epilog="Other commands: report (tables and pictures of results), merge (several results files into one), "
        "first-call (a fresh process with nothing compiled), captured (compiled and captured calls beside eager ones), "
        f"tensor-parallel (chains on shards). {prog} COMMAND --help describes each.",
    )
    default_shapes = TARGET if on_gpu else SMALL
    parser.add_argument("--chains", type=names(CHAINS), help=f"of {', '.join(CHAINS)}; all where not given")
    parser.add_argument("--dtypes", type=names(DTYPES), help=f"of {', '.join(DTYPES)}; all where not given")
    parser.add_argument(
        "--precisions",
        type=names(PRECISIONS),
        default="highest,high",
        help="for float32 alone: matmul precisions, of " + ", ".join(PRECISIONS) + "; for the convolution of l19 high "
        "allows TF32, highest does not, and there is no medium",
    )
    parser.add_argument("--modes", type=names(MODES), default=",".join(MODES), help="of " + ", ".join(MODES))
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--shapes", type=_shapes(LinearShape), default=default_shapes[LinearChain.product], help=_form(LinearShape)
    )
    shapes.add_argument(
        "--grid",
        action="store_true",
        help=f"instead of --shapes: batches of {_listed(GRID_BATCHES)}, each with {_listed(GRID_FEATURES)} features in "
        f"and out; the Linear chains, and {_listed(GRID_DTYPES)}, where no others are given",
    )
    parser.add_argument(
        "--convolution-shapes",
        type=_shapes(ConvolutionShape),
        default=default_shapes[ConvolutionChain.product],
        help="for l19: " + _form(ConvolutionShape),
    )
    parser.add_argument(
        "--memory-formats",
        type=names(MEMORY_FORMATS),
        default=",".join(MEMORY_FORMATS),
        help="for l19, of " + ", ".join(MEMORY_FORMATS),
    )
    parser.add_argument(
        "--peers",
        type=names(PEERS),
        default=",".join(PEERS[:-1]),
        help=f"of {', '.join(PEERS)}: the product or convolution alone (by cuBLAS or cuDNN), PyTorch's chain, the same "
        "with torch.compile, and with its max-autotune, which tunes for minutes",
    )
    parser.add_argument("--rounds", type=positive, default=20, help="timed calls of each peer")
    add_output(parser)
    parser.add_argument(
        "--turns",
        type=Path,
        metavar="FILE",
        help="hold this file's lock to check and time, so that processes that share a GPU compile side by side; give "
        "each process an --output of its own and merge them",
    )
    options = parser.parse_args(arguments)
    if options.grid:
        _choose_grid(options, parser)
    options.chains = options.chains or list(CHAINS)
    options.dtypes = options.dtypes or list(DTYPES)
    if not _cells(options):
        parser.error(f"argument --precisions: {','.join(options.chains)} has no {','.join(options.precisions)}")
    return options


def _choose_grid(options: argparse.Namespace, parser: Parser) -> None:
    """The grid's shapes, and its chains and dtypes where no others were given."""
    with_grid = [name for name, chain in CHAINS.items() if chain.shape_class is LinearShape]
    options.chains = options.chains or with_grid
    without = [name for name in options.chains if name not in with_grid]
    if without:
        parser.error(f"argument --grid: {', '.join(without)} has no grid")
    options.dtypes = options.dtypes or list(GRID_DTYPES)
    options.shapes = [LinearShape(batch, features, features) for batch, features in GRID.values()]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _cells(options: argparse.Namespace) -> list[Cell]:
    return [
        Cell(chain, dtype, precision, mode, shape, memory_format)
        for shape in options.shapes + options.convolution_shapes
        for dtype in options.dtypes
        for precision in (options.precisions if dtype == "float32" else [None])
        for mode in options.modes
        for chain in (CHAINS[name] for name in options.chains)
        if isinstance(shape, chain.shape_class) and (precision is None or precision in chain.precisions)
        for memory_format in (options.memory_formats if chain.has_memory_format else [None])
    ]


def main(arguments: list[str], prog: str) -> int:
    """Measure; returns the exit status."""
    device = device_to_measure()
    options = _parse(arguments, prog, device.type == "cuda")
    from bench.run import run  # this imports triton

    return run(_cells(options), options.peers, options.rounds, device, options.output, options.turns)
