"""What is measured: cells, each one chain at one dtype, precision, mode, shape and memory format, and their data.

A shape's sizes are those of ``autotune_configs.chains``, whose first is the batch and whose third the channels.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from bench.schema import Row
from bench.sizes import SMALL, TARGET, sizes_of

DTYPES = ("bfloat16", "float16", "float32")
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
PRECISIONS = ("highest", "high", "medium")

#: A chain as a function of its tensors by name. Its other arguments are bound.
Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
#: One call of a cell's work: returns the output and, in training, the gradient of every tensor.
Step = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
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
    return setting(partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name), value)


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


CHAINS = {
    chain.name: chain
    for chain in (
        Chain("l94", "GEMM", {"min_val": -1.0, "max_val": 1.0}, bias_rank=1),
        Chain("l75", "GEMM", bias_rank=4),
        Chain("l30", "GEMM", {"min_val": -2.0, "max_val": 2.0}),
        Chain("l19", "convolution"),
    )
}


@dataclass(frozen=True)
class Cell:
    """One cell.

    ``precision`` is the product's float32 precision, None for other dtypes. ``memory_format`` is that of every
    image-like tensor, None for a chain that has none.
    """

    chain: Chain
    dtype: str
    precision: str | None
    mode: str
    shape: str
    memory_format: str | None = None

    def __str__(self) -> str:
        return str(Row(**self.identity))

    @property
    def identity(self) -> dict:
        return vars(self) | {"chain": self.chain.label, "product": self.chain.product}

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.shape)

    @property
    def num_groups(self) -> int:
        """Groups of the target's size where that divides, else of the divisor nearest to it by ratio."""
        channels, of_target = self.sizes[2], self.chain.declaration.group_size
        divisors = [size for size in range(1, channels + 1) if channels % size == 0]
        return channels // min(divisors, key=lambda size: abs(math.log(size / of_target)))

    def bind(self, implementation: str) -> Forward:
        """The chain as this module has it, ``ops`` or ``ops.reference``. As triton is imported, it reads whether it is
        to interpret."""
        function = getattr(import_module(implementation), self.chain.declaration.function)
        options = self.chain.scalars | {"num_groups": self.num_groups}

        def forward(tensors):
            return function(**tensors, **options)

        return forward


def make_cells(
    chains: Iterable[str],
    dtypes: Iterable[str],
    modes: Iterable[str],
    shapes: Mapping[str, Iterable[str]],
    precisions: Iterable[str] = PRECISIONS[:1],
    memory_formats: Iterable[str] = ("contiguous",),
) -> list[Cell]:
    """All combinations that there are. ``shapes`` by what a chain begins with, ``precisions`` for float32."""
    return [
        Cell(chain, dtype, precision, mode, shape, memory_format)
        for product in shapes
        for shape in shapes[product]
        for dtype in dtypes
        for precision in (precisions if dtype == "float32" else [None])
        for chain in (CHAINS[name] for name in chains)
        if chain.product == product and (precision is None or precision in chain.begins_with.precisions)
        for mode in modes
        for memory_format in (memory_formats if chain.begins_with.has_memory_format else [None])
    ]


def default_shapes(on_gpu: bool) -> dict[str, list[str]]:
    return {product: [shape] for product, shape in (TARGET if on_gpu else SMALL).items()}


@dataclass(frozen=True)
class Problem:
    """Random data for a cell: the chain's tensors by argument name, and the gradient at its output (training)."""

    tensors: dict[str, torch.Tensor]
    output_gradient: torch.Tensor


def make_problem(cell: Cell, device: torch.device) -> Problem:
    """Draw the data. The values are the same in every memory format."""

    def as_in_cell(tensor):
        tensor = tensor.to(getattr(torch, cell.dtype))
        if cell.memory_format and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=MEMORY_FORMATS[cell.memory_format])
        return tensor

    torch.manual_seed(0)
    with device:
        tensors = {name: as_in_cell(tensor) for name, tensor in cell.chain.draw_tensors(cell.sizes).items()}
        shape = _product_shape(cell, tensors)
        if cell.chain.sample_dimension == 2:
            shape = torch.Size((1, shape[1], shape[0], 1))
        return Problem(tensors, as_in_cell(torch.randn(shape)))


def _product_shape(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> torch.Size:
    return cell.chain.begins_with.bare({name: tensor.to("meta") for name, tensor in tensors.items()}).shape


def make_step(mode: str, forward: Forward, tensors: Mapping[str, torch.Tensor], output_gradient: torch.Tensor) -> Step:
    """The forward pass without gradients or with a graph for them, or with the gradient of every tensor (training).

    The gradient at the output has the output's own layout, as autograd would hand it on in a model. It is laid out in
    the first call. Some forward passes answer a channels_last input with a contiguous output; a gradient in another
    layout would cost them a copy.
    """
    leaves = {name: tensor.detach().requires_grad_(mode != "forward") for name, tensor in tensors.items()}
    laid_out = None

    def step():
        nonlocal laid_out
        if mode != "training":
            with torch.set_grad_enabled(mode != "forward"):
                return forward(leaves), ()
        output = forward(leaves)
        if laid_out is None:
            same = output_gradient.stride() == output.stride()
            laid_out = output_gradient if same else torch.empty_like(output).copy_(output_gradient)
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), laid_out)

    return step


def make_bare_step(cell: Cell, problem: Problem) -> Step:
    """The bare product as a step: for training with the input's and the weight's gradient, two more products.

    The values of the gradient do not matter. The shape is the product's, which need not be the chain's output's.
    """
    gradient = problem.output_gradient.reshape(_product_shape(cell, problem.tensors))
    leaves = {name: problem.tensors[name] for name in ("input", "weight")}
    return make_step(
        cell.mode, lambda leaves: cell.chain.begins_with.bare({**problem.tensors, **leaves}), leaves, gradient
    )
