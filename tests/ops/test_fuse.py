"""Promise: ``fuse`` finds the chains of a model in its first call, in whatever Python its forwards are written, and the
model gives what it gave; ``unfuse`` undoes it."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import rewriting
from ops.fuse import fuse, unfuse
from tests.ops.fused_models import (
    BENCHMARKS,
    GROUPS,
    IN,
    L19,
    L30,
    OUT,
    ROWS,
    SPELLED,
    BenchmarkL30,
    BenchmarkL94,
    HalvingLinear,
    Parts,
    assert_alike,
    assert_same,
    beside_another_path,
    by_benchmark,
    in_full,
    input_of,
    made,
    outcome,
)

NORMED = "linear -> add -> group_norm -> mul -> add"
CHAINS = {
    "linear_hardtanh_mish_group_norm": "linear -> add -> add -> hardtanh -> mish -> group_norm -> mul -> add",
    "linear_group_norm_min": "linear -> add -> group_norm -> mul -> add -> row_minimum",
    "linear_group_norm_hardtanh": f"{NORMED} -> hardtanh",
    "conv_transpose2d_gelu_group_norm": "conv_transpose2d -> add -> gelu -> group_norm -> mul -> add",
}


@by_benchmark
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_benchmark_models(chain, dtype):
    model = made(BENCHMARKS[chain], dtype=dtype)
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert str(report) == "chains are found in the model's first call" and report.chains == ()
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    assert_same(model, plain, input_of(chain, dtype), atol=tolerance, rtol=tolerance)
    assert [(each.module, each.chain) for each in report.chains] == [("", CHAINS[chain])]
    assert str(report) == f"1 chain\n  the model: {CHAINS[chain]}"


@pytest.mark.parametrize("chain, forward", SPELLED)
def test_spellings(chain, forward):
    model = made(forward)
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert_same(model, plain, input_of(chain))
    assert report.chains


def hooked(model):
    model.groupnorm.register_forward_hook(lambda module, arguments, output: output * 2)


def backward_hooked(model):
    model.gemm.register_full_backward_hook(lambda module, gradients, others: None)


def parametrised(model):
    nn.utils.parametrizations.weight_norm(model.gemm)


class QuantizedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.round(), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight)


def subclassed(model):
    model.gemm = HalvingLinear(IN, OUT)


def quantised(model):
    model.gemm = QuantizedLinear(model.gemm)


def overridden(model):
    model.gemm.forward = lambda x: F.pad(x, (0, OUT - IN))


def bound_by_a_tensor(model):
    model.hardtanh.max_val = torch.tensor(1.0)


def bias_of_shape(*shape):
    def change(model):
        model.bias = nn.Parameter(torch.randn(shape))

    return change


def used_elsewhere(self, x):
    h = self.gemm(x)
    return self.hardtanh(self.groupnorm(h)) + h


def returned_too(self, x):
    h = self.groupnorm(self.gemm(x))
    return {"normalised": h, "result": [self.hardtanh(h)]}


def index_used(self, x):
    minimum, index = torch.min(self.groupnorm(self.gemm(x)), dim=1, keepdim=True)
    return minimum + index


def written_to_between(self, x):
    h = self.gemm_without_bias(x)
    self.buffer.mul_(0.5)
    return self.hardtanh(self.groupnorm(h + self.buffer))


def computed_between(self, x):
    h = self.gemm(x)
    weight = self.buffer * 2
    return self.hardtanh(F.group_norm(h, self.groups, weight))


def bias_from_the_product(self, x):
    h = self.gemm_without_bias(x)
    return self.hardtanh(self.groupnorm(h + h.mean(0)))


def sum_in_a_buffer(self, x):
    accumulator = self.buffer
    accumulator += self.gemm_without_bias(x)
    return self.hardtanh(self.groupnorm(accumulator))


class Writer(nn.Module):
    """Changes, in place, a tensor that is not its input."""

    def __init__(self, tensor):
        super().__init__()
        self.tensors = [tensor]

    def forward(self, x):
        self.tensors[0].mul_(2)
        return x


def with_writer(model):
    model.writer = Writer(model.buffer)


def in_place_module_between(self, x):
    h = self.gemm(x)
    y = self.writer(x)
    return self.hardtanh(F.group_norm(h, 2, self.buffer)) + y.sum()


def with_bias(self, x):
    return self.groupnorm(self.mish(self.hardtanh(self.gemm(x) + self.bias)))


def compiled(model):
    model.gemm.compile(backend="eager")


def of_output_size(self, x):
    return self.groupnorm(F.gelu(self.conv_transpose(x, output_size=(8, 10))))


#: forward, and what is done to the model before
PROGRAMS = {
    "used elsewhere": (used_elsewhere, None),
    "returned too": (returned_too, None),
    "index used": (index_used, None),
    "hook": (in_full, hooked),
    "backward hook": (in_full, backward_hooked),
    "parametrised": (in_full, parametrised),
    "subclass": (in_full, subclassed),
    "quantised": (in_full, quantised),
    "own forward": (in_full, overridden),
    "compiled": (in_full, compiled),
    "another axis": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x).mT.mT)), None),
    "dropout": (lambda self, x: self.hardtanh(self.groupnorm(self.dropout(self.gemm(x)))), None),
    "another end": (lambda self, x: self.groupnorm(self.gemm(x)).relu(), None),
    "another order": (lambda self, x: self.groupnorm(self.hardtanh(self.mish(self.gemm(x)))), None),
    "softplus of nothing": (
        lambda self, x: self.groupnorm(self.gemm(x) * torch.tanh(self.scale_tensor)),
        lambda model: model.register_buffer("scale_tensor", torch.ones(OUT)),
    ),
    "another softplus": (
        lambda self, x: self.groupnorm((z := self.hardtanh(self.gemm(x))) * F.softplus(z, beta=2).tanh()),
        None,
    ),
    "no keepdim": (lambda self, x: torch.amin(self.groupnorm(self.gemm(x)), dim=1), None),
    "minimum of rows": (lambda self, x: self.groupnorm(self.gemm(x)).amin(0, True), None),
    "one number": (with_bias, bias_of_shape(1)),
    "bias of three axes": (with_bias, bias_of_shape(1, 1, OUT)),
    "bias of the rows": (with_bias, bias_of_shape(ROWS, 1)),
    "a number": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + 1.0)), None),
    "residual": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + self.skip(x))), None),
    "computed between": (computed_between, None),
    "beside another path": (beside_another_path, None),
    "sum with itself": (lambda self, x: self.hardtanh(self.groupnorm((h := self.gemm_without_bias(x)) + h)), None),
    "norm weighted by its input": (lambda self, x: self.hardtanh(F.group_norm(h := self.gemm(x), 2, h)), None),
    "sum in a buffer": (sum_in_a_buffer, None),
    "sum in a buffer by a method": (
        lambda self, x: self.hardtanh(self.groupnorm(self.buffer.add_(self.gemm_without_bias(x)))),
        None,
    ),
    "in-place module between": (in_place_module_between, with_writer),
    "bias from the product": (bias_from_the_product, None),
    "two biases": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + self.bias)), None),
    "bounds of tensors": (lambda self, x: self.groupnorm(self.gemm(x)).clamp(min=self.buffer), None),
    "bounds upside down": (lambda self, x: self.groupnorm(self.gemm(x)).clamp(1, -1), None),
    "bound of a module's": (in_full, bound_by_a_tensor),
    "groups of the shape": (lambda self, x: self.hardtanh(F.group_norm(self.gemm(x), x.shape[1] // 3)), None),
    "written to between": (written_to_between, None),
    "output size": (of_output_size, None),
}


@pytest.mark.parametrize("forward, change", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(forward, change):
    """Values, gradients, buffers and errors are those of the plain model, whatever is fused."""
    model = made(forward)
    if change:
        change(model)
    plain = copy.deepcopy(model)
    if change is compiled:
        change(plain)
    state, input = plain.state_dict(), input_of(L19 if forward is of_output_size else L30)
    fuse(model)
    for _ in range(3):
        torch.manual_seed(8)
        mine = outcome(model, input)
        torch.manual_seed(8)
        theirs = outcome(plain, input)
        assert_alike(mine, theirs)
        if isinstance(theirs, torch.Tensor) and theirs.requires_grad:
            for each in (mine, theirs):
                each.square().mean().backward()
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name])


def test_tensors_of_two_names():
    """The forward has the one that it names; when that is given another tensor, it has that."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(F.linear(x, self.weight, self.tied))))
    model.tied = model.bias
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L30))
    model.tied = plain.tied = nn.Parameter(torch.randn(OUT))
    assert_same(model, plain, input_of(L30))


def test_modules_of_two_names():
    """The forward calls the second name; when that is given another module, the forward has it."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(self.again(x))))
    model.again = model.gemm
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L30))
    model.again = plain.again = made(Parts).skip
    assert_same(model, plain, input_of(L30))


@pytest.mark.parametrize(
    "model", [None, "model", ops.linear, torch.zeros(2), nn.Linear], ids=lambda model: type(model).__name__
)
@pytest.mark.parametrize("function", [fuse, unfuse])
def test_no_module(function, model):
    with pytest.raises(TypeError, match=f"^model must be a torch.nn.Module, got {type(model).__name__}$"):
        function(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList(), ops.LinearGroupNormHardtanh(4, 4, 2, -1.0, 1.0)])
def test_nothing_to_look_at(model):
    """PyTorch's own layers and this project's have nothing to fuse."""
    assert fuse(model).chains == ()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript():
    scripted = torch.jit.trace(made(BenchmarkL30), input_of(L30))
    expected = scripted(input_of(L30))
    assert fuse(scripted).chains == ()
    torch.testing.assert_close(scripted(input_of(L30)), expected)


class Top(nn.Module):
    """As large models are: blocks in lists, a Sequential, a branch that depends on values, and another way in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([made(BenchmarkL30), made(used_elsewhere), made(BenchmarkL94)])
        self.sequence = nn.Sequential(
            nn.Linear(OUT, OUT),
            nn.GroupNorm(GROUPS, OUT),
            nn.Dropout(0.5),
            nn.Hardtanh(),
            nn.Sequential(nn.Linear(OUT, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(-2, 2)),
        )
        self.decoder = nn.Sequential(nn.Linear(OUT, OUT), nn.LayerNorm(OUT), nn.GELU())
        self.last = nn.Linear(OUT, 2)

    def forward(self, x):
        results = []
        for block in self.blocks:
            if block is not None:
                results.append(self.sequence(block(x)))
        if results[0].sum() > 1e9:
            print("large")
        return self.last(sum(results).softmax(1))

    def decode(self, y):
        return self.decoder(y).softmax(1)


def test_large_model():
    """The smallest modules are fused, in evaluation and in training; the others are as they were."""
    model = Top().eval()
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert_same(model, plain, input_of(L30))
    within = [each.module for each in report.chains]
    assert within == ["blocks.0", "blocks.1", "blocks.2", "sequence", "sequence"]
    assert {each.chain for each in report.chains if each.module == "sequence"} == {f"{NORMED} -> hardtanh"}
    changed = {path for path, each in model.named_modules() if "forward" in each.__dict__}
    assert changed == {"", "blocks.0", "blocks.1", "blocks.2", "sequence", "sequence.4", "decoder"}
    model.train(), plain.train()
    for _ in range(2):
        torch.manual_seed(9)
        mine = model(input_of(L30))
        torch.manual_seed(9)
        torch.testing.assert_close(mine, plain(input_of(L30)), atol=1e-4, rtol=1e-4)
    assert NORMED in [each.chain for each in report.chains if each.module == "sequence"]
    torch.testing.assert_close(model.decode(mine.new_ones(3, OUT)), plain.decode(mine.new_ones(3, OUT)))
    torch.testing.assert_close(model.sequence[4](mine.new_ones(3, OUT)), plain.sequence[4](mine.new_ones(3, OUT)))
    assert {"decoder", "sequence.4"} <= {each.module for each in report.chains}
    unfuse(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert report.chains == ()


def test_chain_after_chain():
    def repeated(self, x):
        x = self.hardtanh(self.groupnorm(self.gemm(x)))
        return self.hardtanh(self.groupnorm(F.linear(x, self.square, self.bias))), x

    model = made(repeated)
    model.square = nn.Parameter(torch.randn(OUT, OUT))
    expected = model(input_of(L30))
    report = fuse(model)
    for _ in range(2):
        torch.testing.assert_close(model(input_of(L30)), expected)
    assert len(report.chains) == 2


@by_benchmark
def test_result_written_to(chain):
    """In place, by what comes next."""
    model = nn.Sequential(made(BENCHMARKS[chain]), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(chain))


def test_any_number_of_batches_and_instances():
    """Instances of one class with other sizes, more than Dynamo captures of one code."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Softmax(1)) for _ in range(12))
    )
    plain = copy.deepcopy(model)
    report = fuse(model)
    for rows in (5, 3, 1, 7, 64, 2):
        torch.testing.assert_close(model(torch.ones(rows, 6)), plain(torch.ones(rows, 6)), atol=1e-5, rtol=1e-4)
    assert {each.module for each in report.chains} == {str(place) for place in range(12)}


def test_sizes_of_one_module_are_not_another_ones(monkeypatch):
    """Dynamo makes a symbol of a size that changed, in all code of one name. Each module's has its own."""
    sizes, rewrite = [], rewriting.rewrite

    def seen(graph):
        sizes.extend(node.meta["example_value"].shape[0] for node in graph.graph.nodes if node.op == "placeholder")
        return rewrite(graph)

    monkeypatch.setattr(rewriting, "rewrite", seen)
    for rows in (3, 4, 5):
        model = made(BenchmarkL30)
        fuse(model)
        for _ in range(2):
            model(torch.ones(rows, IN))
    assert {3, 4, 5} < set(sizes) and all(type(each) is int for each in sizes)


def test_a_fused_model_is_freed():
    """Dynamo keeps its backends for good."""
    model = made(BenchmarkL30)
    fuse(model)
    for _ in range(3):
        model(input_of(L30))
    left = [weakref.ref(model), weakref.ref(model.gemm.weight)]
    del model
    gc.collect()
    assert [each() for each in left] == [None, None]


# Forwards in which a chain is beside Python of any kind.

FLAG: list = []


def helper(x, factors=FLAG):
    return x


def branches(self, x):
    x = self.hardtanh(self.groupnorm(self.gemm(x)))
    return x * 2 if self.training else x


def loops(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.hardtanh(self.groupnorm(self.gemm(x)))


def assigns(self, x):
    self.last = x
    return self.hardtanh(self.groupnorm(self.gemm(x)))


def assigns_to_an_element(self, x):
    x = x.clone()
    x[0] = 1
    return self.hardtanh(self.groupnorm(self.gemm(x)))


def in_a_context(self, x):
    with torch.no_grad():
        return self.hardtanh(self.groupnorm(self.gemm(x)))


def with_default(self, x, scale=1.0):
    return self.hardtanh(self.groupnorm(self.gemm(x * scale)))


class Odd(Parts):
    """What the forwards above and below use."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.last, self.list = None, [1.0]
        self.layers = nn.ModuleList([nn.Linear(IN, IN)])
        self.block = Parts()
        self.numbers = nn.ParameterDict({"scale": 2.0})

    def method(self, x):
        return x

    @classmethod
    def scaled(cls, x):
        return x * cls.factor

    @property
    def reading(self):
        return self.scale


def chain_then(after):
    """A forward of the chain, with this expression behind it."""
    namespace = {"torch": torch, "F": F, "helper": helper, "FLAG": FLAG, "GROUPS": GROUPS, "math": math}
    exec(f"def forward(self, x): y = self.hardtanh(self.groupnorm(self.gemm(x))); return {after}", namespace)
    return namespace["forward"]


EXPRESSIONS = (
    "y * 1 if y.sum() else y",
    "[row for row in y]",
    "print(y.shape) or y",
    "helper(y)",
    "y * GROUPS",
    "y * math.pi",
    "y + torch.ones(8)",
    "y.to(torch.get_default_dtype())",
    "y * torch.backends.cudnn.enabled",
    "y * isinstance(y, torch.Tensor)",
    "torch.utils.checkpoint.checkpoint(self.gelu, y, use_reentrant=False)",
    "getattr(self, 'gelu')(y)",
    "y * (self.__class__ == 1)",
    "self.method(y)",
    "self.scaled(y)",
    "y * self.reading",
    "y * self.list[0]",
    "self.block.method(y) if hasattr(self.block, 'method') else y",
    "y * self.block.scale",
    "y + self.gemm.bias",
    "y * self.numbers['scale']",
    "self.layers[0](x).sum() + y",
    "torch.cat([y, y.sum() > 0 and y])",
)
FORWARDS = (branches, loops, assigns, assigns_to_an_element, in_a_context, torch.no_grad()(in_full), with_default)


#: Dynamo does not capture these whole: a forward with one of them runs as it was written.
BREAKS = ("y.sum() else y", "print(", "> 0 and y")


@pytest.mark.parametrize("forward_of", [*FORWARDS, *EXPRESSIONS], ids=[*map(str, range(7)), *EXPRESSIONS])
def test_python_around_a_chain(forward_of, capsys):
    forward = chain_then(forward_of) if isinstance(forward_of, str) else forward_of
    model = made(forward, Odd)
    plain = copy.deepcopy(model)
    report = fuse(model)
    printed = []
    for each in (plain, model):
        printed.append("")
        for _ in range(3):
            result = outcome(each, input_of(L30))
            printed[-1] += capsys.readouterr().out
            assert_alike(result, outcome(plain, input_of(L30)))
            capsys.readouterr()
    assert printed[0] == printed[1]
    assert len(report.chains) == (not any(each in str(forward_of) for each in BREAKS))
