"""Nodes that are added to a graph of Dynamo's, each tried with the fake tensors first."""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ops.graph_nodes import example, has_shape


class Writer:
    """Adds nodes behind one of a graph's, or before ``place``, each of which is tried with the fake tensors first."""

    def __init__(self, graph: Graph, last: Node, place: Node | None = None):
        self.graph, self.last, self.place = graph, last, place or last.next
        self.added: list[Node] = []

    def call(self, function: Any, *arguments: Any, **options: Any) -> Node:
        """A node that calls the function."""
        fakes, fake_options = map_arg((arguments, options), example)
        with example(self.last).fake_mode, torch.no_grad():
            value = function(*fakes, **fake_options)
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(function, arguments, options)
        node.meta = {**self.last.meta, "example_value": value}
        self.added.append(node)
        return node

    def in_rows(self, node: Node, dimensions: int) -> Node:
        """A matrix of a tensor's elements. So many of its last dimensions become one."""
        if dimensions > 1:
            node = self.call(torch.ops.aten.flatten.using_ints, node, -dimensions, -1)
        if example(node).ndim > 2:
            return self.call(torch.ops.aten.flatten.using_ints, node, 0, -2)
        return node if example(node).ndim == 2 else self.call(torch.ops.aten.unsqueeze.default, node, 0)

    def operand_in_rows(self, node: Node, values: torch.Size, dimensions: int) -> Node:
        """The operand of a matrix of values of this shape."""
        shape = example(node).shape
        own = (1,) * (len(values) - len(shape)) + tuple(shape)
        is_vector = own == (1,) * (len(values) - dimensions) + tuple(values[-dimensions:])
        if is_vector or all(size == 1 for size in own):
            return self.call(torch.ops.aten.reshape.default, node, [-1] if is_vector else [])
        if not has_shape(node, values):
            raise ValueError(f"an operand of shape {tuple(shape)} fits no chain of {tuple(values)}")
        return self.in_rows(node, dimensions)

    def undo(self) -> None:
        """Leave the graph as it was."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
