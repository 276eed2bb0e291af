"""What ``python -m autotune_configs`` prints."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS, Config
from autotune_configs.lookup import Found
from autotune_configs.precompile import Precompiler
from autotune_configs.problem import Problem
from autotune_configs.sweep import DeviceLost, Outcome, Result
from autotune_configs.tables import read_strictly

_WIDTH_WHEN_NO_TERMINAL = 160


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH_WHEN_NO_TERMINAL, highlight=False)


def _settings(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


class SweepReport:
    """A line for each problem, and a bar with the time left; a context manager.

    The sweep goes on where it was when its command runs again, without the options ``dropped``.
    """

    def __init__(self, gpu: Gpu, table: Path, problems: int, dropped: list[str]):
        self._console = _console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=problems)
        self._how_on = f"Without {' '.join(dropped)}, the same command" if dropped else "The same command"
        self._tried = 0
        self.results: list[Result] = []
        self._console.print(f"{escape(gpu.name)}: {problems} problems, into {escape(str(table))}")

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
        self._progress.update(self._task, description=f"{problem} ({self._tried} configs)")
        if outcome.is_wrong:
            self._console.print(f"[red]WRONG: {_settings(asdict(outcome.config))}: {escape(str(outcome.reason))}[/]")

    def add_result(self, result: Result) -> None:
        self.results.append(result)
        self._progress.advance(self._task)
        self._console.print(_line(result))

    def run(self, sweep: Callable[[], object]) -> int:
        """The exit status: 1 where a result was wrong, 130 where the user interrupted."""
        try:
            sweep()
        except KeyboardInterrupt:
            self._console.print(f"Interrupted. {self._how_on} goes on from here.")
            return 130
        except DeviceLost as error:
            self._console.print(f"[red]the GPU answers nothing any more, after {escape(str(error))}[/]")
            self._console.print(f"{self._how_on} goes on after it, in a new process.")
            return 1
        finally:
            late = sum(not result.is_whole for result in self.results)
            if late:
                self._console.print(f"{late} problems are not finished. {self._how_on} goes on with them.")
        return int(any(result.is_red for result in self.results))


def _line(result: Result) -> str:
    if result.entry is None:
        return f"{escape(str(result.problem))}: {escape(str(result.skipped))}"
    entry, refused = result.entry, sum(outcome.ratio is None for outcome in result.outcomes)
    text = f"{escape(str(result.problem))}: {entry.ratio:.3f} x heuristic, {entry.microseconds:.1f} µs, "
    text += f"of {len(result.outcomes)} configs ({refused} refused): {_settings(entry.config)}"
    if result.error is not None:
        return f"{text}: {escape(str(result.skipped))}"
    return text + ("" if result.is_whole else " (so far)")


def show(gpu: Gpu, found: list[tuple[Problem, Found]], notes: list[str]) -> None:
    """One line a problem, and what no config says: ``notes``."""
    table = Table(title=escape(gpu.name), title_justify="left")
    for column in ("problem", "config", "from"):
        table.add_column(column, overflow="fold")
    for problem, each in found:
        table.add_row(escape(str(problem)), _settings(asdict(each.config)), escape(_origin(problem, each)))
    console = _console()
    console.print(table)
    for note in notes:
        console.print(escape(note))


def _origin(problem: Problem, found: Found) -> str:
    if found.entry is None:
        return "heuristic: no table has an entry near it"
    entry = found.entry
    which = "an entry whose tiles come out even" if found.comes_out_even else "nearest entry"
    how = "its own entry" if entry.problem == problem else f"{which}, {'x'.join(map(str, entry.problem.sizes))}"
    return f"{how}, {entry.ratio:.3f} x heuristic, triton {entry.triton}, {entry.date}: {found.table}"


def check(paths: list[Path], processes: int) -> int:
    """Compile what the tables hold; the exit status, 1 if an entry does not compile or fit."""
    console, compiled, faults = _console(), 0, []
    for path in paths:
        try:
            gpu, entries = read_strictly(path)
        except (OSError, ValueError) as error:
            faults.append(f"{path}: {error}")
            continue
        launches: dict[tuple, tuple[Problem, Config]] = {}
        for entry in entries:
            kernel = KERNELS.get(entry.problem.kernel)
            config = kernel.config_of(entry.config, entry.problem, gpu) if kernel else None
            if config is None:
                faults.append(f"{path}: {entry.problem}: {_settings(entry.config)} is no valid config")
            else:
                launches.setdefault(_compiled_as(entry.problem, config), (entry.problem, config))
        with Precompiler(gpu, processes) as precompiler:
            for (problem, config), (_, fault) in precompiler.compile(list(launches.values())).items():
                if fault:
                    faults.append(f"{path}: {problem}: {_settings(asdict(config))}: {fault}")
        compiled += len(launches)
    for fault in faults:
        console.print(f"[red]{escape(fault)}[/]")
    console.print(f"{len(paths)} tables, {compiled} different launches compiled, {len(faults)} faults")
    return int(bool(faults))


def _compiled_as(problem: Problem, config: Config) -> tuple:
    """What a compiled kernel depends on: of sizes, whether they are 1 or multiples of 16, and the width of groups."""
    sizes = tuple((size == 1, size % 16 == 0) for size in problem.sizes)
    widths = problem.sizes[-2:] if problem.kernel == "convolution" else problem.sizes[-1:]  # taps, or groups
    return problem.kernel, problem.dtype, problem.precision, problem.layout, config, sizes, widths
