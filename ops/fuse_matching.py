"""Find chains in a traced forward, and put one call in the place of each."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ops import checks
from ops.fuse_calls import CHAINS, fused_or_plain
from ops.fuse_steps import TENSORS, Step, minima_of, present, step_of
from ops.fuse_tracing import in_place

_CONTRACTIONS = {chain.contraction for chain in CHAINS.values()}
_NORMS = {chain.norm for chain in CHAINS.values()}
#: How many steps may lie between a contraction and a norm: one more than in any chain, so that it can be reported.
_FARTHEST = 1 + max(len(chain.before) for chain in CHAINS.values())


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
    steps = (step_of(node, root),)
    while steps[0].value is not None and steps[-1].kind in _NORMS and len(steps) <= _FARTHEST + 1:
        steps = (step_of(steps[0].value, root), *steps)
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
    weight, bias = (present(steps[0].operands[name], root) for name in ("weight", "bias"))
    for step in steps[1 : 1 + match.added]:
        vector = present(step.operands["other"], root)
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
        numbers = {name: operand for name, operand in step.operands.items() if name not in TENSORS}
        if step.kind in numbered:
            operands.append(tuple(numbers.values()))
        elif step.kind != "row_minimum":
            operands += [operand for name, operand in step.operands.items() if name in TENSORS]
            options |= numbers
    weight, *operands = operands
    biases = 1 + match.added
    end = len(chain.names) - bool(chain.reduction) - len(chain.biases) + biases
    parts = operands[:biases], operands[biases:end], operands[end:]
    return (match.given, match.chain, weight, *map(tuple, parts)), options
