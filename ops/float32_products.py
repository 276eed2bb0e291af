"""Exact float32 products that no chain holds, forward and backward: calls of ours take their place, in compiled graphs
and in eager code where a person asks for it.

At the precision "highest", Hopper's tensor cores multiply split operands (``triton_kernels.float32_split``) in a half
to a quarter of cuBLAS's time. Behind autograd all that multiplies matrices is ``aten.mm``, ``aten.bmm``, or these with
something added, ``aten.addmm`` and ``aten.baddbmm``: layers, attention, and the gradients of all. Inductor calls cuBLAS
there, so nothing is fused less. PyTorch's setting decides (``torch.backends.cuda.matmul.fp32_precision``); graphs are
cached by it.
"""

import contextlib
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ops import paired_products
from ops.convolution_as_product import DoesNotPay, Pixels
from ops.inductor import as_called
from ops.layouts import call_like
from ops.matrix_products import PRODUCT, adds, are_factors, are_plain, is_bias, multiplier, summed
from ops.precision import Multiplier

aten = torch.ops.aten

#: Operators that are products where a kernel is one pixel.
_CONVOLUTIONS: dict[Any, Callable[[Pixels], Callable[..., Any]]] = {
    aten.convolution.default: lambda pixels: pixels.convolution,
    aten.convolution_backward.default: lambda pixels: pixels.backward,
}

_log = logging.getLogger("ops.backend")
#: Where this environment variable is 0 when the package is imported, cuBLAS's products stay.
SWITCH_VARIABLE = "NORMFUSE_FLOAT32"
IS_ON: bool = os.environ.get(SWITCH_VARIABLE, "1").lower() not in ("0", "false", "no", "off")

#: Their last two arguments are input [M, K] and matrix [K, N], or batches of them; a bias stands before them.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
#: What adds anything to a product, perhaps both times a factor; and the product alone.
_SUMS: dict[Any, Any] = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}


@contextlib.contextmanager
def faster_float32() -> Iterator[None]:
    """Within this context, float32 products of matrices for which the kernels are faster than cuBLAS are theirs.

    It holds for eager code, forward and backward: layers, ``@``, ``torch.matmul``, ``torch.addmm``, ``F.linear`` and
    their gradients, where ``backward`` is called in the context too. The precision stays PyTorch's own: where
    ``torch.backends.cuda.matmul.fp32_precision`` allows TF32, nothing changes. Nor do products of other dtypes, on
    other GPUs than Hopper, and in compiled functions. The host takes some microseconds more for each
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
        if function in _PRODUCTS or function in _SUMS:
            if IS_ON and (result := _multiplied(function, arguments, **given)) is not None:
                return result
        elif function in _CONVOLUTIONS:
            if IS_ON and not given and _are_images(function, arguments):
                with contextlib.suppress(DoesNotPay):
                    return _CONVOLUTIONS[function](Pixels(lambda each, *others: each(*others), lambda each: each))(
                        *arguments
                    )
        elif torch.is_inference_mode_enabled() and isinstance(function, torch._ops.OpOverload):
            with self:  # there a layer's product has not been reached yet
                result = function.decompose(*arguments, **given)
            if result is not NotImplemented:
                return result
        return function(*arguments, **given)


def _multiplied(function: Any, operands: Sequence[Any], **factors: Any) -> torch.Tensor | None:
    """A product, or a sum with one, of the kernels; None where cuBLAS is faster."""
    *before, input, matrix = operands
    is_valid = are_plain(operands) and _fit(_SUMS.get(function, function), input, matrix)
    if not is_valid or multiplier([input, matrix]) == "cuBLAS":
        return None
    if not factors and all(is_bias(each, matrix) for each in before):
        return PRODUCT([input, matrix, *before])
    (added,) = before
    return summed(added, PRODUCT([input, matrix]), **factors) if adds(added, [input, matrix], **factors) else None


def _fit(function: Any, input: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether PyTorch would multiply these. What it refuses it shall refuse."""
    dims = 3 if function is aten.bmm.default else 2
    return input.ndim == matrix.ndim == dims and (*input.shape[:-2], input.shape[-1]) == tuple(matrix.shape[:-1])


def _are_images(function: Any, arguments: Sequence[Any]) -> bool:
    """Whether these are images that PyTorch would convolve."""
    *images, weight = arguments[: 3 if function is aten.convolution_backward.default else 2]
    bias = arguments[2] if function is aten.convolution.default else None
    if not are_plain([*images, weight, *([] if bias is None else [bias])]):
        return False
    fits = weight.ndim in (3, 4, 5) and images[-1].ndim == weight.ndim and images[-1].shape[1] == weight.shape[1]
    return fits and (bias is None or bias.shape == weight.shape[:1])


def take_over(graph: Graph) -> None:
    """Let our kernel compute the float32 products for which it is faster than cuBLAS."""
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            _set_apart(node)
    multipliers = {node: _multiplier_of(node) for node in graph.nodes if node.target in _PRODUCTS}
    taken = [node for node, multiplier in multipliers.items() if multiplier != "cuBLAS"]
    paired = paired_products.pair(taken, lambda node: multipliers[node] == "kernel")
    for node in taken:
        if node not in paired:
            _replace(node)
    convolutions = [node for node in graph.nodes if node.target in _CONVOLUTIONS and _replace_convolution(node)]
    if taken or convolutions:
        _log.info("%d float32 products as products of float16 parts", len(taken) + len(convolutions))


def _set_apart(node: Node) -> None:
    """Let an addition stand behind its product, where a kernel of ours pays for that: of a residual, or of another
    gradient of the same weight. (Inductor has made one operator of both.) ``PRODUCT`` itself adds a layer's bias."""
    added, input, matrix = node.args
    values = [each.meta.get("val") for each in node.args]
    if not all(isinstance(each, torch.Tensor) for each in values):
        return  # as yet unknown, behind another's pass
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    if not are_factors(beta, alpha):  # nor are open numbers: zeros would need a graph of their own
        return
    is_added = is_bias(values[0], values[2]) and not node.kwargs
    if is_added or _multiplier_as_called(*values[1:]) == "cuBLAS":
        return
    with node.graph.inserting_before(node):
        result = call_like(node, _SUMS[node.target], input, matrix)
        if alpha != 1:
            result = call_like(node, aten.mul.Tensor, result, alpha)
        if beta != 0:
            result = call_like(node, aten.add.Tensor, result, added, alpha=beta)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _multiplier_of(node: Node) -> Multiplier:
    """What multiplies, where a node is a float32 product for which our kernels are faster; else cuBLAS."""
    values = [each.meta.get("val") for each in (*node.args, node) if isinstance(each, Node)]
    if len(values) <= len(node.args) or node.kwargs:  # beta and alpha, or another dtype for the result
        return "cuBLAS"
    if not all(isinstance(each, torch.Tensor) for each in values):
        return "cuBLAS"  # as yet unknown, behind another's pass
    *bias, input, matrix, _ = values
    return _multiplier_as_called(input, matrix) if all(is_bias(each, matrix) for each in bias) else "cuBLAS"


def _multiplier_as_called(input: Any, matrix: Any) -> Multiplier:
    """An open size is taken as it is in the call that is compiled. Each call decides for itself again."""
    operands = [each for each in map(_as_called, (input, matrix)) if each is not None]
    return multiplier(operands) if len(operands) == 2 else "cuBLAS"


def _as_called(tensor: Any) -> torch.Tensor | None:
    """A tensor like this one with the sizes of the call that is compiled. None where values decide one."""
    sizes = [*tensor.shape, *tensor.stride()]
    if all(type(each) is int for each in sizes):
        return tensor
    numbers = as_called(sizes)
    if numbers is None:
        return None
    with tensor.fake_mode:
        shape, stride = numbers[: tensor.ndim], numbers[tensor.ndim :]
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)


def _replace(node: Node) -> None:
    *bias, input, matrix = node.args
    with node.graph.inserting_before(node):
        result = call_like(node, PRODUCT, [input, matrix, *bias])
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _replace_convolution(node: Node) -> bool:
    """Whether products that pay take its place."""
    made: list[Node] = []

    def do(target: Any, *arguments: Any) -> Node:
        made.append(call_like(node, target, *arguments))
        return made[-1]

    def value(each: Any) -> torch.Tensor:
        if not isinstance(known := each.meta.get("val"), torch.Tensor):
            raise DoesNotPay  # as yet unknown, behind another's pass
        return known

    try:
        if node.kwargs or "val" not in node.meta:
            raise DoesNotPay
        with node.graph.inserting_before(node):
            found = _CONVOLUTIONS[node.target](Pixels(do, value))(*node.args)
        results, values = (each if isinstance(each, tuple) else (each,) for each in (found, node.meta["val"]))
        if any(
            each is not None and value(each).stride() != traced.stride()
            for each, traced in zip(results, values, strict=True)
        ):
            raise DoesNotPay
    except DoesNotPay:
        for each in reversed(made):
            node.graph.erase_node(each)
        return False
    for user in list(node.users) if isinstance(found, tuple) else ():
        assert user.target is operator.getitem
        user.replace_all_uses_with(found[user.args[1]])
        node.graph.erase_node(user)
    if not isinstance(found, tuple):
        node.replace_all_uses_with(found)
    node.graph.erase_node(node)
    return True
