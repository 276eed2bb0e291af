"""In graphs behind autograd, float32 products that sum over different axes of one matrix become one call, so that the
matrix is split once (``triton_kernels.float32_block_split``): mostly the gradients of a layer's input and weight."""

import operator
from collections.abc import Sequence
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
        while matrix.target is aten.permute.default and list(matrix.args[1]) == [1, 0]:
            matrix, is_turned = matrix.args[0], not is_turned
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


def pair(products: Sequence[Node]) -> set[Node]:
    """Replace pairs of these ``aten.mm``, which stand in order. Returns what was replaced."""
    paired: set[Node] = set()
    waiting: list[_Use] = []
    for node in products:
        uses = [_Use(node, 0), _Use(node, 1)]
        fitting = ((one, use) for use in uses for one in waiting if one.matrix is use.matrix and one.axis != use.axis)
        if found := next((one for one, use in fitting if _are_replaced(one, use)), None):
            paired |= {found.node, node}
            waiting = [one for one in waiting if one.node is not found.node]
        else:
            waiting += uses
    return paired


def _are_replaced(first: _Use, second: _Use) -> bool:
    """Both shall stand where one of them stood, so that nothing is computed much earlier or later: where the first did,
    if there what the second reads is known or a view of that; or else where the second did, if the first one's users
    stand behind."""
    places = {node: place for place, node in enumerate(first.node.graph.nodes)}
    views = []
    source = second.other
    while places[source] > places[first.node] and source.target in _VIEWS:
        views.append(source)
        source = source.args[0]
    if places[source] < places[first.node]:
        for view in reversed(views):
            first.node.prepend(view)
        _replace(first, second, first.node)
        return True
    if all(places[user] > places[second.node] for user in first.node.users):
        _replace(first, second, second.node)
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
