"""The configs that ``ops`` asks for by what it is about to launch. With tuning on, unseen problems are tuned first."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from autotune_configs import lookup, tuning
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import kernel_of
from autotune_configs.lookup import Found
from autotune_configs.problem import Problem
from triton_kernels.device import meant
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.image_tiles import layout_of
from triton_kernels.linear import LinearConfig

_thread = threading.local()


@contextlib.contextmanager
def noted_lookups() -> Iterator[list[Found]]:
    """Within this context, what this thread's lookups find is added to the list."""
    before, _thread.lookups = getattr(_thread, "lookups", None), []
    try:
        yield _thread.lookups
    finally:
        _thread.lookups = before


def _resolve(
    device: torch.device,
    kernel: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    precision: str | None = None,
    layout: str | None = None,
    result: torch.dtype | None = None,
) -> Any:
    """The config for a problem, of the kernel's config class, with results of its dtype or another. Tunes the problem
    first if that is switched on."""
    device = meant(device)
    problem = Problem(kernel, str(dtype).removeprefix("torch."), sizes, precision, layout)
    if tuning.is_on():
        tuning.tune_unseen(problem, device)
    gpu = Gpu.of(device)
    found = lookup.find(problem, gpu)
    if result is not None and result != dtype:
        found = replace(found, config=kernel_of(kernel).storing(found.config, problem, gpu, result.itemsize))
    if getattr(_thread, "lookups", None) is not None:
        _thread.lookups.append(found)
    return found.config


def prefers_cublas(M: int, N: int, K: int, device: torch.device) -> bool:
    """Whether cuBLAS computes [M, K] @ [N, K].T in 16 bits on this device (``Gpu.prefers_cublas``)."""
    return Gpu.of(device).prefers_cublas(M, N, K)


def linear_config(
    kernel: str,
    dtype: torch.dtype,
    M: int,
    N: int,
    K: int,
    group_size: int,
    device: torch.device,
    result: torch.dtype | None = None,
) -> LinearConfig:
    """Config of ``triton_kernels.linear`` at [M, K] @ [N, K].T, for a chain whose ``Chain.kernel`` is ``kernel``, with
    results of this dtype or another.

    If the chain normalises groups of ``group_size`` columns, the tile holds whole groups where any tile can.
    ``LinearConfig.holds_groups_of`` tells.
    """
    precision = "highest" if dtype == torch.float32 else None
    return _resolve(device, kernel, dtype, (M, N, K, group_size), precision, result=result)


def group_norm_config(
    kernel: str, dtype: torch.dtype, M: int, C: int, group_size: int, device: torch.device
) -> GroupNormConfig:
    """Config of ``triton_kernels.group_norm`` for a matrix [M, C]; ``kernel``: group_norm, group_norm_backward."""
    return _resolve(device, kernel, dtype, (M, C, group_size))


def image_norm_config(kernel: str, group_size: int, *images: torch.Tensor) -> Any:
    """Config of the passes over images [B, C, S] (``triton_kernels.image_tiles``), the input first.

    ``kernel``: image_group_norm or image_group_norm_backward; of image_statistics and image_sums an ImageSumsConfig.
    """
    sizes = (*images[0].shape, group_size)
    return _resolve(images[0].device, kernel, images[0].dtype, sizes, None, _layouts(*images))


def _layouts(*images: torch.Tensor) -> str:
    return " to ".join(dict.fromkeys(map(layout_of, images)))
