"""Promise: the files in bench/kernelbench are what KernelBench's harness takes, and right by its rules."""

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "bench" / "kernelbench"
#: Absolute and relative, of every element.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
SEED = 42


class Model94(nn.Module):
    def __init__(self, in_features, out_features, bias_shape, num_groups):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.groupnorm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        return self.groupnorm(nn.functional.mish(nn.functional.hardtanh(self.gemm(x) + self.bias)))


class Model75(nn.Module):
    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        return self.group_norm(self.gemm(x)).min(dim=1, keepdim=True)[0] + self.bias


class Model30(nn.Module):
    def __init__(self, in_features, out_features, num_groups, hardtanh_min, hardtanh_max):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.bounds = hardtanh_min, hardtanh_max

    def forward(self, x):
        return nn.functional.hardtanh(self.group_norm(self.gemm(x)), *self.bounds)


class Model19(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, groups, num_groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride=stride)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        return self.group_norm(nn.functional.gelu(self.conv_transpose(x)))


@dataclass(frozen=True)
class Problem:
    """A problem in our own words, at a reduced size: what its constructor is given, by place, and its input's shape."""

    number: int
    model: type[nn.Module]
    init_inputs: Sequence[object]
    input_shape: tuple[int, ...]

    @property
    def path(self) -> Path:
        return FOLDER / f"level_2_problem_{self.number}_sample_0_kernel.py"

    @property
    def source(self) -> str:
        return self.path.read_text()


def on(*problems: Problem) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: str(problem.number))


#: For the CPU, with groups of the real sizes' width but for problem 30's.
SMALL = (
    Problem(94, Model94, (48, 96, (96,), 3), (5, 48)),
    Problem(75, Model75, (48, 96, 6, (1, 96, 1, 1)), (5, 48)),
    Problem(30, Model30, (48, 128, 2, -2.0, 2.0), (5, 48)),
    Problem(19, Model19, (8, 16, 3, 1, 8, 2), (2, 8, 6, 7)),
)
#: For a GPU: large enough for the kernels of the real sizes.
REDUCED = (
    Problem(94, Model94, (1024, 1024, (1024,), 32), (512, 1024)),
    Problem(75, Model75, (1024, 1024, 64, (1, 1024, 1, 1)), (512, 1024)),
    Problem(30, Model30, (1024, 1024, 2, -2.0, 2.0), (512, 1024)),
    Problem(19, Model19, (64, 64, 3, 1, 8, 8), (4, 64, 64, 64)),
)


def from_file(source: str, folder: Path) -> type[nn.Module]:
    """As the harness loads Triton code: the text, imported from a temporary file."""
    path = folder / "kernel_in_a_temporary_file.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("temporary_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelNew


def from_text(source: str, folder: Path) -> type[nn.Module]:
    """As it loads CUDA code: a line of its own before the text, executed where the problem's names are already."""
    context = {"torch": torch, "nn": nn, "Model": Model94}
    exec(f"import os\n{source}", context)
    return context["ModelNew"]


def seeded(seed: int, make: Callable):
    torch.manual_seed(seed)
    return make()


def verdicts(problem: Problem, model_new: type[nn.Module], device: str, dtype: torch.dtype, trials: int) -> list[bool]:
    """Whether the results are close enough in each trial, by the steps of the harness's evaluation."""
    with torch.no_grad():
        model, new = (seeded(SEED, lambda cls=cls: cls(*problem.init_inputs)) for cls in (problem.model, model_new))
        model, new = model.to(device=device, dtype=dtype), new.to(device=device, dtype=dtype)
        torch.manual_seed(SEED)
        seeds = [torch.randint(0, 2**32 - 1, (1,)).item() for _ in range(trials)]
        results = []
        for seed in seeds:
            input = seeded(seed, lambda: torch.rand(problem.input_shape)).to(dtype=dtype).to(device=device)
            expected, result = model(input), new(input)
            tolerance = TOLERANCES[dtype]
            assert result.shape == expected.shape and result.dtype == dtype
            results.append(torch.allclose(expected, result, atol=tolerance, rtol=tolerance))
        return results


def test_one_file_a_problem():
    assert sorted(FOLDER.glob("*.py")) == sorted(problem.path for problem in SMALL)


@on(*SMALL)
@pytest.mark.parametrize("load", [from_file, from_text])
def test_same_parameters(problem, load, tmp_path):
    """Loaded from its text alone, it takes the problem's arguments and draws what the problem's model draws."""
    model_new = load(problem.source, tmp_path)
    parameters = inspect.signature(model_new).parameters.values()
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]  # what a module takes besides
    assert positional == list(inspect.signature(problem.model).parameters)
    new = seeded(SEED, lambda: model_new(*problem.init_inputs))
    drawn_next = torch.randn(3)
    model = seeded(SEED, lambda: problem.model(*problem.init_inputs))
    assert torch.equal(drawn_next, torch.randn(3))
    assert list(new.state_dict()) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(new.state_dict()[name], value), name


@on(*SMALL)
def test_same_results_in_pytorch(problem, tmp_path):
    """float64, which runs no kernel: to the last digits."""
    model_new = from_file(problem.source, tmp_path)
    model, new = (
        seeded(SEED, lambda cls=cls: cls(*problem.init_inputs)).double() for cls in (problem.model, model_new)
    )
    input = torch.rand(problem.input_shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(new(input), model(input), rtol=1e-12, atol=1e-12)


@on(*SMALL)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_verdicts(problem, dtype, tmp_path):
    """The kernels, in the interpreter."""
    assert all(verdicts(problem, from_file(problem.source, tmp_path), "cpu", dtype, trials=2))


@on(*(problem for problem in SMALL if problem.number in (94, 75)))
def test_bfloat16_is_rounded_as_in_pytorch(problem, tmp_path):
    """So that elements are the same to the last digit: at the real sizes the few that are further off would be wrong.

    (Problem 19 rounds its GELU less often, which stays within the tolerance; its convolution is PyTorch's own.)
    """
    model_new = from_file(problem.source, tmp_path)
    model, new = (
        seeded(SEED, lambda cls=cls: cls(*problem.init_inputs)).bfloat16() for cls in (problem.model, model_new)
    )
    input = torch.rand(problem.input_shape).bfloat16()
    with torch.no_grad():
        assert (new(input) != model(input)).double().mean() < 0.05


@on(*SMALL)
def test_verdict_on_a_wrong_result(problem, tmp_path):
    """What is 1e-3 off is wrong by the harness's rules, so the tests here would see it."""
    right = from_file(problem.source, tmp_path)

    class Wrong(right):
        def forward(self, input):
            return super().forward(input) + 1e-3

    assert not any(verdicts(problem, Wrong, "cpu", torch.float32, trials=2))


@pytest.mark.gpu
@on(*REDUCED)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_verdicts_on_a_gpu(problem, dtype, tmp_path, monkeypatch):
    """Without TF32, which takes the plain model's convolution further from float64 than the harness's tolerance."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert all(verdicts(problem, from_file(problem.source, tmp_path), "cuda", dtype, trials=5))


def test_program_of_the_readme():
    """It can be read, and runs every file."""
    (program,) = re.findall(r"<<'PYTHON'\n(.*?)\nPYTHON\n", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    compile(program, "README.md", "exec")
    (numbers,) = re.findall(r"problem_id in \(([\d, ]+)\)", program)
    assert {int(number) for number in numbers.split(",")} == {problem.number for problem in SMALL}
