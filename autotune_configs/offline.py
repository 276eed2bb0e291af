"""Compile the kernels that a launcher would run, for any NVIDIA architecture, without a GPU.

``compile_launches`` calls the launcher itself on tensors of the "meta" device. So it compiles exactly the kernels that
would be launched: the same loads, specialisations and options.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
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
        return self.shared_memory <= SHARED_MEMORY[self.arch]


def compile_launches(launch: Callable[[], object], arch: int) -> list[CompiledLaunch]:
    """Compile every kernel that ``launch()`` launches on tensors of the "meta" device, for ``sm_<arch>``."""
    compiled = []
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(triton.runtime.driver, "_active", _driver(arch)),
        mock.patch.object(triton.runtime.JITFunction, "run", compile_only),
    ):
        launch()
    return [_resources(kernel, arch) for kernel in compiled]


def _driver(arch: int) -> SimpleNamespace:
    """What Triton asks the CUDA driver for, to know the device to compile for."""
    return SimpleNamespace(
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


def _resources(kernel, arch: int) -> CompiledLaunch:
    """Registers and spills as the assembler that ships with triton reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{field}:(\d+)", report)[0]) for field in ("REG", "STACK"))
    return CompiledLaunch(kernel.metadata.name, registers, stack, kernel.metadata.shared, kernel.asm["ptx"], arch)
