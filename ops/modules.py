"""The chains as modules, with the parameters of the plain models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ops import checks, convolution, functions, submodules


def _linear_and_norm(
    in_features: int, out_features: int, num_groups: int, linear_bias: bool, eps: float, device: Any, dtype: Any
) -> tuple[nn.Linear, nn.GroupNorm]:
    """The two layers of a chain, after a check of their arguments."""
    sizes = checks.size("in_features", in_features), checks.size("out_features", out_features)
    checks.dtype(dtype)
    num_groups, eps = checks.groups(sizes[1], num_groups), checks.epsilon(eps)
    gemm = nn.Linear(*sizes, bias=linear_bias, device=device, dtype=dtype)
    return gemm, nn.GroupNorm(num_groups, sizes[1], eps=eps, device=device, dtype=dtype)


class _WithBias(nn.Module):
    """A chain that has a bias beside its layers' own."""

    bias: nn.Parameter

    def reset_parameters(self) -> None:
        """Draw ``bias`` from the standard normal distribution; the layers reset their own parameters."""
        if self.bias is not None:
            nn.init.normal_(self.bias)


class LinearHardtanhMishGroupNorm(_WithBias):
    """Linear layer, bias, Hardtanh, Mish and GroupNorm: ``groupnorm(mish(hardtanh(gemm(input) + bias)))``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``bias``, ``groupnorm.weight`` and
    ``groupnorm.bias``. The bounds are those of ``hardtanh``, -1 and 1. See :func:`ops.linear_hardtanh_mish_group_norm`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias_shape: Shape of ``bias``: ``(out_features,)``, or the same with leading ones.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearHardtanhMishGroupNorm(64, 128, bias_shape=(128,), num_groups=8)
        layer(torch.randn(16, 64))  # (16, 128)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias_shape: int | Sequence[int],
        num_groups: int,
        *,
        linear_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gemm, norm = _linear_and_norm(in_features, out_features, num_groups, linear_bias, eps, device, dtype)
        shape = checks.shape("bias_shape", bias_shape)
        if not checks.is_vector(shape, self.gemm.out_features):
            raise ValueError(f"bias_shape must be ({self.gemm.out_features},), got {shape}")
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.hardtanh = nn.Hardtanh()
        self.groupnorm = norm
        self.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(*, in_features)``; the result is ``(*, out_features)``."""
        gemm, hardtanh, norm = self.gemm, self.hardtanh, self.groupnorm
        if not submodules.are_as_made(
            self, gemm=(gemm, nn.Linear), hardtanh=(hardtanh, nn.Hardtanh), groupnorm=(norm, nn.GroupNorm)
        ):
            product = gemm(input)
            biased = product if self.bias is None else product + self.bias.view(-1)
            activated = nn.functional.mish(hardtanh(biased))
            return norm(activated.reshape(-1, activated.shape[-1])).view(*input.shape[:-1], -1)
        return functions.linear_hardtanh_mish_group_norm(
            input,
            gemm.weight,
            gemm.bias,
            self.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            min_val=hardtanh.min_val,
            max_val=hardtanh.max_val,
            eps=norm.eps,
        )


class LinearGroupNormMin(_WithBias):
    """Linear layer, GroupNorm, row minimum and bias: ``min(group_norm(gemm(input)), dim=1, keepdim=True)[0] + bias``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``group_norm.weight``, ``group_norm.bias``
    and ``bias``. See :func:`ops.linear_group_norm_min`.

    Args:
        in_features: Size of each input row.
        out_features: Size of the rows that the minimum is taken of.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        bias_shape: Shape of ``bias``: ``(1, channels, 1, 1)``, with any number of channels.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearGroupNormMin(64, 128, num_groups=8, bias_shape=(1, 128, 1, 1))
        layer(torch.randn(16, 64))  # (1, 128, 16, 1)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        bias_shape: Sequence[int],
        *,
        linear_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gemm, self.group_norm = _linear_and_norm(
            in_features, out_features, num_groups, linear_bias, eps, device, dtype
        )
        shape = checks.shape("bias_shape", bias_shape)
        if not checks.is_channel_axis(shape):
            raise ValueError(f"bias_shape must be (1, channels, 1, 1), got {shape}")
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(batch, in_features)``; the result is ``(1, channels, batch, 1)``."""
        gemm, norm = self.gemm, self.group_norm
        if not submodules.are_as_made(self, gemm=(gemm, nn.Linear), group_norm=(norm, nn.GroupNorm)):
            minimum = torch.min(norm(gemm(input)), dim=1, keepdim=True)[0]
            return minimum if self.bias is None else minimum + self.bias
        return functions.linear_group_norm_min(
            input, gemm.weight, gemm.bias, norm.num_groups, norm.weight, norm.bias, self.bias, eps=norm.eps
        )


class LinearGroupNormHardtanh(nn.Module):
    """Linear layer, GroupNorm and Hardtanh: ``hardtanh(group_norm(gemm(input)))``.

    It has the parameters of the plain model: ``gemm.weight``, ``gemm.bias``, ``group_norm.weight`` and
    ``group_norm.bias``. See :func:`ops.linear_group_norm_hardtanh`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        hardtanh_min: Lower bound of the result.
        hardtanh_max: Upper bound of the result.
        linear_bias: Whether ``gemm`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearGroupNormHardtanh(64, 128, num_groups=8, hardtanh_min=-2.0, hardtanh_max=2.0)
        layer(torch.randn(16, 64))  # (16, 128)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        hardtanh_min: float,
        hardtanh_max: float,
        *,
        linear_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gemm, self.group_norm = _linear_and_norm(
            in_features, out_features, num_groups, linear_bias, eps, device, dtype
        )
        least, most = checks.real("hardtanh_min", hardtanh_min), checks.real("hardtanh_max", hardtanh_max)
        if not least < most:  # torch.nn.Hardtanh asserts it
            raise ValueError(
                f"hardtanh_min must be less than hardtanh_max, got {hardtanh_min} for hardtanh_max={hardtanh_max}"
            )
        self.hardtanh = nn.Hardtanh(min_val=least, max_val=most)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(*, in_features)``; the result is ``(*, out_features)``."""
        gemm, norm, hardtanh = self.gemm, self.group_norm, self.hardtanh
        if not submodules.are_as_made(
            self, gemm=(gemm, nn.Linear), group_norm=(norm, nn.GroupNorm), hardtanh=(hardtanh, nn.Hardtanh)
        ):
            z = gemm(input)
            return hardtanh(norm(z.reshape(-1, z.shape[-1]))).view(*input.shape[:-1], -1)
        return functions.linear_group_norm_hardtanh(
            input,
            gemm.weight,
            gemm.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            min_val=hardtanh.min_val,
            max_val=hardtanh.max_val,
            eps=norm.eps,
        )


class ConvTranspose2dGeluGroupNorm(nn.Module):
    """Transposed 2-D convolution, GELU and GroupNorm: ``group_norm(gelu(conv_transpose(input)))``.

    It has the parameters of the plain model: ``conv_transpose.weight``, ``conv_transpose.bias``, ``group_norm.weight``
    and ``group_norm.bias``. The result has the input's memory format. See :func:`ops.conv_transpose2d_gelu_group_norm`.

    Args:
        in_channels: Number of the input's channels.
        out_channels: Number of the output's channels.
        kernel_size: Size of the convolution's kernel, an int or a pair (height, width).
        stride: Stride of the convolution, an int or a pair (height, width).
        groups: Not used, as in the plain model: the convolution has one group.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_channels``.
        conv_bias: Whether ``conv_transpose`` has a bias.
        eps: Added to each variance of the GroupNorm.
        device: Device of the parameters, as for ``torch.nn.ConvTranspose2d``.
        dtype: Dtype of the parameters, as for ``torch.nn.ConvTranspose2d``.

    Example::

        layer = ops.ConvTranspose2dGeluGroupNorm(3, 16, kernel_size=3, stride=1, groups=1, num_groups=4)
        layer(torch.randn(2, 3, 32, 32))  # (2, 16, 34, 34)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int],
        groups: int,
        num_groups: int,
        *,
        conv_bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        in_channels = checks.size("in_channels", in_channels)
        out_channels = checks.size("out_channels", out_channels)
        checks.dtype(dtype)
        kernel_size, stride = convolution.pair("kernel_size", kernel_size, 1), convolution.pair("stride", stride, 1)
        num_groups, eps = checks.groups(out_channels, num_groups), checks.epsilon(eps)
        self.conv_transpose = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride=stride, bias=conv_bias, device=device, dtype=dtype
        )
        self.group_norm = nn.GroupNorm(num_groups, out_channels, eps=eps, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(batch, in_channels, height, width)``; the result has ``out_channels``."""
        conv: Any = self.conv_transpose  # whose pairs PyTorch annotates as tuples of any length
        norm = self.group_norm
        if not submodules.are_as_made(self, conv_transpose=(conv, nn.ConvTranspose2d), group_norm=(norm, nn.GroupNorm)):
            return norm(nn.functional.gelu(conv(input)))
        return functions.conv_transpose2d_gelu_group_norm(
            input,
            conv.weight,
            conv.bias,
            norm.num_groups,
            norm.weight,
            norm.bias,
            stride=conv.stride,
            padding=conv.padding,
            output_padding=conv.output_padding,
            groups=conv.groups,
            dilation=conv.dilation,
            eps=norm.eps,
        )
