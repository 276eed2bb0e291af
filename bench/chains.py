"""The chains as the bench measures them: random tensors, the bare product or convolution, PyTorch's precision for it.

A shape's sizes are those of ``autotune_configs.chains``, whose first is the batch and whose third the channels.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

PRECISIONS = ("highest", "high", "medium")

#: A chain as a function of its tensors by name. Its other arguments are bound.
Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
#: A call that is timed. Its result is not used.
Call = Callable[[], Any]
Sizes = tuple[int, ...]


def uniform(bound: float, *size: int) -> torch.Tensor:
    return (torch.rand(size) * 2 - 1) * bound


@contextmanager
def setting(read: Callable, write: Callable, value: object) -> Iterator[None]:
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
class Product:
    """What a chain begins with."""

    #: The argument name of its bias.
    bias: str
    #: The float32 precisions there are for it, and a context in which PyTorch has one of them.
    precisions: tuple[str, ...]
    with_precision: Callable[[str], AbstractContextManager]
    #: Of the input and of the weight, from the sizes.
    shapes: Callable[..., tuple[Sizes, Sizes]]
    #: The product alone, by cuBLAS or cuDNN.
    bare: Forward
    #: Whether it is measured in several memory formats.
    has_memory_format: bool = False


#: By the name that rows have for it.
PRODUCTS = {
    "GEMM": Product(
        "linear_bias",
        PRECISIONS,
        partial(setting, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        shapes=lambda batch, in_features, channels: ((batch, in_features), (channels, in_features)),
        bare=lambda tensors: tensors["input"] @ tensors["weight"].T,
    ),
    # Transposed, at stride 1 without padding. cuDNN uses TF32 or does not.
    "convolution": Product(
        "conv_bias",
        ("highest", "high"),
        lambda precision: cudnn_setting("allow_tf32", precision == "high"),
        shapes=lambda batch, in_channels, channels, height, width, kernel: (
            (batch, in_channels, height, width),
            (in_channels, channels, kernel, kernel),
        ),
        bare=lambda tensors: F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["conv_bias"]),
        has_memory_format=True,
    ),
}


@dataclass(frozen=True)
class Chain:
    """One chain: its name in ``autotune_configs.chains``, and the numbers that it is measured with."""

    name: str
    #: The name of what it begins with.
    product: str
    scalars: dict[str, float] = field(default_factory=dict)
    #: Dimensions of the chain's second bias, 0 where it has none. Of 4, they are (1, channels, 1, 1), and the output's
    #: (1, channels, batch, 1).
    bias_rank: int = 0

    @property
    def label(self) -> str:
        return self.name.upper()

    @property
    def begins_with(self) -> Product:
        return PRODUCTS[self.product]

    @property
    def sample_dimension(self) -> int:
        """Which dimension of the output is the batch."""
        return 2 if self.bias_rank == 4 else 0

    @property
    def declaration(self):
        from autotune_configs.chains import CHAINS  # imports triton, which not every process may do yet

        return CHAINS[self.name]

    def float32_precision(self, precision: str | None) -> AbstractContextManager:
        """Within it, PyTorch's setting for the product's float32 precision is this one; None leaves it alone."""
        return self.begins_with.with_precision(precision) if precision else nullcontext()

    def num_groups(self, channels: int) -> int:
        """Groups of the target's size where that divides, else of the divisor nearest to it by ratio."""
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        return channels // min(divisors, key=lambda size: abs(math.log(size / self.declaration.group_size)))

    def draw_tensors(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The tensors by argument name, random as a fresh model's, but the norm's weight and bias are not 1 and 0."""
        input, weight = self.begins_with.shapes(*sizes)
        bound, channels = 1 / math.sqrt(math.prod(weight[1:])), sizes[2]
        tensors = {
            "input": torch.randn(input),
            "weight": uniform(bound, *weight),
            self.begins_with.bias: uniform(bound, channels),
            "norm_weight": 1 + 0.2 * torch.randn(channels),
            "norm_bias": 0.2 * torch.randn(channels),
        }
        if self.bias_rank:
            tensors["bias"] = torch.randn((1, channels, 1, 1) if self.bias_rank == 4 else channels)
        return tensors


L94 = Chain("l94", "GEMM", {"min_val": -1.0, "max_val": 1.0}, bias_rank=1)
L75 = Chain("l75", "GEMM", bias_rank=4)
L30 = Chain("l30", "GEMM", {"min_val": -2.0, "max_val": 2.0})
L19 = Chain("l19", "convolution")
CHAINS = {chain.name: chain for chain in (L94, L75, L30, L19)}
