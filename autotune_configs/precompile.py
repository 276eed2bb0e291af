"""Compile configs ahead of time, in several processes and without the GPU, to find those not worth running.

The compiled kernels land in Triton's cache on disk, where the launch on the GPU finds them.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from subprocess import CalledProcessError

import torch

from autotune_configs.gpus import Gpu
from autotune_configs.kernel import Config
from autotune_configs.machine import fault_of_machine, is_killed
from autotune_configs.offline import compile_launches, compiled_anew, tell_of_damaged_cache
from autotune_configs.problem import Problem
from autotune_configs.worker_pool import WorkerPool
from autotune_configs.workloads import workload_of

Launch = tuple[Problem, Config]
#: The bytes that a thread spills, and why the config cannot run, or None. An OSError is the machine's fault.
Compiled = tuple[int, str | OSError | None]

#: Bytes that a thread may spill beyond what it spills with the heuristic's config.
_MORE_SPILLED_BYTES = 64


def compile_config(problem: Problem, config: Config, gpu: Gpu, all_launches: bool = True) -> Compiled:
    """The bytes that a thread spills, at most over all kernels launched, and why the config cannot run, or None.

    ``all_launches``: also the launches that save values for the backward pass. What Triton's cache has damaged is
    compiled again.
    """

    def launch():
        workload = workload_of(problem, torch.device("meta"))
        (workload.launch_variants if all_launches else workload.launch)(config)

    try:
        try:
            kernels = compile_launches(launch, gpu.architecture)
        except Exception as damage:  # of the cache, where the kernels compile without it
            if fault_of_machine(damage) and not isinstance(damage, CalledProcessError):
                raise
            with compiled_anew():
                kernels = compile_launches(launch, gpu.architecture)
            tell_of_damaged_cache(problem, damage)
    except Exception as error:  # a compiler may refuse a config in any way
        reason = f"does not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return 0, fault_of_machine(error) or reason
    most = max(kernel.shared_memory for kernel in kernels)
    fault = None if most <= gpu.shared_memory else f"{most} bytes of shared memory"
    return max(kernel.spilled_bytes for kernel in kernels), fault


def _is_loaded() -> bool:
    """What a process answers that has loaded this module."""
    return True


class Precompiler(contextlib.ExitStack):
    """Compiles for one GPU in worker processes; leaving its context ends them."""

    def __init__(self, gpu: Gpu, processes: int | None = None):
        super().__init__()
        self._gpu = gpu
        self._processes = processes or len(os.sched_getaffinity(0))
        self._pool: WorkerPool | None = None

    def compile(
        self,
        launches: list[Launch],
        all_launches: bool = True,
        on_compiled: Callable[[Launch, str | OSError | None], object] = lambda launch, fault: None,
    ) -> dict[Launch, Compiled]:
        """What ``compile_config`` says of each launch. ``on_compiled`` is called after each, with what is wrong.

        Raises OSError where worker processes cannot be made.
        """
        try:
            return self._compile(launches, all_launches, on_compiled)
        except Exception as error:
            self._pool = None
            if of_machine := fault_of_machine(error):
                raise of_machine from error
            raise

    def _compile(self, launches: list[Launch], all_launches: bool, on_compiled: Callable) -> dict[Launch, Compiled]:
        if self._pool is None:
            self._pool = self.enter_context(WorkerPool(self._processes))
        found: dict[Launch, Compiled] = {}
        try:
            futures = {
                self._pool.submit(compile_config, *launch, self._gpu, all_launches): launch for launch in launches
            }
            for future in as_completed(futures):
                launch = futures[future]
                found[launch] = future.result()
                on_compiled(launch, found[launch][1])
        except BrokenProcessPool:  # a compiler that crashes breaks the pool: find out on which launch
            self._pool = None
            for launch in launches:
                if launch not in found:
                    found[launch] = self._compile_alone(*launch, all_launches)
                    on_compiled(launch, found[launch][1])
        return {launch: found[launch] for launch in launches}

    def _compile_alone(self, problem: Problem, config: Config, all_launches: bool) -> Compiled:
        has_started = False
        with WorkerPool(1) as pool:
            try:
                has_started = pool.submit(_is_loaded).result()
                return pool.submit(compile_config, problem, config, self._gpu, all_launches).result()
            except BrokenProcessPool:
                (status,) = pool.exit_statuses()
                if has_started and not is_killed(status):
                    return 0, "the compiler crashes"
                what = f"a compiler's process was ended (exit status {status})"
                return 0, OSError(errno.ECHILD, what if has_started else f"no process compiles (exit status {status})")

    def refused(
        self, problem: Problem, default: Config, configs: list[Config], all_launches: bool = False
    ) -> dict[Config, str]:
        """The configs not to run, with the reason: they do not compile, do not fit, or spill more than the default.

        Raises OSError where the machine let one not compile.
        """
        compiled = self.compile([(problem, config) for config in dict.fromkeys([default, *configs])], all_launches)
        for _, fault in compiled.values():
            if isinstance(fault, OSError):
                raise fault
        allowed = compiled[problem, default][0] + _MORE_SPILLED_BYTES
        return {
            config: str(fault or f"spills {spilled} bytes a thread")
            for (_, config), (spilled, fault) in compiled.items()
            if config != default and (fault or spilled > allowed)
        }
