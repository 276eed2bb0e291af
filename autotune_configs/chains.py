"""The chains with a short name, and the problems that a chain looks up."""

import math
from dataclasses import dataclass, replace
from typing import Any

from autotune_configs import lookup
from autotune_configs.gpus import Gpu, float32_by_cublas
from autotune_configs.heuristics import may_hold_groups
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
from triton_kernels.group_norm import WIDEST_GROUP
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS
from triton_kernels.pointwise import Pointwise
from triton_kernels.row_minimum_backward import has_sparse_gradient

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
    and ``numbers`` are the operands of its functions that take numbers, in order. ``takes_any_shape``: a tensor that
    has one row, as the values have, is a vector, as functions that take steps see it.
    """

    chain: Chain
    function: str
    group_size: int = 0
    numbers: tuple[tuple[float, ...], ...] = ()
    size_names: tuple[str, ...] = ("batch", "in_features", "out_features")
    target: tuple[int, ...] = LINEAR_TARGET
    num_groups: int = 0
    takes_any_shape: bool = False

    @property
    def is_linear(self) -> bool:
        return self.chain.contraction == "linear"

    def by_cublas(self, sizes: tuple[int, ...], dtype: str, gpu: Gpu | None) -> bool:
        """Whether this is a Linear chain whose product cuBLAS computes: in 16 bits that depends on the GPU."""
        if not self.is_linear:
            return False
        M, K, N = sizes
        return float32_by_cublas(M, N, K) if dtype == "float32" else gpu is not None and gpu.prefers_cublas(M, N, K)

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
        chain = _of_one_row(self.chain, sizes[2]) if self.takes_any_shape and sizes[0] == 1 else self.chain
        by_cublas = self.by_cublas(sizes, dtype, gpu)
        found = linear_problems(chain, sizes, dtype, passes, group_size, by_cublas, gpu)
        return [problem for problem in found if not (problem.precision and gpu and gpu.splits_float32)]


def _of_one_row(chain: Chain, channels: int) -> Chain:
    """The chain of values [1, channels], whose tensors are vectors, or one value."""

    def change(step: Pointwise) -> Pointwise:
        return step.with_operand("vector" if channels > 1 else "scalar") if step.operand == "tensor" else step

    return replace(chain, before=tuple(map(change, chain.before)), after=tuple(map(change, chain.after)))


def linear_problems(
    chain: Chain,
    sizes: tuple[int, ...],
    dtype: str,
    passes: tuple[str, ...] = PASSES,
    group_size: int = 1,
    by_cublas: bool = False,
    gpu: Gpu | None = None,
) -> list[Problem]:
    """What a chain that begins with a Linear layer looks up, for groups of at most ``group_size``.

    Forward: the product of the whole chain, unless no tile holds a group or cuBLAS computes it; where the config found
    for this GPU holds none either, the product alone; and the norm's pass where the product does not hold the chain, or
    may not (float32 as TF32). Backward: the norm's pass and, for float32, the products of both gradients. A row
    minimum's own passes look nothing up.
    """
    M, K, N = sizes
    group_size = largest_divisor(N, group_size) if chain.norm else 1
    if group_size > WIDEST_GROUP and chain.reduction:  # that is PyTorch's then
        chain = replace(chain, reduction=None)
    is_float32 = dtype == "float32"

    def of_product(kernel: str, *sizes: int) -> Problem:
        return Problem(kernel, dtype, sizes, kernel_of(kernel).precision(dtype))

    whole = of_product(chain.kernel, M, N, K, group_size)
    may_fuse = not by_cublas and may_hold_groups(group_size, chain.reduction is not None)
    config: Any = lookup.find(whole, gpu).config if may_fuse and gpu else None
    is_fused = may_fuse and (config is None or config.holds_groups_of(group_size))
    is_sparse = chain.reduction is not None and has_sparse_gradient(N // group_size, group_size)
    multiplies_back = is_float32 and not is_sparse
    if group_size > WIDEST_GROUP:
        of_norm = {
            "forward": ("image_statistics", "image_group_norm"),
            "backward": ("image_sums", "image_group_norm_backward"),
        }
        rows, layout = (M, N, 1, group_size), CONTIGUOUS
    else:
        of_norm = {"forward": ("group_norm",), "backward": () if chain.reduction else ("group_norm_backward",)}
        rows, layout = (M, N, group_size), None
    norm = {
        direction: [Problem(kernel, dtype, rows, None, layout) for kernel in kernels if chain.norm]
        for direction, kernels in of_norm.items()
    }
    looked_up = {
        "forward": [
            *([whole] if may_fuse else []),
            *([of_product(LINEAR.kernel, M, N, K, 1)] if not (is_fused or by_cublas) else []),
            *(norm["forward"] if is_float32 or not is_fused else []),
        ],
        "backward": [
            *norm["backward"],
            *([of_product(LINEAR.kernel, M, K, N, 1)] if multiplies_back and not float32_by_cublas(M, K, N) else []),
            *([of_product(LINEAR.kernel, N, K, M, 1)] if multiplies_back and not float32_by_cublas(N, K, M) else []),
        ],
    }
    return [problem for direction in PASSES if direction in passes for problem in looked_up[direction]]


def image_problems(sizes: tuple[int, ...], dtype: str, passes: tuple[str, ...], group_size: int) -> list[Problem]:
    """What the chain looks up that begins with a convolution: the passes over its images.

    Our convolution's result is channels_last, cuDNN's has the input's memory format.
    """
    B, _, channels, height, width, kernel = sizes
    height, width = height + kernel - 1, width + kernel - 1
    images = (B, channels, height * width, largest_divisor(channels, group_size))
    both = (CONTIGUOUS, CHANNELS_LAST)
    mixed = (f"{CHANNELS_LAST} to {CONTIGUOUS}", f"{CONTIGUOUS} to {CHANNELS_LAST}")
    looked_up = (
        ("forward", "image_statistics", images, both),
        ("forward", "image_group_norm", images, (*both, mixed[0])),
        ("backward", "image_sums", images, (*both, mixed[1])),
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
