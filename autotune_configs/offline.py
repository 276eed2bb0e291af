"""Compile the kernels that a launcher would run, for any NVIDIA architecture, without a GPU.

``compile_launches`` calls the launcher itself on tensors of the "meta" device. So it compiles exactly the kernels that
would be launched: the same loads, specialisations and options.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from triton_kernels.device import SHARED_MEMORY


@dataclass(frozen=True)
class CompiledLaunch:
    """One compiled kernel: resources per thread (registers, spilled bytes) and per block (shared memory)."""

    name: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    ptx: str
    arch: int

    @property
    def fits(self) -> bool:
        """Whether the architecture has that much shared memory for a block."""
        return self.shared_memory <= SHARED_MEMORY[self.arch]


class _OfflineDriver:
    """Replaces the CUDA driver where Triton asks for the device to compile for."""

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


def compile_launches(launch: Callable[[], object], arch: int) -> list[CompiledLaunch]:
    """Compile every kernel that ``launch()`` launches on tensors of the "meta" device, for ``sm_<arch>``."""
    compiled = []
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with _driver(_OfflineDriver(arch)), mock.patch.object(triton.runtime.JITFunction, "run", compile_only):
        launch()
    return [_resources(kernel, arch) for kernel in compiled]


@contextlib.contextmanager
def _driver(driver):
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        yield
    finally:
        triton.runtime.driver._active = before


def _resources(kernel, arch: int) -> CompiledLaunch:
    """Registers and spills as the assembler that ships with triton reports them."""
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kernel.cubin"
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        cuobjdump = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [cuobjdump, "--dump-resource-usage", path], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.findall(rf"{field}:(\d+)", report)[0]) for field in ("REG", "STACK"))
    return CompiledLaunch(kernel.metadata.name, registers, stack, kernel.metadata.shared, ptx, arch)
