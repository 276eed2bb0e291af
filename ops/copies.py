"""In graphs behind autograd, copies of weights and of their gradients, many in one launch.

Autocast casts each weight before a library multiplies with it, and each gradient behind the library. Where images are
laid out as channels_last (``ops.layouts``), so are weights, and gradients are copied back. To Inductor each of these
copies is a kernel, as nothing beside it is a kernel of Inductor's: half of its launches in a UNet's training step under
autocast, 2 to 3 us each on the device and 15 on the host. One kernel does up to 64 of them (``triton_kernels.copies``).
"""

import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ops import plans, precision
from ops.convolution import CHANNELS_LAST
from ops.layouts import CAST, CONVOLUTIONS, VIEWS, call_like, is_aligned, is_known, operator_name, readers, written
from ops.operators import define, layouts_of
from ops.plan import Plan
from triton_kernels.copies import MOST_COPIES, copy_all, matrices

Tensor = torch.Tensor
aten = torch.ops.aten

_log = logging.getLogger("ops.backend")

#: Elements of a copy: a larger one takes far longer than its launch.
_LARGEST = 2**22
#: Of all copies of a call. They are there earlier than they would be, and what gradients are copied from is longer: by
#: 32 MB in 16 bits, 64 in float32.
_MOST_ELEMENTS = 2**24
#: One by one, fewer are as fast.
_FEWEST = 4
#: What a library computes.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, *CONVOLUTIONS)
#: How a copy lies in memory, in a letter: as its source, contiguous, or channels_last.
_ALIKE, _CONTIGUOUS, _CHANNELS_LAST = "=cl"


def _results(tensors: Sequence[Tensor], dtype: str, formats: str) -> list[Tensor]:
    """Memory for copies of tensors."""
    return [
        torch.empty_strided(each.shape, _strides(each, format), dtype=precision.DTYPES[dtype], device=each.device)
        for each, format in zip(tensors, formats, strict=True)
    ]


def _strides(tensor: Tensor, format: str) -> tuple[int, ...]:
    if format == _ALIKE:
        return tensor.stride()
    memory_format = torch.contiguous_format if format == _CONTIGUOUS else CHANNELS_LAST[tensor.ndim]
    return torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()


_plans = plans.Kept()


def plan(tensors: list[Tensor], dtype: str, formats: str) -> Plan:
    """The plan that the operator ``copies`` runs for these arguments."""
    key = dtype, formats, *layouts_of(tensors)

    def write(stand_ins: list[Tensor]) -> list[Tensor]:
        results = _results(stand_ins, dtype, formats)
        copy_all(stand_ins, results)
        return results

    return _plans.get(key) or _plans.add(key, plans.made(tensors, write))


define(
    "copies",
    "(Tensor[] tensors, str dtype, str formats) -> Tensor[]",
    plan,
    _results,
    "copies",
    lambda tensors, dtype, _: f"{len(tensors)} tensors to {dtype}",
)


@dataclass(frozen=True)
class _Copy:
    """A cast, a change of the memory format, or both in a row."""

    node: Node
    source: Node
    format: str

    @classmethod
    def of(cls, node: Node) -> "_Copy | None":
        """What a node is the last of, where the kernel can do it."""
        source, steps = node, list[Node]()
        while (source is node or len(source.users) == 1) and _format(source):
            if source.target is CAST and any(step.target is CAST for step in steps):
                break  # it rounds, too
            steps.append(source)
            source = source.args[0]
        format = next(filter(_ALIKE.__ne__, map(_format, steps)), _ALIKE)
        value, before = (each.meta.get("val") for each in (node, source))
        for each in value, before:
            if not isinstance(each, Tensor) or precision.why_no_kernels(each):
                return None
            if not is_known(each):
                return None
        if not is_aligned(before):
            return None  # Inductor would take all results for unaligned ones
        if value.numel() > _LARGEST or value.stride() != _strides(before, format) or not matrices(before, value):
            return None
        return cls(node, source, format)

    @property
    def is_of_weight(self) -> bool:
        """Whether a library reads the copy of one of the graph's inputs."""
        return self.source.op == "placeholder" and any(_takes(user, value) for user, value in readers(self.node))

    @property
    def is_of_gradient(self) -> bool:
        """Whether the copy is one of the graph's results alone, and all that reads all of what a library computed."""
        source, views = _behind_views(self.source)
        if {user.op for user in self.node.users} != {"output"} or len(source.users) != 1:
            return False
        is_whole = not views or source.meta["val"].numel() == self.source.meta["val"].numel()
        return is_whole and _is_product(source.args[0] if source.target is operator.getitem else source)


def _format(node: Node) -> str:
    """How a copy lies in memory; empty where the node is none."""
    if node.target is CAST:
        return _ALIKE
    if node.target is not aten.clone.default:
        return ""
    format = node.kwargs.get("memory_format", torch.preserve_format)
    if format in CHANNELS_LAST.values():
        return _CHANNELS_LAST
    return _CONTIGUOUS if format == torch.contiguous_format else ""


def join(graph: Graph) -> None:
    """Let many copies of weights be one call, before the first of them, and of weights' gradients, behind the last."""
    from torch._inductor import config

    for node in list(graph.nodes):
        _leave_out_rounding(node)
    if config.max_autotune or config.max_autotune_gemm:
        return  # a product that Inductor writes itself casts its result
    copies = [copy for node in graph.nodes if _format(node) and (copy := _Copy.of(node))]
    changing = written(graph)
    of_weights = [each for each in copies if each.is_of_weight and each.source not in changing]
    of_gradients = [each for each in copies if each.is_of_gradient]
    calls = [(bucket, bucket[0].node) for bucket in _buckets(of_weights)]
    calls += [(bucket, bucket[-1].node) for bucket in _buckets(of_gradients)]
    for bucket, at in calls:
        _replace(bucket, at)
    if calls:
        _log.info("%d copies of weights and gradients in %d calls", sum(len(bucket) for bucket, _ in calls), len(calls))


def _leave_out_rounding(cast: Node) -> None:
    """Let a result that was cast to 16 bits and back be what it was, as Inductor does unless views stand between.

    So is the gradient of a convolution's bias that a norm's sums have.
    """
    if cast.target is not CAST or any(user.op != "output" for user in cast.users):
        return
    rounded, views = _behind_views(cast.args[0])
    if rounded.target is not CAST or len(rounded.users) != 1:
        return
    source, (made, _) = rounded.args[0], _behind_views(rounded.args[0])
    if made.op != "call_function" or len(made.users) != 1:  # the result would share memory
        return
    dtypes = [getattr(each.meta.get("val"), "dtype", None) for each in (source, rounded, cast)]
    if dtypes not in [[torch.float32, each, torch.float32] for each in (torch.bfloat16, torch.float16)]:
        return
    with cast.graph.inserting_before(cast):
        for view in views:
            source = call_like(view, view.target, source, *view.args[1:], **view.kwargs)
    if source.meta["val"].stride() == cast.meta["val"].stride():
        cast.replace_all_uses_with(source)
        for node in (cast, *reversed(views), rounded):
            node.graph.erase_node(node)


def _behind_views(node: Node) -> tuple[Node, list[Node]]:
    """What a node is a view of, and the views in a row, where nothing else reads them."""
    views: list[Node] = []
    while operator_name(node) in VIEWS and len(node.all_input_nodes) == len(node.users) == 1:
        views.insert(0, node)
        node = node.args[0]
    return node, views


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS or getattr(node.target, "namespace", "") == "normfuse"


def _takes(node: Node, value: Node) -> bool:
    """Whether a library reads a value as it lies: not images and weights that Inductor would lay out as channels_last.
    (Only there it would add the bias without a cast of it.)"""
    if node.target not in CONVOLUTIONS:
        return _is_product(node)
    is_bias = node.target is aten.convolution.default and value is node.args[2]
    known = (node.args[1] if is_bias else value).meta.get("val")  # which another's pass may have left out
    format = CHANNELS_LAST.get(getattr(known, "ndim", 0))
    return format is None or known.is_contiguous(memory_format=format)


def _buckets(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Copies for one launch each, where there are enough."""
    buckets: dict[Any, list[list[_Copy]]] = {}
    for copy in copies:
        value = copy.node.meta["val"]
        found = buckets.setdefault((value.dtype, copy.source.meta["val"].dtype, value.device), [[]])
        sizes = [each.node.meta["val"].numel() for each in (*found[-1], copy)]
        if len(sizes) > MOST_COPIES or sum(sizes) > _MOST_ELEMENTS:
            found.append([])
        found[-1].append(copy)
    for found in buckets.values():
        yield from (each for each in found if len(each) >= _FEWEST)


def _replace(copies: Sequence[_Copy], at: Node) -> None:
    """One call, where one of them stood."""
    dtype = precision.name_of(at.meta["val"].dtype)
    results: dict[tuple[Node, str], Node] = {(each.source, each.format): each.node for each in copies}
    sources, formats = zip(*results, strict=True)
    with at.graph.inserting_before(at):
        together = call_like(at, torch.ops.normfuse.copies.default, list(sources), dtype, "".join(formats))
        for place, (key, node) in enumerate(results.items()):
            results[key] = call_like(node, operator.getitem, together, place)
    for copy in copies:
        node = copy.node
        node.replace_all_uses_with(results[copy.source, copy.format])
        while node is not copy.source:
            node, before = node.args[0], node
            node.graph.erase_node(before)
