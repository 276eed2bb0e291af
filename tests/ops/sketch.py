"""Graphs behind autograd, written by hand, for ``ops.residuals``."""

import operator

import torch

from ops import layouts, residuals
from ops.layouts import CAST

STATISTICS = torch.ops.normfuse.statistics.default
aten = torch.ops.aten
ADD, DIV, MUL, SLICE, SUB = (getattr(aten, name).Tensor for name in ("add", "div", "mul", "slice", "sub"))
CONVOLUTION, PERMUTE, RELU, VIEW = (getattr(aten, name).default for name in ("convolution", "permute", "relu", "view"))
TEXT = "group_norm(4, 1e-05) -> no mul -> no add"
SHAPE = 2, 8, 6, 5


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


def terms(node):
    """What a sum of casts is of."""
    if node.target is ADD:
        return [each for part in node.args for each in terms(part)]
    assert node.target is CAST
    return [node.args[0]]


def subtracted_from(sketch):
    """By norm: the sum from which the means are subtracted."""
    return [terms(node.args[0]) for node in sketch._graph.nodes if node.target is SUB]


def pair(sketch, *shapes, format=torch.channels_last, **options):
    """The sum of an input of each shape; of images without any."""
    return sketch.call(ADD, *(sketch.input(*shape, format=format) for shape in shapes or ((), ())), **options)
