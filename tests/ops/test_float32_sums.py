"""Promise: what is added to a float32 product that pays, in a compiled graph or in ``faster_float32``, stands behind a
call of this project's, and values and strides stay PyTorch's."""

import pytest
import torch
from torch import nn

import ops
from ops import precision
from tests.ops.products import Called, Compiler, left, taken

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten

SUMS = {
    "beta": lambda a, b, c: torch.addmm(c, a, b, beta=0.5),
    "alpha": lambda a, b, c: torch.addmm(c, a, b, alpha=2),
    "without what is added": lambda a, b, c: torch.addmm(c / 0, a, b, beta=0, alpha=-1),
    "matrix": lambda a, b, c: torch.addmm(a @ b, a, b),
    "transposed": lambda a, b, c: torch.addmm((b.T @ a.T).T, a, b),
    "column": lambda a, b, c: torch.addmm(a[:, :1], a, b, beta=2, alpha=3),
    "row": lambda a, b, c: torch.addmm(c[None], a, b),
    "number": lambda a, b, c: torch.addmm(c[0], a, b),
    "one number": lambda a, b, c: torch.addmm(c[:1], a, b),
    "batch": lambda a, b, c: torch.baddbmm(c, a[None], b[None], beta=0.5),
    "residual": lambda a, b, c: torch.tanh(a @ b) + (a * 2) @ b,
}


@pytest.fixture(autouse=True)
def all_pay(monkeypatch):
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)


@pytest.fixture
def compiled():
    return Compiler()


@pytest.fixture(params=["compiled", "eager"])
def run(request):
    """Calls a function of ``given``, compares it with PyTorch's, and tells how many products were taken and left."""

    def compared(function, given):
        if request.param == "eager":
            runs = Called()
            with runs, ops.faster_float32():
                result = function(*given)
        else:
            runs = Compiler()
            result = runs(function)(*given)
        expected = function(*given)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        assert result.stride() == expected.stride()
        return taken(runs.graphs), left(runs.graphs)

    return compared


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_stands_behind_its_product(run, name):
    """Whatever is added, with factors or without: mostly a residual, or another gradient of the same weight."""
    torch.manual_seed(0)
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    assert run(SUMS[name], given) == ([1 + (name in ("matrix", "transposed", "residual"))], 0)


def test_a_layers_bias_is_added_by_the_product(compiled):
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    compiled(lambda a, b, c: torch.addmm(c, a, b))(*given)
    assert taken(compiled.graphs) == [1] and aten.add.Tensor not in compiled.graphs[0]


@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_factors_of_open_sizes(compiled, name):
    """One graph for several, in which none may be zero: that leaves something out."""

    def function(added, a, b, factor):
        return getattr(torch, name)(added, a, b, alpha=a.shape[-2] - 7, beta=factor - 1)

    batch = (2,) if name == "baddbmm" else ()
    call = compiled(function, dynamic=True)
    for rows, factor, value in ((24, 3, 1.0), (7, 3, 1.0), (24, 1, torch.nan)):
        a, b, added = torch.randn(*batch, rows, 16), torch.randn(*batch, 16, 32), torch.full((*batch, rows, 32), value)
        if rows == 7:
            a[..., 0, 0] = torch.inf
        torch.testing.assert_close(call(added, a, b, factor), function(added, a, b, factor), rtol=1e-5, atol=1e-4)


def test_factors_beyond_float32(run):
    """PyTorch refuses them."""
    given = torch.randn(24, 16), torch.randn(16, 32), torch.randn(32)
    for factors in ({"alpha": 1e300}, {"beta": 1e300}):
        with pytest.raises(RuntimeError, match="without overflow"):
            run(lambda a, b, c, factors=factors: torch.addmm(c, a, b, **factors), given)


def test_both_gradients_of_one_weight(compiled):
    """As of a weight that embeds tokens and makes logits."""
    torch.manual_seed(0)
    weight = torch.randn(40, 16, requires_grad=True)
    tokens = torch.arange(24) % 7

    def function(weight):
        return torch.tanh(nn.functional.embedding(tokens, weight)) @ weight.T

    gradients = [torch.autograd.grad(each(weight).square().sum(), weight) for each in (function, compiled(function))]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert taken(compiled.graphs) == [1, 2] and left(compiled.graphs) == 0
