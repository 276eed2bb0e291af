"""The call that ``fuse`` writes into a forward: a fused chain, or the chain as it was written.

It checks what only the call knows. The steps run as they stand in the forward where the fused chain would differ from
the plain one, or where PyTorch would raise an error: under autocast, for other shapes, dtypes or devices than the fused
chain takes, for tensor subclasses, and for arguments that it refuses. Results have the input's dtype and the strides
that PyTorch's have.
"""

import functools
import itertools
import math

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import ops
from ops import checks, convolution, functions, precision
from ops.chain import Chain

#: The public functions that ``fuse`` calls, by their names.
CHAINS: dict[str, Chain] = {
    "linear_hardtanh_mish_group_norm": functions.L94,
    "linear_group_norm_min": functions.L75,
    "linear_group_norm_hardtanh": functions.L30,
    "conv_transpose2d_gelu_group_norm": functions.L19["none"],
}
#: What PyTorch takes for a number. The fused chains take fractions as well.
_NUMBERS = (int, float, torch.SymInt, np.integer, np.floating)


def fused_or_plain(plain, given, name, weight, biases, operands, last, **options):
    """The chain by the function of this name, or as it was written: ``plain(*given)``. The last of these is its input.

    ``biases`` are the contraction's own, or None, and those that are added to its result. ``operands`` are those of the
    steps after them, tensors and tuples of numbers. ``last`` has the bias that is added to the reduction's result, if
    there is one. ``options`` are the function's other arguments.
    """
    chain = CHAINS[name]
    *_, input = given
    if not _fits(chain, input, weight, biases, operands, last, options):
        return plain(*given)
    missing = len(chain.biases) - len(biases)
    biases = biases[1:] if missing < 0 else biases + (None,) * missing
    for parameter, operand in zip(chain.names, biases + operands + last, strict=False):
        options |= zip(parameter, operand, strict=True) if isinstance(parameter, tuple) else {parameter: operand}
    result = getattr(ops, name)(input, weight, **options)
    if chain.contraction == "linear":
        return result
    # Images have the input's memory format. What follows in the model, a view say, expects that of PyTorch's result.
    plain_format = _format_of_plain_chain(input, weight)
    return result if plain_format is convolution.memory_format(input) else result.clone(memory_format=plain_format)


def _fits(chain, input, weight, biases, operands, last, options) -> bool:
    """Whether the fused chain takes these as the plain one does: dense tensors of one device and dtype, no empty batch,
    one value a channel in each vector, bounds that the dtype holds, and no autocast."""
    own, *added = biases
    pairs = [each for each in operands if isinstance(each, tuple)]
    vectors = [each for each in (own, *operands) if each is not None and not isinstance(each, tuple)]
    tensors = [input, weight, *added, *vectors, *last]
    num_groups, eps = options["num_groups"], options["eps"]
    if (
        len(added) + (own is not None) > len(chain.biases)
        or not all(isinstance(each, torch.Tensor) for each in tensors)
        or any(is_traceable_wrapper_subclass(each) or _overrides_functions(type(each)) for each in tensors)
        or not all(isinstance(each, _NUMBERS) for each in (num_groups, eps, *itertools.chain(*pairs)))
        or precision.autocasts(input.device)
        or input.numel() == 0
    ):
        return False
    try:
        checks.tensors({f"operand {i}": each for i, each in enumerate(tensors)}, {})
        if chain.contraction == "linear":
            checks.linear(input, weight)
            channels = weight.shape[0]
        else:
            geometry = {name: options[name] for name in convolution.DEFAULTS}
            channels = weight.shape[1] * convolution.check(True, input, weight, **geometry).groups
        checks.groups(channels, num_groups)
        checks.epsilon(eps)
        checks.approximate(options.get("approximate", "none"))
        bounds = [bound for pair in pairs for bound in checks.bounds(*pair)]
    except (TypeError, ValueError):
        return False
    largest = torch.finfo(input.dtype).max
    return (
        not (channels == num_groups and input.shape[0] == 1)  # PyTorch raises an error for groups of one value
        and (chain.contraction != "linear" or input.ndim == 2)  # GroupNorm takes the second dimension for its channels
        and all(each.shape == (channels,) for each in vectors)
        and all(each.ndim in (1, 2) and each.shape[-1] == each.numel() == channels for each in added)
        and all(checks.is_channel_axis(each.shape) and each.numel() > 0 for each in last)
        and all(abs(bound) <= largest or math.isinf(bound) for bound in bounds)
    )


def _overrides_functions(kind: type[torch.Tensor]) -> bool:
    """Whether the class has a ``__torch_function__`` of its own.

    ``torch.overrides.has_torch_function`` is also true of plain tensors within ``with torch.device(...)``.
    """
    return kind is not torch.Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__


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
