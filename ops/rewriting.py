"""Chains of the family in a graph of PyTorch's operations, and one call put in the place of each.

The graph is one of Dynamo's, before autograd: functions, methods and operators as a model calls them, with a fake
tensor for each node's value. A chain grows from its contraction, or from some steps before its norm, while each value
is used by the next steps alone. What would take its place is tried with the fake tensors. Where it is refused, or its
shape or dtype is another, a shorter chain is taken, or none.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ops import checks, convolution, family, functions, pointwise, precision
from ops.chain import Chain
from ops.graph_nodes import CONTRACTIONS, NORMS, Surroundings, bound, example, is_computed_on_the_way, number, writes
from ops.pointwise import Step

_log = logging.getLogger(__name__)

_FAMILIES = {(each.contraction, each.norm): each for each in family.FAMILIES}
#: By this name a node's ``meta`` says why the longest chain with it was refused.
REFUSAL = "normfuse_refusal"
#: How many steps before its norm a chain without a contraction may begin.
_FARTHEST = 16


@dataclass(frozen=True)
class Rewritten:
    """A chain that was put into a graph.

    Attributes:
        chain: The chain in words.
        nodes: The names of the nodes whose place it took.
        calls: The ids of the modules in whose calls all of it was captured, from the outside in.
    """

    chain: str
    nodes: tuple[str, ...]
    calls: tuple[str, ...] = ()


def rewrite(module: GraphModule, compiles: bool = False) -> tuple[Rewritten, ...]:
    """Put one call in the place of each chain, in the module's graph and in those within it, such as a checkpoint's.

    ``compiles``: whether a compiler gets the graph. Norms are left to it where all that uses their result is computed
    in its kernel for the norm.
    """
    found: list[Rewritten] = []
    for each in graphs(module):
        of_graph = list(_rewrite_graph(each.graph, compiles))
        if of_graph:
            each.recompile()
        found += of_graph
    return tuple(found)


def graphs(module: GraphModule) -> list[GraphModule]:
    """It and those within it."""
    return [each for each in module.modules() if isinstance(each, GraphModule)]


def _rewrite_graph(graph: Graph, compiles: bool) -> Iterator[Rewritten]:
    if any("increment_nesting" in getattr(node.target, "__name__", "") for node in graph.nodes):
        return  # of torch.func, which does not know the chains
    surroundings = Surroundings.of(graph)
    taken: set[Node] = set()
    for kinds in CONTRACTIONS, NORMS:
        for node in list(graph.nodes):
            kind, given = (node not in taken and bound(node)) or ("", {})
            if kind not in kinds or getattr(example(given["input"]), "dtype", None) not in precision.KERNEL_DTYPES:
                continue
            starts = [_Growth.of_contraction(node, kind, given)] if kinds is CONTRACTIONS else _before(node, given)
            ends = (end for start in starts for end in start.ends() if end.is_whole and surroundings.allow(end.nodes))
            for end in ends:
                if compiles and end.goes_on:
                    break
                if text := _put(graph, end, surroundings.autocasts[end.value]):
                    taken.update(end.nodes)
                    yield Rewritten(text, tuple(each.name for each in end.nodes), _common(map(calls, end.nodes)))
                    break


def calls(node: Node) -> tuple[str, ...]:
    """The ids of the modules in whose calls a node was captured, from the outside in."""
    return tuple(str(key).partition("@")[0] for key in node.meta.get("nn_module_stack", {}))


def _common(each_nodes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """What all begin with."""
    alike = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*each_nodes, strict=False))
    return tuple(keys[0] for keys in alike)


@dataclass
class _Growth:
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
        bias: What is added to the row minimum, in a tuple, where there is one.
        places: By node how many steps had made its value.
    """

    start: Node
    contraction: str
    given: dict[str, Any]
    path: frozenset[Node] = frozenset()
    nodes: tuple[Node, ...] = ()
    before: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    norm: tuple[str, dict[str, Any]] | None = None
    bias: tuple[Any, ...] = ()
    places: dict[Node, int] = field(default_factory=dict)

    @classmethod
    def of_contraction(cls, node: Node, kind: str, given: dict[str, Any]) -> "_Growth":
        """A contraction alone."""
        return cls(node, kind, given, nodes=(node,), places={node: 0})

    @property
    def value(self) -> Node:
        """The last one."""
        return self.nodes[-1] if self.nodes else self.start

    @property
    def is_whole(self) -> bool:
        """Whether it may end here: it is more than a contraction, and no value but the last is used elsewhere."""
        is_chain = self.norm is not None or (self.contraction == "linear" and len(self.steps) > 0)
        return is_chain and all(user in self.nodes for node in self.nodes[:-1] for user in node.users)

    @property
    def goes_on(self) -> bool:
        """Whether a compiler computes all that uses its result together with it: unless it multiplies, as Linear."""
        users = self.value.users
        return self.contraction != "linear" and len(users) > 0 and all(map(is_computed_on_the_way, users))

    def ends(self) -> list["_Growth"]:
        """It and all that it grows to, the longest first."""
        found = [self]
        while found[-1].value.users:
            users = sorted(user for user in found[-1].value.users if user not in found[-1].nodes)
            node = next((user for user in users if user in self.path), users[0] if users else None)
            kind, given = (node is not None and bound(node)) or ("", {})
            try:
                grown = kind and found[-1]._with(node, kind, given)
            except Exception:  # of its arguments, or of sizes that no graph knows
                _log.debug("%s ends a chain", node, exc_info=True)
                break
            if not grown:
                break
            found.append(grown)
        return found[::-1]

    def _with(self, node: Node, kind: str, given: dict[str, Any]) -> "_Growth | None":
        value, nodes = self.value, (*self.nodes, node)
        if self.bias:
            return self._with_bias(node, kind, given) if self.bias == (None,) else None
        if kind == "minimum":
            return self._with_minimum(node, given)
        old, new = example(value), example(node)
        # Kernels compute in float32, so results of that dtype may follow values of another, as autocast's norms do.
        is_tensor = isinstance(new, torch.Tensor) and new.dtype in (old.dtype, torch.float32)
        if not is_tensor or new.shape != old.shape:
            return None
        if writes(node) and not (given["input"] is value and self._may_be_overwritten(node)):
            return None
        places = {**self.places, node: len(self.steps)}
        if kind in NORMS:
            if self.norm or given["input"] is not value:
                return None
            return replace(self, nodes=nodes, before=self.steps, steps=(), norm=(kind, given), places={node: 0})
        if kind == "same":
            is_same = given["input"] is value and new.stride() == old.stride()
            return replace(self, nodes=nodes, places=places) if is_same else None
        added = self._steps(kind, given, value)
        places[node] = len(self.steps) + len(added)
        return replace(self, nodes=nodes, steps=(*self.steps, *added), places=places) if added else None

    def _may_be_overwritten(self, node: Node) -> bool:
        """Whether nothing else sees that this node writes into the last value."""
        is_own = self.contraction or self.norm or self.steps
        earlier = (self.start, *self.nodes) if self.contraction else self.nodes
        return bool(is_own) and all(user <= node for each in earlier for user in each.users)

    def _steps(self, kind: str, given: dict[str, Any], value: Node) -> tuple[Step, ...]:
        """What the function does to the value, or nothing."""
        function = getattr(pointwise, kind, None)
        first = given.pop("input")
        if function is None:
            return ()
        if "other" not in given:
            text = {name: each for name, each in given.items() if isinstance(each, str) or each is None}
            numbers = {name: number(each, example(value)) for name, each in given.items() if name not in text}
            return (function(**numbers, **text),) if first is value else ()
        other = given["other"]
        if first is other:
            return (pointwise.mul(2.0),) if kind == "add" else ()
        if first is value:
            return (self._with_operand(function, other, value),)
        if kind in ("add", "mul"):
            return (self._with_operand(function, first, value),)
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

    def _with_minimum(self, node: Node, given: dict[str, Any]) -> "_Growth | None":
        """The minimum of each row by PyTorch's function that gives its index too, which must not be used."""
        readers = list(node.users)
        follows = self.contraction == "linear" and self.norm and not (self.before or self.steps)
        asked = given.get("dim") in (1, -1) and given.get("keepdim") is True and given["input"] is self.value
        if not (follows and asked and len(readers) == 1 and readers[0].args[1:] == (0,)):
            return None
        return replace(self, nodes=(*self.nodes, node, readers[0]), bias=(None,))

    def _with_bias(self, node: Node, kind: str, given: dict[str, Any]) -> "_Growth | None":
        bias = next((each for each in given.values() if each is not self.value), None)
        shape: tuple[int, ...] = getattr(example(bias), "shape", ())
        fits = kind == "add" and not writes(node) and checks.is_channel_axis(shape)
        return replace(self, nodes=(*self.nodes, node), bias=(bias,)) if fits else None


def _before(norm: Node, given: dict[str, Any]) -> Iterator[_Growth]:
    """Beginnings of chains without a contraction that have this norm, those that begin the farthest from it first."""
    found = [_Growth(given["input"], "", {}, frozenset([norm]))]
    while len(found) < _FARTHEST:
        node = found[-1].start
        kind, given = bound(node) or ("", {})
        if not (kind == "same" or hasattr(pointwise, kind)):
            break
        arguments: tuple[Any, ...] = given["input"], given.get("other")
        operands = [each for each in arguments if isinstance(example(each), torch.Tensor)]
        found.append(replace(found[-1], start=max(operands), path=found[-1].path | {node}))
    for each in found[::-1]:
        yield replace(each, given={"input": each.start}, places={each.start: 0})


# What takes a chain's place


class _Writer:
    """Adds nodes behind one of a graph's, each of which is tried with the fake tensors first."""

    def __init__(self, graph: Graph, last: Node):
        self.graph, self.last, self.place = graph, last, last.next
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

    def undo(self) -> None:
        """Leave the graph as it was."""
        for node in reversed(self.added):
            self.graph.erase_node(node)


def _put(graph: Graph, growth: _Growth, autocasts: tuple[tuple, ...]) -> str:
    """Put a call in the place of the chain. Returns the chain in words, or "" where it is left as it is."""
    last, writer = growth.value, _Writer(graph, growth.value)
    try:
        with contextlib.ExitStack() as regions:
            for each in autocasts:
                regions.enter_context(torch.autocast(*each))
            dtype = _dtype_seen(growth)
            text, result = _call(writer, growth, precision.name_of(dtype))
            result = _with_strides_of(writer, result, last, dtype)
    except Exception as error:  # whatever the fake run refuses is left: compilation goes on as without this project
        _log.debug("a chain that ends at %s is left", last, exc_info=True)
        for node in growth.nodes:
            node.meta.setdefault(REFUSAL, str(error))
        writer.undo()
        return ""
    if example(result).stride() == example(last).stride() and example(result).dtype == example(last).dtype:
        result.meta["example_value"] = example(last)
    last.replace_all_uses_with(result)
    for node in reversed(growth.nodes):
        graph.erase_node(node)
    return text


def _dtype_seen(growth: _Growth) -> torch.dtype:
    """The dtype in which the result is used: that of the values, where autocast casts it back to that."""
    last, dtype = growth.value, example(growth.start).dtype
    return dtype if last.users and all(_casts(user, last, dtype) for user in last.users) else example(last).dtype


def _casts(user: Node, value: Node, dtype: torch.dtype) -> bool:
    """Whether autocast casts the value to this dtype before all that the user does with it: multiplication."""
    if user.target is torch.ops.normfuse.chain.default:
        text, row = user.args[:2]
        return text.startswith(tuple(CONTRACTIONS)) and value not in row[2:] and text.endswith(f" {dtype}")
    kind, _ = bound(user) or ("", {})
    return kind in CONTRACTIONS and example(user).dtype == dtype


def _call(writer: _Writer, growth: _Growth, dtype: str) -> tuple[str, Node]:
    """The chain in words, and the node that has its result, of this dtype."""
    kind, norm = growth.norm or ("", {})
    given, input = growth.given, growth.given["input"]
    of_norm: tuple = (norm.get("weight"), norm.get("bias")) if kind else ()
    num_groups = int(example(norm["num_groups"])) if kind == "group_norm" else 1
    before, after = (growth.before, growth.steps) if kind else ((), growth.steps)
    values = example(growth.nodes[0] if growth.contraction else input)
    dimensions = 1
    if kind == "layer_norm":
        sizes = example(norm["normalized_shape"])
        dimensions = len(sizes) if isinstance(sizes, (tuple, list)) else 1
        if growth.contraction and (growth.contraction != "linear" or dimensions > 1):
            raise ValueError("the norm is over more than the channels")
    elif kind and growth.contraction == "linear" and values.ndim != 2:
        raise ValueError("the norm's channels are not the last dimension")
    is_last = growth.contraction == "linear" or kind == "layer_norm"
    axes = range(values.ndim - dimensions, values.ndim) if is_last else range(1, 2)
    in_rows = kind == "layer_norm" and not growth.contraction

    def shaped(step: Step) -> Step:
        if not isinstance(step.operand, Node):
            return step
        operand = step.operand
        what = _kind(example(operand).shape, values.shape, axes, is_last)
        if in_rows:
            operand = (
                writer.in_rows(operand, dimensions)
                if what == "tensor"
                else writer.call(torch.ops.aten.reshape.default, operand, [-1] if what == "vector" else [])
            )
        return Step(step.pointwise, operand)

    before, after = tuple(map(shaped, before)), tuple(map(shaped, after))
    if in_rows:
        input = writer.in_rows(input, dimensions)
        of_norm = tuple(each and writer.call(torch.ops.aten.flatten.using_ints, each, 0, -1) for each in of_norm)
    row = (input, given["weight"], given.get("bias")) if growth.contraction else (input, None)
    # With dynamic=True a norm's numbers are computed, too. The graph is then for these alone.
    eps = float(example(norm.get("eps", 1e-5))) if kind else 0.0
    if growth.bias:
        chain: Chain = functions.L75
        numbers: tuple = ()
        row = (*row, *of_norm, *growth.bias)
    else:
        steps = [[Step(each.pointwise, example(each.operand)) for each in part] for part in (before, after)]
        of_family = _FAMILIES[growth.contraction, kind and "group_norm"]
        fakes = tuple(map(example, row)), tuple(map(example, of_norm))
        chain, _, numbers = of_family.bind(*fakes, *steps)
        row = (*row, *_nodes(before), *of_norm, *_nodes(after), None)
    geometry = _geometry(growth) if growth.contraction not in ("", "linear") else ()
    text, _, *rest = chain.in_graph(tuple(map(example, row)), numbers, num_groups, eps, geometry, dtype)
    result = writer.call(torch.ops.normfuse.chain.default, text, list(row), *rest)
    if in_rows:
        result = writer.call(torch.ops.aten.reshape_as.default, result, growth.given["input"])
    return chain.text, result


def _nodes(steps: tuple[Step, ...]) -> list[Node]:
    return [step.operand for step in steps if isinstance(step.operand, Node)]


def _kind(shape: torch.Size, values: torch.Size, axes: range, is_last: bool) -> str:
    """What a tensor of this shape is to values whose channels are at ``axes``. Raises ValueError where that is nothing
    that a chain takes."""
    padded = (1,) * (len(values) - len(shape)) + tuple(shape)
    of_channels = [values[axis] if axis in axes else 1 for axis in range(len(values))]
    if len(padded) == len(values):
        if all(size == 1 for size in padded):
            return "scalar"
        if padded == tuple(of_channels):
            return "vector"
        if tuple(shape) == tuple(values):
            return "tensor"
        if not is_last and padded == (values[0], *of_channels[1:]):
            return "sample"
    raise ValueError(f"an operand of shape {tuple(shape)} fits no chain of {tuple(values)}")


def _geometry(growth: _Growth) -> tuple:
    """A convolution's, in the order of ``convolution.DEFAULTS``."""
    sizes: dict[str, Any] = {name: growth.given.get(name, default) for name, default in convolution.DEFAULTS.items()}
    if growth.contraction == "conv2d":
        weight = example(growth.given["weight"])
        of_padding = convolution.in_numbers(weight, sizes["stride"], sizes["padding"], sizes["dilation"])
        sizes["padding"], sizes["output_padding"] = of_padding
    return tuple(sizes.values())


def _with_strides_of(writer: _Writer, result: Node, last: Node, dtype: torch.dtype) -> Node:
    """The result as it lies in PyTorch, where that is seen. Raises ValueError where it has another shape or dtype."""
    value, expected = example(result), example(last)
    if value.shape != expected.shape or value.dtype != dtype or value.device != expected.device:
        raise ValueError(f"the result is {value}, not {expected}")
    if value.stride() == expected.stride():
        return result
    try:
        for node, made in _made_of(last, value).items():
            node.meta["example_value"] = made
        return result
    except Exception:  # so is what makes no tensor, or depends on sizes that no graph knows
        _log.debug("the strides of %s are kept", last, exc_info=True)
    format = convolution.memory_format(expected) if expected.ndim == 4 else torch.contiguous_format
    if not expected.is_contiguous(memory_format=format):
        raise ValueError(f"the result lies as {value.stride()}, not {expected.stride()}")
    return writer.call(torch.ops.aten.contiguous.default, result, memory_format=format)


#: How many nodes' values may lie otherwise than in PyTorch because one does.
_MOST_OTHERWISE = 16


def _made_of(last: Node, value: torch.Tensor) -> dict[Node, torch.Tensor]:
    """The values that lie otherwise where a node's does. Raises ValueError where that is seen: by a view, or outside.

    A convolution's result, for one, lies as its weight does. (On a GPU, up to PyTorch 2.13, the group norm of
    channels_last images is contiguous, and the next layer's input.)
    """
    made, user = {last: value}, last
    while (user := user.next).op != "root":
        if not any(each in made for each in user.all_input_nodes):
            continue
        if user.op != "call_function" or writes(user) or len(made) > _MOST_OTHERWISE:
            raise ValueError(f"{user} sees how its input lies")
        arguments, options = map_arg((user.args, user.kwargs), lambda each: made.get(each, example(each)))
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            result = user.target(*arguments, **options)
        if any(result is each for each in made.values()) or result._is_view():
            raise ValueError(f"{user} is a view")
        if result.stride() != example(user).stride():
            made[user] = result
    return made
