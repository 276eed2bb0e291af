"""L19: transposed 2-D convolution → GELU → GroupNorm, forward and backward."""

from typing import Any

import torch

from autotune_configs import image_norm_config
from ops import checks, convolution, direct_convolution, operators, precision, reference, submodules, tensor_parallel
from ops.chain import as_vectors, in_reference
from ops.convolution import ConvTranspose2dGeometry, memory_format
from ops.group_norm import gelu_called
from ops.replay import repeated_eagerly
from triton_kernels.column_sums import add_up, float32_partials
from triton_kernels.image_group_norm import image_group_norm, image_group_norm_backward
from triton_kernels.image_statistics import image_statistics
from triton_kernels.pointwise import GELU, GELU_OF, Pointwise, identity


def _geometry(weight, stride, padding, output_padding, dilation, groups) -> ConvTranspose2dGeometry:
    """The geometry from the operators' arguments, which are checked already."""
    pairs = (weight.shape[2:], stride, padding, output_padding, dilation)
    kernel_size, stride, padding, output_padding, dilation = map(tuple, pairs)
    return ConvTranspose2dGeometry(kernel_size, stride, padding, output_padding, dilation, groups)


def _activation(approximate: str, dtype: torch.dtype) -> Pointwise:
    """GELU, as precise as values of this dtype are."""
    function = gelu_called(approximate)
    return GELU_OF[dtype] if function is GELU else function


def _forward(input, weight, conv_bias, norm_weight, norm_bias, num_groups, *arguments):
    *geometry, approximate, eps, allow_tf32, training = arguments
    geometry = _geometry(weight, *geometry)
    is_direct = direct_convolution.takes(input, weight, geometry, allow_tf32)
    # cuDNN would add the bias in a separate pass, so the norm's passes add it.
    options = {
        "activation": _activation(approximate, input.dtype),
        "input_bias": None if is_direct else conv_bias,
    }
    if is_direct:
        z, partials = direct_convolution.forward(input, weight, conv_bias, geometry, options["activation"])
        statistics = partials.merge(num_groups, z.shape[2:].numel(), eps)
    else:
        z = convolution.conv_transpose2d(input, weight, geometry)
        values = z.flatten(2)
        config = image_norm_config("image_statistics", values.shape[1] // num_groups, values)
        statistics = image_statistics(values, num_groups, eps, config, **options)
    output = torch.empty_like(z, memory_format=memory_format(input))
    values, result = z.flatten(2), output.flatten(2)
    config = image_norm_config("image_group_norm", values.shape[1] // num_groups, values, result)
    image_group_norm(values, statistics, norm_weight, norm_bias, config, output=result, **options)
    return (output, z, statistics) if training else (output, z.new_empty(0), statistics.new_empty(0))


def _fake(input, weight, conv_bias, norm_weight, norm_bias, num_groups, *arguments):
    *geometry, _, _, allow_tf32, training = arguments
    geometry = _geometry(weight, *geometry)
    B, C = input.shape[0], weight.shape[1] * geometry.groups
    output = input.new_empty(B, C, *geometry.output_size(*input.shape[2:]))
    output = torch.empty_like(output, memory_format=memory_format(input))
    if not training:
        return output, output.new_empty(0), output.new_empty(0, dtype=torch.float32)
    is_direct = direct_convolution.takes(input, weight, geometry, allow_tf32)
    z = torch.empty_like(output, memory_format=torch.channels_last if is_direct else memory_format(input))
    return output, z, output.new_empty(2, B * num_groups, dtype=torch.float32)


def _backward_kernels(gradient, input, weight, z, statistics, conv_bias, norm_weight, num_groups, *arguments):
    """The gradients of input, weight, conv_bias, norm_weight and norm_bias, empty where not wanted."""
    *geometry, approximate, is_direct, input_wanted, weight_wanted = arguments[:-3]
    geometry, wanted = _geometry(weight, *geometry), (input_wanted, weight_wanted)
    z = z.contiguous(memory_format=memory_format(z))
    statistics = statistics.contiguous()
    values = z.flatten(2)
    B, C, S = values.shape
    config = image_norm_config("image_group_norm_backward", C // num_groups, values)
    strips = config.strips(S)
    vector_gradients = operators.empty_vectors(z, C, arguments[-3:])
    sums = float32_partials(vector_gradients, B * strips, C, z.device)
    strip_sums = [each.view(B, strips, C) for each in sums]

    def z_gradients(samples, target, stored=identity):
        # Copied first where z is channels_last and it is not: passes over mixed formats take longer.
        dy = direct_convolution.like_format(gradient[samples], z)
        image_group_norm_backward(
            dy.flatten(2),
            values[samples],
            statistics.view(2, B, num_groups)[:, samples].flatten(1),
            norm_weight,
            None,
            config,
            input_gradient=target.flatten(2),
            bias_sums=strip_sums[0][samples],
            norm_sums=[each[samples] for each in strip_sums[1:]],
            activation=_activation(approximate, z.dtype),
            input_bias=conv_bias,
            stored=stored,
        )

    if is_direct and direct_convolution.differentiates(z, input, geometry):
        gradients = direct_convolution.backward(z_gradients, z, input, weight, geometry, wanted)
    else:
        z_gradient = torch.empty_like(z)
        z_gradients(slice(0, B), z_gradient)
        gradients = convolution.conv_transpose2d_gradients(z_gradient, input, weight, geometry, wanted)
    if B > 1 and strips > 1:  # a sample a program first, as there may be many strips
        sums = [torch.empty(B, C, dtype=torch.float32, device=z.device) for _ in sums]
        add_up(strip_sums, sums)
    add_up(sums, vector_gradients)
    return tuple(operators.or_empty(input, *gradients, *vector_gradients))


def _backward_fake(gradient, input, weight, z, *arguments):
    gradients = (
        torch.empty_like(tensor, memory_format=memory_format(tensor)) if wanted else tensor.new_empty(0)
        for tensor, wanted in zip((input, weight), arguments[-5:-3], strict=True)
    )
    return *gradients, *operators.or_empty(z, *operators.empty_vectors(z, z.shape[1], arguments[-3:]))


_GEOMETRY = "int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups"

_operator = operators.define(
    "conv_transpose2d_gelu_group_norm(Tensor input, Tensor weight, Tensor? conv_bias, Tensor? norm_weight,"
    f" Tensor? norm_bias, int num_groups, {_GEOMETRY}, str approximate, float eps, bool allow_tf32,"
    " bool training)"
    " -> (Tensor output, Tensor z, Tensor statistics)",
    _forward,
    _fake,
)
_backward_operator = operators.define(
    "conv_transpose2d_gelu_group_norm_backward(Tensor gradient, Tensor input, Tensor weight, Tensor z,"
    " Tensor statistics, Tensor? conv_bias, Tensor? norm_weight, int num_groups,"
    f" {_GEOMETRY}, str approximate, bool is_direct, bool input_wanted, bool weight_wanted,"
    " ScalarType? conv_bias_dtype, ScalarType? norm_weight_dtype, ScalarType? norm_bias_dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernels,
    _backward_fake,
)


def _setup_context(ctx, inputs, outputs):
    input, weight, conv_bias, norm_weight, norm_bias, ctx.num_groups, *arguments, _ = inputs
    *ctx.geometry, ctx.approximate, _, allow_tf32 = arguments
    # Asked once: what a hook makes of a saved tensor may lie in memory otherwise.
    ctx.is_direct = direct_convolution.takes(input, weight, _geometry(weight, *ctx.geometry), allow_tf32)
    ctx.dtypes = operators.dtypes_of(conv_bias, norm_weight, norm_bias)
    # Where z is made directly, it has the bias already.
    ctx.save_for_backward(input, weight, *outputs[1:], None if ctx.is_direct else conv_bias, norm_weight)


def _backward(ctx, gradient):
    wanted, dtypes = ctx.needs_input_grad[:2], operators.wanted_dtypes(ctx, 2, 3, 4)
    gradients = _backward_operator(
        gradient,
        *ctx.saved_tensors,
        ctx.num_groups,
        *ctx.geometry,
        ctx.approximate,
        ctx.is_direct,
        *wanted,
        *dtypes,
    )
    return *operators.where_wanted(gradients, (*wanted, *dtypes)), *[None] * 10


_differentiable = operators.differentiable(_operator, _setup_context, _backward)


@repeated_eagerly
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
    differ.

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
    vectors = {"conv_bias": conv_bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    checks.tensors({"input": input, "weight": weight}, vectors)
    geometry = convolution.check_conv_transpose2d(input, weight, stride, padding, output_padding, dilation, groups)
    out_channels = weight.shape[1] * geometry.groups
    checks.vectors(out_channels, **vectors)
    num_groups = checks.groups(out_channels, num_groups)
    eps = checks.epsilon(eps)
    gelu_called(approximate)
    if tensor_parallel.is_distributed(input, weight, conv_bias, norm_weight, norm_bias):
        return tensor_parallel.on_shards(
            conv_transpose2d_gelu_group_norm,
            tensor_parallel.CONVOLUTION,
            {"input": input, "weight": weight, **vectors},
            num_groups,
            **geometry.arguments,
            approximate=approximate,
            eps=eps,
        )
    dtype = precision.autocast_dtype(input)
    input, weight = input.to(dtype), weight.to(dtype)
    conv_bias, norm_weight, norm_bias = as_vectors(conv_bias, norm_weight, norm_bias)
    if not precision.runs_kernels(input):
        result = in_reference(
            reference.conv_transpose2d_gelu_group_norm,
            input,
            weight,
            conv_bias,
            num_groups,
            norm_weight,
            norm_bias,
            **geometry.arguments,
            approximate=approximate,
            eps=eps,
        )
        return result.contiguous(memory_format=memory_format(input))
    return _differentiable(
        input,
        weight,
        conv_bias,
        norm_weight,
        norm_bias,
        num_groups,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.dilation,
        geometry.groups,
        approximate,
        eps,
        precision.convolutions_allow_tf32(),
        precision.needs_gradient(input, weight, conv_bias, norm_weight, norm_bias),
    )


class ConvTranspose2dGeluGroupNorm(torch.nn.Module):
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
        self.conv_transpose = torch.nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride=stride, bias=conv_bias, device=device, dtype=dtype
        )
        self.group_norm = torch.nn.GroupNorm(num_groups, out_channels, eps=eps, device=device, dtype=dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the chain to ``input`` ``(batch, in_channels, height, width)``; the result has ``out_channels``."""
        conv: Any = self.conv_transpose  # whose pairs PyTorch annotates as tuples of any length
        norm = self.group_norm
        if not submodules.are_as_made(
            self, conv_transpose=(conv, torch.nn.ConvTranspose2d), group_norm=(norm, torch.nn.GroupNorm)
        ):
            return norm(torch.nn.functional.gelu(conv(input)))
        return conv_transpose2d_gelu_group_norm(
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
