"""The call that ``fuse`` writes into a forward: a fused chain, or the chain as it was written.

It checks what only the call knows. The steps run as they stand in the forward where the fused chain would differ from
the plain one, or where PyTorch would raise an error: under autocast, for other shapes, dtypes or devices than the fused
chain takes, for tensor subclasses, and for arguments that it refuses. Results have the input's dtype and the strides
that PyTorch's have.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import ops
from ops import checks, convolution, precision
from triton_kernels import chains
from triton_kernels.chain import Chain

#: The public functions that ``fuse`` calls. Each has its chain, and the names of the parameters that the chain's steps
#: take, in order. The name of a bias that the reduction adds comes last.
CHAINS: dict[str, tuple[Chain, tuple[str | tuple[str, ...], ...]]] = {
    "linear_hardtanh_mish_group_norm": (
        chains.LINEAR_HARDTANH_MISH_GROUP_NORM,
        ("linear_bias", "bias", ("min_val", "max_val"), (), "norm_weight", "norm_bias"),
    ),
    "linear_group_norm_min": (chains.LINEAR_GROUP_NORM_MIN, ("linear_bias", "norm_weight", "norm_bias", "bias")),
    "linear_group_norm_hardtanh": (
        chains.LINEAR_GROUP_NORM_HARDTANH,
        ("linear_bias", "norm_weight", "norm_bias", ("min_val", "max_val")),
    ),
    "conv_transpose2d_gelu_group_norm": (
        chains.CONV_TRANSPOSE2D_GELU_GROUP_NORM,
        ("conv_bias", ("approximate",), "norm_weight", "norm_bias"),
    ),
}
#: How many biases come first in each of them, and the further steps. A compiler cannot compute a cached property.
_STEPS = {name: (len(chain.biases), chain.steps[len(chain.biases) :]) for name, (chain, _) in CHAINS.items()}


def fused_or_plain(plain, given, name, weight, biases, operands, **options):
    """The chain by the function of this name, or as it was written: ``plain(*given)``. The last of these is its input.

    ``biases`` are the contraction's own, or None, and those that are added to its result. ``operands`` has an entry for
    each step of the chain after them, and ``options`` are the other arguments of contraction and norm.
    """
    chain, names = CHAINS[name]
    *_, input = given
    if not _fits(name, input, weight, biases, operands, options):
        return plain(*given)
    missing = _STEPS[name][0] - len(biases)
    biases = biases[1:] if missing < 0 else biases + (None,) * missing
    for parameter, operand in zip(names, biases + operands, strict=False):
        options |= zip(parameter, operand, strict=True) if isinstance(parameter, tuple) else {parameter: operand}
    result = getattr(ops, name)(input, weight, **options)
    # Images have the input's memory format. What follows in the model, a view say, expects that of PyTorch's result.
    is_image = chain.contraction == "conv_transpose2d"
    plain_format = _format_of_plain_chain(input, weight) if is_image else torch.contiguous_format
    is_alike = not is_image or plain_format is convolution.memory_format(input)
    return result if is_alike else result.clone(memory_format=plain_format)


def _fits(name, input, weight, biases, operands, options) -> bool:
    """Whether the fused chain takes these as the plain one does: dense tensors of one device and dtype, no empty batch,
    one value a channel in each vector, and no autocast."""
    most, steps = _STEPS[name]
    own, *added = biases
    vectors = [own, *(each for step, each in zip(steps, operands, strict=False) if step.has_tensor)]
    vectors = [each for each in vectors if each is not None]
    last = [each for each in operands[len(steps) :] if each is not None]
    tensors = [input, weight, *added, *vectors, *last]
    num_groups, eps = options["num_groups"], options["eps"]
    if (
        len(added) + (own is not None) > most
        or not all(isinstance(each, torch.Tensor) for each in tensors)
        or any(is_traceable_wrapper_subclass(each) or _overrides_functions(type(each)) for each in tensors)
        or not (_is_number(num_groups) and _is_number(eps))
        or precision.autocasts(input.device)
        or input.numel() == 0
    ):
        return False
    try:
        checks.tensors({f"operand {i}": each for i, each in enumerate(tensors)}, {})
        channels = _channels(CHAINS[name][0].contraction, input, weight, options)
        checks.groups(channels, num_groups)
        checks.epsilon(eps)
        for step, each in zip(steps, operands, strict=False):
            if isinstance(each, tuple) and each and not _TAKES[step.name](input.dtype, *each):
                return False
    except (TypeError, ValueError):
        return False
    return (
        not (channels == num_groups and input.shape[0] == 1)  # PyTorch raises an error for groups of one value
        and all(each.shape == (channels,) for each in vectors)
        and all(each.ndim in (1, 2) and each.shape[-1] == each.numel() == channels for each in added)
        and all(is_axis_of_four(each) for each in last)
    )


def _is_number(value) -> bool:
    """Whether PyTorch takes it for a number: Python's and NumPy's. The fused chains take fractions as well."""
    return isinstance(value, (int, float, torch.SymInt, np.integer, np.floating))


def _overrides_functions(kind: type[torch.Tensor]) -> bool:
    """Whether the class has a ``__torch_function__`` of its own.

    ``torch.overrides.has_torch_function`` is also true of plain tensors within ``with torch.device(...)``.
    """
    return kind is not torch.Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__


def _channels(contraction: str, input, weight, options) -> int:
    """How many channels the contraction's result has; ValueError or TypeError where it does not fit."""
    if contraction == "conv_transpose2d":
        geometry = {name: option for name, option in options.items() if name not in ("num_groups", "eps")}
        convolution.check_conv_transpose2d(input, weight, **geometry)
        return weight.shape[1] * options["groups"]
    checks.linear(input, weight)
    if input.ndim != 2:
        raise ValueError("GroupNorm takes the second dimension for its channels")
    return weight.shape[0]


def _are_bounds(dtype: torch.dtype, min_val, max_val) -> bool:
    """Whether the two are bounds, and numbers that PyTorch can convert to the dtype."""
    if not (_is_number(min_val) and _is_number(max_val)):
        return False
    largest = torch.finfo(dtype).max
    return all(abs(bound) <= largest or math.isinf(bound) for bound in checks.bounds(min_val, max_val))


#: By the names of pointwise functions: whether PyTorch takes their operands that are no tensors.
_TAKES: dict[str, Callable[..., bool]] = {
    "hardtanh": _are_bounds,
    "gelu": lambda dtype, approximate: approximate in ("none", "tanh"),
}


def is_axis_of_four(bias: torch.Tensor) -> bool:
    """Of shape (1, channels, 1, 1)"""
    return bias.ndim == 4 and bias.shape[1] == bias.numel() > 0


def _format_of_plain_chain(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """On the CPU the convolution's, channels_last where the input or the weight is; elsewhere PyTorch's choice."""
    formats = convolution.memory_format(input), convolution.memory_format(weight)
    if input.is_cpu:
        return torch.channels_last if torch.channels_last in formats else torch.contiguous_format
    return _format_of_fake_chain(input.device.type, input.dtype, *formats, torch.backends.cudnn.enabled)


def _format_of_fake_chain(*arguments) -> torch.memory_format:
    return _asked_format(*arguments)


# As in ops.precision: a compiler calls it, and takes what it returns for a constant.
_format_of_fake_chain._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _asked_format(
    device: str, dtype: torch.dtype, input_format: torch.memory_format, weight_format: torch.memory_format, cudnn: bool
) -> torch.memory_format:
    """The memory format of PyTorch's result, from fake tensors, which have strides and no values.

    Versions of PyTorch differ: up to 2.13 its group norm returns contiguous images on a GPU, 2.15 keeps their format.
    """
    with FakeTensorMode(), torch.no_grad():
        image = torch.empty(2, 8, 4, 4, dtype=dtype, device=device, memory_format=input_format)
        weight = torch.empty(8, 8, 3, 3, dtype=dtype, device=device, memory_format=weight_format)
        return convolution.memory_format(functional.group_norm(functional.conv_transpose2d(image, weight), 2))
