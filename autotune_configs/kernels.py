"""The kernels that have configs: their search spaces, the configs valid for a problem, and where a sweep starts.

A search space lists the values of each field. A sweep starts from a few configs and continues with the neighbours of
the best one. A neighbour differs by one step in one field.
"""

from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from autotune_configs.gpus import Gpu
from autotune_configs.heuristics import WIDEST_TILE, heuristic_group_norm_config, heuristic_linear_config
from autotune_configs.prediction import product_seconds
from autotune_configs.problem import Problem
from triton_kernels.convolution import ConvolutionConfig
from triton_kernels.grid import next_power_of_2
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, ImageNormConfig
from triton_kernels.linear import LinearConfig

Config = LinearConfig | GroupNormConfig | ImageNormConfig | ConvolutionConfig

ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

#: The most float32 values of a tile that a thread has registers for, beside all else.
_MOST_VALUES_A_THREAD = 128


@dataclass(frozen=True)
class Kernel:
    """One kernel, with what tables and sweeps need to know of it.

    ``size_names`` names a problem's sizes. ``layouts`` lists the memory layouts that its images may have.
    ``heuristic`` gives a config that is valid for any problem, and ``is_valid`` tells whether another one is. ``space``
    has the values of each field to search, and ``starts`` the configs to start from. ``seconds`` roughly predicts the
    time of a 16-bit problem; not every kernel has it.
    """

    name: str
    size_names: tuple[str, ...]
    config_class: type
    heuristic: Callable[[Problem, Gpu], Config]
    is_valid: Callable[[Any, Problem, Gpu], bool]  # of a config of config_class
    space: dict[str, tuple[int, ...]]
    starts: Callable[[Problem], Iterable[Config]]
    layouts: tuple[str | None, ...] = (None,)
    seconds: Callable[[Any, Problem, Gpu], float] | None = None

    def predicted(self, configs: Iterable[Config], problem: Problem, gpu: Gpu) -> list[float]:
        """The predicted time with each of the configs; empty without a prediction."""
        if self.seconds is None or ELEMENT_SIZES[problem.dtype] != 2:
            return []
        return [self.seconds(config, problem, gpu) for config in configs]

    def config_of(self, values: dict[str, int], problem: Problem, gpu: Gpu) -> Config | None:
        """The config with these values, or None if it is not valid for the problem.

        A field with a default may be missing: a table can be older than the field.
        """
        names = {field.name for field in fields(self.config_class)}
        needed = {field.name for field in fields(self.config_class) if field.default is MISSING}
        if not needed <= set(values) <= names or not self.takes(problem):
            return None
        config = self.config_class(**values)
        if all(getattr(config, name) in known for name, known in self.space.items()):
            return config if self.is_valid(config, problem, gpu) else None
        return config if config == self.heuristic(problem, gpu) else None

    def takes(self, problem: Problem) -> bool:
        """Whether the kernel has such problems: sizes, whole groups, dtype, precision and layout."""
        sizes = dict(zip(self.size_names, problem.sizes, strict=False))
        channels = sizes.get("n", sizes.get("channels", 0))
        return (
            len(problem.sizes) == len(self.size_names)
            and min(problem.sizes) >= 1
            and problem.dtype in ELEMENT_SIZES
            and problem.layout in self.layouts
            and problem.precision == self.precision(problem.dtype)
            and channels % sizes.get("group_size", 1) == 0
            and (self.name != "linear_bias" or sizes["group_size"] == 1)
        )

    def precision(self, dtype: str) -> str | None:
        """The precision of its float32 products, None without any."""
        return "highest" if dtype == "float32" and self.config_class is LinearConfig else None

    def first_candidates(self, problem: Problem, gpu: Gpu) -> list[Config]:
        """The heuristic's config, and the valid ones of those to start from."""
        valid = (config for config in self.starts(problem) if self.is_valid(config, problem, gpu))
        return list(dict.fromkeys([self.heuristic(problem, gpu), *valid]))

    def neighbours(self, config: Config, problem: Problem, gpu: Gpu) -> list[Config]:
        """The valid configs that differ from this one by one step in one field."""
        found = []
        for name, value in asdict(config).items():
            values = self.space.get(name, ())
            below = max((each for each in values if each < value), default=None)
            above = min((each for each in values if each > value), default=None)
            steps = [each for each in (below, above) if each is not None]
            found += [self.config_class(**{**asdict(config), name: each}) for each in steps]
        return [each for each in found if self.is_valid(each, problem, gpu)]


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(first.bit_length() - 1, last.bit_length()))


# Matrix products: [M, K] @ [N, K].T

#: Within a block of K the tensor cores accumulate, and truncate to float32. Blocks are added in float32. The error of a
#: bias's gradient was 1.0e-7 with blocks of 32, 1.4e-7 with 64 and 2.6e-7 with 128 (L30, H200). On positive data,
#: blocks of 64 are less accurate than PyTorch.
_DEEPEST_FLOAT32_BLOCK = 32

_LINEAR_SIZES = ("m", "n", "k", "group_size")


def _linear_heuristic(problem: Problem, gpu: Gpu) -> LinearConfig:
    """The heuristic's tile, with as many of its stages as fit beside what the epilogue keeps in shared memory."""
    M, N, K, group_size = problem.sizes
    element_size = ELEMENT_SIZES[problem.dtype]
    config = heuristic_linear_config(element_size, M, N, K, group_size, gpu)
    staged_columns = _staged_columns(problem)
    if staged_columns is not None:
        config = replace(config, store_strips=1)
        while config.num_stages > 2 and config.shared_memory(element_size, staged_columns) > gpu.shared_memory:
            config = replace(config, num_stages=config.num_stages - 1)
    return config


def _linear_is_valid(config: LinearConfig, problem: Problem, gpu: Gpu) -> bool:
    M, N, K, group_size = problem.sizes
    element_size = ELEMENT_SIZES[problem.dtype]
    if K * element_size % 16 != 0:  # loaded without tensor descriptors: only the heuristic has tiles for this
        return config == _linear_heuristic(problem, gpu)
    if 1 < group_size <= WIDEST_TILE and _linear_heuristic(problem, gpu).holds_groups_of(group_size):
        if not config.holds_groups_of(group_size):
            return False
    if element_size == 4 and config.block_k > _DEEPEST_FLOAT32_BLOCK:
        return False
    # Unaligned rows are stored through pointers, in one strip. The heuristic's tile is known to fit even so.
    staging = config
    if N * element_size % 16 != 0 and config != _linear_heuristic(problem, gpu):
        staging = replace(config, store_strips=1)
    trapped = gpu.architecture == 100 and element_size == 4 and (config.block_m, config.block_n) == (64, 256)
    return (
        config.block_m <= max(16, next_power_of_2(M))
        and config.block_m * config.block_n <= _MOST_VALUES_A_THREAD * 32 * config.num_warps
        and min(config.block_m, config.block_n, config.block_k) >= 16
        and config.stored_columns >= 16
        and config.epilogue_strips * config.store_strips <= 2
        and staging.shared_memory(element_size, _staged_columns(problem)) <= gpu.shared_memory
        and not trapped
    )


def _staged_columns(problem: Problem) -> int | None:
    """Columns that an epilogue stages of each row, None for its part of the output. A row minimum stages a group."""
    if problem.kernel == "linear_group_norm_row_minimum":
        return problem.sizes[3] * 4 // ELEMENT_SIZES[problem.dtype]
    return None


def _linear_starts(problem: Problem) -> Iterable[LinearConfig]:
    """A tile of each shape. With few rows a kernel mostly loads weights: deep blocks keep many bytes in flight."""
    M = problem.sizes[0]
    element_size = ELEMENT_SIZES[problem.dtype]
    tallest = max(16, next_power_of_2(M))
    for block_m in (min(tallest, 64), min(tallest, 128), min(tallest, 256)):
        for block_n in (32, 64, 128, 256):
            warps = 8 if block_m * block_n > 64 * 64 else 4
            if block_m <= 32 and element_size == 2:
                yield LinearConfig(block_m, block_n, 128, num_warps=4, num_stages=4)
            else:
                yield LinearConfig(block_m, block_n, 128 // element_size, num_warps=warps, num_stages=3)


def _linear_seconds(config: LinearConfig, problem: Problem, gpu: Gpu) -> float:
    M, N, K, _ = problem.sizes
    return product_seconds((config.block_m, config.block_n), M, N, K, gpu.multiprocessors)


_LINEAR_SPACE = {
    "block_m": _powers(16, 256),
    "block_n": _powers(16, 256),
    "block_k": _powers(16, 256),
    "group_m": (1, 4, 8, 16),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6, 8),
    "epilogue_strips": (1, 2),
    "store_strips": (1, 2),
}


def _linear(epilogue: str) -> Kernel:
    space = dict(_LINEAR_SPACE)
    if epilogue == "group_norm_row_minimum":  # it stores no tile
        space["store_strips"] = (1,)
    return Kernel(
        f"linear_{epilogue}",
        _LINEAR_SIZES,
        LinearConfig,
        _linear_heuristic,
        _linear_is_valid,
        space,
        _linear_starts,
        seconds=_linear_seconds,
    )


# Group norm of matrices [M, N]


def _group_norm_heuristic(problem: Problem, gpu: Gpu) -> GroupNormConfig:
    return heuristic_group_norm_config(*problem.sizes)


def _group_norm_is_valid(config: GroupNormConfig, problem: Problem, gpu: Gpu) -> bool:
    M, _, group_size = problem.sizes
    blocks = config.blocks(group_size)
    values = blocks["BLOCK_M"] * blocks["BLOCK_G"] * blocks["BLOCK_GROUP"]
    return (
        config.block_columns >= blocks["BLOCK_GROUP"]
        and config.rows_per_program % config.block_m == 0
        and values <= max(64 * 32 * config.num_warps, blocks["BLOCK_GROUP"])
        and config.rows_per_program <= max(config.block_m, next_power_of_2(M))
    )


def _group_norm_starts(problem: Problem) -> Iterable[GroupNormConfig]:
    heuristic = heuristic_group_norm_config(*problem.sizes)
    for block_m in (1, 4, 16):
        rows = max(block_m, next_power_of_2(heuristic.rows_per_program))
        yield replace(heuristic, block_m=block_m, rows_per_program=rows)


def _group_norm(name: str) -> Kernel:
    space = {"block_m": _powers(1, 32), "block_columns": _powers(16, 8192), "num_warps": (1, 2, 4, 8, 16)}
    if name.endswith("backward"):  # the other passes do not use it
        space["rows_per_program"] = _powers(1, 4096)
    return Kernel(
        name,
        ("m", "n", "group_size"),
        GroupNormConfig,
        _group_norm_heuristic,
        _group_norm_is_valid,
        space,
        _group_norm_starts,
    )


# Passes over images [B, C, S]

_FORMATS = (CONTIGUOUS, CHANNELS_LAST)
_PAIRS = (*_FORMATS, f"{CONTIGUOUS} to {CHANNELS_LAST}", f"{CHANNELS_LAST} to {CONTIGUOUS}")


def _image_norm_heuristic(problem: Problem, gpu: Gpu) -> ImageNormConfig:
    _, channels, pixels, _ = problem.sizes
    return ImageNormConfig.of_shape(channels, pixels, problem.layout == CONTIGUOUS)


def _image_norm_is_valid(config: ImageNormConfig, problem: Problem, gpu: Gpu) -> bool:
    _, channels, pixels, _ = problem.sizes
    return (
        config.block_c <= next_power_of_2(channels)
        and config.block_s <= max(16, next_power_of_2(pixels))
        and config.block_c * config.block_s <= 64 * 32 * config.num_warps
    )


def _image_norm_starts(problem: Problem) -> Iterable[ImageNormConfig]:
    for values in (2048, 4096, 8192):
        for block_s in (32, 64, 256, 1024):
            yield ImageNormConfig(max(1, min(values // block_s, problem.sizes[1])), block_s)


def _image_norm(name: str, layouts: tuple[str, ...]) -> Kernel:
    space = {"block_c": _powers(1, 128), "block_s": _powers(16, 2048), "num_warps": (2, 4, 8)}
    if name.endswith("backward"):  # the other passes do not use it
        space["strip"] = _powers(1, 64)
    return Kernel(
        name,
        ("samples", "channels", "pixels", "group_size"),
        ImageNormConfig,
        _image_norm_heuristic,
        _image_norm_is_valid,
        space,
        _image_norm_starts,
        layouts,
    )


# Convolutions of stride 1

_CONVOLUTION_SIZES = ("samples", "in_channels", "out_channels", "height", "width", "tap_rows", "tap_columns")


def _convolution_heuristic(problem: Problem, gpu: Gpu) -> ConvolutionConfig:
    return ConvolutionConfig.fit(*problem.sizes[1:3])


def _convolution_is_valid(config: ConvolutionConfig, problem: Problem, gpu: Gpu) -> bool:
    element_size = ELEMENT_SIZES[problem.dtype]
    shared_memory = config.num_stages * (config.block_pixels + config.block_o) * config.block_c * element_size
    return (
        config.block_pixels * config.block_o <= 64 * 32 * config.num_warps
        and shared_memory <= gpu.shared_memory
        and min(config.block_pixels, config.block_o, config.block_c) >= 16
    )


def _convolution_starts(problem: Problem) -> Iterable[ConvolutionConfig]:
    fit = ConvolutionConfig.fit(*problem.sizes[1:3])
    for block_pixels in (64, 128, 256):
        yield replace(fit, block_pixels=block_pixels)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _linear("bias"),
        _linear("hardtanh_mish_group_norm"),
        _linear("group_norm_hardtanh"),
        _linear("group_norm_row_minimum"),
        _group_norm("group_norm"),
        _group_norm("group_norm_backward"),
        _image_norm("image_statistics", _FORMATS),
        _image_norm("image_group_norm", _PAIRS),
        _image_norm("image_group_norm_backward", _FORMATS),
        Kernel(
            "convolution",
            _CONVOLUTION_SIZES,
            ConvolutionConfig,
            _convolution_heuristic,
            _convolution_is_valid,
            {
                "block_pixels": _powers(32, 256),
                "block_o": _powers(16, 128),
                "block_c": _powers(16, 64),
                "num_warps": (4, 8),
                "num_stages": (2, 3, 4, 5),
            },
            _convolution_starts,
            _PAIRS,
        ),
    )
}


def config_of(values: dict[str, int], problem: Problem, gpu: Gpu) -> Config | None:
    """The config with these values, or None if the kernel is unknown or they are not valid for the problem."""
    kernel = KERNELS.get(problem.kernel)
    return kernel.config_of(values, problem, gpu) if kernel else None
