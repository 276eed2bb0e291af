"""Compile the kernels that a launcher would run, for any NVIDIA architecture, without a GPU.

``compile_launches`` calls the launcher itself on tensors of the "meta" device. So it compiles exactly the kernels that
would be launched: the same loads, specialisations and options.
"""

import contextlib
import functools
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager

from triton_kernels.device import SHARED_MEMORY


@dataclass(frozen=True)
class CompiledLaunch:
    """One compiled kernel: resources per thread (registers, spilled bytes) and per block (shared memory)."""

    name: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    arch: int
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @property
    def fits(self) -> bool:
        return self.shared_memory <= SHARED_MEMORY[self.arch]

    @property
    def spills_in_loops(self) -> bool:
        """Whether a loop stores or loads what is spilled: seconds, to read a large kernel's instructions.

        Across a loop the assembler may put a value aside, so that one more block fits a multiprocessor.
        """
        return self.spilled_bytes > 0 and spills_in_loops(self.sass)

    @functools.cached_property
    def sass(self) -> str:
        """Its instructions: seconds, for a large kernel."""
        return _dump(self.cubin, "--dump-sass")

    @property
    def waits_for_products(self) -> bool:
        """Whether more than half of the products of Hopper's tensor cores are waited for before the next one begins.
        The assembler does that where it lacks registers for more (its warnings C7510 and C7511, which Triton drops)."""
        found = re.findall(r"[HQI]GMMA|WARPGROUP\.DEPBAR", self.sass)
        waits = [place > 0 and "GMMA" in found[place - 1] for place, name in enumerate(found) if "GMMA" not in name]
        return 2 * sum(waits) > len(found) - len(waits)


def compile_launches(launch: Callable[[], object], arch: int) -> list[CompiledLaunch]:
    """Compile every kernel that ``launch()`` launches on tensors of the "meta" device, for ``sm_<arch>``."""
    with compiling_for(arch) as compiled:
        launch()
    return [_resources(kernel, arch) for kernel in compiled]


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[list[Any]]:
    """Within this context, kernels that are launched are compiled for ``sm_<arch>``, and not run: those yielded."""
    compiled: list[Any] = []
    run = triton.runtime.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(triton.runtime.driver, "_active", _driver(arch)),
        mock.patch.object(triton.runtime.JITFunction, "run", compile_only),
    ):
        yield compiled


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Within this context, Triton compiles each kernel that is launched, and what its cache has of it is replaced.

    The list of a kernel's files is not read either: it may be the damaged one.
    """
    run = triton.runtime.JITFunction.run

    def run_anew(self, *args, **kwargs):
        self.device_caches.clear()
        return run(self, *args, **kwargs)

    with (
        triton.knobs.compilation.scope(),
        mock.patch.object(triton.runtime.JITFunction, "run", run_anew),
        mock.patch.object(FileCacheManager, "get_group", lambda self, name: None),
    ):
        triton.knobs.compilation.always_compile = True
        yield


def tell_of_damaged_cache(problem: object, error: BaseException) -> None:
    """Warn that Triton's cache had a kernel of this problem that did not serve: it was compiled again."""
    reason = str(error).strip().partition("\n")[0]
    place = triton.knobs.cache.dir
    warnings.warn(
        f"Triton's cache in {place} was damaged: {problem} is compiled again ({type(error).__name__}: {reason})",
        RuntimeWarning,
        stacklevel=2,
    )


def _driver(arch: int) -> SimpleNamespace:
    """What Triton asks the CUDA driver for, to know the device to compile for."""
    return SimpleNamespace(
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


def _resources(kernel, arch: int) -> CompiledLaunch:
    """Registers and spills as the tools that ship with triton report them."""
    report = _dump(kernel.asm["cubin"], "--dump-resource-usage")
    registers, stack = (int(re.findall(rf"{name}:(\d+)", report)[0]) for name in ("REG", "STACK"))
    shared = kernel.metadata.shared
    return CompiledLaunch(kernel.metadata.name, registers, stack, shared, arch, kernel.asm["ptx"], kernel.asm["cubin"])


def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spills_in_loops(sass: str) -> bool:
    """Whether local memory is read or written between a branch and the earlier instruction that it goes back to."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*(\w+)\S*([^;]*);", sass)
    instructions = [(int(place, 16), name, operands) for place, name, operands in lines]
    branches = [(place, re.search("0x([0-9a-f]+)", text)) for place, name, text in instructions if name == "BRA"]
    loops = [(int(found[1], 16), place) for place, found in branches if found and int(found[1], 16) < place]
    local = [place for place, name, _ in instructions if name in ("LDL", "STL")]
    return any(first <= place <= last for place in local for first, last in loops)
