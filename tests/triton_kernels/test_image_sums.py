"""An image's sums in one launch: accuracy beside PyTorch's GPU algorithm, what they are for compiled graphs, values."""

import pytest
import torch

from tests.triton_kernels.test_image_group_norm import FORMATS, in_format, normal
from triton_kernels.activations import SILU
from triton_kernels.chain import Chain
from triton_kernels.image_statistics import image_statistics
from triton_kernels.image_sums import image_sums
from triton_kernels.image_tiles import ImageSumsConfig, Parts
from triton_kernels.pointwise import ADD, MUL

NORM = Chain()
#: One program, and many.
PROGRAMS = (1, 64)
SIDE = 64


def by_pytorch(values):
    """Mean and rstd of groups [groups, width] as PyTorch's kernel for GPUs computes them: 512 threads' statistics
    (Welford), merged in pairs."""
    groups, width = values.shape
    lanes = values.float().reshape(groups, -1, 512)
    mean, m2 = torch.zeros(2, groups, 512).unbind()
    for count, each in enumerate(lanes.unbind(1), 1):
        away = each - mean
        mean = mean + away / count
        m2 = m2 + away * (each - mean)
    count = width / 512
    while mean.shape[1] > 1:
        (mean, other), (m2, other_m2) = mean.chunk(2, 1), m2.chunk(2, 1)
        away = other - mean
        mean, m2, count = mean + away * 0.5, m2 + other_m2 + away * away * (count / 2), 2 * count
    return mean[:, 0], (m2[:, 0] / width + 1e-5).rsqrt()


def image(kind):
    """[1, 8, pixels]: those whose statistics are lost by sums about the first pixel, or about a first tile's mean."""
    values = normal(1, 8, SIDE * SIDE)
    if kind == "corner of 30":
        values[..., 0] = 30.0
    elif kind == "corner of 0, rest 1":
        values = 1 + 0.1 * values
        values[..., 0] = 0.0
    elif kind == "corner of 0, rest 10":
        values = 10 + 0.01 * values
        values[..., 0] = 0.0
    elif kind == "corner of 1000":
        values[..., 0] = 1000.0
    elif kind == "7 pixels of 1000":
        values[..., 5 : SIDE * SIDE : SIDE * SIDE // 7] = 1000.0
    elif kind == "first tile of 30":
        values[..., :512] *= 30.0
    elif kind == "-3.3, first pixel 1000":
        values = torch.full_like(values, -3.3)
        values[..., 0] = 1000.0
    elif kind == "corner of 1e5, bfloat16":
        values[..., 0] = 1e5
        values = values.bfloat16()
    elif kind == "corner of 3e4, float16":
        values[..., 0] = 3e4
        values = values.half()
    elif kind == "mean of 1e4":
        values += 1e4
    return values


KINDS = (
    "normal", "corner of 30", "corner of 0, rest 1", "corner of 0, rest 10", "corner of 1000", "7 pixels of 1000",
    "first tile of 30", "-3.3, first pixel 1000", "corner of 1e5, bfloat16", "corner of 3e4, float16", "mean of 1e4",
)  # fmt: skip


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("format", FORMATS[:2])
@pytest.mark.parametrize("kind", KINDS)
def test_as_accurate_as_pytorch_on_a_gpu(kind, format, programs):
    """The normalised values, which the error of mean and rstd is in."""
    values = image(kind)
    config = ImageSumsConfig(8, 512, programs=programs) if format == "channels_last" else ImageSumsConfig(1, 4096)
    ours = image_statistics(in_format(values, format), 1, 1e-5, config, NORM, (None, None))
    exact = values.double().flatten()
    truth = (exact - exact.mean()) * (exact.var(correction=0) + 1e-5).rsqrt()

    def error(mean, rstd):
        return (((exact.float() - mean) * rstd).double() - truth).norm() / truth.norm()

    theirs = error(*by_pytorch(values.view(1, -1)))
    assert error(*ours) <= 2 * theirs + 1e-7


LARGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("format", FORMATS[:2])
@pytest.mark.parametrize("shape", [(2, 8, 35), (2, 12, 1000), (2, 6, 1)], ids=str)
@pytest.mark.parametrize("kind", ["3e19", "lowest", "1e35", "1e30"])
def test_large_values(kind, shape, format, programs):
    """Finite, as PyTorch's: places of a tile without a pixel are no values, and no sum is larger than its parts."""
    values = {
        "3e19": lambda: 3e19 + 3e17 * normal(*shape),
        "lowest": lambda: torch.full(shape, -LARGE),
        "1e35": lambda: 1e35 * normal(*shape).sign(),
        "1e30": lambda: 1e30 + 1e20 * normal(*shape),
    }[kind]()
    config = ImageSumsConfig(8, 16, programs=programs)
    mean, rstd = image_statistics(in_format(values, format), 2, 1e-5, config, NORM, (None, None))
    exact = values.double().view(4, -1)
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=1e-6 * exact.abs().max().item())
    assert rstd.isfinite().all()
    if kind == "lowest":
        assert (mean == -LARGE).all() and (rstd > 300).all()
    if kind == "3e19" and shape[2] == 35:  # of 6000 values, the sum of squares is infinite, as in PyTorch
        torch.testing.assert_close(rstd.double(), exact.var(1, correction=0).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("programs", PROGRAMS)
def test_not_finite_values(programs, value):
    """They make their own group NaN and no other."""
    values = normal(2, 8, 100)
    values[1, 5, 70] = value
    config = ImageSumsConfig(8, 16, programs=programs)
    statistics = image_statistics(in_format(values, "channels_last"), 4, 1e-5, config, NORM, (None, None))
    is_lost = statistics[1].isnan().view(2, 4)
    assert is_lost[1, 2] and is_lost.sum() == 1


#: (samples, groups, group size, pixels) and tiles: groups of several blocks, blocks of several groups, a group of one
#: channel, one pixel, more samples than a kernel adds up.
SUMS = [
    ((2, 3, 5, 17), ImageSumsConfig(4, 16, programs=1000)),
    ((3, 4, 8, 49), ImageSumsConfig(32, 8, programs=1)),
    ((2, 2, 70, 49), ImageSumsConfig(16, 8, programs=64)),
    ((1, 20, 1, 129), ImageSumsConfig(16, 64)),
    ((2, 4, 24, 1), ImageSumsConfig(64, 16)),
    ((130, 2, 2, 5), ImageSumsConfig(4, 8)),
]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]


@pytest.mark.parametrize("dtype, gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, config", SUMS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_what_compiled_graphs_take(format, size, config, dtype, gradient_dtype):
    """centre and scale, k2 and k3 make the result and the gradients, with vectors of channels and of samples."""
    samples, num_groups, group_size, pixels = size
    C = num_groups * group_size
    chain = Chain(after=(SILU, MUL.with_operand("sample")))
    values = (2 * normal(samples, C, pixels) + 3).to(dtype)
    gradient = normal(samples, C, pixels, seed=1).to(gradient_dtype)
    weight, bias = normal(2, C, seed=2)
    factor = normal(samples, C, seed=3)
    operands = (weight, bias, None, factor)
    image = in_format(values, format)
    of_channels = torch.full((4, samples, C), torch.nan)
    statistics = image_statistics(image, num_groups, 1e-5, config, chain, operands, channels=of_channels[:2].unbind())
    of_weight, of_bias, of_factor = (torch.full_like(each, torch.nan) for each in (weight.to(dtype), bias, factor))
    gradients = (of_weight, of_bias, None, of_factor)
    others = in_format(gradient, FORMATS[(FORMATS.index(format) + 1) % 3])
    image_sums(others, image, statistics, chain, operands, gradients, config, channels=of_channels[2:].unbind())

    leaves = [each.double().requires_grad_() for each in (values, weight, bias, factor)]
    z = torch.group_norm(leaves[0], num_groups, *leaves[1:3])
    truths = torch.autograd.grad(torch.nn.functional.silu(z) * leaves[3][..., None], leaves, gradient.double())
    centre, scale, k2, k3 = of_channels.double()[..., None]
    centred = values.double() - centre
    z = centred * scale + bias.double()[:, None]
    s = torch.sigmoid(z)
    d = gradient.double() * factor.double()[..., None] * s * (1 + z * (1 - s))
    results = (d * scale + centred * k2 + k3, gradients[0], gradients[1], gradients[3])
    for result, truth in zip(results, truths, strict=True):
        tolerance = 2e-5 + (torch.finfo(result.dtype).eps if result.dtype.itemsize == 2 else 0)
        assert (result.double() - truth).norm() <= tolerance * truth.norm() + 1e-6


@pytest.mark.parametrize("dtype, gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, config", SUMS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("of_samples", [False, True])
def test_what_is_added_right_before(of_samples, format, size, config, dtype, gradient_dtype):
    """Its gradient is the sum of the input's over the pixels, and over the samples where these share it."""
    samples, num_groups, group_size, pixels = size
    C = num_groups * group_size
    step = ADD.with_operand("sample") if of_samples else ADD
    chain = Chain(before=(SILU, step), after=(SILU,))
    assert chain.added_last == 1 and NORM.added_last == 0
    values = (2 * normal(samples, C, pixels) + 3).to(dtype)
    gradient = normal(samples, C, pixels, seed=1).to(gradient_dtype)
    weight, bias = normal(2, C, seed=2)
    added = normal(samples, C, seed=3) if of_samples else normal(1, C, seed=3)[0]
    operands = (None, added, weight, bias, None)
    image = in_format(values, format)
    statistics = image_statistics(image, num_groups, 1e-5, config, chain, operands)
    found = torch.full_like(added, torch.nan)
    of_bias = torch.full_like(bias, torch.nan)
    image_sums(gradient, image, statistics, chain, operands, (None, None, None, of_bias, None), config, added=found)

    leaves = [each.double().requires_grad_() for each in (added, bias)]
    x = torch.nn.functional.silu(values.double()) + leaves[0].view(-1, C, 1)
    z = torch.group_norm(x, num_groups, weight.double(), leaves[1])
    truths = torch.autograd.grad(torch.nn.functional.silu(z), leaves, gradient.double())
    # What it is made of, of which only differences are left.
    parts = torch.autograd.grad(
        torch.nn.functional.silu(torch.group_norm(x, num_groups, weight.double(), bias.double())), x, gradient.double()
    )[0]
    for result, truth in zip((found, of_bias), truths, strict=True):
        assert (result.double() - truth).norm() <= 2e-5 * max(truth.norm(), parts.norm()) + 1e-6


def test_parts_cover_an_image_once():
    """Whole groups where a block holds them; programs are as many as asked for, or fewer."""
    for shape, group_size, config in (
        ((2, 320, 4096), 10, ImageSumsConfig(64, 64)),
        ((1, 40, 100), 40, ImageSumsConfig(16, 32)),
        ((64, 2048, 49), 64, ImageSumsConfig(64, 16)),
        ((3, 7, 5), 1, ImageSumsConfig(64, 64)),
    ):
        parts = Parts.of(shape, group_size, config)
        assert parts.groups * group_size <= parts.block_c * parts.blocks
        assert (parts.units - 1) * parts.groups < shape[1] // group_size <= parts.units * parts.groups
        assert (parts.strips - 1) * parts.tiles * parts.block_s < shape[2] <= parts.strips * parts.tiles * parts.block_s
        assert parts.strips == 1 or shape[0] * parts.units * parts.of_unit <= config.programs
    assert Parts.of((2, 320, 4096), 10, ImageSumsConfig(64, 64)).groups == 4  # rows of 80 bytes
