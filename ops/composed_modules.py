"""The modules that take steps of ``ops.pointwise``: a layer, a norm or both, with steps before and after the norm."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from ops import checks, convolution
from ops import composed_functions as composed
from ops.layers import Fused, OfImages, OfRows, Steps, convolution_and_norm, linear_and_norm
from ops.pointwise import Step

Tensor = torch.Tensor


class LinearGroupNorm(OfRows):
    """Linear layer, steps, GroupNorm over the last dimension, and more steps: ``after(norm(before(linear(input))))``.

    Its parameters are ``linear.weight``, ``linear.bias``, ``norm.weight`` and ``norm.bias``, and those among the steps:
    ``before.0`` or ``after.1``, by their places. See :func:`ops.linear_group_norm`.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_features``.
        before: Steps of ``ops.pointwise`` between the layer and the norm. A ``torch.nn.Parameter`` in one is learned.
        after: Steps that follow the norm.
        bias: Whether the linear layer has a bias.
        eps: Added to each variance of the norm.
        device: Device of the layers' parameters, as for ``torch.nn.Linear``.
        dtype: Dtype of the layers' parameters, as for ``torch.nn.Linear``.

    Example::

        layer = ops.LinearGroupNorm(64, 128, num_groups=32, after=(ops.pointwise.silu(),))
        layer(torch.randn(16, 64))  # (16, 128)
    """

    _layers = {"linear": nn.Linear, "norm": nn.GroupNorm, "before": Steps, "after": Steps}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        *,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        linear, norm = linear_and_norm(nn.GroupNorm, in_features, out_features, num_groups, bias, eps, device, dtype)
        self.linear, self.before, self.norm, self.after = linear, Steps("before", before), norm, Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        return composed.linear_group_norm(input, *self._operands(), **self._steps(), eps=self.norm.eps)


class LinearLayerNorm(OfRows):
    """Linear layer, steps, LayerNorm over the last dimension, and more steps: ``after(norm(before(linear(input))))``.

    Its parameters and arguments are those of :class:`ops.LinearGroupNorm`, without ``num_groups``. See
    :func:`ops.linear_layer_norm`.

    Example::

        layer = ops.LinearLayerNorm(64, 128, after=(ops.pointwise.gelu(),))
        layer(torch.randn(16, 64))  # (16, 128)
    """

    _layers = {"linear": nn.Linear, "norm": nn.LayerNorm, "before": Steps, "after": Steps}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        linear, norm = linear_and_norm(nn.LayerNorm, in_features, out_features, None, bias, eps, device, dtype)
        self.linear, self.before, self.norm, self.after = linear, Steps("before", before), norm, Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        linear, norm = self.linear, self.norm
        return composed.linear_layer_norm(
            input, linear.weight, linear.bias, norm.weight, norm.bias, **self._steps(), eps=norm.eps
        )


class Conv2dGroupNorm(OfImages):
    """2-D convolution, steps, GroupNorm and more steps: ``after(norm(before(conv(input))))``.

    Its parameters are ``conv.weight``, ``conv.bias``, ``norm.weight`` and ``norm.bias``, and those among the steps, as
    in :class:`ops.LinearGroupNorm`. See :func:`ops.conv2d_group_norm`.

    Args:
        in_channels: Number of the input's channels.
        out_channels: Number of the output's channels.
        kernel_size: Size of the convolution's kernel, an int or a pair (height, width).
        num_groups: Number of groups of the GroupNorm. It must divide ``out_channels``.
        stride: As for ``torch.nn.Conv2d``, as are the next three.
        padding: As ``stride``, or ``"same"`` or ``"valid"``.
        dilation: As ``stride``.
        groups: Number of groups of the convolution.
        before: Steps of ``ops.pointwise`` between the convolution and the norm.
        after: Steps that follow the norm.
        bias: Whether the convolution has a bias.
        eps: Added to each variance of the norm.
        device: Device of the layers' parameters.
        dtype: Dtype of the layers' parameters.

    Example::

        layer = ops.Conv2dGroupNorm(3, 16, 3, num_groups=4, padding=1, after=(ops.pointwise.silu(),))
        layer(torch.randn(2, 3, 32, 32))  # (2, 16, 32, 32)
    """

    _layers = {"conv": nn.Conv2d, "norm": nn.GroupNorm, "before": Steps, "after": Steps}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_groups: int,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        conv, norm = convolution_and_norm(
            nn.Conv2d,
            in_channels,
            out_channels,
            num_groups,
            bias,
            eps,
            device,
            dtype,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        self.conv, self.before, self.norm, self.after = conv, Steps("before", before), norm, Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        if self.conv.padding_mode != "zeros":  # set on the layer afterwards
            return self._one_by_one(input)
        options = {name: getattr(self.conv, name) for name in ("stride", "padding", "dilation", "groups")}
        options |= self._steps()
        return composed.conv2d_group_norm(input, *self._operands(), **options, eps=self.norm.eps)


class ConvTranspose2dGroupNorm(OfImages):
    """Transposed 2-D convolution, steps, GroupNorm and more steps: ``after(norm(before(conv_transpose(input))))``.

    Its parameters are ``conv_transpose.weight``, ``conv_transpose.bias``, ``norm.weight`` and ``norm.bias``, and those
    among the steps, as in :class:`ops.LinearGroupNorm`. See :func:`ops.conv_transpose2d_group_norm`.

    Args:
        in_channels: Number of the input's channels.
        out_channels: Number of the output's channels.
        kernel_size: Size of the convolution's kernel, an int or a pair (height, width).
        num_groups: Number of groups of the GroupNorm. It must divide ``out_channels``.
        stride: As for ``torch.nn.ConvTranspose2d``, as are the next four.
        padding: As ``stride``.
        output_padding: As ``stride``.
        groups: Number of groups of the convolution.
        dilation: As ``stride``.
        before: Steps of ``ops.pointwise`` between the convolution and the norm.
        after: Steps that follow the norm.
        bias: Whether the convolution has a bias.
        eps: Added to each variance of the norm.
        device: Device of the layers' parameters.
        dtype: Dtype of the layers' parameters.

    Example::

        layer = ops.ConvTranspose2dGroupNorm(3, 16, 3, num_groups=4, stride=2, after=(ops.pointwise.silu(),))
        layer(torch.randn(2, 3, 32, 32))  # (2, 16, 65, 65)
    """

    _layers = {"conv_transpose": nn.ConvTranspose2d, "norm": nn.GroupNorm, "before": Steps, "after": Steps}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        num_groups: int,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        dilation: int | tuple[int, int] = 1,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        conv_transpose, norm = convolution_and_norm(
            nn.ConvTranspose2d,
            in_channels,
            out_channels,
            num_groups,
            bias,
            eps,
            device,
            dtype,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
        )
        self.conv_transpose, self.before, self.norm, self.after = (
            conv_transpose,
            Steps("before", before),
            norm,
            Steps("after", after),
        )

    def _fused(self, input: Tensor) -> Tensor:
        options = {name: getattr(self.conv_transpose, name) for name in convolution.DEFAULTS} | self._steps()
        return composed.conv_transpose2d_group_norm(input, *self._operands(), **options, eps=self.norm.eps)


class Linear(Fused, nn.Linear):
    """A ``torch.nn.Linear`` that is followed by steps, with its arguments and its parameters ``weight`` and ``bias``.

    Args:
        after: Steps of ``ops.pointwise`` that follow the layer. A ``torch.nn.Parameter`` in one is learned.

    Example::

        layer = ops.Linear(64, 128, after=(ops.pointwise.silu(), ops.pointwise.mul(2.0)))
        layer(torch.randn(16, 64))  # (16, 128)
    """

    _layers = {"after": Steps}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        after: Sequence[Step] = (),
    ):
        sizes = checks.size("in_features", in_features, 0), checks.size("out_features", out_features)
        checks.dtype(dtype)
        super().__init__(*sizes, bias=bias, device=device, dtype=dtype)
        self.after = Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        return composed.linear(input, self.weight, self.bias, **self._steps())

    def _one_by_one(self, input: Tensor) -> Tensor:
        z = nn.Linear.forward(self, input)
        return self.after(z.reshape(-1, z.shape[-1])).view(z.shape)


class GroupNorm(Fused, nn.GroupNorm):
    """A ``torch.nn.GroupNorm`` between steps, with its arguments and its parameters ``weight`` and ``bias``.

    Groups of one value are 0 before ``bias``, in a batch of one too, where PyTorch's raises an error.

    Args:
        before: Steps of ``ops.pointwise`` before the norm. A ``torch.nn.Parameter`` in one is learned.
        after: Steps that follow it.

    Example::

        layer = ops.GroupNorm(32, 128, after=(ops.pointwise.silu(),))
        layer(torch.randn(2, 128, 16, 16))  # (2, 128, 16, 16)
    """

    _layers = {"before": Steps, "after": Steps}

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
    ):
        num_channels, eps = checks.size("num_channels", num_channels), checks.epsilon(eps)
        num_groups = checks.groups(num_channels, num_groups)
        checks.dtype(dtype)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.before, self.after = Steps("before", before), Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        return composed.group_norm(input, self.num_groups, self.weight, self.bias, **self._steps(), eps=self.eps)

    def _one_by_one(self, input: Tensor) -> Tensor:
        return self.after(nn.GroupNorm.forward(self, self.before(input)))


class LayerNorm(Fused, nn.LayerNorm):
    """A ``torch.nn.LayerNorm`` between steps, with its arguments and its parameters ``weight`` and ``bias``.

    Args:
        before: Steps of ``ops.pointwise`` before the norm. A ``torch.nn.Parameter`` in one is learned.
        after: Steps that follow it.

    Example::

        layer = ops.LayerNorm(128, after=(ops.pointwise.gelu(),))
        layer(torch.randn(16, 128))  # (16, 128)
    """

    _layers = {"before": Steps, "after": Steps}

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
    ):
        shape, eps = list(checks.shape("normalized_shape", normalized_shape)), checks.epsilon(eps)
        checks.dtype(dtype)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.before, self.after = Steps("before", before), Steps("after", after)

    def _fused(self, input: Tensor) -> Tensor:
        return composed.layer_norm(input, self.normalized_shape, self.weight, self.bias, **self._steps(), eps=self.eps)

    def _one_by_one(self, input: Tensor) -> Tensor:
        rows = -1, math.prod(self.normalized_shape)
        normalized = nn.LayerNorm.forward(self, self.before(input.reshape(rows)).view(input.shape))
        return self.after(normalized.view(rows)).view(input.shape)
