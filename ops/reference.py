"""The functions of ``ops`` in plain PyTorch.

They run for CPU tensors and for float64, and the tests compare the kernels with them.
"""

import torch
import torch.nn.functional as F

from ops.checks import plain

Tensor = torch.Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias`` in plain PyTorch. See :func:`ops.linear`."""
    return F.linear(input, weight, bias)


def bias_hardtanh_mish(
    input: Tensor, bias: Tensor | None = None, *, min_val: float = -1.0, max_val: float = 1.0
) -> Tensor:
    """``mish(hardtanh(input + bias))`` in plain PyTorch. See :func:`ops.bias_hardtanh_mish`."""
    return F.mish(F.hardtanh(input if bias is None else input + bias, plain(min_val), plain(max_val)))


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """``torch.nn.functional.group_norm``, for empty batches too, and for a single sample with groups of one value.

    See :func:`ops.group_norm`. PyTorch's backward fails on the CPU for a bias without a weight (seen with torch 2.13),
    so a weight of ones is passed.
    """
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    if input.numel() == 0:
        shape = (1, -1) + (1,) * (input.ndim - 2)
        scaled = input if weight is None else input * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)
    return torch.group_norm(input, plain(num_groups), weight, bias, plain(eps))


def group_norm_hardtanh(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> Tensor:
    """``hardtanh(group_norm(input))`` in plain PyTorch. See :func:`ops.group_norm_hardtanh`."""
    return F.hardtanh(group_norm(input, num_groups, weight, bias, eps=eps), plain(min_val), plain(max_val))


def gelu_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    eps: float = 1e-5,
) -> Tensor:
    """``group_norm(gelu(input))`` in plain PyTorch. See :func:`ops.gelu_group_norm`."""
    return group_norm(F.gelu(input, approximate=approximate), num_groups, weight, bias, eps=eps)


def linear_hardtanh_mish_group_norm(
    input: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> Tensor:
    """``group_norm(mish(hardtanh(linear(input) + bias)))`` in plain PyTorch, normalised over the last dimension.

    See :func:`ops.linear_hardtanh_mish_group_norm`.
    """
    rows = linear(input, weight, linear_bias).reshape(-1, weight.shape[0])
    activated = bias_hardtanh_mish(rows, bias, min_val=min_val, max_val=max_val)
    normalized = group_norm(activated, num_groups, norm_weight, norm_bias, eps=eps)
    return normalized.view(*input.shape[:-1], weight.shape[0])


def linear_group_norm_min(
    input: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """``min(group_norm(linear(input)), dim=1, keepdim=True)[0] + bias`` in plain PyTorch.

    See :func:`ops.linear_group_norm_min`.
    """
    normalized = group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias, eps=eps)
    minimum = torch.min(normalized, dim=1, keepdim=True)[0]
    return minimum if bias is None else minimum + bias


def linear_group_norm_hardtanh(
    input: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> Tensor:
    """``hardtanh(group_norm(linear(input)))`` in plain PyTorch, normalised over the last dimension.

    See :func:`ops.linear_group_norm_hardtanh`.
    """
    rows = linear(input, weight, linear_bias).reshape(-1, weight.shape[0])
    result = group_norm_hardtanh(rows, num_groups, norm_weight, norm_bias, min_val=min_val, max_val=max_val, eps=eps)
    return result.view(*input.shape[:-1], weight.shape[0])


def conv_transpose2d_gelu_group_norm(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
    approximate: str = "none",
    eps: float = 1e-5,
) -> Tensor:
    """``group_norm(gelu(conv_transpose2d(input)))`` in plain PyTorch. See
    :func:`ops.conv_transpose2d_gelu_group_norm`."""
    geometry = plain((stride, padding, output_padding, groups, dilation))
    z = F.conv_transpose2d(input, weight, conv_bias, *geometry)
    return gelu_group_norm(z, num_groups, norm_weight, norm_bias, approximate=approximate, eps=eps)
