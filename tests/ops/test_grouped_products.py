"""Promise: in a graph behind autograd, small products of one matrix are one call, and nothing but speed shows it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch.utils.flop_counter import FlopCounterMode

from ops import grouped_products
from ops.grouped_products import GROUPED, join
from ops.layouts import CAST
from tests.ops.behind_autograd import Changed, called, graph_of, run

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten
MM, ADDMM, T, VIEW = aten.mm.default, aten.addmm.default, aten.permute.default, aten.view.default


class Embedded(nn.Module):
    """Layers of which each adds what another layer makes of one embedding, as the blocks of a UNet do."""

    def __init__(self, layers=5, bias=True, widths=(32, 48)):
        super().__init__()
        torch.manual_seed(0)
        sizes = [widths[place % len(widths)] for place in range(layers)]
        self.embeddings = nn.ModuleList([nn.Linear(64, size, bias=bias) for size in sizes])
        self.layers = nn.ModuleList([nn.Linear(size, size) for size in sizes])

    def forward(self, x, embedding):
        for embed, layer in zip(self.embeddings, self.layers, strict=True):
            x = torch.tanh(layer(F.pad(x, (0, layer.in_features - x.shape[1]))) + embed(F.silu(embedding)))
        return x


def check(model, *inputs, enabled=True, backward=True):
    """The changed model, whose result, gradients and strides are those of the model."""
    changed, found = Changed(model, join), []
    for function in (model, changed):
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
            torch.testing.assert_close(other, one, rtol=3e-2, atol=3e-2, check_stride=True)
    return changed


def calls(changed):
    """By graph, of each call whether the matrix comes second, and how many products it makes."""
    return [[(node.args[0], len(node.args[2])) for node in nodes] for nodes in changed.calls(GROUPED)]


def inputs(rows=3, width=32):
    return torch.randn(rows, width), torch.randn(rows, 64)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_embedding(bias):
    """Forward, and of the weights' gradients."""
    assert calls(check(Embedded(bias=bias), *inputs())) == [[(False, 5)], [(True, 5)]]


def test_inference():
    """Each has its activation anew there, and one is left."""
    model = Embedded().bfloat16()
    with torch.no_grad():
        changed = check(model, *(each.bfloat16() for each in inputs()), enabled=False, backward=False)
    assert calls(changed) == [[(False, 5)]]
    (graph,) = changed.graphs
    assert [node.target for node in graph.nodes].count(aten.exp.default) == 1


def test_what_differs_is_not_one_matrix():
    class Model(Embedded):
        def forward(self, x, embedding):
            return sum(layer(embedding * place).sum() for place, layer in enumerate(self.embeddings))

    model = Model(widths=(32,)).bfloat16()
    with torch.no_grad():
        changed = check(model, *(each.bfloat16() for each in inputs()), enabled=False, backward=False)
    assert calls(changed) == [[]]


def test_noise_is_drawn_as_often():
    class Model(Embedded):
        def forward(self, x, embedding):
            return torch.stack([layer(torch.rand_like(embedding)) for layer in self.embeddings])

    model = Model(widths=(32,)).bfloat16()
    changed = Changed(model, join)
    with torch.no_grad():
        first, *others = changed(*(each.bfloat16() for each in inputs()))
    assert calls(changed) == [[]]
    assert not any(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("layers, expected", [(2, []), (3, [3]), (7, [7])])
def test_few_are_left(layers, expected):
    assert calls(check(Embedded(layers), *inputs())) == [
        [(False, each) for each in expected],
        [(True, each) for each in expected],
    ]


def test_more_than_one_call_takes(monkeypatch):
    monkeypatch.setattr(grouped_products, "MOST_PRODUCTS", 4)
    assert calls(check(Embedded(10), *inputs())) == [[(False, 4)] * 2, [(True, 4)] * 2]  # two are left


@pytest.mark.parametrize(
    "most, expected",
    [((16 + 64 + 1) * 32 * 5 - 65 * 32, [[(False, 5)] * 2, []]), (16 * 32 * 5, [[], [(True, 5)] * 2])],
    ids=["forward", "gradients"],
)
def test_what_is_kept_is_bounded(monkeypatch, most, expected):
    """Results, and casts of weights and biases behind the first; of gradients those of the results."""
    monkeypatch.setattr(grouped_products, "_MOST_ELEMENTS", most)
    found = calls(check(Embedded(12, widths=(32,)), *inputs(16)))
    for one, other in zip(found, expected, strict=True):
        assert one == other or not other


@pytest.mark.parametrize(
    "name, value", [("_MOST_MULTIPLICATIONS", 3 * 64 * 40), ("_MOST_TERMS", 3), ("_MOST_TERMS", 2)]
)
def test_large_ones_are_left(monkeypatch, name, value):
    """Forward 64 terms are summed, and of a weight's gradient 3, of the rows."""
    monkeypatch.setattr(grouped_products, name, value)
    forward, backward = ([[]], [[]])
    if name == "_MOST_MULTIPLICATIONS":
        forward, backward = [[(False, 4)]], [[(True, 4)]]
    elif value == 3:
        backward = [[(True, 8)]]
    assert calls(check(Embedded(8), *inputs())) == forward + backward


def test_without_autocast():
    """float32 is another pass's."""
    assert calls(check(Embedded(), *inputs(), enabled=False)) == [[], []]


def test_what_inductor_multiplies_is_left():
    for option in ("max_autotune", "max_autotune_gemm"):
        torch._dynamo.reset()
        with config.patch(option, True):
            assert calls(check(Embedded(), *inputs())) == [[], []]


def test_open_sizes():
    """A product of an open number of rows is left."""
    model = Embedded()
    changed = Changed(model, join, dynamic=True)
    for rows in (3, 5):
        given = inputs(rows)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(changed(*given), model(*given), rtol=3e-2, atol=3e-2)
    assert calls(changed)[0] == []


def test_other_gpus(monkeypatch):
    """Where it was not measured."""
    for architecture in (80, 100):
        torch._dynamo.reset()
        monkeypatch.setattr(grouped_products, "architecture", lambda device, number=architecture: number)
        assert calls(check(Embedded(), *inputs())) == [[], []]


# Node by node


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


# The operator


def operands(is_second, bias=False):
    others = [
        torch.randn(3, 32).bfloat16().T if is_second else torch.randn(width, 32).bfloat16().T for width in (16, 48)
    ]
    biases = [torch.randn(width).bfloat16() for width in (16, 48)] if bias else []
    return is_second, torch.randn(3, 32).bfloat16(), others, biases


@pytest.mark.parametrize("is_second, bias", [(False, False), (False, True), (True, False)])
def test_the_operator(is_second, bias):
    given = operands(is_second, bias)
    torch.library.opcheck(GROUPED, given)
    _, matrix, others, biases = given
    for place, (other, result) in enumerate(zip(others, GROUPED(*given), strict=True)):
        expected = other.double() @ matrix.double() if is_second else matrix.double() @ other.double()
        expected += biases[place].double() if bias else 0
        torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)
        assert result.is_contiguous()


def test_both_directions_of_the_same_matrices():
    matrix, *others = torch.randn(4, 32, 32).bfloat16() / 6
    for is_second in (False, True):
        for other, result in zip(others, GROUPED(is_second, matrix, others, []), strict=True):
            expected = other @ matrix if is_second else matrix @ other
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_tensors_that_do_lie_otherwise():
    """Not all alike, and biases with gaps, as a compiler may lay them out."""
    matrix, biases = torch.randn(3, 32).bfloat16(), [torch.randn(32).bfloat16()[::2] for _ in range(2)]
    others = [torch.randn(32, 16).bfloat16(), torch.randn(16, 32).bfloat16().T]
    for result, other, bias in zip(GROUPED(False, matrix, others, biases), others, biases, strict=True):
        expected = matrix.double() @ other.double() + bias.double()
        torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_flops():
    for is_second in (False, True):
        given = operands(is_second)
        with FlopCounterMode(display=False) as counter:
            GROUPED(*given)
        assert counter.get_total_flops() == (2 * 2 * 32 * 3 * 32 if is_second else 2 * 3 * 32 * (16 + 48))
