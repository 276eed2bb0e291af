"""Chains of the family in a graph of PyTorch's operations, and one call put in the place of each.

The graph is one of Dynamo's, before autograd: functions, methods and operators as a model calls them, with a fake
tensor for each node's value. A chain grows from its contraction, or from some steps before its norm, while each value
is used by the next steps alone. What would take its place is tried with the fake tensors. Where it is refused, or its
shape or dtype is another, a shorter chain is taken, or none.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ops import (
    convolution,
    family,
    functions,
    interpolation,
    open_norms,
    pays,
    pointwise,
    pooling,
    precision,
    upsampled_convolutions,
)
from ops.chain_in_graph import opened, write
from ops.graph_nodes import (
    CONTRACTIONS,
    CONVOLUTIONS,
    NORMS,
    REFUSAL,
    Surroundings,
    bound,
    depends_on_data,
    example,
    memory,
    name_of,
    writes,
)
from ops.graph_writer import Writer
from ops.growth import Growth, beginnings
from ops.pointwise import Step

_log = logging.getLogger(__name__)

_FAMILIES = {(each.contraction, each.norm): each for each in family.FAMILIES}


@dataclass(frozen=True)
class Rewritten:
    """A chain that was put into a graph.

    Attributes:
        chain: The chain in words.
        nodes: The names of the nodes whose place it took.
        calls: The calls of modules in which all of it was captured, from the outside in: the module's id, and from the
            second call on "@" and its number.
        left: Why it was left as it was; "" where it was not.
        is_open: Whether it is an image's norm of which a compiler gets all but the sums (``ops.open_norms``).
    """

    chain: str
    nodes: tuple[str, ...]
    calls: tuple[str, ...] = ()
    left: str = ""
    is_open: bool = False


def rewrite(
    module: GraphModule, compiles: bool = False, everything: bool = False, replays: bool = False
) -> tuple[Rewritten, ...]:
    """Put one call in the place of each chain, in the module's graph and in those within it, such as a checkpoint's.

    ``compiles``: whether a compiler gets the graph. Norms are left to it where all that uses their result is computed
    in its kernel for the norm. Else chains are left that are not faster as a call, unless ``everything`` is taken.
    ``replays``: whether a CUDA graph runs what the compiler makes.
    """
    found: list[Rewritten] = []
    for each in graphs(module):
        found += _rewrite_graph(each.graph, compiles, everything, replays)
        each.recompile()
    return tuple(found)


def graphs(module: GraphModule) -> list[GraphModule]:
    """It and those within it."""
    return [each for each in module.modules() if isinstance(each, GraphModule)]


def _reason_to_leave(growth: Growth) -> str:
    """Why a chain is left in a graph that runs as it is: on a GPU, if it is not faster as a call of its own."""
    value = example(growth.value)
    host = pays.CAPTURED_STEP if value.requires_grad else pays.CAPTURED_CALL
    return pays.reason_for_pytorch(*growth.saved, host) if value.is_cuda else ""


def _rewrite_graph(graph: Graph, compiles: bool, everything: bool, replays: bool) -> Iterator[Rewritten]:
    if any("increment_nesting" in name_of(node) for node in graph.nodes):
        return  # of torch.func, which does not know the chains
    if compiles:
        upsampled_convolutions.rewrite(graph)
        interpolation.rewrite(graph)
        pooling.rewrite(graph)
    for node in graph.nodes:
        _without_shapes(node)
        if compiles and node.target is torch.ops.normfuse.chain.default:
            node.args = (opened(node.args[0]), *node.args[1:])
    apart = [_with_bias_apart(node) for node in list(graph.nodes) if _may_add_bias_apart(node, compiles)]
    surroundings, left = Surroundings(graph), set[Node]()
    for kinds in CONTRACTIONS, NORMS:
        for node in graph.nodes:  # without those that are erased meanwhile
            kind, given = bound(node)
            if (
                node in left
                or kind not in kinds
                or getattr(example(given["input"]), "dtype", None) not in precision.KERNEL_DTYPES
            ):
                continue
            if depends_on_data(node):
                node.meta.setdefault(REFUSAL, "a size depends on data")
                continue
            opens = compiles and kind == "group_norm" and open_norms.has_pixels(example(node))
            contraction = Growth(node, kind, given, nodes=(node,), places={node: 0})
            starts = [contraction] if kinds is CONTRACTIONS else beginnings(node, given, opens)
            for end in (end for start in starts for end in start.ends() if end.is_whole):
                if compiles and (reason := pays.reason_for_compiler(end, replays)):
                    node.meta.setdefault(REFUSAL, reason)
                    break
                if not surroundings.allow(end.nodes):
                    node.meta.setdefault(REFUSAL, "something writes to a tensor that the chain would keep")
                    continue
                names, around = tuple(each.name for each in end.nodes), _common(map(calls, end.own_nodes))
                if reason := "" if compiles or everything else _reason_to_leave(end):
                    left.update(end.nodes)
                    for each in end.nodes:
                        each.meta.setdefault(REFUSAL, reason)
                    yield Rewritten(end.text, names, around, reason)
                    break
                if text := _put(graph, end, surroundings.autocasts[end.value]):
                    yield Rewritten(text, names, around, is_open=end.opens)
                    break
    for put_back in apart:
        put_back()


def _without_shapes(node: Node) -> None:
    """Let a method that takes another tensor for its shape alone take the shape, where that is known."""
    if node.op == "call_method" and node.target in ("expand_as", "view_as") and len(node.args) == 2:
        shape = getattr(example(node.args[1]), "shape", (None,))
        if all(type(size) is int for size in shape):
            node.target, node.args = str(node.target)[:-3], (node.args[0], tuple(shape))


def _may_add_bias_apart(node: Node, compiles: bool) -> bool:
    """Whether it is a convolution of PyTorch's before a group norm, whose bias that may add with the same rounding: on
    a GPU PyTorch adds it in a kernel of its own, except for depthwise ones."""
    kind, given = bound(node)
    stays = node.target in CONVOLUTIONS or (compiles and kind.startswith("conv") and not pays.stays_closed(kind, given))
    if not stays or depends_on_data(node) or not _comes_to_group_norm(node):
        return False
    values, (weight, bias) = example(node), map(example, _weight_and_bias(node))
    are_plain = isinstance(bias, torch.Tensor) and all(hasattr(each, "fake_mode") for each in (values, weight, bias))
    if not are_plain or bias.dtype != weight.dtype or values.dtype not in precision.KERNEL_DTYPES:
        return False
    return values.dtype == torch.float32 or (values.is_cuda and weight.shape[1] > 1)


def _weight_and_bias(node: Node) -> tuple[Any, Any]:
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return given.get("weight"), given.get("bias")


def _with_bias_apart(node: Node) -> Callable[[], None]:
    """Let a convolution's bias be added by a node of its own, for a chain to take. Returns what puts it back where none
    has taken it."""
    values, (weight, bias) = example(node), _weight_and_bias(node)
    writer = Writer(node.graph, node, node)
    vector = writer.call(torch.ops.aten.to.dtype, bias, values.dtype)
    vector = writer.call(torch.ops.aten.view.default, vector, [-1] + [1] * (example(weight).ndim - 2))
    writer.place = node.next
    total = writer.call(torch.add, node, vector)
    total.meta["example_value"] = values
    node.meta["example_value"] = values.detach().clone().requires_grad_(values.requires_grad)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    is_named = "bias" in node.kwargs

    def set_bias(value: Any) -> None:  # the other arguments may be other nodes by then
        node.args = node.args if is_named else (*node.args[:2], value, *node.args[3:])
        node.kwargs = {**node.kwargs, "bias": value} if is_named else node.kwargs

    def put_back() -> None:
        if total in node.users:
            total.replace_all_uses_with(node)
            writer.undo()
            set_bias(bias)
            node.meta["example_value"] = values

    set_bias(None)

    return put_back


def _comes_to_group_norm(node: Node) -> bool:
    """Whether a group norm follows, behind pointwise functions alone."""
    kind = "relu"
    while hasattr(pointwise, kind) and node.users:
        node = max(node.users)
        kind, _ = bound(node)
    return kind == "group_norm"


def calls(node: Node) -> tuple[str, ...]:
    """The calls of modules in which a node was captured, from the outside in."""
    return tuple(map(str, node.meta.get("nn_module_stack", {})))


def _common(each_nodes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """What all begin with."""
    alike = itertools.takewhile(lambda keys: len(set(keys)) == 1, zip(*each_nodes, strict=False))
    return tuple(keys[0] for keys in alike)


# What takes a chain's place


def _put(graph: Graph, growth: Growth, autocasts: tuple[tuple, ...]) -> str:
    """Put a call in the place of the chain. Returns the chain in words, or "" where it is left as it is."""
    last, writer = growth.value, Writer(graph, growth.value)
    try:
        with contextlib.ExitStack() as regions:
            for each in autocasts:
                regions.enter_context(torch.autocast(*each))
            dtype = example(last).dtype if growth.opens else _dtype_seen(growth)
            text, result = _call(writer, growth, precision.name_of(dtype))
            result = _with_strides_of(writer, result, last, dtype, growth.opens)
    except Exception as error:  # whatever the fake run refuses is left: compilation goes on as without this project
        _log.debug("a chain that ends at %s is left", last, exc_info=True)
        for node in growth.nodes:
            node.meta.setdefault(REFUSAL, str(error))
        writer.undo()
        return ""
    result.meta["example_value"] = _with_gradient_of(last, example(result))
    last.replace_all_uses_with(result)
    for node in reversed(growth.nodes):
        graph.erase_node(node)
    return text


def _dtype_seen(growth: Growth) -> torch.dtype:
    """The dtype in which the result is used: that of the values, where autocast casts it back to that."""
    last, dtype = growth.value, example(growth.start).dtype
    uses: list[Node] = []
    map_arg([(user.args, user.kwargs) for user in last.users], uses.append)
    adds_gradients = example(last).requires_grad and uses.count(last) > 1  # in float32, as its dtype is
    casts = last.users and not adds_gradients and all(_casts(user, last, dtype) for user in last.users)
    return dtype if casts else example(last).dtype


def _casts(user: Node, value: Node, dtype: torch.dtype) -> bool:
    """Whether autocast casts the value to this dtype before all that the user does with it: multiplication."""
    if user.target is torch.ops.normfuse.chain.default:
        text, row = user.args[:2]
        return text.startswith(tuple(CONTRACTIONS)) and value not in row[2:] and text.endswith(f" {dtype}")
    kind, _ = bound(user)
    return kind in CONTRACTIONS and example(user).dtype == dtype


def _call(writer: Writer, growth: Growth, dtype: str) -> tuple[str, Node]:
    """The chain in words, and the node that has its result, of this dtype."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    kind, norm = growth.norm or ("", {})
    given, input = growth.given, growth.given["input"]
    of_norm: tuple = (norm.get("weight"), norm.get("bias")) if kind else ()
    num_groups = int(example(norm["num_groups"])) if kind == "group_norm" else 1
    values = example(growth.nodes[0] if growth.contraction else input)
    dimensions = len(example(norm["normalized_shape"])) if kind == "layer_norm" else 1
    if growth.contraction and kind == "layer_norm" and (growth.contraction != "linear" or dimensions > 1):
        raise ValueError("the norm is over more than the channels")
    if growth.contraction == "linear" and kind == "group_norm" and values.ndim != 2:
        raise ValueError("the norm's channels are not the last dimension")
    in_rows = kind == "layer_norm" and not growth.contraction

    def shaped(operand: Node) -> Node:
        if in_rows:
            return writer.operand_in_rows(operand, values.shape, dimensions)
        _check_broadcast(example(operand).shape, values.shape, growth.contraction == "linear")
        return operand

    before, after = map_arg((growth.before, growth.steps), shaped)
    if in_rows:
        input = writer.in_rows(input, dimensions)
        of_norm = tuple(each and writer.call(torch.ops.aten.flatten.using_ints, each, 0, -1) for each in of_norm)
    row = (input, given["weight"], given.get("bias")) if growth.contraction else (input, None)
    # With dynamic=True a norm's numbers are computed, too. The graph is then for these alone.
    eps = float(example(norm.get("eps", 1e-5))) if kind else 0.0
    if growth.has_minimum:
        chain, numbers = functions.L75, ()
    else:
        of_family = _FAMILIES[growth.contraction, kind and "group_norm"]
        chain, _, numbers = of_family.bind(*map_arg((row, of_norm, before, after), example))
    row = (*row, *_nodes(before), *of_norm, *_nodes(after), growth.bias)
    axis = -dimensions if in_rows else -1 if growth.contraction == "linear" else 1
    if not all(map(is_concrete_int, values.shape[axis:][:dimensions])):
        trained = (example(growth.value),) if growth.opens else map(example, row[2:])
        if any(getattr(each, "requires_grad", False) for each in trained):
            raise ValueError("the number of channels is open")  # which stands in the words of vectors' gradients
    convolves = growth.contraction in convolution.IS_TRANSPOSED
    geometry = convolution.in_order(growth.contraction, example(given["weight"]), given) if convolves else ()
    text, _, *rest = write(chain, tuple(map(example, row)), numbers, num_groups, eps, geometry, dtype, growth.opens)
    result = writer.call(torch.ops.normfuse.chain.default, text, list(row), *rest)
    if in_rows:
        result = writer.call(torch.ops.aten.reshape_as.default, result, growth.given["input"])
    return chain.text, result


def _nodes(steps: tuple[Step, ...]) -> list[Node]:
    return [step.operand for step in steps if isinstance(step.operand, Node)]


def _check_broadcast(shape: torch.Size, values: torch.Size, has_rows: bool) -> None:
    """A chain broadcasts a tensor of this shape as PyTorch does: what it is does not hang on leading ones. Raises
    ValueError where it does. (That it fits is checked with the call.)"""
    padded = (1,) * (len(values) - len(shape)) + tuple(shape)
    if pointwise.kind_of(shape, len(values), has_rows) != pointwise.kind_of(padded, len(values), has_rows):
        raise ValueError(f"an operand of shape {tuple(shape)} fits no chain of {tuple(values)}")


def _with_strides_of(writer: Writer, result: Node, last: Node, dtype: torch.dtype, is_open: bool) -> Node:
    """The result as it lies in PyTorch, where that is seen. Raises ValueError where it has another shape or dtype.

    An open norm's always does. The copy goes where nothing sees it: ``ops.layouts``.
    """
    value, expected = example(result), example(last)
    if value.shape != expected.shape or value.dtype != dtype or value.device != expected.device:
        raise ValueError(f"the result is {value}, not {expected}")
    if value.stride() == expected.stride():
        return result
    if not is_open:
        try:
            for node, made in _made_of(last, value).items():
                node.meta["example_value"] = made
            return result
        except Exception:  # so is what makes no tensor, or depends on sizes that no graph knows
            _log.debug("the strides of %s are kept", last, exc_info=True)
    formats = torch.contiguous_format, convolution.CHANNELS_LAST.get(expected.ndim, torch.contiguous_format)
    format = next((each for each in formats if expected.is_contiguous(memory_format=each)), None)
    if format is None:
        raise ValueError(f"the result lies as {value.stride()}, not {expected.stride()}")
    return writer.call(torch.ops.aten.contiguous.default, result, memory_format=format)


def _with_gradient_of(node: Node, value: torch.Tensor) -> torch.Tensor:
    """What stands for a node's value, of which it is known how it lies."""
    expected = example(node)
    if value.stride() == expected.stride() and value.dtype == expected.dtype:
        return expected
    return value.detach().requires_grad_(expected.requires_grad)


#: In the names of functions that draw numbers in the order in which a value lies.
_DRAWING = "dropout", "rand", "bernoulli", "rrelu", "normal", "poisson"
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
        is_alias = memory(user) in map(memory, user.all_input_nodes)
        draws = any(each in name_of(user) for each in _DRAWING)
        if user.op != "call_function" or is_alias or draws or writes(user) or len(made) > _MOST_OTHERWISE:
            raise ValueError(f"{user} sees how its input lies")
        arguments, options = map_arg((user.args, user.kwargs), lambda each: made.get(each, example(each)))
        with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            result = user.target(*arguments, **options)
        if any(result is each for each in made.values()) or result._is_view():
            raise ValueError(f"{user} is a view")
        if result.stride() != example(user).stride():
            made[user] = _with_gradient_of(user, result.to(example(user).dtype))
    return made
