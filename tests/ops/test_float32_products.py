"""Promise: in compiled graphs, and in eager code in ``faster_float32``, float32 products of known sizes that pay become
calls of this project's, and their values stay.

A stand-in for Inductor applies the pass to the graphs behind autograd. ``tests/test_gpu_split.py`` runs Inductor.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import ops
from ops import float32_products, precision
from ops.matrix_products import PRODUCT, PRODUCTS_OF_ONE
from tests.ops.products import Called, Compiler, left, taken

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten


@pytest.fixture
def compiled(monkeypatch):
    """Compiles a function as if all products paid, and keeps the targets of its graphs' nodes."""
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    return Compiler()


MODELS = {
    "with bias": (lambda: nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16)), [2, 4]),
    "without bias": (lambda: nn.Linear(32, 48, bias=False), [1, 2]),
    "attention": (lambda: Attention(), [2, 4]),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, input):
        return self.attention(input, input, input, need_weights=False)[0]


def check_step(compiled, make):
    """A model's results and gradients, and how they lie, are as in eager code."""
    torch.manual_seed(0)
    model = make()
    input = torch.randn(2, 20, 32, requires_grad=True)
    function = compiled(model, fullgraph=True)
    results = [each(input) for each in (model, function)]
    gradients = [torch.autograd.grad(each.square().sum(), [input, *model.parameters()]) for each in results]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert got.stride() == expected.stride()
    assert left(compiled.graphs) == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_step(compiled, name):
    """Forward and backward: the products of each layer and of its gradients."""
    make, counts = MODELS[name]
    check_step(compiled, make)
    assert taken(compiled.graphs) == counts


class Matrix(nn.Module):
    """A layer whose weight lies as PyTorch's does not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48))

    def forward(self, input):
        return (input @ self.weight).sin()


class Recomputed(nn.Module):
    """What the second layer reads is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, input):
        return checkpoint(lambda each: self.second(self.first(each).tanh()), input, use_reentrant=False)


PAIRED = {
    "layers": (MODELS["with bias"][0], [0, 2]),
    "a matrix": (Matrix, [0, 1]),
    "no bias": (MODELS["without bias"][0], [0, 1]),
    "recomputed": (Recomputed, [0, 2]),
}


@pytest.fixture
def split(monkeypatch):
    """Lets products be made of split operands, but that the interpreter multiplies them whole."""
    monkeypatch.setattr(precision, "multiplier", lambda *operands, **options: "kernel")


@pytest.mark.parametrize("name", PAIRED)
def test_gradients_of_a_layer_are_one_call(compiled, split, name):
    """So the gradient that both are made of is split once."""
    make, counts = PAIRED[name]
    check_step(compiled, make)
    assert [graph.count(PRODUCTS_OF_ONE) for graph in compiled.graphs] == counts
    assert compiled.graphs[1].count(PRODUCT) == (name == "recomputed")


NO_PAIRS = {
    "the same axis": lambda a, b: (a @ b).sin() + (a @ b.cos()).sin(),
    "one is the other's operand": lambda a, b: a.T @ (a @ b),
    "results between": lambda a, b: (a @ b).sin() + a.T @ b.cos(),
    "another matrix": lambda a, b: a @ b + a.sin().T @ b,
    "another product between": lambda a, b: a @ b + b.cos() @ b.sin() + a.T @ b,
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pair(compiled, split, name):
    function, matrices = NO_PAIRS[name], [torch.randn(24, 24) for _ in range(2)]
    torch.testing.assert_close(compiled(function)(*matrices), function(*matrices), rtol=1e-4, atol=1e-4)
    assert compiled.graphs[0].count(PRODUCT) >= 2 and compiled.graphs[0].count(PRODUCTS_OF_ONE) == 0


def test_a_pair_of_which_registers_make_one_is_none(compiled, monkeypatch):
    """They would split no matrix."""
    monkeypatch.setattr(precision, "multiplier", lambda a, b, **options: "kernel" if len(a) == 24 else "registers")
    graph = make_fx(lambda a, b, c: (a @ b, a.T @ c), tracing_mode="fake")(
        torch.randn(24, 20), torch.randn(20, 16), torch.randn(24, 12)
    ).graph
    float32_products.take_over(graph)
    targets = [node.target for node in graph.nodes]
    assert targets.count(PRODUCT) == 2 and PRODUCTS_OF_ONE not in targets


PAIRS = {
    "first, first.T": lambda a, b, c: (a @ b, a.T @ c),
    "second, second.T": lambda a, b, c: (b @ a, c @ a.T),
    "first, second": lambda a, b, c: (a @ b, c @ a),
    "first.T, second.T": lambda a, b, c: (a.T @ b, c @ a.T),
    "of products": lambda a, b, c: ((a @ b) @ c, (a @ b).T @ (b @ c)),
    "three": lambda a, b, c: (a @ b, a.T @ c, a @ c),
    "squared": lambda a, b, c: (a @ a, b @ c),
    "turned twice": lambda a, b, c: (a.T @ b, (a.T.permute(0, 1).T.contiguous().permute(1, 0).T) @ c),
    "views of views": lambda a, b, c: (a @ b, a.T @ c.view(12, 48).view(24, 24).T),
    "operands afterwards": lambda a, b, c: (a @ b, a.T @ c.sin()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_places_of_a_matrix(compiled, split, name, dynamic):
    function, matrices = PAIRS[name], [torch.randn(24, 24) for _ in range(3)]
    for expected, got in zip(function(*matrices), compiled(function, dynamic=dynamic)(*matrices), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert got.stride() == expected.stride()
    assert compiled.graphs[0].count(PRODUCTS_OF_ONE) == (name != "squared") and left(compiled.graphs) == 0


def test_a_view_of_an_open_size_stays_behind_it(compiled, split):
    def function(a, b, c):
        return a @ b, a.T @ c.view(a.shape[0], -1)

    given = torch.randn(24, 20), torch.randn(20, 16), torch.randn(6, 4, 16)
    torch.testing.assert_close(compiled(function, dynamic=True)(*given), function(*given), rtol=1e-4, atol=1e-4)
    assert compiled.graphs[0].count(PRODUCTS_OF_ONE) == 1


def test_any_strides(compiled):
    """Operands that are parts of others, transposed or repeated, as einsum and views make them."""

    def function(a, b, c):
        return a[:, 1:17] @ b.T, torch.addmm(c, a[::2, :16], b.T[:, :20]), torch.einsum("ij,kj->ik", a[:, :16], b)

    torch.manual_seed(0)
    given = torch.randn(24, 40), torch.randn(32, 16), torch.randn(20)
    for expected, got in zip(function(*given), compiled(function)(*given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert taken(compiled.graphs) == [3]


LEFT = [
    lambda a, b, c: torch.addmm(c, a, b / 0, alpha=0),
    lambda a, b, c: torch.addmm(c, a, b, beta=True),
    lambda a, b, c: torch.addmm(c, a, b, alpha=2 + 0j),
    lambda a, b, c: a.double() @ b.double(),
    lambda a, b, c: a.bfloat16() @ b.bfloat16(),
    lambda a, b, c: a.int() @ b.int(),
    lambda a, b, c: torch.bmm(torch.stack([a, a]), torch.stack([b, b])),
]


@pytest.mark.parametrize("function", LEFT)
def test_what_is_left(compiled, function):
    torch.manual_seed(0)
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    torch.testing.assert_close(compiled(function)(*given), function(*given))
    assert taken(compiled.graphs) == [0] and left(compiled.graphs) == 1


@pytest.mark.parametrize("setting, count", [("highest", 1), ("high", 0), ("medium", 0)])
def test_the_setting_decides(compiled, setting, count):
    torch.set_float32_matmul_precision(setting)
    compiled(torch.mm)(torch.randn(24, 16), torch.randn(16, 32))
    assert taken(compiled.graphs) == [count]


def test_open_sizes(compiled):
    """One graph for all: forward, and the gradients, of which one has open terms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8, bias=False))
    function = compiled(model, dynamic=True, fullgraph=True)
    for rows in 24, 7, 50:
        input = torch.randn(rows, 16, requires_grad=True)
        torch._dynamo.mark_dynamic(input, 0)
        results = [each(input) for each in (model, function)]
        gradients = [torch.autograd.grad(each.square().sum(), [input, *model.parameters()]) for each in results]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert taken(compiled.graphs) == [2, 4] and left(compiled.graphs) == 0


@pytest.mark.parametrize(
    "function, given",
    [
        (torch.mm, [torch.randn(24, 16), torch.randn(16, 32)]),
        (lambda a, b: a.T @ b, [torch.randn(24, 16), torch.randn(24, 32)]),
        (lambda a, b: a @ b.T, [torch.randn(24, 16), torch.randn(40, 16)]),
    ],
)
def test_where_all_sizes_are_open(compiled, function, given):
    torch.testing.assert_close(compiled(function, dynamic=True)(*given), function(*given), rtol=1e-5, atol=1e-5)
    assert taken(compiled.graphs) == [1]


def test_a_size_that_values_decide_is_left(compiled):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = compiled(lambda a, b: a[a[:, 0] > 0] @ b, fullgraph=True)
        given = torch.randn(24, 16), torch.randn(16, 32)
        torch.testing.assert_close(function(*given), given[0][given[0][:, 0] > 0] @ given[1])
    assert taken(compiled.graphs) == [0]


@pytest.mark.parametrize("function", [lambda a, b, c: a @ b, lambda a, b, c: torch.addmm(c[:, None].T, a, b)])
def test_what_does_not_pay_is_left(compiled, monkeypatch, function):
    monkeypatch.setattr(precision, "multiplies_by_cublas", lambda *_, **__: True)
    compiled(function)(torch.randn(24, 16), torch.randn(16, 32), torch.randn(32))
    assert taken(compiled.graphs) == [0] and left(compiled.graphs) == 1 and aten.add.Tensor not in compiled.graphs[0]


@pytest.fixture
def called(monkeypatch):
    """What is called in its context, as if all products paid."""
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    return Called()


@pytest.mark.parametrize("name", MODELS)
def test_an_eager_step(called, name):
    make, counts = MODELS[name]
    torch.manual_seed(0)
    model, input = make(), torch.randn(2, 20, 32, requires_grad=True)
    expected = torch.autograd.grad(model(input).square().sum(), [input, *model.parameters()])
    with called, ops.faster_float32():
        gradients = torch.autograd.grad(model(input).square().sum(), [input, *model.parameters()])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    assert taken(called.graphs) == [sum(counts)] and left(called.graphs) == 0


def test_eager_functions(called):
    torch.manual_seed(0)
    a, b, c = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    calls = [
        lambda: a @ b,
        lambda: torch.matmul(a.view(2, 12, 16), b),
        lambda: torch.einsum("ik,kj->ij", a, b),
        lambda: torch.bmm(a[None], b[None]),
        lambda: torch.addmm(c, a, b),
        lambda: nn.functional.linear(a, b.T, c),
    ]
    for number, call in enumerate(calls, 1):
        with called, ops.faster_float32(), torch.no_grad():
            result = call()
        torch.testing.assert_close(result, call(), rtol=1e-5, atol=1e-5)
        assert taken(called.graphs) == [number]
    assert left(called.graphs) == 0


@pytest.mark.parametrize("function", LEFT)
def test_what_eager_code_leaves(called, function):
    torch.manual_seed(0)
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    with called, ops.faster_float32():
        result = function(*given)
    torch.testing.assert_close(result, function(*given))
    assert taken(called.graphs) == [0] and left(called.graphs) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, c: nn.functional.linear(a[:, :12], b.T),
        lambda a, b, c: torch.mm(a, torch.cat([b, b])),
        lambda a, b, c: torch.mm(a, b.double()),
        lambda a, b, c: torch.mm(a, b.bfloat16()),
        lambda a, b, c: torch.mm(a, b.cfloat()),
        lambda a, b, c: torch.addmm(c.double(), a, b),
        lambda a, b, c: torch.addmm(c, a[None], b[None]),
        lambda a, b, c: torch.bmm(a[None], torch.stack([b, b])),
        lambda a, b, c: torch.bmm(a[None], b[None, :8]),
        lambda a, b, c: torch.mm(a[None], b),
    ],
)
def test_what_pytorch_refuses_is_refused(called, call):
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    with pytest.raises(RuntimeError) as expected:
        call(*given)
    with ops.faster_float32(), pytest.raises(RuntimeError) as found:
        call(*given)
    assert str(found.value) == str(expected.value)


def test_other_layouts(called):
    """Sparse and nested tensors say that they are plain ones."""
    a, b = torch.randn(24, 16).relu(), torch.randn(16, 8)
    nested = [torch.nested.nested_tensor([each]) for each in (a, b)]
    with called, ops.faster_float32():
        for each in a.to_sparse_csr(), a.to_sparse():
            torch.testing.assert_close(each @ b, a @ b)
        torch.testing.assert_close(torch.bmm(*nested)[0], a @ b)
    assert taken(called.graphs) == [3]  # the expected ones


def test_inference_mode(called):
    model, input = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), torch.randn(2, 24, 16)
    with torch.inference_mode():
        expected = model(input) @ model[0].weight.T
        with called, ops.faster_float32():
            result = model(input) @ model[0].weight.T
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert taken(called.graphs) == [3] and left(called.graphs) == 0


def test_higher_order_operators(called):
    def function(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).cos(), (x, w))

    given = torch.randn(24, 16), torch.randn(16, 8)
    with ops.faster_float32():
        result = function(*given)
    torch.testing.assert_close(result, function(*given), rtol=1e-5, atol=1e-5)


def test_outside_all_is_pytorchs(called, monkeypatch):
    """Behind the context, at another precision, where products are turned off, and subclasses of tensors."""
    layer, input = nn.Linear(16, 32), torch.randn(24, 16)

    class Other(torch.Tensor):
        pass

    with called:
        with ops.faster_float32():
            result = layer(input.as_subclass(Other))
            assert type(result) is Other
        layer(input).sum().backward()
        torch.set_float32_matmul_precision("high")
        with ops.faster_float32():
            layer(input)
        torch.set_float32_matmul_precision("highest")
        monkeypatch.setattr(float32_products, "IS_ON", False)
        with ops.faster_float32():
            layer(input)
    assert taken(called.graphs) == [0]


ON_THE_CPU = """
import torch
import ops

layer, input = torch.nn.Linear(16, 8), torch.randn(4, 16, requires_grad=True)
(expected,) = torch.autograd.grad(layer(input).square().sum(), input)
with ops.faster_float32():
    torch.testing.assert_close(torch.autograd.grad(layer(input).square().sum(), input), (expected,))
compiled = torch.compile(layer, backend="normfuse")
torch.testing.assert_close(torch.autograd.grad(compiled(input).square().sum(), input), (expected,))
"""


def test_on_the_cpu():
    """Without Triton's interpreter, and where there is no GPU that Triton knows, all is PyTorch's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", ON_THE_CPU], check=True, env=environment)


def test_compiled_functions_run_in_the_context(compiled):
    function, given = compiled(torch.mm), (torch.randn(24, 16), torch.randn(16, 32))
    with ops.faster_float32():
        result = function(*given)
    torch.testing.assert_close(result, torch.mm(*given), rtol=1e-5, atol=1e-5)
    assert taken(compiled.graphs) == [1]


@pytest.mark.parametrize("value, is_there", [("0", False), ("off", False), ("1", True), (None, True)])
def test_the_switch(value, is_there, monkeypatch):
    words = "from ops.backend import _PASSES; print('take_over' in str(_PASSES['post_grad_custom_post_pass']))"
    if value is None:
        monkeypatch.delenv(float32_products.SWITCH_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(float32_products.SWITCH_VARIABLE, value)
    assert subprocess.check_output([sys.executable, "-c", words], text=True).strip() == str(is_there)
