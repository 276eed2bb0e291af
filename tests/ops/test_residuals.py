"""Promise: where there is no backward pass, statistics read what sums of 16-bit images are of, so that values are as
near to float32 as Inductor's."""

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import layouts, residuals
from ops.calls import parse
from ops.layouts import CAST
from tests.ops.opened import Opened

STATISTICS = torch.ops.normfuse.statistics.default
aten = torch.ops.aten
ADD, DIV, MUL, SLICE, SUB = (getattr(aten, name).Tensor for name in ("add", "div", "mul", "slice", "sub"))
CONVOLUTION, PERMUTE, RELU, VIEW = (getattr(aten, name).default for name in ("convolution", "permute", "relu", "view"))
TEXT = "group_norm(4, 1e-05) -> no mul -> no add"
SHAPE = 2, 8, 6, 5
FORMATS = list(itertools.product([torch.contiguous_format, torch.channels_last], repeat=2))


class Sketch:
    """A graph behind autograd, with images and vectors as inputs, and norms' statistics as results."""

    def __init__(self, dtype=torch.bfloat16, device="cpu"):
        self._mode, self._graph = torch._subclasses.FakeTensorMode(), torch.fx.Graph()
        self._dtype, self._device, self._results = dtype, device, []

    def input(self, *shape, dtype=None, format=torch.channels_last):
        """An image, or what has another shape."""
        node = self._graph.placeholder(f"p{len(self._graph.nodes)}")
        with self._mode:
            format = format if len(shape or SHAPE) == 4 else torch.contiguous_format
            options = {"dtype": dtype or self._dtype, "device": self._device, "memory_format": format}
            node.meta["val"] = torch.empty(shape or SHAPE, **options)
        return node

    def call(self, target, *arguments, **options):
        node = self._graph.call_function(target, arguments, options)
        node.meta["val"] = layouts.computed(node)
        return node

    def convolution(self, image, bias=None, format=torch.channels_last):
        """With a weight of this format, in which the result lies if the image does."""
        weight = self.input(8, 8, 1, 1, format=format)
        return self.call(CONVOLUTION, image, weight, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def statistics(self, image, text=TEXT, *others):
        """Of a norm that is a result."""
        found = self.call(STATISTICS, text, [image, *others], image.meta["val"].dtype.itemsize == 2)
        samples, channels, *pixels = image.meta["val"].shape
        last = self.call(SLICE, self.call(VIEW, found, [-1]), 0, -2 * samples * channels)
        both = self.call(aten.unbind.int, self.call(VIEW, last, [2, samples, channels, *[1] * len(pixels)]))
        centre, scale = (self.call(operator.getitem, both, place) for place in range(2))
        centred = self.call(SUB, self.call(CAST, image, torch.float32), centre)
        self._results.append(self.call(MUL, centred, scale))
        return found

    def read(self):
        """By statistics: the steps before the norm, and what it reads, once the pass has run."""
        self._graph.output(self._results)
        with self._mode:  # as in Inductor
            residuals.read_terms(self._graph)
        self._graph.lint()
        found = [node for node in self._graph.nodes if node.target is STATISTICS]
        return [(node.args[0].partition("group_norm")[0].removesuffix(" -> "), node.args[1]) for node in found]


def test_terms_of_a_sum():
    sketch = Sketch()
    x, y, vector, samples = sketch.input(), sketch.input(), sketch.input(8, 1, 1), sketch.input(2, 8, 1, 1)
    total = sketch.call(ADD, sketch.call(ADD, x, vector), sketch.call(ADD, samples, y))
    sketch.statistics(total)
    assert sketch.read() == [("add tensor -> add -> add sample", [x, y, vector, samples])]


def terms(node):
    """What a sum of casts is of."""
    if node.target is ADD:
        return [each for part in node.args for each in terms(part)]
    assert node.target is CAST
    return [node.args[0]]


def subtracted_from(sketch):
    """By norm: the sum from which the means are subtracted."""
    return [terms(node.args[0]) for node in sketch._graph.nodes if node.target is SUB]


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


def pair(sketch, *shapes, format=torch.channels_last, **options):
    """The sum of an input of each shape; of images without any."""
    return sketch.call(ADD, *(sketch.input(*shape, format=format) for shape in shapes or ((), ())), **options)


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


def frames(sketch, image):
    """A batch of images as one video."""
    return sketch.call(PERMUTE, sketch.call(VIEW, image, [1, *SHAPE]), [0, 2, 1, 3, 4])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_view_of_a_sum(device):
    """It is a sum of views, in which a vector has as many dimensions."""
    sketch = Sketch(device=device)
    x, vector, bias = sketch.input(), sketch.input(1, 8, 1, 1), sketch.input(8)
    y = sketch.convolution(sketch.input(), bias)
    sketch.statistics(frames(sketch, sketch.call(ADD, sketch.call(ADD, x, vector), y)))
    ((steps, read),) = sketch.read()
    images, vectors = read[:2], read[2:]
    assert [each.meta["val"].shape for each in images] == [(1, 8, 2, 6, 5)] * 2
    assert [each.meta["val"].shape for each in vectors] == [(8, 1, 1, 1)] * len(vectors)
    convolution = residuals._source(images[1])
    assert residuals._source(images[0]) is x and convolution.target is CONVOLUTION
    assert [residuals._source(each) for each in vectors] == ([vector, bias] if device == "cuda" else [vector])
    assert convolution.args[2] is (None if device == "cuda" else bias)
    assert steps == " -> ".join(["add tensor", *["add"] * len(vectors)])
    (of_norm,) = subtracted_from(sketch)
    assert of_norm == images if device == "cpu" else all(map(operator.is_, of_norm, images))


def test_sums_behind_views_of_sums():
    """There and back again."""
    sketch = Sketch()
    x, y, z = (sketch.input() for _ in range(3))
    video = frames(sketch, sketch.call(ADD, x, y))
    total = sketch.call(ADD, video, frames(sketch, z))
    image = sketch.call(VIEW, sketch.call(PERMUTE, total, [0, 2, 1, 3, 4]), list(SHAPE))
    sketch.statistics(video)
    sketch.statistics(image)
    (_, of_video), (steps, read) = sketch.read()
    assert [residuals._source(each) for each in of_video] == [x, y]
    assert steps == "add tensor -> add tensor" and [residuals._source(each) for each in read] == [x, y, z]
    assert {each.meta["val"].shape for each in read} == {SHAPE}


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_view_of_an_input(is_viewed):
    """It would be copied once more."""
    sketch = Sketch()
    x, y = sketch.input(format=torch.contiguous_format), sketch.input()
    sketch.statistics(x)
    image = sketch.call(ADD, x, y)
    image = frames(sketch, image) if is_viewed else image
    sketch.statistics(image)
    assert sketch.read() == [("", [x]), ("", [image]) if is_viewed else ("add tensor", [x, y])]


@pytest.mark.parametrize("target, arguments", [(aten.clone.default, ()), (DIV, (1.0,)), (MUL, (1,))])
def test_a_copy_of_a_sum(target, arguments):
    sketch = Sketch()
    x, y = sketch.input(), sketch.input()
    sketch.statistics(frames(sketch, sketch.call(target, sketch.call(ADD, x, y), *arguments)))
    ((steps, read),) = sketch.read()
    assert steps == "add tensor" and [residuals._source(each) for each in read] == [x, y]
    assert {each.meta["val"].shape for each in read} == {(1, 8, 2, 6, 5)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_view_of_a_convolution(device):
    """On a GPU, the bias is read as a vector."""
    sketch = Sketch(device=device)
    bias = sketch.input(8)
    format = torch.contiguous_format
    image = frames(sketch, sketch.convolution(sketch.input(format=format), bias, format))
    sketch.statistics(image)
    ((steps, read),) = sketch.read()
    if device == "cpu":
        assert (steps, read) == ("", [image])
    else:
        assert steps == "add" and [each.meta["val"].shape for each in read] == [(1, 8, 2, 6, 5), (8, 1, 1, 1)]


VIEWS_THAT_LEAD_ELSEWHERE = {
    "a vector a frame": lambda sketch: frames(sketch, pair(sketch, (), (2, 8, 1, 1))),
    "other channels": lambda sketch: sketch.call(VIEW, pair(sketch), [2, 4, 2, 6, 5]),
    "channels with pixels": lambda sketch: sketch.call(
        VIEW, sketch.call(VIEW, pair(sketch, format=torch.contiguous_format), [2, 48, 5]), list(SHAPE)
    ),
    "as many of other channels": lambda sketch: sketch.call(
        PERMUTE, sketch.call(VIEW, sketch.call(PERMUTE, pair(sketch), [0, 2, 3, 1]), [2, 6, 10, 4]), [0, 3, 1, 2]
    ),
    "some channels": lambda sketch: sketch.call(SLICE, pair(sketch), 1, 0, 4),
    "some samples": lambda sketch: sketch.call(SLICE, pair(sketch), 0, 0, 1),
    "pixels by columns": lambda sketch: sketch.call(PERMUTE, pair(sketch), [0, 1, 3, 2]),
    "rows": lambda sketch: sketch.call(VIEW, pair(sketch, (2, 8, 30), (2, 8, 30)), list(SHAPE)),
    "pointwise": lambda sketch: frames(sketch, sketch.call(RELU, pair(sketch))),
    "pixels of an input": lambda sketch: sketch.call(
        VIEW, sketch.call(VIEW, sketch.input(format=torch.contiguous_format), [2, 8, 30]), list(SHAPE)
    ),
    "tokens": lambda sketch: sketch.call(
        PERMUTE, sketch.call(VIEW, sketch.call(VIEW, sketch.input(60, 8), [20, 3, 8]), [2, 10, 3, 8]), [0, 3, 2, 1]
    ),
}


def test_views_of_open_sizes(fresh_compiler):
    """They are left: to compare sizes could settle them."""
    convolution, norm = nn.Conv2d(8, 8, 1).bfloat16(), nn.GroupNorm(2, 8).bfloat16()
    opened = Opened(lambda x: norm((convolution(x) + convolution(-x))[None].transpose(1, 2)), dynamic=True)
    with torch.no_grad():
        for size in (2, 3):
            opened(torch.ones(size, 8, 4, size, dtype=torch.bfloat16))
    assert [len(node.args[1]) for node in opened.nodes("normfuse.statistics.default")] == [2]


@pytest.mark.parametrize("make", VIEWS_THAT_LEAD_ELSEWHERE.values(), ids=VIEWS_THAT_LEAD_ELSEWHERE)
def test_other_views_are_read_as_they_were(make):
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


class Frames(nn.Module):
    """Residual blocks of images and of a video, in turn."""

    def __init__(self, channels=16):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(4))
        kinds = [nn.Conv2d, nn.Conv3d] * 2
        self.convolutions = nn.ModuleList(each(channels, channels, 3, padding=1) for each in kinds)

    def forward(self, x, videos):
        x = self.first(x)
        for number, (norm, convolution) in enumerate(zip(self.norms, self.convolutions, strict=True)):
            if number % 2:
                x = x.unflatten(0, (videos, -1)).transpose(1, 2)
            x = x + convolution(F.silu(norm(x)))
            if number % 2:
                x = x.transpose(1, 2).flatten(0, 1)
        return x


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("videos", [1, 2])
def test_values_of_frames(videos, dynamic, fresh_compiler):
    """None is copied for statistics. Of open sizes, sums are written."""
    torch.manual_seed(0)
    model, image = Frames().bfloat16(), torch.randn(6, 3, 12, 12, dtype=torch.bfloat16)
    opened = Opened(model, dynamic=dynamic)
    with torch.no_grad():
        result, exact = opened(image, videos), model.float()(image.float(), videos)
    assert (result - exact).norm() / exact.norm() < 1e-2
    found = opened.nodes("normfuse.statistics.default")
    if dynamic:
        assert [len(node.args[1]) for node in found] == [2, 2, 2, 2]
        return
    assert [len(node.args[1]) for node in found] == [2, 3, 4, 2]
    sources = [residuals._source(each) for node in found for each in node.args[1]]
    assert all(each.target is not aten.clone.default for each in sources)


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
