"""Search spaces: whatever a sweep may come to is valid, and leads to neighbours by one step."""

from dataclasses import asdict, replace

import pytest

from autotune_configs.chains import CHAINS, DTYPES, GRID, PASSES
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS
from autotune_configs.problem import Problem

GPUS = [Gpu.called(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H200", "NVIDIA B200")]
MINIMUM, MISH = "group_norm_row_minimum", "hardtanh_mish_group_norm"
PROBLEMS = list(
    dict.fromkeys(
        problem
        for chain in CHAINS.values()
        for shape in (chain.target, *(GRID if len(chain.form) == 3 else ()))
        for dtype in DTYPES
        for problem in chain.problems(shape, dtype, PASSES)
    )
)


def test_chains_use_each_kernel():
    """L30's groups are 512 wide at 8192 features, and two of them; its fused kernel serves narrower ones."""
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


def test_a_stage_in_place_of_the_output():
    """The product's kernel stages no tile of the output where it takes a row minimum: that much more is under way."""

    def heuristic(kernel, *sizes, dtype="bfloat16"):
        return KERNELS[kernel].heuristic(Problem(kernel, dtype, sizes, None, None), Gpu.called("NVIDIA H200"))

    minimum, mish = (heuristic(f"linear_{name}", 1024, 8192, 8192, 16) for name in (MINIMUM, MISH))
    assert minimum == replace(mish, num_stages=mish.num_stages + 1)
    for sizes in ((1024, 8192, 8192, 64), (1, 8192, 8192, 16), (1024, 8192, 8190, 16)):
        assert heuristic(f"linear_{MINIMUM}", *sizes) == heuristic(f"linear_{MISH}", *sizes), (
            "there is no room for more"
        )
    float32 = (heuristic(f"linear_{name}", 1024, 8192, 8192, 16, dtype="float32") for name in (MINIMUM, MISH))
    assert len(set(float32)) == 1


def test_values_of_another_kernel_are_no_config():
    problem = PROBLEMS[0]
    assert KERNELS[problem.kernel].config_of({"block_c": 16}, problem, GPUS[0]) is None
