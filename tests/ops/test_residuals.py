"""Promise: where there is no backward pass, statistics read what sums of 16-bit images are of, so that values are as
near to float32 as Inductor's."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.calls import parse
from ops.layouts import CAST
from tests.ops.opened import Opened
from tests.ops.sketch import (
    ADD,
    DIV,
    MUL,
    PERMUTE,
    RELU,
    SHAPE,
    STATISTICS,
    TEXT,
    VIEW,
    Sketch,
    aten,
    pair,
    subtracted_from,
)

FORMATS = list(itertools.product([torch.contiguous_format, torch.channels_last], repeat=2))


def test_terms_of_a_sum():
    sketch = Sketch()
    x, y, vector, samples = sketch.input(), sketch.input(), sketch.input(8, 1, 1), sketch.input(2, 8, 1, 1)
    total = sketch.call(ADD, sketch.call(ADD, x, vector), sketch.call(ADD, samples, y))
    sketch.statistics(total)
    assert sketch.read() == [("add tensor -> add -> add sample", [x, y, vector, samples])]


@pytest.mark.parametrize("with_image", [False, True])
def test_means_are_without_vectors_added_last(with_image):
    """They are subtracted from the rest, once for each channel. Another norm has a step behind the vectors."""
    sketch = Sketch()
    x, y = sketch.input(), sketch.input()
    vector, samples, own = sketch.input(8, 1, 1), sketch.input(2, 8), sketch.input(8)
    total = sketch.call(ADD, sketch.call(ADD, x, y) if with_image else x, vector)
    sketch.statistics(total, "add -> add sample -> group_norm(4, 1e-05) -> no mul -> no add", own, samples)
    sketch.statistics(total, "add -> silu -> group_norm(4, 1e-05) -> no mul -> no add", own)
    images, steps = ([x, y], ["add tensor"]) if with_image else ([x], [])
    assert sketch.read() == [
        (" -> ".join([*steps, "add", "add", "add sample"]), [*images, vector, own, samples]),
        (" -> ".join([*steps, "add", "add", "silu"]), [*images, vector, own]),
    ]
    assert subtracted_from(sketch) == [images, [*images, vector]]


def test_means_that_something_else_reads():
    """Those must stay the image's, and so does what they are of."""
    sketch = Sketch()
    total = sketch.call(ADD, sketch.input(), sketch.input(8, 1, 1))
    found = sketch.statistics(total)
    sketch._results.append(sketch.call(RELU, found))
    assert sketch.read() == [("", [total])]
    assert subtracted_from(sketch) == [[total]]


def test_what_a_call_does_follows():
    sketch = Sketch()
    x, y, weight = sketch.input(), sketch.input(), sketch.input(8)
    sketch.statistics(sketch.call(ADD, x, y), "relu -> group_norm(4, 1e-05) -> mul -> no add", weight)
    assert sketch.read() == [("add tensor -> relu", [x, y, weight])]


def test_a_sum_of_many_images_is_written():
    """It counts as one of those that follow, which begin again from it."""
    sketch = Sketch()
    images = [sketch.input() for _ in range(6)]
    totals, expected = [images[0]], []
    for image in images[1:]:
        totals.append(sketch.call(ADD, totals[-1], image))
        sketch.statistics(totals[-1])
    expected = [("add tensor", images[:2]), ("add tensor -> add tensor", images[:3]), ("", [totals[3]])]
    expected += [("add tensor", [totals[3], images[4]]), ("add tensor -> add tensor", [totals[3], *images[4:]])]
    assert sketch.read() == expected


def test_what_one_norm_reads_is_there_for_the_next():
    """A pointwise result that statistics read is in memory, and so is what a view is of."""
    sketch = Sketch()
    x = sketch.call(RELU, sketch.input())
    pixels = sketch.call(VIEW, x, [2, 8, 30])
    sketch.statistics(pixels)
    other = sketch.input()
    sketch.statistics(sketch.call(ADD, x, other))
    assert sketch.read() == [("", [pixels]), ("add tensor", [x, other])]


def test_a_scale_of_one():
    """Blocks of diffusers divide by it."""
    sketch = Sketch()
    x, y = sketch.input(), sketch.input()
    total = sketch.call(DIV, sketch.call(MUL, sketch.call(ADD, x, y), 1), 1.0)
    sketch.statistics(total)
    assert sketch.read() == [("add tensor", [x, y])]


PRODUCTS = {
    "mm": lambda sketch, matrix: sketch.call(aten.mm.default, matrix, sketch.input(8, 8)),
    "addmm": lambda sketch, matrix: sketch.call(aten.addmm.default, sketch.input(8), matrix, sketch.input(8, 8)),
    "bmm": lambda sketch, matrix: sketch.call(
        aten.bmm.default, sketch.call(VIEW, matrix, [2, 30, 8]), sketch.input(2, 8, 8)
    ),
}


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_views_of_products(make):
    """What a linear layer makes of an image's pixels is in memory, as is what a view of them was made from."""
    sketch = Sketch()
    product = make(sketch, sketch.call(VIEW, sketch.input(60, 8), [60, 8]))
    viewed = sketch.call(PERMUTE, sketch.call(VIEW, product, [2, 6, 5, 8]), [0, 3, 1, 2])
    x = sketch.call(PERMUTE, sketch.input(2, 6, 5, 8, format=torch.contiguous_format), [0, 3, 1, 2])
    sketch.statistics(sketch.call(ADD, x, viewed))
    assert sketch.read() == [("add tensor", [x, viewed])]


def test_another_view_of_what_was_read():
    sketch = Sketch()
    x = sketch.call(RELU, sketch.input())
    pixels = sketch.call(VIEW, x, [2, 8, 30])
    sketch.statistics(pixels)
    again, other = sketch.call(VIEW, pixels, list(SHAPE)), sketch.input()
    sketch.statistics(sketch.call(ADD, again, other))
    assert sketch.read() == [("", [pixels]), ("add tensor", [again, other])]


OTHERS = {
    "no sum": lambda sketch: sketch.input(),
    "pointwise": lambda sketch: sketch.call(RELU, sketch.input()),
    "alpha": lambda sketch: pair(sketch, alpha=2),
    "a number": lambda sketch: sketch.call(ADD, sketch.input(), 1.0),
    "one value": lambda sketch: pair(sketch, (), (1, 1, 1)),
    "an image for all samples": lambda sketch: pair(sketch, (), (8, 6, 5)),
    "columns": lambda sketch: pair(sketch, (), (5,)),
    "a value a sample": lambda sketch: pair(sketch, (), (2, 1, 1, 1)),
    "a value a sample of all pixels": lambda sketch: pair(sketch, (), (2, 1, 6, 5)),
    "contiguous": lambda sketch: sketch.call(ADD, sketch.input(), sketch.input(format=torch.contiguous_format)),
    "three dimensions": lambda sketch: pair(sketch, (2, 8, 30), (2, 8, 30)),
    "a row of pixels": lambda sketch: pair(sketch, (), (8, 1, 5)),
    "a column of a sample's pixels": lambda sketch: pair(sketch, (), (2, 8, 6, 1)),
    "another dtype": lambda sketch: sketch.call(ADD, sketch.input(), sketch.input(dtype=torch.float16)),
    "no image": lambda sketch: pair(sketch, (2, 8, 6, 1), (8, 6, 5)),
    "divided": lambda sketch: sketch.call(DIV, pair(sketch), 2.0),
    "a pointwise term": lambda sketch: sketch.call(ADD, sketch.input(), sketch.call(RELU, sketch.input())),
    "rounded": lambda sketch: sketch.call(
        CAST, sketch.call(ADD, sketch.input(), sketch.input(dtype=torch.float32)), torch.bfloat16
    ),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_are_read_as_they_were(make):
    sketch = Sketch()
    image = make(sketch)
    sketch.statistics(image)
    assert sketch.read() == [("", [image])]


def test_a_convolution_that_is_added_twice():
    """It is computed once."""
    sketch = Sketch(device="cuda")
    bias = sketch.input(8)
    x, y = sketch.convolution(sketch.input(), bias), sketch.input()
    sketch.statistics(sketch.call(ADD, sketch.call(ADD, x, y), x))
    ((steps, read),) = sketch.read()
    assert steps == "add tensor -> add tensor -> add -> add" and read[0] is read[2] and read[3] is read[4]


def test_long_sums_and_sums_of_shared_terms():
    """Neither takes long to leave, however often a term counts."""
    sketch = Sketch()
    first = second = sketch.input()
    for _ in range(1500):
        first, second = second, sketch.call(ADD, second, first)
    sketch.statistics(second)
    assert sketch.read() == [("", [second])]


def test_many_vectors():
    sketch = Sketch()
    x = sketch.input()
    for _ in range(9):
        x = sketch.call(ADD, x, sketch.input(8, 1, 1))
    sketch.statistics(x)
    assert sketch.read() == [("", [x])]


def test_the_norm_has_the_sum_that_its_statistics_are_of(fresh_compiler):
    """Where a convolution reads it too, it is written and rounded: each value would be far from a group's mean."""
    weight = torch.randn(8, 8, 1, 1).bfloat16()

    def function(x, y):
        total = x + y
        return F.conv2d(total, weight), F.group_norm(total, 4, eps=1e-6)

    x = torch.ones(SHAPE).bfloat16().contiguous(memory_format=torch.channels_last)
    arguments = x, torch.full_like(x, 1.2 * 2**-9)
    opened = Opened(function)
    with torch.no_grad():
        opened(*arguments)
        torch._dynamo.reset()
        _, result = torch.compile(function, backend="normfuse")(*arguments)
    assert len(opened.nodes("normfuse.statistics.default")[0].args[1]) == 2
    assert result.abs().max() < 1e-2


@pytest.mark.parametrize("before", [lambda x: x, F.silu], ids=["nothing", "silu"])
@pytest.mark.parametrize("norms", [1, 2])
def test_norms_of_an_image_with_a_vector(before, norms, fresh_compiler):
    """That others read, so that it is no step of theirs."""
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 1).bfloat16()
    vectors = torch.randn(2, 8, 1, 1).mul(3).bfloat16()

    def function(x, dtype=None):
        image = model(x) + vectors.to(dtype)
        norm = F.group_norm(before(image), 4)
        return image, F.silu(norm if norms == 1 else norm + F.group_norm(image + vectors[1].to(dtype), 2))

    x = torch.randn(SHAPE).bfloat16().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        found = Opened(function)(x)
        model.double()
        expected = function(x.double(), torch.float64)
    for each, right in zip(found, expected, strict=True):
        assert (each - right).norm() < 1e-2 * right.norm()


@pytest.mark.parametrize("number", [3, 3.0])
def test_numbers_that_are_open(number, fresh_compiler):
    with torch.no_grad():
        function = Opened(lambda x, y, number: F.group_norm(x + y + number, 4), dynamic=True)
        x, y = torch.randn(2, *SHAPE).bfloat16()
        expected = F.group_norm((x + y + number).float(), 4)
        assert (function(x, y, number) - expected).abs().max() < 5e-2


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 1), (1, 8, 1, 1), (8, 1, 1), (2, 8, 1, 1), (1, 1, 1), (2, 1, 6, 5)], ids=str
)
def test_operands_of_all_shapes(shape, fresh_compiler):
    torch.manual_seed(0)
    convolution, x, other = nn.Conv2d(8, 8, 1).bfloat16(), torch.randn(SHAPE).bfloat16(), torch.randn(shape).bfloat16()
    with torch.no_grad():
        found = Opened(lambda x: F.group_norm(convolution(x) + 3 * other + x, 4))(x)
        expected = F.group_norm((convolution(x) + 3 * other + x).float(), 4)
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_a_vector_may_come_first():
    sketch = Sketch()
    vector, x = sketch.input(8, 1, 1), sketch.input()
    sketch.statistics(sketch.call(ADD, vector, x))
    assert sketch.read() == [("add", [x, vector])]


def test_of_float32():
    """Nothing would be rounded."""
    sketch = Sketch(torch.float32)
    image = sketch.call(ADD, sketch.input(), sketch.input())
    sketch.statistics(image)
    assert sketch.read() == [("", [image])]


def test_before_a_backward_pass():
    """It keeps the sum."""
    sketch = Sketch()
    image = sketch.call(ADD, sketch.input(), sketch.input())
    found, wanted = sketch.statistics(image), f"{(8,)!r} torch.float32"
    sketch._graph.call_function(torch.ops.normfuse.sums.default, (TEXT, wanted, image, found, [image]))
    assert sketch.read() == [("", [image])]


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_where_inductor_writes_convolutions(option):
    sketch = Sketch()
    image = sketch.call(ADD, sketch.input(), sketch.input())
    sketch.statistics(image)
    with torch._inductor.config.patch({option: True}):
        assert sketch.read() == [("", [image])]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_biases_of_convolutions(device):
    """On a GPU Inductor adds them behind the convolution, to the residual too. All who read the convolution do."""
    sketch = Sketch(device=device)
    bias = sketch.input(8)
    x = sketch.convolution(sketch.input(), bias)
    y = sketch.convolution(sketch.call(RELU, x))
    sketch.statistics(x)
    sketch.statistics(sketch.call(ADD, x, y))
    (first, read), (second, of_sum) = sketch.read()
    if device == "cpu":
        assert (first, read, second, of_sum) == ("", [x], "add tensor", [x, y])
        return
    convolution, vector = read
    assert (first, convolution.args[2], vector.args) == ("add", None, (bias, [-1, 1, 1]))
    assert (second, of_sum) == ("add tensor -> add", [convolution, y, vector])
    assert y.args[0].args[0].args == (convolution, vector)


def test_a_bias_before_a_step():
    """The norm takes the unrounded sum that its statistics are of."""
    sketch = Sketch(device="cuda")
    x = sketch.convolution(sketch.input(), sketch.input(8))
    sketch.statistics(x, f"silu -> {TEXT}")
    ((steps, read),) = sketch.read()
    assert steps == "add -> silu" and subtracted_from(sketch) == [read]


READERS = {
    "convolution": lambda sketch, x: sketch.convolution(x),
    "product": lambda sketch, x: sketch.call(aten.mm.default, sketch.call(VIEW, x, [-1, 8]), sketch.input(8, 3)),
    "result": lambda sketch, x: sketch.call(VIEW, x, [-1, 8]),
    "view of many": lambda sketch, x: functools.reduce(lambda y, _: sketch.call(VIEW, y, list(SHAPE)), range(1200), x),
}


@pytest.mark.parametrize("reads", READERS)
def test_a_convolution_that_something_else_reads(reads):
    """Its result is written with its bias then, in place. A norm of the one without would keep both in memory."""
    sketch = Sketch(device="cuda")
    bias = sketch.input(8)
    x = sketch.convolution(sketch.input(), bias)
    sketch._results.append(READERS[reads](sketch, x))
    sketch.statistics(x)
    assert sketch.read() == [("", [x])] and x.args[2] is bias


class Residuals(nn.Module):
    """Blocks of a network whose norms come first."""

    def __init__(self, blocks, channels=16):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(blocks))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(blocks))

    def forward(self, image):
        x = self.first(image)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = (x + convolution(F.silu(norm(x)))) / 1.0
        return x


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return Residuals(8), torch.randn(4, 3, 12, 12)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_values(format, problem):
    model, image = problem
    model, image = model.bfloat16().to(memory_format=format), image.bfloat16().contiguous(memory_format=format)
    opened = Opened(model)
    with torch.no_grad():
        result, expected = opened(image), model.float()(image.float())
        error = (result - expected).norm() / expected.norm()
    assert error < 1e-2
    reads = [len(node.args[1]) for node in opened.nodes("normfuse.statistics.default")]
    assert reads == [2, 3, 4, 2, 3, 4, 2, 3]


def test_errors_are_inductors(problem):
    """Sums of PyTorch's are rounded each. (On a CPU Inductor adds up more images than on a GPU, where convolutions
    leave it their biases.)"""
    model, image = problem
    with torch.no_grad():
        model, image = model.bfloat16(), image.bfloat16()
        found = {name: torch.compile(model, backend=name)(image) for name in ("inductor", "normfuse")}
        found["eager"] = model(image)
        expected = model.float()(image.float())
    errors = {name: ((each - expected).norm() / expected.norm()).item() for name, each in found.items()}
    assert errors["normfuse"] - errors["inductor"] <= 0.25 * (errors["eager"] - errors["inductor"]), errors


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_a_sum(dtype, formats):
    """In float32, of images that lie in any ways."""
    torch.manual_seed(0)
    x, y = (torch.randn(SHAPE).to(dtype).contiguous(memory_format=format) for format in formats)
    vector, samples, weight = torch.randn(8, 1, 1).to(dtype), torch.randn(2, 8, 1, 1).to(dtype), torch.randn(8)
    text = parse("add tensor -> add -> add sample -> group_norm(4, 1e-05) -> mul -> no add").text_in_graph
    found = STATISTICS(text, [x, y, vector, samples, weight], False)
    total = sum(each.double() for each in (x, y, vector, samples)).reshape(2, 4, -1)
    means, variances = total.mean(2), total.var(2, correction=0)
    torch.testing.assert_close(found[:8].view(2, 4).double(), means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[8:16].view(2, 4).double(), (variances + 1e-5).rsqrt(), rtol=1e-5, atol=1e-6)
