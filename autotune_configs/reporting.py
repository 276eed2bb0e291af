"""What ``python -m autotune_configs`` prints."""

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from autotune_configs.chains import CHAINS, DTYPES, PASSES
from autotune_configs.gpus import KNOWN, Gpu
from autotune_configs.kernels import KERNELS, Config, config_of
from autotune_configs.lookup import Found
from autotune_configs.precompile import Launch, Precompiler
from autotune_configs.problem import Problem
from autotune_configs.sweep import DeviceLost, Outcome, Result
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
    "tap_rows, tap_columns": "height and width of the convolution's kernel",
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
    """A bar with the time left, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class SweepReport:
    """Prints a line for each problem, and a progress bar; a context manager.

    The sweep continues where it was when its command runs again without the options ``dropped``.
    """

    def __init__(self, gpu: Gpu, table: Path, problems: int, dropped: list[str]):
        self._console = _console()
        self._progress = _progress(self._console)
        self._task = self._progress.add_task("", total=problems)
        self._how_on = f"Without {' '.join(dropped)}, the same command" if dropped else "The same command"
        self._tried = 0
        self.results: list[Result] = []
        self._console.print(f"{escape(gpu.name)}: {_count(problems, 'problem')}, into {escape(str(table))}")

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exception):
        self._progress.stop()

    def begin(self, problem: Problem) -> None:
        self._tried = 0
        self._progress.update(self._task, description=escape(str(problem)))

    def add_outcome(self, outcome: Outcome) -> None:
        self._tried += 1
        problem = self._progress.tasks[self._task].description.split(" (")[0]
        self._progress.update(self._task, description=f"{problem} ({_count(self._tried, 'config')})")
        if outcome.is_wrong:
            self._console.print(f"[red]WRONG: {_settings(asdict(outcome.config))}: {escape(str(outcome.reason))}[/]")

    def add_result(self, result: Result) -> None:
        self.results.append(result)
        self._progress.advance(self._task)
        self._console.print(_line(result))

    def run(self, sweep: Callable[[], object]) -> int:
        """The exit status: 1 if a result was wrong, 130 if the user interrupted."""
        try:
            sweep()
        except KeyboardInterrupt:
            self._console.print(f"Interrupted. {self._how_on} continues from here.")
            return 130
        except DeviceLost as error:
            self._console.print(f"[red]The GPU no longer answers, after {escape(str(error))}[/]")
            self._console.print(f"{self._how_on} continues after this config, in a new process.")
            return 1
        finally:
            unfinished = sum(not result.is_whole for result in self.results)
            if unfinished:
                self._console.print(f"Not finished: {_count(unfinished, 'problem')}. {self._how_on} continues.")
        return int(any(result.is_red for result in self.results))


def _line(result: Result) -> str:
    if result.entry is None:
        return f"{escape(str(result.problem))}: {escape(str(result.skipped))}"
    entry, refused = result.entry, sum(outcome.ratio is None for outcome in result.outcomes)
    text = f"{escape(str(result.problem))}: {entry.ratio:.3f} x heuristic, {entry.microseconds:.1f} µs, "
    text += f"of {_count(len(result.outcomes), 'config')} ({refused} refused): {_settings(entry.config)}"
    if result.error is not None:
        return f"{text}: {escape(str(result.skipped))}"
    return text + ("" if result.is_whole else " (so far)")


def show(gpu: Gpu, found: list[tuple[Problem, Found]], notes: list[str]) -> None:
    """Print one row per problem, the tables that they are from, and ``notes``."""
    table = Table(title=escape(gpu.name), title_justify="left")
    for column in ("problem", "config", "from"):
        table.add_column(column, overflow="fold")
    for problem, each in found:
        table.add_row(escape(str(problem)), _settings(asdict(each.config)), escape(_origin(problem, each)))
    console = _console()
    console.print(table)
    paths = dict.fromkeys(each.table for _, each in found if each.table)
    for line in [*(f"{_table_name(path)}: {path}" for path in paths), *notes]:
        console.print(escape(line))


def show_csv(gpu: Gpu, found: list[tuple[Problem, Found]]) -> None:
    """Print the same as CSV: the problem, its config, and the entry that the config is from."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    problem_columns = ("kernel", "dtype", "precision", "layout", "sizes")
    measured = ("ratio", "microseconds", "triton", "date")
    writer.writerow(("gpu", *problem_columns, "config", "source", "table", "entry", *measured))
    for problem, each in found:
        texts = {**asdict(problem), "sizes": _joined(problem.sizes)}
        entry = [_joined(each.entry.problem.sizes)] if each.entry else [""]
        entry += [getattr(each.entry, name, "") for name in measured]
        config = _settings(asdict(each.config)), _source(problem, each)
        writer.writerow((gpu.name, *(texts[name] for name in problem_columns), *config, each.table or "", *entry))


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
    return "fuller last wave" if found.fills_last_wave else "nearest entry"


def _table_name(path: str) -> str:
    return f"{'shipped' if Path(path).parent == shipped_folder() else 'your own'} {Path(path).stem}"


def _joined(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def list_what_can_be_shown() -> None:
    """Print the names that commands take: chains, kernels, sizes, dtypes, passes and GPUs."""
    console = _console()
    chains = _table("chain", "function in ops", "sizes", "target shape")
    for name, chain in CHAINS.items():
        chains.add_row(name, chain.function, " x ".join(chain.size_names), _joined(chain.target))
    kernels = _table("kernel", "sizes")
    for name, kernel in KERNELS.items():
        kernels.add_row(name, " x ".join(kernel.size_names))
    sizes = _table("size", "meaning")
    for name, meaning in SIZES.items():
        sizes.add_row(name, escape(meaning))
    gpus = _table("GPU", "tables")
    for name in KNOWN:
        gpu = Gpu.called(name)
        files = [str(path) for path, _ in searched(gpu) if path.is_file()]
        gpus.add_row(escape(name), ", ".join(map(_table_name, files)) or "none")
    for table in (chains, kernels, sizes, gpus):
        console.print(table)
        console.print()
    console.print("--gpu takes words or parts of a name that no other GPU has: h200, l4, 'a100 40gb'.\n")
    console.print(f"dtypes: {', '.join(DTYPES)}\npasses: {', '.join(PASSES)}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in ("sizes", "meaning"))
    return table


def check(paths: list[Path], kernels: set[str] | None, processes: int, notes: list[str]) -> int:
    """Compile the tables' entries, of these kernels or all, and print what is wrong and ``notes``.

    Returns the exit status: 1 if an entry is not valid, does not compile or does not fit, 130 if the user interrupted.
    """
    console = _console()
    faults: list[str] = []

    def add_fault(text: str) -> None:
        faults.append(text)
        console.print(f"[red]{escape(text)}[/]")

    work, unknown, done = [], {}, []
    for path in paths:
        try:
            gpu, entries = read_strictly(path)
        except (OSError, ValueError) as error:
            add_fault(f"{path}: {getattr(error, 'strerror', None) or error}")
            continue
        launches: dict[tuple, Launch] = {}
        for entry in entries:
            if kernels is None or entry.problem.kernel in kernels:
                config = config_of(entry.config, entry.problem, gpu)
                if config is None:
                    add_fault(f"{path}: {entry.problem}: {_settings(entry.config)} is no valid config")
                elif not is_of_every_process(entry.problem):
                    unknown[entry.problem.kernel] = f"{entry.problem.kernel}: compiled by the program with its chain"
                else:
                    launches.setdefault(_compiled_as(entry.problem, config), (entry.problem, config))
        work.append((path, gpu, list(launches.values())))
    total = sum(len(of_one) for _, _, of_one in work)
    ending = ""
    try:
        with _progress(console) as progress:
            task = progress.add_task("", total=total)
            for path, gpu, of_one in work:
                progress.update(task, description=escape(path.name))

                def add_compiled(launch: Launch, fault: str | None, path: Path = path) -> None:
                    done.append(launch)
                    progress.advance(task)
                    if fault:
                        add_fault(f"{path}: {launch[0]}: {_settings(asdict(launch[1]))}: {fault}")

                with Precompiler(gpu, processes) as precompiler:
                    precompiler.compile(of_one, on_compiled=add_compiled)
    except KeyboardInterrupt:
        ending = f", interrupted with {total - len(done)} left"
    compiled = f"{_count(len(done), 'kernel variant')} compiled"
    console.print(f"{_count(len(paths), 'table')}, {compiled}, {_count(len(faults), 'fault')}{ending}")
    for note in (*unknown.values(), *notes):
        console.print(escape(note))
    return 130 if ending else int(bool(faults))


def _compiled_as(problem: Problem, config: Config) -> tuple:
    """What a compiled kernel depends on: of the sizes, whether they are 1 or multiples of 16, and a group's width."""
    sizes = tuple((size == 1, size % 16 == 0) for size in problem.sizes)
    widths = problem.sizes[-2:] if problem.kernel == "convolution" else problem.sizes[-1:]  # taps, or the group
    return problem.kernel, problem.dtype, problem.precision, problem.layout, config, sizes, widths
