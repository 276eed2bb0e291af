"""Promise: ``fuse`` replaces the four chains, however they are spelled, and nothing whose semantics differ; ``unfuse``
undoes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops.fuse import FusionReport, fuse, unfuse
from tests.ops import fused_models
from tests.ops.fused_models import (
    BENCHMARKS,
    GROUPS,
    IN,
    L30,
    L94,
    OUT,
    ROWS,
    SPELLED,
    BenchmarkL30,
    BenchmarkL94,
    HalvingLinear,
    Parts,
    assert_same,
    beside_another_path,
    by_benchmark,
    in_full,
    input_of,
    made,
)

calls = pytest.fixture(fused_models.calls)


@by_benchmark
def test_benchmark_models(chain, calls):
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert [entry.chain for entry in report.replaced] == [chain] and not report.left
    assert_same(model, plain, input_of(chain))
    assert calls == [chain]


@by_benchmark
def test_benchmark_models_in_float32(chain, calls):
    """Here through the interpreter: what stands in the model's place is the fused operation indeed."""
    model = made(BENCHMARKS[chain], dtype=torch.float32)
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(chain, torch.float32), atol=1e-4, rtol=1e-4)
    assert calls == [chain]


@pytest.mark.parametrize("chain, forward", SPELLED)
def test_spellings(chain, forward, calls):
    model = made(forward)
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert [entry.chain for entry in report.replaced] == [chain] and not report.left
    assert_same(model, plain, input_of(chain))
    assert calls == [chain]


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
    model.gemm.forward = lambda x: x @ model.skip.weight.T


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


#: forward, what is done to the model before, and a part of the reason
LEFT = {
    "used elsewhere": (used_elsewhere, None, "gemm is used by add too"),
    "returned too": (returned_too, None, "groupnorm is used by output too"),
    "index used": (index_used, None, "unpacked is used by getitem_1 too"),
    "hook": (in_full, hooked, "groupnorm has a hook"),
    "backward hook": (in_full, backward_hooked, "gemm has a hook"),
    "parametrised": (
        in_full,
        parametrised,
        "gemm is a torch.nn.utils.parametrize.ParametrizedLinear, not torch.nn.Lin",
    ),
    "subclass": (in_full, subclassed, "HalvingLinear, not torch.nn.Linear itself"),
    "quantised": (in_full, quantised, "QuantizedLinear, not torch.nn.Linear itself"),
    "own forward": (in_full, overridden, "gemm has a forward set on it that is not its class's"),
    "compiled": (in_full, lambda model: model.gemm.compile(backend="eager"), "gemm was compiled with its own compile"),
    "another axis": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x).mT.mT)), None, "none of the four"),
    "dropout": (lambda self, x: self.hardtanh(self.groupnorm(self.dropout(self.gemm(x)))), None, "none of the four"),
    "another end": (lambda self, x: self.groupnorm(self.gemm(x)).relu(), None, "none of the four"),
    "another order": (lambda self, x: self.groupnorm(self.hardtanh(self.mish(self.gemm(x)))), None, "none of the four"),
    "softplus of nothing": (
        lambda self, x: self.groupnorm(self.gemm(x) * torch.tanh(self.scale_tensor)),
        lambda model: model.register_buffer("scale_tensor", torch.ones(OUT)),
        "none of the four",
    ),
    "another softplus": (
        lambda self, x: self.groupnorm((z := self.hardtanh(self.gemm(x))) * F.softplus(z, beta=2).tanh()),
        None,
        "none of the four",
    ),
    "no keepdim": (lambda self, x: torch.amin(self.groupnorm(self.gemm(x)), dim=1), None, "without keepdim"),
    "minimum of rows": (lambda self, x: self.groupnorm(self.gemm(x)).amin(0, True), None, "minimum over 0, not 1"),
    "one number": (with_bias, bias_of_shape(1), "has shape (1,), not one value a channel, (8,)"),
    "bias of three axes": (with_bias, bias_of_shape(1, 1, OUT), "has shape (1, 1, 8), not one value"),
    "bias of the rows": (with_bias, bias_of_shape(ROWS, 1), "has shape (5, 1), not one value"),
    "a number": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + 1.0)), None, "adds 1.0, which is no bias"),
    "residual": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + self.skip(x))), None, "is not known"),
    "computed between": (computed_between, None, "mul runs between"),
    "beside another path": (beside_another_path, None, "skip runs between"),
    "sum with itself": (
        lambda self, x: self.hardtanh(self.groupnorm((h := self.gemm_without_bias(x)) + h)),
        None,
        "is no tensor of the module's",
    ),
    "norm weighted by its input": (
        lambda self, x: self.hardtanh(F.group_norm(h := self.gemm(x), 2, h)),
        None,
        "given what is computed from another",
    ),
    "sum in a buffer": (sum_in_a_buffer, None, "writes to buffer, which is no value of the chain's"),
    "sum in a buffer by a method": (
        lambda self, x: self.hardtanh(self.groupnorm(self.buffer.add_(self.gemm_without_bias(x)))),
        None,
        "add_ writes to buffer",
    ),
    "in-place module between": (in_place_module_between, with_writer, "writer runs between"),
    "bias from the product": (bias_from_the_product, None, "is used by mean too"),
    "two biases": (lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x) + self.bias)), None, "gemm has a bias"),
    "bounds of tensors": (
        lambda self, x: self.groupnorm(self.gemm(x)).clamp(min=self.buffer),
        None,
        "clamp's min_val is computed",
    ),
    "bounds upside down": (lambda self, x: self.groupnorm(self.gemm(x)).clamp(1, -1), None, "bounds are 1 and -1"),
    "bound of a module's": (in_full, bound_by_a_tensor, "hardtanh's max_val is computed"),
    "groups of the shape": (
        lambda self, x: self.hardtanh(F.group_norm(self.gemm(x), x.shape[1] // 3)),
        None,
        "num_groups is computed",
    ),
    "written to between": (written_to_between, None, "mul_ runs between"),
    "output size": (
        lambda self, x: self.groupnorm(F.gelu(self.conv_transpose(x, output_size=(8, 10)))),
        None,
        "given more than its input",
    ),
}


@pytest.mark.parametrize("forward, change, reason", LEFT.values(), ids=LEFT)
def test_left(forward, change, reason):
    model = made(forward)
    if change:
        change(model)
        model.double()
    attributes, state = dict(model.__dict__), {name: value.clone() for name, value in model.state_dict().items()}
    report = fuse(model)
    assert not report.replaced and len(report.left) == 1
    assert any(part in report.left[0].reason for part in reason.split("|")), report.left[0].reason
    assert model.__dict__ == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_tensors_of_two_names():
    """The forward has the one that it names; when that is given another tensor, it has that."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(F.linear(x, self.weight, self.tied))))
    model.tied = model.bias
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    assert_same(model, plain, input_of(L30))
    model.tied = plain.tied = nn.Parameter(torch.randn(OUT).double())
    assert_same(model, plain, input_of(L30))


def test_modules_of_two_names():
    """The forward calls the second name; when that is given another module, the forward has it."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(self.again(x))))
    model.again = model.gemm
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript():
    scripted = torch.jit.trace(made(BenchmarkL30), input_of(L30))
    with pytest.raises(ValueError, match="compiled by TorchScript"):
        fuse(scripted)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList(), ops.LinearGroupNormHardtanh(4, 4, 2, -1.0, 1.0)])
def test_nothing_to_look_at(model):
    """PyTorch's own layers and this project's have nothing to fuse."""
    assert fuse(model) == FusionReport()
    assert str(fuse(model)) == "nothing to replace, leave or restore"


class Top(nn.Module):
    """As large models are: a top that cannot be traced, blocks in lists, and a Sequential."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([made(BenchmarkL30), made(used_elsewhere), made(BenchmarkL94)])
        self.sequence = nn.Sequential(
            nn.Linear(OUT, OUT),
            nn.GroupNorm(GROUPS, OUT),
            nn.Hardtanh(),
            nn.Dropout(0.5),
            nn.Sequential(nn.Linear(OUT, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(-2, 2)),
        ).double()

    def forward(self, x):
        results = []
        for block in self.blocks:
            if block is not None:
                results.append(self.sequence(block(x)))
        return sum(results)


def test_large_model(calls):
    model = Top().eval()
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert [(entry.module, entry.chain, entry.steps) for entry in report.replaced] == [
        ("blocks.0", L30, ("gemm", "groupnorm", "hardtanh")),
        ("blocks.2", L94, ("gemm", "add", "hardtanh", "mish", "groupnorm")),
        ("sequence", L30, ("0", "1", "2")),
        ("sequence.4", L30, ("0", "1", "2")),
    ]
    assert [(entry.module, entry.reason) for entry in report.left] == [("blocks.1", "gemm is used by add too")]
    assert str(report).splitlines() == [
        "replaced 4:",
        "  blocks.0: gemm, groupnorm, hardtanh -> linear_group_norm_hardtanh",
        "  blocks.2: gemm, add, hardtanh, mish, groupnorm -> linear_hardtanh_mish_group_norm",
        "  sequence: 0, 1, 2 -> linear_group_norm_hardtanh",
        "  sequence.4: 0, 1, 2 -> linear_group_norm_hardtanh",
        "left 1:",
        "  blocks.1: gemm, groupnorm, hardtanh: gemm is used by add too",
    ]
    assert_same(model, plain, input_of(L30))
    assert len(calls) == 2 + 3 * 2
    assert fuse(model) == report
    assert unfuse(model).restored == report.replaced
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert unfuse(model).restored == ()
    assert torch.equal(model(input_of(L30)), plain(input_of(L30)))


def repeated(self, x):
    """The second without modules of its own."""
    x = self.hardtanh(self.groupnorm(self.gemm(x)))
    return self.hardtanh(self.groupnorm(F.linear(x, self.square, self.bias))), x


def test_chain_after_chain(calls):
    model = made(repeated)
    model.square = nn.Parameter(torch.randn(OUT, OUT, dtype=torch.float64))
    expected = model(input_of(L30))
    assert [entry.steps for entry in fuse(model).replaced] == [
        ("gemm", "groupnorm", "hardtanh"),
        ("linear", "groupnorm", "hardtanh"),
    ]
    torch.testing.assert_close(model(input_of(L30)), expected)
    assert calls == [L30, L30]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@by_benchmark
def test_result_written_to(chain, dtype):
    """In place, by what comes next."""
    model = nn.Sequential(made(BENCHMARKS[chain], dtype=dtype), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    assert_same(model, plain, input_of(chain, dtype), atol=1e-4, rtol=1e-4)
