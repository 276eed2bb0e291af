"""Which problems a chain consists of: for sweeps over whole chains."""

import math
from dataclasses import dataclass

from autotune_configs.heuristics import WIDEST_TILE, is_power_of_two
from autotune_configs.kernels import ELEMENT_SIZES
from autotune_configs.problem import Problem
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS

#: Sizes of a Linear chain, batch x in_features x out_features, and of L19.
LINEAR_FORM = ("batch", "in_features", "out_features")
CONVOLUTION_FORM = ("batch", "in_channels", "out_channels", "height", "width", "kernel")
LINEAR_TARGET = (1024, 8192, 8192)
CONVOLUTION_TARGET = (128, 64, 64, 256, 256, 3)
#: What models grow along, small problems first.
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
    """A chain behind a Linear layer: the kernel of its product, if that normalises groups of this size, and which
    group norms it may need beside it."""

    product: str
    group_size: int
    form: tuple[str, ...] = LINEAR_FORM
    target: tuple[int, ...] = LINEAR_TARGET

    def problems(
        self, sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...], by_library: bool = False
    ) -> list[Problem]:
        """Forward: the product, and, where no tile of it holds a group or the library may multiply (float32 as TF32), a
        pass behind it; ``by_library``, that alone. Backward: the norm's pass and, for float32, the products of both
        gradients."""
        M, K, N = sizes
        group_size = largest_divisor(N, self.group_size)
        precision = "highest" if dtype == "float32" else None
        found = []
        if "forward" in passes:
            fused = group_size <= WIDEST_TILE and is_power_of_two(group_size)
            product, width = (self.product, group_size) if fused else ("linear_bias", 1)
            if not by_library:
                found.append(Problem(product, dtype, (M, N, K, width), precision))
            if by_library or not fused or dtype == "float32":
                found.append(Problem("group_norm", dtype, (M, N, group_size)))
        if "backward" in passes and self.product != "linear_group_norm_row_minimum":  # that has passes of its own
            found.append(Problem("group_norm_backward", dtype, (M, N, group_size)))
            if dtype == "float32":
                found.append(Problem("linear_bias", dtype, (M, K, N, 1), precision))
                found.append(Problem("linear_bias", dtype, (N, K, M, 1), precision))
        return found


@dataclass(frozen=True)
class ConvolutionChain:
    """L19: passes over images behind a convolution, and the portable kernel for that."""

    group_size: int
    form: tuple[str, ...] = CONVOLUTION_FORM
    target: tuple[int, ...] = CONVOLUTION_TARGET

    def problems(self, sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...]) -> list[Problem]:
        """z is channels_last where it is made directly; the library's z has the input's memory format."""
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
    "l94": LinearChain("linear_hardtanh_mish_group_norm", 32),
    "l75": LinearChain("linear_group_norm_row_minimum", 16),
    "l30": LinearChain("linear_group_norm_hardtanh", 512),
    "l19": ConvolutionChain(8),
}
