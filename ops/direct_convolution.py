"""Transposed convolutions of stride 1 by the project's own kernels: z with its statistics, and both gradients.

Between the kernels images are channels_last. Contiguous ones are copied to that format a few samples at a time, and the
backward pass goes through a few samples at a time, so that nothing of the images' size is needed but z.
"""

from collections.abc import Callable, Iterator

import torch

from ops.convolution import ConvTranspose2dGeometry, memory_format
from triton_kernels.convolution import ConvolutionConfig, StrideOneConvolution, convolution
from triton_kernels.hopper import runs_hopper_kernels, takes_input
from triton_kernels.image_copy import copy_image
from triton_kernels.image_group_norm import ImageNormConfig, PartialStatistics
from triton_kernels.pointwise import Pointwise

#: Bytes of the images that are copied or differentiated at a time: many samples a launch, and yet little memory.
_BYTES_AT_ONCE = 3 * 2**26
#: Columns of the weight gradient's tiles: with 32 all taps share what is copied.
_WEIGHT_GRADIENT_COLUMNS = 32


def takes(input: torch.Tensor, geometry: ConvTranspose2dGeometry) -> bool:
    """Whether z is made here: stride 1, one group, 16-bit numbers (float32 is the library's, at its own precision)."""
    return (
        geometry.stride == (1, 1)
        and geometry.groups == 1
        and input.dtype in (torch.bfloat16, torch.float16)
        and input.shape[0] > 0
    )


def _hopper_kernels():
    """Loaded where they run, so that importing ``ops`` loads no Gluon."""
    from triton_kernels import convolution_hopper, weight_gradient_hopper

    return convolution_hopper, weight_gradient_hopper


def forward_convolution(geometry: ConvTranspose2dGeometry) -> StrideOneConvolution:
    """The transposed convolution, whose taps are reversed."""
    sizes = zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    shift = tuple(padding - (size - 1) * dilation for size, dilation, padding in sizes)
    return StrideOneConvolution(geometry.kernel_size, geometry.dilation, shift)


def _input_gradient_convolution(geometry: ConvTranspose2dGeometry) -> StrideOneConvolution:
    return StrideOneConvolution(
        geometry.kernel_size, geometry.dilation, tuple(-padding for padding in geometry.padding)
    )


def _spans(image: torch.Tensor) -> Iterator[slice]:
    """The samples, as many at a time as make ``_BYTES_AT_ONCE``."""
    samples = image.shape[0]
    count = max(1, _BYTES_AT_ONCE // (image[0].numel() * image.element_size()))
    return (slice(first, min(first + count, samples)) for first in range(0, samples, count))


def _empty_channels_last(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    images = source.flatten(2), target.flatten(2)
    copy_image(*images, ImageNormConfig.fit(*images))


def _in_channels_last(image: torch.Tensor) -> torch.Tensor:
    """The image itself where the kernels take it as it lies in memory, or a copy."""
    if takes_input(image):
        return image
    result = _empty_channels_last(image.shape, image)
    _copy(image, result)
    return result


def like_format(image: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The image in channels_last where ``other`` is, or else as it is."""
    return _in_channels_last(image) if memory_format(other) == torch.channels_last else image


def forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: ConvTranspose2dGeometry,
    activation: Pointwise,
) -> tuple[torch.Tensor, PartialStatistics]:
    """z = conv_transpose2d(input, weight, bias), channels_last, and the partial statistics of activation(z)."""
    B, in_channels, channels = *input.shape[:2], weight.shape[1]
    height, width = geometry.output_size(*input.shape[2:])
    z = _empty_channels_last((B, channels, height, width), input)
    taps = weight.flip(2, 3).permute(2, 3, 1, 0).contiguous()
    problem = forward_convolution(geometry)
    as_it_lies = takes_input(input)
    in_format = input if as_it_lies else _empty_channels_last((1, *input.shape[1:]), input)
    on_hopper = runs_hopper_kernels(input.device)
    if on_hopper:
        hopper, _ = _hopper_kernels()
    if not on_hopper or not hopper.supports(in_format, z, problem):
        config = ConvolutionConfig.fit(in_channels, channels)
        partials = PartialStatistics.empty(B, config.tiles(height * width), channels, input.device)
        convolution(input, taps, bias, problem, config, output=z, partials=partials, activation=activation)
        return z, partials
    rows, columns = hopper.tile_shape(z)
    partials = PartialStatistics.empty(B, -(-height // rows) * -(-width // columns), channels, input.device)
    for span in [slice(0, B)] if as_it_lies else _spans(input):
        hopper.convolution_hopper(
            _in_channels_last(input[span]),
            taps,
            bias,
            problem,
            output=z[span],
            partials=partials[span],
            activation=activation,
        )
    return z, partials


def backward(
    z_gradients: Callable[[slice, torch.Tensor], None],
    z: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: ConvTranspose2dGeometry,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight; None where not wanted.

    ``z_gradients(samples, target)`` writes those of z to ``target``; it is called for a few samples at a time, for all
    of them in the end.
    """
    _, hopper = _hopper_kernels()
    config = hopper.WeightGradientConfig(columns=_WEIGHT_GRADIENT_COLUMNS)
    problem = _input_gradient_convolution(geometry)
    taps = weight.permute(2, 3, 0, 1).contiguous()
    input_gradient = torch.empty_like(input, memory_format=memory_format(input)) if wanted[0] else None
    spans = list(_spans(z))
    scratch = _empty_channels_last(z[spans[0]].shape, z)
    sums = None
    for span in spans:
        z_gradient = scratch[: span.stop - span.start]
        z_gradients(span, z_gradient)
        if input_gradient is not None:
            _write_input_gradient(z_gradient, taps, problem, input_gradient[span])
        if wanted[1]:
            images = _in_channels_last(input[span]).permute(0, 2, 3, 1), z_gradient.permute(0, 2, 3, 1)
            if sums is None:
                sums = torch.empty(hopper.partials_shape(*images, geometry.kernel_size), device=input.device)
            hopper.convolution_weight_gradient(
                *images,
                sums,
                input_first=0,
                gradient_first=0,
                count=len(z_gradient),
                kernel_size=geometry.kernel_size,
                dilation=geometry.dilation,
                shift=forward_convolution(geometry).shift,
                accumulate=span.start > 0,
                config=config,
            )
    if sums is None:
        return input_gradient, None
    weight_gradient = hopper.finish(sums, *images, kernel_size=geometry.kernel_size, config=config)
    return input_gradient, weight_gradient.permute(3, 2, 0, 1).flip(2, 3).to(weight.dtype).contiguous()


def differentiates(z: torch.Tensor, input: torch.Tensor, geometry: ConvTranspose2dGeometry) -> bool:
    """Whether ``backward`` takes it: where the kernels for Hopper do; elsewhere the library's gradients are as good."""
    if not runs_hopper_kernels(z.device):
        return False
    convolution_hopper, weight_gradient_hopper = _hopper_kernels()
    in_format = _empty_channels_last((1, *input.shape[1:]), input)
    images = in_format.permute(0, 2, 3, 1), z[:1].permute(0, 2, 3, 1)
    config = weight_gradient_hopper.WeightGradientConfig(columns=_WEIGHT_GRADIENT_COLUMNS)
    return convolution_hopper.supports(
        z, in_format, _input_gradient_convolution(geometry)
    ) and weight_gradient_hopper.supports(*images, geometry.kernel_size, geometry.dilation, config)


def _write_input_gradient(
    z_gradient: torch.Tensor, taps: torch.Tensor, problem: StrideOneConvolution, target: torch.Tensor
) -> None:
    hopper, _ = _hopper_kernels()
    if hopper.supports(z_gradient, target, problem):
        hopper.convolution_hopper(z_gradient, taps, None, problem, output=target)
    else:  # rows that the copy engine cannot write
        in_format = _empty_channels_last(target.shape, target)
        hopper.convolution_hopper(z_gradient, taps, None, problem, output=in_format)
        _copy(in_format, target)
