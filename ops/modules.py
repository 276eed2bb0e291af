"""The chains as modules, with the parameters of the plain models."""

from collections.abc import Sequence

import torch
from torch import nn

from ops import checks, convolution, functions
from ops.layers import Fused, OfImages, OfRows, convolution_and_norm, linear_and_norm


class _WithBias(Fused):
    """A chain that has a bias beside its layers' own."""

    bias: nn.Parameter

    def reset_parameters(self) -> None:
        """Draw ``bias`` from the standard normal distribution; the layers reset their own parameters."""
        if self.bias is not None:
            nn.init.normal_(self.bias)


class LinearHardtanhMishGroupNorm(_WithBias, OfRows):
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

    _layers = {"gemm": nn.Linear, "groupnorm": nn.GroupNorm, "hardtanh": nn.Hardtanh}

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
        self.gemm, norm = linear_and_norm(
            nn.GroupNorm, in_features, out_features, num_groups, linear_bias, eps, device, dtype
        )
        shape = checks.shape("bias_shape", bias_shape)
        if not checks.is_vector(shape, self.gemm.out_features):
            raise ValueError(f"bias_shape must be ({self.gemm.out_features},), got {shape}")
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.hardtanh = nn.Hardtanh()
        self.groupnorm = norm
        self.reset_parameters()

    def _before(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.mish(self.hardtanh(values if self.bias is None else values + self.bias.view(-1)))

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        operands = self._operands()
        bias = self.bias if self.bias is None or self.bias.ndim == 1 else self.bias.view(-1)
        return functions.linear_hardtanh_mish_group_norm(
            input,
            *operands[:2],
            bias,
            *operands[2:],
            min_val=self.hardtanh.min_val,
            max_val=self.hardtanh.max_val,
            eps=self.groupnorm.eps,
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

    _layers = {"gemm": nn.Linear, "group_norm": nn.GroupNorm}

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
        self.gemm, self.group_norm = linear_and_norm(
            nn.GroupNorm, in_features, out_features, num_groups, linear_bias, eps, device, dtype
        )
        shape = checks.shape("bias_shape", bias_shape)
        if not checks.is_channel_axis(shape):
            raise ValueError(f"bias_shape must be (1, channels, 1, 1), got {shape}")
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def _one_by_one(self, input: torch.Tensor) -> torch.Tensor:
        minimum = torch.min(self.group_norm(self.gemm(input)), dim=1, keepdim=True)[0]
        return minimum if self.bias is None else minimum + self.bias

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        return functions.linear_group_norm_min(input, *self._operands(), self.bias, eps=self.group_norm.eps)


class LinearGroupNormHardtanh(OfRows):
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

    _layers = {"gemm": nn.Linear, "group_norm": nn.GroupNorm, "hardtanh": nn.Hardtanh}

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
        self.gemm, self.group_norm = linear_and_norm(
            nn.GroupNorm, in_features, out_features, num_groups, linear_bias, eps, device, dtype
        )
        least, most = checks.real("hardtanh_min", hardtanh_min), checks.real("hardtanh_max", hardtanh_max)
        if not least < most:  # torch.nn.Hardtanh asserts it
            raise ValueError(
                f"hardtanh_min must be less than hardtanh_max, got {hardtanh_min} for hardtanh_max={hardtanh_max}"
            )
        self.hardtanh = nn.Hardtanh(min_val=least, max_val=most)

    def _after(self, values: torch.Tensor) -> torch.Tensor:
        return self.hardtanh(values)

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        least, most = self.hardtanh.min_val, self.hardtanh.max_val
        return functions.linear_group_norm_hardtanh(
            input, *self._operands(), min_val=least, max_val=most, eps=self.group_norm.eps
        )


class ConvTranspose2dGeluGroupNorm(OfImages):
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

    _layers = {"conv_transpose": nn.ConvTranspose2d, "group_norm": nn.GroupNorm}

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
        self.conv_transpose, self.group_norm = convolution_and_norm(
            nn.ConvTranspose2d,
            in_channels,
            out_channels,
            num_groups,
            conv_bias,
            eps,
            device,
            dtype,
            kernel_size=kernel_size,
            stride=stride,
        )

    def _before(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(values)

    def _fused(self, input: torch.Tensor) -> torch.Tensor:
        geometry = {name: getattr(self.conv_transpose, name) for name in convolution.DEFAULTS}
        return functions.conv_transpose2d_gelu_group_norm(input, *self._operands(), **geometry, eps=self.group_norm.eps)
