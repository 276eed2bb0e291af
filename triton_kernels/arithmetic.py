"""Arithmetic as pointwise functions: by numbers, or by tensors of any kind.

All but products with a tensor end rounded, as ``rounded_product`` says. A chain rounds these where a norm follows.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from triton_kernels.pointwise import ADD, MUL, Pointwise, add, filled, mul, rounded_once, rounded_product


@triton.jit
def sub(value, operand):
    return value - operand


@triton.jit
def sub_gradient(gradient, value, operand):
    return gradient, -gradient


@triton.jit
def div(value, operand):
    """value / operand, rounded as IEEE 754 says, as in PyTorch."""
    return tl.div_rn(value, operand)


@triton.jit
def div_gradient(gradient, value, operand):
    return tl.div_rn(gradient, operand), -gradient * tl.div_rn(tl.div_rn(value, operand), operand)


@triton.jit
def add_number(value, numbers):
    return add(value, numbers[0])


@triton.jit
def shift_gradient(gradient, value, numbers):
    return gradient


@triton.jit
def sub_number(value, numbers):
    return sub(value, numbers[0])


@triton.jit
def mul_number(value, numbers):
    return rounded_product(value, numbers[0])


@triton.jit
def mul_number_gradient(gradient, value, numbers):
    return mul(gradient, numbers[0])


@triton.jit
def div_number(value, numbers):
    return div(value, filled(value, numbers[0]))


@triton.jit
def div_number_gradient(gradient, value, numbers):
    return div(gradient, filled(gradient, numbers[0]))


@triton.jit
def coarse_div_number(value, numbers):
    """value / the number by its reciprocal, whatever the number is. A quotient that float32 has comes out exact, as at
    the bounds of a clamp that follows: what is left of the value after the first quotient is divided, too.

    A number beyond 2**±100 is brought nearer to 1 first: its reciprocal may be no normal number.
    """
    number = filled(value, numbers[0])
    size = tl.abs(number)
    scale = tl.where(size < 7.888609052210118e-31, 1.8446744073709552e19, 1.0)
    scale = tl.where(size > 1.2676506002282294e30, 5.421010862427522e-20, scale)
    scaled = number * scale
    inverse = 1.0 / scaled
    quotient = value * inverse
    rest = rounded_once(-quotient, scaled, value)
    nearer = rounded_once(rest, inverse, quotient)  # NaN at infinities, and a zero has lost its sign
    return rounded_product(tl.where(tl.abs(nearer) > 0.0, nearer, quotient), scale)


@triton.jit
def coarse_div_number_gradient(gradient, value, numbers):
    return coarse_div_number(gradient, numbers)


SUB = Pointwise("sub", sub, sub_gradient, lambda value, operand: value - operand, "vector")
DIV = Pointwise("div", div, div_gradient, lambda value, operand: value / operand, "vector")
ADD_NUMBER = Pointwise("add", add_number, shift_gradient, lambda value, numbers: value + numbers[0], "numbers")
SUB_NUMBER = Pointwise("sub", sub_number, shift_gradient, lambda value, numbers: value - numbers[0], "numbers")
MUL_NUMBER = Pointwise("mul", mul_number, mul_number_gradient, lambda value, numbers: value * numbers[0], "numbers")
DIV_NUMBER = Pointwise(
    "div",
    div_number,
    div_number_gradient,
    lambda value, numbers: value / numbers[0],
    "numbers",
    forms=tuple((dtype, coarse_div_number, coarse_div_number_gradient) for dtype in (torch.bfloat16, torch.float16)),
)


#: By an operand: numbers, and each kind of tensor.
ARITHMETIC = (
    ADD_NUMBER, SUB_NUMBER, MUL_NUMBER, DIV_NUMBER, ADD, SUB, MUL, DIV,
    *(replace(each, operand=kind) for kind in ("scalar", "sample", "tensor") for each in (ADD, SUB, MUL, DIV)),
)  # fmt: skip
