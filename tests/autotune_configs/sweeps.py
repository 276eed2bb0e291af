"""What the tests of sweeps share: a bench that replaces the GPU."""

from dataclasses import dataclass

import torch

from autotune_configs import tables
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from autotune_configs.sweep import sweep_and_store
from triton_kernels.device import SHARED_MEMORY
from triton_kernels.group_norm import GroupNormConfig

CPU = torch.device("cpu")
GPU = Gpu("cpu", 90, 3, SHARED_MEMORY[90])  # what the interpreter runs on
PROBLEM = Problem("group_norm", "bfloat16", (1024, 8192, 32))
OTHER = Problem("group_norm", "bfloat16", (64, 8192, 32))
HEURISTIC = KERNELS["group_norm"].heuristic(PROBLEM, GPU)
BEST = GroupNormConfig(1, 1024, HEURISTIC.rows_per_program, num_warps=8)


def cost(config):
    """Milliseconds: a fifth more for each step away from the best, in any field."""
    steps = zip((config.block_m, config.block_columns, config.num_warps), (1, 1024, 8), strict=True)
    return 1.2 ** sum(abs(value.bit_length() - best.bit_length()) for value, best in steps)


@dataclass
class Bench:
    """Replaces the GPU: what runs, how long it takes, and which results are wrong."""

    launched: list
    faults: dict
    warming: float = 1.0  # how much slower each timing is than the one before
    interrupt_after: int | None = None
    fault_once: bool = False
    too_large_in_training: tuple = ()
    time: float = 0.0

    def workload_of(self, problem, device):
        return self

    def fault(self, config):
        self.launched.append(config)
        if self.interrupt_after is not None and len(self.launched) > self.interrupt_after:
            raise KeyboardInterrupt
        fault = self.faults.pop(config, None) if self.fault_once else self.faults.get(config)
        if isinstance(fault, Exception):
            raise fault
        return fault

    def launch(self, config):
        self._last = config

    def launch_variants(self, config):
        """Also the launch that saves values for the backward pass."""
        if config in self.too_large_in_training:
            raise RuntimeError("out of resources")

    def clock(self, call):
        call()
        self.time += 1
        return cost(self._last) * self.warming**self.time


def run(bench, problems=(PROBLEM,), **options):
    return sweep_and_store(problems, CPU, prepare=lambda call: call, clock=bench.clock, **options)


def stored():
    return {entry.problem: entry for entry in tables.read(tables.user_path(GPU), GPU)}
