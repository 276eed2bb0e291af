"""Promise: the public interface is typed. mypy reads this file too: it is a user's program, right and wrong.

What mypy must call wrong is marked with the error that it must report: an ``ignore`` that nothing needs is an error
itself (``warn_unused_ignores``). ``make lint`` runs mypy; pytest runs the same lines.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from typing_extensions import assert_type

import autotune_configs
import ops
from ops import pointwise as p

ROOT = Path(__file__).parents[1]
PUBLIC = [
    getattr(module, name)
    for module in (ops, ops.reference, autotune_configs)
    for name in getattr(module, "__all__", vars(module))
]
PUBLIC = [each for each in PUBLIC if inspect.isfunction(each) or inspect.isclass(each)]
PUBLIC = [each for each in PUBLIC if each.__module__.split(".")[0] in ("ops", "autotune_configs")]


def test_functions_of_a_user() -> None:
    rows, weight, vector = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    assert_type(ops.linear(rows, weight), torch.Tensor)
    assert_type(ops.linear(rows, weight, vector), torch.Tensor)
    assert_type(ops.bias_hardtanh_mish(rows, min_val=-2.0), torch.Tensor)
    assert_type(ops.group_norm(rows, 2, eps=1e-3), torch.Tensor)
    assert_type(ops.group_norm_hardtanh(rows, 2, min_val=0, max_val=1), torch.Tensor)
    assert_type(ops.gelu_group_norm(rows, 2, approximate="tanh"), torch.Tensor)
    assert_type(ops.linear_hardtanh_mish_group_norm(rows, weight, None, vector, 2, vector, vector), torch.Tensor)
    assert_type(ops.linear_group_norm_min(rows, weight, vector, 3, bias=vector.view(1, 6, 1, 1)), torch.Tensor)
    assert_type(ops.linear_group_norm_hardtanh(rows, weight, vector, 3, max_val=2.0), torch.Tensor)
    assert_type(ops.reference.linear_group_norm_hardtanh(rows, weight, vector, 3), torch.Tensor)
    steps = p.hardtanh(-2, 2), p.gelu("tanh"), p.add(vector), p.mul(2)
    assert_type(p.mish(), p.Step)
    assert_type(ops.linear(rows, weight, after=steps), torch.Tensor)
    assert_type(ops.linear_group_norm(rows, weight, None, 2, vector, before=steps, after=[p.mish()]), torch.Tensor)
    assert_type(ops.linear_layer_norm(rows, weight, None, vector, before=steps), torch.Tensor)
    assert_type(ops.layer_norm(rows, (8,), after=(p.mish(),)), torch.Tensor)
    image, taps = torch.randn(1, 3, 4, 4), torch.randn(3, 4, 3, 3)
    assert_type(ops.conv_transpose2d_group_norm(image, taps, None, 2, padding=1, before=steps[:2]), torch.Tensor)
    assert_type(ops.conv_transpose2d_gelu_group_norm(image, taps, None, 2, stride=2, padding=(1, 1)), torch.Tensor)


def test_modules_of_a_user() -> None:
    """Attributes have the types of what they are, so that their own attributes are known too."""
    layer = ops.LinearHardtanhMishGroupNorm(8, 6, bias_shape=(6,), num_groups=2)
    assert_type(layer.gemm, torch.nn.Linear)
    assert_type(layer.bias, torch.nn.Parameter)
    assert_type(layer.groupnorm, torch.nn.GroupNorm)
    assert_type(layer.hardtanh.max_val, float)
    assert_type(layer.forward(torch.randn(4, 8)), torch.Tensor)
    assert_type(ops.LinearGroupNormMin(8, 6, 3, (1, 6, 1, 1), linear_bias=False).group_norm, torch.nn.GroupNorm)
    assert_type(ops.LinearGroupNormHardtanh(8, 6, 3, -2.0, 2.0).hardtanh, torch.nn.Hardtanh)
    convolution = ops.ConvTranspose2dGeluGroupNorm(3, 4, 3, (1, 1), groups=4, num_groups=2, device="cpu", eps=1e-3)
    assert_type(convolution.conv_transpose, torch.nn.ConvTranspose2d)
    assert_type(convolution.forward(torch.randn(1, 3, 4, 4)), torch.Tensor)
    composed = ops.LinearGroupNorm(8, 6, 3, before=(p.mish(),), after=[p.silu(), p.mul(2)], bias=False, eps=1e-3)
    assert_type(composed.linear, torch.nn.Linear)
    assert_type(composed.norm, torch.nn.GroupNorm)
    assert_type(composed.after.steps, tuple[p.Step, ...])
    assert_type(composed.forward(torch.randn(4, 8)), torch.Tensor)
    assert_type(ops.LinearLayerNorm(8, 6, after=(p.gelu(),)).norm, torch.nn.LayerNorm)
    transposed = ops.ConvTranspose2dGroupNorm(3, 4, 3, 2, stride=(2, 1), after=(p.silu(),))
    assert_type(transposed.conv_transpose, torch.nn.ConvTranspose2d)
    assert_type(ops.Conv2dGroupNorm(3, 4, 3, 2, padding="same", after=(p.silu(),)).conv, torch.nn.Conv2d)
    norm: torch.nn.GroupNorm = ops.GroupNorm(2, 8, after=(p.silu(),))
    assert_type(norm.forward(torch.randn(4, 8)), torch.Tensor)
    assert_type(ops.Linear(8, 6, after=(p.silu(),)).bias, torch.nn.Parameter)
    assert_type(ops.LayerNorm((8,), device="cpu", after=(p.gelu(),)).forward(torch.randn(4, 8)), torch.Tensor)


def test_wrong_arguments_of_a_user() -> None:
    rows, weight = torch.randn(4, 8), torch.randn(6, 8)
    with pytest.raises(TypeError, match="input"):
        ops.linear([[1.0, 2.0]], weight)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bias"):
        ops.linear(rows, weight, 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_groups"):
        ops.group_norm(rows, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="eps"):
        ops.group_norm(rows, 2, eps="small")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="min_val"):
        ops.linear_group_norm_hardtanh(rows, weight, None, 2, min_val=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="approximate"):
        ops.gelu_group_norm(rows, 2, approximate=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ops.linear(rows)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ops.group_norm(rows, 2, epsilon=1e-5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ops.linear_group_norm_min(rows, weight, None, 2, None, None, None, 1e-5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ops.LinearGroupNormHardtanh(8, 6, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="after"):
        ops.LinearGroupNorm(8, 6, 2, after=p.silu())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        ops.group_normalization(rows, 2)  # type: ignore[attr-defined]


def test_tuning_of_a_user() -> None:
    with autotune_configs.tune_unseen_problems(False) as nothing:
        assert_type(nothing, None)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: f"{public.__module__}.{public.__name__}")
def test_everything_public_is_annotated(public):
    methods = (getattr(public, name, None) for name in ("__init__", "forward"))
    functions = [public] if inspect.isfunction(public) else [method for method in methods if method is not None]
    for function in functions:
        signature = inspect.signature(function)
        parameters = [each for name, each in signature.parameters.items() if name != "self"]
        for parameter in parameters:
            assert parameter.annotation is not inspect.Parameter.empty, parameter.name
        if function.__name__ != "__init__":
            assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("package", ["ops", "autotune_configs", "triton_kernels"])
def test_annotations_are_installed(package):
    """Type checkers believe those of a package that says so, with a file that is installed with it."""
    assert (ROOT / package / "py.typed").is_file()
    settings = (ROOT / "pyproject.toml").read_text()
    build = settings.partition("[tool.hatch.build.targets.wheel]\n")[2].partition("\n[")[0]
    assert re.search(rf'^packages = .*"{package}"', build, flags=re.MULTILINE), "hatch installs all files of these"
    assert not re.search(r"^exclude = .*(py\.typed|\*)", build, flags=re.MULTILINE)


def test_the_type_checker_reads_this_file():
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.mypy]\n")[2].partition("\n[")[0]
    assert '"tests/test_typing.py"' in settings and "warn_unused_ignores = true" in settings
