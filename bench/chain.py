"""What all chains have in common: a shape, a function, and how its arguments are bound."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import torch

PRECISIONS = ("highest", "high", "medium")

#: A chain as a function of its tensors by name. Its other arguments are bound.
Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
#: A call that is timed. Its result is not used.
Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape(ABC):
    """Sizes of the product that a chain begins with, in the order in which they are written, as in 1024x8192x8192."""

    batch: int

    @property
    @abstractmethod
    def channels(self) -> int:
        """What the norm's groups divide."""

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))


@dataclass(frozen=True)
class Random:
    """Random float32 tensors from one generator, on its device."""

    generator: torch.Generator

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.generator.device)

    def uniform(self, bound: float, *size: int) -> torch.Tensor:
        """Between -bound and bound."""
        return (torch.rand(size, generator=self.generator, device=self.generator.device) * 2 - 1) * bound


@dataclass(frozen=True, kw_only=True)
class Chain(ABC):
    """One chain: its function in ``ops`` and ``ops.reference``, and the arguments it is measured with."""

    label: str
    function: str
    group_size: int  # channels a group at the target size
    scalars: dict[str, float] = field(default_factory=dict)

    #: What the chain begins with, and its sizes.
    product: ClassVar[str]
    shape_class: ClassVar[type[Shape]]
    #: The float32 precisions there are for that product.
    precisions: ClassVar[tuple[str, ...]]
    #: Whether it is measured in several memory formats.
    has_memory_format: ClassVar[bool] = False

    @property
    def sample_dimension(self) -> int:
        """Which dimension of the output is the batch."""
        return 0

    @abstractmethod
    def output_shape(self, shape: Shape) -> tuple[int, ...]: ...

    @abstractmethod
    def draw_tensors(self, shape: Shape, random: Random) -> dict[str, torch.Tensor]:
        """The tensors by argument name, the input first.

        They are drawn as a fresh model's, but the norm's weight and bias are not 1 and 0.
        """

    @abstractmethod
    def bare_call(self, mode: str, tensors: Mapping[str, torch.Tensor], output_gradient: torch.Tensor) -> Call:
        """The product alone, by cuBLAS or cuDNN: for training with the input's and the weight's gradient, two more."""

    @abstractmethod
    def float32_precision(self, precision: str | None) -> AbstractContextManager:
        """Within it, PyTorch's setting for the product's float32 precision is this one; None leaves it alone."""

    def num_groups(self, channels: int) -> int:
        """Groups of ``group_size`` channels where that divides, else of the divisor nearest to it by ratio."""
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        return channels // min(divisors, key=lambda size: abs(math.log(size / self.group_size)))

    def bind(self, implementation: ModuleType, channels: int) -> Forward:
        """The chain as ``implementation`` has it (``ops`` or ``ops.reference``)."""
        function, scalars, num_groups = getattr(implementation, self.function), self.scalars, self.num_groups(channels)

        def forward(tensors):
            return function(**tensors, num_groups=num_groups, **scalars)

        return forward
