"""The command line of ``python -m autotune_configs``: sweep, show, check."""

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path

import torch
import triton

from autotune_configs import lookup, reporting, sweep, tables
from autotune_configs.chains import CHAINS, DTYPES, GRID, PASSES, LinearChain
from autotune_configs.files import locked
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.precompile import Precompiler
from autotune_configs.problem import Problem
from triton_kernels.device import INTERPRETED

#: Small shapes of the chains for Triton's interpreter, by the number of their sizes.
_INTERPRETED_SHAPES = {3: (8, 64, 64), 6: (2, 16, 16, 5, 6, 3)}
#: A chain or a kernel by its name, a dtype, and sizes.
_Case = tuple[str, str, tuple[int, ...]]


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


def _shapes(text: str) -> list[tuple[int, ...]]:
    shapes = []
    for item in text.split(","):
        if not re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9})+", item):
            raise argparse.ArgumentTypeError(f"{item[:40]!r} is no shape: positive integers, as in 1024x8192x8192")
        shapes.append(tuple(map(int, item.split("x"))))
    return shapes


def _positive(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return float(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _gpu(text: str) -> Gpu:
    try:
        return Gpu.called(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None


def _own_folder() -> str:
    try:
        return str(tables.user_folder())
    except OSError as error:
        return f"{error.filename} ({error.strerror})"


def _parser() -> _Parser:
    parser = _Parser(
        prog="autotune_configs",
        description="Find, show and check the configs (block sizes and the like) that kernels run with. Lists are "
        f"separated by commas. Tables of your own lie in {_own_folder()}; {tables.FOLDER_VARIABLE} names "
        "another folder. Exit status: 0, 1 if something is found wrong, 2 for a bad argument.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def add(name: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=description, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def add_problems(command: argparse.ArgumentParser) -> None:
        kernels = "; ".join(f"{name}: {' x '.join(kernel.size_names)}" for name, kernel in KERNELS.items())
        chains = "; ".join(f"{name}: {' x '.join(chain.form)}" for name, chain in CHAINS.items())
        command.add_argument(
            "--names", type=_names((*CHAINS, *KERNELS)), default=",".join(CHAINS), help="chains and kernels"
        )
        command.add_argument("--dtypes", type=_names(DTYPES), default=",".join(DTYPES), help="of " + ", ".join(DTYPES))
        command.add_argument("--passes", type=_names(PASSES), default=",".join(PASSES), help="of a chain")
        command.add_argument(
            "--shapes", type=_shapes, help=f"default: a chain's target shape. Sizes are, for {chains}; {kernels}"
        )

    sweep = add("sweep", "Try configs on this GPU and put the best of those that are right into your own table.")
    add_problems(sweep)
    sweep.add_argument("--grid", action="store_true", help="for Linear chains: batch 1 to 4096 x features 1k to 16k")
    sweep.add_argument(
        "--quick",
        action="store_true",
        help="only the heuristic's config and what tables say of the problem, or of it in the other dtype of 16 bits",
    )
    sweep.add_argument("--budget-seconds", type=_positive, help="end then, with the best so far")
    sweep.add_argument("--again", action="store_true", help="also what the table has already")
    sweep.add_argument("--processes", type=_count, help="that compile meanwhile; default: one for each core")
    show = add("show", "Which config would be used for a problem, and where it is from.")
    add_problems(show)
    show.add_argument("--gpu", type=_gpu, help="a GPU that need not be here, by its driver's name for it")
    check = add("check", "Compile every entry of every table, without a GPU, for the GPU that it is for.")
    check.add_argument("tables", type=Path, nargs="*", help="default: the shipped tables and your own")
    check.add_argument("--processes", type=_count, help="that compile; default: one for each core")
    return parser


def _cases(options: argparse.Namespace, parser: _Parser) -> list[_Case]:
    """Shape by shape, in the order given; each name at the shapes that have as many sizes as it."""
    forms = {name: CHAINS[name].form if name in CHAINS else KERNELS[name].size_names for name in options.names}
    shapes = options.shapes or []
    with_grid = getattr(options, "grid", False)
    if not shapes:
        targets = [CHAINS[name].target for name in options.names if name in CHAINS]
        shapes = [_INTERPRETED_SHAPES[len(target)] if INTERPRETED else target for target in targets]
    if with_grid:
        shapes = [*shapes, *GRID]
    for name, form in forms.items():
        if not any(len(shape) == len(form) for shape in shapes):
            parser.error(f"argument --shapes: {name} takes {' x '.join(form)}")
    cases = (
        (name, dtype, shape)
        for shape in shapes
        for name, form in forms.items()
        if len(form) == len(shape)
        for dtype in options.dtypes
    )
    return list(dict.fromkeys(cases))


def _problems(cases: list[_Case], options: argparse.Namespace, parser: _Parser, gpu: Gpu) -> list[Problem]:
    """Each once, in the order of the cases."""
    problems = [
        problem
        for case in cases
        for problem in (
            _problems_of_chain(case, tuple(options.passes), gpu) if case[0] in CHAINS else _problems_of_kernel(case)
        )
    ]
    problems = list(dict.fromkeys(problems))
    for problem in problems:
        if not KERNELS[problem.kernel].takes(problem):
            parser.error(f"argument --shapes: {problem} is no problem of the kernel: its groups must be whole")
    if not problems:
        parser.error(f"argument --passes: {','.join(options.names)} has none that is looked up")
    return problems


def _problems_of_chain(case: _Case, passes: tuple[str, ...], gpu: Gpu) -> list[Problem]:
    """Those that the chain looks up on this GPU."""
    name, dtype, sizes = case
    chain = CHAINS[name]
    if isinstance(chain, LinearChain):
        problems = chain.problems(sizes, dtype, passes, by_library=_library_multiplies(case, gpu))
    else:
        problems = chain.problems(sizes, dtype, passes)
    if gpu.splits_float32:
        return [problem for problem in problems if problem.precision is None]
    return problems


def _library_multiplies(case: _Case, gpu: Gpu) -> bool:
    """Whether this is a Linear chain in 16 bits whose product is the library's."""
    name, dtype, sizes = case
    if not isinstance(CHAINS.get(name), LinearChain) or dtype == "float32":
        return False
    M, K, N = sizes
    return gpu.library_multiplies(M, N, K)


def _problems_of_kernel(case: _Case) -> list[Problem]:
    name, dtype, sizes = case
    kernel = KERNELS[name]
    return [Problem(name, dtype, sizes, kernel.precision(dtype), layout) for layout in kernel.layouts]


def _device(parser: _Parser) -> torch.device:
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        parser.error("no GPU is here; with TRITON_INTERPRET=1 set, a sweep goes through the motions on the CPU")
    return torch.device("cuda", torch.cuda.current_device())


def _sweep(options: argparse.Namespace, parser: _Parser) -> int:
    device = _device(parser)
    gpu = Gpu.of(device)
    problems = _problems(_cases(options, parser), options, parser, gpu)
    try:
        table = tables.user_path(gpu)
        with locked(table), contextlib.suppress(ValueError):  # what is no table is kept beside the new one
            tables.entries_of(table, gpu)
    except OSError as error:
        parser.error(f"cannot write your tables: {error}")
    dropped = [f"--{name}" for name in ("again", "quick") if getattr(options, name)]
    interpreted = {"prepare": lambda call: call, "clock": sweep.time_on_host}
    with (
        reporting.SweepReport(gpu, table, len(problems), dropped) as report,
        Precompiler(gpu, options.processes) as precompiler,
    ):
        return report.run(
            lambda: sweep.sweep_and_store(
                problems,
                device,
                budget=options.budget_seconds,
                again=options.again,
                is_quick=options.quick,
                **(interpreted if INTERPRETED else {"resources": precompiler}),
                on_problem=report.begin,
                on_outcome=report.add_outcome,
                on_result=report.add_result,
            )
        )


def _show(options: argparse.Namespace, parser: _Parser) -> int:
    gpu = options.gpu
    if gpu is None:
        if not torch.cuda.is_available() and not INTERPRETED:
            parser.error("no GPU is here: name one with --gpu")
        gpu = Gpu.of(_device(parser))
    cases = _cases(options, parser)
    found = [(problem, lookup.find(problem, gpu)) for problem in _problems(cases, options, parser, gpu)]
    notes = [
        f"{name} {dtype} {'x'.join(map(str, sizes))}: the library multiplies"
        for name, dtype, sizes in cases
        if "forward" in options.passes and _library_multiplies((name, dtype, sizes), gpu)
    ]
    if gpu.lacks_hopper_convolutions and any(problem.kernel == "convolution" for problem, _ in found):
        notes.append(
            f"triton {triton.__version__} cannot compile the convolutions for Hopper: the portable kernel runs forward,"
            " cuDNN backward and for float32"
        )
    reporting.show(gpu, found, notes)
    return 0


def _check(options: argparse.Namespace, parser: _Parser) -> int:
    if INTERPRETED:
        parser.error("kernels do not compile with TRITON_INTERPRET=1 set")
    folders = [tables.shipped_folder()]
    with tables.skipping():
        folders.append(tables.user_folder())
    paths = options.tables or [path for folder in folders for path in sorted(folder.glob("*.json"))]
    for path in paths:
        if not path.is_file():
            parser.error(f"{path} is no file")
    return reporting.check(paths, options.processes or len(os.sched_getaffinity(0)))


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    return {"sweep": _sweep, "show": _show, "check": _check}[options.command](options, parser)


if __name__ == "__main__":
    sys.exit(main())
