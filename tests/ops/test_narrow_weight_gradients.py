"""Promise: in compiled graphs, weight gradients of narrow convolutions are a kernel's where it is faster than cuDNN."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ops import narrow_convolutions, precision
from ops.narrow_convolutions import WEIGHT_GRADIENT, take_over
from tests.ops.opened import Opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def weights_alone(monkeypatch):
    """What is convolved is cuDNN's."""
    monkeypatch.setattr(narrow_convolutions, "_FEW_CHANNELS", 0)
    monkeypatch.setattr(narrow_convolutions, "_NARROW", (0, 0))


aten = torch.ops.aten
BACKWARD = aten.convolution_backward.default
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def graph_of(
    input=(1, 3, 256, 256),
    weight=(8, 3, 3, 3),
    stride=1,
    padding=1,
    dilation=1,
    transposed=False,
    groups=1,
    wanted=(True, True, False),
    dtypes=(torch.bfloat16,) * 2,
    contiguous=(),
    of_result=None,
    axes=None,
    mode=None,
):
    """A graph with a convolution's backward pass, whose wanted results it returns.

    ``contiguous``: the images, by place, that lie so. ``of_result``: the format of the weight's gradient; None as the
    weight. ``axes``: how often the geometry is given; None once an axis.
    """
    dims, mode = len(input) - 2, mode or torch._subclasses.FakeTensorMode()
    geometry = *([each] * (axes or dims) for each in (stride, padding, dilation)), transposed, [0] * dims, groups
    graph, places = torch.fx.Graph(), []
    with mode:
        values = [torch.empty(input, dtype=dtypes[0]), torch.empty(weight, dtype=dtypes[0])]
        output = aten.convolution.default(*values, None, *geometry)
        values = [torch.empty(output.shape, dtype=dtypes[1]), *values]
        for place, value in enumerate(values):
            node = graph.placeholder(f"p{place}")
            is_last = place not in contiguous and value.ndim in LAST
            node.meta["val"] = value.contiguous(memory_format=LAST[value.ndim]) if is_last else value
            places.append(node)
        node = graph.call_function(BACKWARD, (*places, None, *geometry, list(wanted)))
        like = [each.meta["val"] for each in places]
        of_weight = torch.empty_like(like[2], memory_format=of_result or torch.preserve_format)
        node.meta["val"] = [torch.empty_like(like[1]), of_weight, torch.empty(output.shape[1], dtype=dtypes[0])]
    found = [graph.call_function(operator.getitem, (node, place)) for place in range(3) if wanted[place]]
    for each in found:
        each.meta["val"] = node.meta["val"][each.args[1]]
    graph.output(found)
    return graph


def results_of(graph):
    """Shapes, strides and dtypes of what it returns."""
    values = [each.meta["val"] for each in next(reversed(graph.nodes)).args[0]]
    return [(value.shape, value.stride(), value.dtype) for value in values]


def read_again(graph, place):
    """Another node that takes one of the results of the convolution's backward pass, and is returned."""
    output, (node,) = next(reversed(graph.nodes)), graph.find_nodes(op="call_function", target=BACKWARD)
    with graph.inserting_before(output):
        again = graph.call_function(operator.getitem, (node, place))
    again.meta["val"] = node.meta["val"][place]
    output.args = ([*output.args[0], again],)
    return node


def opcheck(operator, arguments):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=checks)


def taken(graph):
    take_over(graph)
    graph.lint()
    return [node for node in graph.nodes if node.target is WEIGHT_GRADIENT]


OURS = {
    "first": {},
    "gray": {"input": (2, 1, 64, 64, 64), "weight": (16, 1, 3, 3, 3)},
    "narrow": {"input": (1, 8, 32, 32, 32), "weight": (8, 8, 3, 3, 3)},
    "wide taps": {"input": (8, 3, 224, 224), "weight": (64, 3, 7, 7), "stride": 2, "padding": 3},
    "many outputs": {"input": (8, 4, 64, 64), "weight": (320, 4, 3, 3)},
    "float16": {"dtypes": (torch.float16,) * 2},
    "contiguous weight": {"contiguous": (2,), "of_result": torch.channels_last},
    "weight alone": {"wanted": (False, True, False)},
    "weight and bias": {"wanted": (False, True, True)},
    "one number for all axes": {"axes": 1},
    "taps along one axis": {"weight": (8, 3, 1, 3)},
    "most channels": {"input": (1, 32, 256, 256), "weight": (8, 32, 3, 3)},
    "most weights": {"weight": (1024, 3, 2, 2)},
    "fewest pixels": {"input": (2, 3, 128, 128)},
    "most pixels": {"input": (2, 1, 2**15 - 2, 2**15 - 2), "weight": (8, 1, 3, 3)},
}
CUDNNS = {
    "few pixels": {"input": (1, 3, 181, 181)},
    "many pixels": {"input": (1, 1, 2**15 - 1, 2**15 - 2), "weight": (8, 1, 3, 3)},
    "much padding": {"input": (1, 1, 1, 2**26), "weight": (8, 1, 5, 5), "padding": 8},
    "more weights": {"input": (1, 31, 256, 256), "weight": (45, 31, 3, 3)},
    "one dimension": {"input": (1, 3, 2**16), "weight": (8, 3, 3)},
    "many channels": {"input": (1, 33, 256, 256), "weight": (8, 33, 3, 3)},
    "many weights": {"input": (1, 32, 64, 64, 64), "weight": (32, 32, 3, 3, 3)},
    "one tap": {"weight": (8, 3, 1, 1), "padding": 0},
    "groups": {"input": (1, 4, 256, 256), "weight": (8, 2, 3, 3), "groups": 2},
    "transposed": {"weight": (3, 8, 3, 3), "transposed": True},
    "float32": {"dtypes": (torch.float32,) * 2},
    "mixed": {"dtypes": (torch.bfloat16, torch.float16)},
    "contiguous input": {"contiguous": (1,)},
    "contiguous gradient": {"contiguous": (0,)},
    "contiguous result": {"of_result": torch.contiguous_format},
    "input alone": {"wanted": (True, False, False)},
}


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_ours(options):
    graph = graph_of(**options)
    before = results_of(graph)
    (node,) = taken(graph)
    assert results_of(graph) == before
    left = [each.args[-1] for each in graph.nodes if each.target is BACKWARD]
    of_input, _, of_bias = options.get("wanted", (True, True, False))
    assert left == ([[of_input, False, of_bias]] if of_input or of_bias else [])
    assert node.meta["eager_input_vals"] == ((node.args[0], *(each.meta["val"] for each in node.args[1:])), {})


@pytest.mark.parametrize("options", CUDNNS.values(), ids=CUDNNS)
def test_cudnns(options):
    graph = graph_of(**options)
    before = str(graph)
    assert not taken(graph) and str(graph) == before


def test_a_result_that_is_read_twice():
    graph = graph_of()
    node = read_again(graph, 1)
    with graph.inserting_before(next(reversed(graph.nodes))):
        unused = graph.call_function(operator.getitem, (node, 1))
    assert len(taken(graph)) == 2 and unused.users == {}


def test_other_gpus(monkeypatch):
    """Where it was not measured."""
    monkeypatch.setattr(precision, "architecture", lambda device: 80)
    assert not taken(graph_of())


def test_open_sizes():
    """Of samples, too: how many pixels there are is not known."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    graph = graph_of(mode=mode)
    for node in list(graph.nodes)[:2]:
        value = torch.empty(7, *node.meta["val"].shape[1:], dtype=torch.bfloat16, device="cpu")
        value = value.contiguous(memory_format=torch.channels_last)
        node.meta["val"] = mode.from_tensor(value, symbolic_context=dynamic)
    assert not taken(graph)


class Net(nn.Module):
    """A narrow network with norms."""

    def __init__(self, dims):
        super().__init__()
        convolution = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first, self.second = convolution(1, 8, 3, padding=1), convolution(8, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, image):
        return F.silu(self.norm(self.second(torch.relu(self.norm(self.first(image))))))


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dims", [2, 3])
def test_gradients(dims, format, monkeypatch):
    """Of a model under autocast, whose parameters' gradients lie as they do."""
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    torch.manual_seed(0)
    model, image = Net(dims), torch.randn(2, 1, *[9] * dims)
    if format == "channels_last":
        model, image = (each.to(memory_format=LAST[dims + 2]) for each in (model, image))
    found = []
    for function in (opened := Opened(model), model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            result = function(image)
        torch.manual_seed(1)
        result.backward(torch.randn(result.shape).to(result))
        found.append([each.grad for each in model.parameters()])
    assert len(opened.nodes("normfuse.weight_gradient.default")) == 2
    for one, other, parameter in zip(*found, model.parameters(), strict=True):
        assert one.stride() == parameter.stride()
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_with_inductor(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    torch.manual_seed(0)
    model, image = Net(2), torch.randn(2, 1, 12, 12)
    found = []
    with torch.compiler.config.patch(force_disable_caches=True):
        for function in (torch.compile(model, backend="normfuse"), model):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                function(image).float().square().sum().backward()
            found.append([each.grad.clone() for each in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 3e-2 * other.norm()


def arguments():
    opened = Opened(Net(2))
    with torch.autocast("cpu", torch.bfloat16):
        opened(torch.randn(2, 1, 9, 9)).sum().backward()
    return list(opened.arguments("normfuse.weight_gradient.default"))


def test_opcheck(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    for each in arguments():
        opcheck(WEIGHT_GRADIENT, each)


def test_calls_that_lie_otherwise(monkeypatch):
    """Each has a plan of its own."""
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    (words, *images), _ = arguments()
    expected = WEIGHT_GRADIENT(words, *images)
    for place in (0, 1):
        other = [each.contiguous(memory_format=LAST[4]) if place == at else each for at, each in enumerate(images)]
        assert torch.equal(WEIGHT_GRADIENT(words, *other), expected)
    strides = expected.contiguous().stride()
    result = WEIGHT_GRADIENT(words.replace(str(expected.stride()), str(strides)), *images)
    assert result.stride() == strides != expected.stride()


def test_operations_are_counted(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    _, (words, gradient, image) = arguments()
    with FlopCounterMode(display=False) as counter:
        result = WEIGHT_GRADIENT(words, gradient, image)
    assert counter.get_total_flops() == 2 * gradient[:, 0].numel() * result.numel()


def test_another_version_wrote_it():
    with pytest.raises(ValueError, match="0.0.1"):
        WEIGHT_GRADIENT("normfuse 0.0.1 | [(4, 4, 1, 1, 0, 1)] | (1, 1, 1, 1)", *torch.zeros(2, 1, 1, 4, 4).bfloat16())
