"""What each node of a traced forward computes, as far as a chain may have it: modules, functions and methods."""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ops import checks, submodules
from ops.fuse_tracing import in_place, unpacked

_REQUIRED = object()

#: What each kind of step has beside its input, in PyTorch's order: PyTorch's name → fuse_calls' name, and the default.
_OPERANDS: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": {"weight": ("weight", _REQUIRED), "bias": ("linear_bias", None)},
    "conv_transpose2d": {
        "weight": ("weight", _REQUIRED),
        "bias": ("conv_bias", None),
        "stride": ("stride", 1),
        "padding": ("padding", 0),
        "output_padding": ("output_padding", 0),
        "groups": ("groups", 1),
        "dilation": ("dilation", 1),
    },
    "group_norm": {
        "num_groups": ("num_groups", _REQUIRED),
        "weight": ("norm_weight", None),
        "bias": ("norm_bias", None),
        "eps": ("eps", 1e-5),
    },
    "hardtanh": {"min_val": ("min_val", -1.0), "max_val": ("max_val", 1.0)},
    "clamp": {"min": ("min_val", None), "max": ("max_val", None)},
    "mish": {},
    "gelu": {"approximate": ("approximate", "none")},
    "minimum": {"dim": ("dim", None), "keepdim": ("keepdim", False)},
    "minimum_and_index": {"dim": ("dim", None), "keepdim": ("keepdim", False)},
    "add": {"other": ("bias", _REQUIRED)},
}
#: These change nothing of the result, and come last.
_WITHOUT_EFFECT = ("inplace", "cudnn_enabled")
_TENSORS = ("weight", "linear_bias", "conv_bias", "norm_weight", "norm_bias", "bias")
_PAIRS = ("stride", "padding", "output_padding", "dilation")
#: May be an attribute of the module: they are read, and looked at, at each call.
_NUMBERS = ("num_groups", "eps", "min_val", "max_val")

#: Begin a chain; whatever is called like one of them is told of, at least.
_SOURCES = (nn.Linear, nn.ConvTranspose2d)

#: The attributes of the modules have the names of the functions' parameters.
_MODULES: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.GroupNorm: "group_norm",
    nn.Hardtanh: "hardtanh",
    nn.Mish: "mish",
    nn.GELU: "gelu",
}
_FUNCTIONS = {
    F.linear: "linear",
    F.conv_transpose2d: "conv_transpose2d",
    F.group_norm: "group_norm",
    torch.group_norm: "group_norm",
    F.hardtanh: "hardtanh",
    torch.clamp: "clamp",
    torch.clip: "clamp",
    F.mish: "mish",
    F.gelu: "gelu",
    torch.amin: "minimum",
    torch.min: "minimum_and_index",
    operator.add: "add",
    torch.add: "add",
}
_METHODS = {
    "clamp": "clamp",
    "clamp_": "clamp",
    "clip": "clamp",
    "clip_": "clamp",
    "amin": "minimum",
    "min": "minimum_and_index",
    "add": "add",
    "add_": "add",
}
#: How a minimum with its index is told which of the two to give.
_FIRST, _SECOND = (0, "values"), (1, "indices")
_MULTIPLY = (operator.mul, torch.mul, "mul")  # in place, PyTorch has no gradient of z * tanh(softplus(z))
_TANH = (torch.tanh, "tanh", "tanh_")


@dataclass(frozen=True)
class Attribute:
    """Something that the fused call reads from the module each time: a dotted path from the module."""

    path: str


@dataclass(frozen=True)
class Step:
    """One link of a chain: the nodes that compute it (the last of them its result), from ``value``; what it is given
    besides, by the names of ``fuse_calls``; and why it cannot be part of a fused chain, if so."""

    kind: str
    nodes: tuple[Node, ...]
    value: Node | None
    operands: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def name(self) -> str:
        node = self.nodes[-1]
        return str(node.target) if node.op == "call_module" else self.kind or node.name


def kind_of(node: Node) -> str:
    """Of a function or method, by its name alone."""
    tables: dict[str, dict[Any, str]] = {"call_function": _FUNCTIONS, "call_method": _METHODS}
    return tables.get(node.op, {}).get(node.target, "")


def step_of(node: Node, root: nn.Module) -> Step:
    """What a node computes; of an unknown kind "" where it is nothing that a chain has."""
    if node.op == "call_module":
        return _step_of_module(node, root)
    inputs = node.all_input_nodes
    unknown = Step("", (node,), inputs[0] if inputs else None)
    if node.op not in ("call_function", "call_method"):
        return Step("", (node,), None)
    pair = _pair_of(node)
    if pair and node.args[1] in _FIRST:
        return _minimum(node, pair, root)
    if node.target in _MULTIPLY:
        return _mish(node) or unknown
    if node.target is in_place:
        name, left, right = node.args
        return _add(node, left, right) if name == "iadd" else unknown
    kind = kind_of(node)
    bound = _bind(node, kind) if kind else None
    if bound is None:
        return unknown
    value, operands = bound
    if kind == "add":
        return _add(node, value, operands["bias"])
    if kind == "clamp":
        if operands == {"min_val": None, "max_val": None}:
            return unknown  # PyTorch raises an error
        kind = "hardtanh"
        infinities = {"min_val": -math.inf, "max_val": math.inf}
        operands = {name: infinities[name] if bound is None else bound for name, bound in operands.items()}
    return Step(kind, (node,), value, operands, _refusal(node, kind, operands, root))


def _step_of_module(node: Node, root: nn.Module) -> Step:
    module = getattr(root, str(node.target))  # None where a Sequential has such a child
    value = (*node.args, *node.kwargs.values())[0] if node.args or node.kwargs else None
    value = value if isinstance(value, Node) else None
    for made, kind in _MODULES.items():
        if isinstance(module, made) or (made in _SOURCES and made.__name__ in type(module).__name__):
            operands = {name: Attribute(f"{node.target}.{key}") for key, (name, _) in _OPERANDS[kind].items()}
            return Step(kind, (node,), value, operands, _module_refusal(node, module, made))
    return Step("", (node,), value)


def _module_refusal(node: Node, module: nn.Module, made: type) -> str:
    changed = submodules.change(module, made)
    if changed:
        return f"{node.target} {changed}"
    for name, parameter in module.named_parameters(recurse=False):
        # Of FSDP, DTensors are plain tensors by the time of the call; of other origins, fuse_calls finds them then.
        if is_traceable_wrapper_subclass(parameter) and type(parameter).__name__ != "DTensor":
            return f"{node.target}.{name} is a {type(parameter).__name__}"
    if len(node.args) + len(node.kwargs) != 1:
        return f"{node.target} is given more than its input"
    kind = _MODULES[made]
    operands = {name: getattr(module, key) for key, (name, _) in _OPERANDS[kind].items()}
    return _refusal(node, kind, operands, module)


def _bind(node: Node, kind: str) -> tuple[Any, dict[str, Any]] | None:
    """A function's input and its operands by the names of fuse_calls, or None where it has others."""
    parameters = _OPERANDS[kind]
    names = ("input", *parameters, *_WITHOUT_EFFECT)
    if len(node.args) > len(names):
        return None
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if not given.keys() <= set(names) or "input" not in given:
        return None
    operands = {name: given.get(key, default) for key, (name, default) in parameters.items()}
    if _REQUIRED in operands.values() or not (isinstance(given["input"], Node) or kind == "add"):
        return None
    return given["input"], operands


def _refusal(node: Node, kind: str, operands: dict[str, Any], root: nn.Module) -> str:
    """Why a function with these operands cannot be part of a fused chain, or "" """
    operands = {
        name: checks.plain(_now(operand, root) if name in _NUMBERS else operand)
        for name, operand in operands.items()
        if name not in _TENSORS
    }
    for name, operand in operands.items():
        if isinstance(operand, (Node, torch.Tensor)):
            return f"{node.name}'s {name} is computed, not a number"
        pair = operand if isinstance(operand, (tuple, list)) else (operand, operand)
        if name in _PAIRS and not (len(pair) == 2 and all(isinstance(number, int) for number in pair)):
            return f"{node.name}'s {name} is {operand}, not a number or two"
    if kind == "hardtanh":
        bounds = operands["min_val"], operands["max_val"]
        if not (all(type(bound) in (int, float) for bound in bounds) and bounds[0] <= bounds[1]):
            return f"{node.name}'s bounds are {bounds[0]} and {bounds[1]}"
    if kind == "minimum" and axis_of(operands.get("dim")) is None:
        return f"{node.name} is a minimum over {operands.get('dim')}, not 1"
    if kind == "minimum" and operands["keepdim"] is not True:
        return f"{node.name} is a minimum without keepdim"
    return ""


def _now(operand: Any, root: nn.Module) -> Any:
    """What an operand is at present, where it is an attribute of the module's."""
    is_attribute = isinstance(operand, Node) and operand.op == "get_attr"
    return getattr(root, str(operand.target)) if is_attribute else operand


def axis_of(dim: Any) -> int | None:
    """The one axis that ``dim`` names, if it may be a matrix's columns."""
    axes = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    return axes[0] if axes in ((1,), (-1,)) else None


def _add(node: Node, left: Any, right: Any) -> Step:
    """Either of the two may be the bias: what is a module's, or an argument, or a number."""
    refusal = ""
    if not isinstance(left, Node) or (isinstance(right, Node) and left.op in ("get_attr", "placeholder")):
        if node.target is in_place or node.target == "add_":
            refusal = f"{node.name} writes to {left}, which is no value of the chain's"
        left, right = right, left
    if not isinstance(right, Node):
        refusal = f"{node.name} adds {right}, which is no bias"
    return Step("add", (node,), left, {"bias": right}, refusal)


def _mish(node: Node) -> Step | None:
    """z * tanh(softplus(z)), in either order"""
    if len(node.args) != 2 or node.kwargs:
        return None
    arguments: tuple[Any, ...] = node.args
    for value, tanh in (arguments, arguments[::-1]):
        if not (isinstance(tanh, Node) and tanh.target in _TANH and len(tanh.args) == 1 and not tanh.kwargs):
            continue
        softplus = tanh.args[0]
        if isinstance(softplus, Node) and softplus.target is F.softplus:
            given = dict(zip(("input", "beta", "threshold"), softplus.args, strict=False)) | dict(softplus.kwargs)
            # Beyond a threshold of 20, its default, tanh(softplus(z)) is 1 in any case.
            if {"beta": 1, "threshold": 20, **given} == {"input": value, "beta": 1, "threshold": 20}:
                return Step("mish", (softplus, tanh, node), value)
    return None


def _pair_of(node: Node) -> tuple[Node, ...]:
    """min(...), and what unpacks it, if it is unpacked, where the node reads one of the two; otherwise nothing."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr):
        return ()
    read, which = node.args
    if not isinstance(read, Node) or which not in (*_FIRST, *_SECOND):
        return ()
    pair = (read.args[0], read) if read.target is unpacked and read.args[1] == 2 else (read,)
    return pair if kind_of(pair[0]) == "minimum_and_index" else ()


def minima_of(pair: Node) -> list[Node]:
    """What reads the minimum, where the node is a minimum with its index."""
    readers = [reader for user in pair.users for reader in (user, *user.users)]
    return [reader for reader in readers if _pair_of(reader)[:1] == (pair,) and reader.args[1] in _FIRST]


def _minimum(node: Node, pair: tuple[Node, ...], root: nn.Module) -> Step:
    value, operands = _bind(pair[0], "minimum_and_index") or (None, {})
    readers = (reader for each in pair for reader in each.users if _pair_of(reader))
    unused = (reader for reader in readers if reader is not node and not reader.users)
    refusal = _refusal(pair[0], "minimum", operands, root)
    return Step("minimum" if operands else "", (*pair, *unused, node), value, operands, refusal)
