"""Norm passes over images of any strides: partial statistics and their merge, chains and their gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.images import round_to_tf32
from triton_kernels import image_statistics as statistics_kernels
from triton_kernels.chain import Chain
from triton_kernels.image_group_norm import (
    add_up_sums,
    empty_sums,
    image_group_norm,
    image_group_norm_backward,
)
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.image_sums import image_sums
from triton_kernels.image_tiles import ImageNormConfig, ImageSumsConfig
from triton_kernels.pointwise import (
    GELU,
    GELU_TANH,
    HARDTANH,
    identity,
    nearest_tf32,
)

#: A strip of the backward pass is a tile, several, or more than there are.
CONFIGS = [ImageNormConfig(4, 16, strip=1), ImageNormConfig(16, 8, strip=2), ImageNormConfig(2, 64)]
#: (samples, groups, group size, pixels): the last tile of the 17 pixels holds a single one.
SIZES = [(2, 3, 5, 17), (3, 2, 1, 33), (1, 4, 6, 1), (2, 1, 20, 129)]
FORMATS = ("contiguous", "channels_last", "strided")
ACTIVATIONS = {
    "identity": ((), lambda z: z),
    "gelu": ((GELU,), F.gelu),
    "gelu_tanh": ((GELU_TANH,), lambda z: F.gelu(z, approximate="tanh")),
}
FINALS = {"no final": (), "hardtanh": (HARDTANH,)}
#: The norm alone, and with a function on either side. They are without a contraction, and so without its bias.
NORM = Chain()
GELU_NORM, GELU_NORM_HARDTANH = Chain(before=(GELU,)), Chain(before=(GELU,), after=(HARDTANH,))
BOUNDS = (-0.75, 1.5)


def sums_config(config):
    """The same tiles, shared by a program for each, by some programs, or one for each unit."""
    programs = {1: 1000, 2: 24}.get(config.strip, 1)
    return ImageSumsConfig(config.block_c, config.block_s, programs=programs)


def image_statistics(values, num_groups, eps, config, chain, operands, **options):
    return statistics_kernels.image_statistics(values, num_groups, eps, sums_config(config), chain, operands, **options)


def gradients_of(gradient, values, statistics, chain, operands, gradients, config, *, input_gradient, stored=identity):
    """Both launches of the backward pass, and the sums of what is before the norm."""
    arguments = statistics, chain, operands
    means = image_sums(gradient, values, *arguments, gradients, sums_config(config))
    sums = empty_sums(chain, gradients, values, config)
    image_group_norm_backward(
        gradient, values, statistics, means, chain, operands, config,
        input_gradient=input_gradient, sums=sums, stored=stored,
    )  # fmt: skip
    add_up_sums(chain, sums, gradients)


by_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_format(values, format):
    """The same [B, C, S] in other memory; NaN lies between what is "strided"."""
    if format == "contiguous":
        return values.clone(memory_format=torch.contiguous_format)
    if format == "channels_last":
        return values.mT.clone(memory_format=torch.contiguous_format).mT
    B, C, S = values.shape
    memory = values.new_full((S, B + 1, 2 * C + 1), torch.nan)
    view = memory[:, 1:, 1::2].permute(1, 2, 0)
    view.copy_(values)
    return view


def operands_of(chain, weight=None, bias=None, *biases):
    """One a step, for chains of the functions above."""
    before = (*biases, *(None for _ in chain.activation))
    return (*before, weight, bias, *(BOUNDS for _ in chain.after))


def statistics_of(values, num_groups, eps, config, chain=NORM):
    return image_statistics(values, num_groups, eps, config, chain, operands_of(chain))


def assert_statistics_match(statistics, exact, *, rtol=2e-6, atol=1e-6, eps=1e-5):
    """``exact`` are the groups' values [B * groups, width] in float64."""
    mean, rstd = statistics.double()
    torch.testing.assert_close(mean, exact.mean(1), rtol=1e-6, atol=atol)
    torch.testing.assert_close(rstd, (exact.var(1, correction=0) + eps).rsqrt(), rtol=rtol, atol=0)


#: Every pair of a size, a config and a format.
STATISTICS = [(size, config, FORMATS[(i + j) % 3]) for i, size in enumerate(SIZES) for j, config in enumerate(CONFIGS)]


@pytest.mark.parametrize("size, config, format", STATISTICS, ids=str)
def test_statistics(size, config, format):
    samples, num_groups, group_size, pixels = size
    values = normal(samples, num_groups * group_size, pixels, seed=pixels) + 0.5
    for eps in (1e-5, 0.25):
        statistics = statistics_of(in_format(values, format), num_groups, eps, config)
        assert_statistics_match(statistics, values.double().view(samples * num_groups, -1), eps=eps)


def test_statistics_of_many_parts():
    """More than are merged at a time: each pixel of 64 groups of a channel is a part, whose means differ."""
    config = ImageSumsConfig(64, 1, num_warps=1, programs=64)
    values = in_format(normal(1, 64, 40) + torch.arange(40.0), "channels_last")
    statistics = statistics_kernels.image_statistics(values, 64, 1e-5, config, NORM, operands_of(NORM))
    assert_statistics_match(statistics, values[0].double())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_statistics_of_activated_values(name):
    """What lies past the last channel and pixel is activated too, and must not be counted."""
    activation, function = ACTIVATIONS[name]
    values = normal(2, 12, 100)
    statistics = statistics_of(values, 4, 1e-5, CONFIGS[1], Chain(before=activation))
    assert_statistics_match(statistics, function(values.double()).view(8, -1), rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("offset, spread", [(1e3, 1e-2), (-3e6, 1.0), (1e4, 1.0)], ids=str)
@by_config
def test_values_far_from_zero(config, offset, spread):
    """Means are rounded to float32, and the deviation may be as wrong: at 1e3 that is 3e-5.

    E[x^2] - E[x]^2 would be wrong by the rounding of the square.
    """
    values = normal(2, 6, 201) * spread + offset
    exact = values.double().view(4, -1)
    rounding = torch.finfo(torch.float32).eps / 2 * abs(offset)
    statistics = statistics_of(values, 2, 1e-5, config)
    assert_statistics_match(statistics, exact, rtol=4e-6 + rounding / spread, atol=rounding)


def test_means_that_differ_between_channels_and_tiles():
    """Nearly all of the variance is that of the partial means."""
    values = normal(1, 6, 64) / 100 + 100 * torch.arange(6.0)[:, None] + 30 * (torch.arange(64) // 16)
    assert_statistics_match(statistics_of(values, 2, 1e-5, CONFIGS[0]), values.double().view(2, -1))


@pytest.mark.parametrize("pixels", [77, 1023])
@pytest.mark.parametrize("value", [0.0, 0.1, -12345.678, 1000.3])
@by_config
def test_constant_groups(config, value, pixels):
    """They stay their norm's bias: 1/sqrt(eps) = 316 must have nothing to multiply."""
    values = torch.full((1, 6, pixels), value)
    statistics = statistics_of(values, 2, 1e-5, config)
    output = torch.full_like(values, torch.nan)
    operands = operands_of(NORM, None, torch.full((6,), 0.25))
    image_group_norm(values, statistics, NORM, operands, config, output=output)
    assert (output == 0.25).all()


def test_partial_statistics():
    """Of each channel in each tile: the counts, the means and the sums of centred squares."""
    values = normal(2, 3, 20)
    partials = PartialStatistics.empty(2, 2, 3, values.device)
    for tile, part in enumerate(values.split(16, dim=2)):
        partials.counts[:, tile] = part.shape[2]
        partials.means[:, tile] = part.mean(2)
        partials.m2s[:, tile] = part.var(2, correction=0) * part.shape[2]
    for num_groups in (1, 3):
        merged = partials.merge(num_groups, 1e-5)
        assert_statistics_match(merged, values.double().view(2 * num_groups, -1))
        torch.testing.assert_close(merged, statistics_of(values, num_groups, 1e-5, CONFIGS[0]))
    one = partials[1:]
    assert torch.equal(one.merge(3, 1e-5), partials.merge(3, 1e-5).view(2, 2, 3)[:, 1])


def exact_results(values, gradient, num_groups, weight, bias, function, final):
    """The result and the gradients of the input, its channels' sums, the weight and the bias, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in (values, weight, bias)]
    output = torch.group_norm(function(leaves[0]), num_groups, *leaves[1:])
    output = F.hardtanh(output, *BOUNDS) if final else output
    input_gradient, *sums = torch.autograd.grad(output, leaves, gradient.double())
    return output.detach(), input_gradient, input_gradient.sum((0, 2)), *sums


def our_results(
    values,
    gradient,
    num_groups,
    weight,
    bias,
    config,
    output_format="contiguous",
    result_format="contiguous",
    *,
    name="gelu",
    final="hardtanh",
    form=torch.float32,
    input_bias=None,
    stored=identity,
):
    """As ``exact_results``; every result is NaN before it is written."""
    B, C, S = values.shape
    chain = Chain("conv_transpose2d", before=ACTIVATIONS[name][0], after=FINALS[final]).of_dtype(form)
    operands = operands_of(chain, weight, bias, input_bias)
    statistics = image_statistics(values, num_groups, 1e-5, config, chain, operands)
    poison = torch.full((B, C, S), torch.nan, dtype=values.dtype)
    output, input_gradient = in_format(poison, output_format), in_format(poison, result_format)
    image_group_norm(values, statistics, chain, operands, config, output=output)
    wanted = torch.full((3, C), torch.nan).unbind()
    gradients = (wanted[0], *(None for _ in chain.activation), *wanted[1:], *(None for _ in chain.after))
    options = {"input_gradient": input_gradient, "stored": stored}
    gradients_of(gradient, values, statistics, chain, operands, gradients, config, **options)
    return output, input_gradient, *wanted


def assert_all_close(results, truths, tolerance):
    names = ("output", "input_gradient", "bias_sums", "weight_sums", "shift_sums")
    for name, result, truth in zip(names, results, truths, strict=True):
        torch.testing.assert_close(
            result.double(), truth, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def problem(size):
    samples, num_groups, group_size, pixels = size
    channels = num_groups * group_size
    values, gradient = normal(2, samples, channels, pixels, seed=pixels)
    weight, bias = normal(2, channels, seed=1)
    return values, gradient, num_groups, weight, bias


#: Both functions in tiles of every shape, and every pair of functions: these see one element at a time.
FUNCTIONS_IN_TILES = [
    *((size, config, "gelu", "hardtanh") for size in SIZES for config in CONFIGS),
    *((SIZES[0], CONFIGS[1], name, final) for name in ACTIVATIONS for final in FINALS),
]


@pytest.mark.parametrize("size, config, name, final_name", dict.fromkeys(FUNCTIONS_IN_TILES), ids=str)
def test_against_autograd(size, config, name, final_name):
    arguments = problem(size)
    results = our_results(*arguments, config, name=name, final=final_name)
    assert_all_close(results, exact_results(*arguments, ACTIVATIONS[name][1], FINALS[final_name]), 1e-4)


#: Four tensors in three formats, so that any two of them meet in all nine pairs (an orthogonal array).
FOUR_FORMATS = [
    tuple(FORMATS[k % 3] for k in (i, j, i + j, i + 2 * j)) for i, j in itertools.product(range(3), range(3))
]


@pytest.mark.parametrize("input_format, gradient_format, output_format, result_format", FOUR_FORMATS)
def test_memory_formats(input_format, gradient_format, output_format, result_format):
    """Any in, any out."""
    values, gradient, *vectors = problem((2, 3, 5, 17))
    truths = exact_results(values, gradient, *vectors, F.gelu, HARDTANH)
    values, gradient = in_format(values, input_format), in_format(gradient, gradient_format)
    results = our_results(values, gradient, *vectors, CONFIGS[1], output_format, result_format)
    assert_all_close(results, truths, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_dtypes(dtype):
    """Read as they are, computed in float32, rounded once; the sums are of what was not yet rounded."""
    values, gradient, num_groups, weight, bias = problem((2, 2, 8, 65))
    arguments = *(t.to(dtype) for t in (values, gradient)), num_groups, weight.to(dtype), bias.to(dtype)
    results = our_results(*arguments, CONFIGS[0], "channels_last", final="no final", form=torch.float16)
    truths = exact_results(*arguments, F.gelu, None)
    assert results[0].dtype == results[1].dtype == dtype
    for result, truth in zip(results[:2], truths[:2], strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=0.501 * torch.finfo(dtype).eps, atol=2e-5)
    for result, truth in zip(results[2:], truths[2:], strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["identity", "gelu"])
def test_input_bias(name):
    """Added before the activation, in float32; what lies past the last pixel stays out of the sums."""
    function = ACTIVATIONS[name][1]
    values, gradient, num_groups, weight, bias = problem((2, 3, 5, 17))
    input_bias = normal(15, seed=2)

    def shifted(z):
        return function(z + input_bias.double()[:, None])

    truths = exact_results(values, gradient, num_groups, weight, bias, shifted, HARDTANH)
    arguments = (values, gradient, num_groups, weight, bias, CONFIGS[1])
    results = our_results(*arguments, "contiguous", "channels_last", name=name, input_bias=input_bias)
    assert_all_close(results, truths, 1e-4)


@pytest.mark.parametrize("absent", ["weight", "bias", "both"])
def test_without_vectors(absent):
    values, gradient, num_groups, weight, bias = problem((2, 3, 5, 17))
    ones, zeros = torch.ones_like(weight), torch.zeros_like(bias)
    weight = None if absent in ("weight", "both") else weight
    bias = None if absent in ("bias", "both") else bias
    given = (ones if weight is None else weight, zeros if bias is None else bias)
    truths = exact_results(values, gradient, num_groups, *given, F.gelu, HARDTANH)
    formats = ("contiguous", "channels_last")
    results = our_results(values, gradient, num_groups, weight, bias, CONFIGS[1], *formats)
    assert_all_close(results, truths, 1e-4)


def test_some_samples_at_a_time():
    """Slices of the statistics, of the means and of the sums of all samples: the same bits as all at once."""
    values, gradient, num_groups, weight, bias = problem((5, 3, 5, 33))
    config, (B, C, S) = CONFIGS[1], values.shape
    chain = Chain("conv_transpose2d", before=(GELU,))
    operands = operands_of(chain, weight, bias, None)
    statistics = image_statistics(values, num_groups, 1e-5, config, chain, operands)
    none = [None] * len(operands)
    means = image_sums(gradient, values, statistics, chain, operands, none, sums_config(config))

    def results(spans):
        output, input_gradient = torch.full((2, B, C, S), torch.nan)
        sums = [torch.full((B, config.strips(S), C), torch.nan), None]
        for span in spans:
            of_groups = [each.view(2, B, num_groups)[:, span].flatten(1) for each in (statistics, means)]
            arguments = (chain, operands, config)
            image_group_norm(values[span], of_groups[0], *arguments, output=output[span])
            of_span = [None if each is None else each[span] for each in sums]
            options = {"input_gradient": input_gradient[span], "sums": of_span}
            image_group_norm_backward(gradient[span], values[span], *of_groups, *arguments, **options)
        return output, input_gradient, *(each for each in sums if each is not None)

    at_once = results([slice(0, B)])
    for some, all in zip(results([slice(0, 2), slice(2, 4), slice(4, 5)]), at_once, strict=True):
        assert not some.isnan().any() and torch.equal(some, all)


@pytest.mark.parametrize("result_format", FORMATS)
def test_stored_function(result_format):
    """Of what is stored alone: all sums are those of what was not rounded."""
    arguments = problem((2, 3, 5, 17))
    formats = ("contiguous", result_format)
    exact, rounded = (
        our_results(*arguments, CONFIGS[1], *formats, stored=function) for function in (identity, nearest_tf32)
    )
    assert torch.equal(rounded[1], round_to_tf32(exact[1])) and not torch.equal(rounded[1], exact[1])
    for i in (0, 2, 3, 4):
        assert torch.equal(rounded[i], exact[i])


def test_nothing_is_written_beside_the_results():
    """Channels and pixels past the last are no channels and pixels of a neighbour."""
    values, gradient, num_groups, weight, bias = problem((2, 3, 5, 17))
    statistics = statistics_of(values, num_groups, 1e-5, CONFIGS[1])
    for format in ("contiguous", "channels_last"):
        memory = in_format(torch.full((4, 21, 29), 7.0), format)
        target = memory[1:3, 3:18, 5:22]
        image_group_norm(values, statistics, NORM, (weight, bias), CONFIGS[1], output=target)
        assert not (target == 7.0).any()
        target.fill_(7.0)
        assert (memory == 7.0).all()


@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0)], ids=str)
def test_nothing_to_do(shape):
    empty = torch.empty(shape)
    statistics = statistics_of(empty, 3, 1e-5, CONFIGS[0])
    assert statistics.shape == (2, 3 * shape[0])
    image_group_norm(empty, statistics, NORM, (None, None), CONFIGS[0], output=empty)
    gradients = torch.full((2, 6), torch.nan).unbind()
    gradients_of(empty, empty, statistics, NORM, (None, None), gradients, CONFIGS[0], input_gradient=empty)
    for gradient in gradients:
        assert torch.equal(gradient, torch.zeros(6))


def test_tiles_and_strips_cover_all_pixels():
    config = ImageNormConfig(4, 16, strip=4)
    assert [config.tiles(pixels) for pixels in (1, 16, 17, 129)] == [1, 1, 2, 9]
    assert [config.strips(pixels) for pixels in (1, 64, 65, 129)] == [1, 1, 2, 3]


@pytest.mark.parametrize("channels, pixels", [(1, 1), (5, 3), (64, 66564), (500, 40)])
def test_tiles_are_long_where_all_pixels_are_contiguous(channels, pixels):
    """And no wider than the channels, nor longer than the pixels, but for what fills a warp."""
    contiguous = torch.empty(2, channels, pixels, device="meta")
    channels_last = torch.empty(2, pixels, channels, device="meta").mT
    long, wide = ImageNormConfig.fit(contiguous, contiguous), ImageNormConfig.fit(contiguous, channels_last)
    assert ImageNormConfig.fit(channels_last) == wide or channels == 1
    for config in (long, wide):
        assert config.block_c < 2 * channels and config.block_c * config.block_s <= 4096
    if channels == 64:
        assert long.block_s == 1024 and wide.block_c == 64
