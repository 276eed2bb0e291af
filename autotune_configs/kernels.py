"""The kernels that have configs: their search spaces, the configs valid for a problem, and where a sweep starts."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from autotune_configs.gpus import Gpu
from autotune_configs.heuristics import (
    WIDEST_TILE,
    heuristic_group_norm_config,
    heuristic_image_config,
    heuristic_image_sums_config,
    heuristic_linear_config,
)
from autotune_configs.kernel import Kernel, powers
from autotune_configs.prediction import product_seconds
from autotune_configs.problem import Problem
from triton_kernels import chains
from triton_kernels.grid import next_power_of_2
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, ImageNormConfig, ImageSumsConfig
from triton_kernels.linear import LinearConfig
from triton_kernels.row_minimum import ROW_MINIMUM

#: The most float32 values of a tile that a thread has registers for, beside all else.
_MOST_VALUES_A_THREAD = 128


#: Within a block of K the tensor cores accumulate, and truncate to float32. Blocks are added in float32. The error of a
#: bias's gradient was 1.0e-7 with blocks of 32, 1.4e-7 with 64 and 2.6e-7 with 128 (L30, H200). On positive data,
#: blocks of 64 are less accurate than PyTorch.
_DEEPEST_FLOAT32_BLOCK = 32


class LinearKernel(Kernel):
    """The product [M, K] @ [N, K].T of a chain, with all of the chain that its tiles hold (``Chain.kernel``)."""

    size_names = ("m", "n", "k", "group_size")
    ranges = {
        "block_m": powers(16, 256),
        "block_n": powers(16, 256),
        "block_k": powers(16, 256),
        "group_m": (1, 4, 8, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6, 8),
        "epilogue_strips": (1, 2),
        "store_strips": (1, 2),
    }

    @property
    def _reduces(self) -> bool:
        """Whether the chain ends in a reduction, which stores no tile."""
        return self.name.endswith(ROW_MINIMUM.name)

    @property
    def _loads_tensors(self) -> bool:
        """Whether the chain has operands of the product's shape (``Chain.kernel``)."""
        return "_tensor" in self.name

    @property
    def space(self):
        return {**self.ranges, "store_strips": (1,)} if self._reduces else self.ranges

    def takes(self, problem):
        return super().takes(problem) and ("group_norm" in self.name or problem.sizes[3] == 1)

    def precision(self, dtype):
        return "highest" if dtype == "float32" else None

    @property
    def traits(self) -> dict[str, bool]:
        """What decides, beside the sizes, which tiles are fast (``Chain.kernel``)."""
        return {"norm": "group_norm" in self.name, "reduction": self._reduces, "tensors": self._loads_tensors}

    def heuristic(self, problem, gpu):
        M, N, K, group_size = problem.sizes
        return self.fit(heuristic_linear_config(problem.element_size, M, N, K, group_size, gpu), problem, gpu)

    def does_whole(self, problem, gpu):
        return self.heuristic(problem, gpu).holds_groups_of(problem.sizes[3])

    def fit(self, config, problem, gpu):
        """The config in strips where the epilogue needs registers beside the tile's, with as many of its stages as fit
        beside what the epilogue keeps in shared memory.

        Tensors that are loaded need registers, and so do earlier values beside a norm. With the tile in two strips, a
        chain with two of them spills at most 64 bytes (sm_100), in one up to 560 (compiled offline for sm_80 to sm_120,
        triton 3.6 to 3.9). So do exponentials and polynomials beside full tiles: two of them spill up to 1.5 KB in one
        strip and at most 56 bytes in two (sm_90, triton 3.7).
        """
        group_size = problem.sizes[3]
        if self._reduces:
            config = replace(config, store_strips=1)
        if self._needs_strips(config):
            in_strips = replace(config, epilogue_strips=2, store_strips=1)
            if in_strips.holds_groups_of(group_size) or not config.holds_groups_of(group_size):
                config = in_strips
        while config.num_stages > 2 and self._shared_memory(config, problem) > gpu.shared_memory:
            config = replace(config, num_stages=config.num_stages - 1)
        return config

    def storing(self, config, problem, gpu, size):
        """With as many stages as fit, in as few strips as let so many fit.

        Beside a tile of the result, one of what the backward pass needs is staged, in the operands' dtype.
        """
        each = size // problem.element_size + 1
        candidates = [
            replace(config, num_stages=num_stages, **strips)
            for num_stages in range(config.num_stages, 0, -1)
            for strips in self._strips(config, problem.sizes[3], gpu)
        ]

        def fits(config: LinearConfig) -> bool:
            return self._shared_memory(self._as_stored(config, problem), problem, each) <= gpu.shared_memory

        return next(filter(fits, candidates), candidates[-1])

    def _strips(self, config: LinearConfig, group_size: int, gpu: Gpu) -> Iterable[dict[str, int]]:
        """A config's strips, then more of them. Hopper alone divides a strip without an exchange in shared memory."""
        yield {}
        divides_strips = gpu.architecture == 90 and config.stacks_warps
        if config.stored_columns >= 32 and (divides_strips or config.epilogue_strips == 1):
            yield {"store_strips": 2}
        in_strips = replace(config, epilogue_strips=2, store_strips=2)
        if divides_strips and in_strips.stored_columns >= 16 and in_strips.holds_groups_of(group_size):
            yield {"epilogue_strips": 2, "store_strips": 2}

    def _as_stored(self, config: LinearConfig, problem: Problem) -> LinearConfig:
        """Unaligned rows are stored through pointers, in one strip."""
        is_aligned = problem.sizes[1] * problem.element_size % 16 == 0
        return config if is_aligned else replace(config, store_strips=1)

    def _needs_strips(self, config: LinearConfig) -> bool:
        is_full = config.block_m * config.block_n > _MOST_VALUES_A_THREAD // 2 * 32 * config.num_warps
        keeps_values = self._loads_tensors or ("_earlier" in self.name and "_group_norm" in self.name)
        return config.stacks_warps and (keeps_values or (is_full and self._terms > 1))

    @cached_property
    def _terms(self) -> int:
        """The exponentials and polynomials of the chain's functions; 0 where this process does not know them."""
        chain = chains.known(self.name)
        return sum([step.terms for step in chain.steps]) if chain else 0

    def _shared_memory(self, config: LinearConfig, problem: Problem, result: int = 1) -> int:
        """Bytes that a launch needs, for results of ``result`` times the operands' size. An epilogue stages its part of
        the output's rows; a reduction stages a group.

        A tensor that is loaded takes half a tile beside it (seen in compiled kernels).
        """
        staged_columns = result * config.stored_columns
        if self._reduces:
            staged_columns = problem.sizes[3] * 4 // problem.element_size
        elif self._loads_tensors:
            staged_columns += result * config.epilogue_columns // 2
        return config.shared_memory(problem.element_size, staged_columns)

    def is_valid(self, config, problem, gpu):
        M, N, K, group_size = problem.sizes
        element_size, tile = problem.element_size, (config.block_m, config.block_n)
        heuristic = self.heuristic(problem, gpu)
        if K * element_size % 16 != 0:  # loaded without tensor descriptors: only the heuristic has tiles for this
            return config == heuristic
        may_split_groups = group_size > WIDEST_TILE or not heuristic.holds_groups_of(group_size)
        # The heuristic's tile is known to fit even so.
        staging = config if config == heuristic else self._as_stored(config, problem)
        return (
            (may_split_groups or config.holds_groups_of(group_size))
            and (element_size == 2 or config.block_k <= _DEEPEST_FLOAT32_BLOCK)
            and config.block_m <= max(16, next_power_of_2(M))
            and math.prod(tile) <= _MOST_VALUES_A_THREAD * 32 * config.num_warps
            and min(*tile, config.block_k, config.stored_columns) >= 16
            and config.epilogue_strips * config.store_strips <= 2
            and self._shared_memory(staging, problem) <= gpu.shared_memory
            and (gpu.architecture, element_size, tile) != (100, 4, (64, 256))  # compiled to a trap
        )

    def starts(self, problem, gpu):
        """A tile of each shape. With few rows a kernel mostly loads weights: deep blocks keep many bytes in flight."""
        tallest = max(16, next_power_of_2(problem.sizes[0]))
        for block_m, block_n in itertools.product((64, 128, 256), (32, 64, 128, 256)):
            block_m = min(tallest, block_m)
            if block_m <= 32 and problem.element_size == 2:
                yield LinearConfig(block_m, block_n, 128, num_warps=4, num_stages=4)
            else:
                num_warps = 8 if block_m * block_n > 64 * 64 else 4
                yield LinearConfig(block_m, block_n, 128 // problem.element_size, num_warps=num_warps, num_stages=3)

    def seconds(self, config, problem, gpu):
        if problem.element_size != 2:
            return super().seconds(config, problem, gpu)
        M, N, K, _ = problem.sizes
        return product_seconds((config.block_m, config.block_n), M, N, K, gpu.multiprocessors)


class GroupNormKernel(Kernel):
    size_names = ("m", "n", "group_size")
    ranges = {
        "block_m": powers(1, 64),
        "block_columns": powers(16, 8192),
        "num_warps": (1, 2, 4, 8, 16),
        "rows_per_program": powers(1, 4096),
        "num_stages": (1, 2, 3),
    }

    @property
    def space(self):
        """A forward pass has no loop over rows."""
        loop = () if self.name.endswith("backward") else ("rows_per_program", "num_stages")
        return {name: values for name, values in self.ranges.items() if name not in loop}

    def heuristic(self, problem, gpu):
        M, N, group_size = problem.sizes
        return heuristic_group_norm_config(self.name, problem.element_size, M, N, group_size, gpu)

    def is_valid(self, config, problem, gpu):
        M, _, group_size = problem.sizes
        blocks = config.blocks(group_size)
        return (
            config.block_columns >= blocks["BLOCK_GROUP"]
            and config.rows_per_program % config.block_m == 0
            and math.prod(blocks.values()) <= max(64 * 32 * config.num_warps, blocks["BLOCK_GROUP"])
            and config.rows_per_program <= max(config.block_m, next_power_of_2(M))
            and config.shared_memory(group_size, problem.element_size) <= gpu.shared_memory
        )

    def starts(self, problem, gpu):
        heuristic = self.heuristic(problem, gpu)
        rows, warps = next_power_of_2(heuristic.rows_per_program), max(4, heuristic.num_warps)
        return [
            replace(heuristic, block_m=block_m, rows_per_program=max(block_m, rows), num_warps=warps)
            for block_m in (1, 4, 16)
        ]


class ImageNormKernel(Kernel):
    size_names = ("samples", "channels", "pixels", "group_size")
    ranges = {
        "block_c": powers(1, 128),
        "block_s": powers(16, 2048),
        "num_warps": (2, 4, 8),
        "strip": powers(1, 64),
    }

    def heuristic(self, problem, gpu):
        samples, channels, pixels, _ = problem.sizes
        return heuristic_image_config(self.name, samples, channels, pixels, problem.layout)

    def is_valid(self, config, problem, gpu):
        _, channels, pixels, _ = problem.sizes
        return (
            config.block_c <= next_power_of_2(channels)
            and config.block_s <= max(16, next_power_of_2(pixels))
            and config.block_c * config.block_s <= 64 * 32 * config.num_warps
        )

    def starts(self, problem, gpu):
        return [
            ImageNormConfig(max(1, min(values // block_s, problem.sizes[1])), block_s)
            for values, block_s in itertools.product((2048, 4096, 8192), (32, 64, 256, 1024))
        ]


class ImageSumsKernel(ImageNormKernel):
    """Sums over groups of an image, in one launch."""

    ranges = {
        "block_c": powers(1, 512),
        "block_s": powers(4, 4096),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "programs": tuple(33 * 2**exponent for exponent in range(8)),
    }

    def heuristic(self, problem, gpu):
        samples, channels, pixels, group_size = problem.sizes
        size, layout = problem.element_size, problem.layout
        return heuristic_image_sums_config(self.name, size, samples, channels, pixels, group_size, layout, gpu)

    def is_valid(self, config, problem, gpu):
        _, channels, pixels, group_size = problem.sizes
        if self.name == "image_statistics" and problem.layout == CONTIGUOUS:  # each group is one row
            channels, pixels = channels // group_size, pixels * group_size
        return super().is_valid(config, replace(problem, sizes=(1, channels, pixels, 1)), gpu)

    def starts(self, problem, gpu):
        return [
            ImageSumsConfig(values // block_s, block_s)
            for values, block_s in itertools.product((2048, 4096), (16, 32, 64, 256, 1024))
        ]


_FORMATS = (CONTIGUOUS, CHANNELS_LAST)
_PAIRS = (*_FORMATS, f"{CONTIGUOUS} to {CHANNELS_LAST}", f"{CHANNELS_LAST} to {CONTIGUOUS}")
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        LinearKernel(chains.LINEAR.kernel),
        LinearKernel(chains.LINEAR_HARDTANH_MISH_GROUP_NORM.kernel),
        LinearKernel(chains.LINEAR_GROUP_NORM_HARDTANH.kernel),
        LinearKernel(chains.LINEAR_GROUP_NORM_MIN.kernel),
        GroupNormKernel("group_norm"),
        GroupNormKernel("group_norm_backward"),
        ImageSumsKernel("image_statistics", _FORMATS),
        ImageSumsKernel("image_sums", _PAIRS),
        ImageNormKernel("image_group_norm", _PAIRS),
        ImageNormKernel("image_group_norm_backward", _FORMATS),
    )
}


def kernel_of(name: str) -> Kernel:
    """The kernel of this name: one of KERNELS, or that of any other chain that begins with a Linear layer.

    Raises ValueError for other names.
    """
    if name not in KERNELS and not name.startswith("linear_"):
        raise ValueError(f"unknown kernel {name!r}")
    return KERNELS.get(name) or LinearKernel(name)
