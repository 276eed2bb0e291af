"""Promise: float32 products that share an operand become one in compiled graphs, forward and backward, where that moves
less; values, strides and what is kept for the backward pass stay.

A stand-in for Inductor applies the passes. ``tests/test_gpu_split.py`` runs Inductor.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ops import backend, joined_products, precision
from tests.ops.products import Compiler

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def all_pay(monkeypatch):
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(precision, "float32_by_cublas", lambda *sizes: False)


@pytest.fixture
def counted(monkeypatch):
    """The numbers of matrix products in joint graphs, before and after they were joined."""
    join, found = joined_products.join, []

    def observed(graph):
        before = _count(graph)
        join(graph)
        found.append((before, _count(graph)))

    observed.__module__ = join.__module__  # by whose source PyTorch's caches know the pass
    monkeypatch.setattr(joined_products, "join", observed)
    passes = [(name, observed if change is join else change) for name, change in backend._PASSES]
    monkeypatch.setattr(backend, "_PASSES", passes)
    return found


def _count(graph):
    return sum(node.target in (aten.mm.default, aten.addmm.default) for node in graph.nodes)


class Attention(nn.Module):
    def __init__(self, function=None, width=16, bias=True):
        super().__init__()
        self.function = function or partial(torch.softmax, dim=-1)
        self.query, self.key, self.value = (nn.Linear(width, width, bias) for _ in range(3))
        self.result = nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (each(x).view(batch, tokens, 2, -1).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = self.function(q @ k.mT / 3) @ v
        return x + self.result(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(16, 24, bias=False), nn.Linear(16, 40, bias=False)

    def forward(self, x):
        return F.silu(self.gate(x)).repeat(1, 1, 2)[..., :40] * self.value(x)


def checked(compiled, model, x):
    """A step of the compiled model, whose results and gradients are those of the model."""
    torch.manual_seed(1)
    results = [each(x) for each in (model, compiled)]
    weights = torch.randn_like(results[0])
    gradients = [torch.autograd.grad((each * weights).sum(), [x, *model.parameters()]) for each in results]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)
        assert got.stride() == expected.stride()


MODELS = {
    # one product less two forward, for the input's gradient and for weights'
    "attention": (lambda: Attention(), (12, 6)),
    "without bias": (lambda: Attention(bias=False), (12, 6)),
    "two layers": (lambda: nn.Sequential(Attention(), Attention()), (24, 12)),
    "gated": (Gated, (6, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step(counted, name):
    make, numbers = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 20, 16, requires_grad=True)
    checked(Compiler()(model, fullgraph=True), model, x)
    assert counted == [numbers]


def test_inference(counted):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 20, 16)
    with torch.no_grad():
        got = Compiler(trains=False)(model, fullgraph=True)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
    assert counted == [(4, 2)]


def test_frozen_weights(counted):
    """Their cat is no constant of the graph, and their gradients are not computed."""
    torch.manual_seed(0)
    model, x = Attention().requires_grad_(False), torch.randn(4, 20, 16, requires_grad=True)
    compiled = Compiler()(model, fullgraph=True)
    results = [torch.autograd.grad(each(x).square().sum(), x) for each in (model, compiled)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert counted == [(8, 4)]


def test_input_without_gradient(counted):
    """Gradients of weights are joined where they stand side by side for that of the input."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 20, 16)
    compiled = Compiler()(model, fullgraph=True)
    results = [torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (model, compiled)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert counted == [(9, 7)]


def test_open_sizes(counted):
    """Of one graph for all batches."""
    torch.manual_seed(0)
    model = Attention()
    compiled = Compiler()(model, fullgraph=True, dynamic=True)
    for batch in 4, 6, 3:
        x = torch.randn(batch, 20, 16, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        checked(compiled, model, x)
    assert counted == [(12, 6)]


def test_all_sizes_open(counted):
    """And read from a result."""
    torch.manual_seed(0)

    def function(x, v, u):
        y = x @ v
        return y.view(y.shape[0], -1, 2).sin().view(-1, 16) + (x @ u).cos()

    given = w(48, 16), w(16, 16), w(16, 16)
    compiled = Compiler(trains=False)(function, fullgraph=True, dynamic=True)
    for each in given[1:]:
        torch._dynamo.mark_static(each)
    for rows in 48, 60:
        x = w(rows, 16)
        torch.testing.assert_close(compiled(x, *given[1:]), function(x, *given[1:]), rtol=1e-4, atol=1e-4)
    assert counted == [(2, 1)]


def test_a_checkpoint(counted):
    torch.manual_seed(0)
    layers = nn.ModuleList([Attention(), Attention()])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            x = checkpoint(self.layers[0], x, use_reentrant=False)
            return self.layers[1](x)

    model, x = Model(), torch.randn(4, 20, 16, requires_grad=True)
    checked(Compiler()(model, fullgraph=True), model, x)
    assert counted == [(24, 12)]


def test_what_is_kept(monkeypatch):
    """For the backward pass: no weights side by side, and no more than without."""

    def kept():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(Attention(), Attention()), torch.randn(4, 20, 16, requires_grad=True)
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = Compiler()(model, fullgraph=True)(x)
        result.sum().backward()
        return sum(sizes.values())

    joined = kept()
    monkeypatch.setattr(joined_products, "join", lambda graph: None)
    assert joined <= kept()


def w(*shape):
    return torch.randn(*shape)


LEFT = {
    "results that are returned": lambda x, v, u: (x @ v, x @ u),
    "one alone": lambda x, v, u: (x @ v).sin() + (x.cos() @ u).sin(),
    "columns of another input": lambda x, v, u: (x @ v).sin() + (x.view(-1, 16) @ u)[: len(x)].sin(),
    "one that needs another's result": lambda x, v, u: (y := (x @ v).sin()) + (x @ (u * y.mean())).sin(),
    "matrices of more elements": lambda x, v, u: (x[:8] @ v).sin() + (x[:8] @ u).sin(),
    "another reader of a product": lambda x, v, u: (s := x.sin() @ v, (s + x.cos() @ u).sin())[1] + s,
    "terms that nobody computes elementwise": lambda x, v, u: (x @ v + x.flip(0) @ u).sin(),
    "sums of other shapes": lambda x, v, u: x.sin() @ v + (x.cos() @ u)[:1],
    "sums with a factor": lambda x, v, u: torch.add(x.sin() @ v, x.cos() @ u, alpha=2),
    "deep matrices": lambda x, v, u: x[:8].sin() @ v + x[:8].cos() @ u,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(counted, name):
    torch.manual_seed(0)
    function, given = LEFT[name], (w(48, 16), w(16, 16), w(16, 16))
    if name == "columns of another input":
        given = w(48, 16), w(16, 16), w(16, 16)
    got = Compiler(trains=False)(function, fullgraph=True)(*given)
    torch.testing.assert_close(got, function(*given), rtol=1e-4, atol=1e-4)
    ((before, after),) = counted
    assert before == after >= 2


JOINED = {
    "side by side": (lambda x, v, u: (x @ v).sin() + (x @ u).cos(), 1),
    "three of different widths": (lambda x, v, u: (x @ v).sum() + (x @ u).sin().sum() + (x @ u[:, :4]).sin().sum(), 2),
    "matrices as they lie": (lambda x, v, u: (x @ v.T).sin() + (x @ u).cos(), 1),
    "a matrix made between": (lambda x, v, u: (y := (x @ v).sin()) + (x @ (u * v.exp().mean())).cos() * y.mean(), 1),
    "views of one input": (lambda x, v, u: (x.view(4, 12, 16) @ v).sin().view(48, 16) + (x @ u).cos(), 1),
    "a sum": (lambda x, v, u: x.sin() @ v + x.cos() @ u, 1),
    "a sum with other terms": (lambda x, v, u: x.sin() @ v + x + x.cos() @ u, 1),
    "a sum of views": (lambda x, v, u: (x.sin() @ v).view(4, 12, 16) + (x.cos() @ u).view(4, 12, 16) + 1, 1),
    "a sum of different depths": (lambda x, v, u: x.sin() @ v + x.cos()[:, :4].clone() @ u[:4], 1),
    "sums within sums": (lambda x, v, u: (y := x.sin() @ v + x.cos() @ u) + (y.sin() @ v + y.cos() @ u), 2),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_is_joined(counted, name):
    torch.manual_seed(0)
    function, expected = JOINED[name]
    given = w(48, 16), w(16, 16), w(16, 16)
    got = Compiler(trains=False)(function, fullgraph=True)(*given)
    torch.testing.assert_close(got, function(*given), rtol=1e-4, atol=1e-4)
    ((_, after),) = counted
    assert after == expected


def test_a_sum_of_many_terms(counted):
    torch.manual_seed(0)

    def function(x, v, u):
        total = x.sin() @ v
        for _ in range(1200):
            total = total + x
        return total + x.cos() @ u

    given = w(48, 16), w(16, 16), w(16, 16)
    module = make_fx(function, tracing_mode="fake")(*given)
    joined_products.join(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*given), function(*given), rtol=1e-4, atol=1e-3)
    assert counted == [(2, 1)]


def test_tied_weights_gradients_are_left(counted):
    """A sum of products of activations: to put these side by side moves more than is saved."""
    torch.manual_seed(0)
    weight = torch.randn(16, 16, requires_grad=True)

    def function(x, y):
        return ((x @ weight).sin() * (y @ weight).cos()).sum()

    x, y = torch.randn(48, 16), torch.randn(48, 16)
    compiled = Compiler()(function, fullgraph=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(each(x, y), weight) for each in (compiled, function)), rtol=1e-4, atol=1e-4
    )
    assert counted == [(4, 4)]


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_the_setting_decides(counted, setting):
    torch.set_float32_matmul_precision(setting)
    function, _ = JOINED["side by side"]
    Compiler(trains=False)(function)(w(48, 16), w(16, 16), w(16, 16))
    assert counted == [(2, 2)]


def test_in_the_backend(counted):
    """Behind Inductor's own passes, which it runs with those of a user."""
    torch.manual_seed(0)
    model, x = Attention(torch.tanh), torch.randn(4, 20, 16, requires_grad=True)  # no attention that Inductor knows
    with torch.compiler.config.patch(force_disable_caches=True):
        checked(torch.compile(model, backend="normfuse", fullgraph=True), model, x)
    assert counted == [(9, 3)]
