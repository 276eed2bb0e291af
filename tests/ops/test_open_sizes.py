"""Promise: a size that a compiler leaves open stays open, whatever it is at first; what data settle is left alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from tests.ops.opened import Opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NORM, ROWS = nn.GroupNorm(4, 8), nn.LayerNorm(8)
CONVOLUTION, CHANNELS = nn.Conv2d(4, 8, 3), nn.Parameter(torch.randn(8))
ADD_CHANNELS = nn.Parameter(torch.randn(8, 1, 1))


def film(x, embedding):
    scale, shift = embedding[:, :, None, None].chunk(2, 1)
    return NORM(x) * (1 + scale) + shift


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


MATRIX, TAPS, WIDE = draw(8, 8), draw(8, 8, 3, 3), draw(8194, 4)

#: Function, shapes of its inputs for a size, how many chains it has.
BATCHES = {
    "convolution": (lambda x: NORM(CONVOLUTION(x)), lambda n: [(n, 4, 5, 5)], 1),
    "vector before": (lambda x: NORM(x + ADD_CHANNELS), lambda n: [(n, 8, 4, 4)], 1),
    "vector behind": (lambda x: NORM(x) * ADD_CHANNELS, lambda n: [(n, 8, 4, 4)], 1),
    "rows and a vector": (lambda x: F.silu(ROWS(x + CHANNELS)) * 2, lambda n: [(n, 8)], 1),
    "product and residual": (lambda x, y: torch.addmm(y, x, MATRIX.t()).sigmoid(), lambda n: [(n, 8), (n, 8)], 0),
    "groups of rows": (lambda x: NORM(x + CHANNELS), lambda n: [(n, 8)], 1),
    "residual before rows": (lambda x, y: F.silu(ROWS(x + y)) * 2, lambda n: [(n, 3, 8), (n, 3, 8)], 1),
    "residual behind rows": (lambda x, y: F.silu(ROWS(x)) * y, lambda n: [(n, 3, 8), (n, 3, 8)], 1),
    "scale and shift of samples": (film, lambda n: [(n, 8, 4, 4), (n, 16)], 1),
    "embedding, one pixel": (lambda x, t: F.silu(NORM(x + t[:, :, None, None])), lambda n: [(n, 8, 1, 1), (n, 8)], 1),
}


@pytest.mark.parametrize("sizes", [(8, 5, 3), (3, 5, 8)], ids=["as channels first", "as channels later"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, sizes):
    """One graph for all, forward and backward, and no size is settled, though it be that of the channels."""
    function, shapes, chains = BATCHES[name]
    compiled = Opened(function)
    for size in sizes:
        inputs = [draw(*shape, seed=size) for shape in shapes(size)]
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 0)
        result, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        gradients = (torch.autograd.grad(each.square().sum(), inputs) for each in (result, expected))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
        assert len(compiled.chains) == chains and len(compiled.graphs) == 2


add, mul, silu = (getattr(ops.pointwise, name) for name in ("add", "mul", "silu"))
FUNCTIONS = {
    "residual": (lambda x, y: ops.layer_norm(x, 8, before=(add(y),)), [(3, 8), (3, 8)]),
    "vector": (lambda x: ops.layer_norm(x, 8, after=(mul(CHANNELS),)), [(8,)]),
    "sample": (lambda x, t: ops.group_norm(x, 4, before=(add(t),)), [(8, 4, 4), (8,)]),
    "sample behind": (lambda x, t: ops.group_norm(x, 4, after=(mul(t),)), [(8, 4, 4), (8, 1, 1)]),
    "product": (lambda x, y: ops.linear_layer_norm(x, MATRIX, None, after=(add(y), silu())), [(8,), (8,)]),
    "wide groups": (lambda x: ops.linear_group_norm(x, WIDE, None, 1), [(4,)]),
    "row minimum": (lambda x: ops.linear_group_norm_min(x, MATRIX, None, 4, CHANNELS, CHANNELS), [(8,)]),
    "convolution": (lambda x, t: ops.conv2d_group_norm(x, TAPS, None, 4, before=(add(t),)), [(8, 5, 5), (8,)]),
}


@pytest.mark.parametrize(
    "name, sizes",
    [*((name, (8, 5)) for name in FUNCTIONS), *((name, (3, 8)) for name in FUNCTIONS if name != "wide groups")],
)
def test_functions(name, sizes):
    """The same of this project's functions under any compiler."""
    function, shapes = FUNCTIONS[name]
    compiled = torch.compile(function, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for size in sizes:
        inputs = [draw(size, *shape, seed=size) for shape in shapes]
        for each in inputs:
            torch._dynamo.mark_dynamic(each, 0)
        result, expected = compiled(*inputs), function(*inputs)
        assert torch.equal(result, expected)
        for found, other in zip(
            *(torch.autograd.grad(y.square().sum(), inputs) for y in (result, expected)), strict=True
        ):
            assert torch.equal(found, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


CHANNELS_OPEN = {
    "group norm": (lambda x, w: F.silu(F.group_norm(x, 4, w)), lambda n: [(2, n, 4, 4), (n,)]),
    "linear": (lambda x, w: F.silu(F.linear(x, w, w[:, 0])), lambda n: [(4, 8), (n, 8)]),
    "layer norm": (lambda x, w: F.silu(F.layer_norm(x, w.shape, w)), lambda n: [(3, n), (n,)]),
}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CHANNELS_OPEN)
def test_channels(name, trains):
    """An open number of channels, which the words of gradients have, leaves the norm or product to the compiler."""
    function, shapes = CHANNELS_OPEN[name]
    compiled = Opened(function)
    for size in (8, 16):
        x, weight = (draw(*shape, seed=size).requires_grad_(trains) for shape in shapes(size))
        torch._dynamo.mark_dynamic(weight, 0)
        if name != "linear":
            torch._dynamo.mark_dynamic(x, 1)
        result = compiled(x, weight)
        torch.testing.assert_close(result, function(x, weight), rtol=1e-4, atol=1e-5)
        if trains:
            result.square().sum().backward()
    assert len(compiled.chains) == (not trains) and len(compiled.graphs) == 1 + trains


BY_DATA = {
    "convolution": (lambda x, mask: F.silu(NORM(CONVOLUTION(x[mask]))), (9, 4, 5, 5)),
    "samples": (lambda x, mask: F.silu(NORM(x[mask] + ADD_CHANNELS)), (9, 8, 3, 3)),
    "pixels": (lambda x, mask: F.silu(NORM(x[:, :, mask])), (2, 8, 9)),
    "rows": (lambda x, mask: F.silu(ROWS(x[mask] + CHANNELS)) * 2, (9, 8)),
    "beside": (lambda x, mask: F.silu(NORM(x)).flatten()[x.flatten() > 0.0], (9, 8, 3, 3)),
}


@pytest.mark.parametrize("name", BY_DATA)
def test_sizes_by_data(name):
    function, shape = BY_DATA[name]
    x, mask = draw(*shape).detach(), torch.arange(9) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = Opened(function, fullgraph=True)
        torch.testing.assert_close(compiled(x, mask), function(x, mask), rtol=1e-4, atol=1e-5)
    assert len(compiled.chains) == (name == "beside")


@pytest.mark.parametrize(
    "split",
    [lambda x: x.chunk(2, 1), lambda x: x.split([3, 5], 1), lambda x: x.unbind(1)],
    ids=["chunk", "split", "unbind"],
)
@pytest.mark.parametrize("which", [slice(None), slice(1, 2)], ids=["all", "one"])
def test_parts_of_an_image(which, split):
    """They lie in memory as PyTorch's do, in one memory."""
    layers = copy.deepcopy(nn.Sequential(CONVOLUTION, NORM, nn.SiLU())).bfloat16()
    function, x = lambda x: split(layers(x))[which], draw(2, 4, 6, 6).bfloat16()
    found, expected = Opened(function)(x), function(x)
    assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in expected]
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
