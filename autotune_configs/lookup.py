"""Look up the config for a problem on a GPU: its own entry's, the nearest entry's, a kin's too, or the heuristic's."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from autotune_configs import tables
from autotune_configs.gpus import Gpu
from autotune_configs.kernel import Config, Kernel
from autotune_configs.kernels import LinearKernel, kernel_of
from autotune_configs.problem import ELEMENT_SIZES, Problem
from autotune_configs.tables import Entry

#: The farthest that an entry may be from a problem, in doublings summed over all sizes.
_NEAR = 3.0
#: An entry up to twice as far away is used if its config's predicted time is below this part of the nearest one's, or
#: of the heuristic's. (Measured from 32 rows on; the prediction is best from 128 rows on.)
_WORTHWHILE = 0.9
#: How far an entry of another chain's product is, beside its sizes: as many doublings, and as many again for each of
#: norm, reduction and tensors that only one of the two has. (At equal sizes, 44 to 52 of 63 entries have the tile of
#: another chain's. Of entries of one chain that are two doublings apart, a third have the same.)
_KINSHIP = 0.5
_generation = 0


@dataclass(frozen=True)
class Found:
    """A config, and where it is from.

    ``entry`` is the table's entry, or None for the heuristic's config, and ``table`` the entry's file.
    ``fills_last_wave`` says that it was preferred to a nearer one for that reason. ``kin`` is the kernel whose entry it
    is, where that is another one.
    """

    config: Config
    entry: Entry | None = None
    table: str | None = None
    fills_last_wave: bool = False
    kin: str = ""

    def is_of(self, gpu: Gpu) -> bool:
        """Whether it is from a table for just this GPU."""
        return self.table is not None and Path(self.table).name == tables.shipped_path(gpu).name


@functools.lru_cache(maxsize=4096)
def find(problem: Problem, gpu: Gpu) -> Found:
    """The config for a problem, looked up once.

    It is the first of these: the user's entry for just this problem, the shipped one, the nearest valid entry of the
    same kernel or a kin, dtype, precision and layout, the heuristic's. If its tiles leave the last wave partly empty,
    another entry may be predicted to be faster (``Kernel.seconds``), and is used.
    """
    kernel = kernel_of(problem.kernel)
    heuristic = Found(kernel.heuristic(problem, gpu))
    entries = _valid_entries(problem, gpu, 2 * _NEAR)
    distance, nearest = next(entries, (math.inf, heuristic))
    if distance == 0:
        return nearest
    candidates = [*([heuristic] if distance > _NEAR else []), nearest, *(found for _, found in entries)]
    seconds = [kernel.seconds(each.config, problem, gpu) for each in candidates]
    if min(seconds) < _WORTHWHILE * seconds[0]:
        return replace(candidates[seconds.index(min(seconds))], fills_last_wave=True)
    return candidates[0]


def _valid_entries(problem: Problem, gpu: Gpu, farthest: float) -> Iterator[tuple[float, Found]]:
    """The entries of a problem's kind, and of its kin, with a valid config, and their distances.

    The nearest comes first. Of equally near ones the user's own comes first.
    """
    kernel = kernel_of(problem.kernel)
    near: list[tuple[float, Entry, str]] = []
    for kind, (entries, logarithms) in _entries(gpu).items():
        if kind[1:] == _kind(problem)[1:] and (differences := _differences(kernel, kind[0])) is not None:
            # Where only one of them has a norm, the width of its groups says nothing.
            compared = len(problem.sizes) - differences.count("norm")
            distances = np.abs(logarithms - _logarithms(problem.sizes))[:, :compared].sum(1)
            distances += _KINSHIP * len(differences)
            near += [(float(each), *entries[place]) for place, each in enumerate(distances) if each <= farthest]
    for distance, entry, table in sorted(near, key=itemgetter(0)):
        kin = "" if entry.problem.kernel == problem.kernel else entry.problem.kernel
        config = (kernel.kins_config if kin else kernel.config_of)(entry.config, problem, gpu)
        if config is not None:
            yield distance, Found(config, entry, table, kin=kin)


def _differences(kernel: Kernel, name: str) -> list[str] | None:
    """What a kernel differs in from the one of this name; None where an entry of the other says nothing of it.

    Products of chains are kin: their tiles depend on what follows the product less than on its sizes.
    """
    if name == kernel.name:
        return []
    other = kernel_of(name) if name.startswith("linear_") else None
    if not (isinstance(kernel, LinearKernel) and isinstance(other, LinearKernel)):
        return None
    return ["functions", *(trait for trait, has in kernel.traits.items() if has != other.traits[trait])]


def known_configs(problem: Problem, gpu: Gpu) -> list[Config]:
    """The configs that tables have for a problem, for a sweep to begin with.

    These are the config that a lookup finds, if it is an entry's, and those of entries for the same problem in another
    dtype of the same size.
    """
    found = find(problem, gpu)
    twins = [replace(problem, dtype=dtype) for dtype, size in ELEMENT_SIZES.items() if size == problem.element_size]
    others = (other for twin in twins if twin != problem for _, other in _valid_entries(twin, gpu, 0.0))
    return list(dict.fromkeys(each.config for each in (found, *others) if each.entry))


@functools.cache
def _entries(gpu: Gpu) -> dict[tuple, tuple[list[tuple[Entry, str]], np.ndarray]]:
    """All entries for a GPU by kind: each with the table it is from, and the logarithms of their sizes.

    The logarithms have shape [entries, sizes]. The user's own entries come first.
    """
    found: dict[tuple, list[tuple[Entry, str]]] = {}
    for path, its_gpu in tables.searched(gpu):
        for entry in tables.read(path, its_gpu):
            found.setdefault(_kind(entry.problem), []).append((entry, str(path)))
    return {
        kind: (entries, np.array([_logarithms(entry.problem.sizes) for entry, _ in entries]))
        for kind, entries in found.items()
    }


def _kind(problem: Problem) -> tuple:
    return problem.kernel, problem.dtype, problem.precision, problem.layout, len(problem.sizes)


def _logarithms(sizes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(math.log2(max(1, size)) for size in sizes)


def generation() -> int:
    """How often the tables have changed. A config that was found in an earlier generation may be outdated."""
    return _generation


def forget() -> None:
    """Read the tables again at the next call, because one of them, or their folder, has changed."""
    global _generation
    _generation += 1
    _entries.cache_clear()
    find.cache_clear()
