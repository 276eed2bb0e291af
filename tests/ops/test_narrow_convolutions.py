"""Promise: in compiled graphs, convolutions of few channels and their input gradients are a kernel's where it is faster
than cuDNN."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ops import explain, narrow_convolutions, precision
from ops.backend import normfuse
from ops.narrow_convolutions import CONVOLUTION, take_over
from tests.ops.opened import Opened
from tests.ops.test_narrow_weight_gradients import BACKWARD, LAST, Net, aten, opcheck, read_again, results_of
from tests.ops.test_narrow_weight_gradients import graph_of as backward_graph_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graph_of(
    input=(1, 3, 64, 64),
    weight=(8, 3, 3, 3),
    stride=1,
    padding=1,
    dilation=1,
    transposed=False,
    groups=1,
    bias=False,
    dtypes=(torch.bfloat16,) * 2,
    contiguous=(),
    axes=None,
):
    """A graph with a convolution. ``contiguous``: the images, by place, that lie so: the input, and the result."""
    dims = len(input) - 2
    geometry = *([each] * (axes or dims) for each in (stride, padding, dilation)), transposed, [0] * dims, groups
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode():
        values = [torch.empty(input, dtype=dtypes[0]), torch.empty(weight, dtype=dtypes[0])]
        output = aten.convolution.default(*values, None, *geometry)
        values[1] = values[1].to(dtypes[1])
        values += [torch.empty(output.shape[1], dtype=dtypes[1])] if bias else []
    is_last = [place not in contiguous and len(input) in LAST for place in range(2)]
    places = [graph.placeholder(f"p{place}") for place in range(len(values))]
    for place, value in zip(places, values, strict=True):
        place.meta["val"] = value
    if is_last[0]:
        places[0].meta["val"] = values[0].contiguous(memory_format=LAST[len(input)])
    node = graph.call_function(aten.convolution.default, (*places, *([] if bias else [None]), *geometry))
    node.meta["val"] = output.contiguous(memory_format=LAST[len(input)]) if is_last[1] else output
    graph.output([node])
    return graph


def taken(graph):
    take_over(graph)
    graph.lint()
    return [node for node in graph.nodes if node.target is CONVOLUTION]


OURS = {
    "first": {},
    "bias": {"bias": True},
    "gray": {"input": (2, 1, 16, 16, 16), "weight": (16, 1, 3, 3, 3)},
    "narrow": {"input": (1, 16, 16, 16, 16), "weight": (32, 16, 3, 3, 3)},
    "wide taps": {"input": (8, 3, 224, 224), "weight": (64, 3, 7, 7), "stride": 2, "padding": 3},
    "patches": {"input": (32, 3, 224, 224), "weight": (768, 3, 16, 16), "stride": 16, "padding": 0},
    "many results": {"input": (8, 4, 64, 64), "weight": (1320, 4, 3, 3)},
    "float16": {"dtypes": (torch.float16,) * 2},
    "one number for all axes": {"axes": 1},
    "taps along one axis": {"weight": (8, 3, 1, 3)},
    "most pixels": {"input": (1, 1, 2**15 - 2, 2**15 - 2), "weight": (8, 1, 3, 3)},
}
CUDNNS = {
    "few pixels": {"input": (1, 3, 64, 63)},
    "a large sample": {"input": (1, 1, 2**15 - 1, 2**15 - 2), "weight": (8, 1, 3, 3), "stride": 3},
    "many pixels": {"input": (2, 1, 2**15 - 2, 2**15 - 2), "weight": (8, 1, 3, 3)},
    "more channels": {"input": (1, 17, 64, 64), "weight": (8, 17, 3, 3)},
    "more results": {"input": (1, 5, 64, 64), "weight": (33, 5, 3, 3)},
    "one dimension": {"input": (1, 3, 2**16), "weight": (8, 3, 3)},
    "one tap": {"weight": (8, 3, 1, 1), "padding": 0},
    "groups": {"input": (1, 4, 64, 64), "weight": (8, 2, 3, 3), "groups": 2},
    "transposed": {"weight": (3, 8, 3, 3), "transposed": True},
    "float32": {"dtypes": (torch.float32,) * 2},
    "mixed": {"dtypes": (torch.bfloat16, torch.float16)},
    "contiguous input": {"contiguous": (0,)},
    "contiguous result": {"contiguous": (1,)},
}


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_ours(options):
    graph = graph_of(**options)
    before = results_of(graph)
    (node,) = taken(graph)
    assert results_of(graph) == before
    assert not graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert node.meta["eager_input_vals"] == ((node.args[0], *(each.meta["val"] for each in node.args[1:])), {})


@pytest.mark.parametrize("options", CUDNNS.values(), ids=CUDNNS)
def test_cudnns(options):
    graph = graph_of(**options)
    before = str(graph)
    assert not taken(graph) and str(graph) == before


OF_INPUT = {
    "narrow": ({"input": (1, 8, 16, 16, 16), "weight": (8, 8, 3, 3, 3)}, True),
    "last": ({"input": (1, 128, 64, 64), "weight": (3, 128, 3, 3)}, True),
    "last of more": ({"input": (1, 33, 64, 64), "weight": (16, 33, 3, 3)}, False),
    "more results": ({"input": (1, 8, 64, 64), "weight": (17, 8, 3, 3)}, False),
    "few pixels": ({"input": (1, 8, 64, 63), "weight": (8, 8, 3, 3)}, False),
    "strides": ({"input": (1, 8, 64, 64), "weight": (8, 8, 3, 3), "stride": 2}, False),
    "cropped": ({"input": (1, 8, 64, 64), "weight": (8, 8, 1, 3), "padding": 2}, True),
    "contiguous": ({"input": (1, 8, 64, 64), "weight": (8, 8, 3, 3), "contiguous": (0,)}, False),
    "most elements": ({"input": (1, 16, 2**13, 2**13), "weight": (16, 16, 3, 1), "padding": 0}, True),
    "far taps": ({"input": (1, 16, 2**14 + 2, 2**12 + 1), "weight": (16, 16, 3, 1), "dilation": 2**13}, False),
    "much cropped": ({"input": (1, 16, 2**13, 1), "weight": (16, 16, 1, 3), "padding": 2**11}, True),
    "too much cropped": ({"input": (1, 16, 2**13, 1), "weight": (16, 16, 1, 3), "padding": 2**12}, False),
    "weight alone": ({"input": (1, 8, 64, 64), "weight": (8, 8, 3, 3), "wanted": (False, True, False)}, False),
}


@pytest.mark.parametrize("options, expected", OF_INPUT.values(), ids=OF_INPUT)
def test_input_gradients(options, expected):
    graph = backward_graph_of(**options)
    before = results_of(graph)
    assert len(taken(graph)) == expected
    assert results_of(graph) == before
    left = [each.args[-1] for each in graph.nodes if each.target is BACKWARD]
    assert all(wanted[0] is not expected for wanted in left if options.get("wanted", (True,))[0])


def test_other_gpus(monkeypatch):
    """Where it was not measured."""
    monkeypatch.setattr(precision, "architecture", lambda device: 80)
    assert not taken(graph_of())


class Smooth(nn.Module):
    """A narrow network whose gradients do not jump."""

    def __init__(self, dims):
        super().__init__()
        convolution = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first, self.second = convolution(1, 8, 3, padding=1), convolution(8, 8, 3, stride=2, padding=1)
        self.last, self.norm = convolution(8, 2, 3, padding=2, dilation=2), nn.GroupNorm(2, 8)

    def forward(self, image):
        return self.last(F.silu(self.norm(self.second(F.silu(self.norm(self.first(image)))))))


def step(function, image, wanted, is_cast=True):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        result = function(image)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return result, *torch.autograd.grad(result, wanted, gradient)


def strides_of(tensor):
    """But for dimensions of one."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dims", [2, 3])
def test_values(dims, format, monkeypatch):
    """Of a model under autocast, and of its gradients, which lie as eager PyTorch's."""
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_RESULTS", 1)
    torch.manual_seed(0)
    model, image = Smooth(dims), torch.randn(2, 1, *[9] * dims)
    if format == "channels_last":
        model, image = (each.to(memory_format=LAST[dims + 2]) for each in (model, image))
    opened, wanted = Opened(model), [image.requires_grad_(), *model.parameters()]
    exact, eager = step(model, image, wanted, is_cast=False), step(model, image, wanted)
    found = step(opened, image, wanted)
    # forward, and the gradients of the inputs at stride 1
    assert len(opened.nodes("normfuse.narrow_convolution.default")) == 3 + 2
    for one, other, truth, parameter in zip(found, eager, exact, [eager[0], *wanted], strict=True):
        assert strides_of(one) == strides_of(parameter) and one.dtype == other.dtype
        factor = 3 if one.ndim == 1 else 1.5  # a vector's error is as chance has it
        assert (one - truth).norm() <= factor * (other - truth).norm() + 1e-3 * truth.norm()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inference = Opened(model)
        torch.testing.assert_close(inference(image), found[0], rtol=2e-2, atol=2e-2)
    assert len(inference.nodes("normfuse.narrow_convolution.default")) == 3


def test_with_inductor(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_RESULTS", 1)
    torch.manual_seed(0)
    model, image = Smooth(2), torch.randn(2, 1, 12, 12, requires_grad=True)
    wanted = [image, *model.parameters()]
    with torch.compiler.config.patch(force_disable_caches=True):
        found = step(torch.compile(model, backend=normfuse), image, wanted)
    for one, other in zip(found, step(model, image, wanted), strict=True):
        assert (one - other).norm() <= 3e-2 * other.norm() and strides_of(one) == strides_of(other)


def arguments():
    opened = Opened(Smooth(2))
    with torch.autocast("cpu", torch.bfloat16):
        opened(torch.randn(2, 1, 9, 9, requires_grad=True)).sum().backward()
    return list(opened.arguments("normfuse.narrow_convolution.default"))


def test_the_operator(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_RESULTS", 1)
    for each in arguments():
        opcheck(CONVOLUTION, each)
        with FlopCounterMode(display=False) as counter:
            result = CONVOLUTION(*each)
        assert counter.get_total_flops() == 2 * result.numel() * len(each[-1])


def test_it_is_told(monkeypatch):
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_RESULTS", 1)
    with torch.autocast("cpu", torch.bfloat16):
        told = explain(torch.compile(Net(2), backend=normfuse), torch.randn(2, 1, 9, 9))
    found = [call.chain for call in told.calls if call.direction == "convolution"]
    assert found == ["image [2, 1, 9, 9], weight [9, 8]", "image [2, 8, 9, 9], weight [72, 8]"]


def test_another_version_wrote_it():
    with pytest.raises(ValueError, match="0.0.1"):
        CONVOLUTION("normfuse 0.0.1 | [(4, 4, 1, 1, 0, 1)] | (1, 1, 1, 1)", *torch.zeros(2, 1, 1, 4, 4).bfloat16())


def test_a_result_that_is_read_twice():
    graph = backward_graph_of(**OF_INPUT["narrow"][0])
    read_again(graph, 0)
    assert len(taken(graph)) == 2
