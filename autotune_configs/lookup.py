"""From (kernel, dtype, problem, GPU) to a config, on the host: the exact entry, the nearest, or the heuristic."""

import functools
import json
import math
from importlib import resources

import torch

from autotune_configs.heuristics import heuristic_group_norm_config, heuristic_linear_config
from triton_kernels.device import device_name, shared_memory_limit
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.linear import LinearConfig

#: An entry further away than this, in doublings of M, N and K together, says nothing about a problem.
_NEAR = 3.0


@functools.cache
def shipped_table(name: str) -> tuple[dict, ...]:
    """The entries shipped for the GPU of this name; none for an unknown one."""
    file = resources.files("autotune_configs") / "tables" / f"{name.lower().replace(' ', '_')}.json"
    return tuple(json.loads(file.read_text())["entries"]) if file.is_file() else ()


@functools.lru_cache(maxsize=4096)
def linear_config(
    kernel: str, dtype: torch.dtype, M: int, N: int, K: int, group_size: int, device: torch.device
) -> LinearConfig:
    """Config of ``triton_kernels.linear`` for an epilogue named ``kernel`` at [M, K] @ [N, K].T.

    Where the epilogue normalises groups of ``group_size`` columns, the tile holds them whole if any tile can: ask
    ``LinearConfig.holds_groups_of``.
    """
    heuristic = heuristic_linear_config(dtype, M, N, K, group_size, device)
    best, best_distance = heuristic, _NEAR
    if K * dtype.itemsize % 16 != 0:
        return heuristic  # the tables are measured with tensor descriptors
    for entry in shipped_table(device_name(device)):
        if entry["kernel"] != kernel or entry["dtype"] != str(dtype).removeprefix("torch."):
            continue
        config = LinearConfig(**entry["config"])
        if heuristic.holds_groups_of(group_size) and not config.holds_groups_of(group_size):
            continue
        if config.shared_memory(dtype.itemsize) > shared_memory_limit(device):
            continue
        distance = sum(abs(math.log2(max(1, mine) / entry[size])) for size, mine in (("m", M), ("n", N), ("k", K)))
        if distance < best_distance:
            best, best_distance = config, distance
    return best


@functools.lru_cache(maxsize=4096)
def group_norm_config(M: int, C: int, group_size: int) -> GroupNormConfig:
    """Config of ``triton_kernels.group_norm`` for a matrix [M, C]."""
    return heuristic_group_norm_config(M, C, group_size)
