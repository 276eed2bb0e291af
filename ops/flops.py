"""What ``torch.utils.flop_counter.FlopCounterMode`` counts of the operators: as of PyTorch's own in their place, the
multiplications and additions of contractions. How a kernel multiplies, and what is fused with it, is not counted.

PyTorch counts the gradient of a grouped convolution's weight once for each group. Here it counts once.
"""

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ops.calls import Call, parse
from ops.grouped_products import GROUPED
from ops.matrix_products import PRODUCT, operands_of_one_matrix
from ops.narrow_convolutions import CONVOLUTION, WEIGHT_GRADIENT
from ops.operators import BACKWARD, FORWARD, read_specs, spread

Tensor = torch.Tensor


def _of_contraction(call: Call, input: Tensor, weight: Tensor, result: Tensor) -> int:
    """Of one product: forward, or of a gradient. The tensors, of which shapes count, may be gradients."""
    if call.chain.contraction == "linear":
        return 2 * input.numel() * weight.shape[0]
    weights_for = input if call.chain.contraction == "conv_transpose2d" else result  # of each pixel, all count once
    return 2 * input.shape[0] * math.prod(weights_for.shape[2:]) * weight.numel()


@register_flop_formula(FORWARD, get_raw=True)
def _of_forward(text: str, tensors: list[Tensor], training: bool, *, out_val: Any = None) -> int:
    call = parse(text)
    if not call.chain.contraction:
        return 0
    input, weight, *_ = spread(call, tensors)
    return _of_contraction(call, input, weight, out_val if isinstance(out_val, Tensor) else out_val[0])


@register_flop_formula(BACKWARD, get_raw=True)
def _of_backward(text: str, wanted: str, gradient: Tensor, tensors: list[Tensor], *_: Any, out_val: Any = None) -> int:
    call, (specs, read) = parse(text), read_specs(wanted)
    if not call.chain.contraction:
        return 0
    # Where the input's gradient alone is wanted, the weight is there, and the other way round.
    results = iter([out_val] if isinstance(out_val, Tensor) else out_val)
    gradients = [None if spec is None else next(results) for spec in specs[:2]]
    there = dict(zip(read, tensors, strict=True))
    input, weight = (there.get(place, each) for place, each in enumerate(gradients))
    products = sum(each is not None for each in gradients)
    return products * _of_contraction(call, input, weight, gradient) if input is not None and weight is not None else 0


@register_flop_formula(PRODUCT.overloadpacket, get_raw=True)
def _of_product(*arguments: Any, out_val: Any = None) -> int:
    pairs = arguments if len(arguments) == 1 else operands_of_one_matrix(*arguments)
    return sum(2 * input.numel() * matrix.shape[-1] for input, matrix, *_ in pairs)


@register_flop_formula(WEIGHT_GRADIENT.overloadpacket, get_raw=True)
def _of_weight_gradient(words: str, gradient: Tensor, input: Tensor, *, out_val: Any = None) -> int:
    return 2 * gradient.numel() // gradient.shape[1] * out_val.numel()


@register_flop_formula(CONVOLUTION.overloadpacket, get_raw=True)
def _of_narrow_convolution(words: str, image: Tensor, weight: Tensor, *, out_val: Any = None) -> int:
    return 2 * out_val.numel() * len(weight)


@register_flop_formula(GROUPED.overloadpacket, get_raw=True)
def _of_grouped_products(is_second: bool, matrix: Tensor, *_: Any, out_val: Any = None) -> int:
    return sum(2 * result.numel() * matrix.shape[not is_second] for result in out_val)
