"""The chains with a short name, and the problems that a chain looks up."""

import math
from dataclasses import dataclass

from autotune_configs.gpus import Gpu
from autotune_configs.heuristics import WIDEST_TILE, is_power_of_two
from autotune_configs.kernels import kernel_of
from autotune_configs.problem import ELEMENT_SIZES, Problem
from triton_kernels.chain import Chain
from triton_kernels.chains import (
    CONV_TRANSPOSE2D_GELU_GROUP_NORM,
    LINEAR,
    LINEAR_GROUP_NORM_HARDTANH,
    LINEAR_GROUP_NORM_MIN,
    LINEAR_HARDTANH_MISH_GROUP_NORM,
)
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS

LINEAR_TARGET = (1024, 8192, 8192)
#: Linear layers of growing models and batches, small problems first.
GRID = tuple(
    sorted(
        (
            (batch, features, features)
            for features in (1024, 2048, 4096, 8192, 16384)
            for batch in (1, 16, 64, 256, 1024, 4096)
        ),
        key=math.prod,
    )
)
DTYPES = tuple(ELEMENT_SIZES)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class NamedChain:
    """A chain that sweeps, the bench and tests know by a short name.

    ``function`` is its name in ``ops``, ``group_size`` that of the target, or ``num_groups`` their number at any size,
    and ``numbers`` are the operands of its functions that take numbers, in order.
    """

    chain: Chain
    function: str
    group_size: int = 0
    numbers: tuple[tuple[float, ...], ...] = ()
    size_names: tuple[str, ...] = ("batch", "in_features", "out_features")
    target: tuple[int, ...] = LINEAR_TARGET
    num_groups: int = 0

    @property
    def is_linear(self) -> bool:
        return self.chain.contraction == "linear"

    def by_cublas(self, sizes: tuple[int, ...], dtype: str, gpu: Gpu) -> bool:
        """Whether this is a Linear chain in 16 bits whose product cuBLAS computes on this GPU."""
        M, K, N, *_ = sizes
        return self.is_linear and dtype != "float32" and gpu.prefers_cublas(M, N, K)

    def problems(
        self, sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...], gpu: Gpu | None = None
    ) -> list[Problem]:
        """What the passes look up: on this GPU, or on one that needs all of it.

        Raises ValueError where ``num_groups`` do not divide the channels.
        """
        if not self.is_linear:
            return image_problems(sizes, dtype, passes, self.group_size)
        group_size, rest = divmod(sizes[2], self.num_groups) if self.num_groups else (self.group_size, 0)
        if rest:
            raise ValueError(f"out_features must be a multiple of the {self.num_groups} groups, got {sizes[2]}")
        by_cublas = gpu is not None and self.by_cublas(sizes, dtype, gpu)
        found = linear_problems(self.chain, sizes, dtype, passes, group_size, by_cublas)
        return [problem for problem in found if not (problem.precision and gpu and gpu.splits_float32)]


def linear_problems(
    chain: Chain,
    sizes: tuple[int, ...],
    dtype: str,
    passes: tuple[str, ...] = PASSES,
    group_size: int = 1,
    by_cublas: bool = False,
) -> list[Problem]:
    """What a chain that begins with a Linear layer looks up, for groups of at most ``group_size``.

    Forward: the product, and a group norm where a second kernel may be needed. It is needed where no tile holds a
    group, and where cuBLAS computes the product: always with ``by_cublas``, and possibly for float32 (as TF32).
    Backward: the norm's pass and, for float32, the products of both gradients. A reduction's own looks nothing up.
    """
    M, K, N = sizes
    group_size = largest_divisor(N, group_size) if chain.norm else 1
    fused = group_size <= WIDEST_TILE and is_power_of_two(group_size)
    product, width = (chain.kernel, group_size) if fused else (LINEAR.kernel, 1)
    is_float32 = dtype == "float32"
    looked_up = (
        ("forward", not by_cublas, product, (M, N, K, width)),
        ("forward", chain.norm and (by_cublas or not fused or is_float32), "group_norm", (M, N, group_size)),
        ("backward", chain.norm and not chain.reduction, "group_norm_backward", (M, N, group_size)),
        ("backward", is_float32 and not chain.reduction, LINEAR.kernel, (M, K, N, 1)),
        ("backward", is_float32 and not chain.reduction, LINEAR.kernel, (N, K, M, 1)),
    )
    return [
        Problem(kernel, dtype, sizes, kernel_of(kernel).precision(dtype))
        for direction, is_needed, kernel, sizes in looked_up
        if direction in passes and is_needed
    ]


def image_problems(sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...], group_size: int) -> list[Problem]:
    """What the chain looks up that begins with a convolution: its portable kernel, and passes over its images.

    Our convolution's result is channels_last, cuDNN's has the input's memory format.
    """
    B, in_channels, channels, height, width, kernel = sizes
    height, width = height + kernel - 1, width + kernel - 1
    images = (B, channels, height * width, largest_divisor(channels, group_size))
    both = (CONTIGUOUS, CHANNELS_LAST)
    taps = (B, in_channels, channels, height, width, kernel, kernel)
    convolutions = (CHANNELS_LAST, f"{CONTIGUOUS} to {CHANNELS_LAST}") if dtype != "float32" else ()
    looked_up = (
        ("forward", "convolution", taps, convolutions),
        ("forward", "image_statistics", images, both),
        ("forward", "image_group_norm", images, (*both, f"{CHANNELS_LAST} to {CONTIGUOUS}")),
        ("backward", "image_group_norm_backward", images, both),
    )
    return [
        Problem(name, dtype, sizes, None, layout)
        for direction, name, sizes, layouts in looked_up
        for layout in layouts
        if direction in passes
    ]


def largest_divisor(number: int, most: int) -> int:
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


CHAINS = {
    "l94": NamedChain(LINEAR_HARDTANH_MISH_GROUP_NORM, "linear_hardtanh_mish_group_norm", 32, ((-1.0, 1.0),)),
    "l75": NamedChain(LINEAR_GROUP_NORM_MIN, "linear_group_norm_min", 16),
    "l30": NamedChain(LINEAR_GROUP_NORM_HARDTANH, "linear_group_norm_hardtanh", 512, ((-2.0, 2.0),)),
    "l19": NamedChain(
        CONV_TRANSPOSE2D_GELU_GROUP_NORM,
        "conv_transpose2d_gelu_group_norm",
        8,
        size_names=("batch", "in_channels", "out_channels", "height", "width", "kernel"),
        target=(128, 64, 64, 256, 256, 3),
    ),
}
