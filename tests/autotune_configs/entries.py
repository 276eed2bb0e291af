"""Entries and a GPU for the tests of tables, lookup and sweep."""

import dataclasses

from autotune_configs.gpus import Gpu
from autotune_configs.problem import Problem
from autotune_configs.tables import Entry
from triton_kernels.linear import LinearConfig

GPU = Gpu.called("NVIDIA H200")
FIRST = LinearConfig(16, 128, 32, num_stages=2)
SECOND = LinearConfig(32, 64, 32, num_stages=2)


def linear_problem(m=1024, n=8192, k=8192, group_size=1, kernel="linear_bias", dtype="bfloat16"):
    return Problem(kernel, dtype, (m, n, k, group_size), "highest" if dtype == "float32" else None)


def entry(config=FIRST, problem=None, **sizes):
    return Entry(problem or linear_problem(**sizes), dataclasses.asdict(config), 0.9, 12.5, "3.6.0", "2026-11-21")
