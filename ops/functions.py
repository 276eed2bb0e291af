"""The public functions that name all of their chain, which has a signature of its own. ``family`` has the others."""

import torch

from ops import checks
from ops.chain import Chain
from triton_kernels import chains


def _callable(chain, names: str) -> Chain:
    """The declaration as a function, with the names of its operands; those of numbers are joined by a slash."""
    split = tuple(tuple(name.split("/")) if "/" in name else name for name in names.split())
    return Chain(chain.contraction, chain.before, chain.norm, chain.after, chain.reduction, names=split)


L94 = _callable(chains.LINEAR_HARDTANH_MISH_GROUP_NORM, "linear_bias bias min_val/max_val norm_weight norm_bias")
L75 = _callable(chains.LINEAR_GROUP_NORM_MIN, "linear_bias norm_weight norm_bias bias")
L30 = _callable(chains.LINEAR_GROUP_NORM_HARDTANH, "linear_bias norm_weight norm_bias min_val/max_val")
L19 = {
    "none": _callable(chains.CONV_TRANSPOSE2D_GELU_GROUP_NORM, "conv_bias norm_weight norm_bias"),
    "tanh": _callable(chains.CONV_TRANSPOSE2D_GELU_TANH_GROUP_NORM, "conv_bias norm_weight norm_bias"),
}
BIAS_HARDTANH_MISH = _callable(chains.BIAS_HARDTANH_MISH, "bias min_val/max_val")
GROUP_NORM_HARDTANH = _callable(chains.GROUP_NORM_HARDTANH, "weight bias min_val/max_val")
GELU_GROUP_NORM = {
    "none": _callable(chains.GELU_GROUP_NORM, "weight bias"),
    "tanh": _callable(chains.GELU_TANH_GROUP_NORM, "weight bias"),
}


def bias_hardtanh_mish(
    input: torch.Tensor, bias: torch.Tensor | None = None, *, min_val: float = -1.0, max_val: float = 1.0
) -> torch.Tensor:
    """Add a bias, then apply Hardtanh and Mish, in one kernel: ``mish(hardtanh(input + bias, min_val, max_val))``.

    ``mish(z) = z * tanh(softplus(z))`` (Misra, Mish: A Self Regularized Non-Monotonic Activation Function, 2019).

    Args:
        input: ``(*, channels)``, float32, bfloat16, float16 or float64.
        bias: ``(channels,)``, or None for no bias.
        min_val: Lower bound of the Hardtanh.
        max_val: Upper bound of the Hardtanh.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return BIAS_HARDTANH_MISH.apply((input, None, bias, None), ((min_val, max_val),))


def group_norm_hardtanh(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise groups of channels and clip: ``hardtanh(group_norm(input, ...), min_val, max_val)``.

    See :func:`ops.group_norm` for the norm.

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        min_val: Lower bound of the result.
        max_val: Upper bound of the result.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return GROUP_NORM_HARDTANH.apply((input, None, weight, bias, None), ((min_val, max_val),), num_groups, eps)


def gelu_group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    eps: float = 1e-5,
) -> torch.Tensor:
    """Apply GELU, then normalise groups of channels: ``group_norm(gelu(input), num_groups, weight, bias)``.

    See :func:`ops.group_norm` for the norm.

    ``gelu(z) = z * (1 + erf(z / sqrt(2))) / 2`` (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016).

    Args:
        input: ``(batch, channels, *)``, float32, bfloat16, float16 or float64.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        weight: ``(channels,)``, or None for no scale.
        bias: ``(channels,)``, or None for no shift.
        approximate: ``"none"``, or ``"tanh"`` for the approximation of ``torch.nn.functional.gelu``.
        eps: Added to each variance. Not negative.

    Returns:
        A tensor of the input's shape, dtype and memory format.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return GELU_GROUP_NORM[checks.approximate(approximate)].apply(
        (input, None, weight, bias, None), (), num_groups, eps
    )


def linear_hardtanh_mish_group_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, bias, Hardtanh, Mish and GroupNorm, fused.

    It computes::

        group_norm(mish(hardtanh(linear(input, weight, linear_bias) + bias)), num_groups, norm_weight, norm_bias)

    ``mish(z) = z * tanh(softplus(z))`` (Misra, Mish: A Self Regularized Non-Monotonic Activation Function, 2019). The
    GroupNorm is over the last dimension; each row is one sample. All tensors have one dtype (float32, bfloat16, float16
    or float64) and are on one device. Under autocast their dtypes may differ. Groups of one value are 0 before
    ``norm_bias``, in a batch of one too, where PyTorch raises an error.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        bias: ``(out_features,)``, added after the linear layer, or None.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        min_val: Lower bound of the Hardtanh.
        max_val: Upper bound of the Hardtanh.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return L94.apply(
        (input, weight, linear_bias, bias, norm_weight, norm_bias, None), ((min_val, max_val),), num_groups, eps
    )


def linear_group_norm_min(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, GroupNorm, minimum of each row and bias, fused.

    It computes::

        normalized = group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias)
        torch.min(normalized, dim=1, keepdim=True)[0] + bias

    Each row is one sample of the GroupNorm. A NaN in a row is its minimum. The gradient of a row goes to one column,
    the first one that holds the minimum. All tensors have one dtype (float32, bfloat16, float16 or float64) and are on
    one device. Under autocast their dtypes may differ. Groups of one value are 0 before ``norm_bias``, in a batch of
    one too, where PyTorch raises an error.

    Args:
        input: ``(batch, in_features)``.
        weight: ``(out_features, in_features)`` of the linear layer.
        linear_bias: ``(out_features,)`` of the linear layer, or None for no bias.
        num_groups: Number of groups that the channels are divided into. It must divide them.
        norm_weight: ``(out_features,)``, the scale of the GroupNorm, or None.
        norm_bias: ``(out_features,)``, the shift of the GroupNorm, or None.
        bias: ``(1, channels, 1, 1)``, with any number of channels, or None.
        eps: Added to each variance. Not negative.

    Returns:
        ``(1, channels, batch, 1)``, or ``(batch, 1)`` without a ``bias``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    return L75.apply((input, weight, linear_bias, norm_weight, norm_bias, bias), (), num_groups, eps)


def linear_group_norm_hardtanh(
    input: torch.Tensor,
    weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    min_val: float = -1.0,
    max_val: float = 1.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Linear layer, GroupNorm and Hardtanh, fused.

    It computes::

        hardtanh(group_norm(linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias), min_val, max_val)

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
        min_val: Lower bound of the result.
        max_val: Upper bound of the result.
        eps: Added to each variance. Not negative.

    Returns:
        ``(*, out_features)``, in the input's dtype, or autocast's.

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.

    Example::

        input, weight, linear_bias = torch.randn(16, 64), torch.randn(128, 64), torch.randn(128)
        ops.linear_group_norm_hardtanh(input, weight, linear_bias, 8, min_val=-2.0, max_val=2.0)  # (16, 128)
    """
    return L30.apply((input, weight, linear_bias, norm_weight, norm_bias, None), ((min_val, max_val),), num_groups, eps)


def conv_transpose2d_gelu_group_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    num_groups: int,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
    approximate: str = "none",
    eps: float = 1e-5,
) -> torch.Tensor:
    """Transposed 2-D convolution, GELU and GroupNorm, fused.

    It computes::

        group_norm(gelu(conv_transpose2d(input, weight, conv_bias, ...)), num_groups, norm_weight, norm_bias)

    ``gelu(z) = z * (1 + erf(z / sqrt(2))) / 2`` (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016). All tensors
    have one dtype (float32, bfloat16, float16 or float64) and are on one device. Under autocast their dtypes may
    differ. Groups of one value are 0 before ``norm_bias``, in a batch of one too, where PyTorch raises an error.

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
        approximate: ``"none"``, or ``"tanh"`` for the approximation of ``torch.nn.functional.gelu``.
        eps: Added to each variance. Not negative.

    Returns:
        ``(batch, out_channels, output_height, output_width)``, in the input's dtype, or autocast's, and in its memory
        format. (PyTorch's GroupNorm may return contiguous images for channels_last ones on a GPU.)

    Raises:
        TypeError: An argument has the wrong type, dtype or layout.
        ValueError: An argument has the wrong shape, device or value.
    """
    geometry = stride, padding, output_padding, groups, dilation
    row = (input, weight, conv_bias, norm_weight, norm_bias, None)
    return L19[checks.approximate(approximate)].apply(row, (), num_groups, eps, geometry)
