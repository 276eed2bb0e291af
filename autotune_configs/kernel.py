"""What tables and sweeps need to know of a kernel that has configs.

A search space lists the values of each field. A sweep starts from a few configs and continues with the neighbours of
the best one. A neighbour differs by one step in one field.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from autotune_configs.gpus import Gpu
from autotune_configs.problem import ELEMENT_SIZES, Problem
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.image_tiles import ImageNormConfig, ImageSumsConfig
from triton_kernels.linear import LinearConfig

Config = LinearConfig | GroupNormConfig | ImageNormConfig | ImageSumsConfig


@dataclass(frozen=True)
class Kernel(ABC):
    """One kernel, with what tables and sweeps need to know of it.

    ``size_names`` names a problem's sizes. ``layouts`` lists the memory layouts that its images may have. ``ranges``
    has the values of each field to search.
    """

    name: str
    layouts: tuple[str | None, ...] = (None,)
    size_names: ClassVar[tuple[str, ...]]
    ranges: ClassVar[dict[str, tuple[int, ...]]]

    @abstractmethod
    def heuristic(self, problem: Problem, gpu: Gpu) -> Any:
        """A config that is valid for any problem."""

    @abstractmethod
    def is_valid(self, config: Any, problem: Problem, gpu: Gpu) -> bool:
        """Whether another config is."""

    def does_whole(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether one launch with the heuristic's config does all of the problem. Else a sweep has no base."""
        return True

    @abstractmethod
    def starts(self, problem: Problem, gpu: Gpu) -> Iterable[Config]:
        """The configs that a sweep starts from, beside the heuristic's."""

    @property
    def space(self) -> dict[str, tuple[int, ...]]:
        """The values of each field to search."""
        return self.ranges

    def seconds(self, config: Any, problem: Problem, gpu: Gpu) -> float:
        """A rough prediction of the time. Where there is none, all configs are predicted alike."""
        return 1.0

    def config_of(self, values: dict[str, int], problem: Problem, gpu: Gpu) -> Config | None:
        """The config with these values, or None if it is not valid for the problem.

        A field with a default may be missing: a table can be older than the field.
        """
        if not self.takes(problem):
            return None
        heuristic = self.heuristic(problem, gpu)
        try:
            config = type(heuristic)(**values)
        except TypeError:  # a field is missing or unknown
            return None
        searched = all(getattr(config, name) in known for name, known in self.space.items())
        is_valid = self.is_valid(config, problem, gpu) if searched else config == heuristic
        return config if is_valid else None

    def fit(self, config: Any, problem: Problem, gpu: Gpu) -> Any:
        """A config of another kernel or of a rule, with what this kernel needs beside the tile."""
        return config

    def storing(self, config: Any, problem: Problem, gpu: Gpu, size: int) -> Any:
        """The config for results of ``size`` bytes each, of operands of the problem's dtype."""
        return config

    def kins_config(self, values: dict[str, int], problem: Problem, gpu: Gpu) -> Config | None:
        """``config_of`` with the values of another kernel's entry."""
        try:
            config = self.fit(type(self.heuristic(problem, gpu))(**values), problem, gpu)
        except TypeError:
            return None
        return self.config_of(asdict(config), problem, gpu)

    def takes(self, problem: Problem) -> bool:
        """Whether the kernel has such problems: sizes, whole groups, dtype, precision and layout."""
        sizes = dict(zip(self.size_names, problem.sizes, strict=False))
        channels = sizes.get("n", sizes.get("channels", 0))
        return (
            len(problem.sizes) == len(self.size_names)
            and min(problem.sizes) >= 1
            and problem.dtype in ELEMENT_SIZES
            and problem.layout in self.layouts
            and problem.precision == self.precision(problem.dtype)
            and channels % sizes.get("group_size", 1) == 0
        )

    def precision(self, dtype: str) -> str | None:
        """The precision of its float32 products, None without any."""
        return None

    def problems(self, sizes: tuple[int, ...], dtype: str, *_: object) -> list[Problem]:
        """A problem of these sizes for each layout; whatever the passes of a chain and the GPU."""
        return [Problem(self.name, dtype, sizes, self.precision(dtype), layout) for layout in self.layouts]

    def first_candidates(self, problem: Problem, gpu: Gpu) -> list[Config]:
        """The heuristic's config, and the valid ones of those to start from."""
        valid = (config for config in self.starts(problem, gpu) if self.is_valid(config, problem, gpu))
        return list(dict.fromkeys([self.heuristic(problem, gpu), *valid]))

    def neighbours(self, config: Any, problem: Problem, gpu: Gpu) -> list[Config]:
        """The valid configs that differ from this one by one step in one field."""
        found: list[Config] = []
        for name, value in asdict(config).items():
            values = self.space.get(name, ())
            below = [each for each in values if each < value][-1:]
            above = [each for each in values if each > value][:1]
            found += [replace(config, **{name: each}) for each in below + above]
        return [each for each in found if self.is_valid(each, problem, gpu)]


def powers(first: int, last: int) -> tuple[int, ...]:
    """The powers of two from the first to the last."""
    return tuple(2**exponent for exponent in range(first.bit_length() - 1, last.bit_length()))
