"""What each node of a traced forward computes, the chains that it has so, and one call put in the place of each."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ops import checks, convolution, submodules
from ops.fuse_calls import CHAINS, fused_or_plain
from ops.fuse_tracing import in_place, unpacked

_CONTRACTIONS = {chain.contraction for chain in CHAINS.values()}
_NORMS = {chain.norm for chain in CHAINS.values()}
#: How many steps may lie between a contraction and a norm: one more than in any chain, so that it can be reported.
_FARTHEST = 1 + max(len(chain.before) for chain in CHAINS.values())
#: Parameters of every function that change nothing of the result, and come last.
_WITHOUT_EFFECT = ("inplace", "cudnn_enabled")
#: Begin a chain. A class with such a name, a quantised one for instance, is reported as left.
_CONTRACTION_CLASSES = (nn.Linear, nn.ConvTranspose2d)
#: How a minimum with its index is told which of the two to give.
_FIRST, _SECOND = (0, "values"), (1, "indices")
_MULTIPLY = (operator.mul, torch.mul, "mul")  # in place, PyTorch has no gradient of z * tanh(softplus(z))
_TANH = (torch.tanh, "tanh", "tanh_")
_REQUIRED = object()


@dataclass(frozen=True)
class Spelling:
    """One way to write a step.

    Args:
        kind: The contraction, pointwise function, norm or reduction of a chain, by its name there.
        parameters: What it takes beside its input, in PyTorch's order, with the defaults. Modules have attributes of
            these names.
        calls: Functions, and methods by their names.
        module: The module's class, or None.
    """

    kind: str
    parameters: dict[str, Any]
    calls: tuple[Any, ...]
    module: type[nn.Module] | None = None


#: "clamp" becomes a hardtanh, and of "minimum_and_index" the first becomes a row minimum.
_SPELLINGS = (
    Spelling("linear", {"weight": _REQUIRED, "bias": None}, (F.linear,), nn.Linear),
    Spelling(
        "conv_transpose2d",
        {"weight": _REQUIRED, "bias": None, **convolution.DEFAULTS},
        (F.conv_transpose2d,),
        nn.ConvTranspose2d,
    ),
    Spelling(
        "group_norm",
        {"num_groups": _REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
        (F.group_norm, torch.group_norm),
        nn.GroupNorm,
    ),
    Spelling("hardtanh", {"min_val": -1.0, "max_val": 1.0}, (F.hardtanh,), nn.Hardtanh),
    Spelling("clamp", {"min": None, "max": None}, (torch.clamp, torch.clip, "clamp", "clamp_", "clip", "clip_")),
    Spelling("mish", {}, (F.mish,), nn.Mish),
    Spelling("gelu", {"approximate": "none"}, (F.gelu,), nn.GELU),
    Spelling("row_minimum", {"dim": None, "keepdim": False}, (torch.amin, "amin")),
    Spelling("minimum_and_index", {"dim": None, "keepdim": False}, (torch.min, "min")),
    Spelling("add", {"other": _REQUIRED}, (operator.add, torch.add, "add", "add_")),
)
_OF_CALLS: dict[Any, Spelling] = {call: spelling for spelling in _SPELLINGS for call in spelling.calls}
_OF_MODULES = {spelling.module: spelling for spelling in _SPELLINGS if spelling.module is not None}
#: Operands that are tensors. All others are numbers, pairs of them or text.
_TENSORS = ("weight", "bias", "other")


@dataclass(frozen=True)
class Step:
    """One link of a chain.

    Attributes:
        kind: As in a ``Spelling``, "" where no chain has it.
        nodes: The nodes that compute it, from ``value``; the last of them is its result.
        operands: What it takes besides, by PyTorch's names. What a child has is a node of its own, outside the graph.
        refusal: Why it cannot be part of a fused chain, or "".
    """

    kind: str
    nodes: tuple[Node, ...]
    value: Node | None
    operands: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def name(self) -> str:
        """As reports show it."""
        node = self.nodes[-1]
        return str(node.target) if node.op == "call_module" else self.kind.removeprefix("row_") or node.name


def _step_of(node: Node, root: nn.Module) -> Step:
    """The step whose result is this node."""
    if node.op == "call_module":
        return _step_of_module(node, root)
    unknown = Step("", (node,), next(iter(node.all_input_nodes), None))
    if node.target is in_place:
        return _add(node, *node.args[1:]) if node.args[0] == "iadd" else unknown
    pair = _pair_of(node) if node.args and node.args[-1] in _FIRST else ()
    call, nodes = (pair[0], (*pair, *_unused(pair, node), node)) if pair else (node, (node,))
    spelling = _spelling_of(call)
    bound = _bind(call, spelling) if spelling else None
    if spelling is None or bound is None:
        return _mish(node) or unknown
    value, operands = bound
    kind = "row_minimum" if pair else spelling.kind
    if kind == "add":
        return _add(node, value, operands["other"])
    if kind == "clamp":
        low, high = operands.values()
        if low is high is None:
            return unknown  # PyTorch raises an error
        kind = "hardtanh"
        operands = {"min_val": -math.inf if low is None else low, "max_val": math.inf if high is None else high}
    return Step(kind, nodes, value, operands, next(_operand_refusals(call, kind, operands, root), ""))


def _spelling_of(node: Node) -> Spelling | None:
    return _OF_CALLS.get(node.target) if node.op in ("call_function", "call_method") else None


def _present(operand: Any, root: nn.Module) -> Any:
    """What an operand is now, where it is read from the module."""
    is_read = isinstance(operand, Node) and operand.op == "get_attr"
    return operator.attrgetter(operand.target)(root) if is_read else operand


def _step_of_module(node: Node, root: nn.Module) -> Step:
    module = getattr(root, str(node.target))  # None where a Sequential has such a child
    given = (*node.args, *node.kwargs.values())
    value = given[0] if given and isinstance(given[0], Node) else None
    for kind, spelling in _OF_MODULES.items():
        if isinstance(module, kind) or (kind in _CONTRACTION_CLASSES and kind.__name__ in type(module).__name__):
            operands = {
                name: Node(node.graph, name, "get_attr", f"{node.target}.{name}", (), {})
                for name in spelling.parameters
            }
            refusals = itertools.chain(
                _module_refusals(node, module, kind), _operand_refusals(node, spelling.kind, operands, root)
            )
            return Step(spelling.kind, (node,), value, operands, next(refusals, ""))
    return Step("", (node,), value)


def _module_refusals(node: Node, module: nn.Module, kind: type[nn.Module]) -> Iterator[str]:
    """Why a call of this module cannot be part of a fused chain, whatever its operands."""
    if changed := submodules.change(module, kind):
        yield f"{node.target} {changed}"
    for name, parameter in module.named_parameters(recurse=False):
        # Of FSDP, DTensors are plain tensors by the time of the call; of other origins, fuse_calls finds them then.
        if is_traceable_wrapper_subclass(parameter) and type(parameter).__name__ != "DTensor":
            yield f"{node.target}.{name} is a {type(parameter).__name__}"
    if len(node.args) + len(node.kwargs) != 1:
        yield f"{node.target} is given more than its input"


def _bind(node: Node, spelling: Spelling) -> tuple[Any, dict[str, Any]] | None:
    """A function's input and its operands, or None where it is given anything else."""
    names = ("input", *spelling.parameters, *_WITHOUT_EFFECT)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    operands = {name: given.get(name, default) for name, default in spelling.parameters.items()}
    fits = (
        len(node.args) <= len(names)
        and {"input"} <= given.keys() <= set(names)
        and _REQUIRED not in operands.values()
        and (isinstance(given["input"], Node) or spelling.kind == "add")
    )
    return (given["input"], operands) if fits else None


def _operand_refusals(node: Node, kind: str, operands: dict[str, Any], root: nn.Module) -> Iterator[str]:
    # A minimum's axis must not change from call to call.
    plain = {
        name: checks.plain(each if kind == "row_minimum" else _present(each, root))
        for name, each in operands.items()
        if name not in _TENSORS
    }
    for name, operand in plain.items():
        if isinstance(operand, (Node, torch.Tensor)):
            yield f"{node.name}'s {name} is computed, not a number"
        pair = operand if isinstance(operand, (tuple, list)) else (operand, operand)
        if name in convolution.DEFAULTS and not (len(pair) == 2 and all(isinstance(number, int) for number in pair)):
            yield f"{node.name}'s {name} is {operand}, not a number or two"
    if kind == "hardtanh":
        low, high = plain.values()
        if not (type(low) in (int, float) and type(high) in (int, float) and low <= high):
            yield f"{node.name}'s bounds are {low} and {high}"
    if kind == "row_minimum" and plain["dim"] not in (1, -1, (1,), (-1,), [1], [-1]):
        yield f"{node.name} is a minimum over {plain['dim']}, not 1"
    if kind == "row_minimum" and plain["keepdim"] is not True:
        yield f"{node.name} is a minimum without keepdim"


def _add(node: Node, left: Any, right: Any) -> Step:
    """Either of the two may be the bias: an attribute of the module, an argument, or a number."""
    refusal = ""
    if not isinstance(left, Node) or (isinstance(right, Node) and left.op in ("get_attr", "placeholder")):
        if node.target is in_place or node.target == "add_":
            refusal = f"{node.name} writes to {left}, which is no value of the chain's"
        left, right = right, left
    if not isinstance(right, Node):
        refusal = f"{node.name} adds {right}, which is no bias"
    return Step("add", (node,), left, {"other": right}, refusal)


def _mish(node: Node) -> Step | None:
    """z * tanh(softplus(z)), in either order"""
    factors = node.args if node.target in _MULTIPLY and len(node.args) == 2 and not node.kwargs else ()
    for value, tanh in itertools.permutations(factors, 2):
        match tanh:
            case Node(target=function, args=(Node(target=F.softplus) as softplus,)) if function in _TANH:
                given = dict(zip(("input", "beta", "threshold"), softplus.args, strict=False)) | dict(softplus.kwargs)
                # Beyond a threshold of 20, its default, tanh(softplus(z)) is 1 in any case.
                if {"beta": 1, "threshold": 20, **given, **tanh.kwargs} == {"input": value, "beta": 1, "threshold": 20}:
                    return Step("mish", (softplus, tanh, node), value)
    return None


def _pair_of(node: Node) -> tuple[Node, ...]:
    """min(...), and what unpacks it, if it is unpacked, where the node reads one of the two; otherwise nothing."""
    is_read = node.op == "call_function" and node.target in (operator.getitem, getattr)
    match node.args:
        case Node() as read, which if is_read and which in (*_FIRST, *_SECOND):
            pair = (read.args[0], read) if read.target is unpacked and read.args[1] == 2 else (read,)
            return pair if _spelling_of(pair[0]) is _OF_CALLS[torch.min] else ()
    return ()


def _unused(pair: tuple[Node, ...], node: Node) -> list[Node]:
    """What reads the pair beside the node, and is not used."""
    readers = (reader for each in pair for reader in each.users)
    return [reader for reader in readers if _pair_of(reader) and reader is not node and not reader.users]


def _minima_of(pair: Node) -> list[Node]:
    """What reads the minimum, where the node is a minimum with its index."""
    readers = [reader for user in pair.users for reader in (user, *user.users)]
    return [reader for reader in readers if _pair_of(reader)[:1] == (pair,) and reader.args[1] in _FIRST]


@dataclass(frozen=True)
class Match:
    """A norm and the steps around it.

    Attributes:
        chain: The name of the chain's function, or "" where they make no chain.
        steps: The steps.
        added: How many of them, behind the contraction, add biases.
        refusal: Why they are left as they are, or "".
    """

    chain: str
    steps: tuple[Step, ...]
    added: int = 0
    refusal: str = ""

    @property
    def nodes(self) -> list[Node]:
        return [node for step in self.steps for node in step.nodes]

    @property
    def inputs(self) -> dict[Node, None]:
        """What the nodes are given from outside."""
        nodes = self.nodes
        return dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in nodes)

    @property
    def given(self) -> list[Any]:
        """The same without what is read from the module; the chain's input comes last."""
        value = self.steps[0].value
        return [*(node for node in self.inputs if node.op != "get_attr" and node is not value), value]


def find(graph: Graph, root: nn.Module) -> Iterator[Match]:
    """One entry for each norm that follows a contraction closely."""
    for node in graph.nodes:
        steps = _leading_to(node, root)
        if steps:
            found = filter(None, (_completed(name, steps, root) for name in CHAINS))
            match = max(found, key=lambda match: len(match.steps), default=Match("", steps))
            yield dataclasses.replace(match, refusal=next(_refusals(match, graph, root), ""))


def _leading_to(node: Node, root: nn.Module) -> tuple[Step, ...]:
    """The steps from the last contraction to this node, if it is a norm, or none."""
    steps = (_step_of(node, root),)
    while steps[0].value is not None and steps[-1].kind in _NORMS and len(steps) <= _FARTHEST + 1:
        steps = (_step_of(steps[0].value, root), *steps)
        if steps[0].kind in _CONTRACTIONS | _NORMS:
            return steps if steps[0].kind in _CONTRACTIONS else ()
    return ()


def _completed(name: str, steps: tuple[Step, ...], root: nn.Module) -> Match | None:
    """The chain of this name, where it has these steps up to the norm and others follow that complete it."""
    chain = CHAINS[name]
    added = len(steps) - len(chain.activation) - 2
    # A vector that is added to images lies along their width, not their channels.
    most = len(chain.biases) if chain.contraction == "linear" else 0
    kinds = [chain.contraction, *["add"] * added, *(step.name for step in chain.activation), chain.norm]
    if added > most or [step.kind for step in steps] != kinds:
        return None
    reductions = [chain.reduction.name] if chain.reduction else []
    for kind in [*(step.name for step in chain.after), *reductions]:
        end = steps[-1].nodes[-1]
        readers = [_step_of(reader, root) for user in end.users for reader in _minima_of(user) or [user]]
        found = [step for step in readers if step.kind == kind and step.value is end]
        if not found:
            return None
        steps = (*steps, found[0])
    return Match(name, steps + _final_bias(steps[-1], root) if reductions else steps, added)


def _final_bias(minimum: Step, root: nn.Module) -> tuple[Step, ...]:
    """What adds a bias of shape (1, channels, 1, 1) to the minimum, if that is all that is done with it."""
    match [_step_of(user, root) for user in minimum.nodes[-1].users]:
        case [Step(kind="add", refusal="") as step] if step.nodes[0].target not in (in_place, "add_"):
            bias = _present(step.operands["other"], root)
            return (step,) if isinstance(bias, torch.Tensor) and checks.is_channel_axis(bias.shape) else ()
    return ()


def _refusals(match: Match, graph: Graph, root: nn.Module) -> Iterator[str]:
    if not match.chain:
        yield "with what follows, they make none of the four chains"
    steps, nodes = match.steps, match.nodes
    yield from (step.refusal for step in steps if step.refusal)
    yield from (
        f"{node.name} is used by {user.name} too" for node in nodes[:-1] for user in node.users if user not in nodes
    )
    weight, bias = (_present(steps[0].operands[name], root) for name in ("weight", "bias"))
    for step in steps[1 : 1 + match.added]:
        vector = _present(step.operands["other"], root)
        if not isinstance(vector, torch.Tensor):
            yield f"what {step.name} adds is no tensor of the module's, so its shape is not known"
        channels = weight.shape[0] if isinstance(weight, torch.Tensor) else vector.numel()
        if vector.shape not in ((channels,), (1, channels)):
            yield f"what {step.name} adds has shape {tuple(vector.shape)}, not one value a channel, ({channels},)"
    if match.added + (bias is not None) > len(CHAINS[match.chain].biases):
        yield f"{steps[0].name} has a bias, and {steps[1].name} adds another"
    first, last = min(nodes), max(nodes)
    yield from (
        f"{node.name} runs between the chain's steps"
        for node in graph.nodes
        if first < node < last and node not in nodes and node.op != "get_attr"
    )
    operands = (each for step in steps for each in step.operands.values())
    computed = (each for each in operands if isinstance(each, Node) and each.op != "get_attr")
    if steps[0].value is None or any(node >= first for node in computed):
        yield "a step of it is given what is computed from another"


def written_out(match: Match) -> Graph:
    """A graph of the chain alone, as it was written, of ``match.given``."""
    plain = Graph()
    plain.placeholder("self")
    copies: dict[Any, Node] = {node: plain.placeholder(f"argument_{i}") for i, node in enumerate(match.given)}
    for node in sorted({*match.inputs, *match.nodes} - copies.keys()):
        copies[node] = plain.node_copy(node, copies.__getitem__)
    plain.output(copies[match.steps[-1].nodes[-1]])
    return plain


def put_call(graph: Graph, match: Match, name: str) -> None:
    """Put one call in the place of the chain. The chain as it was written is an argument of this name, after the
    module."""
    with graph.inserting_after(next(iter(graph.nodes))):
        plain = graph.placeholder(name)
    nodes = sorted(match.nodes)
    with graph.inserting_before(nodes[0]):
        # The call reads the attributes itself, since the forward may do so later.
        arguments, options = map_arg(
            _arguments(match), lambda node: graph.get_attr(node.target) if node.op == "get_attr" else node
        )
        fused = graph.call_function(fused_or_plain, (plain, *arguments), options)
    match.steps[-1].nodes[-1].replace_all_uses_with(fused)
    for node in reversed(nodes):
        graph.erase_node(node)


def _arguments(match: Match) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of ``fused_or_plain`` after the first."""
    chain = CHAINS[match.chain]
    numbered = [step.name for step in chain.steps if step.operand == "numbers"]
    operands: list[Any] = []
    options: dict[str, Any] = {}
    for step in match.steps:
        numbers = {name: operand for name, operand in step.operands.items() if name not in _TENSORS}
        if step.kind in numbered:
            operands.append(tuple(numbers.values()))
        elif step.kind != "row_minimum":
            operands += [operand for name, operand in step.operands.items() if name in _TENSORS]
            options |= numbers
    weight, *operands = operands
    biases = 1 + match.added
    end = len(chain.names) - bool(chain.reduction) - len(chain.biases) + biases
    parts = operands[:biases], operands[biases:end], operands[end:]
    return (match.given, match.chain, weight, *map(tuple, parts)), options
