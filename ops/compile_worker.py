"""Kernels of a graph that Inductor compiles are compiled by its worker processes, as its own are.

A third of a kernel's compilation is Python. Threads would take turns for that with Inductor, which writes code
meanwhile. So a plan is first made in a worker process, which has no GPU, as it is made for offline compilation. Its
kernels land in Triton's cache on disk, where the plan that this process makes finds them.

Where there are no workers, or one fails, nothing is lost: this process compiles.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton

from autotune_configs import lookup
from ops import compiling
from triton_kernels import device as devices

_log = logging.getLogger(__name__)

_WORKERS = "torch._inductor.async_compile"
_FOLDER, _ASSEMBLER = "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"
#: Seconds after which this process compiles.
_LONGEST = 30
#: Of a GPU's properties, those that kernels and configs depend on.
_PROPERTIES = "name", "major", "minor", "multi_processor_count", "shared_memory_per_block_optin"


@dataclass(frozen=True)
class Setting:
    """What plans and Triton's cache depend on beside a call: the GPU, PyTorch's setting for products, the folder, and
    the assembler (Inductor's workers have PyTorch's, this process perhaps Triton's)."""

    device: torch.device
    properties: SimpleNamespace
    fp32_precision: str
    folder: str
    assembler: str | None

    @classmethod
    def of(cls, device: torch.device) -> "Setting":
        properties = torch.cuda.get_device_properties(device)
        known = SimpleNamespace(**{name: getattr(properties, name) for name in _PROPERTIES})
        precision, folder = torch.backends.cuda.matmul.fp32_precision, triton.knobs.cache.dir
        return cls(device, known, precision, folder, os.environ.get(_ASSEMBLER))


def workers_for(device: torch.device) -> Any:
    """Inductor's workers, if they are ready and know what plans for the device depend on; else None. Inductor's config
    is the calling thread's."""
    workers = getattr(sys.modules.get(_WORKERS), "AsyncCompile", None)
    has_own_tables = lookup.generation() > 0
    if device.type != "cuda" or workers is None or has_own_tables:
        return None
    try:
        return workers.process_pool() if workers.use_process_pool() else None
    except Exception as error:
        _log.info("Inductor's workers cannot be asked: %s", error)
        return None


def precompile(workers: Any, device: torch.device, make: Callable[..., object], *arguments: Any) -> None:
    """Let one of the workers, if there are any, call ``make(*arguments)``, which makes a plan for the device."""
    try:
        if workers is not None:
            workers.submit(make_offline, Setting.of(device), make, *arguments).result(timeout=_LONGEST)
    except Exception as error:  # of a worker, or of what it cannot know, such as functions of this process's own
        _log.info("kernels are compiled by this process, as a worker did not: %r", error)


def make_offline(setting: Setting, make: Callable[..., object], *arguments: Any) -> None:
    """Call ``make(*arguments)`` in a process without a GPU, and leave the plan's kernels in Triton's cache."""
    from unittest import mock

    from triton.backends.nvidia.compiler import get_ptxas_version

    from autotune_configs.offline import compiling_for

    with (
        mock.patch.object(devices, "_cuda_properties", lambda index: setting.properties),
        compiling_for(devices.architecture(setting.device)),
        mock.patch.object(compiling, "IN_THREADS", False),  # other workers have the other processors
        mock.patch.object(torch.cuda, "current_device", lambda: setting.device.index),
        mock.patch.dict(os.environ, {_FOLDER: setting.folder}),
    ):
        os.environ.pop(_ASSEMBLER, None)
        if setting.assembler:
            os.environ[_ASSEMBLER] = setting.assembler
        torch.backends.cuda.matmul.fp32_precision = setting.fp32_precision
        get_ptxas_version.cache_clear()  # Triton keeps what it once asked of another assembler
        try:
            make(*arguments)
        finally:
            get_ptxas_version.cache_clear()
