"""The chains that the project is for, and its building blocks, as data."""

from collections.abc import Iterator

from triton_kernels.built_in import BUILT_IN
from triton_kernels.chain import Chain, chain_of
from triton_kernels.pointwise import ADD, GELU, GELU_TANH, HARDTANH, MISH, Pointwise
from triton_kernels.row_minimum import ROW_MINIMUM

#: L94: Linear + bias → Hardtanh → Mish → GroupNorm.
LINEAR_HARDTANH_MISH_GROUP_NORM = Chain("linear", before=(ADD, HARDTANH, MISH))
#: L75: Linear → GroupNorm → row minimum. Its last bias is added by the reduction.
LINEAR_GROUP_NORM_MIN = Chain("linear", reduction=ROW_MINIMUM)
#: L30: Linear → GroupNorm → Hardtanh.
LINEAR_GROUP_NORM_HARDTANH = Chain("linear", after=(HARDTANH,))
#: L19: ConvTranspose2d → GELU → GroupNorm.
CONV_TRANSPOSE2D_GELU_GROUP_NORM = Chain("conv_transpose2d", before=(GELU,))
CONV_TRANSPOSE2D_GELU_TANH_GROUP_NORM = Chain("conv_transpose2d", before=(GELU_TANH,))

LINEAR = Chain("linear", norm="")
BIAS_HARDTANH_MISH = Chain(before=(ADD, HARDTANH, MISH), norm="")
GROUP_NORM = Chain()
GROUP_NORM_HARDTANH = Chain(after=(HARDTANH,))
GELU_GROUP_NORM = Chain(before=(GELU,))
GELU_TANH_GROUP_NORM = Chain(before=(GELU_TANH,))

#: The built-in functions by what they are called within a kernel's name.
_PARTS = {each.part: each for each in BUILT_IN}


def known(kernel: str) -> Chain | None:
    """A chain whose product's kernel has this name: one that this process has made, or one of built-in functions."""
    return chain_of(kernel) or built_in(kernel)


def built_in(kernel: str) -> Chain | None:
    """A chain of built-in functions, with or without a norm, whose product's kernel has this name."""
    contraction, _, rest = kernel.partition("_")
    before, norm, after = rest.partition("group_norm")
    try:
        steps = [tuple(_functions(part.strip("_"))) for part in (before, after)]
        return Chain(contraction, steps[0], norm, steps[1]) if contraction == "linear" else None
    except (KeyError, ValueError):  # a function is not built in, or that is another chain's name
        return None


def _functions(names: str) -> Iterator[Pointwise]:
    """The functions of a part of a kernel's name. Raises KeyError where one of them is not built in."""
    words = names.split("_") if names else []
    while words:
        name = "_".join(words[:2])  # the second one may be the kind of a tensor
        if words[1:2] == ["earlier"] and len(words) > 2:
            yield _PARTS[f"{words[0]}_tensor"].with_operand(" ".join(words[1:3]))
            words = words[3:]
        else:
            yield _PARTS.get(name) or _PARTS[words[0]]
            words = words[2:] if name in _PARTS else words[1:]
