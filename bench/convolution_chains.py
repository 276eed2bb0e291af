"""The chain that begins with a transposed convolution."""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from bench.chain import Chain, Shape


@dataclass(frozen=True)
class ConvolutionShape(Shape):
    """Sizes of a transposed convolution at stride 1 without padding.

    The input is [batch, in_channels, height, width], the weight [in_channels, out_channels, kernel, kernel].
    """

    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: int

    @property
    def channels(self) -> int:
        return self.out_channels


@dataclass(frozen=True, kw_only=True)
class ConvolutionChain(Chain):
    """A chain after ``conv_transpose2d(input, weight, conv_bias)``."""

    product: ClassVar[str] = "convolution"
    shape_class: ClassVar[type[Shape]] = ConvolutionShape
    precisions: ClassVar[tuple[str, ...]] = ("highest", "high")  # cuDNN uses TF32 or does not
    has_memory_format: ClassVar[bool] = True

    def output_shape(self, shape):
        return (shape.batch, shape.channels, shape.height + shape.kernel - 1, shape.width + shape.kernel - 1)

    def draw_tensors(self, shape, random):
        channels, bound = shape.channels, 1 / math.sqrt(shape.out_channels * shape.kernel**2)
        return {
            "input": random.normal(shape.batch, shape.in_channels, shape.height, shape.width),
            "weight": random.uniform(bound, shape.in_channels, channels, shape.kernel, shape.kernel),
            "conv_bias": random.uniform(bound, channels),
            "norm_weight": 1 + 0.2 * random.normal(channels),
            "norm_bias": 0.2 * random.normal(channels),
        }

    def bare_call(self, mode, tensors, output_gradient):
        input, weight, bias = tensors["input"], tensors["weight"], tensors["conv_bias"]
        if mode == "forward":
            return lambda: F.conv_transpose2d(input, weight, bias)

        def call():
            output = F.conv_transpose2d(input, weight, bias)
            input_gradient, weight_gradient, _ = torch.ops.aten.convolution_backward(
                output_gradient,
                input,
                weight,
                bias_sizes=None,
                stride=[1, 1],
                padding=[0, 0],
                dilation=[1, 1],
                transposed=True,
                output_padding=[0, 0],
                groups=1,
                output_mask=[True, True, False],
            )
            return output, input_gradient, weight_gradient

        return call

    @contextmanager
    def float32_precision(self, precision):
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = before if precision is None else precision == "high"
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before


#: Eight groups at 64 channels.
L19 = ConvolutionChain(label="L19", function="conv_transpose2d_gelu_group_norm", group_size=8)
