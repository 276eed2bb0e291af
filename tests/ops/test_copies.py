"""Promise: many copies of weights and their gradients are one call, and nothing but speed shows it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table

from ops import copies, layouts
from ops.layouts import CAST

pytestmark = pytest.mark.usefixtures("fresh_compiler")
COPIES = torch.ops.normfuse.copies.default
CLONE = torch.ops.aten.clone.default


class Joined:
    """A function as the backend compiles it but for Inductor, and its graphs behind autograd."""

    def __init__(self, function, **options):
        self.graphs = []
        backend = aot_autograd(
            fw_compiler=self._compile, decompositions=select_decomp_table(), partition_fn=self._partition
        )
        self._compiled = torch.compile(function, backend=backend, **options)

    def __call__(self, *arguments):
        return self._compiled(*arguments)

    @staticmethod
    def _partition(module, inputs, **options):
        layouts.lay_out(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **options)

    def _compile(self, module, inputs):
        copies.join(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def calls(self):
        """By graph, the dtype and formats of each call."""
        return [[node.args[1:] for node in graph.nodes if node.target is COPIES] for graph in self.graphs]

    def left(self, target):
        return [sum(node.target is target for node in graph.nodes) for graph in self.graphs]


def check(model, *inputs, enabled=True, backward=True):
    """The joined model, whose result, gradients and strides are those of the model."""
    joined, found = Joined(model), []
    for function in (model, joined):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result = function(*inputs)
        if backward:
            result.float().square().sum().backward()
        gradients = [each.grad for each in model.parameters()]
        found.append([result.detach(), *(None if each is None else each.clone() for each in gradients)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other) and one.stride() == other.stride()
    return joined


def mlp(layers=5, width=8, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=bias) for _ in range(layers)])


class Images(nn.Module):
    """Convolutions and norms, whose weights the backend lays out."""

    def __init__(self, dims=2, layers=5, channels=4, bias=False):
        super().__init__()
        torch.manual_seed(0)
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.layers = nn.ModuleList([conv(channels, channels, 3, padding=1, bias=bias) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def test_linear_layers():
    """Under autocast all weights and biases, and the input; of gradients the weights', as sums are cast for nothing."""
    joined = check(mlp(), torch.randn(3, 8))
    ((dtype, formats),), ((back, of_gradients),) = joined.calls()
    assert (dtype, back) == ("bfloat16", "float32")
    assert formats == 11 * "=" and set(of_gradients) == {"="}
    assert len(of_gradients) >= 5


@pytest.mark.parametrize("format, expected", [(torch.channels_last, [11 * "="]), (torch.contiguous_format, [])])
def test_convolutions(format, expected):
    """The image, weights and biases. All stay Inductor's where it would lay out the copies again."""
    model = Images(bias=True).to(memory_format=format)
    joined = check(model, torch.randn(2, 4, 8, 8).to(memory_format=format))
    of_weights, of_gradients = joined.calls()
    assert [formats for _, formats in of_weights] == expected
    assert of_gradients == [("float32", 10 * "=")]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "bfloat16"])
def test_weights_that_are_laid_out(dims, enabled):
    """Around an open norm, images and weights become channels_last, cast or not, and gradients go back."""
    graph, values = graph_of(dims=dims, dtype=torch.float32 if enabled else torch.bfloat16)
    copies.join(graph)
    graph.lint()
    (call,) = [node for node in graph.nodes if node.target is COPIES]
    assert call.args[1:] == ("bfloat16", "l" * 4)
    assert not any(node.target in (CAST, CLONE) for node in graph.nodes)
    module = torch.fx.GraphModule({}, graph)
    for result, value in zip(module(*values), values[1:], strict=True):
        expected = F.__dict__[f"conv{dims}d"](values[0], value.bfloat16())
        torch.testing.assert_close(result, expected)


def graph_of(dims, dtype, count=4):
    """A graph of convolutions of one image, whose weights are cast and laid out; and values for it."""
    mode = torch._subclasses.FakeTensorMode()
    format = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    values = [torch.randn(2, 3, *[5] * dims).bfloat16()] + [torch.randn(4, 3, *[3] * dims, dtype=dtype)] * count
    graph = torch.fx.Graph()
    places = [graph.placeholder(f"p{place}") for place in range(len(values))]
    for place, value in zip(places, values, strict=True):
        place.meta["val"] = mode.from_tensor(value)
    results = []
    for weight in places[1:]:
        node = weight
        if dtype != torch.bfloat16:
            node = called(graph, CAST, node, torch.bfloat16)
        node = called(graph, CLONE, node, memory_format=format)
        arguments = [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1
        results.append(called(graph, torch.ops.aten.convolution.default, places[0], node, None, *arguments))
    graph.output(tuple(results))
    return graph, values


def called(graph, target, *arguments, **options):
    node = graph.call_function(target, arguments, options)
    node.meta["val"] = layouts.computed(node)
    return node


def test_few_are_left():
    assert check(mlp(layers=1), torch.randn(3, 8)).calls() == [[], []]


def test_without_autocast():
    assert check(mlp(), torch.randn(3, 8), enabled=False).calls() == [[], []]


def test_inference():
    with torch.no_grad():
        joined = check(mlp(), torch.randn(3, 8), backward=False)
    assert [len(calls) for calls in joined.calls()] == [1]


def test_open_sizes():
    """Weights are of known sizes; an input of an open one is left."""
    model = mlp()
    joined = Joined(model, dynamic=True)
    for rows in (3, 5):
        input = torch.randn(rows, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(joined(input), model(input))
    (((_, formats),), *_) = joined.calls()
    assert len(formats) == 10


def test_more_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(copies, "MOST_COPIES", 5)
    (calls, _) = check(mlp(bias=False, layers=12), torch.randn(3, 8)).calls()
    assert [len(formats) for _, formats in calls] == [5, 5]  # three are left
    monkeypatch.setattr(copies, "MOST_COPIES", 64)
    monkeypatch.setattr(copies, "_MOST_ELEMENTS", 64 * 6)
    torch._dynamo.reset()
    (calls, _) = check(mlp(bias=False, layers=12), torch.randn(3, 8)).calls()
    assert [len(formats) for _, formats in calls] == [6, 6]


@pytest.mark.parametrize("lines, expected", [(2048, 6), (2049, 5)])
def test_large_ones_are_left(lines, expected):
    """One of six, of 2^22 elements or some more."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    results = []
    for place in [graph.placeholder(f"p{place}") for place in range(6)]:
        with mode:
            place.meta["val"] = torch.empty(2048, 3 if results else lines)
        cast = called(graph, CAST, place, torch.bfloat16)
        results.append(graph.call_function(torch.ops.aten.mm.default, (cast, cast)))
    graph.output(tuple(results))
    copies.join(graph)
    assert [len(node.args[0]) for node in graph.nodes if node.target is COPIES] == [expected]


def test_what_inductor_multiplies_is_left():
    """With max_autotune its products cast their own results."""
    for option in ("max_autotune", "max_autotune_gemm"):
        torch._dynamo.reset()
        with config.patch(option, True):
            assert check(mlp(), torch.randn(3, 8)).calls() == [[], []]


def rounded_twice(graph, weight):
    return called(graph, CAST, called(graph, CAST, weight, torch.float16), torch.bfloat16)


def read_by_pointwise(graph, weight):
    return called(graph, torch.ops.aten.relu.default, called(graph, CAST, weight, torch.bfloat16))


def of_a_view_with_gaps(graph, weight):
    view = called(graph, torch.ops.aten.slice.Tensor, weight, 1, 0, 2)
    return called(graph, torch.ops.aten.constant_pad_nd.default, called(graph, CAST, view, torch.bfloat16), [0, 1])


def written_to(graph, weight):
    graph.call_function(torch.ops.aten.add_.Tensor, (weight, 1.0))
    return called(graph, CAST, weight, torch.bfloat16)


def of_three_axes_turned(graph, weight):
    """Laid out as the kernel cannot."""
    weight.meta["val"] = weight.meta["val"].new_empty(27).as_strided((3, 3, 3), (1, 3, 9))
    copy = called(graph, CLONE, called(graph, CAST, weight, torch.bfloat16), memory_format=torch.contiguous_format)
    return called(graph, torch.ops.aten.view.default, copy, [9, 3])


def written_to_through_a_view(graph, weight):
    graph.call_function(torch.ops.aten.add_.Tensor, (called(graph, torch.ops.aten.view.default, weight, [9]), 1.0))
    return called(graph, CAST, weight, torch.bfloat16)


def written_to_at_the_end(graph, weight):
    """As buffers are."""
    graph.output_node().prepend(graph.call_function(torch.ops.aten.copy_.default, (weight, weight)))
    return called(graph, CAST, weight, torch.bfloat16)


def given_to_what_is_unknown(graph, weight):
    graph.call_function(torch.relu_, (weight,))
    return called(graph, CAST, weight, torch.bfloat16)


def unaligned(graph, weight):
    weight.meta["val"] = weight.meta["val"].new_empty(12).as_strided((3, 3), (3, 1), 1)
    return called(graph, CAST, weight, torch.bfloat16)


def of_other_strides(graph, weight):
    """As another's pass has it."""
    node = called(graph, CAST, weight, torch.bfloat16)
    node.meta["val"] = node.meta["val"].T
    return node


def unknown(graph, weight):
    """Behind another's pass."""
    node = called(graph, CAST, weight, torch.bfloat16)
    del node.meta["val"]
    return node


@pytest.mark.parametrize(
    "change",
    [
        *(rounded_twice, read_by_pointwise, of_a_view_with_gaps, of_three_axes_turned, written_to),
        *(written_to_through_a_view, written_to_at_the_end, given_to_what_is_unknown, unaligned, of_other_strides),
        unknown,
    ],
)
def test_what_is_no_copy_of_a_weight(change):
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    places = [graph.placeholder(f"p{place}") for place in range(6)]
    for place in places:
        place.meta["val"] = mode.from_tensor(torch.randn(3, 3))
    end = graph.output(())
    with graph.inserting_before(end):
        end.args = (
            tuple([graph.call_function(torch.ops.aten.mm.default, (change(graph, each),) * 2) for each in places]),
        )
    before = str(graph)
    copies.join(graph)
    assert str(graph) == before


def test_views_of_unknown_values():
    """Behind another's pass."""
    graph, _ = graph_of(2, torch.float32)
    for node in [node for node in graph.nodes if node.target is CLONE]:
        view = graph.call_function(torch.ops.aten.view.default, (node, [4, 3, 3, 3]))
        node.append(view)
        node.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
    copies.join(graph)
    graph.lint()
    assert [node.args[2] for node in graph.nodes if node.target is COPIES] == ["llll"]


def test_a_copy_of_what_is_read_itself():
    """The cast is a weight's; what is laid out of it is none."""
    graph, _ = graph_of(2, torch.float32)
    for node in [node for node in graph.nodes if node.target is CAST]:
        with graph.inserting_after(node):
            graph.output_node().prepend(graph.call_function(torch.ops.aten.mm.default, (node, node)))
    copies.join(graph)
    graph.lint()
    assert [node.args[2] for node in graph.nodes if node.target is COPIES] == ["===="]
    assert sum(node.target is CLONE for node in graph.nodes) == 4


@pytest.mark.parametrize("reader", ["mm", "addmm", "bmm", "baddbmm", "own", "output and mm"])
def test_products(reader):
    """What reads weights' copies, and is computed for gradients. A weight may be a result, too."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    shape = (2, 3, 3) if "bmm" in reader else (3, 3)
    places = [graph.placeholder(f"p{place}") for place in range(5)]
    results = []
    for place in places:
        place.meta["val"] = mode.from_tensor(torch.randn(shape))
        weight = called(graph, CAST, place, torch.bfloat16)
        if reader == "own":
            product = called(graph, COPIES, [weight], "bfloat16", "=")
            product = called(graph, operator.getitem, product, 0)
        else:
            target = getattr(torch.ops.aten, reader.removeprefix("output and ")).default
            product = called(graph, target, *[weight] * (3 if "add" in reader else 2))
        results += [called(graph, CAST, product, torch.float32), *([place] if "output" in reader else [])]
    graph.output(tuple(results))
    values = [torch.randn(shape) for _ in places]
    expected = torch.fx.GraphModule({}, graph)(*values)
    copies.join(graph)
    graph.lint()
    joined = [node for node in graph.nodes if node.target is COPIES and len(node.args[0]) == 5]
    assert [node.args[1] for node in joined] == ["bfloat16", "float32"]
    assert all(map(torch.equal, torch.fx.GraphModule({}, graph)(*values), expected))


def test_dtypes_are_apart():
    """A launch reads one dtype and writes one."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    places = [graph.placeholder(f"p{place}") for place in range(12)]
    casts = []
    for number, place in enumerate(places):
        place.meta["val"] = mode.from_tensor(torch.randn(3, 3).to((torch.float32, torch.float16)[number % 2]))
        casts.append(called(graph, CAST, place, (torch.bfloat16, torch.bfloat16, torch.float16)[number % 3]))
    graph.output(tuple([called(graph, torch.ops.aten.mm.default, each, each) for each in casts]))
    copies.join(graph)
    calls = [node for node in graph.nodes if node.target is COPIES]
    assert [len(node.args[0]) for node in calls] == [4, 4]
    assert all(len({source.meta["val"].dtype for source in node.args[0]}) == 1 for node in calls)


def test_one_copy_of_each():
    """Of a weight that is cast for each of its uses, as in inference."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(3, 3))
    casts = [called(graph, CAST, place, torch.bfloat16) for _ in range(5)]
    graph.output(tuple([called(graph, torch.ops.aten.mm.default, each, each) for each in casts]))
    copies.join(graph)
    graph.lint()
    (call,) = [node for node in graph.nodes if node.target is COPIES]
    assert call.args == ([place], "bfloat16", "=")
    value = torch.randn(3, 3)
    expected = value.bfloat16() @ value.bfloat16()
    assert all(torch.equal(each, expected) for each in torch.fx.GraphModule({}, graph)(value))


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_that_are_laid_out(last):
    """As parameters lie: of several copies in a row, the last one tells."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(4, 3, 2, 2).bfloat16())
    results = []
    for _ in range(4):
        product = called(graph, operator.getitem, called(graph, COPIES, [place], "bfloat16", "l"), 0)
        first = called(graph, CLONE, product, memory_format=torch.channels_last)
        results.append(called(graph, CLONE, called(graph, CAST, first, torch.float32), memory_format=last))
    graph.output(tuple(results))
    copies.join(graph)
    graph.lint()
    (call,) = [node for node in graph.nodes if node.target is COPIES and len(node.args[0]) == 4]
    assert call.args[1:] == ("float32", {torch.contiguous_format: "cccc", torch.channels_last: "llll"}[last])
    value = torch.randn(4, 3, 2, 2).bfloat16()
    for result in torch.fx.GraphModule({}, graph)(value):
        assert torch.equal(result, value.float()) and result.is_contiguous(memory_format=last)


def test_what_nothing_reads_is_left():
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(3, 3).bfloat16())
    for _ in range(5):
        called(graph, CAST, called(graph, torch.ops.aten.mm.default, place, place), torch.float32)
    graph.output(())
    before = str(graph)
    copies.join(graph)
    assert str(graph) == before


def test_parts_of_products_are_left():
    """Else a product of any size would be kept until the last gradient is there."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(64, 64).bfloat16())
    products = [called(graph, torch.ops.aten.mm.default, place, place) for _ in range(5)]
    parts = [called(graph, torch.ops.aten.slice.Tensor, each, 0, 0, 2) for each in products]
    graph.output(tuple([called(graph, CAST, each, torch.float32) for each in parts]))
    before = str(graph)
    copies.join(graph)
    assert str(graph) == before


@pytest.mark.parametrize("reads", ["", "product", "cast"])
def test_gradients_stand_behind_the_last(reads):
    """What is read otherwise is no gradient alone."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(3, 3).bfloat16())
    casts, others = [], []
    for _ in range(5):
        product = called(graph, torch.ops.aten.mm.default, place, place)
        casts.append(called(graph, CAST, called(graph, torch.ops.aten.permute.default, product, [1, 0]), torch.float32))
        if reads:
            others.append(called(graph, torch.ops.aten.neg.default, {"product": product, "cast": casts[-1]}[reads]))
    graph.output((*casts, *others))
    copies.join(graph)
    graph.lint()
    assert sum(node.target is COPIES for node in graph.nodes) == (not reads)
    value = torch.randn(3, 3).bfloat16()
    for result in torch.fx.GraphModule({}, graph)(value)[:5]:
        assert torch.equal(result, (value @ value).T.float()) and result.stride() == (1, 3)


@pytest.mark.parametrize("reads", ["", "rounded", "source", "result", "input", "view"])
@pytest.mark.parametrize(
    "dtype, between",
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.int16),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_rounding_on_the_way(dtype, between, reads):
    """A gradient that was rounded between two views is not, as long as nothing else reads it, nor shares its memory."""
    mode, graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
    place = graph.placeholder("p")
    place.meta["val"] = mode.from_tensor(torch.randn(6, dtype=dtype))
    source = place if reads == "input" else called(graph, torch.ops.aten.neg.default, place)
    rounded = called(graph, CAST, called(graph, torch.ops.aten.view.default, source, [6, 1]), between)
    view = called(graph, torch.ops.aten.view.default, rounded, [2, 3])
    result = called(graph, CAST, called(graph, torch.ops.aten.view.default, view, [6]), dtype)
    read = {"rounded": rounded, "source": source, "result": result, "view": view}.get(reads)
    graph.output((result, *([called(graph, torch.ops.aten.abs.default, read)] if read else [])))
    value = torch.randn(6, dtype=dtype)
    copies.join(graph)
    graph.lint()
    result, *_ = torch.fx.GraphModule({}, graph)(value)
    is_left_out = not reads and dtype == torch.float32 and between != torch.int16
    assert sum(node.target is CAST for node in graph.nodes) == (0 if is_left_out else 2)
    value = value if reads == "input" else -value
    expected = value if is_left_out else value.to(between).to(dtype)
    assert torch.equal(result, expected)


def test_the_operator():
    tensors = [torch.randn(2, 3, 4, 5), torch.randn(7)]
    torch.library.opcheck(COPIES, (tensors, "bfloat16", "l="))
    first, second = COPIES(tensors, "bfloat16", "l=")
    assert torch.equal(first, tensors[0].bfloat16()) and first.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(second, tensors[1].bfloat16())
    assert COPIES(tensors, "bfloat16", "==")[0].is_contiguous()
    assert COPIES(tensors, "float16", "==")[0].dtype == torch.float16
    back = COPIES([first], "float32", "c")[0]
    assert back.is_contiguous() and torch.equal(back, first.float())
