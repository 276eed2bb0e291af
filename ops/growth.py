"""How a chain grows in a graph of PyTorch's operations: from its contraction, or from some steps before its norm, by a
node at a time, while each value is used by the next steps alone."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ops import checks, pointwise, precision
from ops.graph_nodes import NORMS, bound, example, has_shape, memory, number, writes
from ops.pointwise import Step

_log = logging.getLogger(__name__)

#: How many steps before its norm a chain without a contraction may begin.
_FARTHEST = 16


@dataclass
class Growth:
    """A chain that grows by a node at a time.

    Attributes:
        start: Its contraction, or its input where it has none.
        contraction: Its contraction's name, or "".
        given: What the contraction is given.
        path: Nodes that it is to pass, where there are others.
        nodes: All of it.
        before: The steps before the norm.
        steps: Those since, or all where there is no norm.
        norm: The norm's name, and what it is given.
        has_minimum: Whether the row minimum follows the norm.
        bias: What is added to that.
        places: By node how many steps had made its value.
        opens: Whether the norm is an image's that may be open (``ops.open_norms``).
    """

    start: Node
    contraction: str
    given: dict[str, Any]
    path: frozenset[Node] = frozenset()
    nodes: tuple[Node, ...] = ()
    before: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    norm: tuple[str, dict[str, Any]] | None = None
    has_minimum: bool = False
    bias: Any = None
    places: dict[Node, int] = field(default_factory=dict)
    opens: bool = False

    @property
    def value(self) -> Node:
        """The last one."""
        return self.nodes[-1] if self.nodes else self.start

    @property
    def own_nodes(self) -> tuple[Node, ...]:
        """All of it but what changes nothing at its end, such as a dropout that is off."""
        steps = [place for place, node in enumerate(self.nodes, 1) if bound(node)[0] != "same"]
        return self.nodes[: max(steps, default=0)]

    @property
    def is_whole(self) -> bool:
        """Whether it may end here: it is more than a contraction, and no value but the last is used elsewhere."""
        is_chain = self.norm is not None or (self.contraction == "linear" and len(self.steps) > 0)
        return is_chain and all(user in self.nodes for node in self.nodes[:-1] for user in node.users)

    @property
    def text(self) -> str:
        """It in words."""
        names = [step.pointwise.name for step in self.before], [step.pointwise.name for step in self.steps]
        end = ["row_minimum"] if self.has_minimum else []
        norm = [self.norm[0]] if self.norm else []
        return " -> ".join([*filter(None, [self.contraction]), *names[0], *norm, *names[1], *end])

    @property
    def saved(self) -> tuple[float, int]:
        """The bytes that eager PyTorch moves for it and one call does not, and the kernels that it launches.

        Each value between two nodes is written and read, and in training its gradient too, and itself once more. A
        convolution's own is kept. PyTorch copies the images that its group norm does not take as they lie.
        """
        between = [node for node in self.own_nodes[:-1] if bound(node)[0] != "same"]
        between = [node for node in between if bound(node)[0] not in ("conv2d", "conv_transpose2d")]
        norm = next((node for node in self.nodes if bound(node)[0] in NORMS), None)
        if norm and example(norm).stride() != example(bound(norm)[1]["input"]).stride():
            between.append(norm)
        trains = example(self.value).requires_grad
        moved = sum([size_of(example(node)) for node in between])
        return moved * (5 if trains else 2), len(between) * (3 if trains else 1)

    def ends(self) -> list["Growth"]:
        """It and all that it grows to, the longest first."""
        found, grown = [], self
        while grown:
            found.append(grown)
            grown = grown._grown()
        return found[::-1]

    def _grown(self) -> "Growth | None":
        """It with the next node, where a chain may go on with that."""
        users = [user for user in self.value.users if user not in self.nodes]
        node = min(users, key=lambda user: (user not in self.path, user), default=None)
        kind, given = bound(node) if node else ("", {})
        try:
            return self._with(node, kind, given) if node and kind else None
        except Exception:  # of its arguments, or of sizes that no graph knows
            _log.debug("%s ends a chain", node, exc_info=True)
            return None

    def _with(self, node: Node, kind: str, given: dict[str, Any]) -> "Growth | None":
        value, nodes = self.value, (*self.nodes, node)
        if self.has_minimum:
            return self._with_bias(node, kind, given) if self.bias is None else None
        if kind == "minimum":
            return self._with_minimum(node, given)
        old, new = example(value), example(node)
        # Kernels compute in float32, so results of that dtype may follow values of another, as autocast's norms do.
        is_tensor = isinstance(new, torch.Tensor) and new.dtype in (old.dtype, torch.float32)
        if not is_tensor or not has_shape(node, old.shape):
            return None
        if writes(node) and not (given["input"] is value and self._may_be_overwritten(value, node)):
            return None
        if kind in NORMS and given["input"] is value and not self.norm:
            return replace(self, nodes=nodes, before=self.steps, steps=(), norm=(kind, given), places={node: 0})
        is_same = kind == "same" and given["input"] is value and new.stride() == old.stride()
        added = () if is_same else self._steps(kind, given, value)
        if not (added or is_same) or (self.opens and any(self._is_image(each) for each in added)):
            return None
        steps = (*self.steps, *added)
        return replace(self, nodes=nodes, steps=steps, places={**self.places, node: len(steps)})

    def _is_image(self, step: Step) -> bool:
        """Whether the operand has as many values as the norm, which a compiler reads as well."""
        return isinstance(step.operand, Node) and has_shape(step.operand, example(self.value).shape)

    def _may_be_overwritten(self, value: Node, node: Node) -> bool:
        """Whether nothing else sees that this node writes into the last value."""
        own = [each for each in self.nodes if memory(each) == memory(value)]
        is_own = value in own and (self.contraction or memory(value) != memory(self.start))
        return bool(is_own) and all(user <= node for each in own for user in each.users)

    def _steps(self, kind: str, given: dict[str, Any], value: Node) -> tuple[Step, ...]:
        """What the function does to the value, or nothing."""
        first = given.pop("input")
        if kind == "addcmul" and value in given.values():
            factor = given["second"] if given["first"] is value else given["first"]
            product = self._with_operand(pointwise.mul, factor, value)
            return product, replace(self, steps=(*self.steps, product))._with_operand(pointwise.add, first, value)
        function = getattr(pointwise, kind, None)
        if function is None:
            return ()
        if "other" not in given:
            text = {name: each for name, each in given.items() if isinstance(each, str) or each is None}
            numbers = {name: number(each, example(value)) for name, each in given.items() if name not in text}
            return (function(**numbers, **text),) if first is value else ()
        other = given["other"]
        if first is other:
            return (pointwise.mul(2.0),) if kind == "add" else ()
        if first is value or kind in ("add", "mul"):
            return (self._with_operand(function, other if first is value else first, value),)
        if kind == "sub" and not self._has(first):  # -value + first is exactly the same
            return pointwise.mul(-1.0), self._with_operand(pointwise.add, first, value)
        return ()

    def _has(self, value: Any) -> bool:
        return isinstance(value, Node) and (value in self.places or value in self.nodes)

    def _with_operand(self, function: Any, operand: Any, value: Node) -> Step:
        """The step with a node in the place of a tensor."""
        if self._has(operand):
            return function(pointwise.earlier(len(self.steps) - self.places[operand]))
        tensor = example(operand)
        if not isinstance(tensor, torch.Tensor):
            return function(number(operand, example(value)))
        return Step(function(tensor).pointwise, operand)

    def _with_minimum(self, node: Node, given: dict[str, Any]) -> "Growth | None":
        """The minimum of each row by PyTorch's function that gives its index too, which must not be used."""
        readers = list(node.users)
        follows = self.contraction == "linear" and self.norm and not (self.before or self.steps)
        asked = given.get("dim") in (1, -1) and given.get("keepdim") is True and given["input"] is self.value
        if not (follows and asked and len(readers) == 1 and readers[0].args[1:] == (0,)):
            return None
        return replace(self, nodes=(*self.nodes, node, readers[0]), has_minimum=True)

    def _with_bias(self, node: Node, kind: str, given: dict[str, Any]) -> "Growth | None":
        bias = next((each for each in given.values() if each is not self.value), None)
        shape: tuple[int, ...] = getattr(example(bias), "shape", ())
        fits = kind == "add" and not writes(node) and checks.is_channel_axis(shape)
        return replace(self, nodes=(*self.nodes, node), bias=bias) if fits else None


def size_of(tensor: torch.Tensor | None) -> float:
    """A tensor's bytes. An open size counts as it was when it was captured."""
    if tensor is None:
        return 0.0
    sizes: list[Any] = list(tensor.shape)
    sizes = [size if type(size) is int else size.node.hint or 1 for size in sizes]
    return float(math.prod(sizes) * tensor.dtype.itemsize)


def beginnings(norm: Node, given: dict[str, Any], opens: bool = False) -> Iterator[Growth]:
    """Beginnings of chains without a contraction that have this norm, those that begin the farthest from it first."""
    found = [Growth(given["input"], "", {}, frozenset([norm]), opens=opens)]
    while len(found) < _FARTHEST:
        node = found[-1].start
        kind, given = bound(node)
        if not (kind == "same" or hasattr(pointwise, kind)):
            break
        arguments: tuple[Any, ...] = given["input"], given.get("other")
        operands = [each for each in arguments if has_shape(each, example(node).shape)]
        if not operands or example(max(operands)).dtype not in precision.KERNEL_DTYPES:
            break
        found.append(replace(found[-1], start=max(operands), path=found[-1].path | {node}))
    for each in found[::-1]:
        yield replace(each, given={"input": each.start}, places={each.start: 0})
