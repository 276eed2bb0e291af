"""Products of two matrices, or of two batches of them, as PyTorch's own functions: ``matmul``, ``addmm``, ``bmm`` and
``baddbmm``; and the operator that they, compiled graphs and ``faster_float32`` call, ``torch.ops.normfuse.product``.

In float32, at PyTorch's precision "highest", Hopper's tensor cores multiply operands split into float16 parts
(``triton_kernels.float32_split``) where that is faster than cuBLAS. All else is PyTorch's.
"""

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ops import operators, plans, precision, products
from ops.calls import contiguous
from ops.plan import Plan

Tensor = torch.Tensor

_plans = plans.Kept()


def plan_of(operands: list[Tensor]) -> Plan:
    """Of input [M, K] and matrix [K, N], perhaps a bias [N]; or of batches [B, M, K] and [B, K, N]."""
    key = plans.settings(operands[0]), *operators.layouts_of(operands)
    return _plans.get(key) or _plans.add(key, plans.made(operands, lambda stand_ins: [_multiply(*stand_ins)]))


def _multiply(input: Tensor, matrix: Tensor, *bias: Tensor) -> Tensor:
    shape = *input.shape[:-1], matrix.shape[-1]
    if input.ndim == 3:
        assert not bias
        if len(input) > 1:
            return products.of_batches(input, matrix)
        input, matrix = input[0], matrix[0]
    return products.affine(input, matrix.T, [contiguous(each) for each in bias], shape, may_divide=True)


def _empty(operands: list[Tensor]) -> list[Tensor]:
    input, matrix = operands[:2]
    return [input.new_empty(*input.shape[:-1], matrix.shape[-1])]


def plan_of_one_matrix(places: str, matrix: Tensor, others: list[Tensor]) -> Plan:
    """Of products of one matrix with others: ``products.of_one_matrix``'s places, with commas between."""
    key = places, plans.settings(matrix), *operators.layouts_of([matrix, *others])
    return _plans.get(key) or _plans.add(key, plans.made([matrix, *others], partial(_multiply_one_matrix, places)))


def _multiply_one_matrix(places: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    matrix, *others = tensors
    shapes = [(a.shape[0], b.shape[1]) for a, b in operands_of_one_matrix(places, matrix, others)]
    return products.of_one_matrix(matrix, list(zip(others, places.split(","), shapes, strict=True)))


def operands_of_one_matrix(places: str, matrix: Tensor, others: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Of each product, as PyTorch takes them."""
    return [products.placed(matrix, *each) for each in zip(others, places.split(","), strict=True)]


def _empty_of_one_matrix(places: str, matrix: Tensor, others: list[Tensor]) -> list[Tensor]:
    return [matrix.new_empty(a.shape[0], b.shape[1]) for a, b in operands_of_one_matrix(places, matrix, others)]


def _title(operands: Sequence[Tensor]) -> str:
    return " @ ".join(" x ".join(map(str, each.shape)) for each in operands[:2])


def _title_of_one_matrix(places: str, matrix: Tensor, others: Sequence[Tensor]) -> str:
    return ", ".join(map(_title, operands_of_one_matrix(places, matrix, others)))


operators.define("product", "(Tensor[] operands) -> Tensor", plan_of, _empty, "product", _title)
operators.define(
    "product.of_one_matrix",
    "(str places, Tensor matrix, Tensor[] others) -> Tensor[]",
    plan_of_one_matrix,
    _empty_of_one_matrix,
    "product",
    _title_of_one_matrix,
)
PRODUCT, PRODUCTS_OF_ONE = torch.ops.normfuse.product.default, torch.ops.normfuse.product.of_one_matrix


def _is_exact(input: Any) -> bool:
    """Whether kernels may multiply this tensor, which may be a fake one: float32 at full precision, on Hopper."""
    return not precision.why_no_kernels(input) and precision.is_exact(input)


def multiplier(operands: Sequence[Any]) -> precision.Multiplier:
    """What multiplies these, as ``PRODUCT`` takes them: cuBLAS unless it is a float32 product on Hopper for which that
    takes longer. Fake tensors do."""
    input, matrix = operands[:2]
    if not _is_exact(input):
        return "cuBLAS"
    if input.ndim == 3 and len(input) != 1:
        return "cuBLAS" if precision.rows_in_registers(input, matrix.mT) is None else "registers"
    input, matrix = (each[0] if each.ndim == 3 else each for each in (input, matrix))
    return precision.multiplier(input, matrix.T, may_divide=True)


def pays(operands: Sequence[Any]) -> bool:
    """Whether kernels multiply these faster than cuBLAS."""
    return multiplier(operands) != "cuBLAS"


def _set_up(ctx: Any, inputs: tuple[list[Tensor]], output: Tensor) -> None:
    input, matrix, *bias = inputs[0]
    ctx.save_for_backward(input if matrix.requires_grad else None, matrix if input.requires_grad else None)
    ctx.biases = [each.requires_grad for each in bias]


def _backward(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    input, matrix = ctx.saved_tensors
    return [
        None if matrix is None else _product(gradient, matrix.mT),
        None if input is None else _product(input.mT, gradient),
        *(gradient.sum(0) if is_wanted else None for is_wanted in ctx.biases),
    ]


torch.library.register_autograd("normfuse::product", _backward, setup_context=_set_up)


def _product(input: Tensor, matrix: Tensor) -> Tensor:
    """Of two matrices, or of two batches. Where they have no memory, as within vmap or a trace, it is PyTorch's."""
    operands = [input, matrix]
    return PRODUCT(operands) if operators.layouts_of(operands) and pays(operands) else torch.matmul(input, matrix)


def are_plain(operands: Sequence[Any]) -> bool:
    """Whether these are tensors of no subclass, strided, of one dtype, on one device."""
    if not all(type(each) in (Tensor, torch.nn.Parameter) for each in operands):
        return False
    if any(each.is_nested or each.layout != torch.strided for each in operands):
        return False
    return len({(each.dtype, each.device) for each in operands}) == 1


def _fits(input: Any, matrix: Any, *others: Any) -> bool:
    """Whether these are plain float32 tensors, and the first two matrices or batches that PyTorch would multiply."""
    if not (are_plain([input, matrix, *others]) and _is_seen_by_autograd_alone()):
        return False
    if any(each.is_neg() for each in (input, matrix, *others)):
        return False
    fit = min(input.ndim, matrix.ndim) >= 2 and input.shape[-1] == matrix.shape[-2]
    return fit and _is_exact(input) and not precision.autocasts(input.device)


def _is_seen_by_autograd_alone() -> bool:
    """Not by a compiler, by transforms, by forward-mode differentiation or ``torch.jit``, which know PyTorch's own."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
    )


def _fits_batches(input: Any, matrix: Any, *others: Any, dims: int) -> bool:
    fits = _fits(input, matrix, *others) and input.ndim == matrix.ndim == dims
    return fits and input.shape[:-2] == matrix.shape[:-2]


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """``torch.matmul``: in float32, for matrices [*, M, K] and [*, K, N] whose product the kernels make faster than
    cuBLAS, theirs, and so are both gradients; else PyTorch's own. It may be differentiated any number of times.

    The precision is PyTorch's "highest": where ``torch.backends.cuda.matmul.fp32_precision`` allows TF32, under
    autocast, and in ``torch.func``, nothing changes. In a compiled function it is PyTorch's, of which
    ``backend="normfuse"`` takes what pays.

    Args:
        input: Of any shape that ``torch.matmul`` takes.
        other: Likewise.

    Returns:
        What ``torch.matmul`` returns.

    Raises:
        TypeError: An operand is no tensor.
        RuntimeError: ``torch.matmul`` refuses the operands.

    Example::

        scores = ops.matmul(query, key.mT)
    """
    operands = _folded(input, other) if _fits(input, other) else None
    if operands is None or not pays(operands):
        return torch.matmul(input, other)
    product = PRODUCT(operands)
    if input.ndim == other.ndim == product.ndim:
        return product
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    return torch.ops.aten._unsafe_view(product, [*batch, input.shape[-2], other.shape[-1]])


def _folded(input: Tensor, other: Tensor) -> list[Tensor] | None:
    """As ``PRODUCT`` takes them; None where these are no views, or their batches do not fit."""
    with contextlib.suppress(RuntimeError):
        if other.ndim == 2:
            return [input.view(-1, input.shape[-1]), other]
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
        shapes = [(math.prod(batch), *each.shape[-2:]) for each in (input, other)]
        expanded = [each.expand(*batch, *each.shape[-2:]) for each in (input, other)]
        return [each.view(shape) for each, shape in zip(expanded, shapes, strict=True)]
    return None


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.addmm``: beta * input + alpha * (mat1 @ mat2), as ``matmul`` multiplies.

    Args:
        input: What is added, which expands to [M, N].
        mat1: [M, K].
        mat2: [K, N].
        beta: As in ``torch.addmm``.
        alpha: As in ``torch.addmm``.

    Returns:
        What ``torch.addmm`` returns, [M, N].

    Raises:
        TypeError: An operand is no tensor.
        RuntimeError: ``torch.addmm`` refuses the operands.

    Example::

        result = ops.addmm(bias, input, weight.T)
    """
    operands = [mat1, mat2]
    if not (_fits_batches(*operands, input, dims=2) and adds(input, operands, beta, alpha) and pays(operands)):
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    if beta == alpha == 1 and is_bias(input, mat2):
        return PRODUCT([*operands, input])
    return summed(input, PRODUCT(operands), beta, alpha)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """``torch.bmm``, as ``matmul`` multiplies.

    Args:
        input: [B, M, K].
        mat2: [B, K, N].

    Returns:
        What ``torch.bmm`` returns, [B, M, N].

    Raises:
        TypeError: An operand is no tensor.
        RuntimeError: ``torch.bmm`` refuses the operands.

    Example::

        result = ops.bmm(probabilities, value)
    """
    operands = [input, mat2]
    return PRODUCT(operands) if _fits_batches(*operands, dims=3) and pays(operands) else torch.bmm(input, mat2)


def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``torch.baddbmm``: beta * input + alpha * (batch1 @ batch2), as ``matmul`` multiplies.

    Args:
        input: What is added, which expands to [B, M, N].
        batch1: [B, M, K].
        batch2: [B, K, N].
        beta: As in ``torch.baddbmm``.
        alpha: As in ``torch.baddbmm``.

    Returns:
        What ``torch.baddbmm`` returns, [B, M, N].

    Raises:
        TypeError: An operand is no tensor.
        RuntimeError: ``torch.baddbmm`` refuses the operands.

    Example::

        scores = ops.baddbmm(mask, query, key.mT, alpha=0.125)
    """
    operands = [batch1, batch2]
    if not (_fits_batches(*operands, input, dims=3) and adds(input, operands, beta, alpha) and pays(operands)):
        return torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
    return summed(input, PRODUCT(operands), beta, alpha)


def is_bias(added: Any, matrix: Any) -> bool:
    """Whether ``PRODUCT`` adds it to a product with a matrix [K, N]: [N], of a known size, as PyTorch may repeat it."""
    are_known = added.ndim == 1 and matrix.ndim == 2 and type(added.shape[0]) is type(matrix.shape[1]) is int
    return are_known and added.shape == matrix.shape[1:]


def adds(added: Tensor, operands: Sequence[Tensor], beta: Any = 1, alpha: Any = 1) -> bool:
    """Whether it expands to the product, and is added with these factors. What is left out for beta = 0 has a gradient
    of zeros in PyTorch."""
    input, matrix = operands
    shape = *input.shape[:-1], matrix.shape[-1]
    expands = added.ndim <= len(shape) and all(
        size in (1, whole) for size, whole in zip(added.shape[::-1], shape[::-1], strict=False)
    )
    return expands and are_factors(beta, alpha) and not (beta == 0 and added.requires_grad)


def are_factors(beta: Any, alpha: Any) -> bool:
    """Whether these are numbers that float32 holds, by which an addition may multiply: PyTorch refuses larger ones. For
    alpha = 0 it leaves out the product, whatever that is."""
    greatest = torch.finfo(torch.float32).max
    are_real = all(type(each) in (int, float) and not greatest < abs(each) < math.inf for each in (beta, alpha))
    return are_real and alpha != 0


def summed(added: Tensor, product: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """As PyTorch has it, beta = 0 leaves out what is not finite, too. The result lies as its first operand."""
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else torch.add(product, added, alpha=beta)
