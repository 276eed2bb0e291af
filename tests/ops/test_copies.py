"""Promise: many copies of weights and their gradients are one call, and nothing but speed shows it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config

from ops import copies
from tests.ops.behind_autograd import Changed, compared

pytestmark = pytest.mark.usefixtures("fresh_compiler")
COPIES = torch.ops.normfuse.copies.default


def calls(joined):
    """By graph, the dtype and formats of each call."""
    return [[node.args[1:] for node in nodes] for nodes in joined.calls(COPIES)]


def check(model, *inputs, **options):
    """The joined model, whose result, gradients and strides are those of the model."""
    joined = Changed(model, copies.join)
    for one, other in compared(model, joined, *inputs, **options):
        assert torch.equal(one, other) and one.stride() == other.stride()
    return joined


def mlp(layers=5, width=8, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=bias) for _ in range(layers)])


class Images(nn.Module):
    """Convolutions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def test_linear_layers():
    """Under autocast all weights and biases, and the input; of gradients the weights', as sums are cast for nothing."""
    joined = check(mlp(), torch.randn(3, 8))
    ((dtype, formats),), ((back, of_gradients),) = calls(joined)
    assert (dtype, back) == ("bfloat16", "float32")
    assert formats == 11 * "=" and set(of_gradients) == {"="}
    assert len(of_gradients) >= 5


@pytest.mark.parametrize("format, expected", [(torch.channels_last, [11 * "="]), (torch.contiguous_format, [])])
def test_convolutions(format, expected):
    """The image, weights and biases. All stay Inductor's where it would lay out the copies again."""
    model = Images().to(memory_format=format)
    joined = check(model, torch.randn(2, 4, 8, 8).to(memory_format=format))
    of_weights, of_gradients = calls(joined)
    assert [formats for _, formats in of_weights] == expected
    assert of_gradients == [("float32", 10 * "=")]


def test_few_are_left():
    assert calls(check(mlp(layers=1), torch.randn(3, 8))) == [[], []]


def test_without_autocast():
    assert calls(check(mlp(), torch.randn(3, 8), enabled=False)) == [[], []]


def test_inference():
    with torch.no_grad():
        joined = check(mlp(), torch.randn(3, 8), backward=False)
    assert [len(found) for found in calls(joined)] == [1]


def test_open_sizes():
    """Weights are of known sizes; an input of an open one is left."""
    model = mlp()
    joined = Changed(model, copies.join, dynamic=True)
    for rows in (3, 5):
        input = torch.randn(rows, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(joined(input), model(input))
    (((_, formats),), *_) = calls(joined)
    assert len(formats) == 10


def test_more_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(copies, "MOST_COPIES", 5)
    (found, _) = calls(check(mlp(bias=False, layers=12), torch.randn(3, 8)))
    assert [len(formats) for _, formats in found] == [5, 5]  # three are left
    monkeypatch.setattr(copies, "MOST_COPIES", 64)
    monkeypatch.setattr(copies, "_MOST_ELEMENTS", 64 * 6)
    torch._dynamo.reset()
    (found, _) = calls(check(mlp(bias=False, layers=12), torch.randn(3, 8)))
    assert [len(formats) for _, formats in found] == [6, 6]


def test_what_inductor_multiplies_is_left():
    """With max_autotune its products cast their own results."""
    for option in ("max_autotune", "max_autotune_gemm"):
        torch._dynamo.reset()
        with config.patch(option, True):
            assert calls(check(mlp(), torch.randn(3, 8))) == [[], []]


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
