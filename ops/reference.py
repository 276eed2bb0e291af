"""The functions of ``ops`` in plain PyTorch, derived from the same chains.

They run for CPU tensors and for float64, and the tests compare the kernels with them.
"""

import functools
import inspect
from collections.abc import Callable

import torch

from ops import functions, plain
from ops.chain import Chain
from ops.checks import plain as plain_number
from ops.convolution import DEFAULTS


def _plain(function: Callable[..., torch.Tensor], chains: dict[str, Chain]) -> Callable[..., torch.Tensor]:
    """A public function in plain PyTorch: that of ``chains`` which its argument ``approximate`` names, or the first."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}

    @functools.wraps(function)
    def call(*arguments, **options):
        values = {**defaults, **dict(zip(parameters, arguments, strict=False)), **options}
        if len(values) != len(parameters) or len(arguments) > len(parameters):
            signature.bind(*arguments, **options)  # which says what is missing or unknown
        chain = chains[values.get("approximate", "none")]
        numbers = [tuple([plain_number(values[each]) for each in name]) for name in chain.names if type(name) is tuple]
        tensors = [values[name] for name in chain.names if type(name) is str]
        weight, bias = values.get("weight") if chain.contraction else None, [] if chain.reduction else [None]
        row = [values["input"], weight, *tensors, *bias]
        num_groups, eps = plain_number(values.get("num_groups", 1)), plain_number(values.get("eps", 0.0))
        sizes = {name: plain_number(values[name]) for name in DEFAULTS if name in values}
        return plain.apply(chain, row, numbers, num_groups, eps, sizes)

    call.__doc__ = f"``ops.{function.__name__}`` in plain PyTorch. See :func:`ops.{function.__name__}`."
    return call


linear = _plain(functions.linear, {"none": functions.LINEAR})
bias_hardtanh_mish = _plain(functions.bias_hardtanh_mish, {"none": functions.BIAS_HARDTANH_MISH})
group_norm = _plain(functions.group_norm, {"none": functions.GROUP_NORM})
group_norm_hardtanh = _plain(functions.group_norm_hardtanh, {"none": functions.GROUP_NORM_HARDTANH})
gelu_group_norm = _plain(functions.gelu_group_norm, functions.GELU_GROUP_NORM)
linear_hardtanh_mish_group_norm = _plain(functions.linear_hardtanh_mish_group_norm, {"none": functions.L94})
linear_group_norm_min = _plain(functions.linear_group_norm_min, {"none": functions.L75})
linear_group_norm_hardtanh = _plain(functions.linear_group_norm_hardtanh, {"none": functions.L30})
conv_transpose2d_gelu_group_norm = _plain(functions.conv_transpose2d_gelu_group_norm, functions.L19)
