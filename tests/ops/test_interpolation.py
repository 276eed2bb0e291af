"""Promise: the backend's ``F.interpolate`` has PyTorch's values and gradients, and gathers both."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._decomp import decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from ops.fingerprint import fingerprint
from ops.rewriting import rewrite
from tests.ops.programs import run

OPERATOR = torch.ops.normfuse.interpolate.default
MODES = {
    1: ["nearest", "nearest-exact", "linear"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic"],
    3: ["nearest", "nearest-exact", "trilinear"],
}


def gathered(input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None):
    text = f"{mode} | {fingerprint([])}"
    return OPERATOR(input, text, size, scale_factor, align_corners, recompute_scale_factor)


def as_compiled(input, size, scale_factor, mode, align_corners, recompute_scale_factor):
    """What compiled graphs compute, whose gradient PyTorch derives. (On the CPU, scales that are near 1 or 2 are these
    in ``F.interpolate``.)"""
    if mode == "bicubic":
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor)
    size = size or [int(each * scale) for each, scale in zip(input.shape[2:], scale_factor, strict=True)]
    scales = [None] * len(size) if recompute_scale_factor or not scale_factor else scale_factor
    if mode.startswith("nearest"):
        return decompositions._upsample_nearest(input, size, scales, exact=mode == "nearest-exact")
    return decompositions._upsample_linear(input, size, align_corners, scales)


@st.composite
def interpolations(draw):
    dimensions = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(MODES[dimensions]))
    sizes = draw(st.lists(st.integers(1, 12), min_size=dimensions, max_size=dimensions))
    align_corners = None if mode.startswith("nearest") else draw(st.booleans())
    if draw(st.booleans()):
        size = draw(st.lists(st.integers(1, 30), min_size=dimensions, max_size=dimensions))
        return sizes, (size, None, mode, align_corners, None)
    scales = st.one_of(st.floats(0.3, 4.5), st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0]))
    scale = [max(draw(scales), 1 / each + 1e-9) for each in sizes]
    return sizes, (None, scale, mode, align_corners, draw(st.sampled_from([None, True])))


def gradients(function, input, arguments, gradient=None):
    result = function(input, *arguments)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    return result.detach(), *torch.autograd.grad(result, input, gradient)


@settings(max_examples=400)
@given(drawn=interpolations())
def test_gradients(drawn):
    sizes, arguments = drawn
    input = torch.randn(2, 3, *sizes, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        gradients(gathered, input, arguments)[1], gradients(as_compiled, input, arguments)[1], rtol=1e-11, atol=1e-11
    )


@settings(max_examples=100)
@given(drawn=interpolations(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_precision(drawn, dtype):
    """Not farther from float64 than PyTorch's. One rounding, whatever the dtype."""
    sizes, arguments = drawn
    input = torch.randn(2, 3, *sizes, dtype=dtype, requires_grad=True)
    wide = input.detach().double().requires_grad_()
    result = F.interpolate(input, *arguments)
    gradient = torch.randn_like(result)
    (found,) = torch.autograd.grad(gathered(input, *arguments), input, gradient)
    (theirs,) = torch.autograd.grad(as_compiled(input, *arguments), input, gradient)
    (expected,) = torch.autograd.grad(as_compiled(wide, *arguments), wide, gradient.double())
    error, allowed = ((each.double() - expected).norm() for each in (found, theirs))
    assert found.dtype == dtype and error <= 1.1 * allowed + 1e-6 * expected.norm()


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)
        self.interpolate = functools.partial(F.interpolate, **options)

    def forward(self, input):
        return self.after(self.interpolate(self.before(input)).relu())


def handed(monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: counter(module, inputs))
    return counter


def taken(counter):
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    return sum(node.target is OPERATOR for node in nodes), sum(node.target is F.interpolate for node in nodes)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "options, is_taken",
    [
        ({"scale_factor": 2}, True),
        ({"scale_factor": (2, 1.5), "mode": "nearest-exact"}, True),
        ({"scale_factor": 2.0, "mode": "bilinear"}, True),
        ({"size": (11, 9), "mode": "bilinear", "align_corners": True}, True),
        ({"size": 3, "mode": "bilinear"}, True),
        ({"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True}, True),
        ({"scale_factor": 2.0, "mode": "bicubic"}, True),
        ({"scale_factor": 9}, False),
        ({"scale_factor": 6.0, "mode": "bilinear"}, False),
        ({"scale_factor": 4.0, "mode": "bicubic"}, False),
        ({"scale_factor": 0.5, "mode": "area"}, False),
        ({"scale_factor": 0.5, "mode": "bilinear", "antialias": True}, False),
    ],
    ids=str,
)
def test_in_a_model(options, is_taken, format, monkeypatch):
    """Values, gradients and strides, and what is left to PyTorch."""
    counter = handed(monkeypatch)
    model = Model(**options).to(torch.float64, memory_format=format)
    input = torch.randn(2, 4, 6, 7, dtype=torch.float64).to(memory_format=format).requires_grad_()
    wanted = [input, *model.parameters()]

    def step(function):
        result = function(input)
        return result, *torch.autograd.grad(result.square().sum(), wanted)

    found, expected = step(torch.compile(model, backend="normfuse")), step(model)
    assert taken(counter) == (int(is_taken), int(not is_taken))
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)
        assert each.dtype == other.dtype
    assert found[0].stride() == expected[0].stride()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="normfuse")(input), expected[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_autocast(monkeypatch):
    counter = handed(monkeypatch)
    model, input = Model(scale_factor=2.0, mode="bilinear"), torch.randn(2, 4, 6, 7, requires_grad=True)

    def step(function):
        with torch.autocast("cpu", torch.bfloat16):
            result = function(input)
        return result, *torch.autograd.grad(result.float().square().sum(), [input, *model.parameters()])

    for each, other in zip(step(torch.compile(model, backend="normfuse")), step(model), strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=2e-2)
        assert each.dtype == other.dtype
    assert taken(counter) == (1, 0)


@pytest.mark.usefixtures("fresh_compiler")
def test_open_sizes(monkeypatch):
    """Batches of any size keep the gather. Images of any size are PyTorch's."""
    counter = handed(monkeypatch)
    model = Model(scale_factor=2.0, mode="bilinear")
    compiled = torch.compile(model, backend="normfuse")
    for shape in (2, 4, 6, 7), (3, 4, 6, 7), (5, 4, 6, 7), (5, 4, 8, 8), (5, 4, 9, 11):
        input = torch.randn(shape, requires_grad=True)
        results = [each(input) for each in (compiled, model)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*[torch.autograd.grad(each.square().sum(), input) for each in results])
    assert counter.frame_count == 3 and taken(counter) == (2, 1)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [2.0, 1.5])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)], ids=str)
def test_strides(order, scale, mode):
    """PyTorch's, however the gradient lies."""
    input = torch.randn(2, 3, 6, 8, requires_grad=True)
    arguments = None, [scale] * 2, mode, None if mode == "nearest" else False
    result = gathered(input, *arguments)
    gradient = torch.randn([result.shape[each] for each in order]).permute([order.index(each) for each in range(4)])
    (found,) = torch.autograd.grad(result, input, gradient)
    format = torch.channels_last if order == (0, 2, 3, 1) else torch.contiguous_format
    assert found.is_contiguous(memory_format=format)


def test_no_images():
    input = torch.randn(0, 3, 4, 4, requires_grad=True)
    gathered(input, None, [2.0, 2.0], "bilinear", False).sum().backward()
    assert input.grad.shape == input.shape


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_infinities(mode, align_corners, size):
    """The gradient of each output reaches the inputs that this is made of, and no others."""
    for outputs in range(1, 4 * size + 1):
        places = [1] * (mode == "bicubic")
        input = torch.randn(outputs, 1, *places, size, requires_grad=True)
        gradient = torch.eye(outputs).view(outputs, 1, *places, outputs)
        arguments = [*places, outputs], None, mode, None if mode.startswith("nearest") else align_corners
        result = gathered(input, *arguments)
        (part,) = torch.autograd.grad(result, input, gradient, retain_graph=True)
        (found,) = torch.autograd.grad(result, input, gradient.where(gradient == 0, torch.inf))
        assert torch.equal(found.isinf(), part != 0) and not found.isnan().any()


@pytest.mark.parametrize("scale", [2.0, 2.0001, 3.0])
def test_scales_that_are_nearly_whole(scale):
    input = torch.randn(1, 1, 40, dtype=torch.float64, requires_grad=True)
    arguments = None, [scale], "linear", False, None
    torch.testing.assert_close(
        gradients(gathered, input, arguments)[1], gradients(as_compiled, input, arguments)[1], rtol=1e-11, atol=1e-11
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_scatters_nothing():
    """It writes atomic additions for ``index_put`` with ``accumulate`` alone, which interpolation has in PyTorch."""
    model, input = Model(scale_factor=2.0, mode="bilinear"), torch.randn(2, 4, 6, 7, requires_grad=True)

    def step(function):
        return torch.autograd.grad(function(input).square().sum(), input)

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())

    def normfuse(graph, inputs):
        rewrite(graph, compiles=True)
        return compiler(graph, inputs)

    for backend, scatters in (normfuse, False), (compiler, True):
        torch.testing.assert_close(step(torch.compile(model, backend=backend)), step(model))
        assert len(graphs) == 2 and ("index_put" in graphs.pop()) is scatters
        graphs.clear()


PROGRAM = """
import torch
from torch._dynamo.utils import counters
import torch.nn.functional as F

function = torch.compile(lambda x: F.interpolate(x, scale_factor=2.0), backend="normfuse")
function(torch.ones(1, 1, 4, 4, requires_grad=True)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"])
"""


def test_a_graph_from_the_cache(tmp_path):
    assert [run(tmp_path, PROGRAM) for _ in range(2)] == [["0 0"], ["1 0"]]
