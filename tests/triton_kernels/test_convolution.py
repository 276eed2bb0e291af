"""The portable convolution: taps, shifts, strides and sizes of every kind, and its partial statistics."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from triton_kernels.chain import Chain
from triton_kernels.convolution import ConvolutionConfig, StrideOneConvolution, convolution
from triton_kernels.image_statistics import PartialStatistics, image_statistics
from triton_kernels.image_tiles import ImageSumsConfig
from triton_kernels.pointwise import ADD, GELU, MUL, Pointwise, add, add_gradient

SMALL = ConvolutionConfig(16, 16, 16)
CONFIGS = [SMALL, ConvolutionConfig(32, 64, 16), ConvolutionConfig()]
#: Taps (rows, columns), dilation, shift; with what they read wholly outside of the image too.
TAPS = [
    StrideOneConvolution((1, 1), (1, 1), (0, 0)),
    StrideOneConvolution((3, 3), (1, 1), (-2, -2)),
    StrideOneConvolution((2, 3), (1, 1), (0, -1)),
    StrideOneConvolution((3, 2), (2, 3), (-4, 1)),
    StrideOneConvolution((1, 5), (4, 2), (3, -3)),
    StrideOneConvolution((2, 2), (30, 1), (-1, 0)),
]
FORMATS = ("contiguous", "channels_last", "strided")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def whole_numbers(*shape, seed=0):
    """-2...2: products and sums are exact in every dtype, so results are compared bit by bit."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def in_format(values, format):
    """The same images in other memory; NaN lies between what is "strided"."""
    if format == "contiguous":
        return values.clone(memory_format=torch.contiguous_format)
    if format == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    N, C, H, W = values.shape
    memory = values.new_full((W + 1, 2 * C + 1, N + 2, 3 * H), torch.nan)
    return memory[1:, 1::2, 1:-1, ::3].permute(2, 1, 3, 0).copy_(values)


def expected(input, weight, bias, taps, size):
    """The docstring's formula in float64, tap by tap, over an image with 99 zeros around it."""
    height, width = size
    padded = F.pad(input.double(), (99, 99, 99, 99))
    result = torch.zeros(input.shape[0], weight.shape[2], height, width, dtype=torch.float64)
    for row, column in itertools.product(*map(range, taps.kernel_size)):
        y = 99 + taps.shift[0] + row * taps.dilation[0]
        x = 99 + taps.shift[1] + column * taps.dilation[1]
        seen = padded[:, :, y : y + height, x : x + width]
        result += torch.einsum("nchw,oc->nohw", seen, weight[row, column].double())
    return result if bias is None else result + bias.double()[:, None, None]


def ours(input, weight, bias, taps, size, config=SMALL, *, format="contiguous", dtype=None, **options):
    """Into images of NaN."""
    shape = (input.shape[0], weight.shape[2], *size)
    output = in_format(torch.full(shape, torch.nan, dtype=dtype or input.dtype), format)
    convolution(input, weight, bias, taps, config, output=output, **options)
    return output


def weights(taps, in_channels, out_channels, dtype=torch.float32):
    return whole_numbers(*taps.kernel_size, out_channels, in_channels, seed=1).to(dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("taps", TAPS, ids=str)
def test_taps(taps, config):
    """Of images of whichever size, also one that no tap fills."""
    input, weight, bias = whole_numbers(2, 5, 6, 7), weights(taps, 5, 9), whole_numbers(9, seed=2)
    for size in ((6, 7), (9, 4), (1, 1)):
        result = ours(input, weight, bias, taps, size, config)
        assert torch.equal(result.double(), expected(input, weight, bias, taps, size))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("in_channels, out_channels", [(1, 1), (16, 64), (37, 44), (33, 70), (3, 16)])
def test_channels(in_channels, out_channels, config):
    taps = TAPS[2]
    input, weight = whole_numbers(2, in_channels, 5, 8), weights(taps, in_channels, out_channels)
    for bias in (None, whole_numbers(out_channels, seed=2)):
        result = ours(input, weight, bias, taps, (4, 7), config)
        assert torch.equal(result.double(), expected(input, weight, bias, taps, (4, 7)))


@pytest.mark.parametrize("input_format, output_format", list(itertools.product(FORMATS, FORMATS)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_formats(dtype, input_format, output_format):
    taps, size = TAPS[3], (8, 5)
    input, weight, bias = whole_numbers(2, 6, 5, 7).to(dtype), weights(taps, 6, 9, dtype), whole_numbers(9).to(dtype)
    result = ours(in_format(input, input_format), weight, bias, taps, size, format=output_format)
    assert torch.equal(result.double(), expected(input, weight, bias, taps, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_pytorch_in_float64(dtype):
    """A transposed convolution, by its taps in reverse. Sums are float32's, and rounded once."""
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2, 20, 6, 7, generator=generator).to(dtype)
    weight = (torch.randn(20, 10, 3, 2, generator=generator) / 11).to(dtype)
    bias = torch.randn(10, generator=generator).to(dtype)
    exact = F.conv_transpose2d(input.double(), weight.double(), bias.double(), padding=(1, 0), dilation=(2, 1))
    taps = StrideOneConvolution((3, 2), (2, 1), (1 - 2 * 2, 0 - 1))
    reversed_weight = weight.flip(2, 3).permute(2, 3, 1, 0).contiguous()
    rounding = 0.0 if dtype == torch.float32 else 0.501 * torch.finfo(dtype).eps
    result = ours(input, reversed_weight, bias, taps, exact.shape[2:])
    torch.testing.assert_close(result.double(), exact, rtol=rounding, atol=3e-6)


def test_result_of_another_dtype():
    input, weight = whole_numbers(1, 3, 4, 4).to(torch.bfloat16) * 129, weights(TAPS[1], 3, 4, torch.bfloat16) * 127
    result = ours(input, weight, None, TAPS[1], (4, 4), dtype=torch.float32)
    assert torch.equal(result.double(), expected(input, weight, None, TAPS[1], (4, 4)))


def test_nothing_outside_of_the_images_is_read_or_written():
    """NaN and 7s lie around them, in memory that neighbouring pixels, channels and samples would have."""
    surroundings = torch.full((4, 9, 10, 11), torch.nan)
    input = surroundings[1:3, 2:7, 2:8, 2:9].copy_(whole_numbers(2, 5, 6, 7))
    memory = torch.full((4, 13, 12, 12), 7.5)
    output = memory[1:3, 2:11, 2:10, 2:11]
    weight = weights(TAPS[1], 5, 9)
    convolution(input, weight, None, TAPS[1], SMALL, output=output)
    assert torch.equal(output.double(), expected(input, weight, None, TAPS[1], (8, 9)))
    output.fill_(7.5)
    assert (memory == 7.5).all()


def poisoned_partials(samples, tiles, channels):
    partials = PartialStatistics.empty(samples, tiles, channels, torch.device("cpu"))
    for values in (partials.counts, partials.means, partials.m2s):
        values.fill_(torch.nan)
    return partials


#: Whole tiles, a last one of one pixel, a single pixel; a dtype and a function matter to each number alone.
PARTIAL_STATISTICS = [
    *((size, torch.bfloat16, "gelu") for size in ((6, 8), (5, 13), (1, 1), (1, 17))),
    *(((5, 13), dtype, "gelu") for dtype in (torch.float32, torch.float16)),
    ((5, 13), torch.bfloat16, "identity"),
]


@pytest.mark.parametrize("size, dtype, name", PARTIAL_STATISTICS, ids=str)
def test_partial_statistics(size, dtype, name):
    """Merged, they are those of the result as it was rounded; and the result is the same with them and without."""
    chain = Chain("conv_transpose2d", before=(GELU,) if name == "gelu" else ())
    operands = (None,) * len(chain.steps)
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2, 7, *size, generator=generator).to(dtype)
    weight = torch.randn(3, 3, 18, 7, generator=generator).to(dtype) / 8
    bias = (torch.randn(18, generator=generator) + 1).to(dtype)
    for config in (SMALL, ConvolutionConfig()):
        partials = poisoned_partials(2, config.tiles(size[0] * size[1]), 18)
        output = ours(input, weight, bias, TAPS[1], size, config, partials=partials, chain=chain, operands=operands)
        assert torch.equal(output, ours(input, weight, bias, TAPS[1], size, config))
        statistics = partials.merge(6, 1e-5)
        of_output = image_statistics(output.flatten(2), 6, 1e-5, ImageSumsConfig(8, 16), chain, operands)
        torch.testing.assert_close(statistics, of_output, rtol=3e-6, atol=1e-6)
        assert torch.equal(partials.counts.sum(1), torch.full((2,), float(size[0] * size[1])))
        exact = F.gelu(output.double()) if name == "gelu" else output.double()
        exact = exact.reshape(12, -1)
        torch.testing.assert_close(statistics[0].double(), exact.mean(1), rtol=1e-6, atol=3e-6)
        variance = exact.var(1, correction=0) + 1e-5
        torch.testing.assert_close(statistics[1].double(), variance.rsqrt(), rtol=1e-4, atol=0)


def test_partial_statistics_of_some_samples():
    """Samples at a time into slices: the same bits as all at once."""
    input, weight = whole_numbers(5, 6, 5, 7), weights(TAPS[1], 6, 9)
    tiles = SMALL.tiles(35)
    at_once, some = poisoned_partials(5, tiles, 9), poisoned_partials(5, tiles, 9)
    options = {"chain": Chain("conv_transpose2d"), "operands": (None, None, None)}
    ours(input, weight, None, TAPS[1], (5, 7), partials=at_once, **options)
    for span in (slice(0, 2), slice(2, 5)):
        ours(input[span], weight, None, TAPS[1], (5, 7), partials=some[span], **options)
    for name in ("counts", "means", "m2s"):
        assert not getattr(some, name).isnan().any()
        assert torch.equal(getattr(some, name), getattr(at_once, name))


def test_chain_with_operands():
    """All biases are added to the result; other vectors change the statistics alone."""
    chain = Chain("conv_transpose2d", before=(ADD, GELU, MUL, ADD))
    biases, vectors = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0))
    operands, added = (*biases, None, *vectors, None, None), (None, None, None, *vectors, None, None)
    input, weight = whole_numbers(2, 6, 5, 7), weights(TAPS[1], 6, 9) / 8
    partials = poisoned_partials(2, SMALL.tiles(35), 9)
    output = ours(input, weight, biases[0], TAPS[1], (5, 7), partials=partials, chain=chain, operands=operands)
    exact = expected(input, weight, biases.sum(0), TAPS[1], (5, 7))
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-6)
    of_output = image_statistics(output.flatten(2), 3, 1e-5, ImageSumsConfig(8, 16), chain, added)
    torch.testing.assert_close(partials.merge(3, 1e-5), of_output, rtol=3e-6, atol=1e-6)


def test_tensors_before_the_norm_are_refused():
    add_image = Pointwise("add", add, add_gradient, lambda value, image: value + image, "tensor")
    chain, image = Chain("conv_transpose2d", before=(add_image,)), torch.zeros(1, 9, 35)
    weight, partials = weights(TAPS[0], 6, 9), poisoned_partials(1, SMALL.tiles(35), 9)
    options = {"partials": partials, "chain": chain, "operands": (None, image, None, None)}
    with pytest.raises(NotImplementedError, match="add with a tensor"):
        ours(whole_numbers(1, 6, 5, 7), weight, None, TAPS[0], (5, 7), **options)


def test_nothing_to_do():
    for shape in ((0, 3, 4, 4), (2, 3, 0, 4)):
        weight = weights(TAPS[0], 3, 3)
        convolution(torch.empty(shape), weight, None, TAPS[0], SMALL, output=torch.empty(shape))


@pytest.mark.parametrize(
    "in_channels, out_channels, block_c, block_o", [(1, 3, 16, 16), (37, 44, 32, 64), (20, 17, 32, 32)]
)
def test_blocks_no_wider_than_the_channels(in_channels, out_channels, block_c, block_o):
    fitted = ConvolutionConfig.fit(in_channels, out_channels)
    assert fitted == dataclasses.replace(ConvolutionConfig(), block_c=block_c, block_o=block_o)
