"""What is measured: cells, each one chain at one dtype, precision, mode, shape and memory format, and their data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from bench import compositions
from bench.chains import CHAINS, Chain
from bench.compositions import (
    PRECISIONS,
    Forward,
    Sizes,
    bare_product,
    contraction_of,
    draw_tensors,
    product_shape,
)
from bench.schema import Row
from bench.sizes import SMALL, sizes_of

DTYPES = ("bfloat16", "float16", "float32")
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

#: One call of a cell's work: returns the output and, in training, the gradient of every tensor.
Step = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
#: A call that is timed. Its result is not used.
Call = Callable[[], Any]


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
        """Of a layer norm, or without a norm: 1."""
        return compositions.num_groups(self.chain, self.sizes[2 if self.chain.contraction else 1])

    @property
    def float32_precision(self) -> AbstractContextManager:
        """Within it, PyTorch's setting is the cell's."""
        return compositions.float32_precision(self.chain, self.precision)

    def by_ops(self) -> Forward:
        return compositions.by_ops(self.chain, self.num_groups)

    def by_pytorch(self) -> Forward:
        return compositions.by_pytorch(self.chain, self.num_groups)


def make_cells(
    chains: Sequence[str],
    dtypes: Iterable[str],
    modes: Iterable[str],
    shapes: Mapping[str, Iterable[str]],
    precisions: Iterable[str] = PRECISIONS[:1],
    memory_formats: Sequence[str] | None = ("contiguous",),
) -> list[Cell]:
    """All combinations that there are. ``shapes`` by chain, ``precisions`` for float32, ``memory_formats`` for images,
    None for those of each chain."""
    return [
        Cell(chain, dtype, precision, mode, shape, memory_format)
        for shape in dict.fromkeys(shape for name in chains for shape in shapes[name])
        for dtype in dtypes
        for precision in (precisions if dtype == "float32" else [None])
        for chain in (CHAINS[name] for name in chains if shape in shapes[name])
        if precision is None or precision in contraction_of(chain).precisions
        for mode in modes
        for memory_format in _formats(chain, shape, memory_formats)
    ]


def _formats(chain: Chain, shape: str, wanted: Sequence[str] | None) -> Sequence[str | None]:
    """Those of them in which there is such a shape. Images of other than two dimensions are contiguous."""
    if not chain.memory_formats:
        return [None]
    images, *_ = contraction_of(chain).shapes(*sizes_of(shape))
    wanted = wanted or chain.memory_formats
    return wanted if len(images) == 4 else [each for each in wanted if each == "contiguous"]


def default_shapes(on_gpu: bool) -> dict[str, list[str]]:
    return {name: list(chain.sizes) if on_gpu else [SMALL[chain.product]] for name, chain in CHAINS.items()}


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
        tensors = {name: as_in_cell(tensor) for name, tensor in draw_tensors(cell.chain, cell.sizes).items()}
        shape = product_shape(cell.chain, tensors)
        if cell.chain.sample_dimension == 2:
            shape = torch.Size((1, shape[1], shape[0], 1))
        return Problem(tensors, as_in_cell(torch.randn(shape)))


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

    For a chain that begins with its norm it is one copy, also in training: a copy's gradient is no work. The values of
    the gradient do not matter. The shape is the product's, which need not be the chain's output's.
    """
    gradient = problem.output_gradient.reshape(product_shape(cell.chain, problem.tensors))
    leaves = {name: tensor for name, tensor in problem.tensors.items() if name in ("input", "weight")}
    bare = bare_product(cell.chain)
    return make_step(cell.mode, lambda leaves: bare({**problem.tensors, **leaves}), leaves, gradient)
