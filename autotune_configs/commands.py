"""The commands of ``python -m autotune_configs``: sweep (with export and merge), show, check."""

import argparse
import contextlib
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autotune_configs import command_line, lookup, reporting, sharing, sweep, tables
from autotune_configs.chains import CHAINS, DTYPES, GRID, PASSES, NamedChain
from autotune_configs.command_line import Parser, positive
from autotune_configs.compositions import composition, is_composition, kernels_of
from autotune_configs.files import locked, replace_file
from autotune_configs.gpus import Gpu, float32_in_registers
from autotune_configs.kernel import Kernel
from autotune_configs.kernels import KERNELS, kernel_of
from autotune_configs.precompile import Precompiler
from autotune_configs.problem import Problem
from autotune_configs.siblings import called_as
from triton_kernels.device import INTERPRETED

#: Small shapes of the chains for Triton's interpreter, by the number of their sizes.
_INTERPRETED_SHAPES = {3: (8, 64, 64), 6: (2, 16, 16, 5, 6, 3)}
_NAMED: dict[str, NamedChain | Kernel] = {**CHAINS, **KERNELS}
#: A chain or a kernel by its name or in words, a dtype, and sizes.
_Case = tuple[str, str, tuple[int, ...]]


def _names(text: str) -> list[str]:
    """Chains and kernels, separated by commas; not by those between the parentheses of a chain in words."""
    found = []
    for item in map(str.strip, re.split(r",(?![^()]*\))", text)):
        if is_composition(item):
            try:
                composition(item)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        found += [item] if is_composition(item) else command_line.names(_NAMED)(item)
    return list(dict.fromkeys(found))


def _named(name: str) -> NamedChain | Kernel:
    return composition(name) if is_composition(name) else _NAMED[name]


def _shapes(text: str) -> list[tuple[int, ...]]:
    items = text.split(",")
    for item in items:
        if not re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9})+", item):
            raise argparse.ArgumentTypeError(f"{item[:40]!r} is no shape: positive integers, as in 1024x8192x8192")
    return [tuple(map(int, item.split("x"))) for item in items]


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _gpu(text: str) -> Gpu:
    try:
        return Gpu.called(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _ListAction(argparse.Action):
    """Lists what can be shown and ends the program, as --help does."""

    def __call__(self, parser, namespace, values, option_string=None):
        reporting.list_what_can_be_shown()
        parser.exit()


def _own_folder() -> str:
    try:
        return str(tables.user_folder())
    except OSError as error:
        return f"{error.filename} ({error.strerror})"


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


#: What argparse takes for each option.
_Options = dict[str, dict[str, Any]]
_NAMES = {"type": _names}
_PROBLEMS: _Options = {
    "--names": _NAMES
    | {
        "default": ",".join(CHAINS),
        "help": "chains and kernels; show --list lists them and their sizes. Also "
        "a chain in words, as in 'linear -> mish -> group_norm(32) -> silu', or yours as module:variable",
    },
    "--dtypes": {"type": command_line.names(DTYPES), "default": ",".join(DTYPES), "help": "element types"},
    "--passes": {"type": command_line.names(PASSES), "default": ",".join(PASSES), "help": "of a chain"},
    "--shapes": {"type": _shapes, "help": "sizes, as in 1024x8192x8192 (default: the target shape of each chain)"},
}
_GPU: _Options = {"--gpu": {"type": _gpu, "help": "a GPU that need not be here, such as h200 (default: the one here)"}}
_PROCESSES: _Options = {
    "--processes": {"type": positive, "metavar": "N", "help": "compile in N processes (default: one per core)"}
}
_SWEEP: _Options = {
    **_PROBLEMS,
    "--grid": _flag("for Linear chains: batch 1 to 4096 x features 1k to 16k"),
    "--quick": _flag(
        "try only the heuristic's config and those that tables have for the problem, also in the other 16-bit dtype"
    ),
    "--budget-seconds": {"type": _seconds, "metavar": "SECONDS", "help": "stop after this time, with the best so far"},
    "--again": _flag("sweep problems that the table already has, too"),
    **_PROCESSES,
}
_EXPORT: _Options = {"file": {"type": Path, "metavar": "FILE", "help": "where to write; - is standard output"}, **_GPU}
_MERGE: _Options = {"files": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "what export wrote"}}
_LIST = {"action": _ListAction, "nargs": 0, "help": "list the chains, kernels, sizes, dtypes and GPUs, and exit"}
_SHOW: _Options = {**_PROBLEMS, **_GPU, "--csv": _flag("print CSV in place of a table"), "--list": _LIST}
_CHECK: _Options = {
    "tables": {"type": Path, "nargs": "*", "metavar": "TABLE", "help": "default: the shipped tables and your own"},
    "--names": _NAMES | {"help": "only the entries of these chains and kernels (default: all)"},
    **_PROCESSES,
}


def _parser() -> Parser:
    parser = Parser(
        prog=called_as("autotune_configs"),
        description="Find, show and check the configs (block sizes and the like) that kernels run with. Lists are "
        f"separated by commas. Your own tables are in {_own_folder()}; {tables.FOLDER_VARIABLE} names another folder. "
        "Exit status: 0, 1 if something is wrong, 2 for a bad argument or file, 130 if interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable, options: _Options, description: str, to=commands, **defaults) -> Parser:
        command = to.add_parser(name, help=description, description=description)
        for option, settings in options.items():
            command.add_argument(option, **settings)
        command.set_defaults(run=run, parser=command, **defaults)
        return command

    best = "Find the fastest correct configs on this GPU, and put them into your own table."
    of_sweep = add("sweep", _sweep, _SWEEP, best)
    sharing = {"to": of_sweep.add_subparsers(title="share tables between machines"), "sweep": of_sweep}
    add("export", _export, _EXPORT, "Write your own table of a GPU to a file.", **sharing)
    better = (
        "Merge tables into your own of their GPUs. For a problem that both have, an entry of the installed Triton "
        "wins over one of another, then the lower time over the heuristic's config."
    )
    add("merge", _merge, _MERGE, better, **sharing)
    add("show", _show, _SHOW, "Show which config each problem gets, and from which table.")
    add("check", _check, _CHECK, "Compile every entry of every table, for the GPU of the table. Needs no GPU.")
    return parser


def _cases(options: argparse.Namespace) -> list[_Case]:
    """The cases in the order of the shapes. A shape goes with each name that has as many sizes."""
    targets = [named.target for named in map(_named, options.names) if isinstance(named, NamedChain)]
    shapes = options.shapes or [_INTERPRETED_SHAPES[len(target)] if INTERPRETED else target for target in targets]
    if getattr(options, "grid", False):
        shapes = [*shapes, *GRID]
    for name in options.names:
        size_names = _named(name).size_names
        if not any(len(shape) == len(size_names) for shape in shapes):
            options.parser.error(f"argument --shapes: {name} takes {' x '.join(size_names)}")
    cases = (
        (name, dtype, shape)
        for shape in shapes
        for name in options.names
        if len(_named(name).size_names) == len(shape)
        for dtype in options.dtypes
    )
    return list(dict.fromkeys(cases))


def _problems(cases: list[_Case], options: argparse.Namespace, gpu: Gpu) -> list[Problem]:
    """The problems of the cases, each once, in the same order: of a chain, those that it looks up on this GPU."""
    found = (_named(name).problems(sizes, dtype, tuple(options.passes), gpu) for name, dtype, sizes in cases)
    try:
        problems = list(dict.fromkeys(itertools.chain.from_iterable(found)))
    except ValueError as error:
        options.parser.error(f"argument --shapes: {error}")
    for problem in problems:
        if not kernel_of(problem.kernel).takes(problem):
            options.parser.error(f"argument --shapes: {problem} is no problem of the kernel: its groups must be whole")
    if not problems:
        options.parser.error(f"argument --passes: {','.join(options.names)} has none that is looked up")
    return problems


def _device(parser: Parser, without: str) -> torch.device:
    """The GPU of this process. ``without`` says what to do where there is none."""
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        parser.error(f"no GPU is here: {without}")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_of(options: argparse.Namespace) -> Gpu:
    return options.gpu or Gpu.of(_device(options.parser, "name one, as in --gpu h200; show --list lists all"))


def _sweep(options: argparse.Namespace) -> int:
    parser = options.parser
    device = _device(parser, "a sweep needs one. (TRITON_INTERPRET=1 tries the command on a CPU; times mean nothing)")
    gpu = Gpu.of(device)
    problems = _problems(_cases(options), options, gpu)
    try:
        table = tables.user_path(gpu)
        with locked(table), contextlib.suppress(ValueError):  # a file that is no table is kept beside the new one
            tables.entries_of(table, gpu)
    except OSError as error:
        parser.error(f"cannot write your tables: {error.filename}: {error.strerror}")
    dropped = [f"--{name}" for name in ("again", "quick") if getattr(options, name)]
    interpreted = {"prepare": lambda call: call, "clock": sweep.time_on_host}
    with Precompiler(gpu, options.processes) as precompiler:
        return reporting.run_sweep(
            problems,
            device,
            table,
            dropped,
            budget=options.budget_seconds,
            again=options.again,
            is_quick=options.quick,
            **(interpreted if INTERPRETED else {"resources": precompiler}),
        )


def _export(options: argparse.Namespace) -> None:
    gpu = _gpu_of(options)
    try:
        table = tables.user_path(gpu)
        content = tables.render(*tables.read_strictly(table))
    except FileNotFoundError as error:
        options.parser.error(f"no table of your own for {gpu.name}: {error.filename}: {error.strerror}")
    except OSError as error:
        options.parser.error(f"cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        options.parser.error(f"{table}: {error}")
    if str(options.file) == "-":
        sys.stdout.write(content)
        return
    try:
        replace_file(options.file, content.encode())
    except OSError as error:
        options.parser.error(f"cannot write {options.file}: {error.strerror}")
    print(f"{gpu.name}: {table} is written to {options.file}")


def _merge(options: argparse.Namespace) -> None:
    read = []
    for path in options.files:  # all, before anything is changed
        try:
            read.append((path, *sharing.read(path)))
        except (OSError, ValueError) as error:
            options.parser.error(f"{path}: {getattr(error, 'strerror', None) or error}")
    for path, gpu, entries in read:
        try:
            counts = sharing.merge(gpu, entries)
        except OSError as error:
            options.parser.error(f"{path} is not merged: {error.filename}: {error.strerror}")
        told = ", ".join(f"{counts[what]} {what}" for what in ("added", "replaced", "kept"))
        print(f"{path}: {gpu.name}: {told}, in {tables.user_path(gpu)}")


def _refuse_options_of_a_sweep(options: argparse.Namespace) -> None:
    """argparse accepts them before the name of a sub-command, which would ignore them."""
    for name, default in vars(options.sweep.parse_args([])).items():
        if name not in ("run", "parser") and getattr(options, name) != default:
            options.parser.error(f"--{name.replace('_', '-')} is an option of a sweep, not of this command")


def _show(options: argparse.Namespace) -> None:
    gpu = _gpu_of(options)
    cases = _cases(options)
    found = [(problem, lookup.find(problem, gpu)) for problem in _problems(cases, options, gpu)]
    notes = [
        f"{name} {dtype} {'x'.join(map(str, sizes))}: {_multiplier(sizes, dtype, gpu)} computes the product"
        for name, dtype, sizes in cases
        if "forward" in options.passes
        and isinstance(named := _named(name), NamedChain)
        and named.by_cublas(sizes, dtype, gpu)
    ]
    with contextlib.suppress(OSError):  # the lookup has warned
        own = tables.user_path(gpu)
        if not own.exists():
            notes.append(f"no table of your own for {gpu.name} in {own.parent}")
    if options.csv:
        reporting.show_csv(gpu, found)
        for note in notes:
            print(note, file=sys.stderr)
    else:
        reporting.show(gpu, found, notes)


def _multiplier(sizes: tuple[int, ...], dtype: str, gpu: Gpu) -> str:
    """What computes a product that has no entries."""
    M, K, N = sizes
    in_registers = dtype == "float32" and gpu.splits_float32 and float32_in_registers(1, M, N, K)
    return 'cuBLAS, or at "highest" a kernel with a fixed config,' if in_registers else "cuBLAS"


def _check(options: argparse.Namespace) -> int:
    if INTERPRETED:
        options.parser.error("kernels do not compile in the interpreter: unset TRITON_INTERPRET")
    for path in options.tables:
        if not path.is_file():
            options.parser.error(f"{path} is no file")
    paths, notes = options.tables, []
    if not paths:
        paths = sorted(tables.shipped_folder().glob("*.json"))
        try:
            own = sorted(path for path in tables.user_folder().iterdir() if path.suffix == ".json")
            place = str(tables.user_folder())
        except OSError as error:
            own, place = [], f"{error.filename} ({error.strerror})"
        paths += own
        if not own:
            notes.append(f"no tables of your own in {place}")
    kernels = None if options.names is None else {kernel for name in options.names for kernel in kernels_of(name)}
    return reporting.check(paths, kernels, options.processes or len(os.sched_getaffinity(0)), notes)


def run(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if "sweep" in options:
        _refuse_options_of_a_sweep(options)
    prog = options.parser.prog
    # A warning is one line, without the line of code that gave it.
    with mock.patch.object(warnings, "formatwarning", lambda message, *_, **__: f"{prog}: {message}\n"):
        return options.run(options) or 0
