"""In graphs without a backward pass, an open norm's statistics read what a sum of images is of.

The operator that makes a norm's statistics (``ops.open_norms``) reads memory. A sum, such as a residual, would be
written for it, rounded to 16 bits, and read from there by all others too. Inductor computes such sums where they are
read, in float32, and rounds one every few sums. So do graphs in which statistics read images and vectors, as products
and convolutions write them, and add them up themselves.
"""

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from ops.calls import parse
from ops.convolution import CHANNELS_LAST
from ops.graph_nodes import has_shape
from ops.layouts import CAST, STATISTICS, SUMS, VIEWS, call_like, operator_name
from ops.pointwise import kind_of
from triton_kernels.built_in import NAMED

aten = torch.ops.aten

#: Images that a kernel adds up. A sum of more is written, and is an image to what follows.
_MOST_IMAGES = 3
_MOST_VECTORS = 8
#: What is in memory, beside a graph's inputs: results of libraries' kernels.
_WRITTEN = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
_CASTS = ("prims::convert_element_type", "aten::_to_copy")


@dataclass(frozen=True)
class _Sum:
    """What a value is the sum of: images of its shape, and vectors."""

    images: tuple[Node, ...]
    vectors: tuple[Node, ...] = ()


def read_terms(graph: Graph) -> None:
    """Let the statistics of 16-bit images read the terms of their sums, where the graph has no backward pass."""
    from torch._inductor import config

    names = {node: operator_name(node) for node in graph.nodes}
    found = [node for node, name in names.items() if name == STATISTICS]
    if not found or SUMS in names.values() or config.max_autotune or config.max_autotune_gemm:
        return  # a convolution that Inductor writes itself adds a residual to its result
    written: set[Node] = set()  # what statistics read, so that it is in memory
    for node in found:
        image, *others = node.args[1]
        terms = _terms(image, written)
        if terms == _Sum((image,)):
            written.add(_source(image))
            continue
        read = [*terms.images, *terms.vectors]
        kinds = [_kind(each, terms.images[0]) for each in read[1:]]
        node.args = _with_steps(node.args[0], kinds), [*read, *others]
        _normalize_the_same(image, read)
    graph.eliminate_dead_code()
    graph.lint()


def _terms(image: Node, written: set[Node]) -> _Sum:
    """What an image is the sum of, with images that are in memory, or itself alone."""
    value, itself = image.meta["val"], _Sum((image,))
    if value.dtype.itemsize != 2 or value.ndim not in CHANNELS_LAST:
        return itself
    images: list[Node] = []
    vectors: list[Node] = []
    rest = [image]
    while rest:
        node = rest.pop()
        if _is_in_memory(node, written):
            images.append(node)
        elif node.target in (aten.div.Tensor, aten.mul.Tensor) and node.args[1] == 1:
            rest.append(node.args[0])
        elif node.target is aten.add.Tensor and not node.kwargs:
            for each in reversed(node.args):
                if not isinstance(each, Node) or getattr(each.meta.get("val"), "dtype", None) != value.dtype:
                    return itself
                if has_shape(each.meta["val"], value.shape):
                    rest.append(each)
                elif _is_vector(each, value):
                    vectors.append(each)
                else:
                    return itself
        else:
            return itself
        if len(images) + len(rest) > _MOST_IMAGES or len(vectors) > _MOST_VECTORS:
            return itself
    return _with_biases_apart(_Sum(tuple(images), tuple(vectors)))


def _is_in_memory(node: Node, written: set[Node]) -> bool:
    """Whether it is, and is or will be laid out as ``ops.layouts`` has images: no copy is made for statistics."""
    if node in written or node.target is aten.convolution.default:
        return True
    source, value = _source(node), node.meta["val"]
    is_known = source in written or source.op == "placeholder" or source.target in _WRITTEN
    return is_known and value.is_contiguous(memory_format=CHANNELS_LAST[value.ndim])


def _is_vector(node: Node, image: torch.Tensor) -> bool:
    """Whether it has a value for each of the image's channels, or for each channel of each sample."""
    value, ones = node.meta["val"], (1,) * (image.ndim - 2)
    channels = image.shape[1]
    shapes = (channels, *ones), (1, channels, *ones), (*image.shape[:2], *ones)
    is_one = all(size == 1 for size in value.shape if type(size) is int)
    return not is_one and any(has_shape(value, shape) for shape in shapes)


def _normalize_the_same(image: Node, read: list[Node]) -> None:
    """Let the norm have the very sum that its statistics are of. Inductor may write the image, which is rounded then:
    of a group of nearly equal values, that would be far from their mean."""
    for cast in list(image.users):
        if operator_name(cast) not in _CASTS or cast.meta["val"].dtype != torch.float32:
            continue
        with cast.graph.inserting_before(cast):
            total, *rest = (call_like(cast, CAST, each, torch.float32) for each in read)
            for each in rest:
                total = call_like(cast, aten.add.Tensor, total, each)
        cast.replace_all_uses_with(total)


def _source(node: Node) -> Node:
    """What a view is of."""
    while operator_name(node) in VIEWS:
        node = node.args[0]
    return node


def _kind(node: Node, image: Node) -> str:
    """What an operand is to an image: "tensor", "vector" or "sample"."""
    shape = node.meta["val"].shape
    return kind_of((1,) * (image.meta["val"].ndim - len(shape)) + tuple(shape), image.meta["val"].ndim, has_rows=False)


def _with_biases_apart(terms: _Sum) -> _Sum:
    """The sum, with biases that Inductor adds behind convolutions on a GPU as vectors."""
    vectors, apart = list(terms.vectors), dict[Node, Node]()
    for node in dict.fromkeys(terms.images):
        is_convolution = node.target is aten.convolution.default and node.args[2] is not None
        if not is_convolution or not node.meta["val"].is_cuda:
            continue
        with node.graph.inserting_before(node):
            bias = call_like(node, aten.view.default, node.args[2], [-1] + [1] * (node.meta["val"].ndim - 2))
            apart[node] = call_like(node, node.target, *node.args[:2], None, *node.args[3:])
            total = call_like(node, aten.add.Tensor, apart[node], bias)
        node.replace_all_uses_with(total)
        vectors += [bias] * terms.images.count(node)
    return _Sum(tuple(apart.get(each, each) for each in terms.images), tuple(vectors))


def _with_steps(text: str, kinds: list[str]) -> str:
    """A call's text with sums of operands of these kinds before all else."""
    call = parse(text)
    added = tuple(NAMED["add" if kind == "vector" else f"add {kind}"] for kind in kinds)
    chain = replace(call.chain, before=added + call.chain.before)
    count = len(added)
    return replace(
        call, chain=chain, numbers=(None,) * count + call.numbers, present=(True,) * count + call.present
    ).text_in_graph
