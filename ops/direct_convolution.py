"""Convolutions of stride 1 by the project's own kernels: z with its statistics, and both gradients.

A plain convolution takes the weight's taps as they are, a transposed one takes them in reverse. In the input gradients
it is the other way round.

The kernels read and write channels_last images. Contiguous images are copied to that format a few samples at a time,
and the backward pass handles a few samples at a time. So z is the only large buffer.

float32 images are taken only where PyTorch would convolve them in TF32. They are rounded to TF32 first, as cuDNN does.
For the weight gradient they are split into bfloat16 images; the product is within 2**-16 of theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton

from ops.calls import Call, as_volume
from ops.convolution import Geometry, memory_format
from triton_kernels.column_sums import column_sums
from triton_kernels.convolution_tiling import StrideOneConvolution
from triton_kernels.hopper import runs_hopper_kernels, takes_input
from triton_kernels.image_copy import copy_image, split_image
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.launch import call as do
from triton_kernels.pointwise import identity, nearest_tf32

#: Bytes of images that are copied or differentiated at a time: enough samples to fill a launch, in little memory.
_BYTES_AT_ONCE = 3 * 2**26
#: Taps that cuDNN was seen to compute in TF32 in both formats, forward and backward. For 2 x 2, 4 x 4, 5 x 5, 1 x 5
#: and 5 x 1 taps, one of the passes is in float32 in at least one format (H200).
_TF32_TAPS = (1, 1), (3, 3)
#: Nearly all problems that were measured had output channels in multiples of this. Others are not taken.
_TF32_CHANNELS = 8
#: Below these, cuDNN may convolve in float32 though TF32 is allowed, contiguous images as well as any with 1 x 1 taps.
#: Channels are those of input or output, pixels those of all samples together. (Seen on an H200 for
#: 2 x 32 x 32 pixels of 64 channels, and 8 x 128 x 128 of 8.)
_FEWEST_TF32_CHANNELS = 64
_FEWEST_TF32_PIXELS = 2**14
#: Of input and output in 16 bits, between which ours is taken to be faster than cuDNN's.
_MOST_CHANNELS = 256


def takes(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry, allow_tf32: bool) -> bool:
    """Whether z is computed here: on Hopper, at stride 1 and with one group, where that is faster than cuDNN and as
    precise. That is in 16 bits, and in float32 where PyTorch would use TF32; a plain one in float32 is cuDNN's until it
    is known where cuDNN uses TF32 for it.

    ``allow_tf32`` is PyTorch's setting when the chain was called. All else follows from the arguments, so that the fake
    and the forward pass decide alike. The backward pass is told.
    """
    if geometry.stride != (1, 1) or geometry.groups != 1 or input.shape[0] == 0:
        return False
    if input.dtype in (torch.bfloat16, torch.float16):
        return _beats_cudnn(input, weight, geometry)
    is_tf32 = geometry.transposed and allow_tf32 and input.dtype == torch.float32
    return is_tf32 and _is_tf32_in_cudnn(input, weight, geometry) and _runs_on_hopper(input, weight, geometry)


def _beats_cudnn(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether a convolution in 16 bits by the kernel for Hopper is taken to be faster than cuDNN's and a pass for its
    statistics.

    The kernel reads the whole input again for each 64 output channels; cuDNN's tiles are wider. A chain forward takes
    32 us for 56 with 64 channels (8 x 128 x 128), 154 for 170 with 128 (1 x 512 x 512), and 1.15 ms with 8 to 32, where
    cuDNN's convolution alone takes 2.52 (128 x 256 x 256; 3 x 3 taps, bf16, H200). On an H100 it takes 200 us for 210
    from 128 to 256 channels (8 x 128 x 128, 3 x 3 taps), 94 for 107 from 256 to 64 (16 x 128 x 128, 1 x 1), and 106 for
    88 from 1024 to 128 (16 x 64 x 64, 1 x 1).
    """
    return max(weight.shape[:2]) <= _MOST_CHANNELS and _runs_on_hopper(input, weight, geometry)


def _is_tf32_in_cudnn(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether PyTorch certainly convolves these float32 images in TF32, where its setting allows that.

    PyTorch does not use cuDNN for an output padding as large as the stride, which any is here. Nor does it for dilated
    taps in contiguous images, where convolutions must be deterministic.
    """
    is_plain = geometry.output_padding == (0, 0) and geometry.dilation == (1, 1)
    if not is_plain or geometry.kernel_size not in _TF32_TAPS or weight.shape[1] % _TF32_CHANNELS != 0:
        return False
    # For 1 x 1 taps, cuDNN may compute the input gradient in float32 in either format (128 to 64 channels, up to 1024
    # pixels: an error of 1.6e-4 instead of 3.3e-4, H200).
    if memory_format(input) == torch.channels_last and geometry.kernel_size != (1, 1):
        return True
    samples, _, height, width = input.shape
    channels, pixels = min(weight.shape[:2]), samples * height * width
    return channels >= _FEWEST_TF32_CHANNELS and pixels >= _FEWEST_TF32_PIXELS


def _runs_on_hopper(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether the Hopper kernel takes the images once they are copied. Their height and width do not matter for
    that."""
    images = (_empty_channels_last((1, each, 1, 1), input) for each in (input.shape[1], geometry.channels(weight)))
    on_hopper = runs_hopper_kernels(input.device)
    return on_hopper and _hopper_kernels()[0].supports(*images, forward_convolution(geometry))


def _hopper_kernels():
    """Imported at the first use, so that importing ``ops`` does not import Gluon."""
    from triton_kernels import convolution_hopper, weight_gradient_hopper

    return convolution_hopper, weight_gradient_hopper


def _taps(weight: torch.Tensor, is_reversed: bool) -> torch.Tensor:
    """The weight [A, B, KH, KW] as the kernels take it: [KH, KW, B, A] with its taps reversed, or [KH, KW, A, B]."""
    height, width = weight.shape[2:]
    channels = weight.shape[1::-1] if is_reversed else weight.shape[:2]
    taps = torch.empty((height, width, *channels), dtype=weight.dtype, device=weight.device)
    _copy(weight, _in_weights_order(taps, is_reversed), _rounding(weight), backwards=is_reversed)
    return taps


def _in_weights_order(taps: torch.Tensor, is_reversed: bool) -> torch.Tensor:
    """A view [A, B, KH, KW] of taps, which stay reversed."""
    return taps.permute(3, 2, 0, 1) if is_reversed else taps.permute(2, 3, 0, 1)


def forward_convolution(geometry: Geometry) -> StrideOneConvolution:
    """What the kernels compute of ``_taps(weight, geometry.transposed)``."""
    return _convolution(geometry, geometry.transposed)


def _input_gradient_convolution(geometry: Geometry) -> StrideOneConvolution:
    """What they compute of ``_taps(weight, not geometry.transposed)`` and z's gradient."""
    return _convolution(geometry, not geometry.transposed)


def _convolution(geometry: Geometry, is_reversed: bool) -> StrideOneConvolution:
    sizes = zip(geometry.kernel_size, geometry.dilation, geometry.padding, strict=True)
    rows, columns = (pad - (size - 1) * step if is_reversed else -pad for size, step, pad in sizes)
    return StrideOneConvolution(geometry.kernel_size, geometry.dilation, (rows, columns))


def _spans(image: torch.Tensor) -> Iterator[slice]:
    """The samples in slices of at most ``_BYTES_AT_ONCE`` bytes."""
    samples = image.shape[0]
    count = max(1, _BYTES_AT_ONCE // (image.shape[1:].numel() * image.element_size()))
    return (slice(first, min(first + count, samples)) for first in range(0, samples, count))


def _empty_channels_last(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def _copy(source: torch.Tensor, target: torch.Tensor, transform=identity, *, backwards: bool = False) -> None:
    images = as_volume(source), as_volume(target)
    copy_image(*images, ImageNormConfig.fit(*images), transform, backwards=backwards)


def in_format(image: torch.Tensor, wanted: torch.memory_format) -> torch.Tensor:
    """The image in this memory format, copied where it is in another."""
    if memory_format(image) == wanted:
        return image
    result = torch.empty_like(image, memory_format=wanted)
    _copy(image, result)
    return result


def in_channels_last(image: torch.Tensor, transform=identity) -> torch.Tensor:
    """The image itself where the kernels can read it as it lies, else a channels_last copy, transformed."""
    if transform is identity and takes_input(image):
        return image
    result = _empty_channels_last(image.shape, image)
    _copy(image, result, transform)
    return result


def _rounding(image: torch.Tensor) -> triton.runtime.JITFunction:
    """What the operands of ``convolution_hopper`` need: float32 ones are rounded to TF32."""
    return nearest_tf32 if image.dtype == torch.float32 else identity


def _split(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The channels_last bfloat16 images whose sum is a float32 image; a 16-bit image is returned alone."""
    if image.dtype != torch.float32:
        return (in_channels_last(image),)
    parts = tuple(_empty_channels_last(image.shape, image, torch.bfloat16) for _ in range(2))
    source, high, low = map(as_volume, (image, *parts))
    split_image(source, high, low, ImageNormConfig.fit(source, high, low))
    return parts


def forward(
    call: Call, input: torch.Tensor, weight: torch.Tensor, operands: Sequence[Any]
) -> tuple[torch.Tensor, PartialStatistics | None]:
    """z, the convolution with its biases, channels_last, and the partial statistics of what the norm takes.

    There are none where a tensor comes between: its tiles are others.
    """
    geometry, chain, bias = call.geometry, call.chain, operands[0]
    B, channels = input.shape[0], geometry.channels(weight)
    height, width = geometry.output_size(*input.shape[2:])
    z = _empty_channels_last((B, channels, height, width), input)
    taps, problem, transform = _taps(weight, geometry.transposed), forward_convolution(geometry), _rounding(input)
    as_it_lies = transform is identity and takes_input(input)
    kernels, _ = _hopper_kernels()
    partials: PartialStatistics | None = None
    if any(step.operand in ("sample", "tensor") for step in chain.activation):
        biases = len(chain.biases)
        operands = (*operands[:biases], *[None] * (len(operands) - biases))
    else:
        image = input if as_it_lies else _empty_channels_last((1, *input.shape[1:]), input)
        places = kernels.partial_count(image, z, problem)
        partials = PartialStatistics.empty(B, places, channels, input.device)
    for span in [slice(0, B)] if as_it_lies else _spans(input):
        of_span = None if partials is None else partials[span]
        image = in_channels_last(input[span], transform)
        kernels.convolution_hopper(
            image, taps, bias, problem, output=z[span], partials=of_span, chain=chain, operands=operands
        )
    return z, partials


def backward(
    z_gradients: Callable[[slice, torch.Tensor, triton.runtime.JITFunction], None],
    z: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight; None where not wanted.

    ``z_gradients(samples, target, stored)`` writes the gradients of z to ``target``, after it applied the pointwise
    function ``stored`` to each. It is called for a few samples at a time, in the end for all of them.
    """
    convolutions, weight_gradients = _hopper_kernels()
    problem, taps = _input_gradient_convolution(geometry), _taps(weight, not geometry.transposed)
    input_gradient = torch.empty_like(input, memory_format=memory_format(input)) if wanted[0] else None
    spans = list(_spans(z))
    scratch = _empty_channels_last((spans[0].stop, *z.shape[1:]), z)
    by_pixels = input.permute(0, 2, 3, 1), z.permute(0, 2, 3, 1)
    sums_shape = weight_gradients.partials_shape(*by_pixels, geometry.kernel_size)
    sums = torch.empty(sums_shape, dtype=torch.float32, device=input.device)
    for span in spans:
        z_gradient = scratch[: span.stop - span.start]
        z_gradients(span, z_gradient, _rounding(z))
        if input_gradient is not None:
            target = output = input_gradient[span]
            if not convolutions.supports(z_gradient, target, problem):
                # Rows that TMA cannot write, or taps too far apart for a contiguous image's tiles.
                output = _empty_channels_last(target.shape, target)
            convolutions.convolution_hopper(z_gradient, taps, None, problem, output=output)
            if output is not target:
                _copy(output, target)
        if not wanted[1]:
            continue
        inputs, gradients = ([part.permute(0, 2, 3, 1) for part in _split(each)] for each in (input[span], z_gradient))
        # Of split images, all products but that of the two low parts: it is below the precision of the sum.
        for i, j in ((0, 0), (0, 1), (1, 0))[: 2 * len(inputs) - 1]:
            weight_gradients.convolution_weight_gradient(
                inputs[i],
                gradients[j],
                sums,
                input_first=0,
                gradient_first=0,
                count=len(z_gradient),
                kernel_size=geometry.kernel_size,
                dilation=geometry.dilation,
                shift=forward_convolution(geometry).shift,
                accumulate=span.start > 0 or i + j > 0,
            )
    if not wanted[1]:
        return input_gradient, None
    shapes = (each.shape for each in by_pixels)
    of_taps = do(weight_gradients.by_taps, column_sums(sums), *shapes, kernel_size=geometry.kernel_size)
    weight_gradient = torch.empty_like(weight, memory_format=memory_format(weight))
    _copy(_in_weights_order(of_taps, geometry.transposed), weight_gradient, backwards=geometry.transposed)
    return input_gradient, weight_gradient


def differentiates(z: torch.Tensor, input: torch.Tensor, geometry: Geometry) -> bool:
    """Whether ``backward`` takes what ``forward`` did. Else PyTorch's gradients are as good."""
    convolution_hopper, weight_gradient_hopper = _hopper_kernels()
    in_format = _empty_channels_last((1, *input.shape[1:]), input)
    dtype = torch.bfloat16 if z.dtype == torch.float32 else z.dtype  # of what float32 images are split into
    images = (_empty_channels_last((1, *each.shape[1:]), each, dtype).permute(0, 2, 3, 1) for each in (input, z))
    return convolution_hopper.supports(
        z, in_format, _input_gradient_convolution(geometry)
    ) and weight_gradient_hopper.supports(*images, geometry.kernel_size, geometry.dilation)
