"""What the nodes of a graph of PyTorch's operations compute, as far as chains are made of it, and what they change."""

import contextlib
import inspect
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ops import pointwise

CONTRACTIONS = "linear", "conv2d", "conv_transpose2d"
NORMS = "group_norm", "layer_norm"
#: By this name a node's ``meta`` says why the longest chain with it was refused.
REFUSAL = "normfuse_refusal"
#: In no chain: their bias alone is.
CONVOLUTIONS = F.conv1d, F.conv3d, F.conv_transpose1d, F.conv_transpose3d
#: Functions beside the pointwise ones: what they are here, what PyTorch calls them, what they take after their input.
_FUNCTIONS = (
    ("linear", "linear", "weight bias"),
    ("conv2d", "conv2d", "weight bias stride padding dilation groups"),
    ("conv_transpose2d", "conv_transpose2d", "weight bias stride padding output_padding groups dilation"),
    ("group_norm", "group_norm", "num_groups weight bias eps cudnn_enabled"),
    ("layer_norm", "layer_norm", "normalized_shape weight bias eps cudnn_enabled"),
    ("minimum", "min", "dim keepdim"),
    ("product", "matmul mm", "weight"),
    ("addmm", "addmm", "first second"),
    ("addcmul", "addcmul", "first second"),
    ("neg", "neg negative", ""),
    ("clamp", "clamp_min", "min"),
    ("clamp", "clamp_max", "max"),
    # They return their input where they are off.
    ("dropout", "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", "p training inplace"),
    # They may return their input, a view that is no other, or a copy in the same dtype.
    ("same", "flatten reshape contiguous clone to type type_as float half bfloat16 view expand pos positive", ""),
)
#: What pointwise functions are called besides.
_ALSO = {
    "add": "iadd",
    "sub": "isub subtract",
    "mul": "imul multiply",
    "div": "truediv itruediv divide true_divide",
    "clamp": "clip clip_",
}
#: What a function may be given besides, if it is this.
_WITHOUT_EFFECT = {"alpha": 1, "rounding_mode": None, "out": None}
#: What makes a matrix the transposed one.
_TRANSPOSING = ("getattr", "numpy_T", "mT", "matrix_H", "mH", "t", "transpose", "permute", "swapaxes", "swapdims")
#: Whose functions write to no tensor, but for those in place and those that keep statistics in their arguments.
_PURE = ("_operator", "builtins", "math", "torch", "torch._C._nn", "torch.nn.functional")
_KEEPING = ("batch_norm", "instance_norm", "embedding", "moving_avg")
#: Beside pointwise functions and norms.
_ON_THE_WAY = {
    *("mean", "sum", "min", "max", "amin", "amax", "minimum", "maximum", "logsumexp", "softmax", "log_softmax"),
    *("dropout", "batch_norm", "instance_norm", "rms_norm", "exp", "log", "sqrt", "pow", "neg"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "max_pool1d", "max_pool2d", "max_pool3d"),
}
_IN_PLACE = {operator.setitem, operator.delitem} | {
    function for name, function in vars(operator).items() if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")
}


def _parameters() -> dict[Any, tuple[str, tuple[str, ...]]]:
    """By function, or method's name: what it is called here, and what it takes after its input."""
    functions = [(kind, spelled.split(), tuple(names.split())) for kind, spelled, names in _FUNCTIONS]
    for kind in pointwise.__all__:
        if kind.islower() and kind not in ("apply", "earlier"):
            names = tuple(inspect.signature(getattr(pointwise, kind)).parameters)
            names += () if names == ("other",) else ("inplace",)
            functions.append((kind, [kind, f"{kind}_", *_ALSO.get(kind, "").split()], names))
    return {
        target: (kind, names)
        for kind, spelled, names in functions
        for name in spelled
        for target in (name, *(getattr(module, name, name) for module in (operator, torch, F)))
    }


_PARAMETERS = _parameters()


def bound(node: Node) -> tuple[str, dict[str, Any]]:
    """What the node is, and what it is given by name; "" and nothing where chains are made of no such thing."""
    if node.op not in ("call_function", "call_method") or node.target not in _PARAMETERS:
        return "", {}
    kind, names = _PARAMETERS[node.target]
    given = {**dict(zip(("input", *names), node.args, strict=False)), **node.kwargs}
    if kind == "same":
        return kind, {"input": node.args[0]} if node.args else given
    others = {name: given.pop(name) for name in given.keys() - {"input", *names}}
    if "input" not in given or len(node.args) > 1 + len(names) or not others.items() <= _WITHOUT_EFFECT.items():
        return "", {}
    given.pop("inplace", None)  # as ``writes`` tells
    if kind == "neg":
        return "mul", {**given, "other": -1.0}
    if kind == "dropout":
        is_off = given.get("training", True) is False or _is_zero(example(given.get("p")))
        return ("same", given) if is_off else ("", {})
    if kind == "product":  # with a transposed matrix it is a linear layer
        matrix = _transposed(given.get("weight"))
        return ("linear", {**given, "weight": matrix}) if matrix else ("", {})
    if kind == "addmm":
        matrix = _transposed(given.get("second"))
        is_bias = matrix and has_shape(given["input"], example(matrix).shape[:1])
        return ("linear", {"input": given["first"], "weight": matrix, "bias": given["input"]}) if is_bias else ("", {})
    return kind, given


def _is_zero(number: Any) -> bool:
    """Whether it is 0. Dynamo guards that of a number that is an input, as a module's with dynamic=True."""
    if not isinstance(number, torch.SymFloat):
        return number == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads SymPy

    return guard_or_false(number == 0)


def _transposed(node: Any) -> Node | None:
    """The matrix of which this node is the transposed one, or None."""
    if not (isinstance(node, Node) and node.args and name_of(node) in _TRANSPOSING):
        return None
    matrix, transposed = example(node.args[0]), example(node)
    is_reversed = matrix.ndim == 2 and transposed.shape == matrix.shape[::-1]
    is_reversed = is_reversed and transposed.stride() == matrix.stride()[::-1]
    results = [example(user) for user in node.users if user.op != "output"]
    # (A view that was made without gradients is a leaf that requires one.)
    is_detached = matrix.requires_grad and transposed.is_leaf and any(each.requires_grad for each in results)
    return node.args[0] if is_reversed and not is_detached and len(results) == len(node.users) else None


def writes(node: Node) -> bool:
    """Whether it may write to a tensor, or change how what follows is computed."""
    return _written(node) != ((), True)


def _written(node: Node) -> tuple[Any, bool]:
    """The arguments to which a node may write, and whether it does nothing else that others see. Of what is not known
    all may be."""
    target, name = node.target, name_of(node)
    arguments, has_tensors = (node.args, node.kwargs), len(node.all_input_nodes) > 0
    if node.op not in ("call_function", "call_method", "call_module"):
        return (), True
    if isinstance(target, torch._ops.OpOverload):
        return (arguments, has_tensors) if target._schema.is_mutable else ((), True)
    if node.op == "call_module" or not (isinstance(target, str) or getattr(target, "__module__", "") in _PURE):
        attributes = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
        bodies = [each for each in map(vars(node.graph.owning_module)["_modules"].get, attributes) if each is not None]
        are_pure = bodies and not any(writes(each) for body in bodies for each in body.graph.nodes)
        return () if are_pure else arguments, False
    given: Any = node.kwargs
    with contextlib.suppress(TypeError, ValueError):  # a built-in function has no signature, a method's name neither
        given = inspect.signature(target).bind_partial(*node.args, **node.kwargs).arguments
    if any(each in name for each in _KEEPING) or given.get("out") is not None:
        return arguments, has_tensors
    is_in_place = (
        target in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith(("__i", "__set", "__del"))
        or bool(given.get("inplace"))
    )
    return (node.args[:1] or arguments, has_tensors) if is_in_place else ((), True)


def name_of(node: Node) -> str:
    """What a node's function or method is called; "" where it has no name."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_computed_on_the_way(node: Node) -> bool:
    """Whether a compiler computes what a node makes of a norm's result in the norm's own kernel."""
    kind, _ = bound(node)
    return name_of(node) in _ON_THE_WAY or hasattr(pointwise, kind) or kind in NORMS


def example(value: Any) -> Any:
    """The fake tensor, or number, that stands for a node's value; what is no node is its own."""
    return value.meta.get("example_value") if isinstance(value, Node) else value


def has_shape(value: Any, shape: Sequence[Any]) -> bool:
    """Whether it stands for a tensor that is known to have this shape. No open size is settled by asking."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    own = getattr(example(value), "shape", None)
    if own is None or len(own) != len(shape):
        return False
    return all(statically_known_true(one == other) for one, other in zip(own, shape, strict=True))


def depends_on_data(value: Any) -> bool:
    """Whether a size of the tensor is one that data settle, as of ``x[mask]``."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(list(getattr(example(value), "shape", ()))))


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


class Surroundings:
    """What a graph's nodes do to one another beside their values.

    Attributes:
        autocasts: By node the arguments of the autocast regions within the graph that it is in.
    """

    def __init__(self, graph: Graph) -> None:
        self.autocasts: dict[Node, tuple[tuple, ...]] = {}
        #: The memory that a node may write to, and whether it does nothing else, where it writes.
        self._writing: dict[Node, tuple[set[int | None], bool]] = {}
        regions: dict[Node, tuple] = {}
        for node in graph.nodes:
            if name_of(node) == "_enter_autocast":
                regions[node] = node.args
            elif name_of(node) == "_exit_autocast":
                regions.pop(node.args[0], None)
            self.autocasts[node] = tuple(regions.values())
            arguments, is_all = _written(node)
            found: list[Node] = []
            map_arg(arguments, found.append)
            if found or not is_all:
                self._writing[node] = set(map(memory, found)), is_all

    def allow(self, nodes: tuple[Node, ...]) -> bool:
        """Whether these may all be computed where the last of them is, from what they take.

        Nothing that one of them takes may be written to afterwards: behind the last of them, what is kept of it for the
        backward pass would be written to, too.
        """
        own = set(nodes)
        taken: set[int | None] = set()
        node, last, is_behind = nodes[0], nodes[-1], False
        while node.op != "output" and (not is_behind or example(last).requires_grad):
            if node in self._writing and node not in own:
                written, is_all = self._writing[node]
                if taken & written or not (is_all or is_behind):
                    return False
            if node in own:
                taken |= {memory(each) for each in (node, *node.all_input_nodes)} - {None}
            if node is last:
                is_behind, taken = True, taken - {memory(last)}
            node = node.next
        return True
