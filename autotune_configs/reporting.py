"""What ``python -m autotune_configs`` prints."""

import contextlib
import csv
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from autotune_configs import sweep
from autotune_configs.chains import CHAINS, DTYPES, PASSES
from autotune_configs.command_line import INTERRUPTED
from autotune_configs.gpus import KNOWN, Gpu
from autotune_configs.kernel import Config
from autotune_configs.kernels import KERNELS, kernel_of
from autotune_configs.lookup import Found
from autotune_configs.precompile import Launch, Precompiler
from autotune_configs.problem import Problem
from autotune_configs.sweep import Outcome, Result
from autotune_configs.tables import read_strictly, searched, shipped_folder
from autotune_configs.workloads import is_of_every_process

_WIDTH_WHEN_NO_TERMINAL = 160
#: What the names of sizes mean, for readers of ``show --list``.
SIZES = {
    "batch": "rows of the input",
    "in_features, out_features": "of the Linear layer",
    "in_channels, out_channels": "of the convolution",
    "height, width": "of the input's images for a chain, of the output's for a kernel",
    "kernel": "height and width of the convolution's kernel",
    "m, n, k": "of the product [m, k] @ [n, k].T (batch, out_features, in_features), or of a matrix [m, n]",
    "group_size": "neighbouring channels in a group of the norm; 1 for linear_bias",
    "samples, channels, pixels": "of images; pixels = height x width",
}


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH_WHEN_NO_TERMINAL, highlight=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _settings(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def run_sweep(problems: list[Problem], device: torch.device, table: Path, dropped: list[str], **options) -> int:
    """Sweep problems into a table, with a progress bar and a line for each.

    The sweep continues where it was when its command runs again without the options ``dropped``. Returns the exit
    status: 1 if a result was wrong, 130 if the user interrupted.
    """
    console = _console()
    how_on = f"Without {' '.join(dropped)}, the same command" if dropped else "The same command"
    results: list[Result] = []
    progress = _progress(console)
    task = progress.add_task("", total=len(problems))

    def tell_progress(problem: Problem, outcomes: list[Outcome]) -> None:
        tried = f" ({_count(len(outcomes), 'config')})" if outcomes else ""
        progress.update(task, description=escape(f"{problem}{tried}"))
        if outcomes and outcomes[-1].is_wrong:
            wrong = outcomes[-1]
            console.print(f"[red]WRONG: {_settings(asdict(wrong.config))}: {escape(str(wrong.reason))}[/]")

    def tell_result(result: Result) -> None:
        results.append(result)
        progress.advance(task)
        console.print(_line(result))

    console.print(f"{escape(Gpu.of(device).name)}: {_count(len(problems), 'problem')}, into {escape(str(table))}")
    try:
        with progress:
            sweep.sweep_and_store(problems, device, on_progress=tell_progress, on_result=tell_result, **options)
    except KeyboardInterrupt:
        console.print(f"Interrupted. {how_on} continues from here.")
        return INTERRUPTED
    except sweep.DeviceLost as error:
        console.print(f"[red]The GPU no longer answers, after {escape(str(error))}[/]")
        console.print(f"{how_on} continues after this config, in a new process.")
        return 1
    finally:
        unfinished = sum(not result.is_whole for result in results)
        if unfinished:
            console.print(f"Not finished: {_count(unfinished, 'problem')}. {how_on} continues.")
    return int(any(result.is_red for result in results))


def _line(result: Result) -> str:
    entry = result.entry
    problem = escape(str(result.problem))
    ending = f": {escape(result.skipped)}" if result.skipped else "" if result.is_whole else " (so far)"
    if entry is None:
        return f"{problem}{ending}"
    refused = sum(outcome.ratio is None for outcome in result.outcomes)
    tried = f"of {_count(len(result.outcomes), 'config')} ({refused} refused): {_settings(entry.config)}"
    return f"{problem}: {entry.ratio:.3f} x heuristic, {entry.microseconds:.1f} µs, {tried}{ending}"


def show(gpu: Gpu, found: list[tuple[Problem, Found]], notes: list[str]) -> None:
    columns = (Column(name, overflow="fold") for name in ("problem", "config", "from"))
    table = Table(*columns, title=escape(gpu.name), title_justify="left")
    for problem, each in found:
        table.add_row(escape(str(problem)), _settings(asdict(each.config)), escape(_origin(problem, each)))
    console = _console()
    console.print(table)
    paths = dict.fromkeys(each.table for _, each in found if each.table)
    for line in [*(f"{_table_name(path)}: {path}" for path in paths), *notes]:
        console.print(escape(line))


def show_csv(gpu: Gpu, found: list[tuple[Problem, Found]]) -> None:
    """Print the same as CSV: the problem, its config, and the entry that the config is from."""
    columns = "gpu kernel dtype precision layout sizes config source table entry ratio microseconds triton date".split()
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for problem, each in found:
        entry = {**vars(each.entry), "entry": _joined(each.entry.problem.sizes)} if each.entry else {}
        row = {**entry, **vars(problem), "sizes": _joined(problem.sizes), "config": _settings(asdict(each.config))}
        writer.writerow({**row, "gpu": gpu.name, "source": _source(problem, each), "table": each.table})


def _origin(problem: Problem, found: Found) -> str:
    if found.entry is None or found.table is None:
        return "heuristic: no table has an entry near it"
    entry = found.entry
    where = "" if entry.problem == problem else f" {_joined(entry.problem.sizes)}"
    measured = f"{entry.ratio:.3f} x heuristic, triton {entry.triton}, {entry.date}"
    return f"{_table_name(found.table)}, {_source(problem, found)}{where}: {measured}"


def _source(problem: Problem, found: Found) -> str:
    if found.entry is None:
        return "heuristic"
    if found.entry.problem == problem:
        return "this problem"
    source = "fuller last wave" if found.fills_last_wave else "nearest entry"
    return f"{source}, of {found.kin}," if found.kin else source


def _table_name(path: str) -> str:
    return f"{'shipped' if Path(path).parent == shipped_folder() else 'your own'} {Path(path).stem}"


def _joined(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _tables_of(gpu: Gpu) -> str:
    return ", ".join(_table_name(str(path)) for path, _ in searched(gpu) if path.is_file()) or "none"


def list_what_can_be_shown() -> None:
    console = _console()
    listed: dict[tuple[str, ...], Iterable[tuple[str, ...]]] = {
        ("chain", "function in ops", "sizes", "target shape"): (
            (name, chain.function, " x ".join(chain.size_names), _joined(chain.target))
            for name, chain in CHAINS.items()
        ),
        ("kernel", "sizes"): ((name, " x ".join(kernel.size_names)) for name, kernel in KERNELS.items()),
        ("size", "meaning"): SIZES.items(),
        ("GPU", "tables"): ((name, _tables_of(Gpu.called(name))) for name in KNOWN),
    }
    for names, rows in listed.items():
        columns = (Column(name, overflow="fold", no_wrap=name not in ("sizes", "meaning")) for name in names)
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()
    console.print("--gpu takes words or parts of a name that no other GPU has: h200, l4, 'a100 40gb'.\n")
    console.print(f"dtypes: {', '.join(DTYPES)}\npasses: {', '.join(PASSES)}")


def check(paths: list[Path], kernels: set[str] | None, processes: int, notes: list[str]) -> int:
    """Compile the tables' entries, of these kernels or all, and print what is wrong and ``notes``.

    Returns the exit status: 1 if an entry is not valid, does not compile or does not fit, 130 if the user interrupted.
    """
    console = _console()
    faults: list[str] = []

    def add_fault(text: str) -> None:
        faults.append(text)
        console.print(f"[red]{escape(text)}[/]")

    work, unknown = [], {}
    for path in paths:
        try:
            gpu, entries = read_strictly(path)
        except (OSError, ValueError) as error:
            add_fault(f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        launches: dict[tuple, Launch] = {}
        for entry in entries:
            problem, config = entry.problem, None
            if kernels is not None and problem.kernel not in kernels:
                continue
            with contextlib.suppress(ValueError):  # for an unknown kernel
                config = kernel_of(problem.kernel).config_of(entry.config, problem, gpu)
            if config is None:
                add_fault(f"{path}: {problem}: {_settings(entry.config)} is no valid config")
            elif not is_of_every_process(problem):
                unknown[problem.kernel] = f"{problem.kernel}: compiled by the program with its chain"
            else:
                launches.setdefault(_compiled_as(problem, config), (problem, config))
        work.append((path, gpu, list(launches.values())))
    progress = _progress(console)
    progress.add_task("", total=sum(len(of_one) for _, _, of_one in work))
    (bar,) = progress.tasks
    ending = ""
    try:
        with progress:
            for path, gpu, of_one in work:
                progress.update(bar.id, description=escape(path.name))

                def add_compiled(launch: Launch, fault: str | OSError | None, path: Path = path) -> None:
                    progress.advance(bar.id)
                    if fault:
                        told = f"not compiled, which is no fault of the table: {fault}"
                        told = told if isinstance(fault, OSError) else fault
                        add_fault(f"{path}: {launch[0]}: {_settings(asdict(launch[1]))}: {told}")

                with Precompiler(gpu, processes) as precompiler:
                    precompiler.compile(of_one, on_compiled=add_compiled)
    except OSError as error:
        add_fault(f"not compiled, which is no fault of a table: {error}")
    except KeyboardInterrupt:
        ending = f", interrupted with {bar.remaining:.0f} left"
    compiled = f"{_count(int(bar.completed), 'kernel variant')} compiled"
    console.print(f"{_count(len(paths), 'table')}, {compiled}, {_count(len(faults), 'fault')}{ending}")
    for note in (*unknown.values(), *notes):
        console.print(escape(note))
    return INTERRUPTED if ending else int(bool(faults))


def _compiled_as(problem: Problem, config: Config) -> tuple:
    """What a compiled kernel depends on: of the sizes, whether they are 1 or multiples of 16, and a group's width."""
    sizes = tuple((size == 1, size % 16 == 0) for size in problem.sizes)
    return problem.kernel, problem.dtype, problem.precision, problem.layout, config, sizes, problem.sizes[-1]
