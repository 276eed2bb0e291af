"""Promise: what a model does around a chain is done as without it: writes, random numbers, views, sums of gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ops
from ops import precision, products
from tests.ops.graphs import check, compiled, draw

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Images(nn.Module):
    """A convolution whose result lies otherwise than ours of its chain, and what another convolution makes of it."""

    def __init__(self, follows):
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)])
        self.register_buffer("shift", torch.ones(8, 1, 1))
        self.follows = follows

    def forward(self, input):
        return self.follows(self, F.silu(self.norms[0](self.first(input))))


def test_an_earlier_value_in_addcmul():
    def function(x, w):
        y = F.layer_norm(x, (16,))
        return torch.addcmul(y, F.silu(y), w)

    check(function, [draw(6, 16), draw(16)], None)
    check(lambda x: torch.addcmul(F.layer_norm(x, (16,)), x, x), [draw(6, 16)], None)


@pytest.mark.parametrize("name", ["expand_as", "view_as"])
def test_shapes_without_dimensions(name):
    check(lambda x, s: F.silu(F.layer_norm(x, (16,)) + getattr(s, name)(s.sum())), [draw(6, 16), draw()], None)


def test_dtypes_behind_an_autocast_region():
    def follows(self, y):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.add(F.group_norm(self.first(y), 4), self.shift)
        return torch.sum(F.silu(F.group_norm(self.second(y), 2)), (2, 3))

    model, input = Images(follows), draw(2, 8, 5, 5)
    fused, found = compiled(model)
    assert fused(input).dtype == model(input).dtype == torch.float32
    assert len(found) == 3


def test_writes_behind_values_that_lie_otherwise():
    """The next chain's gradients are known, and with them what must not be written to."""

    def follows(self, y):
        z = F.gelu(torch.add(F.silu(self.norms[1](self.second(y))), self.shift))
        result = torch.sum(z, (2, 3))
        self.shift.add_(1.0)
        return result

    model, input = Images(follows), draw(2, 8, 5, 5)
    fused, _ = compiled(copy.deepcopy(model))
    results = [(result, *torch.autograd.grad(result.sum(), input)) for result in (model(input), fused(input))]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@torch.library.custom_op("normfuse_tests::increase", mutates_args=("value",))
def increase(value: torch.Tensor) -> None:
    value.add_(1)


@torch._dynamo.allow_in_graph
def allowed(value):
    return value.add_(1)


def in_a_checkpoint(value):
    return checkpoint(lambda each: each.add_(1).sum(), value, use_reentrant=False)


@pytest.mark.parametrize("write", [torch.ops.normfuse_tests.increase, allowed, in_a_checkpoint])
def test_unknown_functions_that_write_behind_a_chain(write):
    def function(x, v):
        y = F.silu(F.layer_norm(x, (16,)) + v)
        write(v)
        return y * 2

    check(function, [draw(6, 16), draw(16, grad=False)], None)


def test_a_checkpoint_that_writes_nothing():
    """Chains are found before one that has the same parameter."""

    def function(x, v):
        y = F.silu(F.layer_norm(x, (16,)) + v)
        return y, checkpoint(lambda each, other: each.exp() * other, y, v, use_reentrant=False)

    fused, found = compiled(function)
    fused(draw(6, 16), draw(16))
    assert found == ["group_norm -> mul -> add -> add -> silu"]


def test_a_transposed_matrix_without_gradients():
    def function(x, w):
        with torch.no_grad():
            transposed = w.t()
        return F.silu(x @ transposed)

    check(function, [draw(6, 16), draw(32, 16)], None)


def test_a_transposed_matrix_that_is_a_result():
    """Its own gradient is then asked for."""

    def function(x, w):
        transposed = w.t()
        return F.silu(x @ transposed), transposed

    fused, _ = compiled(function)
    result, transposed = fused(draw(6, 16), draw(32, 16))
    (gradient,) = torch.autograd.grad(result.sum(), transposed)
    assert gradient.shape == (16, 32)


@pytest.mark.parametrize("many", [1, 2, 8])
def test_sums_of_gradients_under_autocast(many):
    """PyTorch adds up those of a float32 value in float32."""

    def function(x, w, v, *others):
        y = F.softplus(F.linear(x, w) + v)
        return torch.cat([F.linear(y, each) for each in others], 1)

    def in_autocast(*arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*arguments)

    arguments = [draw(64, 32), draw(48, 32), draw(48), *(draw(16 + each, 48) for each in range(many))]
    arguments = [each.detach().bfloat16().float().requires_grad_() for each in arguments]
    gradient = draw(64, sum(len(each) for each in arguments[3:]), grad=False)

    def gradients(function, dtype=torch.float32):
        leaves = [each.detach().to(dtype).requires_grad_() for each in arguments]
        result = function(*leaves)
        return torch.autograd.grad(result, leaves, gradient.to(result.dtype))

    fused, found = compiled(in_autocast)
    ours, theirs, exact = gradients(fused), gradients(in_autocast), gradients(function, torch.float64)
    assert found == ["linear -> add -> add -> softplus"]
    for one, other, expected in zip(ours, theirs, exact, strict=True):
        assert (one - expected).norm() <= 1.1 * (other - expected).norm()


@pytest.mark.parametrize(
    "draws", [lambda y: F.dropout(y, 0.5), lambda y: y * torch.rand_like(y), lambda y: F.alpha_dropout(y, 0.5, True)]
)
def test_random_numbers_in_the_order_of_memory(draws):
    def follows(self, y):
        return self.first(draws(y))

    model, input = Images(follows), draw(2, 8, 5, 5)
    fused, _ = compiled(model)
    results = []
    for each in (model, fused):
        torch.manual_seed(0)
        results.append(each(input))
    torch.testing.assert_close(*results)


def test_a_product_that_is_to_be_wider(monkeypatch):
    """cuBLAS would give it the input's dtype."""
    monkeypatch.setattr(precision, "multiplies_by_cublas", lambda *_, **__: True)
    input, weight = (draw(*shape, grad=False).bfloat16() for shape in ((4, 16), (32, 16)))
    assert products.affine(input, weight, (), (4, 32), torch.float32).dtype == torch.float32


def test_explained_times_of_a_pass_that_was_not_watched():
    """There is no forward pass then to time beside it, or there is one for two backward passes."""
    x = draw(4, 16)
    before = ops.layer_norm(x, 16)
    explanation = ops.explain(lambda: ops.layer_norm(before, 16), measure_times=True)
    assert [each.pytorch_seconds is not None for each in explanation.calls] == [True, True, False]

    def differentiates(value):
        y = ops.layer_norm(value, 16)
        torch.autograd.grad(y.sum(), value, retain_graph=True)
        return y

    explanation = ops.explain(differentiates, x, measure_times=True)
    assert [each.direction for each in explanation.calls] == ["forward", "backward", "backward"]
    assert all(each.pytorch_seconds for each in explanation.calls)
