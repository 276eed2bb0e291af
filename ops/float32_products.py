"""Exact float32 products of compiled graphs that no chain holds, forward and backward: calls of ours take their place.

At the precision "highest", Hopper's tensor cores multiply split operands (``triton_kernels.float32_split``) in a half
to a quarter of cuBLAS's time. In the graphs behind autograd all that multiplies two matrices is ``aten.mm``,
``aten.addmm`` or, for einsum, ``aten.bmm`` of one matrix: layers, attention's projections, and the gradients of all.
Inductor calls cuBLAS there, so nothing is fused less. PyTorch's setting decides
(``torch.backends.cuda.matmul.fp32_precision``); graphs are cached by it.
"""

import logging
import os
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ops import operators, precision
from ops.calls import Call
from ops.layouts import call_like
from triton_kernels.chains import LINEAR
from triton_kernels.hopper import runs_hopper_kernels

_log = logging.getLogger("ops.backend")

aten = torch.ops.aten

#: Where this environment variable is 0 when the package is imported, compiled graphs keep cuBLAS's products.
SWITCH_VARIABLE = "NORMFUSE_FLOAT32"
IS_ON = os.environ.get(SWITCH_VARIABLE, "1").lower() not in ("0", "false", "no", "off")

#: Their last two arguments are input [M, K] and matrix [K, N]; a bias stands before them.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_CALL = Call(LINEAR, (None,) * len(LINEAR.steps), (False,) * len(LINEAR.steps))


def take_over(graph: Graph) -> None:
    """Let our kernel compute the float32 products for which it is faster than cuBLAS."""
    taken = [node for node in graph.nodes if node.target in _PRODUCTS and _pays(node)]
    for node in taken:
        _replace(node)
    if taken:
        _log.info("%d float32 products as products of float16 parts", len(taken))
        graph.lint()


def _pays(node: Node) -> bool:
    """Whether it is a float32 product on Hopper, of known sizes, for which cuBLAS takes longer."""
    values: Any = [each.meta.get("val") for each in node.args if isinstance(each, Node)]
    if len(values) < len(node.args) or node.kwargs:  # beta and alpha, or another dtype for the result
        return False
    if not all(isinstance(each, torch.Tensor) for each in (*values, node.meta.get("val"))):
        return False  # as yet unknown, behind another's pass
    if not all(type(size) is int for each in values for size in (*each.shape, *each.stride())):
        return False
    *bias, input, matrix = values
    if input.ndim == 3:
        if len(input) != 1:
            return False
        input, matrix = input[0], matrix[0]
    return (
        input.dtype == torch.float32
        and all(tuple(each.shape) == (matrix.shape[1],) for each in bias)
        and runs_hopper_kernels(input.device)
        and precision.float32_parts() == 2
        and (
            precision.splits_in_registers(input, matrix.T) or not precision.multiplies_by_cublas(input, matrix.shape[1])
        )
    )


def _replace(node: Node) -> None:
    *bias, input, matrix = node.args
    is_batch = node.target is aten.bmm.default
    with node.graph.inserting_before(node):
        if is_batch:
            input, matrix = (call_like(node, aten.select.int, each, 0, 0) for each in (input, matrix))
        weight = call_like(node, aten.permute.default, matrix, [1, 0])
        text = replace(_CALL, present=(bool(bias),) * len(LINEAR.steps)).text_in_graph
        result = call_like(node, operators.FORWARD.one, text, [input, weight, *bias], False)
        if is_batch:
            result = call_like(node, aten.unsqueeze.default, result, 0)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
