"""Promise: whatever a forward does beside its chain, and whatever a model is made of, a fused model gives what the
plain one gives: values, gradients, errors, strides, pickles. Each case was wrong once, or is next to one that was.

The tests use the public interface alone: they hold for any way to find out what a forward does."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ops import direct_convolution
from ops.fuse import fuse, unfuse
from tests.ops import fused_models
from tests.ops.fused_models import (
    BENCHMARKS,
    GROUPS,
    IN,
    L19,
    L30,
    L75,
    L94,
    OUT,
    BenchmarkL30,
    Parts,
    assert_same,
    by_benchmark,
    in_full,
    input_of,
    made,
)

calls = pytest.fixture(fused_models.calls)


def outcome(model, *arguments, **options):
    """What a call returns, or the type of what it raises."""
    try:
        return model(*arguments, **options)
    except Exception as error:
        return type(error)


def assert_alike(mine, theirs):
    """Tensors to rounding, with their strides; of all else, their types and values."""
    assert type(mine) is type(theirs), (mine, theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, equal_nan=True, check_stride=True)
    elif isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(theirs, dict):
        assert_alike(list(mine.items()), list(theirs.items()))
    else:
        assert mine == theirs


def assert_same_outcome(model, *arguments, **options):
    """Of a copy that is fused, and beside a model that can be: one alone may be refused as a whole."""
    fused = copy.deepcopy(model)
    fuse(nn.ModuleList([fused, made(BenchmarkL30)]))
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
    "dtype before": ["n = y.dtype", "y = y.float()", "y.to(n)"],
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:The use of `x.T`")
@pytest.mark.parametrize("after", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes(after):
    assert_same_outcome(made(chain_between([], after)), input_of(L30))


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
        self.register_buffer("mask", (torch.rand(OUT, IN) < 0.5).float())

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
    """With gradients; for an input that the fused chain takes, and for one that runs as it was written."""
    model = made(forward)
    plain = copy.deepcopy(model)
    fuse(nn.ModuleList([model, made(BenchmarkL30)]))
    assert_same(model, plain, input_of(chain))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(input_of(chain)), plain(input_of(chain)))


def test_computed_operands_leave_the_rest(calls):
    """One such module does not keep a large model from being fused."""
    model = nn.ModuleList([made(Masked), made(BenchmarkL30)])
    assert "1" in [entry.module for entry in fuse(model).replaced]
    model[1](input_of(L30))
    assert calls == [L30]


def given_its_weight(self, x, weight):
    return self.hardtanh(self.groupnorm(F.linear(x, weight)))


def test_weight_that_is_an_argument():
    model, weight = made(given_its_weight), torch.randn(OUT, IN, dtype=torch.float64)
    assert_same_outcome(model, input_of(L30), weight)
    assert_same_outcome(model, input_of(L30), weight=weight)
    assert_same_outcome(model, input_of(L30), weight.float())
    assert_same_outcome(model, torch.randn(3, OUT, IN, dtype=torch.float64), weight)


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
def test_names_of_children(name, calls):
    """Of the chain, and beside it."""
    torch.manual_seed(1)
    for names in ([name, "norm", "bounds", "last"], ["gemm", "norm", name, "last"], ["gemm", "norm", "bounds", name]):
        layers = nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(-0.5, 0.5), nn.Linear(OUT, OUT)
        model = nn.Sequential()
        for each, layer in zip(names, layers, strict=True):
            model.add_module(each, layer)
        plain = copy.deepcopy(model.double())
        fuse(nn.ModuleList([model, made(BenchmarkL30)]))
        assert_same(model, plain, input_of(L30))
        assert_same(pickle.loads(pickle.dumps(model)), plain, input_of(L30))
        assert_same(copy.deepcopy(model), plain, input_of(L30))


def test_model_whose_only_forward_has_odd_names(calls):
    model = nn.Sequential()
    for name, layer in {"in": nn.Linear(IN, OUT), "it's": nn.GroupNorm(2, OUT), "class": nn.Hardtanh()}.items():
        model.add_module(name, layer)
    plain = copy.deepcopy(model.double())
    fuse(model)
    assert_same(model, plain, input_of(L30))


def test_child_named_self():
    def forward(this, x):
        y = this.self(x)
        return this.hardtanh(this.groupnorm(this.gemm(y))) + this.skip(x)

    model = made(forward)
    model.self = nn.Linear(IN, IN).double()
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
    assert_same_outcome(model, torch.randn(3, OUT, IN, dtype=torch.float64), input)


def test_sequential_with_a_child_that_is_none():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh()).double()
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


by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@by_benchmark
@by_dtype
@pytest.mark.parametrize("kind", [Tagged, Untouched])
def test_subclasses_as_input(kind, dtype, chain):
    model = made(BENCHMARKS[chain], dtype=dtype)
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
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


def test_parameters_of_a_class_that_is_told_of_nothing(calls):
    model = made(BenchmarkL30)
    model.gemm.weight = Copied(model.gemm.weight.detach())
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    torch.testing.assert_close(model(input_of(L30)), plain(input_of(L30)))
    assert calls == [L30]


def test_default_device(calls):
    """PyTorch sets it by a mode that is told of functions, too; chains stay fused."""
    model = made(BenchmarkL30)
    fuse(model)
    with torch.device("cpu"):
        model(input_of(L30))
    assert calls == [L30]


REPLACED = {
    "of the chain": ("gemm", lambda: nn.Linear(IN, OUT)),
    "of the chain, by another class": ("hardtanh", nn.Tanh),
    "beside it": ("skip", lambda: nn.Linear(IN, OUT)),
    "by none": ("skip", lambda: None),
}


@pytest.mark.parametrize("name, replacement", REPLACED.values(), ids=REPLACED)
def test_replaced_children_are_gone(name, replacement):
    """From memory and from pickles; the model is what its forward makes of it now."""

    def forward(self, x):
        return self.hardtanh(self.groupnorm(self.gemm(x)))

    class Model(Parts):
        pass

    Model.forward = forward
    model = made(Model)
    fuse(model)
    model(input_of(L30))
    model.large = nn.Linear(100, 100)
    old = weakref.ref(getattr(model, name))
    setattr(model, name, replacement())
    model.double()
    gc.collect()
    assert old() is None
    torch.testing.assert_close(model(input_of(L30)), forward(model, input_of(L30)))


def size_of_pickle(model):
    return len(pickle.dumps(model))


def test_pickles_of_replaced_children():
    """They are as large as if the model had been fused afterwards, and load as what was saved."""
    model = made(BenchmarkL30)
    model.skip = nn.Linear(IN, 2000).double()
    model.gemm = nn.Linear(IN, OUT).double()
    fuse(model)
    model.skip = nn.Linear(IN, 1).double()
    unfused = copy.deepcopy(model)
    unfuse(unfused)
    assert size_of_pickle(model) < size_of_pickle(unfused) + 20_000
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(input_of(L30)), unfused(input_of(L30)))


@pytest.mark.parametrize("replacement", [nn.Tanh, lambda: nn.Hardtanh(-0.1, 0.1)], ids=["Tanh", "Hardtanh"])
def test_children_replaced_before_pickling(replacement):
    model = made(BenchmarkL30)
    fuse(model)
    model.hardtanh = replacement()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(each(input_of(L30)), in_full(model, input_of(L30)))


FORMATS = (torch.contiguous_format, torch.channels_last)
#: input's shape, kernel and output's channels, convolution's options: batches, channels and pixels of one among them
IMAGES = {
    "usual": ((2, 6, 4, 5), 3, 8, {}),
    "strided": ((2, 6, 4, 5), 3, 8, {"stride": 2, "padding": 1, "output_padding": 1}),
    "one sample": ((1, 6, 4, 5), 3, 8, {}),
    "one column": ((2, 6, 4, 1), (3, 1), 8, {}),
    "one tap": ((2, 6, 4, 5), 1, 8, {}),
    "one pixel": ((2, 6, 1, 1), 3, 8, {}),
    "one pixel after": ((2, 6, 1, 1), 1, 8, {}),
    "one channel": ((2, 1, 4, 5), 3, 8, {}),
    "one channel after": ((2, 6, 4, 5), 3, 1, {}),
    "groups": ((2, 6, 4, 5), 3, 4, {"groups": 2}),
}


def seen_strides(tensor):
    """Those that a view can see: of axes of length one they say nothing."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@by_dtype
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("input_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape, kernel, channels, options", IMAGES.values(), ids=IMAGES)
def test_strides_of_images(shape, kernel, channels, options, input_format, weight_format, dtype, calls):
    torch.manual_seed(1)
    convolution = nn.ConvTranspose2d(shape[1], channels, kernel, **options)
    model = nn.Sequential(convolution, nn.GELU(), nn.GroupNorm(1, channels)).to(dtype).to(memory_format=weight_format)
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    input = torch.randn(shape).to(dtype).to(memory_format=input_format)
    result, expected = model(input), plain(input)
    assert calls == [L19]
    torch.testing.assert_close(result, expected)
    assert seen_strides(result) == seen_strides(expected)
    assert_same(model, plain, input, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("input_format", FORMATS, ids=str)
def test_views_of_images(input_format):
    """A view works where the plain model's result has one, and raises where it has none."""
    model = made(BENCHMARKS[L19])
    input = input_of(L19).to(memory_format=input_format)
    plain = copy.deepcopy(model)
    fuse(model)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        assert_alike(*(outcome(each(input).permute(order).view, len(input), -1) for each in (model, plain)))


@pytest.mark.parametrize("chain", [L94, L75, L30])
@pytest.mark.parametrize("rows", [1, 5])
def test_strides_of_matrices(rows, chain):
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    for input in (input_of(chain)[:rows], input_of(chain).T.contiguous().T[:rows]):
        assert model(input).stride() == plain(input).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("input_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape, kernel, channels, options", IMAGES.values(), ids=IMAGES)
def test_strides_of_images_on_a_gpu(
    shape, kernel, channels, options, input_format, weight_format, dtype, calls, monkeypatch
):
    """All of them, without a GPU: PyTorch's fake tensors have a device, and strides, but no values."""
    monkeypatch.setattr(direct_convolution, "runs_hopper_convolutions", lambda device: False)
    with FakeTensorMode(), torch.no_grad():
        convolution = nn.ConvTranspose2d(shape[1], channels, kernel, **options, device="meta")
        model = nn.Sequential(convolution, nn.GELU(), nn.GroupNorm(1, channels, device="meta"))
        for layer in (model[0], model[2]):
            for name, value in list(layer.named_parameters()):
                format = weight_format if value.ndim == 4 else torch.contiguous_format
                fake = torch.empty(value.shape, dtype=dtype, device="cuda", memory_format=format)
                setattr(layer, name, nn.Parameter(fake))
        input = torch.empty(shape, dtype=dtype, device="cuda", memory_format=input_format)
        expected = model(input)
        assert fuse(model).replaced
        result = model(input)
    assert calls == [L19]
    assert seen_strides(result) == seen_strides(expected)
