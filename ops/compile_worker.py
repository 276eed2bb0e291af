"""Kernels of a graph that Inductor compiles are compiled by its worker processes, as its own are.

A third of a kernel's compilation is Python. Threads would take turns for that with Inductor, which writes code
meanwhile. So a plan is first made in a worker process, which has no GPU, as it is made for offline compilation. Its
kernels land in Triton's cache on disk, where the plan that this process makes finds them.

Where there are no workers, or one fails, nothing is lost: this process compiles.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas_version

from autotune_configs.offline import compiling_for
from triton_kernels import device as devices

_log = logging.getLogger(__name__)

_WORKERS = "torch._inductor.async_compile"
_ASSEMBLER = "TRITON_PTXAS_PATH"
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


def precompile(device: torch.device, make: Callable[..., object], *arguments: Any) -> None:
    """Let one of Inductor's workers, if there are any, call ``make(*arguments)``, which makes a plan for a GPU."""
    try:
        workers = getattr(sys.modules.get(_WORKERS), "AsyncCompile", None)
        if device.type == "cuda" and workers and workers.use_process_pool():
            workers.process_pool().submit(make_offline, Setting.of(device), make, *arguments).result()
    except Exception:  # of a worker, or of what it cannot know, such as functions of this process's own
        _log.debug("kernels are compiled by this process", exc_info=True)


def make_offline(setting: Setting, make: Callable[..., object], *arguments: Any) -> None:
    """Call ``make(*arguments)`` in a process without a GPU, and leave the plan's kernels in Triton's cache."""
    properties = setting.properties
    with (
        compiling_for(10 * properties.major + properties.minor),
        mock.patch.object(devices, "_cuda_properties", lambda index: properties),
        mock.patch.object(torch.cuda, "current_device", lambda: setting.device.index),
        triton.knobs.cache.scope(),
        _assembler(setting.assembler),
    ):
        triton.knobs.cache.dir = setting.folder
        torch.backends.cuda.matmul.fp32_precision = setting.fp32_precision
        make(*arguments)


@contextlib.contextmanager
def _assembler(path: str | None) -> Iterator[None]:
    """Have Triton assemble with this, or with its own. It keeps what it once asked of the one before."""
    with mock.patch.dict(os.environ):
        os.environ.pop(_ASSEMBLER, None)
        os.environ.update({_ASSEMBLER: path} if path else {})
        get_ptxas_version.cache_clear()
        try:
            yield
        finally:
            get_ptxas_version.cache_clear()
