"""The memory format of images in a graph with open norms: channels_last from one convolution to the next.

cuDNN's kernels for tensor cores and those of open norms are fastest for channels_last images. The passes here work on
the graph behind AOTAutograd, forward and backward together. Nothing in it writes to a tensor, so a value may lie in
memory as is best for those who read it. Who may see strides gets those that were traced: the graph's outputs and
parameters' gradients among them, operators that are not PyTorch's, views that depend on them.
"""

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from ops import precision
from ops.convolution import CHANNELS_LAST
from ops.graph_nodes import depends_on_data, has_shape

aten = torch.ops.aten
Tensor = torch.Tensor

STATISTICS, SUMS = "normfuse::statistics", "normfuse::sums"
#: Operators of this project, which take images of any strides and are fastest for channels_last.
_OWN_OPERATORS = {STATISTICS, SUMS, "normfuse::max_pool_backward"}
CAST = torch.ops.prims.convert_element_type.default
#: What a node's ``meta`` says of itself alone.
_OF_ITSELF = {"val", "tensor_meta", "eager_input_vals"}
#: How many of a convolution's first arguments are images, and the place of its number of groups.
CONVOLUTIONS = {aten.convolution.default: (2, 8), aten.convolution_backward.default: (3, 9)}
#: Operators, beside pointwise ones, whose results do not depend on how their operands lie in memory.
_LAYOUT_FREE = {
    *("prims::convert_element_type", "aten::_to_copy", "aten::cat", "aten::constant_pad_nd", "aten::clone"),
    *("aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::var"),
    *("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices"),
    *("aten::max_pool3d_with_indices_backward", "aten::_low_memory_max_pool_with_offsets"),
    *("prims::_low_memory_max_pool_with_offsets", "prims::_low_memory_max_pool_offsets_to_indices"),
    *("aten::avg_pool2d", "aten::avg_pool2d_backward", "aten::avg_pool3d", "aten::avg_pool3d_backward"),
    *("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d"),
    *("aten::upsample_nearest2d", "aten::upsample_nearest2d_backward", "aten::upsample_bilinear2d"),
    *("aten::upsample_nearest3d", "aten::upsample_nearest3d_backward", "aten::reflection_pad2d"),
    *("aten::native_group_norm", "aten::native_group_norm_backward", "aten::native_layer_norm", "aten::_softmax"),
    *("aten::index", "aten::_unsafe_index", "aten::where", "aten::full_like", "aten::index_put", "aten::flip"),
}
#: Pads whose derivatives are no kernels of Inductor's. Decoders of U-Nets call them for all sizes, mostly by nothing.
_PADS = {f"aten::replication_pad{dims}d" for dims in (1, 2, 3)}
#: Those that return a view where there is one.
VIEWS = {
    *("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::permute", "aten::transpose", "aten::expand"),
    *("aten::slice", "aten::select", "aten::squeeze", "aten::unsqueeze", "aten::split", "aten::split_with_sizes"),
    *("aten::unbind", "aten::alias", "aten::detach"),
}
_FREE = _LAYOUT_FREE | VIEWS | _OWN_OPERATORS
#: Bytes at whose multiples Inductor's own tensors begin.
_ALIGNMENT = 16


def lay_out(graph: Graph) -> None:
    """Let the images around open norms lie as channels_last, and open norms read them before they are cast."""
    is_open = [node for node in graph.nodes if operator_name(node) in (STATISTICS, SUMS)]
    for node in is_open:
        _read_before_casts(node)
    if is_open:
        for node in list(graph.nodes):
            if operator_name(node).removesuffix("_backward") in _PADS and not any(node.args[-1]):
                _leave_out(node)
        _Pass(graph, _around(is_open)).run()
        for node in graph.nodes:
            if operator_name(node) in _OWN_OPERATORS:
                hold_strides(node)
        graph.eliminate_dead_code()
        graph.lint()


def hold_apart(graph: Graph) -> None:
    """Let what reads an open norm's float32 input read a copy of it, made before the operator does.

    The partitioner keeps what is computed from a value behind an operator that nothing is fused with, and would keep
    the centred image. Inductor makes no such copies.
    """
    _sort(graph)
    for node in graph.nodes:
        if operator_name(node) != STATISTICS or (image := node.args[1][0]).meta["val"].dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (image,))
        copy.meta = dict(image.meta)
        later = [user for user in image.users if user > node and is_pointwise(user)]
        for each in later:
            each.replace_input_with(image, copy)
    graph.eliminate_dead_code()


def _sort(graph: Graph) -> None:
    """Let each node stand behind what it reads, and else where it stood. Inductor's passes over joint graphs leave this
    to the one behind them."""
    order: dict[Node, None] = {}
    for node in graph.nodes:
        rest = [node]
        while rest:
            missing = [each for each in rest[-1].all_input_nodes if each not in order]
            rest += missing
            if not missing:
                order[rest.pop()] = None
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)


def operator_name(node: Node) -> str:
    return node.target.name().partition(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""


def readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """What reads a value or a view of it, and that."""
    rest = [(user, node) for user in reversed(node.users)]
    while rest:
        user, value = rest.pop()
        if operator_name(user) in VIEWS:
            rest += [(each, user) for each in reversed(user.users)]
        else:
            yield user, value


def owner(node: Node) -> Node:
    """What this one's value is a view of, or a part of what an operator returned; else the node itself."""
    while operator_name(node) in VIEWS or node.target is operator.getitem:
        node = node.args[0]
    return node


def written(graph: Graph) -> set[Node]:
    """Whose memory nodes of the graph write to, or may: what is no operator is not looked into."""
    writers = [node for node in graph.nodes if node.op not in ("placeholder", "output") and _may_write(node)]
    return {owner(each) for node in writers for each in node.all_input_nodes}


def _may_write(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.target is not operator.getitem


def is_known(value: Tensor) -> bool:
    """Whether sizes, strides and where it begins in its memory are numbers, and not open."""
    return all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))


def is_aligned(value: Tensor) -> bool:
    """Whether it begins in its memory where Inductor's own tensors may."""
    return value.storage_offset() * value.element_size() % _ALIGNMENT == 0


def is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _takes_images(node: Node) -> bool:
    return node.target in CONVOLUTIONS or operator_name(node) in _OWN_OPERATORS


def _images_of(node: Node) -> list[Node]:
    """What an operator of ours, or a convolution, reads of an image's shape."""
    if operator_name(node) == STATISTICS:
        image, *others = node.args[1]
        return [image, *(each for each in others if has_shape(each.meta["val"], image.meta["val"].shape))]
    if operator_name(node) == SUMS:
        return [node.args[2], node.args[4][0]]
    if operator_name(node) in _OWN_OPERATORS:
        return list(node.args[1:])
    return list(node.args[: CONVOLUTIONS[node.target][0]])


def _read_before_casts(node: Node) -> None:
    """Let the operator read what was cast to float32: no copy is made for it, or kept."""
    for image in _images_of(node):
        source = image
        while source.target is CAST and _holds_exactly(source.meta["val"].dtype, source.args[0].meta["val"].dtype):
            source = source.args[0]
        if source is not image:
            node.replace_input_with(image, source)


def _leave_out(pad: Node) -> None:
    """Let a copy take the place of a pad by nothing, whose first argument is the image or its gradient."""
    value, source = pad.meta["val"], pad.args[0].meta["val"]
    if value.is_contiguous() or value.stride() == source.stride():
        format = torch.contiguous_format if value.is_contiguous() else torch.preserve_format
        pad.target, pad.args = aten.clone.default, pad.args[:1]
        pad.kwargs = {"memory_format": format}


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return wide == torch.float32 and narrow in (torch.bfloat16, torch.float16)


def _has_image(node: Node) -> bool:
    return any(isinstance(each, Tensor) and each.ndim in CHANNELS_LAST for each in tree_leaves(node.meta.get("val")))


def _around(starts: list[Node]) -> set[Node]:
    """All that images lead to from these nodes, or from where they come."""
    found, rest = set(starts), list(starts)
    while rest:
        node = rest.pop()
        near = [each for each in (*node.all_input_nodes, *node.users) if _has_image(each)]
        new = [each for each in near if each not in found]
        found.update(new)
        rest += new
    return found


def is_channels_last(value: Tensor) -> bool:
    """Whether it lies so, but for dimensions of one."""
    return value.is_contiguous(memory_format=CHANNELS_LAST[value.ndim])


def _is_laid_out(value: Tensor) -> bool:
    """Whether it is channels_last, and PyTorch takes it so. (Of one channel, strides may leave it open.)"""
    return is_channels_last(value) and (value.shape[1] > 1 or value.stride(1) == 1)


def _converts(node: Node) -> bool:
    """Whether cuDNN keeps the format of this convolution's channels_last images, as its fake result does, and is as
    fast. (That of an image of unbacked size is contiguous.)"""
    values = [each.meta["val"] for each in _images_of(node)]
    if any(map(depends_on_data, values)):
        return False
    dtype, groups = values[0].dtype, node.args[CONVOLUTIONS[node.target][1]]
    is_fast = dtype.itemsize == 2 or (dtype == torch.float32 and precision.convolutions_allow_tf32())
    return is_fast and groups == 1 and all(each.ndim in CHANNELS_LAST for each in values)


def complete(graph: Graph) -> None:
    """Compute the values that nodes lack. Inductor asks a user's own pass for few."""
    for node in graph.nodes:
        if node.op == "call_function" and node.users and "val" not in node.meta:
            node.meta["val"] = computed(node)


def computed(node: Node) -> Any:
    """What fake tensors give for the node, with its arguments as they lie now."""
    arguments, options = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    mode = next(each.fake_mode for each in tree_leaves((arguments, options)) if hasattr(each, "fake_mode"))
    with mode, enable_python_dispatcher(), torch.no_grad(), contextlib.ExitStack() as stack:
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        return node.target(*arguments, **options)


def call_like(like: Node, target: Any, *arguments: Any, **options: Any) -> Node:
    """A call that is put into a graph behind autograd where nodes are being inserted. Its ``meta`` is another node's,
    but for what that says of itself alone."""
    node = like.graph.call_function(target, arguments, options)
    node.meta = {name: value for name, value in like.meta.items() if name not in _OF_ITSELF}
    node.meta["val"] = computed(node)
    return node


def hold_strides(node: Node) -> None:
    """Let Inductor give the operator its arguments with the strides that they have now."""
    node.meta["eager_input_vals"] = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])


class _Pass:
    """One walk over a graph, which gives each node's value its new strides."""

    def __init__(self, graph: Graph, region: set[Node]) -> None:
        self._graph, self._region = graph, region
        self._traced: dict[Node, Any] = {node: node.meta.get("val") for node in graph.nodes}
        #: What lies otherwise than was traced.
        self._changed: set[Node] = set()
        #: What reads another node's value than was traced.
        self._stale: set[Node] = set()
        self._copies: dict[tuple[Node, bool], Node] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "output" or (node.op == "call_function" and not self._is_free(node)):
                self._restore(node)
            elif node.op == "call_function":
                self._visit(node)
                self._share_copy(node)

    def _is_free(self, node: Node) -> bool:
        """Whether it computes the same wherever its operands lie."""
        if node.meta.get("unbacked_bindings"):
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target is operator.getitem
        is_known = operator_name(node) in _FREE
        return is_known or (is_pointwise(node) and not node.target._schema.is_mutable) or self._lays_out(node)

    def _lays_out(self, node: Node) -> bool:
        return node.target in CONVOLUTIONS and node in self._region and _converts(node)

    def _visit(self, node: Node) -> None:
        if _takes_images(node):
            for image in _images_of(node):
                if image.meta["val"].ndim in CHANNELS_LAST and not _is_laid_out(image.meta["val"]):
                    node.replace_input_with(image, self._laid_out(image, node))
        if operator_name(node) == "aten::clone" and self._is_needless(node):
            self._stale.update(node.users)
            node.replace_all_uses_with(node.args[0])
            self._graph.erase_node(node)
            return
        if node not in self._stale and not any(each in self._changed for each in node.all_input_nodes):
            return
        try:
            value = computed(node)
        except Exception:  # there is no such view
            self._restore(node)
            return
        if _strides(value) != _strides(node.meta["val"]):
            self._changed.add(node)
        node.meta["val"] = value

    def _is_needless(self, node: Node) -> bool:
        """Whether a copy may be left out: of what is computed here, for what reads no strides and shares no memory."""
        source = node.args[0]
        is_computed = source.op == "call_function" and operator_name(source) not in VIEWS
        return is_computed and all(
            user.op == "call_function" and self._is_free(user) and operator_name(user) not in VIEWS | {"aten::clone"}
            for user in node.users
        )

    def _share_copy(self, node: Node) -> None:
        """Let all who can read the copy of a computed image that is wanted laid out. Else both may be written, and kept
        for the backward pass."""
        value = node.meta.get("val")
        takers = (user for user in node.users if _takes_images(user) and node in _images_of(user))
        is_wanted = operator_name(node) not in VIEWS and any(map(self._is_free, takers))
        if not is_wanted or value.ndim not in CHANNELS_LAST or _is_laid_out(value):
            return
        readers = [user for user in node.users if user.op == "call_function" and self._is_free(user)]
        copy = self._laid_out(node, min(readers))
        self._traced[copy] = self._traced[node]
        if node not in self._changed:
            self._copies[copy, False] = node
        self._stale.update(readers)
        for user in readers:
            user.replace_input_with(node, copy)

    def _restore(self, node: Node) -> None:
        """Let the node have its arguments as they were traced."""
        for each in node.all_input_nodes:
            if each in self._changed:
                node.replace_input_with(each, self._as_traced(each, node))

    def _as_traced(self, node: Node, user: Node) -> Node:
        """A copy that lies in memory as the node's value was traced; of a view, the same view of such a copy."""
        value, source = self._traced[node], node.args and node.args[0]
        is_part = node.target is operator.getitem and operator_name(source) in VIEWS
        is_view = (operator_name(node) in VIEWS or is_part) and source in self._changed
        if not (isinstance(value, Tensor) or is_view):
            return node
        key = node, False
        if key not in self._copies:
            if is_view:
                whole = self._as_traced(node.args[0], user)
                with self._graph.inserting_before(user):
                    copy = self._call(user, node.target, whole, *node.args[1:], **node.kwargs)
            elif value.is_contiguous() and node.meta["val"].is_contiguous():  # but for dimensions of one
                with self._graph.inserting_before(user):
                    copy = self._call(user, aten.view.default, node, list(value.shape))
            else:
                strides: Any = value.stride()
                axes = list(range(value.ndim))
                order = sorted(axes, key=lambda axis: (-strides[axis], axis))
                moves = order != axes  # Inductor 2.13 fails at the strides of a view of some open sizes
                with self._graph.inserting_before(user):
                    moved = self._call(user, aten.permute.default, node, order) if moves else node
                    copy = self._call(user, aten.clone.default, moved, memory_format=torch.contiguous_format)
                    if moves:
                        copy = self._call(user, aten.permute.default, copy, [order.index(axis) for axis in axes])
            self._copies[key] = copy
        return self._copies[key]

    def _laid_out(self, node: Node, user: Node) -> Node:
        value = node.meta["val"]
        key = node, True
        if key not in self._copies:
            with self._graph.inserting_before(user):
                are_known = all(type(stride) is int for stride in value.stride())  # Inductor saves no other views
                if value.shape[1] == 1 and value.is_contiguous() and are_known:
                    last = [value.shape[0], *value.shape[2:], 1]
                    viewed = self._call(user, aten.view.default, node, last)
                    axes = [0, value.ndim - 1, *range(1, value.ndim - 1)]
                    self._copies[key] = self._call(user, aten.permute.default, viewed, axes)
                else:
                    format = CHANNELS_LAST[value.ndim]
                    self._copies[key] = self._call(user, aten.clone.default, node, memory_format=format)
            self._changed.add(self._copies[key])
            if node.op == "placeholder":  # which is there at all times: no copy is kept for the backward pass
                self._copies[key].meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
        return self._copies[key]

    def _call(self, user: Node, target: Any, *arguments: Any, **options: Any) -> Node:
        node = call_like(user, target, *arguments, **options)
        self._traced[node] = node.meta["val"]
        return node


def _strides(value: Any) -> list[Any]:
    return [each.stride() for each in tree_leaves(value) if isinstance(each, Tensor)]
