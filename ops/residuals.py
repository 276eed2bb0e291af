"""In graphs without a backward pass, an open norm's statistics read what a sum of images is of.

The operator that makes a norm's statistics (``ops.open_norms``) reads memory. A sum, such as a residual, would be
written for it, rounded to 16 bits, and read from there by all others too. Inductor computes such sums where they are
read, in float32, and rounds each few of them. So do graphs in which statistics read images and vectors, as products and
convolutions write them, and add them up themselves.
"""

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from ops.calls import parse
from ops.graph_nodes import has_shape
from ops.layouts import STATISTICS, SUMS, VIEWS, call_like, operator_name
from ops.pointwise import kind_of
from triton_kernels.built_in import NAMED

aten = torch.ops.aten

#: Images that a kernel adds up. A sum of more is written, and is an image to what follows.
_MOST_IMAGES = 3
#: What is in memory, beside a graph's inputs: results of libraries' kernels.
_WRITTEN = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)


@dataclass(frozen=True)
class _Sum:
    """What a value is the sum of: images of its shape, and vectors."""

    images: tuple[Node, ...]
    vectors: tuple[Node, ...] = ()

    def __add__(self, other: "_Sum") -> "_Sum":
        return _Sum(self.images + other.images, self.vectors + other.vectors)


def read_terms(graph: Graph) -> None:
    """Let the statistics of 16-bit images read the terms of their sums, where the graph has no backward pass."""
    from torch._inductor import config

    names = {node: operator_name(node) for node in graph.nodes}
    found = [node for node, name in names.items() if name == STATISTICS]
    if not found or SUMS in names.values() or config.max_autotune or config.max_autotune_gemm:
        return  # a convolution that Inductor writes itself adds a residual to its result
    sums = _Sums()
    for node in found:
        image, *others = node.args[1]
        if image.meta["val"].dtype.itemsize != 2:
            continue
        terms = sums.of(image)
        if len(terms.images) <= _MOST_IMAGES:
            terms = _with_biases_apart(terms)
        if terms == _Sum((image,)) or len(terms.images) > _MOST_IMAGES:
            sums.written.add(_source(image))
            continue
        read = [*terms.images, *terms.vectors]
        kinds = [_kind(each, terms.images[0]) for each in read[1:]]
        node.args = _with_steps(node.args[0], kinds), [*read, *others]
    graph.eliminate_dead_code()
    graph.lint()


class _Sums:
    """What values are sums of. Those ``written`` are in memory anyway."""

    def __init__(self) -> None:
        self.written: set[Node] = set()

    def of(self, node: Node) -> _Sum:
        """A sum whose images are in memory, or of this node alone."""
        return self._terms(node) or _Sum((node,))

    def _terms(self, node: Node) -> _Sum | None:
        """The same, or None where the node is no sum, and in no memory."""
        source = _source(node)
        if source in self.written or source.op == "placeholder" or source.target in _WRITTEN:
            return _Sum((node,))
        if node.target in (aten.div.Tensor, aten.mul.Tensor) and node.args[1] == 1:
            first, dtype = node.args[0], node.meta["val"].dtype
            return self._terms(first) if first.meta["val"].dtype == dtype else None
        if node.target is not aten.add.Tensor or node.kwargs:
            return None
        terms = [self._term(each, node) for each in node.args]
        first, second = terms
        return first + second if first and second and (first.images or second.images) else None

    def _term(self, node: object, total: Node) -> _Sum | None:
        """Of an argument of a sum."""
        value = total.meta["val"]
        if not isinstance(node, Node) or node.meta["val"].dtype != value.dtype:
            return None
        if has_shape(node.meta["val"], value.shape):
            return self._terms(node)
        return _Sum((), (node,)) if _kind(node, total) in ("vector", "sample") else None


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
    images, vectors = list(terms.images), list(terms.vectors)
    for place, node in enumerate(images):
        is_convolution = node.target is aten.convolution.default and node.args[2] is not None
        if not is_convolution or not node.meta["val"].is_cuda:
            continue
        with node.graph.inserting_before(node):
            bias = call_like(node, aten.view.default, node.args[2], [-1] + [1] * (node.meta["val"].ndim - 2))
            images[place] = call_like(node, node.target, *node.args[:2], None, *node.args[3:])
            total = call_like(node, aten.add.Tensor, images[place], bias)
        node.replace_all_uses_with(total)
        vectors.append(bias)
    return _Sum(tuple(images), tuple(vectors))


def _with_steps(text: str, kinds: list[str]) -> str:
    """A call's text with sums of operands of these kinds before all else."""
    call = parse(text)
    added = tuple(NAMED["add" if kind == "vector" else f"add {kind}"] for kind in kinds)
    chain = replace(call.chain, before=added + call.chain.before)
    count = len(added)
    return replace(
        call, chain=chain, numbers=(None,) * count + call.numbers, present=(True,) * count + call.present
    ).text_in_graph
