"""What is measured: the chains, and the cells of the table (one chain at one dtype, precision, mode and shape)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("highest", "high", "medium")
MODES = ("forward", "training")

#: A chain as a function of its tensors alone, by name; what is no tensor is bound.
Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
#: One call of a cell's work: returns the output and, in training, the gradient of every tensor.
Step = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Shape:
    """Sizes of the matrix product: input [batch, in_features], weight [out_features, in_features]."""

    batch: int
    in_features: int
    out_features: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.in_features}x{self.out_features}"


@dataclass(frozen=True)
class Chain:
    """One chain: its function in ``ops`` and ``ops.reference``, and the arguments it is measured with."""

    label: str
    function: str
    group_size: int  # channels a group at the target size
    bias_rank: int  # dimensions of the bias added beside linear_bias, over the channels; 0: the chain has none
    output_is_transposed: bool = False  # (1, C, B, 1) instead of (B, C)
    scalars: dict[str, float] = field(default_factory=dict)

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


#: The group counts at 8192 channels are 256, 512 and 16.
CHAINS = {
    "l94": Chain(
        "L94", "linear_hardtanh_mish_group_norm", group_size=32, bias_rank=1, scalars={"min_val": -1.0, "max_val": 1.0}
    ),
    "l75": Chain("L75", "linear_group_norm_min", group_size=16, bias_rank=4, output_is_transposed=True),
    "l30": Chain(
        "L30", "linear_group_norm_hardtanh", group_size=512, bias_rank=0, scalars={"min_val": -2.0, "max_val": 2.0}
    ),
}


@dataclass(frozen=True)
class Cell:
    """One cell of the table. ``precision`` is torch's float32 matmul precision, None for other dtypes."""

    chain: Chain
    dtype: str
    precision: str | None
    mode: str
    shape: Shape

    def __str__(self) -> str:
        precision = f" {self.precision}" if self.precision else ""
        return f"{self.chain.label} {self.dtype}{precision} {self.mode} {self.shape}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def operations(self) -> int:
        """Floating-point operations of the matrix products: one for the forward pass, three for a training step."""
        products = 3 if self.mode == "training" else 1
        return products * 2 * self.shape.batch * self.shape.in_features * self.shape.out_features


@dataclass(frozen=True)
class Problem:
    """Random data for a cell: the chain's tensors by argument name, and the gradient at its output (training)."""

    tensors: dict[str, torch.Tensor]
    output_gradient: torch.Tensor


def make_problem(cell: Cell, device: torch.device) -> Problem:
    """Data as a fresh model has it (Linear's initial draws), but with a norm weight and bias that are not 1 and 0."""
    generator = torch.Generator(device).manual_seed(0)
    shape, channels = cell.shape, cell.shape.out_features

    def normal(*size):
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size):
        return (torch.rand(size, generator=generator, device=device) * 2 - 1) / math.sqrt(shape.in_features)

    tensors = {
        "input": normal(shape.batch, shape.in_features),
        "weight": uniform(channels, shape.in_features),
        "linear_bias": uniform(channels),
        "norm_weight": 1 + 0.2 * normal(channels),
        "norm_bias": 0.2 * normal(channels),
    }
    if cell.chain.bias_rank:
        tensors["bias"] = normal(*((channels,) if cell.chain.bias_rank == 1 else (1, channels, 1, 1)))
    output_shape = (1, channels, shape.batch, 1) if cell.chain.output_is_transposed else (shape.batch, channels)
    return Problem(
        {name: tensor.to(cell.torch_dtype) for name, tensor in tensors.items()},
        normal(*output_shape).to(cell.torch_dtype),
    )


def make_step(mode: str, forward: Forward, tensors: Mapping[str, torch.Tensor], output_gradient: torch.Tensor) -> Step:
    """The forward pass without gradients, or the forward and the backward pass with the gradient of every tensor."""
    if mode == "forward":

        def step():
            with torch.no_grad():
                return forward(tensors), ()
    else:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}

        def step():
            output = forward(leaves)
            return output.detach(), torch.autograd.grad(output, list(leaves.values()), output_gradient)

    return step
