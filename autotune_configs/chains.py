"""The problems that a chain looks up, for sweeps over whole chains."""

import math
from dataclasses import dataclass

from autotune_configs.heuristics import WIDEST_TILE, is_power_of_two
from autotune_configs.kernels import ELEMENT_SIZES
from autotune_configs.problem import Problem
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS

#: The sizes of a Linear chain and of the convolution's.
LINEAR_FORM = ("batch", "in_features", "out_features")
CONVOLUTION_FORM = ("batch", "in_channels", "out_channels", "height", "width", "kernel")
LINEAR_TARGET = (1024, 8192, 8192)
CONVOLUTION_TARGET = (128, 64, 64, 256, 256, 3)
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
class LinearChain:
    """A chain that begins with a Linear layer.

    ``function`` is its name in ``ops``, ``product`` the kernel that computes all of it in one launch, and
    ``group_size`` that of the target.
    """

    function: str
    product: str
    group_size: int
    form: tuple[str, ...] = LINEAR_FORM
    target: tuple[int, ...] = LINEAR_TARGET

    def problems(
        self, sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...], by_cublas: bool = False
    ) -> list[Problem]:
        """What the passes look up.

        Forward: the product, and a group norm where a second kernel may be needed. It is needed where no tile holds a
        group, and where cuBLAS computes the product: always with ``by_cublas``, and possibly for float32 (as TF32).
        Backward: the norm's pass and, for float32, the products of both gradients.
        """
        M, K, N = sizes
        group_size = largest_divisor(N, self.group_size)
        precision = "highest" if dtype == "float32" else None
        found = []
        if "forward" in passes:
            fused = group_size <= WIDEST_TILE and is_power_of_two(group_size)
            product, width = (self.product, group_size) if fused else ("linear_bias", 1)
            if not by_cublas:
                found.append(Problem(product, dtype, (M, N, K, width), precision))
            if by_cublas or not fused or dtype == "float32":
                found.append(Problem("group_norm", dtype, (M, N, group_size)))
        if "backward" in passes and self.product != "linear_group_norm_row_minimum":  # its own looks nothing up
            found.append(Problem("group_norm_backward", dtype, (M, N, group_size)))
            if dtype == "float32":
                found.append(Problem("linear_bias", dtype, (M, K, N, 1), precision))
                found.append(Problem("linear_bias", dtype, (N, K, M, 1), precision))
        return found


@dataclass(frozen=True)
class ConvolutionChain:
    """The chain that begins with a convolution: the portable kernel for it, and passes over its images."""

    function: str
    group_size: int
    form: tuple[str, ...] = CONVOLUTION_FORM
    target: tuple[int, ...] = CONVOLUTION_TARGET

    def problems(self, sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...]) -> list[Problem]:
        """What the passes look up. Our convolution's result is channels_last, cuDNN's has the input's memory format."""
        B, in_channels, channels, height, width, kernel = sizes
        height, width = height + kernel - 1, width + kernel - 1
        images = (B, channels, height * width, largest_divisor(channels, self.group_size))
        found = []
        if "forward" in passes:
            if dtype != "float32":
                taps = (B, in_channels, channels, height, width, kernel, kernel)
                for layout in (CHANNELS_LAST, f"{CONTIGUOUS} to {CHANNELS_LAST}"):
                    found.append(Problem("convolution", dtype, taps, None, layout))
            for layout in (CONTIGUOUS, CHANNELS_LAST):
                found.append(Problem("image_statistics", dtype, images, None, layout))
            for layout in (CONTIGUOUS, CHANNELS_LAST, f"{CHANNELS_LAST} to {CONTIGUOUS}"):
                found.append(Problem("image_group_norm", dtype, images, None, layout))
        if "backward" in passes:
            for layout in (CONTIGUOUS, CHANNELS_LAST):
                found.append(Problem("image_group_norm_backward", dtype, images, None, layout))
        return found


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


CHAINS: dict[str, LinearChain | ConvolutionChain] = {
    "l94": LinearChain("linear_hardtanh_mish_group_norm", "linear_hardtanh_mish_group_norm", 32),
    "l75": LinearChain("linear_group_norm_min", "linear_group_norm_row_minimum", 16),
    "l30": LinearChain("linear_group_norm_hardtanh", "linear_group_norm_hardtanh", 512),
    "l19": ConvolutionChain("conv_transpose2d_gelu_group_norm", 8),
}


def kernels_of(name: str) -> set[str]:
    """The kernels that a chain looks up, or the kernel of this name."""
    if name not in CHAINS:
        return {name}
    chain = CHAINS[name]
    return {problem.kernel for dtype in DTYPES for problem in chain.problems(chain.target, dtype, PASSES)}
