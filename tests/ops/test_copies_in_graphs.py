"""Promise: in a graph behind autograd, copies become a call where each is of a weight, or of a weight's gradient."""

import operator

import pytest
import torch
import torch.nn.functional as F

from ops import copies
from ops.layouts import CAST
from tests.ops.behind_autograd import called, graph_of, run

COPIES = torch.ops.normfuse.copies.default
aten = torch.ops.aten
CLONE, MM, NEG, VIEW = aten.clone.default, aten.mm.default, aten.neg.default, aten.view.default


def joined(graph):
    """The calls that a graph has then."""
    copies.join(graph)
    graph.lint()
    return [node for node in graph.nodes if node.target is COPIES]


def assert_nothing_joins(graph):
    before = str(graph)
    copies.join(graph)
    assert str(graph) == before


def convolutions(dims, dtype):
    """A graph of convolutions of one image, whose weights are cast and laid out; and values for it."""
    format = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    values = [torch.randn(2, 3, *[5] * dims).bfloat16()] + [torch.randn(4, 3, *[3] * dims, dtype=dtype)] * 4
    graph, (image, *weights) = graph_of(*values)
    results = []
    for node in weights:
        if dtype != torch.bfloat16:
            node = called(graph, CAST, node, torch.bfloat16)
        node = called(graph, CLONE, node, memory_format=format)
        arguments = [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1
        results.append(called(graph, aten.convolution.default, image, node, None, *arguments))
    graph.output(tuple(results))
    return graph, values


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_laid_out(dims, dtype):
    """As channels_last, cast or not."""
    graph, values = convolutions(dims, dtype)
    (call,) = joined(graph)
    assert call.args[1:] == ("bfloat16", "l" * 4)
    assert not any(node.target in (CAST, CLONE) for node in graph.nodes)
    for result, value in zip(run(graph, *values), values[1:], strict=True):
        expected = F.__dict__[f"conv{dims}d"](values[0], value.bfloat16())
        torch.testing.assert_close(result, expected)


def test_views_of_unknown_values():
    """Behind another's pass."""
    graph, _ = convolutions(2, torch.float32)
    for node in [node for node in graph.nodes if node.target is CLONE]:
        view = graph.call_function(VIEW, (node, [4, 3, 3, 3]))
        node.append(view)
        node.replace_all_uses_with(view, delete_user_cb=lambda user, view=view: user is not view)
    assert [call.args[2] for call in joined(graph)] == ["llll"]


def test_a_copy_of_what_is_read_itself():
    """The cast is a weight's; what is laid out of it is none."""
    graph, _ = convolutions(2, torch.float32)
    for node in [node for node in graph.nodes if node.target is CAST]:
        graph.output_node().prepend(graph.call_function(MM, (node, node)))
    assert [call.args[2] for call in joined(graph)] == ["===="]
    assert sum(node.target is CLONE for node in graph.nodes) == 4


@pytest.mark.parametrize("lines, expected", [(2048, 6), (2049, 5)])
def test_large_ones_are_left(lines, expected):
    """One of six, of 2^22 elements or some more."""
    graph, places = graph_of(torch.empty(2048, lines), *[torch.empty(2048, 3)] * 5)
    casts = [called(graph, CAST, place, torch.bfloat16) for place in places]
    graph.output(tuple([graph.call_function(MM, (cast, cast)) for cast in casts]))
    assert [len(call.args[0]) for call in joined(graph)] == [expected]


def rounded_twice(graph, weight):
    return called(graph, CAST, called(graph, CAST, weight, torch.float16), torch.bfloat16)


def read_by_pointwise(graph, weight):
    return called(graph, aten.relu.default, called(graph, CAST, weight, torch.bfloat16))


def of_a_view_with_gaps(graph, weight):
    view = called(graph, aten.slice.Tensor, weight, 1, 0, 2)
    return called(graph, aten.constant_pad_nd.default, called(graph, CAST, view, torch.bfloat16), [0, 1])


def of_three_axes_turned(graph, weight):
    """Laid out as the kernel cannot."""
    weight.meta["val"] = weight.meta["val"].new_empty(27).as_strided((3, 3, 3), (1, 3, 9))
    copy = called(graph, CLONE, called(graph, CAST, weight, torch.bfloat16), memory_format=torch.contiguous_format)
    return called(graph, VIEW, copy, [9, 3])


def written_to(graph, weight):
    graph.call_function(aten.add_.Tensor, (weight, 1.0))
    return called(graph, CAST, weight, torch.bfloat16)


def written_to_through_a_view(graph, weight):
    graph.call_function(aten.add_.Tensor, (called(graph, VIEW, weight, [9]), 1.0))
    return called(graph, CAST, weight, torch.bfloat16)


def written_to_at_the_end(graph, weight):
    """As buffers are."""
    graph.output_node().prepend(graph.call_function(aten.copy_.default, (weight, weight)))
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
    graph, places = graph_of(*[torch.randn(3, 3)] * 6)
    end = graph.output(())
    with graph.inserting_before(end):
        end.args = (tuple([graph.call_function(MM, (change(graph, each),) * 2) for each in places]),)
    assert_nothing_joins(graph)


@pytest.mark.parametrize("reader", ["mm", "addmm", "bmm", "baddbmm", "own", "output and mm"])
def test_products(reader):
    """What reads weights' copies, and is computed for gradients. A weight may be a result, too."""
    values = [torch.randn((2, 3, 3) if "bmm" in reader else (3, 3)) for _ in range(5)]
    graph, places = graph_of(*values)
    results = []
    for place in places:
        weight = called(graph, CAST, place, torch.bfloat16)
        if reader == "own":
            product = called(graph, operator.getitem, called(graph, COPIES, [weight], "bfloat16", "="), 0)
        else:
            target = getattr(aten, reader.removeprefix("output and ")).default
            product = called(graph, target, *[weight] * (3 if "add" in reader else 2))
        results += [called(graph, CAST, product, torch.float32), *([place] if "output" in reader else [])]
    graph.output(tuple(results))
    expected = run(graph, *values)
    assert [call.args[1] for call in joined(graph) if len(call.args[0]) == 5] == ["bfloat16", "float32"]
    assert all(map(torch.equal, run(graph, *values), expected))


def test_dtypes_are_apart():
    """A launch reads one dtype and writes one."""
    graph, places = graph_of(*[torch.randn(3, 3), torch.randn(3, 3).half()] * 6)
    targets = [torch.bfloat16, torch.bfloat16, torch.float16] * 4
    casts = [called(graph, CAST, place, dtype) for place, dtype in zip(places, targets, strict=True)]
    graph.output(tuple([called(graph, MM, each, each) for each in casts]))
    calls = joined(graph)
    assert [len(call.args[0]) for call in calls] == [4, 4]
    assert all(len({source.meta["val"].dtype for source in call.args[0]}) == 1 for call in calls)


def test_one_copy_of_each():
    """Of a weight that is cast for each of its uses, as in inference."""
    value = torch.randn(3, 3)
    graph, (place,) = graph_of(value)
    casts = [called(graph, CAST, place, torch.bfloat16) for _ in range(5)]
    graph.output(tuple([called(graph, MM, each, each) for each in casts]))
    (call,) = joined(graph)
    assert call.args == ([place], "bfloat16", "=")
    expected = value.bfloat16() @ value.bfloat16()
    assert all(torch.equal(each, expected) for each in run(graph, value))


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_that_are_laid_out(last):
    """As parameters lie: of several copies in a row, the last one tells."""
    value = torch.randn(4, 3, 2, 2).bfloat16()
    graph, (place,) = graph_of(value)
    results = []
    for _ in range(4):
        product = called(graph, operator.getitem, called(graph, COPIES, [place], "bfloat16", "l"), 0)
        first = called(graph, CLONE, product, memory_format=torch.channels_last)
        results.append(called(graph, CLONE, called(graph, CAST, first, torch.float32), memory_format=last))
    graph.output(tuple(results))
    (call,) = [call for call in joined(graph) if len(call.args[0]) == 4]
    assert call.args[1:] == ("float32", {torch.contiguous_format: "cccc", torch.channels_last: "llll"}[last])
    for result in run(graph, value):
        assert torch.equal(result, value.float()) and result.is_contiguous(memory_format=last)


def test_what_nothing_reads_is_left():
    graph, (place,) = graph_of(torch.randn(3, 3).bfloat16())
    for _ in range(5):
        called(graph, CAST, called(graph, MM, place, place), torch.float32)
    graph.output(())
    assert_nothing_joins(graph)


def test_parts_of_products_are_left():
    """Else a product of any size would be kept until the last gradient is there."""
    graph, (place,) = graph_of(torch.randn(64, 64).bfloat16())
    products = [called(graph, MM, place, place) for _ in range(5)]
    parts = [called(graph, aten.slice.Tensor, each, 0, 0, 2) for each in products]
    graph.output(tuple([called(graph, CAST, each, torch.float32) for each in parts]))
    assert_nothing_joins(graph)


@pytest.mark.parametrize("reads", ["", "product", "cast"])
def test_gradients_stand_behind_the_last(reads):
    """What is read otherwise is no gradient alone."""
    value = torch.randn(3, 3).bfloat16()
    graph, (place,) = graph_of(value)
    casts, others = [], []
    for _ in range(5):
        product = called(graph, MM, place, place)
        casts.append(called(graph, CAST, called(graph, aten.permute.default, product, [1, 0]), torch.float32))
        if reads:
            others.append(called(graph, NEG, {"product": product, "cast": casts[-1]}[reads]))
    graph.output((*casts, *others))
    assert len(joined(graph)) == (not reads)
    for result in run(graph, value)[:5]:
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
    value = torch.randn(6, dtype=dtype)
    graph, (place,) = graph_of(value)
    source = place if reads == "input" else called(graph, NEG, place)
    rounded = called(graph, CAST, called(graph, VIEW, source, [6, 1]), between)
    view = called(graph, VIEW, rounded, [2, 3])
    result = called(graph, CAST, called(graph, VIEW, view, [6]), dtype)
    read = {"rounded": rounded, "source": source, "result": result, "view": view}.get(reads)
    graph.output((result, *([called(graph, aten.abs.default, read)] if read else [])))
    joined(graph)
    result, *_ = run(graph, value)
    is_left_out = not reads and dtype == torch.float32 and between != torch.int16
    assert sum(node.target is CAST for node in graph.nodes) == (0 if is_left_out else 2)
    value = value if reads == "input" else -value
    expected = value if is_left_out else value.to(between).to(dtype)
    assert torch.equal(result, expected)
