"""The sweep: find the fastest correct config for each problem.

A sweep starts from a few configs, among them those that tables have for the problem. It continues with the neighbours
of the best one until none is faster. A quick sweep only tries the heuristic's config and the tables'. Each config is
compiled first, without the GPU, and does not run if it does not fit or spills many registers. Then its results are
checked against float64. Correct configs are timed interleaved with the heuristic's, which cancels thermal drift.

A fault of the machine (no disk, no memory, no permission) is none of a config: it is reported, and nothing is stored.
"""

import contextlib
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from autotune_configs import lookup, tables
from autotune_configs.files import locked
from autotune_configs.gpus import Gpu
from autotune_configs.kernel import Config
from autotune_configs.kernels import kernel_of
from autotune_configs.machine import fault_of_machine
from autotune_configs.offline import compiled_anew, tell_of_damaged_cache
from autotune_configs.problem import Problem
from autotune_configs.tables import Entry
from autotune_configs.workloads import Workload, is_of_every_process, workload_of

#: Rounds in which a config is timed interleaved with the heuristic's. After one round a ratio above this ends them.
_ROUNDS = 3
_HOPELESS = 1.2
#: Rounds for the best config. It gets the entry if its ratio is at most this, else the heuristic's does.
_FINAL_ROUNDS = 9
_WORTHWHILE = 0.99
#: The most milliseconds that one timing takes, and the fewest calls that it makes even so.
_LONGEST_TIMING = 2.0
_FEWEST_CALLS = 3
#: What CUDA says of a kernel that was cut off, and Triton and Python of damaged JSON.
_DAMAGED = ("kernel image", "compatible backends", "maximum recursion depth")
#: Seconds to wait after the budget for another process that sweeps the same problem. It may have begun later, and takes
#: a little longer than its own budget.
_LONGER = 20.0
Call = Callable[[], object]
#: Measures the milliseconds that a call takes.
Clock = Callable[[Call], float]
#: Is told the problem and its outcomes so far.
Progress = Callable[[Problem, list["Outcome"]], object]


@dataclass(frozen=True)
class Outcome:
    """What a sweep found out about one config: its time over the heuristic's (``ratio``), or the reason for none."""

    config: Config
    ratio: float | None = None
    reason: str | None = None
    is_wrong: bool = False  # it ran, and its results are wrong


@dataclass
class Result:
    """What a sweep found out about one problem.

    If ``entry`` is None, ``skipped`` says why. ``is_whole`` says whether the problem is finished. ``error`` is the
    machine's fault by which the entry could not be stored, or the problem not be swept; the same sweep continues from
    what was measured.
    """

    problem: Problem
    entry: Entry | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    is_whole: bool = True
    skipped: str | None = None
    failed: bool = False  # it is skipped because something is wrong
    error: OSError | None = None

    @property
    def is_red(self) -> bool:
        """Whether some config's results were wrong, or the problem could not be swept."""
        return self.failed or self.error is not None or any(outcome.is_wrong for outcome in self.outcomes)


class DeviceLost(Exception):
    """The GPU no longer answers. A config caused an error that only a new process recovers from."""


def read_journal(path: Path, config_class: type) -> dict[Config, Outcome]:
    """The outcomes of an unfinished sweep, by config, for the sweep that continues it.

    The file has one a line. A line that was cut off while it was written is skipped.
    """
    known = {}
    with contextlib.suppress(FileNotFoundError):
        for line in tables.content(path).decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                item = json.loads(line)
                ratio, reason = item["ratio"], item["reason"]
                measured = ratio is not None and math.isfinite(ratio)
                if item["triton"] == triton.__version__ and (measured or isinstance(reason, str)):
                    config = config_class(**item["config"])
                    known[config] = Outcome(config, ratio, reason, item["is_wrong"] is True)
    return known


def add_to_journal(path: Path, outcome: Outcome) -> None:
    with open(path, "a") as file:  # the line before may have been cut off
        file.write("\n" + json.dumps({"triton": triton.__version__, **asdict(outcome)}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def time_on_host(call: Call) -> float:
    """Time one call by the host's clock, for Triton's interpreter, whose times mean nothing."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def capture(call: Call) -> Call:
    """The call as a CUDA graph, so that the GPU's time is measured and not the host's."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU
        call()
    return graph.replay


def time_on_gpu(call: Call) -> float:
    """The median of calls with a cold L2 cache (``triton.testing.do_bench``)."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = start.elapsed_time(end)
    calls = max(_LONGEST_TIMING, _FEWEST_CALLS * once)
    return triton.testing.do_bench(call, warmup=min(once, calls / 4), rep=calls, return_mode="median")


class Search:
    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        journal: Path,
        *,
        prepare: Callable[[Call], Call] = capture,
        clock: Clock = time_on_gpu,
        resources=None,
        is_quick: bool = False,
        is_late: Callable[[], bool] = lambda: False,
        on_progress: Progress = lambda problem, outcomes: None,
    ):
        self.problem, self.device, self.gpu = problem, device, Gpu.of(device)
        self.kernel = kernel_of(problem.kernel)
        self.default = self.kernel.heuristic(problem, self.gpu)
        self._journal, self._known = journal, read_journal(journal, type(self.default))
        self._prepare, self._clock = prepare, clock
        self._resources = resources if is_of_every_process(problem) else None  # which asks worker processes
        self._is_quick, self._is_late, self._on_progress = is_quick, is_late, on_progress
        self.outcomes: dict[Config, Outcome] = {}

    @functools.cached_property
    def workload(self) -> Workload:
        """Made when a config runs: if all outcomes are known, no tensors are made."""
        return workload_of(self.problem, self.device)

    @functools.cached_property
    def _default_call(self) -> Call:
        return self._prepare(lambda: self.workload.launch(self.default))

    def run(self) -> Result:
        self._on_progress(self.problem, [])
        starts = [self.default] if self._is_quick else self.kernel.first_candidates(self.problem, self.gpu)
        wave = list(dict.fromkeys([*starts, *lookup.known_configs(self.problem, self.gpu)]))
        best = None
        while wave and (best is None or not self._is_late()):
            self._try_all(wave)
            if self.outcomes[self.default].ratio is None:  # then there is no base to compare with
                self._journal.unlink(missing_ok=True)  # it may be right in the next sweep
                reason = f"the heuristic's config: {self.outcomes[self.default].reason}"
                return Result(self.problem, outcomes=list(self.outcomes.values()), skipped=reason, failed=True)
            before, best = best, self._by_time()[0]
            climbs = best != before and not self._is_quick
            near = self.kernel.neighbours(best, self.problem, self.gpu) if climbs else []
            wave = [each for each in near if each not in self.outcomes]
        is_whole = not (wave or self._is_quick or self._is_late())
        return Result(self.problem, self._entry(), list(self.outcomes.values()), is_whole)

    def _by_time(self) -> list[Config]:
        ratios = {each.config: each.ratio for each in self.outcomes.values() if each.ratio is not None}
        return sorted(ratios, key=ratios.__getitem__)

    def _try_all(self, configs: list[Config]) -> None:
        unknown = [config for config in configs if config not in self._known]
        refused = self._resources.refused(self.problem, self.default, unknown) if self._resources and unknown else {}
        for config in configs:
            if config != self.default and self._is_late():
                return
            outcome = self._known.get(config)
            if outcome is None:
                reason = refused.get(config)
                outcome = Outcome(config, reason=reason) if reason else self._measure(config)
                add_to_journal(self._journal, outcome)
                if outcome.ratio is None and not reason:
                    self._check_device(outcome)
            self.outcomes[config] = outcome
            self._on_progress(self.problem, list(self.outcomes.values()))

    def _measure(self, config: Config) -> Outcome:
        """Raises OSError for a fault of the machine."""
        try:
            if fault := self._despite_damage(self.workload.fault, config):
                return Outcome(config, reason=fault, is_wrong=True)
            return Outcome(config, ratio=1.0 if config == self.default else self._ratio(config, _ROUNDS)[0])
        except Exception as error:  # a compiler or a driver may refuse a config in any way
            _raise_if_of_machine(error)
            return Outcome(config, reason=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _despite_damage(self, launch: Callable[[Config], Any], config: Config) -> Any:
        """What ``launch`` returns. Where it fails by what Triton's cache has of the kernel, that is compiled again."""
        try:
            return launch(config)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as damage:
            if isinstance(damage, RuntimeError) and not any(each in str(damage) for each in _DAMAGED):
                raise
            with compiled_anew():
                result = launch(config)
            tell_of_damaged_cache(self.problem, damage)
            return result

    def _check_device(self, outcome: Outcome) -> None:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise DeviceLost(f"{self.problem}: {outcome.config}: {outcome.reason}") from error

    def _ratio(self, config: Config, rounds: int) -> tuple[float, float]:
        """The medians over the rounds: of its time over that of the heuristic's config, and of its time in ms."""
        ratios, times = [], []
        default, call = self._default_call, self._prepare(lambda: self.workload.launch(config))
        for _ in range(rounds):
            base = self._clock(default)
            times.append(self._clock(call))
            ratios.append(times[-1] / base)
            if ratios[0] > _HOPELESS and rounds == _ROUNDS:
                break
        return statistics.median(ratios), statistics.median(times)

    def _entry(self) -> Entry:
        """The entry of the fastest config that every launch can use, or of the heuristic's.

        The fastest one is timed once more, in more rounds, and must still be faster.
        """
        usable = (each for each in self._by_time() if each == self.default or self._serves_all_launches(each))
        best, ratio = next(usable), 1.0
        if best != self.default:
            ratio, milliseconds = self._ratio(best, _FINAL_ROUNDS)
        if best == self.default or ratio > _WORTHWHILE:
            best, ratio = self.default, 1.0
            milliseconds = statistics.median(self._clock(self._default_call) for _ in range(_ROUNDS))
        return Entry(
            self.problem,
            asdict(best),
            round(ratio, 4),
            round(1e3 * milliseconds, 2),
            triton.__version__,
            str(date.today()),
        )

    def _serves_all_launches(self, config: Config) -> bool:
        """Whether it also compiles and fits in the launches that save values for the backward pass."""
        if self._resources is not None:
            return not self._resources.refused(self.problem, self.default, [config], all_launches=True)
        try:
            self._despite_damage(self.workload.launch_variants, config)
        except Exception as error:  # a compiler or a driver may refuse a config in any way
            _raise_if_of_machine(error)
            return False
        return True


def _raise_if_of_machine(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):  # the problem is too large, whatever the config
        raise error
    if of_machine := fault_of_machine(error):
        raise of_machine from error


def _search(problem, *arguments, **options) -> Result:
    """The search's result, in inference mode too. A problem too large for the memory is skipped."""
    with contextlib.suppress(torch.OutOfMemoryError), torch.inference_mode(False):
        return Search(problem, *arguments, **options).run()
    torch.cuda.empty_cache()  # the search, and its memory, are freed with the error
    return Result(problem, skipped="too little memory is free", failed=True)


def _stored(problem: Problem, gpu: Gpu) -> Entry | None:
    """The user's entry for just this problem, as the table is now. Raises OSError if the table cannot be read."""
    with contextlib.suppress(ValueError):  # a file that is no table is kept beside the new one
        entries = tables.entries_of(tables.user_path(gpu), gpu)
        return next((entry for entry in entries if entry.problem == problem), None)
    return None


def journal_path(problem: Problem, gpu: Gpu) -> Path:
    return tables.user_folder() / "sweeps" / gpu.file_name / (str(problem).replace(" ", "_") + ".jsonl")


def sweep_and_store(
    problems: Iterable[Problem],
    device: torch.device,
    *,
    budget: float | None = None,
    again: bool = False,
    is_quick: bool = False,
    on_result: Callable[[Result], object] = lambda result: None,
    **options,
) -> list[Result]:
    """Sweep problem after problem, and store each entry in the user's table as soon as it is known.

    Problems that the table has are skipped, unless ``again``, and those that one launch does not do
    (``Kernel.does_whole``). A problem whose last sweep was not whole is continued,
    but not by a quick sweep. An entry of a whole sweep stays one after a quick sweep. After ``budget`` seconds the
    current problem ends with the best config so far, and the others are skipped. ``options`` are those of ``Search``.
    If the table cannot be read or written, or the machine lets nothing compile, the result says so, and the sweep
    continues with the next problem. Raises DeviceLost if nothing more can run.
    """
    gpu = Gpu.of(device)
    end = math.inf if budget is None else time.monotonic() + budget
    results = []
    for problem in problems:
        result = Result(problem)
        try:
            path = journal_path(problem, gpu)
            # If another process sweeps this problem, wait for it: its entry is then in the table.
            with locked(path, patience=end - time.monotonic() + _LONGER):
                known = _stored(problem, gpu)
                is_known = known is not None and known.triton == triton.__version__
                was_whole = is_known and not path.exists()
                if not kernel_of(problem.kernel).does_whole(problem, gpu):
                    result = Result(problem, skipped="not swept: the heuristic has two kernels for it")
                elif not again and (is_known if is_quick else was_whole):
                    result = Result(problem, skipped="in the table already")
                elif time.monotonic() >= end:
                    result = Result(problem, is_whole=False, skipped="no time left")
                else:
                    result = _search(
                        problem, device, path, is_quick=is_quick, is_late=lambda: time.monotonic() >= end, **options
                    )
                    entry = result.entry
                    if entry and (result.is_whole or known is None or entry.ratio <= known.ratio):
                        tables.store(tables.user_path(gpu), gpu, entry)
                        lookup.forget()  # the problems that follow find this entry
                    if result.is_whole or (was_whole and is_quick):
                        path.unlink(missing_ok=True)
        except (OSError, MemoryError) as error:
            result.is_whole, result.error = False, fault_of_machine(error)
            result.skipped = f"not stored: {result.error}"
        results.append(result)
        on_result(result)
    return results
