"""Kernels of a graph that Inductor compiles are compiled by its worker processes, as its own are.

A third of a kernel's compilation is Python. Threads would take turns for that with Inductor, which writes code
meanwhile. So a plan is first made in a worker process, which has no GPU, as it is made for offline compilation. Its
kernels land in Triton's cache on disk, where the plan that this process makes finds them. A worker is asked as soon as
a graph has the call: Inductor then optimizes the graph and writes its code for seconds.

Where there are no workers, or one fails, nothing is lost: this process compiles.
"""

import concurrent.futures
import logging
import os
import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

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


class Properties(NamedTuple):
    """Of a GPU's properties, those that kernels and configs depend on."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int


class Setting(NamedTuple):
    """What plans and Triton's cache depend on beside a call: the GPU, PyTorch's setting for products, the folder, and
    the assembler (Inductor's workers have PyTorch's, this process perhaps Triton's)."""

    device: torch.device
    properties: Properties
    fp32_precision: str
    folder: str
    assembler: str | None

    @classmethod
    def of(cls, device: torch.device) -> "Setting":
        properties = torch.cuda.get_device_properties(device)
        known = Properties(*[getattr(properties, name) for name in Properties._fields])
        precision, folder = torch.backends.cuda.matmul.fp32_precision, triton.knobs.cache.dir
        return cls(device, known, precision, folder, os.environ.get(_ASSEMBLER))


#: By what was asked for, and the setting: what tells that a worker did it.
_asked: dict[Hashable, concurrent.futures.Future] = {}
forget = _asked.clear

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # the workers are its parent's


def ask(
    device: torch.device, make: Callable[..., object], *arguments: Any, is_early: bool = False
) -> concurrent.futures.Future | None:
    """Let one of Inductor's workers call ``make(*arguments)``, which makes a plan for the device. It is asked once.

    Returns:
        What tells that it is done, or None where this process is to compile: where workers are not ready, unless it is
        early yet, or do not know what plans for the device depend on. Inductor's config is the calling thread's.
    """
    workers = getattr(sys.modules.get(_WORKERS), "AsyncCompile", None)
    has_own_tables = lookup.generation() > 0
    if device.type != "cuda" or workers is None or has_own_tables:
        return None
    try:
        if not (workers.use_process_pool() or is_early):
            return None
        setting = Setting.of(device)
        key = setting, make, repr(arguments)
        if key not in _asked:
            _asked[key] = workers.process_pool().submit(make_offline, setting, make, *arguments)
        return _asked[key]
    except Exception as error:
        _log.info("Inductor's workers cannot be asked: %r", error)
        return None


def wait(asked: concurrent.futures.Future | None) -> None:
    """Until a worker did what it was asked for, or failed, or takes too long."""
    try:
        if asked is not None:
            asked.result(timeout=_LONGEST)
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
