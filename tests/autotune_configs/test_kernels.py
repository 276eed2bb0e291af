"""Search spaces: every config that a sweep can reach is valid, and neighbours differ by one step."""

from dataclasses import asdict

import pytest

from autotune_configs.chains import CHAINS, DTYPES, GRID, PASSES
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem
from triton_kernels.linear import LinearConfig

GPUS = [Gpu.called(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H200", "NVIDIA B200")]
PROBLEMS = list(
    dict.fromkeys(
        problem
        for chain in CHAINS.values()
        for shape in (chain.target, *(GRID if len(chain.size_names) == 3 else ()))
        for dtype in DTYPES
        for problem in chain.problems(shape, dtype, PASSES)
    )
)


def test_chains_use_each_kernel():
    """At 8192 features L30's groups are 512 wide. Its fused kernel serves narrower ones."""
    assert {problem.kernel for problem in PROBLEMS} >= set(KERNELS) - {"linear_group_norm_hardtanh"}
    narrow = CHAINS["l30"].problems((8, 64, 64), "bfloat16", PASSES)
    assert [problem.kernel for problem in narrow] == ["linear_group_norm_hardtanh", "group_norm_backward"]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_candidates(gpu):
    for problem in PROBLEMS:
        kernel = KERNELS[problem.kernel]
        assert len(problem.sizes) == len(kernel.size_names) and problem.layout in kernel.layouts
        heuristic = kernel.heuristic(problem, gpu)
        assert kernel.is_valid(heuristic, problem, gpu), (problem, heuristic)
        first = kernel.first_candidates(problem, gpu)
        assert first[0] == heuristic and len(set(first)) == len(first)
        for config in first:
            assert kernel.config_of(asdict(config), problem, gpu) == config
        for neighbour in kernel.neighbours(heuristic, problem, gpu):
            mine, its = asdict(heuristic), asdict(neighbour)
            (field,) = (name for name in mine if mine[name] != its[name])
            between = [value for value in kernel.space[field] if min(mine[field], its[field]) < value]
            assert not [value for value in between if value < max(mine[field], its[field])], "one step"


def test_stages_that_there_is_room_for():
    """A row minimum stages its groups, and no tile of the output. A float32 product stages all of the tile."""

    def heuristic(kernel, group_size, dtype="bfloat16", features=8192):
        precision = "highest" if dtype == "float32" else None
        problem = Problem(f"linear_{kernel}", dtype, (1024, 8192, features, group_size), precision, None)
        config = KERNELS[problem.kernel].heuristic(problem, Gpu.called("NVIDIA H200"))
        return config.num_stages, config.store_strips

    mish, minimum = "hardtanh_mish_group_norm", "group_norm_row_minimum"
    assert heuristic("bias", 1) == heuristic(mish, 16) == (4, 2)
    assert [heuristic(minimum, size) for size in (16, 64, 128, 256)] == [(4, 1), (4, 1), (3, 1), (2, 1)]
    for kernel in (mish, minimum):
        assert heuristic(kernel, 16, "float32") == heuristic(kernel, 16, features=8190) == (3, 1)


def test_what_is_staged_where_it_does_not_go_as_it_should():
    """An unaligned row is stored in one strip, and so is a tile whose warps are side by side."""
    gpu = Gpu.called("NVIDIA H200")

    def is_valid(config, features=8192, kernel="bias", group_size=1):
        problem = Problem(f"linear_{kernel}", "bfloat16", (1024, features, 8192, group_size), None, None)
        return KERNELS[problem.kernel].config_of(asdict(config), problem, gpu) is not None

    for config in (LinearConfig(256, 128, 64, num_stages=4, store_strips=2), LinearConfig(256, 128, 128, num_stages=2)):
        assert is_valid(config) == (config.store_strips == 2) and not is_valid(config, 8190)
    assert is_valid(LinearConfig(128, 256, 64, num_stages=4, store_strips=2), 8190), "the heuristic's"
    for strips in ({"store_strips": 2}, {"epilogue_strips": 2}):
        assert not is_valid(LinearConfig(64, 256, 64, num_stages=5, **strips))
        assert is_valid(LinearConfig(64, 256, 64, num_stages=4, **strips))
    assert not is_valid(LinearConfig(128, 128, 64, epilogue_strips=2, store_strips=2))
    minimum = {"kernel": "group_norm_row_minimum", "group_size": 16}
    assert is_valid(LinearConfig(128, 256, 64, num_stages=4), **minimum)
    assert not is_valid(LinearConfig(128, 256, 64, num_stages=4, store_strips=2), **minimum), "it stores no tile"


def test_a_field_younger_than_a_table():
    """A missing field gets its default. A field without a default must be there."""
    problem = Problem("linear_bias", "bfloat16", (1024, 1024, 1024, 1), None, None)
    kernel, gpu = KERNELS["linear_bias"], Gpu.called("NVIDIA H200")
    values = {"block_m": 64, "block_n": 128, "block_k": 64, "num_stages": 2}
    assert kernel.config_of(values, problem, gpu) == LinearConfig(64, 128, 64, num_stages=2)
    assert kernel.config_of({**values, "store_strips": 2}, problem, gpu) == LinearConfig(
        64, 128, 64, num_stages=2, store_strips=2
    )
    for changed in ({"store_strips": 3}, {"store_halves": 2}):
        assert kernel.config_of({**values, **changed}, problem, gpu) is None
    del values["block_k"]
    assert kernel.config_of(values, problem, gpu) is None


def test_values_of_another_kernel_are_no_config():
    problem = PROBLEMS[0]
    assert KERNELS[problem.kernel].config_of({"block_c": 16}, problem, GPUS[0]) is None
