"""What is measured: cells, each one chain at one dtype, precision, mode, shape and memory format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.chain import Chain, Forward, Random, Shape
from bench.convolution_chains import L19
from bench.linear_chains import L30, L75, L94
from bench.schema import Row
from bench.sizes import SMALL, TARGET

CHAINS = {"l94": L94, "l75": L75, "l30": L30, "l19": L19}
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
    shape: Shape
    memory_format: str | None = None

    def __str__(self) -> str:
        return str(Row(**self.identity))

    @property
    def identity(self) -> dict:
        """What a row of results says of its cell."""
        return {
            "chain": self.chain.label,
            "product": self.chain.product,
            "shape": str(self.shape),
            "dtype": self.dtype,
            "precision": self.precision,
            "memory_format": self.memory_format,
            "mode": self.mode,
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def make_cells(chains: Sequence[str], dtypes: Sequence[str], modes: Sequence[str], on_gpu: bool) -> list[Cell]:
    """At the target sizes, float32 at its highest precision, contiguous."""
    sizes = TARGET if on_gpu else SMALL
    return [
        Cell(
            chain,
            dtype,
            chain.precisions[0] if dtype == "float32" else None,
            mode,
            chain.shape_class(*map(int, sizes[chain.product].split("x"))),
            next(iter(MEMORY_FORMATS)) if chain.has_memory_format else None,
        )
        for dtype in dtypes
        for chain in (CHAINS[name] for name in chains)
        for mode in modes
    ]


@dataclass(frozen=True)
class Problem:
    """Random data for a cell: the chain's tensors by argument name, and the gradient at its output (training)."""

    tensors: dict[str, torch.Tensor]
    output_gradient: torch.Tensor


def make_problem(cell: Cell, device: torch.device) -> Problem:
    """Draw the data. The values are the same in every memory format."""
    random = Random(torch.Generator(device).manual_seed(0))

    def as_in_cell(tensor):
        tensor = tensor.to(cell.torch_dtype)
        if cell.memory_format and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=MEMORY_FORMATS[cell.memory_format])
        return tensor

    tensors = {name: as_in_cell(tensor) for name, tensor in cell.chain.draw_tensors(cell.shape, random).items()}
    return Problem(tensors, as_in_cell(random.normal(*cell.chain.output_shape(cell.shape))))


def make_step(mode: str, forward: Forward, tensors: Mapping[str, torch.Tensor], output_gradient: torch.Tensor) -> Step:
    """The forward pass without gradients, or the forward and the backward pass with the gradient of every tensor.

    The gradient at the output has the output's own layout, as autograd would hand it on in a model. It is laid out in
    the first call. Some forward passes answer a channels_last input with a contiguous output; a gradient in another
    layout would cost them a copy.
    """
    if mode == "forward":

        def step():
            with torch.no_grad():
                return forward(tensors), ()
    else:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        laid_out = None

        def step():
            nonlocal laid_out
            output = forward(leaves)
            if laid_out is None:
                same = output_gradient.stride() == output.stride()
                laid_out = output_gradient if same else torch.empty_like(output).copy_(output_gradient)
            return output.detach(), torch.autograd.grad(output, list(leaves.values()), laid_out)

    return step
