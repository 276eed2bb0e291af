"""What the nodes of a graph of PyTorch's operations compute, as far as chains are made of it, and what they change."""

import contextlib
import inspect
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ops import convolution, pointwise

CONTRACTIONS = {
    "linear": (F.linear, ("weight", "bias")),
    "conv2d": (F.conv2d, ("weight", "bias", "stride", "padding", "dilation", "groups")),
    "conv_transpose2d": (F.conv_transpose2d, ("weight", "bias", *convolution.DEFAULTS)),
}
#: In no chain: their bias alone is.
CONVOLUTIONS = F.conv1d, F.conv3d, F.conv_transpose1d, F.conv_transpose3d
NORMS = {
    "group_norm": ((F.group_norm, torch.group_norm), ("num_groups", "weight", "bias", "eps", "cudnn_enabled")),
    "layer_norm": ((F.layer_norm, torch.layer_norm), ("normalized_shape", "weight", "bias", "eps", "cudnn_enabled")),
}
#: Return their input where they are off.
_DROPOUTS = F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout
#: May return their input, a view that is no other, or a copy in the same dtype.
_SAME = (
    *(torch.flatten, "flatten", torch.reshape, "reshape", "contiguous", torch.clone, "clone"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "view", "expand", operator.pos, "positive"),
)
#: Arithmetic as operators, and other names of functions.
_ALSO = {
    "add": (operator.add, operator.iadd),
    "sub": (operator.sub, operator.isub, torch.subtract, "subtract"),
    "mul": (operator.mul, operator.imul, torch.multiply, "multiply"),
    "div": (operator.truediv, operator.itruediv, torch.divide, torch.true_divide, "divide", "true_divide"),
    "clamp": (torch.clip, "clip", "clip_"),
}
#: Functions that are others with some of their arguments: by target their names, with those of their arguments.
_AS_OTHERS = {
    **dict.fromkeys((torch.clamp_min, "clamp_min"), ("clamp", ("min",))),
    **dict.fromkeys((torch.clamp_max, "clamp_max"), ("clamp", ("max",))),
    **dict.fromkeys((operator.neg, torch.neg, torch.negative, "neg", "negative"), ("neg", ())),
}
#: What a function may be given besides, if it is this.
_WITHOUT_EFFECT = {"alpha": 1, "rounding_mode": None, "out": None}
#: Products, and what makes a matrix the transposed one.
_PRODUCTS = (operator.matmul, torch.matmul, torch.mm, "matmul", "mm")
_TRANSPOSING = ("getattr", "numpy_T", "t", "transpose", "permute", "swapaxes", "swapdims")
#: Whose functions write to no tensor, but for those in place and those that keep statistics in their arguments.
_PURE = ("_operator", "builtins", "math", "torch", "torch._C._nn", "torch.nn.functional")
_KEEPING = ("batch_norm", "instance_norm", "embedding", "moving_avg")
#: Beside pointwise functions and norms.
_ON_THE_WAY = {
    *("mean", "sum", "min", "max", "amin", "amax", "minimum", "maximum", "logsumexp", "softmax", "log_softmax"),
    *("dropout", "batch_norm", "instance_norm", "rms_norm", "exp", "log", "sqrt", "pow", "neg"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "max_pool1d", "max_pool2d", "max_pool3d"),
}
_IN_PLACE = {
    getattr(operator, name)
    for name in ("setitem", "delitem", *(f"i{each}" for each in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"
    )))
}  # fmt: skip


def _parameters() -> dict[Any, tuple[str, tuple[str, ...]]]:
    """By function, or method's name: what it is called here, and what it takes after its input."""
    found: dict[Any, tuple[str, tuple[str, ...]]] = dict.fromkeys(_SAME, ("same", ()))
    found |= dict.fromkeys(_DROPOUTS, ("dropout", ("p", "training", "inplace")))
    found |= {target: (kind, names) for kind, (target, names) in CONTRACTIONS.items()}
    found |= {target: (kind, names) for kind, (targets, names) in NORMS.items() for target in targets}
    found |= dict.fromkeys((torch.min, "min"), ("minimum", ("dim", "keepdim")))
    found |= dict.fromkeys(_PRODUCTS, ("product", ("weight",)))
    found |= _AS_OTHERS
    found |= dict.fromkeys((torch.addcmul, "addcmul"), ("addcmul", ("first", "second")))
    found |= dict.fromkeys((torch.addmm, "addmm"), ("addmm", ("first", "second")))
    for kind in pointwise.__all__:
        if kind.islower() and kind not in ("apply", "earlier"):
            names = tuple(inspect.signature(getattr(pointwise, kind)).parameters)
            names += () if names == ("other",) else ("inplace",)
            spelled = [kind, f"{kind}_"]
            targets = [each for each in spelled if hasattr(torch.Tensor, each)]
            targets += [getattr(module, each) for module in (torch, F) for each in spelled if hasattr(module, each)]
            found |= dict.fromkeys((*targets, *_ALSO.get(kind, ())), (kind, names))
    return found


_PARAMETERS = _parameters()


def bound(node: Node) -> tuple[str, dict[str, Any]] | None:
    """What the node is, and what it is given by name; None where chains are made of no such thing."""
    if node.op not in ("call_function", "call_method") or node.target not in _PARAMETERS:
        return None
    kind, names = _PARAMETERS[node.target]
    given = {**dict(zip(("input", *names), node.args, strict=False)), **node.kwargs}
    if kind == "same":
        return kind, {"input": node.args[0]} if node.args else given
    others = [name for name in _WITHOUT_EFFECT if name in given and name not in names]
    ineffective = all(given.pop(name) == _WITHOUT_EFFECT[name] for name in others)
    names = ("input", *names)
    known = len(node.args) <= len(names) and given.keys() <= {*names}
    if not (ineffective and known and "input" in given):
        return None
    given.pop("inplace", None)  # as ``writes`` tells
    if kind == "neg":
        return "mul", {**given, "other": -1.0}
    if kind == "dropout":
        is_off = given.get("training", True) is False or given.get("p") == 0
        return ("same", given) if is_off else None
    if kind == "product":  # with a transposed matrix it is a linear layer
        matrix = _transposed(given.get("weight"))
        return matrix and ("linear", {"input": given["input"], "weight": matrix})
    if kind == "addmm":
        matrix, shape = _transposed(given.get("second")), getattr(example(given["input"]), "shape", ())
        is_bias = matrix and shape == example(matrix).shape[:1]
        return ("linear", {"input": given["first"], "weight": matrix, "bias": given["input"]}) if is_bias else None
    return kind, given


def _transposed(node: Any) -> Node | None:
    """The matrix of which this node is the transposed one, or None."""
    if not (isinstance(node, Node) and node.args and name_of(node) in _TRANSPOSING):
        return None
    matrix, transposed = example(node.args[0]), example(node)
    is_reversed = matrix.ndim == 2 and (*matrix.shape, *matrix.stride()) == (
        *transposed.shape[::-1], *transposed.stride()[::-1]
    )  # fmt: skip
    results = [example(user) for user in node.users if user.op != "output"]
    # (A view that was made without gradients is a leaf that requires one.)
    is_detached = matrix.requires_grad and transposed.is_leaf and any(each.requires_grad for each in results)
    return node.args[0] if is_reversed and not is_detached and len(results) == len(node.users) else None


def writes(node: Node) -> bool:
    """Whether it may write to a tensor, or change how what follows is computed: all that is not known to do neither."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = name_of(node)
    given: Any = node.kwargs
    with contextlib.suppress(TypeError, ValueError):  # a built-in function has no signature, a method's name neither
        given = inspect.signature(target).bind_partial(*node.args, **node.kwargs).arguments
    return (
        not (isinstance(target, str) or getattr(target, "__module__", "") in _PURE)
        or target in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith(("__i", "__set", "__del"))
        or any(each in name for each in _KEEPING)
        or bool(given.get("inplace"))
        or given.get("out") is not None
    )


def name_of(node: Node) -> str:
    """What a node's function or method is called; "" where it has no name."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_computed_on_the_way(node: Node) -> bool:
    """Whether a compiler computes what a node makes of a norm's result in the norm's own kernel."""
    kind, _ = bound(node) or ("", {})
    return name_of(node) in _ON_THE_WAY or hasattr(pointwise, kind) or kind in NORMS


def example(value: Any) -> Any:
    """The fake tensor, or number, that stands for a node's value; what is no node is its own."""
    return value.meta.get("example_value") if isinstance(value, Node) else value


def number(value: Any, beside: torch.Tensor) -> float:
    """The number, for a function of such a tensor.

    Raises TypeError for all else, such as what a graph computes: it may be another at each call. So it does for numbers
    beyond the dtype's range, which PyTorch refuses.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or torch.finfo(beside.dtype).max < abs(value) < math.inf:
        raise TypeError(f"{value} is no number for {beside.dtype}")
    return float(value)


def memory(value: Any) -> int | None:
    """What tells the memory of a node's value from that of others; None where it is no tensor.

    A dropout may return its input, and its fake tensor does not.
    """
    while isinstance(value, Node) and "dropout" in name_of(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    tensor = example(value)
    try:
        return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None
    except NotImplementedError:  # a sparse one
        return None


def _written(node: Node) -> tuple[set[int | None], bool]:
    """The memory of a node's inputs that it may write to, if it ``writes``, and whether that is all that it does."""
    target, name = node.target, name_of(node)
    is_operator = isinstance(target, torch._ops.OpOverload)
    is_known = is_operator or isinstance(target, str) or getattr(target, "__module__", "") in _PURE
    is_all = is_known and node.op != "call_module" and len(node.all_input_nodes) > 0
    attributes = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
    bodies = [each for each in map(vars(node.graph.owning_module)["_modules"].get, attributes) if each is not None]
    if bodies and not any(writes(each) for body in bodies for each in body.graph.nodes):
        return set(), is_all
    keeps = not is_all or is_operator or any(each in name for each in _KEEPING) or node.kwargs.get("out") is not None
    found: list[Node] = []
    map_arg(node.args[0] if node.args and not keeps else (node.args, node.kwargs), found.append)
    return set(map(memory, found)), is_all


@dataclass(frozen=True)
class Surroundings:
    """What a graph's nodes do to one another beside their values.

    Attributes:
        writing: What each node that writes may write to among its inputs' memory, and whether that is all that it does.
        autocasts: By node the arguments of the autocast regions within the graph that it is in.
    """

    writing: dict[Node, tuple[set[int | None], bool]]
    autocasts: dict[Node, tuple[tuple, ...]]

    @classmethod
    def of(cls, graph: Graph) -> "Surroundings":
        """Those in the graph as it is."""
        regions: dict[Node, tuple] = {}
        autocasts = {}
        for node in graph.nodes:
            name = name_of(node)
            if name == "_enter_autocast":
                regions[node] = node.args
            elif name == "_exit_autocast":
                regions.pop(node.args[0], None)
            autocasts[node] = tuple(regions.values())
        return cls({node: _written(node) for node in graph.nodes if writes(node)}, autocasts)

    def allow(self, nodes: tuple[Node, ...]) -> bool:
        """Whether these may all be computed where the last of them is, from what they take.

        Nothing that one of them takes may be written to afterwards: behind the last of them, what is kept of it for the
        backward pass would be written to, too.
        """
        own = set(nodes)
        taken: set[int | None] = set()
        node, last, is_behind = nodes[0], nodes[-1], False
        while node.op != "output" and (not is_behind or example(last).requires_grad):
            if node in self.writing and node not in own:
                written, is_all = self.writing[node]
                if taken & written or not (is_all or is_behind):
                    return False
            if node in own:
                taken |= {memory(each) for each in (node, *node.all_input_nodes)} - {None}
            if node is last:
                is_behind, taken = True, taken - {memory(last)}
            node = node.next
        return True
