"""Promise: in a graph behind autograd, products become a call where each may stand where the call does, and where
nothing writes to what they read."""

import operator

import pytest
import torch

from ops.grouped_products import GROUPED, join
from ops.layouts import CAST
from tests.ops.behind_autograd import called, graph_of, run

aten = torch.ops.aten
MM, ADDMM, T, VIEW = aten.mm.default, aten.addmm.default, aten.permute.default, aten.view.default


def products(count=4, rows=3, depth=32, width=16, dtype=torch.bfloat16, bias=False, is_second=False, turned=True):
    """A graph of products of one matrix, which it returns; its nodes; and values for it."""
    torch.manual_seed(0)
    matrix = torch.randn(rows, depth).to(dtype)
    shape = (rows, width) if is_second else (width, depth) if turned else (depth, width)
    others = [torch.randn(shape).to(dtype) for _ in range(count)]
    biases = [torch.randn(width).to(dtype) for _ in range(count if bias else 0)]
    graph, places = graph_of(matrix, *others, *biases)
    results = []
    for place, other in enumerate(places[1 : count + 1]):
        other = called(graph, T, other, [1, 0]) if is_second or turned else other
        operands = (other, places[0]) if is_second else (places[0], other)
        given = [places[1 + count + place]] if bias else []
        results.append(called(graph, ADDMM if bias else MM, *given, *operands))
    graph.output(tuple(results))
    return graph, results, [matrix, *others, *biases]


def joined(graph):
    """The calls that a graph has then."""
    join(graph)
    graph.lint()
    return [node for node in graph.nodes if node.target is GROUPED]


def assert_computes(graph, values, expected):
    for one, other in zip(run(graph, *values), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2, check_stride=True)


def assert_nothing_joins(graph):
    before = str(graph)
    join(graph)
    assert str(graph) == before


OURS = {
    "plain": {},
    "bias": {"bias": True},
    "float16": {"dtype": torch.float16},
    "row by row": {"turned": False},
    "row by row, of any depth": {"turned": False, "rows": 5, "depth": 48},
    "second": {"is_second": True},
    "one row": {"rows": 1},
    "no rows": {"rows": 0},
    "many": {"count": 70, "rows": 2},
}
OTHERS = {
    "float32": {"dtype": torch.float32},
    "odd width": {"width": 24},
    "odd depth": {"depth": 24},
    "odd depth, row by row": {"depth": 24, "turned": False},
    "second, odd width": {"is_second": True, "width": 24},
    "second, odd rows of results": {"is_second": True, "depth": 24},
}


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_ours(options):
    graph, results, values = products(**options)
    expected, count = run(graph, *values), len(results)
    nodes = joined(graph)
    assert [len(node.args[2]) for node in nodes] == [64, 6] if count > 64 else [count]
    assert_computes(graph, values, expected)
    for node in nodes:
        given = torch.fx.node.map_arg((node.args, {}), lambda each: each.meta["val"])
        assert str(node.meta["eager_input_vals"]) == str(given)


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_others(options):
    assert_nothing_joins(products(**options)[0])


def test_both_layouts_are_two_groups():
    graph, (matrix, *others) = graph_of(*[torch.randn(32, 32).bfloat16()] * 9)
    turned = [called(graph, T, each, [1, 0]) if place < 4 else each for place, each in enumerate(others)]
    graph.output(tuple(called(graph, MM, matrix, each) for each in turned))
    assert [len(node.args[2]) for node in joined(graph)] == [4, 4]


def test_with_and_without_a_bias_are_two_groups():
    graph, (matrix, bias, *others) = graph_of(torch.randn(32, 32), torch.randn(32), *[torch.randn(32, 32)] * 8)
    for each in (matrix, bias, *others):
        each.meta["val"] = each.meta["val"].bfloat16()
    results = [called(graph, MM, matrix, each) for each in others[:4]]
    results += [called(graph, ADDMM, bias, matrix, each) for each in others[4:]]
    graph.output(tuple(results))
    assert [len(node.args[3]) for node in joined(graph)] == [0, 4]


@pytest.mark.parametrize("shape", [(3, 16), (1, 16), (1,)], ids=str)
def test_a_bias_of_another_shape(shape):
    graph, (matrix, bias, *others) = graph_of(
        *(torch.ones(each).bfloat16() for each in [(3, 32), shape, *[(32, 16)] * 4])
    )
    graph.output(tuple(called(graph, ADDMM, bias, matrix, each) for each in others))
    assert_nothing_joins(graph)


def test_addmm_with_factors():
    shapes = [(3, 32), 16, *[(32, 16)] * 4]
    graph, (matrix, bias, *others) = graph_of(*(torch.ones(each).bfloat16() for each in shapes))
    graph.output(tuple(called(graph, ADDMM, bias, matrix, each, alpha=2) for each in others))
    assert_nothing_joins(graph)


def test_biases_of_a_second_matrix():
    graph, (matrix, bias, *others) = graph_of(*(torch.ones(each).bfloat16() for each in [(32, 16), 16, *[(3, 32)] * 4]))
    graph.output(tuple(called(graph, ADDMM, bias, each, matrix) for each in others))
    assert_nothing_joins(graph)


def test_a_bias_that_is_not_aligned():
    biases = torch.ones(80).bfloat16()
    graph, (matrix, bias, *others) = graph_of(
        torch.ones(3, 32).bfloat16(), biases[1:17], *[torch.ones(32, 16).bfloat16()] * 4
    )
    graph.output(tuple(called(graph, ADDMM, bias, matrix, each) for each in others))
    assert_nothing_joins(graph)


def test_a_matrix_that_is_viewed_anew():
    """As a text is for each layer; what is computed otherwise is another matrix."""
    values = [torch.randn(3, 4, 32).bfloat16(), *(torch.randn(32, 16).bfloat16() for _ in range(9))]
    graph, (text, *weights) = graph_of(*values)
    results = []
    for place, weight in enumerate(weights):
        taken = called(graph, aten.add.Tensor, text, text, alpha=1 if place < 5 else 2)
        results.append(called(graph, MM, called(graph, VIEW, taken, [12, 32]), weight))
    graph.output(tuple(results))
    expected = run(graph, *values)
    assert [len(node.args[2]) for node in joined(graph)] == [5, 4]
    assert_computes(graph, values, expected)


def test_what_is_read_before_stays():
    """A cast that other nodes read, in parts, before the first product."""
    values = [torch.randn(32, 32), *(torch.randn(32, 32).bfloat16() for _ in range(5))]
    graph, (weight, other, matrix, *weights) = graph_of(*values)
    cast = called(graph, CAST, weight, torch.bfloat16)
    early = called(graph, MM, other, cast)
    split = called(graph, aten.split.Tensor, cast, 16)
    parts = [called(graph, operator.getitem, split, place) for place in range(2)]
    results = [called(graph, MM, matrix, each) for each in (cast, *weights)]
    graph.output((early, *parts, *results))
    expected = run(graph, *values)
    assert [len(node.args[2]) for node in joined(graph)] == [4]
    assert_computes(graph, values, expected)


def test_what_the_first_product_is_for():
    """Another's other operand, forward; or read by another, of gradients."""
    values = [torch.randn(32, 32).bfloat16() / 6 for _ in range(6)]
    for is_second in (False, True):
        graph, (matrix, *others) = graph_of(*values)

        def multiply(other, is_second=is_second, graph=graph, matrix=matrix):
            return called(graph, MM, *((other, matrix) if is_second else (matrix, other)))

        results = [multiply(each) for each in others[:4]]
        results.append(multiply(results[3 if is_second else 0]))
        graph.output(tuple(results))
        expected = run(graph, *values)
        assert [len(node.args[2]) for node in joined(graph)] == [4]
        assert_computes(graph, values, expected)


def test_a_later_group():
    """What cannot stand where the first product does may stand where another does."""
    values = [torch.randn(32, 32).bfloat16() / 6 for _ in range(8)]
    graph, (matrix, *weights) = graph_of(*values)
    results = []
    for place, weight in enumerate(weights):
        late = called(graph, aten.neg.default, weight) if place == 1 else weight
        results.append(called(graph, MM, matrix, late))
        if place == 1:
            others = [called(graph, aten.neg.default, each) for each in weights]
        if place > 1:
            results.append(called(graph, MM, matrix, others[place]))
    graph.output(tuple(results))
    expected = run(graph, *values)
    assert sorted(len(node.args[2]) for node in joined(graph)) == [5, 6]
    assert_computes(graph, values, expected)


def test_parts_of_memory():
    """A matrix with gaps between its rows, others that do, and addresses that are not aligned."""
    wide = torch.randn(32, 64).bfloat16()
    for matrix, other in [
        (wide[:, :32], wide[:, :32].clone()),
        (wide[:, :32].clone(), wide[:, :32]),
        (wide.view(-1)[8 : 8 + 1024 - 32].view(31, 32)[:, :32], wide[:, :32].clone()),
        (wide.view(-1)[1 : 1 + 1024].view(32, 32), wide[:, :32].clone()),
    ]:
        graph, (first, *others) = graph_of(matrix, *[other] * 4)
        graph.output(tuple(called(graph, MM, first, each) for each in others))
        is_aligned = matrix.is_contiguous() and other.is_contiguous() and matrix.storage_offset() % 8 == 0
        assert bool(joined(graph)) == is_aligned


def test_what_stands_between_moves():
    """Casts and views of weights stand before the call, which stands where the first product did; so do none of what
    is computed."""
    weights = [torch.randn(16, 32) for _ in range(6)]
    graph, (matrix, *places) = graph_of(torch.randn(3, 32).bfloat16(), *weights)
    results, late = [], None
    for place, weight in enumerate(places):
        if place == 4:
            weight = called(graph, aten.mul.Tensor, weight, 2)
        cast = called(graph, CAST, weight, torch.bfloat16)
        viewed = called(graph, VIEW, cast, [16, 32])
        results.append(called(graph, MM, matrix, called(graph, T, viewed, [1, 0])))
        late = called(graph, aten.neg.default, results[-1])
    graph.output((*results[:-1], late))
    values = [torch.randn(3, 32).bfloat16(), *weights]
    expected = run(graph, *values)
    (call,) = joined(graph)
    assert len(call.args[2]) == 5
    (left,) = graph.find_nodes(op="call_function", target=MM)
    assert call < left
    assert_computes(graph, values, expected)


def test_gradients_stand_where_the_last_did():
    """Each may be viewed and cast on its way out of the graph; another reader keeps it where it is."""
    values = [torch.randn(4, 32).bfloat16(), *(torch.randn(4, 16).bfloat16() for _ in range(6))]
    graph, (matrix, *places) = graph_of(*values)
    results = []
    for place, each in enumerate(places):
        each = called(graph, aten.neg.default, each)
        result = called(graph, MM, called(graph, T, each, [1, 0]), matrix)
        result = called(graph, aten.relu.default, result) if place == 2 else called(graph, VIEW, result, [512])
        results.append(called(graph, CAST, result, torch.float32))
    graph.output(tuple(results))
    expected = run(graph, *values)
    (call,) = joined(graph)
    assert call.args[0] and len(call.args[2]) == 5
    assert all(node < call for node in graph.find_nodes(op="call_function", target=aten.neg.default))
    assert_computes(graph, values, expected)


@pytest.mark.parametrize("which", ["weight", "view", "part", "cast", "wide", "activation", "source"])
@pytest.mark.parametrize("is_second", [False, True])
def test_what_is_written_stays(which, is_second):
    """A node that writes to what products read, between them."""
    values = [torch.randn(32, 32) / 6, *(torch.randn(32, 32).bfloat16() / 6 for _ in range(6))]
    graph, (wide, source, *weights) = graph_of(*values)
    cast = called(graph, CAST, wide, torch.bfloat16)
    half = called(graph, operator.getitem, called(graph, aten.split.Tensor, weights[4], 32), 0)
    results = []
    for place, other in enumerate((*weights[:3], cast, half, None)):
        other = other or called(graph, CAST, wide, torch.bfloat16)
        matrix = called(graph, aten.relu.default, source)
        results.append(called(graph, MM, *((other, matrix) if is_second else (matrix, other))))
        if place == 1:
            view = called(graph, VIEW, weights[2], [1024])
            written = {"weight": weights[2], "view": view, "part": weights[4], "cast": cast, "wide": wide}
            called(graph, aten.mul_.Tensor, written.get(which, matrix if which == "activation" else source), 2)
    graph.output(tuple(results))
    expected = run(graph, *(each.clone() for each in values))
    counts = [len(node.args[2]) for node in joined(graph)]
    assert counts == {"source": [], "wide": [4]}.get(which, [5])
    assert_computes(graph, [each.clone() for each in values], expected)


def test_a_product_of_a_product():
    """A group's results may be another group's matrix, and its weights."""
    values = [torch.randn(32, 32).bfloat16() / 6 for _ in range(13)]
    graph, (matrix, *weights) = graph_of(*values)
    first = [called(graph, MM, matrix, each) for each in weights[:4]]
    second = [called(graph, MM, first[0], each) for each in weights[4:8]]
    third = [called(graph, MM, first[1], each) for each in (*first[2:], *second[:2])]
    graph.output((*first, *second, *third))
    expected = run(graph, *values)
    assert [len(node.args[2]) for node in joined(graph)] == [4, 4, 4]
    assert_computes(graph, values, expected)


def test_nodes_without_values_are_left():
    graph, results, _ = products(count=3)
    del results[0].meta["val"]
    assert_nothing_joins(graph)
