"""The calls that ``fuse`` writes into a forward: a fused chain, or the chain as it was written.

What only the call tells is looked at here: wherever the fused chain would differ from the plain one, or PyTorch would
raise an error of its own, ``plain(input)`` runs the chain's steps as they stand in the forward. That is under autocast,
for other shapes, dtypes or devices than the fused chain has, for tensor subclasses, and for arguments that it refuses.
``bias`` is what is added to the product. The results have the dtype of the input, and the strides that PyTorch's have.
"""

import functools
import math

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import ops
from ops import checks, convolution, precision


def _fits(input, dimensions, tensors, num_groups, eps) -> bool:
    """Whether a fused chain takes an input of so many dimensions and these operands (or None), as the plain one does:
    dense tensors of one device and dtype, no empty batch, and no autocast."""
    given = [input, *(tensor for tensor in tensors if tensor is not None)]
    if not all(isinstance(tensor, torch.Tensor) for tensor in given):
        return False
    if any(is_traceable_wrapper_subclass(tensor) or _is_told_of_functions(type(tensor)) for tensor in given):
        return False
    if not (_is_number(num_groups) and _is_number(eps)):
        return False
    if precision.autocasts(input.device) or input.ndim != dimensions or input.numel() == 0:
        return False
    try:
        checks.tensors({"input": input}, {f"operand {i}": tensor for i, tensor in enumerate(tensors)})
        checks.groups(num_groups, num_groups)
        checks.epsilon(eps)
    except (TypeError, ValueError):
        return False
    return True


def _is_number(value) -> bool:
    """Whether PyTorch takes it for a number: Python's and NumPy's. The fused chains take fractions as well."""
    return isinstance(value, (int, float, torch.SymInt, np.integer, np.floating))


def _is_told_of_functions(kind: type[torch.Tensor]) -> bool:
    """Whether PyTorch's functions ask this class what to do: all of its own but parameters, where it says otherwise.

    ``torch.overrides.has_torch_function`` also says so of plain tensors within ``with torch.device(...)``.
    """
    return kind is not torch.Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__


def _norms(input, channels, num_groups, *vectors) -> bool:
    """Whether the norm takes so many channels, and each vector, or None, has one value for each of them.

    For groups of one value PyTorch raises where there is one sample.
    """
    if any(vector is not None and vector.shape != (channels,) for vector in vectors):
        return False
    return channels % num_groups == 0 and not (channels == num_groups and input.shape[0] == 1)


def _multiplies(input, weight, bias) -> bool:
    """Whether these are a Linear layer's input and weight, and a bias, or None, that adds one value to each channel."""
    if weight.ndim != 2 or 0 in weight.shape or input.shape[-1] != weight.shape[1]:
        return False
    return bias is None or (bias.ndim in (1, 2) and bias.shape[-1] == bias.numel() == weight.shape[0])


def _bounds(input, min_val, max_val) -> bool:
    """Whether the two are bounds, and numbers that PyTorch can convert to the input's dtype."""
    if not (_is_number(min_val) and _is_number(max_val)):
        return False
    try:
        bounds = checks.bounds(min_val, max_val)
    except (TypeError, ValueError):
        return False
    largest = torch.finfo(input.dtype).max
    return all(abs(bound) <= largest or math.isinf(bound) for bound in bounds)


def _convolves(input, weight, groups, geometry, approximate) -> bool:
    try:
        convolution.check_conv_transpose2d(input, weight, **geometry, groups=groups)
    except (TypeError, ValueError):
        return False
    return approximate in ("none", "tanh")


def linear_hardtanh_mish_group_norm(
    plain, input, weight, linear_bias, bias, min_val, max_val, num_groups, norm_weight, norm_bias, eps
):
    if (
        _fits(input, 2, (weight, linear_bias, bias, norm_weight, norm_bias), num_groups, eps)
        and _multiplies(input, weight, bias)
        and _norms(input, weight.shape[0], num_groups, linear_bias, norm_weight, norm_bias)
        and _bounds(input, min_val, max_val)
    ):
        norm = num_groups, norm_weight, norm_bias
        bounds = {"min_val": min_val, "max_val": max_val}
        return ops.linear_hardtanh_mish_group_norm(input, weight, linear_bias, bias, *norm, **bounds, eps=eps)
    return plain(input)


def linear_group_norm_hardtanh(
    plain, input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, eps, min_val, max_val
):
    if (
        (linear_bias is None or bias is None)
        and _fits(input, 2, (weight, linear_bias, bias, norm_weight, norm_bias), num_groups, eps)
        and _multiplies(input, weight, bias)
        and _norms(input, weight.shape[0], num_groups, linear_bias, norm_weight, norm_bias)
        and _bounds(input, min_val, max_val)
    ):
        norm = linear_bias if bias is None else bias, num_groups, norm_weight, norm_bias
        return ops.linear_group_norm_hardtanh(input, weight, *norm, min_val=min_val, max_val=max_val, eps=eps)
    return plain(input)


def linear_group_norm_min(plain, input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, eps, final_bias):
    """``final_bias``, of shape (1, channels, 1, 1), is added to the minimum."""
    if (
        (linear_bias is None or bias is None)
        and _fits(input, 2, (weight, linear_bias, bias, norm_weight, norm_bias, final_bias), num_groups, eps)
        and _multiplies(input, weight, bias)
        and _norms(input, weight.shape[0], num_groups, linear_bias, norm_weight, norm_bias)
        and is_axis_of_four(final_bias)
    ):
        norm = linear_bias if bias is None else bias, num_groups, norm_weight, norm_bias
        return ops.linear_group_norm_min(input, weight, *norm, final_bias, eps=eps)
    return plain(input)


def is_axis_of_four(bias: torch.Tensor | None) -> bool:
    """None, or of shape (1, channels, 1, 1)"""
    return bias is None or (bias.ndim == 4 and bias.shape[1] == bias.numel() > 0)


def conv_transpose2d_gelu_group_norm(
    plain,
    input,
    weight,
    conv_bias,
    stride,
    padding,
    output_padding,
    groups,
    dilation,
    approximate,
    num_groups,
    norm_weight,
    norm_bias,
    eps,
):
    geometry = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    if (
        _fits(input, 4, (weight, conv_bias, norm_weight, norm_bias), num_groups, eps)
        and _convolves(input, weight, groups, geometry, approximate)
        and _norms(input, weight.shape[1] * groups, num_groups, conv_bias, norm_weight, norm_bias)
    ):
        norm = num_groups, norm_weight, norm_bias
        options = {**geometry, "groups": groups, "approximate": approximate, "eps": eps}
        result = ops.conv_transpose2d_gelu_group_norm(input, weight, conv_bias, *norm, **options)
        # It has the input's format. What comes next in the model, a view say, was written for that of PyTorch.
        plain_format = _format_of_plain_chain(input, weight)
        is_alike = plain_format is convolution.memory_format(input)
        return result if is_alike else result.clone(memory_format=plain_format)
    return plain(input)


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
    """Of a convolution and a group norm of fake tensors, which have strides and no values: versions of PyTorch differ.
    (Up to 2.13 its group norm returns contiguous images on a GPU, 2.15 keeps their format.)"""
    with FakeTensorMode(), torch.no_grad():
        image = torch.empty(2, 8, 4, 4, dtype=dtype, device=device, memory_format=input_format)
        weight = torch.empty(8, 8, 3, 3, dtype=dtype, device=device, memory_format=weight_format)
        return convolution.memory_format(functional.group_norm(functional.conv_transpose2d(image, weight), 2))
