"""Exact float32 products that no chain holds, forward and backward: calls of ours take their place, in compiled graphs
and in eager code where a person asks for it.

At the precision "highest", Hopper's tensor cores multiply split operands (``triton_kernels.float32_split``) in a half
to a quarter of cuBLAS's time. Behind autograd all that multiplies two matrices is ``aten.mm``,
``aten.addmm`` or, for einsum, ``aten.bmm`` of one matrix: layers, attention's projections, and the gradients of all.
Inductor calls cuBLAS there, so nothing is fused less. PyTorch's setting decides
(``torch.backends.cuda.matmul.fp32_precision``); graphs are cached by it.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ops import operators, precision
from ops.calls import Call
from ops.layouts import call_like
from triton_kernels.chains import LINEAR
from triton_kernels.hopper import runs_hopper_kernels

_log = logging.getLogger("ops.backend")

aten = torch.ops.aten

#: Where this environment variable is 0 when the package is imported, cuBLAS's products stay.
SWITCH_VARIABLE = "NORMFUSE_FLOAT32"
IS_ON = os.environ.get(SWITCH_VARIABLE, "1").lower() not in ("0", "false", "no", "off")

#: Their last two arguments are input [M, K] and matrix [K, N]; a bias stands before them.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_CALL = Call(LINEAR, (None,) * len(LINEAR.steps), (False,) * len(LINEAR.steps))


@functools.cache
def _text(has_bias: bool) -> str:
    return replace(_CALL, present=(has_bias,) * len(LINEAR.steps)).text_in_graph


@contextlib.contextmanager
def faster_float32() -> Iterator[None]:
    """Within this context, float32 products of two matrices for which the kernels are faster than cuBLAS are theirs.

    It holds for eager code, forward and backward: layers, ``@``, ``torch.matmul``, ``F.linear`` and their gradients,
    where ``backward`` is called in the context too. The precision stays PyTorch's own: where
    ``torch.backends.cuda.matmul.fp32_precision`` allows TF32, nothing changes. Nor do products of batches, of other
    dtypes, on other GPUs than Hopper, and in compiled functions. The host takes some microseconds more for each
    operator, so it is for models whose products are large. What PyTorch computes whole, as a TransformerEncoderLayer
    in evaluation, stays whole. ``ops.explain`` of a function that enters the context tells each product.

    Example::

        with ops.faster_float32():
            loss = model(input).square().mean()
            loss.backward()
    """
    with _Products():
        yield


class _Products(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """That compiled functions run as they do outside."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = options or {}
        if function in _PRODUCTS:
            if IS_ON and not given and _is_valid(function, arguments) and _pays(arguments):
                return _multiply(lambda operator, *given: operator(*given), function, arguments)
        elif torch.is_inference_mode_enabled() and isinstance(function, torch._ops.OpOverload):
            with self:  # there a layer's product has not been reached yet
                result = function.decompose(*arguments, **given)
            if result is not NotImplemented:
                return result
        return function(*arguments, **given)


def _is_valid(function: Any, operands: Sequence[Any]) -> bool:
    """Whether these are plain tensors which PyTorch would multiply. What it refuses it shall refuse."""
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in operands):
        return False
    *_, input, matrix = operands
    if any(each.is_nested or each.layout != torch.strided for each in operands):
        return False
    dims = 3 if function is aten.bmm.default else 2
    return (
        input.ndim == matrix.ndim == dims
        and (*input.shape[:-2], input.shape[-1]) == tuple(matrix.shape[:-1])
        and all((each.dtype, each.device) == (input.dtype, input.device) for each in operands)
    )


def take_over(graph: Graph) -> None:
    """Let our kernel compute the float32 products for which it is faster than cuBLAS."""
    taken = [node for node in graph.nodes if node.target in _PRODUCTS and _is_faster(node)]
    for node in taken:
        _replace(node)
    if taken:
        _log.info("%d float32 products as products of float16 parts", len(taken))
        graph.lint()


def _is_faster(node: Node) -> bool:
    values = [each.meta.get("val") for each in (*node.args, node) if isinstance(each, Node)]
    if len(values) <= len(node.args) or node.kwargs:  # beta and alpha, or another dtype for the result
        return False
    if not all(isinstance(each, torch.Tensor) for each in values):
        return False  # as yet unknown, behind another's pass
    operands: list[Any] = values[:-1]
    # An open size is taken as it is in the call that is compiled. Each call decides for itself again.
    is_decided = operands[-1].ndim == 2 or type(operands[-1].shape[0]) is int
    if len(operands) == 3:  # PyTorch may repeat a bias
        is_decided &= all(type(each.shape[-1]) is int for each in (operands[0], operands[-1]))
    as_called = [_as_called(each) for each in operands] if is_decided else [None]
    return all(each is not None for each in as_called) and _pays(as_called)


def _as_called(tensor: Any) -> torch.Tensor | None:
    """A tensor like this one with the sizes of the call that is compiled. None where values decide one."""
    sizes = [*tensor.shape, *tensor.stride()]
    if all(type(each) is int for each in sizes):
        return tensor
    numbers = [each if type(each) is int else each.node.hint for each in sizes]
    if None in numbers:
        return None
    with tensor.fake_mode:
        shape, stride = numbers[: tensor.ndim], numbers[tensor.ndim :]
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)


def _pays(operands: Sequence[Any]) -> bool:
    """Whether these are an input and a matrix, perhaps behind a bias, of a float32 product on Hopper for which cuBLAS
    takes longer."""
    *bias, input, matrix = operands
    if input.dtype != torch.float32 or precision.why_no_kernels(input) or not runs_hopper_kernels(input.device):
        return False
    if precision.float32_parts() != 2:
        return False
    if input.ndim == 3:
        if len(input) != 1:
            return False
        input, matrix = input[0], matrix[0]
    if any(tuple(each.shape) != (matrix.shape[1],) for each in bias):
        return False
    return precision.multiplier(input, matrix.T) != "cuBLAS"


def _multiply(do: Callable[..., Any], function: Any, operands: Sequence[Any]) -> Any:
    """What takes the place of the function's call. ``do`` calls an operator, with tensors or with nodes of a graph."""
    *bias, input, matrix = operands
    is_batch = function is aten.bmm.default
    if is_batch:
        input, matrix = (do(aten.select.int, each, 0, 0) for each in (input, matrix))
    weight = do(aten.permute.default, matrix, [1, 0])
    result = do(operators.FORWARD.one, _text(bool(bias)), [input, weight, *bias], False)
    return do(aten.unsqueeze.default, result, 0) if is_batch else result


def _replace(node: Node) -> None:
    with node.graph.inserting_before(node):
        result = _multiply(functools.partial(call_like, node), node.target, node.args)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
