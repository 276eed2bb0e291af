"""Find chains in a traced forward, and put one call in the place of each."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from ops.fuse_calls import CHAINS, fused_or_plain, is_axis_of_four
from ops.fuse_spellings import TENSORS
from ops.fuse_steps import Attribute, Step, minima_of, present, step_of
from ops.fuse_tracing import in_place

_CONTRACTIONS = {chain.contraction for chain, _ in CHAINS.values()}
_NORMS = {chain.norm for chain, _ in CHAINS.values()}
#: How many steps may lie between a contraction and a norm: one more than in any chain, so that it can be reported.
_FARTHEST = 1 + max(len(chain.before) for chain, _ in CHAINS.values())


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


def find(graph: Graph, root: nn.Module) -> list[Match]:
    """One entry for each norm that follows a contraction closely."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    matches = []
    for node in graph.nodes:
        steps = _leading_to(node, root)
        if steps:
            found = filter(None, (_completed(name, steps, root) for name in CHAINS))
            match = max(found, key=lambda match: len(match.steps), default=Match("", steps))
            matches.append(dataclasses.replace(match, refusal=next(_refusals(match, root, order), "")))
    return matches


def _leading_to(node: Node, root: nn.Module) -> tuple[Step, ...]:
    """The steps from the last contraction to this node, if it is a norm, or none."""
    steps = (step_of(node, root),)
    while steps[0].value is not None and steps[-1].kind in _NORMS and len(steps) <= _FARTHEST + 1:
        steps = (step_of(steps[0].value, root), *steps)
        if steps[0].kind in _CONTRACTIONS:
            return steps
        if steps[0].kind in _NORMS:
            break
    return ()


def _completed(name: str, steps: tuple[Step, ...], root: nn.Module) -> Match | None:
    """The chain of this name, where it has these steps up to the norm and others follow that complete it."""
    chain, _ = CHAINS[name]
    added = len(steps) - len(chain.activation) - 2
    # A vector that is added to images lies along their width, not their channels.
    most = len(chain.biases) if chain.contraction == "linear" else 0
    kinds = [chain.contraction, *["add"] * added, *(step.name for step in chain.activation), chain.norm]
    if added > most or [step.kind for step in steps] != kinds:
        return None
    reductions = [chain.reduction.name] if chain.reduction else []
    for kind in [*(step.name for step in chain.after), *reductions]:
        end = steps[-1].nodes[-1]
        readers = [step_of(reader, root) for user in end.users for reader in minima_of(user) or [user]]
        found = [step for step in readers if step.kind == kind and step.value is end]
        if not found:
            return None
        steps = (*steps, found[0])
    return Match(name, steps + _final_bias(steps[-1], root) if reductions else steps, added)


def _final_bias(minimum: Step, root: nn.Module) -> tuple[Step, ...]:
    """What adds a bias of shape (1, channels, 1, 1) to the minimum, if that is all that is done with it."""
    match [step_of(user, root) for user in minimum.nodes[-1].users]:
        case [Step(kind="add", refusal="") as step] if step.nodes[0].target not in (in_place, "add_"):
            bias = present(step.operands["other"], root)
            return (step,) if isinstance(bias, torch.Tensor) and is_axis_of_four(bias) else ()
    return ()


def _refusals(match: Match, root: nn.Module, order: dict[Node, int]) -> Iterator[str]:
    """Why these steps are left as they are."""
    if not match.chain:
        yield "with what follows, they make none of the four chains"
    steps, nodes = match.steps, match.nodes
    yield from (step.refusal for step in steps if step.refusal)
    used = ((node, user) for node in nodes[:-1] for user in node.users if user not in nodes)
    yield from (f"{node.name} is used by {user.name} too" for node, user in used)
    weight, bias = (present(steps[0].operands[name], root) for name in ("weight", "bias"))
    for step in steps[1 : 1 + match.added]:
        vector = present(step.operands["other"], root)
        if not isinstance(vector, torch.Tensor):
            yield f"what {step.name} adds is no tensor of the module's, so its shape is not known"
        channels = weight.shape[0] if isinstance(weight, torch.Tensor) else vector.numel()
        if vector.shape not in ((channels,), (1, channels)):
            yield f"what {step.name} adds has shape {tuple(vector.shape)}, not one value a channel, ({channels},)"
    if match.added + (bias is not None) > len(CHAINS[match.chain][0].biases):
        yield f"{steps[0].name} has a bias, and {steps[1].name} adds another"
    first, last = min(order[node] for node in nodes), max(order[node] for node in nodes)
    between = (node for node in list(order)[first:last] if node not in nodes and node.op != "get_attr")
    yield from (f"{node.name} runs between the chain's steps" for node in between)
    computed = [each for step in steps for each in step.operands.values() if isinstance(each, Node)]
    if steps[0].value is None or any(order[node] >= first for node in computed):
        yield "a step of it is given what is computed from another"


def _computed_outside(match: Match) -> list[Node]:
    """What the chain's steps are given beside the chain's input and the module's attributes."""
    given = dict.fromkeys(each for node in match.nodes for each in node.all_input_nodes)
    inside = {match.steps[0].value, *match.nodes}
    return [node for node in given if node not in inside and node.op != "get_attr"]


def written_out(graph: Graph, match: Match) -> Graph:
    """A graph of the chain alone, as it was written, of what is computed outside of it and of its input."""
    plain = Graph()
    plain.placeholder("self")
    given = [*_computed_outside(match), match.steps[0].value]
    copies: dict[Any, Node] = {node: plain.placeholder(f"argument_{i}") for i, node in enumerate(given)}
    nodes = set(match.nodes)
    for node in graph.nodes:
        is_read = node.op == "get_attr" and node not in copies and not nodes.isdisjoint(node.users)
        if node in nodes or is_read:
            copies[node] = plain.node_copy(node, copies.__getitem__)
    plain.output(copies[match.steps[-1].nodes[-1]])
    return plain


def put_call(graph: Graph, match: Match, plain: Node) -> None:
    """Put one call in the place of the chain's first step; ``plain`` is the chain as it was written."""
    nodes = [node for node in graph.nodes if node in match.nodes]
    with graph.inserting_before(nodes[0]):

        def read(operand: Any) -> Any:
            if isinstance(operand, tuple):
                return tuple(read(each) for each in operand)
            return graph.create_node("get_attr", operand.path) if isinstance(operand, Attribute) else operand

        weight, biases, operands, options = _operands(match)
        given = (*_computed_outside(match), match.steps[0].value)
        arguments = plain, given, match.chain, read(weight), read(biases), read(operands)
        options = {name: read(option) for name, option in options.items()}
        fused = graph.call_function(fused_or_plain, arguments, options)
    match.steps[-1].nodes[-1].replace_all_uses_with(fused)
    for node in reversed(nodes):
        graph.erase_node(node)


def _operands(match: Match) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """weight, biases, operands and options of ``fused_or_plain``. The operands of a step are a tensor, or a tuple of
    numbers."""
    chain, _ = CHAINS[match.chain]
    options: dict[str, Any] = {}
    operands: list[Any] = []
    for step in match.steps:
        tensors = [operand for name, operand in step.operands.items() if name in TENSORS]
        numbers = {name: operand for name, operand in step.operands.items() if name not in TENSORS}
        if step.kind in (chain.contraction, chain.norm):
            options |= numbers
            operands += tensors
        elif step.kind != "row_minimum":
            operands += tensors or [tuple(numbers.values())]
    weight, *operands = operands
    biases = 1 + match.added
    return weight, tuple(operands[:biases]), tuple(operands[biases:]), options
