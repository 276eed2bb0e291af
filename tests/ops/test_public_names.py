"""Promise: what ``import ops`` offers, how little it does, and what it says of a namesake's package."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ops

REPOSITORY = Path(__file__).resolve().parents[2]

FUNCTIONS = [
    "bias_hardtanh_mish",
    "conv2d_group_norm",
    "conv_transpose2d_gelu_group_norm",
    "conv_transpose2d_group_norm",
    "gelu_group_norm",
    "group_norm",
    "group_norm_hardtanh",
    "layer_norm",
    "linear",
    "linear_group_norm",
    "linear_group_norm_hardtanh",
    "linear_group_norm_min",
    "linear_hardtanh_mish_group_norm",
    "linear_layer_norm",
]
MODULES = [
    "Conv2dGroupNorm",
    "ConvTranspose2dGeluGroupNorm",
    "ConvTranspose2dGroupNorm",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "LinearGroupNorm",
    "LinearGroupNormHardtanh",
    "LinearGroupNormMin",
    "LinearHardtanhMishGroupNorm",
    "LinearLayerNorm",
]


def python(code: str, *first_on_path: Path) -> subprocess.CompletedProcess:
    """Run ``code`` in a Python of its own, in which Triton compiles, as in a user's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in (*first_on_path, REPOSITORY))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        cwd=first_on_path[0] if first_on_path else REPOSITORY,  # which -c puts before PYTHONPATH
        capture_output=True,
        text=True,
        check=False,
    )


def test_names():
    assert ops.__all__ == sorted(ops.__all__)
    adopting = {"Chain", "decompositions", "ExplainedCall", "ExplainedStep", "Explanation", "LeftStep", "explain"}
    adopting |= {"FusedChain", "FusionReport", "fuse", "unfuse", "pointwise", "reference", "tensor_parallel"}
    adopting |= {"faster_float32", "matmul", "addmm", "bmm", "baddbmm"}
    assert set(ops.__all__) == {*FUNCTIONS, *MODULES, *adopting}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function = getattr(ops, name)
    assert inspect.isfunction(function) and function.__name__ == name
    assert function.__doc__
    assert list(inspect.signature(function).parameters) == list(
        inspect.signature(getattr(ops.reference, name)).parameters
    )
    assert inspect.signature(function).parameters.keys() >= {"input"}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    assert issubclass(getattr(ops, name), torch.nn.Module)


def test_import_is_light():
    """It starts no CUDA context, asks no driver, and loads no compiler, plotting or test library."""
    result = python(
        """
        import json, sys
        import torch, triton
        import triton.tools.tensor_descriptor

        def refuse(*arguments, **keywords):
            raise AssertionError("importing ops reached for the GPU")

        torch.cuda._lazy_init = torch.cuda.get_device_properties = torch.cuda.current_device = refuse
        type(triton.runtime.driver).active = property(refuse)
        before = set(sys.modules)
        import ops
        assert not torch.cuda.is_initialized()
        print(json.dumps(sorted(set(sys.modules) - before)))
        """
    )
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout)
    own = [name for name in loaded if name.split(".")[0] in ("ops", "triton_kernels", "autotune_configs")]
    assert "ops" in own and "triton_kernels.linear" in own
    standard = {name for name in loaded if name.split(".")[0] in sys.stdlib_module_names}
    of_pytorch = {
        "torch.utils.flop_counter",
        "torch.utils.module_tracker",
    }  # two small ones: operators tell their count
    assert set(loaded) - set(own) - standard <= of_pytorch


def fake_package(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise AssertionError('the namesake was imported')\n")
    (folder / name / "matmul.py").touch()


@pytest.mark.parametrize("name", ["triton_kernels", "autotune_configs"])
def test_namesake(tmp_path, name):
    """Another project's package of a sibling's name is noticed before it is imported."""
    fake_package(tmp_path, name)
    result = python("import ops", tmp_path)
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    assert message == (
        f"ImportError: ops needs the package {name!r} of the normfuse distribution, but found "
        f"{tmp_path / name / '__init__.py'}, which is another project's; install normfuse in an environment of its own"
    )
    assert "AssertionError" not in result.stderr


@pytest.mark.parametrize("name", ["triton_kernels", "autotune_configs"])
def test_namesake_of_one_file(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise AssertionError('the namesake was imported')\n")
    result = python("import ops", tmp_path)
    assert f"ImportError: ops needs the package {name!r} of the normfuse distribution" in result.stderr
    assert "AssertionError" not in result.stderr


@pytest.mark.parametrize("name", ["triton_kernels", "autotune_configs"])
def test_namesake_that_is_no_python(tmp_path, name):
    """Of another version of it, say."""
    fake_package(tmp_path, name)
    (tmp_path / name / "__init__.py").write_text("print 'hello'\n")
    result = python("import ops", tmp_path)
    assert f"ImportError: ops needs the package {name!r} of the normfuse distribution" in result.stderr


@pytest.mark.parametrize("is_link", [True, False], ids=["link", "copy"])
def test_missing_sibling(tmp_path, is_link):
    """``ops`` alone, without its siblings, says what it lacks."""
    (Path.symlink_to if is_link else lambda copy, ops: shutil.copytree(ops, copy))(tmp_path / "ops", REPOSITORY / "ops")
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ops"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    lacking = "the package 'triton_kernels' of the normfuse distribution" if is_link else "normfuse's autotune_configs"
    assert f"ImportError: ops needs {lacking}" in result.stderr


def test_namesake_already_imported(tmp_path):
    """Nor is one taken that something else has imported before."""
    (tmp_path / "triton_kernels").mkdir()
    (tmp_path / "triton_kernels" / "__init__.py").touch()
    result = python("import triton_kernels, ops", tmp_path)
    assert "ImportError: ops needs the package 'triton_kernels' of the normfuse distribution" in result.stderr
