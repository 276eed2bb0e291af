"""Find the four chains in a traced forward, and put one call in the place of each."""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from ops import fuse_calls
from ops.fuse_steps import Attribute, Step, minima_of, step_of
from ops.fuse_tracing import in_place

#: A Linear layer or a transposed convolution is looked for so many steps before each group norm.
_FARTHEST = 4


@dataclass(frozen=True)
class Match:
    """A group norm with what leads to it: a chain (the name of its function, or "") and why it stays, or ""."""

    chain: str
    steps: tuple[Step, ...]
    operands: dict[str, Any]
    refusal: str


def find(graph: Graph, root: nn.Module) -> list[Match]:
    """One entry for each group norm that follows a Linear layer or a transposed convolution closely."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    matches = []
    for node in graph.nodes:
        norm = step_of(node, root)
        steps = _leading_to(norm, root) if norm.kind == "group_norm" else []
        if steps:
            matches.append(_match(steps, root, order))
    return matches


def _computed_outside(match: Match) -> list[Node]:
    """What the chain's steps are given beside the chain's input and the module's attributes."""
    nodes = [node for step in match.steps for node in step.nodes]
    given = dict.fromkeys(each for node in nodes for each in node.all_input_nodes)
    inside = {match.steps[0].value, *nodes}
    return [node for node in given if node not in inside and node.op != "get_attr"]


def written_out(graph: Graph, match: Match) -> Graph:
    """A graph of the chain alone, as it was written, of what is computed outside of it and of its input."""
    nodes = {node for step in match.steps for node in step.nodes}
    plain = Graph()
    plain.placeholder("self")
    outside = enumerate(_computed_outside(match))
    copies: dict[Any, Node] = {node: plain.placeholder(f"argument_{i}") for i, node in outside}
    copies[match.steps[0].value] = plain.placeholder("argument")
    for node in graph.nodes:
        is_read = node.op == "get_attr" and node not in copies and not nodes.isdisjoint(node.users)
        if node in nodes or is_read:
            copies[node] = plain.node_copy(node, copies.__getitem__)
    plain.output(copies[match.steps[-1].nodes[-1]])
    return plain


def replace(graph: Graph, match: Match, plain: Node) -> None:
    """Put one call in the place of the chain's first step; the first of its arguments is ``plain``."""
    nodes = [node for step in match.steps for node in step.nodes]
    order = {node: i for i, node in enumerate(graph.nodes)}
    nodes.sort(key=order.__getitem__)
    outside = _computed_outside(match)
    with graph.inserting_before(nodes[0]):
        if outside:
            plain = graph.call_function(functools.partial, (plain, *outside))
        arguments: dict[str, Any] = {"plain": plain, "input": match.steps[0].value}
        for name, operand in match.operands.items():
            if isinstance(operand, Node) and operand.op == "get_attr":
                operand = Attribute(str(operand.target))
            is_attribute = isinstance(operand, Attribute)
            arguments[name] = graph.create_node("get_attr", operand.path) if is_attribute else operand
        fused = graph.call_function(getattr(fuse_calls, match.chain), kwargs=arguments)
    match.steps[-1].nodes[-1].replace_all_uses_with(fused)
    for node in reversed(nodes):
        graph.erase_node(node)


def _leading_to(norm: Step, root: nn.Module) -> list[Step]:
    """The steps from the last Linear layer or transposed convolution to the norm, or none."""
    steps = [norm]
    while len(steps) <= _FARTHEST + 1 and steps[0].value is not None:
        steps.insert(0, step_of(steps[0].value, root))
        if steps[0].kind in ("linear", "conv_transpose2d"):
            return steps
        if steps[0].kind == "group_norm":
            break
    return []


def _match(steps: list[Step], root: nn.Module, order: dict[Node, int]) -> Match:
    steps = list(steps)
    kinds = [step.kind for step in steps]
    added = kinds[:2] == ["linear", "add"]
    if added:
        del kinds[1]
    chain = ""
    operands: dict[str, Any] = {"bias": None}
    if kinds == ["conv_transpose2d", "gelu", "group_norm"]:
        chain, operands = "conv_transpose2d_gelu_group_norm", {}
    elif kinds == ["linear", "hardtanh", "mish", "group_norm"]:
        chain = "linear_hardtanh_mish_group_norm"
    elif kinds == ["linear", "group_norm"]:
        following = [step_of(user, root) for user in _readers(steps[-1])]
        for last in (step for step in following if step.value is steps[-1].nodes[-1]):
            if last.kind == "hardtanh":
                chain = "linear_group_norm_hardtanh"
            elif last.kind == "minimum":
                chain = "linear_group_norm_min"
            if chain:
                steps.append(last)
                break
    for step in steps:
        operands |= step.operands
    if chain == "linear_group_norm_min":
        del operands["keepdim"], operands["dim"]
        operands["final_bias"] = None
        addition = _final_bias(steps[-1], root)
        if addition is not None:
            steps.append(addition)
            operands["final_bias"] = addition.operands["bias"]
    return Match(chain, tuple(steps), operands, _refusal(chain, steps, added, operands, root, order))


def _readers(step: Step) -> list[Node]:
    """Who uses the step's result; of a minimum with its index, who reads the minimum."""
    readers = []
    for user in step.nodes[-1].users:
        readers += minima_of(user) or [user]
    return readers


def _final_bias(minimum: Step, root: nn.Module) -> Step | None:
    """What adds a bias of shape (1, channels, 1, 1) to the minimum, if that is all that is done with it."""
    users = list(minimum.nodes[-1].users)
    step = step_of(users[0], root) if len(users) == 1 else None
    if step is None or step.kind != "add" or step.nodes[0].target in (in_place, "add_") or step.refusal:
        return None
    bias = step.operands["bias"]
    return step if _is_axis_of_four(bias, root) else None


def _is_axis_of_four(bias: Any, root: nn.Module) -> bool:
    tensor = _tensor(bias, root)
    return tensor is not None and fuse_calls.is_axis_of_four(tensor)


def _tensor(operand: Any, root: nn.Module) -> torch.Tensor | None:
    """The tensor that an operand is at present, where it is a module's."""
    path = operand.path if isinstance(operand, Attribute) else ""
    if isinstance(operand, Node) and operand.op == "get_attr":
        path = str(operand.target)
    value = operator.attrgetter(path)(root) if path else None
    return value if isinstance(value, torch.Tensor) else None


def _refusal(chain, steps, added, operands, root, order) -> str:
    """Why a chain is left, or "" """
    if not chain:
        return "with what follows, they make none of the four chains"
    for step in steps:
        if step.refusal:
            return step.refusal
    nodes = [node for step in steps for node in step.nodes]
    for node in nodes[:-1]:
        for user in node.users:
            if user not in nodes:
                return f"{node.name} is used by {user.name} too"
    if added:
        bias, weight = (_tensor(operands[name], root) for name in ("bias", "weight"))
        if bias is None:
            return f"what {steps[1].name} adds is no tensor of the module's, so its shape is not known"
        channels = bias.numel() if weight is None else weight.shape[0]
        if bias.shape not in ((channels,), (1, channels)):
            return f"what {steps[1].name} adds has shape {tuple(bias.shape)}, not one value a channel, ({channels},)"
        if chain != "linear_hardtanh_mish_group_norm" and operands["linear_bias"] is not None:
            linear_bias = operands["linear_bias"]
            if not isinstance(linear_bias, Attribute) or _tensor(linear_bias, root) is not None:
                return f"{steps[0].name} has a bias, and {steps[1].name} adds another"
    first, last = min(order[node] for node in nodes), max(order[node] for node in nodes)
    for node, place in order.items():
        if first < place < last and node not in nodes and node.op != "get_attr":
            return f"{node.name} runs between the chain's steps"
    computed = (each for each in operands.values() if isinstance(each, Node) and each.op != "get_attr")
    if steps[0].value is None or any(order[node] >= first for node in computed):
        return "a step of it is given what is computed from another"
    return ""
