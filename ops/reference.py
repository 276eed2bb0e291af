"""The functions of ``ops`` in plain PyTorch, derived from the same chains.

They run for CPU tensors and for float64, and the tests compare the kernels with them.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ops import composed_functions as composed
from ops import family, functions, plain
from ops.chain import Chain
from ops.checks import plain as plain_number
from ops.convolution import DEFAULTS

#: A function's arguments by name → its chain, the tensors in a row, and the numbers of its steps.
Bind = Callable[[dict[str, Any]], tuple[Chain, Sequence[Any], Sequence[tuple]]]


def _of(chains: dict[str, Chain]) -> Bind:
    """Binds a function's arguments by the names of its chain: that which ``approximate`` names, or the first."""

    def bind(values: dict[str, Any]) -> tuple[Chain, Sequence[Any], Sequence[tuple]]:
        chain = chains[values.get("approximate", "none")]
        numbers = [tuple([plain_number(values[each]) for each in name]) for name in chain.names if type(name) is tuple]
        tensors = [values[name] for name in chain.names if type(name) is str]
        weight, bias = values.get("weight") if chain.contraction else None, [] if chain.reduction else [None]
        return chain, [values["input"], weight, *tensors, *bias], numbers

    return bind


def _of_family(known: family.Family) -> Bind:
    """Binds a function's arguments by the family's names."""
    biases = 1 if known.contraction else 0

    def bind(values: dict[str, Any]) -> tuple[Chain, Sequence[Any], Sequence[tuple]]:
        vectors = tuple([values[name] for name in known.names])
        row = values["input"], values["weight"] if known.contraction else None, *vectors[:biases]
        return known.bind(row, vectors[biases:], values.get("before", ()), values["after"])

    return bind


def _plain(function: Callable[..., torch.Tensor], bind: Bind) -> Callable[..., torch.Tensor]:
    """A public function in plain PyTorch."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}

    @functools.wraps(function)
    def call(*arguments, **options):
        values = {**defaults, **dict(zip(parameters, arguments, strict=False)), **options}
        if len(values) != len(parameters) or len(arguments) > len(parameters):
            signature.bind(*arguments, **options)  # which says what is missing or unknown
        chain, row, numbers = bind(values)
        num_groups, eps = plain_number(values.get("num_groups", 1)), plain_number(values.get("eps", 0.0))
        sizes = {name: plain_number(values[name]) for name in DEFAULTS if name in values}
        return plain.apply(chain, row, numbers, num_groups, eps, sizes)

    call.__doc__ = f"``ops.{function.__name__}`` in plain PyTorch. See :func:`ops.{function.__name__}`."
    return call


linear = _plain(composed.linear, _of_family(family.LINEAR))
group_norm = _plain(composed.group_norm, _of_family(family.GROUP_NORM))
linear_group_norm = _plain(composed.linear_group_norm, _of_family(family.LINEAR_GROUP_NORM))
linear_layer_norm = _plain(composed.linear_layer_norm, _of_family(family.LINEAR_GROUP_NORM))
conv2d_group_norm = _plain(composed.conv2d_group_norm, _of_family(family.CONV2D_GROUP_NORM))
conv_transpose2d_group_norm = _plain(
    composed.conv_transpose2d_group_norm, _of_family(family.CONV_TRANSPOSE2D_GROUP_NORM)
)
bias_hardtanh_mish = _plain(functions.bias_hardtanh_mish, _of({"none": functions.BIAS_HARDTANH_MISH}))
group_norm_hardtanh = _plain(functions.group_norm_hardtanh, _of({"none": functions.GROUP_NORM_HARDTANH}))
gelu_group_norm = _plain(functions.gelu_group_norm, _of(functions.GELU_GROUP_NORM))
linear_hardtanh_mish_group_norm = _plain(functions.linear_hardtanh_mish_group_norm, _of({"none": functions.L94}))
linear_group_norm_min = _plain(functions.linear_group_norm_min, _of({"none": functions.L75}))
linear_group_norm_hardtanh = _plain(functions.linear_group_norm_hardtanh, _of({"none": functions.L30}))
conv_transpose2d_gelu_group_norm = _plain(functions.conv_transpose2d_gelu_group_norm, _of(functions.L19))


@functools.wraps(composed.layer_norm)
def layer_norm(input, normalized_shape, weight=None, bias=None, *, before=(), after=(), eps=1e-5):
    """``ops.layer_norm`` in plain PyTorch. See :func:`ops.layer_norm`."""
    return family.in_rows(group_norm, input, normalized_shape, weight, bias, before, after, eps)
