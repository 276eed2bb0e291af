"""The chains that begin with a Linear layer."""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from bench.chain import PRECISIONS, Chain, Shape


@dataclass(frozen=True)
class LinearShape(Shape):
    """Sizes of the matrix product: input [batch, in_features], weight [out_features, in_features]."""

    in_features: int
    out_features: int

    @property
    def channels(self) -> int:
        return self.out_features


@dataclass(frozen=True, kw_only=True)
class LinearChain(Chain):
    """A chain after ``linear(input, weight, linear_bias)``."""

    bias_rank: int  # dimensions of the chain's second bias, 0 where it has none
    output_is_transposed: bool = False  # (1, C, B, 1) instead of (B, C)

    product: ClassVar[str] = "GEMM"
    shape_class: ClassVar[type[Shape]] = LinearShape
    precisions: ClassVar[tuple[str, ...]] = PRECISIONS

    @property
    def sample_dimension(self):
        return 2 if self.output_is_transposed else 0

    def output_shape(self, shape):
        return (1, shape.channels, shape.batch, 1) if self.output_is_transposed else (shape.batch, shape.channels)

    def draw_tensors(self, shape, random):
        channels, bound = shape.channels, 1 / math.sqrt(shape.in_features)
        tensors = {
            "input": random.normal(shape.batch, shape.in_features),
            "weight": random.uniform(bound, channels, shape.in_features),
            "linear_bias": random.uniform(bound, channels),
            "norm_weight": 1 + 0.2 * random.normal(channels),
            "norm_bias": 0.2 * random.normal(channels),
        }
        if self.bias_rank:
            tensors["bias"] = random.normal(*((channels,) if self.bias_rank == 1 else (1, channels, 1, 1)))
        return tensors

    def bare_call(self, mode, tensors, output_gradient):
        input, weight = tensors["input"], tensors["weight"]
        if mode == "forward":
            return lambda: input @ weight.T
        # The values do not matter. The shape is the product's, which need not be the chain's output's.
        gradient = output_gradient.reshape(input.shape[0], weight.shape[0])
        return lambda: (input @ weight.T, gradient @ weight, gradient.T @ input)

    @contextmanager
    def float32_precision(self, precision):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision or before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


#: The group counts at 8192 channels are 256, 512 and 16.
L94 = LinearChain(
    label="L94",
    function="linear_hardtanh_mish_group_norm",
    group_size=32,
    bias_rank=1,
    scalars={"min_val": -1.0, "max_val": 1.0},
)
L75 = LinearChain(label="L75", function="linear_group_norm_min", group_size=16, bias_rank=4, output_is_transposed=True)
L30 = LinearChain(
    label="L30",
    function="linear_group_norm_hardtanh",
    group_size=512,
    bias_rank=0,
    scalars={"min_val": -2.0, "max_val": 2.0},
)
