"""Promise: whatever a forward does beside its chain, and whatever a model is made of, a fused model gives what the
plain one gives: values, gradients, errors, strides, pickles. Each case was wrong once, or is next to one that was.

The tests use the public interface alone: they hold for any way to find out what a forward does."""

import copy
import pickle

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
    L75,
    L94,
    OUT,
    BenchmarkL30,
    Parts,
    assert_alike,
    assert_same,
    input_of,
    made,
    outcome,
)


def assert_same_outcome(model, *arguments, **options):
    """Of a copy that is fused, beside another model."""
    fused = copy.deepcopy(model)
    fuse(nn.ModuleList([fused, made(BenchmarkL30)]))
    for _ in range(3):  # one call looks for chains, the next is captured, the last runs what was
        assert_alike(*(outcome(each, *copy.deepcopy(arguments), **copy.deepcopy(options)) for each in (fused, model)))


def chain_between(before, after):
    """A forward of these statements, with the chain y between them; ``after`` ends in what is returned."""
    namespace = {"torch": torch, "F": F}
    lines = [*before, "y = self.hardtanh(self.groupnorm(self.gemm(x)))", *after[:-1], f"return {after[-1]}"]
    exec("def forward(self, x):\n" + "\n".join(f"    {line}" for line in lines), namespace)
    return namespace["forward"]


#: statements behind the chain, the last the result
ATTRIBUTES = {
    **{
        f"{operation} to {name}": [f"t = y.{name}", f"t {operation} self.scale", "y, t"]
        for name in ("T", "mT", "H", "mH", "data", "real")
        for operation in ("+=", "*=")
    },
    "in place, of an attribute of an attribute": ["t = y.T.mT", "t -= 1", "y"],
    "in place, of an element's attribute": ["t = y[1:].T", "t /= 2", "y"],
    "ndim before": ["n = y.ndim", "y.unsqueeze_(0)", "n, y"],
    "shape before": ["n = y.shape", "y.unsqueeze_(0)", "n, y.shape"],
    "shape extended": ["n = y.shape", "m = n", "n += (1,)", "n, m"],
    "dtype before": ["n = y.dtype", "y = y.double()", "y.to(n)"],
    "requires_grad before": ["n = y.requires_grad", "y = y.detach()", "n, y.requires_grad"],
    "grad": ["y.grad"],
    "data before": ["t = y.detach()", "kept = t.data", "t.resize_(2, 2)", "kept, t"],
    "method before": ["add = y.add_", "y.mul_(2)", "add(1)", "y"],
    "method twice": ["add = y.add_", "add(1)", "add(2)", "y"],
    "method of an attribute": ["t = y.mT", "t.add_(1)", "y"],
    "no such attribute": ["y.nothing", "y"],
    "no such attribute, unused": ["t = y.nothing", "y"],
    "element assigned": ["y[0] = 1", "y"],
    "element in place": ["y[0] += 1", "y"],
    "element of an attribute in place": ["y.T[0] += 1", "y"],
    "slice in place": ["t = y[:2]", "t += 1", "y"],
    "out": ["t = y.clone()", "torch.add(y, 1, out=t)", "t"],
    "out of the chain's result": ["y = y.detach()", "torch.add(y, 1, out=y)", "y"],
    "buffer's attribute in place": ["t = self.buffer.data", "t += 1", "y + self.buffer"],
}


#: What Dynamo overlooks, whatever is behind it.
OF_DYNAMO = ("no such attribute", "no such attribute, unused", "shape before")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:The use of `x.T`")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name):
    model = made(chain_between([], ATTRIBUTES[name]))
    assert_same_outcome(torch.compile(model, backend="eager") if name in OF_DYNAMO else model, input_of(L30))


UNPACKED = {
    "too many": ["a, b = x.chunk(3)", "y + a.sum() + b.sum()"],
    "too few": ["a, b, c, d = x.chunk(3)", "y + a.sum() + d.sum()"],
    "just so": ["a, b, c = x.chunk(3)", "y + a.sum() + b.sum() + c.sum()"],
    "a shape": ["rows, columns = x.shape", "y.view(rows, 2, 4), columns"],
    "a shape of two into three": ["rows, columns, more = x.shape", "y"],
    "a shape into one": ["[rows] = x.shape", "y"],
    "a tensor": ["a, b, c, d, e = y", "a + e"],
    "a tensor into fewer": ["a, b = y", "a + b"],
    "a number": ["a, b = self.scale", "y"],
    "in one another": ["(a, b), c, d, e, f = y[:, :2]", "a + c"],
    "a minimum into one": ["[a] = torch.min(y, 1, True)", "y"],
}


@pytest.mark.parametrize("after", UNPACKED.values(), ids=UNPACKED)
def test_unpacking(after):
    assert_same_outcome(made(chain_between([], after)), input_of(L30))


@pytest.mark.parametrize("targets", ["minimum, index", "minimum, index, more", "minimum,"])
def test_unpacking_a_minimum(targets):
    """Which is part of a chain."""
    namespace = {"torch": torch}
    source = f"({targets}) = torch.min(self.groupnorm(self.gemm(x)), 1, True); return minimum + self.axis_bias"
    exec(f"def forward(self, x): {source}", namespace)
    assert_same_outcome(made(namespace["forward"]), input_of(L75))


#: what Python's protocols make of a value, at once
PROTOCOLS = {
    "len": ["y * len(x)"],
    "iter": ["next(iter(y))"],
    "list": ["[*y][0]"],
    "arguments": ["torch.stack([*x.chunk(2)])", "y"],
    "text": ["{'rows: %s' % x.shape[0]: y}"],
    "text of a representation": ["{'rows: %r' % x.shape[0]: y}"],
    "format": ["{'rows: {}'.format(x.shape[0]): y}"],
    "key": ["{1.0: x, 2.0: y}.get(self.scale, 0)"],
    "index": ["(x, y).index(self.scale)", "y"],
    "element of a tuple": ["(x, y, y * 2)[self.groups]"],
    "equal": ["y * (x.shape[0] == 5)"],
    "chained comparison": ["y * (1 < x.shape[0] < 3)"],
    "in": ["y * (5 in x.shape)"],
    "matrix product in place": ["y @= y.mT @ y", "y"],
    "power in place": ["y **= 2", "y"],
    "reflected": ["2 ** y - 1 / (y + 3)"],
}


@pytest.mark.parametrize("after", PROTOCOLS.values(), ids=PROTOCOLS)
def test_protocols(after):
    assert_same_outcome(made(chain_between([], after)), input_of(L30))


class Masked(Parts):
    """As pruned layers are written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.rand(OUT, IN) < 0.5).double())

    def forward(self, x):
        return self.hardtanh(self.groupnorm(F.linear(x, self.weight * self.mask, self.bias)))


WITHOUT_BOUNDS = {
    "clamp": lambda self, x: self.groupnorm(self.gemm(x)).clamp(min=None),
    "clip": lambda self, x: torch.clip(self.groupnorm(self.gemm(x)), None, None),
}


@pytest.mark.parametrize("forward", WITHOUT_BOUNDS.values(), ids=WITHOUT_BOUNDS)
def test_bounds_that_are_none(forward):
    """PyTorch raises an error."""
    assert_same_outcome(made(forward), input_of(L30))


def test_in_place_mish():
    """PyTorch has its values, and no gradients: what they need is written over."""

    def forward(self, x):
        z = self.hardtanh(self.gemm(x))
        return self.groupnorm(z.mul_(torch.tanh(F.softplus(z))))

    model = made(forward)
    assert_same_outcome(model, input_of(L94))
    fuse(nn.ModuleList([model, made(BenchmarkL30)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(input_of(L94)).sum().backward()


def with_computed_norm(self, x):
    weight = self.buffer * 2
    return F.hardtanh(F.group_norm(self.gemm(x), self.groups, weight, self.bias + 1))


def with_computed_kernel(self, x):
    kernel = self.kernel * 2
    return F.group_norm(F.gelu(F.conv_transpose2d(x, kernel, self.bias)), self.groups)


def with_computed_before_the_chain(self, x):
    weight, bias = self.buffer * 2, self.bias + 1
    return F.hardtanh(F.group_norm(self.gemm(x), self.groups, weight, bias))


def weight_from_another_chain(self, x):
    """The second chain's norm is weighted by the first one's result."""
    first = self.hardtanh(self.groupnorm(self.gemm(x)))
    return F.hardtanh(F.group_norm(self.skip(x), 2, first[0]))


def twice_the_same_weight(self, x):
    weight = self.weight * 2
    return F.hardtanh(F.group_norm(F.linear(x, weight), 2)) + F.hardtanh(F.group_norm(F.linear(x, weight), 4))


COMPUTED = {
    "mask": (Masked, L30),
    "norm": (with_computed_norm, L30),
    "norm, before": (with_computed_before_the_chain, L30),
    "kernel": (with_computed_kernel, L19),
    "of another chain": (weight_from_another_chain, L30),
    "of two chains": (twice_the_same_weight, L30),
}


@pytest.mark.parametrize("forward, chain", COMPUTED.values(), ids=COMPUTED)
def test_computed_operands(forward, chain):
    """With gradients."""
    model = made(forward)
    plain = copy.deepcopy(model)
    fuse(nn.ModuleList([model, made(BenchmarkL30)]))
    assert_same(model, plain, input_of(chain))


def given_its_weight(self, x, weight):
    return self.hardtanh(self.groupnorm(F.linear(x, weight)))


def test_weight_that_is_an_argument():
    model, weight = made(given_its_weight), torch.randn(OUT, IN, dtype=torch.float32)
    assert_same_outcome(model, input_of(L30), weight)
    assert_same_outcome(model, input_of(L30), weight=weight)
    assert_same_outcome(model, input_of(L30), weight.double())
    assert_same_outcome(model, torch.randn(3, OUT, IN, dtype=torch.float32), weight)


@pytest.mark.parametrize(
    "arguments, options",
    [((1,), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((), {"weight": 1}), ((1, 2), {"more": 3})],
    ids=str,
)
def test_calls_that_do_not_fit(arguments, options):
    assert_same_outcome(made(given_its_weight), *arguments, **options)


NAMES = (
    'in class None self it\'s say"so" back\\slash new\nline a b é ﬁ 神经 0 -1 torch input getattr x forward_ getitem'
    " _call chains_as_written argument_0 self_1 {braces} %s # inf __private"
)


@pytest.mark.parametrize("name", [*NAMES.split(" "), "two words", '"); 1/0 #'])
def test_names_of_children(name):
    """Of the chain, and beside it."""
    torch.manual_seed(1)
    for names in ([name, "norm", "bounds", "last"], ["gemm", "norm", name, "last"], ["gemm", "norm", "bounds", name]):
        layers = nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(-0.5, 0.5), nn.Linear(OUT, OUT)
        model = nn.Sequential()
        for each, layer in zip(names, layers, strict=True):
            model.add_module(each, layer)
        plain = copy.deepcopy(model.float())
        fuse(nn.ModuleList([model, made(BenchmarkL30)]))
        assert_same(model, plain, input_of(L30))
        assert_same(pickle.loads(pickle.dumps(model)), plain, input_of(L30))
        assert_same(copy.deepcopy(model), plain, input_of(L30))


def test_model_whose_only_forward_has_odd_names():
    model = nn.Sequential()
    for name, layer in {"in": nn.Linear(IN, OUT), "it's": nn.GroupNorm(2, OUT), "class": nn.Hardtanh()}.items():
        model.add_module(name, layer)
    plain = copy.deepcopy(model.float())
    fuse(model)
    assert_same(model, plain, input_of(L30))


def test_child_named_self():
    def forward(this, x):
        y = this.self(x)
        return this.hardtanh(this.groupnorm(this.gemm(y))) + this.skip(x)

    model = made(forward)
    model.self = nn.Linear(IN, IN).float()
    assert_same_outcome(model, input_of(L30))


@pytest.mark.parametrize(
    "name", ["self", "torch", "getattr", "input", "chains_as_written", "operator", "slice", "F", "ops", "type", "é"]
)
def test_names_of_parameters(name):
    """By position and by keyword."""
    namespace = {"F": F}
    chain = f"F.hardtanh(F.group_norm(F.linear({name}, this.weight), 2), -1, 1)"
    exec(f"def forward(this, {name}, other): return {chain} + {name}.mean() + other[1:2, :1].T", namespace)
    model, input = made(namespace["forward"]), input_of(L30)
    assert_same_outcome(model, input, input * 2)
    assert_same_outcome(model, input, other=input * 2)
    assert_same_outcome(model, **{"other": input * 2, name: input})
    assert_same_outcome(model, torch.randn(3, OUT, IN, dtype=torch.float32), input)


def test_sequential_with_a_child_that_is_none():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh()).float()
    model.register_module("3", None)
    assert_same_outcome(model, input_of(L30))


def double(module, arguments, output):
    return 2 * output


def halve(module, arguments):
    return arguments[0] / 2


def beside_modules(name):
    """A model whose chain has a module that is no child: parameters and state_dict pass over it."""

    def make():
        model = made(BenchmarkL30)
        module = model._modules.pop(name)
        object.__setattr__(model, name, module)
        return model

    return make


BESIDE = {
    "nothing": lambda model, name: None,
    "hook": lambda model, name: getattr(model, name).register_forward_hook(double),
    "pre-hook": lambda model, name: getattr(model, name).register_forward_pre_hook(halve),
    "backward hook": lambda model, name: getattr(model, name).register_full_backward_hook(
        lambda module, gradients, others: (gradients[0] * 2,)
    ),
    "another forward": lambda model, name: setattr(getattr(model, name), "forward", torch.tanh),
    "another class": lambda model, name: object.__setattr__(model, name, nn.Tanh()),
    "none": lambda model, name: object.__setattr__(model, name, None),
    "no such": lambda model, name: delattr(model, name),
    "a child of the name": lambda model, name: model._modules.update({name: nn.Tanh()}),
}


@pytest.mark.parametrize("name", ["groupnorm", "hardtanh"])
@pytest.mark.parametrize("change", BESIDE.values(), ids=BESIDE)
def test_modules_that_are_no_children(change, name):
    """Changed before ``fuse``, and afterwards."""
    for is_fused_first in (True, False):
        model, plain = beside_modules(name)(), beside_modules(name)()
        if is_fused_first:
            fuse(nn.ModuleList([model]))
        change(model, name), change(plain, name)
        if not is_fused_first:
            fuse(nn.ModuleList([model, made(BenchmarkL30)]))
        mine, theirs = outcome(model, input_of(L30)), outcome(plain, input_of(L30))
        assert_alike(mine, theirs)
        if isinstance(theirs, torch.Tensor):
            assert_same(model, plain, input_of(L30))
