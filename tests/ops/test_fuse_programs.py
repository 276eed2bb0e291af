"""Promise: whatever a forward is written like, and whatever was done to its model, a fused model gives what the plain
one gives: values, gradients, buffers, errors and what it prints."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.fuse import fuse
from tests.ops.fused_models import (
    GROUPS,
    IN,
    L19,
    L30,
    OUT,
    ROWS,
    HalvingLinear,
    Parts,
    assert_alike,
    beside_another_path,
    in_full,
    input_of,
    made,
    outcome,
    used_elsewhere,
)


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
