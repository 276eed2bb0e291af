"""``python -m bench models``: whole models, as written, fused, and compiled by Inductor and by our backend."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autotune_configs.command_line import Parser, positive
from bench.columns import WAY, console_table, number
from bench.first_call import answer_of
from bench.model_figures import PARTS, Cell
from bench.model_ways import has_newer_inductor, without_cpp_compiler
from bench.model_zoo import MEMORY_FORMATS, MODELS, SETTINGS
from bench.recording import Recording, add_list, has_gpu, reason
from bench.schema import GRAPHS, WAYS, KernelTimes, ModelRow, WayFigures

#: Seconds after which a process has failed.
_LONGEST = 900
_NOT_INSTALLED = '{} is not installed, so {} is left out: pip install "normfuse[models]"'
_OUT_OF_TIME = "not run: the time was up"


def main(arguments: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Run whole models with random weights in each way: as written (eager), after fuse, and compiled, "
        "by Inductor, by Inductor with the group norm of torch 2.15, and by the backend normfuse; also with CUDA "
        "graphs. Each way's first call, memory and errors are taken in a process of its own with empty caches; the "
        "times of all ways interleaved, in one process. Without a GPU only --tiny runs, and checks errors. Exit "
        "status: 0, 1 if a way failed, 2 for a bad argument.",
    )
    add_list(parser, "--models", MODELS, None)
    add_list(parser, "--ways", WAYS, WAYS)
    add_list(parser, "--settings", SETTINGS, None, "; those of each model where not given")
    add_list(parser, "--memory-formats", MEMORY_FORMATS, None, "; those of each model where not given")
    add_list(parser, "--parts", PARTS, PARTS)
    parser.add_argument("--rounds", type=positive, default=10, help="timed steps of each way, interleaved")
    parser.add_argument("--seconds", type=positive, help="begin nothing after that many, and stop what runs")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see whether they run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the rows here, as JSON Lines, as they come")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if has_gpu() else "cpu")  # where Triton does not interpret: a model takes minutes
    if device.type == "cpu" and not options.tiny:
        parser.error("needs a GPU; --tiny runs without one")
    cells = []
    for name in options.models or MODELS:
        if MODELS[name].is_installed:
            cells += cells_of(name, options.settings, options.memory_formats, device, options.tiny)
        else:
            print(_NOT_INSTALLED.format(MODELS[name].library, name))
    left_out = {"inductor-2.15"} if has_newer_inductor() else set()
    if device.type == "cpu":
        left_out |= {way for way in WAYS if way.endswith(GRAPHS)}
    ways = [way for way in options.ways if way not in left_out]
    parts = options.parts if device.type == "cuda" else ["costs"]
    experiment = Experiment(ways, parts, options.rounds, options.seconds)
    with Recording(options.output, "models", device, show, len(cells)) as recording:
        for cell in cells:
            row = ModelRow(**cell.identity)
            for row in experiment.rows(cell):
                recording.add(row, is_whole=False)
            recording.add(row)
            recording.say(summary(row), "red" if row.failed else None)
    return recording.status


def cells_of(
    name: str, settings: Iterable[str] | None, memory_formats: Iterable[str] | None, device: torch.device, tiny: bool
) -> list[Cell]:
    """The model's own, or all of these; a model without images has no memory format."""
    model = MODELS[name]
    pairs = list(model.cells)
    if settings:
        formats = dict.fromkeys(memory_format for _, memory_format in model.cells)
        pairs = [(setting, memory_format) for setting in settings for memory_format in formats]
    if memory_formats and model.has_images:
        pairs = [(setting, each) for setting in dict.fromkeys(dict(pairs)) for each in memory_formats]
    return [Cell(name, setting, memory_format, device.type, tiny) for setting, memory_format in pairs]


@dataclass
class Experiment:
    """What is measured of each cell.

    Args:
        ways: The ways to run it.
        parts: Of ``PARTS``.
        rounds: Timed steps of each way.
        seconds: After which nothing is begun.
    """

    ways: Sequence[str]
    parts: Sequence[str]
    rounds: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        self._begin = time.monotonic()

    def rows(self, cell: Cell) -> Iterator[ModelRow]:
        """The row, each time that more of it is known."""
        row = ModelRow(**cell.identity)
        with tempfile.TemporaryDirectory() as folder:
            for way in self.ways if "costs" in self.parts else ():
                found = self._ask(cell, "costs", {"way": way}, Path(folder), way)
                row = replace(row, ways=row.ways | {way: WayFigures(**found)})
                yield row
            sound = [way for way in self.ways if not row.way(way).failure]
            if "times" in self.parts and sound:
                more = {"ways": sound, "rounds": self.rounds}
                yield _with_times(row, sound, self._ask(cell, "times", more, Path(folder), _ALL))

    def _ask(self, cell: Cell, part: str, more: dict[str, Any], folder: Path, caches: str) -> dict[str, Any]:
        """What a process finds, whose caches are in a folder of this name; or why it found nothing."""
        left = self.seconds - (time.monotonic() - self._begin) if self.seconds else _LONGEST
        if left <= 0:
            return {"failure": _OUT_OF_TIME}
        if cell.device == "cpu":
            return _here(cell, part, more)
        variables = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        environment = {variable: str(folder / caches / name) for variable, name in variables.items()}
        words = (json.dumps(asdict(cell)), part, json.dumps(more))
        found = answer_of("bench.model_figures", words, environment, min(left, _LONGEST))
        if caches != _ALL and (folder / caches).is_dir():  # what is compiled is not compiled again for the times
            shutil.copytree(folder / caches, folder / _ALL, dirs_exist_ok=True)
        return found


#: The caches of all ways.
_ALL = "all"


def _here(cell: Cell, part: str, more: dict[str, Any]) -> dict[str, Any]:
    """In this process: on a CPU nothing is timed."""
    torch._dynamo.reset()
    try:
        with without_cpp_compiler():
            return PARTS[part](cell, **more)
    except Exception as error:  # a way may fail in any manner; the others are still worth having
        return {"failure": reason(error)}


def _with_times(row: ModelRow, ways: Iterable[str], found: dict[str, Any]) -> ModelRow:
    failure = found.get("failure")
    of_ways = {way: {"failure": failure} for way in ways} if failure else found.pop("ways")
    figures = {way: replace(row.way(way), **_typed(of_ways[way])) for way in ways}
    return replace(row, ways=row.ways | figures, **({} if failure else found))


def _typed(found: dict[str, Any]) -> dict[str, Any]:
    kernels = {kind: KernelTimes(**times) for kind, times in found.get("kernels", {}).items()}
    return found | {"kernels": kernels}


# What is shown


def show(rows: Sequence[ModelRow]) -> list:
    caption = "ms of a step; ratios: device, wall clock; errors: of all together, worst; kernels: ms (launches)"
    return [console_table("Whole models", WAY, [line for row in rows for line in row.lines], caption)]


def summary(row: ModelRow) -> str:
    return "\n".join(f"{row} {way}: {_outcome(figures)}" for way, figures in row.ways.items())


def _outcome(figures: WayFigures) -> str:
    if figures.failure:
        return f"failed: {figures.failure}"
    if figures.us is None:
        error = max((whole or 0.0 for whole, _ in figures.errors.values()), default=0.0)
        return f"error {error:.1e}"
    over = "".join(
        f"; over {other} {number(device, '.3f')}, {number(wall, '.3f')}"
        for other, (device, wall) in figures.over.items()
        if other.startswith("inductor")
    )
    return f"{figures.us / 1e3:.2f} ms, wall clock {number(figures.wall_us and figures.wall_us / 1e3, '.2f')} ms{over}"
