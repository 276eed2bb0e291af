"""Pointwise functions, each with its gradient and the PyTorch function that it stands for.

A function takes float32 values and an operand: None, a tuple of numbers, or values that broadcast to the first. Its
gradient takes the output's gradient first, and returns the value's, with that of an operand that is a tensor. All have
the same parameters, so a kernel takes any of them in a constexpr. They agree with PyTorch on NaN, infinities and at
jumps. A gradient that is cut off is replaced by 0 and not multiplied by 0, since 0 times infinity is NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from triton_kernels.cache_keys import hash_in_order
from triton_kernels.device import IN_INTERPRETER


@triton.jit
def power_of_two(exponent):
    """2**exponent, or 0 where that is subnormal: one instruction. ``tl.exp2`` takes four, to handle subnormals."""
    if IN_INTERPRETER:
        return tl.exp2(exponent)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exponential(value):
    """exp(value) by way of a power of two, as ``tl.exp`` on a GPU; 0 where that is subnormal."""
    if IN_INTERPRETER:
        return tl.exp(value)
    return power_of_two(value * 1.4426950408889634)


@triton.jit
def reciprocal(value):
    """1 / value to the last digit, for normal numbers and infinity: one instruction. A division takes eight."""
    if IN_INTERPRETER:
        return 1.0 / value
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rounded_product(value, factor):
    """value * factor, always rounded. A compiler would fuse a plain product into a following addition.

    Functions that are followed by a group norm, and end in a product, end with it. (A ``Chain`` takes it in the place
    of ``mul`` there.) Where all values of a group are equal, so is their mean, and subtracting it must leave 0. A fused
    product would leave its rounding error there: noise, which the norm makes 316 times as large.
    """
    if IN_INTERPRETER:
        return value * factor
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, factor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rounded_once(value, factor, addend):
    """value * factor + addend, rounded at the end alone. (The interpreter's ``tl.fma`` rounds the product, too.)"""
    if IN_INTERPRETER:
        return (value.to(tl.float64) * factor.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    return tl.fma(value, factor, addend)


@triton.jit
def polynomial(value, coefficients):
    """The polynomial with these coefficients, that of the highest power first."""
    total = coefficients[0]
    for i in tl.static_range(1, len(coefficients)):
        total = total * value + coefficients[i]
    return total


@triton.jit
def identity(value, operand):
    return value


@triton.jit
def filled(like, number):
    """The number as a tensor that lies in registers as another one does. (Gluon's ``full`` would ask for a layout.)"""
    return tl.where(like == like, number, number).to(tl.float32)


@triton.jit
def nearest_tf32(value, operand):
    """``value`` (float32) rounded to TF32, which has ten bits of mantissa. Tensor cores would truncate, with twice the
    error.

    Rounding is to nearest, ties away from zero, as in cuDNN and in ``cvt.rna.tf32.f32``: half a step is added to the
    bits, and the 13 bits that TF32 lacks are cleared. A number that rounds beyond the largest one becomes infinite.
    Infinities stay as they are. A NaN becomes a quiet NaN, whose truncation is still a NaN.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value + value)


@triton.jit
def add(value, operand):
    return value + operand


@triton.jit
def add_gradient(gradient, value, operand):
    return gradient, gradient


@triton.jit
def mul(value, operand):
    return value * operand


@triton.jit
def mul_gradient(gradient, value, operand):
    return gradient * operand, gradient * value


@triton.jit
def hardtanh(value, bounds):
    """min(max(value, min_val), max_val). A NaN stays a NaN; Triton's default minimum would drop it."""
    min_val, max_val = bounds
    raised = tl.maximum(value, min_val, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, max_val, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def hardtanh_gradient(gradient, value, bounds):
    """0 at the bounds and beyond them. Between them, and where the value is NaN, the gradient."""
    min_val, max_val = bounds
    return tl.where((value <= min_val) | (value >= max_val), 0.0, gradient)


@triton.jit
def softplus_terms(value):
    """(e, tanh(softplus(value)), r) with e = exp(value), n = e(e + 2), r = 1 / (n + 2). The tanh is n r = 1 - 2 r.

    The first form is accurate where the tanh is small. The second is exactly 1 where it is large, and where e
    overflows. The switch is at e = 3/4, where both are about equally accurate. Comparing e instead of n spills fewer
    registers.
    """
    e = exponential(value)
    n = e * (e + 2.0)
    r = reciprocal(n + 2.0)
    return e, tl.where(e > 0.75, 1.0 - 2.0 * r, n * r), r


@triton.jit
def mish(value, operand):
    """value * tanh(softplus(value))"""
    e, tanh, r = softplus_terms(value)
    return rounded_product(value, tanh)


@triton.jit
def mish_gradient(gradient, value, operand):
    """gradient * (tanh(softplus(v)) + v * sigmoid(v) * sech(softplus(v))**2). The second term is 4 v e (e + 1) r r.

    Beyond 20, the first term is 1 and the second 0 in float32. v is limited to 20, so that e does not overflow. For
    both infinities the gradient is NaN, as in PyTorch: v - v is NaN there, and else 0.
    """
    bounded = tl.minimum(value, 20.0, propagate_nan=tl.PropagateNan.ALL)
    e, tanh, r = softplus_terms(bounded)
    return gradient * (tanh + ((e * r) * ((e + 1.0) * r) * 4.0 * bounded + (value - value)))


@triton.jit
def normal_cdf(value):
    """P(X <= value) for a standard normal X, (1 + erf(value / sqrt(2))) / 2, within 6e-8: as the formula in float32.

    It is 1/2 + value times a polynomial in value**2, a minimax fit for |value| <= sqrt(28). Beyond that, the result is
    0 or 1 within 6e-8. y is value**2 mapped to -1 ... 1, which keeps the coefficients small. It takes about 20
    multiply-adds and no branch: as the convolution's epilogue 1.73 ms at the target size, where erf takes 2.26 (H200).
    """
    y = tl.minimum(value * value, 28.0) * 0.0714285746216774 - 1.0
    ratio = polynomial(y, (
        0.0002757363545242697, -0.0007451784913428128, 0.0007204240537248552, -0.0010867734672501683,
        0.003092790488153696, -0.0057799494825303555, 0.008758326061069965, -0.013116663321852684,
        0.018861297518014908, -0.02525627426803112, 0.03207278996706009, -0.03961941972374916,
        0.049329083412885666, -0.06662127375602722, 0.1336061954498291,
    ))  # fmt: skip
    return tl.minimum(tl.maximum(value * ratio + 0.5, 0.0), 1.0)


@triton.jit
def gelu(value, operand):
    """value * normal_cdf(value) (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016); NaN for -inf, as in PyTorch.

    GELU is never below -0.17, so the maximum changes nothing. It keeps the product from being fused, as
    ``rounded_product`` does, and spills fewer registers here.
    """
    return tl.maximum(value * normal_cdf(value), -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu_gradient(gradient, value, operand):
    """gradient * (normal_cdf(v) + v * exp(-v**2 / 2) / sqrt(2 pi)); NaN for both infinities, as in PyTorch."""
    density = power_of_two(-0.7213475204444817 * (value * value)) * 0.3989422804014327
    return gradient * (normal_cdf(value) + value * density)


@triton.jit
def coarse_normal_tail(value):
    """(q, e): q = P(X > |value|) with a relative error of 8e-6, and e = exp(-value**2 / 2).

    q / e is Mills' ratio over sqrt(2 pi): u times a polynomial in u = 1 / (1 + 0.3 |value|), a minimax fit.
    """
    u = reciprocal(1.0 + 0.3 * tl.abs(value))
    e = power_of_two(-0.7213475204444817 * (value * value))
    ratio = polynomial(u, (
        -0.07709738612174988, 0.21603697538375854, -0.016948005184531212, 0.14419636130332947,
        0.1137419268488884, 0.12007423490285873,
    ))  # fmt: skip
    return ratio * (u * e), e


@triton.jit
def coarse_gelu_gradient(gradient, value, operand):
    """``gelu_gradient`` with an error of at most 5e-6 times the gradient."""
    q, e = coarse_normal_tail(value)
    return gradient * (tl.where(value > 0.0, 1.0 - q, q) + value * e * 0.3989422804014327)


@triton.jit
def times_logistic(value, factor):
    """value / (1 + 2**(value * factor)). This is GELU where the power is the odds against ``normal_cdf``.

    It is accurate in GELU's tail too. (With a maximum as in ``gelu``, the convolution's epilogue took 1.4% longer.)
    """
    return rounded_product(value, reciprocal(1.0 + power_of_two(value * factor)))


@triton.jit
def float16_gelu(value, operand):
    """``gelu`` within 2.2e-6, and within 2e-4 of its value above -4: a tenth of the error of rounding both to float16.

    The factor is a minimax fit of degree 6 in value**2, weighted by the error of a value and its GELU in float16. As a
    quotient it stays accurate in the tail. As the convolution's epilogue it takes 0.45 ms at the target size (H200).
    """
    factor = polynomial(value * value, (
        -2.9909319465559747e-09, 2.597860770947591e-07, -8.861806236382108e-06, 0.00013506693358067423,
        0.00019935121235903352, -0.10501373559236526, -2.302126407623291,
    ))  # fmt: skip
    return times_logistic(value, factor)


@triton.jit
def bfloat16_gelu(value, operand):
    """``gelu`` within 7e-5, and within 0.6% of its value above -4: a third of the error of rounding both to bfloat16.

    The factor is the same fit, of degree 3. It takes 0.35 ms.
    """
    factor = polynomial(value * value, (
        -6.891043085488491e-06, 0.001233759569004178, -0.10786987841129303, -2.3001952171325684,
    ))  # fmt: skip
    return times_logistic(value, factor)


@triton.jit
def gelu_tanh_exponential(value):
    """exp(-2 u) with u = sqrt(2 / pi) * (v + 0.044715 v**3). Then (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).

    This has no difference that would cancel, and gives 0 where the exponential overflows.
    """
    return tl.exp(-1.5957691216057308 * value * (1.0 + 0.044715 * value * value))


@triton.jit
def gelu_tanh(value, operand):
    """value * (1 + tanh(u)) / 2, an approximation of ``gelu``."""
    return tl.maximum(value / (1.0 + gelu_tanh_exponential(value)), -1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu_tanh_gradient(gradient, value, operand):
    """gradient * (s + v * s * (1 - s) * 2 du/dv) with s = (1 + tanh(u)) / 2.

    s * (1 - s) is 0 in float32 where v * v > 200. v * v is limited to that, so that it does not overflow.
    """
    e = gelu_tanh_exponential(value)
    s = 1.0 / (1.0 + e)
    rest = tl.where(e < 1.0, e * s, 1.0 - s)
    square = tl.minimum(value * value, 200.0, propagate_nan=tl.PropagateNan.ALL)
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * square)
    return gradient * (s + value * (s * rest) * slope)


#: The kinds of operands that are tensors.
_TENSORS = ("scalar", "vector", "sample", "tensor")

#: All pointwise functions by their identities, which a compiler takes for constants. (It does not take objects so.)
by_identity: "WeakValueDictionary[int, Pointwise]" = WeakValueDictionary()


def source(function: triton.runtime.JITFunction) -> Any:
    """What a jit function is made of, which a second definition shares. (The interpreter's have no key.)"""
    hash_in_order(function)
    return getattr(function, "cache_key", function)


#: The calls that ``terms`` counts.
_TERMS = ({"exp", "exp2", "log", "log2", "erf", "sigmoid", "tanh", "sin", "cos", "pow"}, {"polynomial"})


def _names(function: Any) -> set[str]:
    """The names in a jit function's code, and in that of those that it calls."""
    names = set(function.fn.__code__.co_names)
    called = [function.fn.__globals__.get(name) for name in names]
    return names.union(*[_names(each) for each in called if isinstance(each, triton.runtime.KernelInterface)])


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function of a value and, where ``operand`` names its kind, an operand.

    Args:
        name: What chains, tables and compiled graphs call it: PyTorch's name for it.
        function: jit function ``(value, operand) -> value``.
        gradient: jit function ``(gradient, value, operand) -> gradient of value``; with a tensor or an earlier value as
            operand ``-> (gradient of value, gradient of operand)``. Both have the value's shape; kernels add up that of
            an operand that has fewer values.
        plain: The same in PyTorch: ``(value, operand) -> value``. A vector comes with as many dimensions as the value.
        operand: "" for none; "numbers": a tuple of numbers; "scalar": one value for all; "vector": one a channel;
            "sample": one a channel of each sample; "tensor": one a value. The last four are tensors: they have
            gradients, and may be None, which leaves the function out. "earlier 2": the value as it was two steps ago.
        jumps: ``operand -> values`` where the function or its gradient jumps. Tests look away there.
        forms: (dtype, function, gradient) that suffice where values are rounded to that dtype, and are faster.
    """

    name: str
    function: triton.runtime.JITFunction
    gradient: triton.runtime.JITFunction
    plain: Callable[[torch.Tensor, Any], torch.Tensor] = field(repr=False)
    operand: str = ""
    jumps: Callable[[Any], tuple[float, ...]] = field(default=lambda operand: (), repr=False)
    forms: tuple[tuple[torch.dtype, triton.runtime.JITFunction, triton.runtime.JITFunction], ...] = field(
        default=(), repr=False
    )
    #: What this is a form of, if it is one.
    declared: "Pointwise | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if self.operand not in ("", "numbers", *_TENSORS) and not self.earlier:
            kinds = ", ".join(map(repr, ("", "numbers", *_TENSORS)))
            raise ValueError(f"operand must be one of {kinds} or 'earlier N', got {self.operand!r}")
        by_identity[id(self)] = self

    def __deepcopy__(self, memo: dict) -> "Pointwise":
        """A copy of a model has the same functions."""
        return self

    def form(self, dtype: torch.dtype) -> "Pointwise":
        """This function as precise as values of ``dtype`` are."""
        for known, function, gradient in self.forms:
            if known == dtype:
                return replace(self, function=function, gradient=gradient, forms=(), declared=self)
        return self

    def with_operand(self, operand: str) -> "Pointwise":
        """This function with an operand of another kind."""
        return self if operand == self.operand else replace(self, operand=operand, declared=self)

    @property
    def rounded(self) -> "Pointwise":
        """This function, always rounded: what is no built-in product is so, or sees to it."""
        return replace(self, function=rounded_product, declared=self) if self.function is mul else self

    @property
    def part(self) -> str:
        """What it is called within a kernel's name: in one word, with the kind of a tensor or an earlier value."""
        name, kind = self.name.replace("_", ""), self.operand.replace(" ", "_")
        return f"{name}_{kind}" if self.has_tensor or self.earlier else name

    @cached_property
    def terms(self) -> int:
        """How many of exponential (or logarithm, ...) and polynomial it evaluates: these need registers."""
        return sum([bool(names & _names(self.function)) for names in _TERMS])

    @property
    def has_tensor(self) -> bool:
        """Whether the operand is a tensor, which has a gradient and may be None."""
        return self.operand in _TENSORS

    @property
    def is_called_with_operand(self) -> bool:
        """Whether a call gives the operand."""
        return self.operand == "numbers" or self.has_tensor

    @cached_property
    def earlier(self) -> int:
        """How many steps ago the value was that is the operand; 0 where it is something else."""
        kind, _, steps = self.operand.partition(" ")
        return int(steps) if kind == "earlier" and steps.isdecimal() else 0

    def shape(self, given: Sequence[int]) -> Sequence[int]:
        """The shape in which kernels take an operand, of one that may have dimensions of one: [C], [N, C], or as it
        is."""
        return {"tensor": given, "sample": given[:2]}.get(self.operand, (-1,))

    @property
    def adds_vector(self) -> bool:
        """Whether it adds a vector. Neighbours that do are added up first."""
        return self.operand == "vector" and self.adds

    @property
    def adds(self) -> bool:
        """Whether it adds a vector or a tensor. Its gradients do not depend on that."""
        return self.has_tensor and self.function is add

    def __hash__(self) -> int:
        return hash((self.name, source(self.function), self.operand))

    @property
    def cache_key(self) -> str:
        """What compiled kernels depend on. (Triton would take the text, and miss an edit of the functions.)"""
        return f"{source(self.function)}{source(self.gradient)}{self.operand}"


def _hardtanh(value, bounds):
    # F.hardtanh refuses bounds beyond the dtype's range. The kernels take them for infinities.
    most = torch.finfo(value.dtype).max
    return F.hardtanh(value, *(bound if abs(bound) <= most else math.copysign(math.inf, bound) for bound in bounds))


ADD = Pointwise("add", add, add_gradient, lambda value, operand: value + operand, "vector")
MUL = Pointwise("mul", mul, mul_gradient, lambda value, operand: value * operand, "vector")
HARDTANH = Pointwise("hardtanh", hardtanh, hardtanh_gradient, _hardtanh, "numbers", jumps=lambda bounds: bounds)
MISH = Pointwise("mish", mish, mish_gradient, lambda value, _: F.mish(value))
GELU = Pointwise(
    "gelu",
    gelu,
    gelu_gradient,
    lambda value, _: F.gelu(value),
    forms=(
        (torch.bfloat16, bfloat16_gelu, coarse_gelu_gradient),
        (torch.float16, float16_gelu, coarse_gelu_gradient),
    ),
)
GELU_TANH = Pointwise("gelu_tanh", gelu_tanh, gelu_tanh_gradient, lambda value, _: F.gelu(value, approximate="tanh"))
