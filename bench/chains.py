"""The chains as the bench measures them: random tensors, the bare product or convolution, PyTorch's precision for it.

A shape's sizes are those of ``autotune_configs.chains``, whose first is the batch and whose third the channels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

PRECISIONS = ("highest", "high", "medium")

#: A chain as a function of its tensors by name. Its other arguments are bound.
Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
#: A call that is timed. Its result is not used.
Call = Callable[[], Any]
Sizes = tuple[int, ...]


def uniform(bound: float, *size: int) -> torch.Tensor:
    """Random numbers between -bound and bound."""
    return (torch.rand(size) * 2 - 1) * bound


@contextmanager
def setting(read: Callable, write: Callable, value: object) -> Iterator[None]:
    """Within it, one of PyTorch's settings has this value."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def cudnn_setting(name: str, value: bool) -> AbstractContextManager:
    cudnn = torch.backends.cudnn
    return setting(partial(getattr, cudnn, name), partial(setattr, cudnn, name), value)


@dataclass(frozen=True)
class Chain(ABC):
    """One chain: its name in ``autotune_configs.chains``, and the numbers that it is measured with."""

    name: str
    scalars: dict[str, float] = field(default_factory=dict)
    #: Dimensions of the chain's second bias, 0 where it has none. Of 4, they are (1, channels, 1, 1), and the output's
    #: (1, channels, batch, 1).
    bias_rank: int = 0

    #: What the chain begins with, and the name of its bias.
    product: ClassVar[str]
    product_bias: ClassVar[str]
    #: The float32 precisions there are for that product.
    precisions: ClassVar[tuple[str, ...]]
    #: Whether it is measured in several memory formats.
    has_memory_format: ClassVar[bool] = False

    @abstractmethod
    def product_shapes(self, sizes: Sizes) -> tuple[Sizes, Sizes]:
        """Of the input and of the weight."""

    @abstractmethod
    def bare(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The product alone, by cuBLAS or cuDNN."""

    @abstractmethod
    def float32_precision(self, precision: str | None) -> AbstractContextManager:
        """Within it, PyTorch's setting for the product's float32 precision is this one; None leaves it alone."""

    @property
    def label(self) -> str:
        return self.name.upper()

    @property
    def sample_dimension(self) -> int:
        """Which dimension of the output is the batch."""
        return 2 if self.bias_rank == 4 else 0

    @property
    def declaration(self):
        from autotune_configs.chains import CHAINS  # imports triton, which not every process may do yet

        return CHAINS[self.name]

    def num_groups(self, channels: int) -> int:
        """Groups of the target's size where that divides, else of the divisor nearest to it by ratio."""
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        return channels // min(divisors, key=lambda size: abs(math.log(size / self.declaration.group_size)))

    def draw_tensors(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The tensors by argument name, random as a fresh model's, but the norm's weight and bias are not 1 and 0."""
        input, weight = self.product_shapes(sizes)
        bound, channels = 1 / math.sqrt(math.prod(weight[1:])), sizes[2]
        tensors = {
            "input": torch.randn(input),
            "weight": uniform(bound, *weight),
            self.product_bias: uniform(bound, channels),
            "norm_weight": 1 + 0.2 * torch.randn(channels),
            "norm_bias": 0.2 * torch.randn(channels),
        }
        if self.bias_rank:
            tensors["bias"] = torch.randn((1, channels, 1, 1) if self.bias_rank == 4 else channels)
        return tensors


class LinearChain(Chain):
    """A chain after ``linear(input, weight, linear_bias)``."""

    product, product_bias = "GEMM", "linear_bias"
    precisions = PRECISIONS

    def product_shapes(self, sizes):
        batch, in_features, channels = sizes
        return (batch, in_features), (channels, in_features)

    def bare(self, tensors):
        return tensors["input"] @ tensors["weight"].T

    def float32_precision(self, precision):
        read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        return setting(read, write, precision) if precision else nullcontext()


class ConvolutionChain(Chain):
    """A chain after ``conv_transpose2d(input, weight, conv_bias)``, at stride 1 without padding."""

    product, product_bias = "convolution", "conv_bias"
    precisions = ("highest", "high")  # cuDNN uses TF32 or does not
    has_memory_format = True

    def product_shapes(self, sizes):
        batch, in_channels, channels, height, width, kernel = sizes
        return (batch, in_channels, height, width), (in_channels, channels, kernel, kernel)

    def bare(self, tensors):
        return F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["conv_bias"])

    def float32_precision(self, precision):
        return cudnn_setting("allow_tf32", precision == "high") if precision else nullcontext()


L94 = LinearChain("l94", {"min_val": -1.0, "max_val": 1.0}, bias_rank=1)
L75 = LinearChain("l75", bias_rank=4)
L30 = LinearChain("l30", {"min_val": -2.0, "max_val": 2.0})
L19 = ConvolutionChain("l19")
CHAINS = {chain.name: chain for chain in (L94, L75, L30, L19)}
