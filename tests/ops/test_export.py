"""Promise: ``torch.export`` takes each module, for batches of any size, and what it saves is loaded again."""

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ops
from tests import images

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = images.MARK

#: Module, and the shape of one sample of its input.
MODULES = [
    pytest.param(lambda: ops.LinearHardtanhMishGroupNorm(16, 32, (32,), 4), (16,), id="L94"),
    pytest.param(lambda: ops.LinearGroupNormMin(16, 32, 4, (1, 32, 1, 1)), (16,), id="L75"),
    pytest.param(lambda: ops.LinearGroupNormHardtanh(16, 32, 4, -2.0, 2.0), (16,), id="L30"),
    pytest.param(lambda: ops.ConvTranspose2dGeluGroupNorm(6, 8, 3, 1, 8, 4), (6, 5, 4), id="L19"),
]
by_module = pytest.mark.parametrize("make, sample", MODULES)
#: What an exported program must leave to the operator.
PRODUCTS = ("mm", "addmm", "linear", "conv_transpose2d", "convolution")


def draw(batch, sample):
    return torch.randn(batch, *sample, generator=torch.Generator().manual_seed(batch))


def export(model, sample):
    return torch.export.export(model, (draw(4, sample),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def reload(program):
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def gradients_of(model, input):
    leaf = input.clone().requires_grad_()
    parameters = dict(model.named_parameters())
    output = model(leaf)
    gradients = torch.autograd.grad(output.square().sum(), [leaf, *parameters.values()])
    return dict(zip(("input", *parameters), gradients, strict=True))


@by_module
def test_reloaded(make, sample):
    """The chain is one operator in the graph; results and gradients have the module's bits, at other batches too."""
    model = make()
    program = reload(export(model, sample))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert sum(getattr(target, "namespace", None) == "normfuse" for target in targets) == 1
    assert not {str(target).split(".")[1] for target in targets if str(target).startswith("aten.")} & set(PRODUCTS)
    loaded = program.module()
    for batch in (4, 2, 9):
        input = draw(batch, sample)
        assert torch.equal(loaded(input), model(input))
        theirs = gradients_of(loaded, input)
        for name, gradient in gradients_of(model, input).items():
            assert torch.equal(theirs[name], gradient), name


@by_module
def test_exported_without_gradients(make, sample):
    """The chain is still one operator, and has gradients. Decomposed, it keeps nothing for them and says so."""
    model = make()
    with torch.no_grad():
        program = export(model, sample)
        decomposed = program.run_decompositions()
    input = draw(3, sample)
    theirs = gradients_of(reload(program).module(), input)
    for name, gradient in gradients_of(model, input).items():
        assert torch.equal(theirs[name], gradient), name
    loaded = reload(decomposed).module()
    output = loaded(input)
    assert torch.equal(output, model(input))
    with pytest.raises(
        RuntimeError, match="exported where no gradient was needed.*export the model with gradients enabled"
    ):
        output.sum().backward()


@by_module
def test_decomposed(make, sample):
    """In PyTorch's operators alone, for batches of any size."""
    model = make()
    table = {**torch.export.default_decompositions(), **ops.decompositions()}
    program = reload(export(model, sample).run_decompositions(table))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {each.namespace for each in targets if isinstance(each, torch._ops.OpOverload)} == {"aten"}
    for batch in (4, 9):
        input = draw(batch, sample)
        torch.testing.assert_close(program.module()(input), model(input))


def test_compiled_ahead_of_time(tmp_path):
    """AOTInductor's library calls the operators, for batches of any size; a norm of images and one of rows."""
    pointwise = ops.pointwise
    model = torch.nn.Sequential(
        ops.GroupNorm(4, 32, after=(pointwise.silu(),)),
        torch.nn.Flatten(),
        ops.LinearLayerNorm(160, 16, after=(pointwise.gelu(),)),
    )
    with torch.no_grad():
        program = export(model, (32, 5))
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "model.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        loaded = torch._inductor.aoti_load_package(package)
        for batch in (4, 7):
            input = draw(batch, (32, 5))
            torch.testing.assert_close(loaded(input), model(input))


def test_decomposed_under_autocast():
    """The result has the dtype that autocast gives the model's."""
    model = ops.LinearLayerNorm(16, 32, after=(ops.pointwise.gelu(),))
    with torch.autocast("cpu", torch.bfloat16):
        program = export(model, (16,))
        expected = model(draw(4, (16,)))
    found = program.run_decompositions({**torch.export.default_decompositions(), **ops.decompositions()})
    with torch.autocast("cpu", torch.bfloat16):
        result = found.module()(draw(4, (16,)))
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("decomposed", [False, True])
def test_loaded_in_another_process(decomposed, tmp_path):
    """Which needs nothing but ``import ops``, and not that where it is decomposed."""
    model = ops.LinearGroupNormHardtanh(16, 32, 4, -2.0, 2.0)
    program = export(model, (16,))
    if decomposed:
        program = program.run_decompositions({**torch.export.default_decompositions(), **ops.decompositions()})
    torch.export.save(program, tmp_path / "model.pt2")
    input = draw(7, (16,))
    torch.save((input, model(input).detach()), tmp_path / "tensors.pt")
    program = f"""
        import sys, torch
        {"" if decomposed else "import ops"}
        loaded = torch.export.load(sys.argv[1]).module()
        input, expected = torch.load(sys.argv[2])
        {"torch.testing.assert_close" if decomposed else "assert torch.equal"}(loaded(input), expected)
        assert ("ops" in sys.modules) is {not decomposed}
        print("the same")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path / "model.pt2", tmp_path / "tensors.pt"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "the same", result.stderr
