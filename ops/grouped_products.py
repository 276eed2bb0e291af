"""In graphs behind autograd, small products of one matrix with many others in 16 bits, all in one launch.

A layer of each block of a UNet multiplies one time embedding, keys and values of each cross attention one text, and
queries, keys and values one image. cuBLAS takes 3 to 5 us for each of these products, and the host as long.
"""

import logging
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ops import plans, precision
from ops.calls import contiguous
from ops.layouts import (
    CAST,
    VIEWS,
    call_like,
    hold_strides,
    is_aligned,
    is_known,
    is_pointwise,
    operator_name,
    owner,
    written,
)
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.grouped_products import DIVISOR, MOST_PRODUCTS, are_turned, multiply_all

Tensor = torch.Tensor
aten = torch.ops.aten

_log = logging.getLogger("ops.backend")

#: Multiplications of a product: beyond, cuBLAS computes faster than the kernel.
_MOST_MULTIPLICATIONS = 2**30
#: Terms of its sums: beyond, cuBLAS divides them among multiprocessors.
_MOST_TERMS = 2048
#: Elements of what is kept longer for a call, in 16 bits 16 MB.
_MOST_ELEMENTS = 2**23
#: Such as an attention's queries, keys and values. (Of two it was not measured.)
_FEWEST = 3


def _results(is_second: bool, matrix: Tensor, others: Sequence[Tensor], _: Any = ()) -> list[Tensor]:
    """Memory for the products."""
    if is_second:
        return [matrix.new_empty(each.shape[0], matrix.shape[1]) for each in others]
    return [matrix.new_empty(matrix.shape[0], each.shape[1]) for each in others]


_plans = plans.Kept()


def plan(is_second: bool, matrix: Tensor, others: list[Tensor], biases: list[Tensor]) -> Plan:
    """The plan that the operator ``grouped_products`` runs: of matrix @ other + bias for each other and its bias, if
    there are any; or of other @ matrix."""
    tensors = [matrix, *others, *biases]
    key = is_second, *layouts_of(tensors)

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        of_one, *rest = stand_ins
        factors, of_biases = rest[: len(others)], rest[len(others) :]
        if are_turned(factors) is None:
            factors = [contiguous(each) for each in factors]
        of_one = contiguous(of_one)
        results = _results(is_second, of_one, factors)
        if is_second:
            multiply_all(of_one.T, [each.T for each in factors], [], [each.T for each in results])
        else:
            multiply_all(of_one, factors, [contiguous(each) for each in of_biases], results)
        return results

    return _plans.get(key) or _plans.add(key, plans.made(tensors, write))


def _title(is_second: bool, matrix: Tensor, others: Sequence[Tensor], _: Any) -> str:
    of_one = " x ".join(map(str, matrix.shape))
    return f"{len(others)} products {'... @ ' if is_second else ''}{of_one}{'' if is_second else ' @ ...'}"


define(
    "grouped_products",
    "(bool is_second, Tensor matrix, Tensor[] others, Tensor[] biases) -> Tensor[]",
    plan,
    _results,
    "product",
    _title,
)
GROUPED = torch.ops.normfuse.grouped_products.default


@dataclass(frozen=True)
class _Product:
    """A product, as one of those of the matrix that is its first operand, or its second."""

    node: Node
    is_second: bool

    @property
    def _operands(self) -> tuple[Any, Any]:
        return self.node.args[-2:]

    @property
    def matrix(self) -> Node:
        return self._operands[self.is_second]

    @property
    def other(self) -> Node:
        return self._operands[not self.is_second]

    @property
    def bias(self) -> list[Node]:
        return list(self.node.args[:-2])

    @property
    def is_other_turned(self) -> bool | None:
        return are_turned([self.other.meta["val"]])

    @property
    def operands(self) -> list[Node]:
        return [*self._operands, *self.bias]

    @property
    def fits(self) -> bool:
        """Whether the kernel takes it, and it is small."""
        values = [each.meta.get("val") for each in (*self.operands, self.node)]
        if not all(isinstance(each, Tensor) and _runs(each) for each in values):
            return False
        matrix, other, result = (each.meta["val"] for each in (self.matrix, self.other, self.node))
        if self.is_other_turned is None or not matrix.is_contiguous():
            return False
        if self.bias and (self.is_second or self.bias[0].meta["val"].shape != result.shape[1:]):
            return False
        (rows, depth), columns = self._operands[0].meta["val"].shape, result.shape[1]
        along = matrix.shape[1], other.shape[not self.is_other_turned], columns
        is_small = rows * depth * columns <= _MOST_MULTIPLICATIONS and depth <= _MOST_TERMS
        return is_small and not any(size % DIVISOR for size in along)

    def moved(self, place: Node) -> list[Node] | None:
        """The views and casts that are to stand before a place where the product is computed earlier, or behind it
        where that is later, if the matrix comes second; None where something else stands between."""
        rest = list(self.node.users) if self.is_second else [self.other, *self.bias]
        found: dict[Node, None] = {}
        while rest:
            node = rest.pop()
            if place < node if self.is_second else node < place:
                continue
            if not _is_view_or_cast(node):
                return None
            found[node] = None
            rest += node.users if self.is_second else node.all_input_nodes
        return sorted(found)

    def kept(self, place: Node) -> int:
        """Elements of what is kept longer if the product is computed at a place: its result and casts before it, as it
        is computed earlier; or the other matrix, as that is later."""
        nodes = [self.other] if self.is_second else [self.node]
        nodes += [each for each in self.moved(place) or () if each.target is CAST and not self.is_second]
        return sum(math.prod(each.meta["val"].shape) for each in nodes)


def _runs(value: Tensor) -> bool:
    return is_known(value) and is_aligned(value) and precision.is_16_bits_on_hopper(value)


def join(graph: Graph) -> None:
    """Let small products of one matrix be one call: where it comes first, where the first of them stood, and where it
    comes second, as in weights' gradients, where the last did."""
    from torch._inductor import config

    if config.max_autotune or config.max_autotune_gemm:
        return  # a product that Inductor writes itself is fused with what follows
    joined = []
    for is_second in (False, True):
        nodes = [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        products = [_Product(node, is_second) for node in nodes if not node.kwargs]
        products = [each for each in products if each.fits]
        groups = list(_groups(products, written(graph))) if len(products) >= _FEWEST else []
        for group in groups:
            _replace(group)
        joined += groups
    if joined:
        _log.info("%d products of one matrix in %d calls", sum(map(len, joined)), len(joined))
        graph.eliminate_dead_code()
        graph.lint()


def _groups(products: Sequence[_Product], changing: set[Node]) -> Iterator[list[_Product]]:
    """Products for one call each, where there are enough. It is to stand where the first of a group does, of which the
    others are moved there."""
    same = _same(products[0].node.graph, changing)
    found: dict[Any, list[list[_Product]]] = {}
    for each in reversed(products) if products[0].is_second else products:
        if any(source in changing for source in _sources(each)):
            continue
        parts = found.setdefault((same[each.matrix], each.is_other_turned, bool(each.bias)), [])
        if part := next((part for part in parts if _takes(part, each)), None):
            part.append(each)
        else:
            parts.append([each])
    for parts in found.values():
        yield from (part for part in parts if len(part) >= _FEWEST)


def _sources(product: _Product) -> Iterator[Node]:
    """Whose memory is read where it may be moved to: that of its operands, and of what they are casts of."""
    for operand in product.operands:
        yield (source := owner(operand))
        while source.target is CAST:
            yield (source := owner(source.args[0]))


def _takes(part: Sequence[_Product], product: _Product) -> bool:
    """Whether a product can be computed where the first of these is, and enough memory is left."""
    place = part[0].node
    is_short = len(part) < MOST_PRODUCTS and product.moved(place) is not None
    return is_short and sum(each.kept(place) for each in (*part, product)) <= _MOST_ELEMENTS


def _same(graph: Graph, changing: set[Node]) -> dict[Node, Node]:
    """By node the first that computes the same: a view, a cast or a pointwise function of the same. Where there is no
    backward pass, each product of a time embedding has its activation anew."""
    first: dict[str, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        same[node] = node
        if _is_pure(node) and not any(owner(each) in changing for each in node.all_input_nodes):
            arguments = map_arg((node.args, node.kwargs), lambda each: same[each])
            same[node] = first.setdefault(f"{node.target} {arguments}", node)
    return same


def _is_pure(node: Node) -> bool:
    if _is_view_or_cast(node):
        return True
    return is_pointwise(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_view_or_cast(node: Node) -> bool:
    return node.target is CAST or operator_name(node) in VIEWS


def _replace(group: Sequence[_Product]) -> None:
    """One call, where the first of the group stands."""
    place, is_second = group[0].node, group[0].is_second
    moved = [each.moved(place) or [] for each in group]
    if not is_second:
        for node in sorted({node for nodes in moved for node in nodes}):
            place.prepend(node)
    with place.graph.inserting_before(place):
        others, biases = [each.other for each in group], [bias for each in group for bias in each.bias]
        together = call_like(place, GROUPED, is_second, group[0].matrix, others, biases)
        hold_strides(together)
        results = [call_like(each.node, operator.getitem, together, at) for at, each in enumerate(group)]
    if is_second:
        for node in sorted({node for nodes in moved for node in nodes}, reverse=True):
            place.append(node)
    for each, result in zip(group, results, strict=True):
        each.node.replace_all_uses_with(result)
    for each in group:
        each.node.graph.erase_node(each.node)
