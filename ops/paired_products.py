"""In graphs behind autograd, float32 products that sum over different axes of one matrix become one call, so that the
matrix is split once (``triton_kernels.float32_block_split``): mostly the gradients of a layer's input and weight."""

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ops.layouts import call_like
from ops.matrix_products import PRODUCTS_OF_ONE

aten = torch.ops.aten

#: What may stand anywhere behind its argument.
_VIEWS = (aten.permute.default, aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class _Use:
    """Of a matrix, as an operand, 0 or 1, of a product."""

    node: Node
    operand: int

    def _found(self) -> tuple[Any, bool]:
        """The matrix, and whether it is transposed."""
        matrix, is_turned = self.node.args[self.operand], False
        while matrix.target is aten.permute.default:
            is_turned ^= matrix.args[1][0] in (1, -1)
            matrix = matrix.args[0]
        return matrix, is_turned

    @property
    def matrix(self) -> Any:
        return self._found()[0]

    @property
    def other(self) -> Any:
        return self.node.args[1 - self.operand]

    @property
    def place(self) -> str:
        """As ``products.of_one_matrix`` says."""
        return ("first", "second")[self.operand] + (".T" if self._found()[1] else "")

    @property
    def axis(self) -> int:
        """That of the matrix which is summed over."""
        return int(self.place in ("first", "second.T"))


def pair(products: Sequence[Node], is_split: Callable[[Node], bool]) -> set[Node]:
    """Replace pairs of these products, which stand in order: ``aten.mm`` whose operands ``is_split``. Returns what was
    replaced."""
    paired: set[Node] = set()
    waiting: dict[Node, list[_Use]] = defaultdict(list)
    places = _places(products)
    for before, node in zip([None, *products], products, strict=False):
        if node.target is not aten.mm.default or not is_split(node):
            continue
        uses = [_Use(node, 0), _Use(node, 1)]
        fitting = (
            (one, use) for use in uses for one in waiting[use.matrix] if one.node not in paired and one.axis != use.axis
        )
        if found := next((one for one, use in fitting if _are_replaced(one, use, one.node is before, places)), None):
            paired |= {found.node, node}
            places = _places(products)
        else:
            for use in uses:
                waiting[use.matrix].append(use)
    return paired


def _places(products: Sequence[Node]) -> dict[Node, int]:
    return {node: place for place, node in enumerate(products[0].graph.nodes)} if products else {}


def _are_replaced(first: _Use, second: _Use, are_neighbours: bool, places: dict[Node, int]) -> bool:
    """Whether both can stand where one of them stood, so that nothing large is computed much earlier: where the first
    did, if no product stands between, and what the second reads is known there or a view of that; or else where the
    second did, if the first one's users stand behind."""
    one, other = first.node, second.node

    def is_known(node: Node) -> bool:
        return places[node] < places[one]

    views, source = [], second.other
    while not is_known(source) and source.target in _VIEWS and all(map(is_known, source.all_input_nodes[1:])):
        views.append(source)
        source = source.args[0]
    if are_neighbours and is_known(source):
        for view in reversed(views):
            one.prepend(view)
        _replace(first, second, one)
        return True
    if all(places[user] > places[other] for user in one.users):
        _replace(first, second, other)
        return True
    return False


def _replace(first: _Use, second: _Use, at: Node) -> None:
    uses = first, second
    words = ",".join(use.place for use in uses)
    with at.graph.inserting_before(at):
        both = call_like(at, PRODUCTS_OF_ONE, words, first.matrix, [use.other for use in uses])
        results = [call_like(use.node, operator.getitem, both, place) for place, use in enumerate(uses)]
    for use, result in zip(uses, results, strict=True):
        use.node.replace_all_uses_with(result)
        use.node.graph.erase_node(use.node)
