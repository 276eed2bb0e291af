"""Promise: in a graph behind autograd, small products of one matrix are one call, and nothing but speed shows it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch.utils.flop_counter import FlopCounterMode

from ops import grouped_products, precision
from ops.grouped_products import GROUPED, join
from tests.ops.behind_autograd import Changed, compared

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aten = torch.ops.aten


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


def check(model, *inputs, **options):
    """The changed model, whose result, gradients and strides are those of the model."""
    changed = Changed(model, join)
    for one, other in compared(model, changed, *inputs, **options):
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
        monkeypatch.setattr(precision, "architecture", lambda device, number=architecture: number)
        assert calls(check(Embedded(), *inputs())) == [[], []]


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
