"""In graphs without a backward pass, an open norm's statistics read what a sum of images is of.

The operator that makes a norm's statistics (``ops.open_norms``) reads memory. A sum, such as a residual, would be
written for it, rounded to 16 bits, and read from there by all others too. Inductor computes such sums where they are
read, in float32, and rounds one every few sums. So do graphs in which statistics read images and vectors, as products
and convolutions write them, and add them up themselves.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ops.calls import parse
from ops.convolution import CHANNELS_LAST
from ops.graph_nodes import has_shape
from ops.layouts import CAST, STATISTICS, SUMS, VIEWS, call_like, is_channels_last, is_known, operator_name, readers
from triton_kernels.built_in import NAMED

aten = torch.ops.aten

#: Images that a kernel adds up. A sum of more is written, and is an image to what follows.
_MOST_IMAGES = 3
_MOST_VECTORS = 8
_Views = tuple[Node, ...]
#: An image, and what views of it lead to what it is a term of.
_Term = tuple[Node, _Views]
#: What is in memory, beside a graph's inputs: results of libraries' kernels.
_WRITTEN = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
#: Views by sizes.
_SIZED = (aten.view.default, aten._unsafe_view.default)


def read_terms(graph: Graph) -> None:
    """Let the statistics of 16-bit images read the terms of their sums, where the graph has no backward pass."""
    from torch._inductor import config

    names = {node: operator_name(node) for node in graph.nodes}
    found = [node for node, name in names.items() if name == STATISTICS]
    if not found or SUMS in names.values() or config.max_autotune or config.max_autotune_gemm:
        return  # a convolution that Inductor writes itself adds a residual to its result
    written: set[Node] = set()  # what statistics read, so that it is in memory
    for node in found:
        words, (image, *others), are_apart = node.args
        read = _terms(image, written)
        if read == [image]:
            written.add(_source(image))
            continue
        image = node.args[1][0]  # a convolution's result with its bias, where that is one of the terms now
        kinds = [_kind(each.meta["val"], image.meta["val"]) for each in read[1:]]
        text = _with_steps(words, kinds)
        count = parse(text).chain.added_last - parse(words).chain.added_last if are_apart else 0
        subtractions = _subtractions(node) if count else []
        if count and not subtractions:
            continue
        node.args = text, [*read, *others], are_apart
        if count:  # the means are without these vectors
            for each in subtractions:
                each.args = _total_before(each, read[:-count]), each.args[1]
        else:
            _normalize_the_same(image, read)
    graph.eliminate_dead_code()
    graph.lint()


def _terms(image: Node, written: set[Node]) -> list[Node]:
    """What an image is the sum of: first images, which are in memory, then vectors; or itself alone. A view of a sum is
    a sum of views."""
    value = image.meta["val"]
    if value.dtype.itemsize != 2 or value.ndim not in CHANNELS_LAST:
        return [image]
    images: list[_Term] = []
    vectors: list[Node] = []
    rest: list[_Term] = [(image, ())]
    while rest:
        node, views = rest.pop()
        is_in_memory = _is_in_memory(node, written)
        if operator_name(node) in VIEWS and not is_in_memory:
            rest.append((node.args[0], (node, *views)))
        elif not _keep_format(views) or (views and node.op == "placeholder" and not is_channels_last(node.meta["val"])):
            return [image]  # of an input, a view would be copied for each norm
        elif is_in_memory:
            images.append((node, views))
        elif node.target is aten.clone.default or (
            node.target in (aten.div.Tensor, aten.mul.Tensor) and node.args[1] == 1
        ):
            rest.append((node.args[0], views))
        elif node.target is aten.add.Tensor and not node.kwargs:
            for each in reversed(node.args):
                term: Any = each.meta.get("val") if isinstance(each, Node) else None
                kind = _kind(term, node.meta["val"]) if getattr(term, "dtype", None) == value.dtype else ""
                if not kind or (kind == "sample" and views):
                    return [image]
                if kind == "tensor":
                    rest.append((each, views))
                else:
                    vectors.append(_of_channels(each, image))
        else:
            return [image]
        if len(images) + len(rest) > _MOST_IMAGES or len(vectors) > _MOST_VECTORS:
            return [image]
    images, biases = _with_biases_apart(images, image)
    if [node for node, _ in images] == [_source(image)]:
        return [image]
    return [*(_viewed(*each, image) for each in images), *vectors, *biases]


def _keep_format(views: _Views) -> bool:
    """Whether they lead from a channels_last image to another one of the same channels."""
    if not views:
        return True
    value = views[0].args[0].meta["val"]
    if value.ndim not in CHANNELS_LAST or not is_known(value):
        return False
    found = torch.empty(value.shape, device="meta", memory_format=CHANNELS_LAST[value.ndim])
    try:
        for each in views:
            found = each.target(found, *each.args[1:], **each.kwargs)
    except (RuntimeError, ValueError):  # there is no such view, or its sizes are open
        return False
    return found.numel() == value.numel() and found.shape[1] == value.shape[1] and is_channels_last(found)


def _viewed(term: Node, views: _Views, image: Node) -> Node:
    """The view of a term that is one of its sum, the image."""
    for each in views:
        with image.graph.inserting_before(image):
            # Before images are laid out, there may be no such view.
            target = aten.reshape.default if each.target in _SIZED else each.target
            term = call_like(each, target, term, *each.args[1:], **each.kwargs)
    return term


def _of_channels(vector: Node, image: Node) -> Node:
    """A sum's vector as it broadcasts to the image, which is the sum or a view of it."""
    if _kind(vector.meta["val"], image.meta["val"]):
        return vector
    with image.graph.inserting_before(image):
        return call_like(vector, aten.view.default, vector, [-1] + [1] * (image.meta["val"].ndim - 2))


def _is_in_memory(node: Node, written: set[Node]) -> bool:
    """Whether it is, and is or will be laid out as ``ops.layouts`` has images: no copy is made for statistics."""
    if node in written or node.target is aten.convolution.default:
        return True
    source, value = _source(node), node.meta["val"]
    is_there = source in written or source.op == "placeholder" or source.target in _WRITTEN
    return is_there and value.ndim in CHANNELS_LAST and is_channels_last(value)


def _normalize_the_same(image: Node, read: list[Node]) -> None:
    """Let the norm have the very sum that its statistics are of. Inductor may write the image, which is rounded then:
    of a group of nearly equal values, that would be far from their mean."""
    for cast in list(image.users):
        if cast.target is not CAST or cast.meta["val"].dtype != torch.float32:
            continue
        cast.replace_all_uses_with(_total_before(cast, read))


def _total_before(node: Node, read: list[Node]) -> Node:
    """The sum of these in float32."""
    with node.graph.inserting_before(node):
        total, *rest = (call_like(node, CAST, each, torch.float32) for each in read)
        for each in rest:
            total = call_like(node, aten.add.Tensor, total, each)
    return total


def _subtractions(statistics: Node) -> list[Node]:
    """The nodes that subtract the means in these, or none where something else is done with them."""
    found: list[Node] = []
    views = [statistics]
    for view in views:
        for user in view.users:
            if operator_name(user) in VIEWS or user.target is operator.getitem:
                views.append(user)
            elif user.target is aten.sub.Tensor and user.args[1] is view and not user.kwargs:
                found.append(user)
            elif user.target is not aten.mul.Tensor:
                return []
    return found


def _source(node: Node) -> Node:
    """What a view is of."""
    while operator_name(node) in VIEWS:
        node = node.args[0]
    return node


def _kind(value: torch.Tensor, image: torch.Tensor) -> str:
    """What a term is to an image: "tensor", "vector" or "sample", as a step's operand; "" where it is none of these."""
    (samples, channels), ones = image.shape[:2], (1,) * (image.ndim - 2)
    if has_shape(value, image.shape):
        return "tensor"
    if has_shape(value, (channels, *ones)) or has_shape(value, (1, channels, *ones)):
        return "vector"
    return "sample" if has_shape(value, (samples, channels, *ones)) else ""


def _with_biases_apart(images: list[_Term], image: Node) -> tuple[list[_Term], list[Node]]:
    """The images, and as vectors the biases that Inductor adds behind convolutions on a GPU.

    A result that is read from memory elsewhere is written with its bias, in the place of the one without. Norms read it
    too, or both would be there.
    """
    apart: dict[Node, Node] = {}
    biases: list[Node] = []
    nodes = [node for node, _ in images]
    for node in dict.fromkeys(nodes):
        is_convolution = node.target is aten.convolution.default and node.args[2] is not None
        if not is_convolution or not node.meta["val"].is_cuda or _is_read(node):
            continue
        with node.graph.inserting_before(node):
            bias = call_like(node, aten.view.default, node.args[2], [-1] + [1] * (node.meta["val"].ndim - 2))
            apart[node] = call_like(node, node.target, *node.args[:2], None, *node.args[3:])
            total = call_like(node, aten.add.Tensor, apart[node], bias)
        node.replace_all_uses_with(total)
        biases += [_of_channels(bias, image)] * nodes.count(node)
    return [(apart.get(node, node), views) for node, views in images], biases


def _is_read(image: Node) -> bool:
    """Whether a library's kernel or the graph's caller reads it, or a view of it, from memory."""
    return any(user.op == "output" or user.target in _WRITTEN for user, _ in readers(image))


def _with_steps(text: str, kinds: list[str]) -> str:
    """A call's text with sums of operands of these kinds before all else."""
    call = parse(text)
    added = tuple(NAMED["add" if kind == "vector" else f"add {kind}"] for kind in kinds)
    chain, count = replace(call.chain, before=added + call.chain.before), len(added)
    numbers, present = (None,) * count + call.numbers, (True,) * count + call.present
    return replace(call, chain=chain, numbers=numbers, present=present).text_in_graph
