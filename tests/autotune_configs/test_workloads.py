"""The workloads of sweeps: correct configs pass, and each kind of fault is found."""

import pytest
import torch

from autotune_configs.chains import CHAINS, PASSES
from autotune_configs.compositions import composition
from autotune_configs.gpus import Gpu
from autotune_configs.kernels import KERNELS, kernel_of
from autotune_configs.problem import Problem
from autotune_configs.workloads import workload_of

CPU = torch.device("cpu")
PROBLEMS = list(
    dict.fromkeys(
        problem
        for name, shape in (
            ("l94", (8, 64, 64)),
            ("l75", (8, 64, 64)),
            ("l30", (8, 64, 64)),
            ("l30", (8, 64, 96)),
            ("l19", (3, 16, 16, 5, 6, 3)),
        )
        for dtype in ("bfloat16", "float32")
        for problem in CHAINS[name].problems(shape, dtype, PASSES)
    )
)
#: Norms whose groups hold a value or two: the gradient through one is nothing, or next to nothing.
PROBLEMS += [
    Problem(kernel, dtype, (*sizes, group_size), layout=layout)
    for dtype in ("bfloat16", "float16", "float32")
    for group_size in (1, 2)
    for kernel, sizes, layout in (
        ("group_norm_backward", (8, 24), None),
        ("image_sums", (2, 8, 1), "contiguous"),
        ("image_group_norm_backward", (2, 8, 1), "channels_last"),
    )
] + [Problem("group_norm_backward", "bfloat16", (8, 1, 1))]


def heuristic(problem):
    return KERNELS[problem.kernel].heuristic(problem, Gpu.of(CPU))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_heuristics_config_is_right(problem):
    workload = workload_of(problem, CPU)
    assert workload.fault(heuristic(problem)) is None


@pytest.mark.parametrize("problem", [problem for problem in PROBLEMS if problem.dtype == "bfloat16"], ids=str)
def test_faults_are_found(problem):
    workload, config = workload_of(problem, CPU), heuristic(problem)
    assert workload.fault(config) is None
    launch = workload.launch
    workload.launch = lambda config: None
    assert workload.fault(config) == "not everything is written"

    def launch_and_disturb(config):
        launch(config)
        disturb(workload)

    workload.launch = launch_and_disturb
    assert "wrong" in workload.fault(config)


def test_results_that_are_all_zero():
    (problem,) = composition("linear -> mul(0)").problems((8, 32, 16), "bfloat16", ("forward",))
    workload, config = workload_of(problem, CPU), kernel_of(problem.kernel).heuristic(problem, Gpu.of(CPU))
    workload.operands = tuple((0.0,) if isinstance(each, tuple) else each for each in workload.operands)
    assert workload.fault(config) is None
    workload.results = lambda config: (workload.written[0] + 1e-9,)
    assert workload.fault(config) == "wrong by 1.0e-09"


@pytest.mark.parametrize("problem", [problem for problem in PROBLEMS if problem.sizes[-1] <= 2], ids=str)
def test_faults_where_gradients_are_nothing(problem):
    """All values are off by 1, which is less than what they are differences of."""
    workload, config = workload_of(problem, CPU), heuristic(problem)
    results = workload.results
    for wrong in range(len(workload.expected())):

        def disturbed(config, wrong=wrong):
            return [result + (number == wrong) for number, result in enumerate(results(config))]

        workload.results = disturbed
        assert "wrong by" in workload.fault(config)


@pytest.mark.parametrize(
    "dtype, tolerance", [("bfloat16", 2.0**-8), ("float16", 2.0**-11), ("float32", 2.0**-16)], ids=str
)
def test_what_is_tolerated(dtype, tolerance):
    """For 16-bit numbers at most the error of rounding."""
    workload = workload_of(Problem("group_norm", dtype, (4, 32, 8)), CPU)
    (expected,) = workload.expected()
    workload.launch = lambda config: None
    workload.precision = getattr(torch, dtype)
    for share, is_right in ((0.9, True), (1.1, False)):
        workload.results = lambda config, share=share: (expected * (1 + share * tolerance),)
        assert (workload.fault(heuristic(workload.problem)) is None) == is_right


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_one_element(size):
    """What is allowed for it follows the size of all."""
    workload = workload_of(Problem("group_norm", "bfloat16", (1024, 128, 8)), CPU)
    expected = torch.full((1024, 128), size, dtype=torch.float64)
    workload.launch, workload.expected = lambda config: None, lambda: (expected,)
    for share, reason in ((0.9, None), (1.1, "one element wrong by")):
        result = expected.clone()
        result[7, 9] += share * 2.0**-8 * (4 + 64) * size
        workload.results = lambda config, result=result: (result,)
        workload.precision = torch.bfloat16
        found = workload.fault(heuristic(workload.problem))
        assert found is None if reason is None else found.startswith(reason)


def disturb(workload):
    """The error of one element is as large as the element."""
    if workload.problem.kernel == "linear_group_norm_row_minimum":
        (keys, _), *_ = workload.keys.values()
        keys[:, 0] += 2**23  # twice or half the values of a row
    else:
        output = workload.written[0][:2]  # of images, the samples that are checked
        first = output.flatten()[:50].abs().argmax()
        place = torch.unravel_index(first, output.shape)
        output[place] += 2 * output.abs().max() + (workload.problem.sizes[-1] == 1)


def test_random_numbers_are_the_workloads_own():
    """Tuning does not change the random numbers that the caller draws next."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    workload_of(Problem("group_norm", "bfloat16", (4, 32, 8)), CPU)
    assert torch.rand(1) == expected
