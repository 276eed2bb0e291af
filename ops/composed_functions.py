"""The functions that take pointwise functions as arguments."""

from collections.abc import Sequence

import torch

from ops import convolution
from ops.family import CONV2D_GROUP_NORM, CONV_TRANSPOSE2D_GROUP_NORM, GROUP_NORM, LINEAR, LINEAR_GROUP_NORM, in_rows
from ops.pointwise import Step

Tensor = torch.Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, after: Sequence[Step] = ()) -> Tensor:
    """Apply a linear layer and pointwise functions: ``input @ weight.T + bias``, then ``after``.

    float32 products have float32's accuracy, unless PyTorch is set to allow TF32
    (``torch.set_float32_matmul_precision``). Under autocast the layer computes in, and returns, autocast's dtype.

    Args:
        input: ``(*, in_features)``, float32, bfloat16, float16 or float64.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None for no bias.
        after: Steps of ``ops.pointwise`` that follow the layer.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return LINEAR.apply((input, weight, bias), (), (), after)


def linear_group_norm(
    input: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """Linear layer, pointwise functions, GroupNorm and more pointwise functions, fused.

    The GroupNorm is over the last dimension; each row is one sample. All tensors have one dtype (float32, bfloat16,
    float16 or float64) and are on one device. Under autocast their dtypes may differ. Groups of one value are 0 before
    ``norm_bias``, in a batch of one too, where PyTorch raises an error.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        before: Steps of ``ops.pointwise`` between the layer and the norm.
        after: Steps that follow the norm.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.

    Example::

        from ops import pointwise as p

        input, weight, residual = torch.randn(16, 64), torch.randn(128, 64), torch.randn(16, 128)
        ops.linear_group_norm(input, weight, None, 8, before=(p.mish(),), after=(p.mul(0.5), p.add(residual)))
    """
    return LINEAR_GROUP_NORM.apply(
        (input, weight, linear_bias), (norm_weight, norm_bias), before, after, num_groups, eps
    )


def linear_layer_norm(
    input: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """Linear layer, pointwise functions, LayerNorm over the last dimension and more pointwise functions, fused.

    It is :func:`ops.linear_group_norm` with one group (Ba et al., Layer Normalization, 2016).

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        norm_weight: ``(out_features,)``, the scale of the LayerNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the LayerNorm, or None.
        before: Steps of ``ops.pointwise`` between the layer and the norm.
        after: Steps that follow the norm.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return LINEAR_GROUP_NORM.apply((input, weight, linear_bias), (norm_weight, norm_bias), before, after, 1, eps)


def conv2d_group_norm(
    input: Tensor,
    weight: Tensor,
    conv_bias: Tensor | None,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """2-D convolution, pointwise functions, GroupNorm and more pointwise functions.

    All tensors have one dtype (float32, bfloat16, float16 or float64) and are on one device. Under autocast their
    dtypes may differ. Groups of one value are 0 before ``norm_bias``, in a batch of one too, where PyTorch raises an
    error.

    Args:
        input: ``(batch, in_channels, height, width)``, contiguous or channels_last.
        weight: ``(out_channels, in_channels // groups, kernel_height, kernel_width)``.
        conv_bias: ``(out_channels,)`` of the convolution, or None for no bias.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_channels``.
        norm_weight: ``(out_channels,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_channels,)``, the shift of the GroupNorm, or None.
        stride: As in ``torch.nn.functional.conv2d``, an int or a pair (height, width).
        padding: As ``stride``, or ``"valid"`` for none, or ``"same"`` for an output of the input's size, which needs
            stride 1.
        dilation: As ``stride``.
        groups: Number of groups of the convolution.
        before: Steps of ``ops.pointwise`` between the convolution and the norm.
        after: Steps that follow the norm.
        eps: Added to each variance. Not negative.

    Returns:
        ``(batch, out_channels, output_height, output_width)``, in the input's dtype, or autocast's, and in its memory
        format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    padding, extra = convolution.in_numbers(weight, stride, padding, dilation)
    row, geometry = (input, weight, conv_bias), (stride, padding, extra, groups, dilation)
    return CONV2D_GROUP_NORM.apply(row, (norm_weight, norm_bias), before, after, num_groups, eps, geometry)


def conv_transpose2d_group_norm(
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
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """Transposed 2-D convolution, pointwise functions, GroupNorm and more pointwise functions.

    All tensors have one dtype (float32, bfloat16, float16 or float64) and are on one device. Under autocast their
    dtypes may differ. Groups of one value are 0 before ``norm_bias``, in a batch of one too, where PyTorch raises an
    error.

    Args:
        input: ``(batch, in_channels, height, width)``, contiguous or channels_last.
        weight: ``(in_channels, out_channels // groups, kernel_height, kernel_width)``.
        conv_bias: ``(out_channels,)`` of the convolution, or None for no bias.
        num_groups: Number of groups of the GroupNorm. It must divide ``out_channels``.
        norm_weight: ``(out_channels,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_channels,)``, the shift of the GroupNorm, or None.
        stride: As in ``torch.nn.functional.conv_transpose2d``, an int or a pair (height, width).
        padding: As ``stride``.
        output_padding: As ``stride``. Smaller than the stride or the dilation.
        groups: Number of groups of the convolution.
        dilation: As ``stride``.
        before: Steps of ``ops.pointwise`` between the convolution and the norm.
        after: Steps that follow the norm.
        eps: Added to each variance. Not negative.

    Returns:
        ``(batch, out_channels, output_height, output_width)``, in the input's dtype, or autocast's, and in its memory
        format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    row, geometry = (input, weight, conv_bias), (stride, padding, output_padding, groups, dilation)
    return CONV_TRANSPOSE2D_GROUP_NORM.apply(row, (norm_weight, norm_bias), before, after, num_groups, eps, geometry)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """Normalise groups of channels, as ``torch.nn.functional.group_norm`` does, between pointwise functions.

    Each sample's channels are divided into ``num_groups`` groups of neighbours. A group is normalised with its mean and
    its biased variance, over its channels and all further dimensions (Wu and He, Group Normalization, 2018). Both are
    computed in float32, the mean first. ``weight`` and ``bias`` then scale and shift each channel.

    Groups of one value are 0 before ``bias``. In a batch of one, PyTorch raises an error for them, in larger ones it
    does not; here the batch makes no difference.

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        before: Steps of ``ops.pointwise`` before the norm.
        after: Steps that follow it.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return GROUP_NORM.apply((input, None), (weight, bias), before, after, num_groups, eps)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the last dimensions, as ``torch.nn.functional.layer_norm`` does, between pointwise functions.

    It is a group norm of rows with one group. A row's channels are the elements of ``normalized_shape``, so a vector
    among the steps has one value for each of them.

    Args:
        input: ``(*, *normalized_shape)``, float32, bfloat16, float16 or float64.
        normalized_shape: The last dimensions, which are normalised together. An int stands for one.
        weight: A scale of the shape ``normalized_shape``, or None.
        bias: A shift of the shape ``normalized_shape``, or None.
        before: Steps of ``ops.pointwise`` before the norm.
        after: Steps that follow it.
        eps: Added to each variance. Not negative.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return in_rows(group_norm, input, normalized_shape, weight, bias, before, after, eps)
