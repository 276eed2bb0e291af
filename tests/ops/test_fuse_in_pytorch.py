"""Promise: a fused model takes what the plain one takes, under autocast, compiled, exported and distributed too."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from ops.fuse import fuse
from tests.ops.fused_models import (
    BENCHMARKS,
    IN,
    L19,
    L30,
    L75,
    L94,
    OUT,
    SPELLINGS,
    BenchmarkL19,
    BenchmarkL30,
    BenchmarkL94,
    assert_same,
    by_benchmark,
    input_of,
    made,
    run,
)
from tests.ops.one_process import WRAPPERS

#: forwards whose GroupNorm takes the second of three dimensions for its channels
OTHER_INPUTS = [
    BenchmarkL94,
    BenchmarkL30,
    lambda self, x: self.groupnorm(self.gemm(x)).amin(-1, True),
    lambda self, x: self.groupnorm(self.gemm(x)).amin(1, True),
]


@pytest.mark.parametrize("forward", OTHER_INPUTS, ids=["L94", "L30", "L75 over the last", "L75"])
def test_inputs_of_more_dimensions(forward):
    """A trace does not know them; the call does, and the chain runs as it was written."""
    model = made(forward)
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, torch.randn(3, OUT, IN, dtype=torch.float32))


def test_image_without_a_batch():
    """It has no channels where GroupNorm looks for them, or as many by chance."""
    model = made(lambda self, x: F.group_norm(F.gelu(self.conv_transpose(x)), 2))
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L19)[0])


@by_benchmark
def test_errors_of_the_plain_model(chain):
    """What PyTorch refuses for its shape or dtype, it refuses itself."""
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    fuse(model)
    for input in (input_of(chain).double(), input_of(chain).int(), input_of(chain)[0, 0]):
        with pytest.raises(Exception) as expected:
            plain(input)
        with pytest.raises(type(expected.value)) as raised:
            model(input)
        assert str(raised.value) == str(expected.value)


@by_benchmark
def test_errors_of_another_device(chain):
    model = made(BENCHMARKS[chain])
    fuse(model)
    model.to("meta")
    with pytest.raises(RuntimeError):
        model(input_of(chain))


AUTOCAST = {
    **BENCHMARKS,
    "L94 without a bias": SPELLINGS[L94]["no bias"],
    "L75 without a bias": SPELLINGS[L75]["no bias"],
    "L30 with a bias": SPELLINGS[L30]["bias added"],
}


def check_autocast(forward, device):
    """With the dtypes that PyTorch has there."""
    model = made(forward, dtype=torch.float32).to(device)
    input = input_of(L19 if forward is BenchmarkL19 else L30, torch.float32).to(device)
    plain = copy.deepcopy(model)
    fuse(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(model, plain, input, atol=0.1, rtol=0.1)
        assert model(input).dtype == plain(input).dtype


@pytest.mark.parametrize("forward", AUTOCAST.values(), ids=AUTOCAST)
def test_autocast(forward):
    check_autocast(forward, "cpu")


class Tagged(torch.Tensor):
    """Has the functions of tensors told, as torchvision's and others' classes do, and changes one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 3 if function in (F.linear, F.conv_transpose2d) else result


class Untouched(torch.Tensor):
    """Changes nothing, but results are of its class."""


class TaggedParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 3 if function in (F.linear, F.conv_transpose2d) else result


by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float32], ids=str)


@by_benchmark
@by_dtype
@pytest.mark.parametrize("kind", [Tagged, Untouched])
def test_subclasses_as_input(kind, dtype, chain):
    model = made(BENCHMARKS[chain], dtype=dtype)
    plain = copy.deepcopy(model)
    fuse(model)
    input = input_of(chain, dtype).as_subclass(kind)
    result, expected = model(input), plain(input)
    assert type(result) is type(expected) is kind
    torch.testing.assert_close(result, expected)


@by_benchmark
@by_dtype
@pytest.mark.parametrize("changes_first", [False, True])
def test_subclasses_as_parameters(changes_first, dtype, chain):
    def change(model):
        source = model.conv_transpose if chain == L19 else model.gemm
        source.weight = TaggedParameter(source.weight.detach())

    model, plain = made(BENCHMARKS[chain], dtype=dtype), made(BENCHMARKS[chain], dtype=dtype)
    change(plain)
    if changes_first:
        change(model)
    fuse(model)
    if not changes_first:
        change(model)
    result, expected = model(input_of(chain, dtype)), plain(input_of(chain, dtype))
    assert type(result) is type(expected)
    torch.testing.assert_close(result, expected)


class Copied(nn.Parameter):
    """A parameter that is a class of its own by name alone: PyTorch's functions take it for a plain one."""


def test_parameters_of_a_class_that_is_told_of_nothing():
    model = made(BenchmarkL30)
    model.gemm.weight = Copied(model.gemm.weight.detach())
    plain = copy.deepcopy(model)
    fuse(model)
    torch.testing.assert_close(model(input_of(L30)), plain(input_of(L30)))


def test_default_device():
    """PyTorch sets it by a mode that is told of functions, too; chains stay fused."""
    model = made(BenchmarkL30)
    fuse(model)
    with torch.device("cpu"):
        model(input_of(L30))


@by_benchmark
def test_compile(chain):
    """As one graph, in both modes of the checks."""
    model = made(BENCHMARKS[chain])
    expected = run(model, input_of(chain))
    fuse(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = run(compiled, input_of(chain))
    for name, value in results.items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")])


@by_benchmark
def test_export(chain):
    model = made(BENCHMARKS[chain])
    expected = model(input_of(chain))
    fuse(model)
    exported = torch.export.export(model, (input_of(chain),)).module()
    torch.testing.assert_close(exported(input_of(chain)), expected)


def test_functional_call():
    """Parameters from outside, under torch.func's gradient."""
    model = made(BenchmarkL30)
    plain = copy.deepcopy(model)
    fuse(model)
    parameters = {name: value.detach() + 1 for name, value in model.named_parameters()}

    def loss(parameters, model):
        return torch.func.functional_call(model, parameters, (input_of(L30),)).square().sum()

    mine, theirs = (torch.func.grad(loss)(parameters, each) for each in (model, plain))
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view tensor")
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("first", ["fuse", "wrap", "compile"])
def test_distributed(wrap, first, process_group, monkeypatch, caplog):
    """``fuse`` before and after, and torch.compile's backend, behind which "aot_eager" stands for Inductor."""
    model = made(BenchmarkL30)
    plain = copy.deepcopy(model)
    if first == "compile":
        caplog.set_level("INFO", "ops.backend")
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: aot_eager(graph, inputs))
        wrapped = wrap(model)
        wrapped.compile(backend="normfuse")
    elif first == "fuse":
        fuse(model)
        wrapped = wrap(model)
    else:
        wrapped = wrap(model)
        fuse(wrapped)
    expected = run(plain, input_of(L30))
    for name, value in run(wrapped, input_of(L30)).items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, expected[name.removeprefix("module.")])
    assert first != "compile" or "1 chains in a graph" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@by_benchmark
def test_benchmark_models_on_a_gpu(chain, dtype):
    model = made(BENCHMARKS[chain], dtype=dtype).cuda()
    plain = copy.deepcopy(model)
    fuse(model)
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    assert_same(model, plain, input_of(chain, dtype).cuda(), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("forward", AUTOCAST.values(), ids=AUTOCAST)
def test_autocast_on_a_gpu(forward):
    check_autocast(forward, "cuda")


@pytest.mark.gpu
@by_benchmark
def test_compile_on_a_gpu(chain):
    """Through the default backend, with the fused operators in its graph."""
    model = made(BENCHMARKS[chain], dtype=torch.bfloat16).cuda()
    fuse(model)
    input = input_of(chain, torch.bfloat16).cuda()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(input), model(input), atol=0.05, rtol=0.05)
