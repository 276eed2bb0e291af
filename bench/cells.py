"""What is measured: cells, each one chain at one dtype, precision, mode, shape and memory format."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

import torch

from bench.chains import CHAINS, PRECISIONS, Chain, Forward, Sizes
from bench.schema import SMALL, TARGET, Row, sizes_of

DTYPES = ("bfloat16", "float16", "float32")
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

#: One call of a cell's work: returns the output and, in training, the gradient of every tensor.
Step = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


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
        """What a row says of its cell."""
        return vars(self) | {"chain": self.chain.label, "product": self.chain.product}

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.shape)

    @property
    def num_groups(self) -> int:
        return self.chain.num_groups(self.sizes[2])

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

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
        tensor = tensor.to(cell.torch_dtype)
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
