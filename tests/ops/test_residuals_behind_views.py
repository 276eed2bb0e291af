"""Promise: statistics read the terms of a sum behind views and copies too, as between frames and a video."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import residuals
from tests.ops.opened import Opened
from tests.ops.sketch import (
    ADD,
    CONVOLUTION,
    DIV,
    MUL,
    PERMUTE,
    RELU,
    SHAPE,
    SLICE,
    VIEW,
    Sketch,
    aten,
    pair,
    subtracted_from,
)


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
