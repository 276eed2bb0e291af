"""In graphs behind autograd, small products of one matrix with many others in 16 bits, all in one launch.

A layer of each block of a UNet multiplies one time embedding, and keys and values of each cross attention one text.
cuBLAS takes 3 to 5 us for each of them, and the host as long: 136 us for the 32 of a Stable Diffusion UNet's text, and
115 for the 22 of its time embedding. One launch takes 27 and 15 (``triton_kernels.grouped_products``, H200).
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
from ops.layouts import CAST, VIEWS, call_like, is_written, operator_name
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.device import architecture
from triton_kernels.grouped_products import MOST_PRODUCTS, are_turned, multiply_all

Tensor = torch.Tensor
aten = torch.ops.aten

_log = logging.getLogger("ops.backend")

#: Multiplications of a product: beyond, cuBLAS computes faster than the kernel.
_MOST_MULTIPLICATIONS = 2**30
#: Terms of its sums: beyond, cuBLAS divides them among multiprocessors.
_MOST_TERMS = 2048
#: Elements of what a call keeps longer than its products would, in 16 bits 16 MB.
_MOST_ELEMENTS = 2**23
#: Such as an attention's queries, keys and values. (Of two it was not measured.)
_FEWEST = 3
#: By which sizes are divisible along which memory lies, and addresses in bytes: as threads load several elements.
_DIVISOR = 16


def _results(is_second: bool, matrix: Tensor, others: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Memory for the products."""
    if is_second:
        return [matrix.new_empty(each.shape[0], matrix.shape[1]) for each in others]
    return [matrix.new_empty(matrix.shape[0], each.shape[1]) for each in others]


_plans = plans.Kept()


def plan(is_second: bool, matrix: Tensor, others: list[Tensor], biases: list[Tensor]) -> Plan:
    """The plan that the operator ``grouped_products`` runs: of matrix @ other + bias for each other and its bias, if
    there are any; or of other @ matrix."""
    tensors = [matrix, *others, *biases]
    key = is_second, len(biases), *layouts_of(tensors)

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        matrix, rest, of_biases = stand_ins[0], stand_ins[1:], stand_ins[1 + len(others) :]
        factors = rest[: len(others)]
        if are_turned(factors) is None:
            factors = [contiguous(each) for each in factors]
        results = _results(is_second, matrix, factors, of_biases)
        if is_second:
            multiply_all(matrix.T, [each.T for each in factors], [], [each.T for each in results])
        else:
            multiply_all(matrix, factors, [contiguous(each) for each in of_biases], results)
        return results

    return _plans.get(key) or _plans.add(key, plans.made(tensors, write))


def _title(is_second: bool, matrix: Tensor, others: Sequence[Tensor], biases: Sequence[Tensor]) -> str:
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
    def kept(self) -> int:
        """Elements of what is kept longer: of the result, as all are computed where the first was; or of the other
        matrix, as all are computed where the last was."""
        return math.prod((self.other if self.is_second else self.node).meta["val"].shape)

    @property
    def fits(self) -> bool:
        """Whether the kernel takes it, and it is small."""
        values = [each.meta.get("val") for each in (*self._operands, *self.bias, self.node)]
        matrix, other, result = (each.meta.get("val") for each in (self.matrix, self.other, self.node))
        if not all(isinstance(each, Tensor) and _runs(each) and _is_aligned(each) for each in values):
            return False
        if len({each.dtype for each in values}) != 1 or self.is_other_turned is None:
            return False
        if not (matrix.is_contiguous() and result.is_contiguous()):
            return False
        if self.bias and (self.is_second or self.bias[0].meta["val"].shape != result.shape[1:]):
            return False
        (rows, depth), columns = self._operands[0].meta["val"].shape, result.shape[1]
        along = [each.shape[not are_turned([each])] for each in (matrix, other, result)]
        is_small = rows * depth * columns <= _MOST_MULTIPLICATIONS and depth <= _MOST_TERMS
        return is_small and all(size and size % _DIVISOR == 0 for size in along)

    def between(self, at: Node) -> list[Node] | None:
        """The views and casts that are to stand before the node if the product is computed there, or behind it if the
        matrix comes second; None where something else is."""
        rest = list(self.node.users) if self.is_second else [self.other, *self.bias]
        found: dict[Node, None] = {}
        while rest:
            node = rest.pop()
            if node.op == "output" or (at < node if self.is_second else node < at and not is_written(node)):
                continue
            if not _only_moves(node):
                return None
            found[node] = None
            rest += node.users if self.is_second else node.all_input_nodes
        return sorted(found)


def _runs(value: Tensor) -> bool:
    """Whether it is in 16 bits on a GPU where that was measured, and all is known of it."""
    are_known = all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))
    is_measured = value.dtype.itemsize == 2 and precision.runs_kernels(value) and architecture(value.device) == 90
    return are_known and is_measured


def _is_aligned(value: Tensor) -> bool:
    return value.storage_offset() * value.element_size() % _DIVISOR == 0


def join(graph: Graph) -> None:
    """Let small products of one matrix be one call: where it comes first, where the first of them stood, and where it
    comes second, as in weights' gradients, where the last did."""
    from torch._inductor import config

    if config.max_autotune or config.max_autotune_gemm:
        return  # a product that Inductor writes itself is fused with what follows
    groups = []
    for is_second in (False, True):
        nodes = [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        products = [_Product(node, is_second) for node in nodes if not node.kwargs]
        found = list(_groups([each for each in products if each.fits], _same(graph)))
        for group in found:
            _replace(group)
        groups += found
    if groups:
        _log.info("%d products of one matrix in %d calls", sum(map(len, groups)), len(groups))
        graph.eliminate_dead_code()
        graph.lint()


def _same(graph: Graph) -> dict[Node, Node]:
    """By node the first that computes the same: a view, a cast or a pointwise function of the same. Where there is no
    backward pass, each product of a time embedding has its activation anew."""
    first: dict[str, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        same[node] = node
        if _is_pure(node) and not any(map(is_written, node.all_input_nodes)):
            arguments = map_arg((node.args, node.kwargs), lambda each: same[each])
            same[node] = first.setdefault(f"{node.target} {arguments}", node)
    return same


def _is_pure(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return is_pointwise or _only_moves(node)


def _only_moves(node: Node) -> bool:
    """Whether it is a view or a cast."""
    return node.target is CAST or operator_name(node) in VIEWS


def _groups(products: Sequence[_Product], same: dict[Node, Node]) -> Iterator[list[_Product]]:
    """Products for one call each, where there are enough. It stands where the first of a group does."""
    found: dict[Any, list[_Product]] = {}
    for each in products:
        found.setdefault((same[each.matrix], each.is_other_turned, bool(each.bias)), []).append(each)
    for group in found.values():
        parts: list[list[_Product]] = [[]]
        for each in reversed(group) if group[0].is_second else group:
            part = parts[-1]
            if len(part) == MOST_PRODUCTS or sum(one.kept for one in (*part, each)) > _MOST_ELEMENTS:
                parts.append([each])
            elif not part or each.between(part[0].node) is not None:
                part.append(each)
        yield from (part for part in parts if len(part) >= _FEWEST)


def _replace(group: Sequence[_Product]) -> None:
    """One call, where the first of them stood."""
    first = group[0]
    at = first.node
    for each in () if first.is_second else group:
        for node in each.between(at) or ():
            at.prepend(node)
    with at.graph.inserting_before(at):
        others, biases = [each.other for each in group], [bias for each in group for bias in each.bias]
        together = call_like(at, GROUPED, first.is_second, first.matrix, others, biases)
        together.meta["eager_input_vals"] = map_arg((together.args, {}), lambda each: each.meta["val"])
        results = [call_like(each.node, operator.getitem, together, place) for place, each in enumerate(group)]
    for each, result in zip(group, results, strict=True):
        for node in reversed(each.between(at) or ()) if each.is_second else ():
            at.append(node)
        each.node.replace_all_uses_with(result)
    for each in group:
        each.node.graph.erase_node(each.node)
