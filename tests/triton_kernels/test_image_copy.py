"""Copies of images between memory formats, and what they round or split on the way."""

import itertools

import pytest
import torch

from tests.images import round_to_tf32
from triton_kernels.image_copy import copy_image, split_image
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.pointwise import nearest_tf32

CONFIGS = [ImageNormConfig(1, 16), ImageNormConfig(16, 8), ImageNormConfig(64, 64)]
#: Samples, channels, pixels: of no block a multiple, of all of them, single ones.
SHAPES = [(2, 5, 17), (2, 16, 32), (1, 1, 1), (2, 70, 1)]


def whole_numbers(shape, dtype):
    """-256...256, which every dtype holds exactly."""
    return torch.randint(-256, 257, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def empty(shape, dtype, format):
    """Memory of 1000s, and images of ``shape`` within it; only "strided" ones leave something of it beside."""
    B, C, S = shape
    if format == "contiguous":
        memory = torch.full((B, C, S), 1000.0, dtype=dtype)
        return memory, memory
    if format == "channels_last":
        memory = torch.full((B, S, C), 1000.0, dtype=dtype)
        return memory, memory.mT
    memory = torch.full((S + 1, B + 2, 2 * C + 1), 1000.0, dtype=dtype)
    return memory, memory[:-1, 1:-1, 1::2].permute(1, 2, 0)


FORMATS = ("contiguous", "channels_last", "strided")
#: Every shape in tiles of every config, and every format into every other: no size matters to strides.
COPIES = [
    *((shape, config, "strided", "channels_last") for shape in SHAPES for config in CONFIGS),
    *((SHAPES[0], CONFIGS[1], *formats) for formats in itertools.product(FORMATS, FORMATS)),
]
by_copy = pytest.mark.parametrize("shape, config, source_format, target_format", dict.fromkeys(COPIES), ids=str)


@by_copy
def test_every_format(shape, config, source_format, target_format):
    """All of the target is written, and nothing else."""
    values = whole_numbers(shape, torch.float32)
    _, source = empty(shape, torch.float32, source_format)
    source.copy_(values)
    memory, target = empty(shape, torch.float32, target_format)
    copy_image(source, target, config)
    assert torch.equal(target, values)
    target.fill_(1000.0)
    assert (memory == 1000.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(target_dtype, dtype):
    values = whole_numbers((2, 5, 17), dtype)
    for target_format in FORMATS:
        _, target = empty(values.shape, target_dtype, target_format)
        copy_image(values, target, CONFIGS[1])
        assert torch.equal(target, values.to(target_dtype))


def test_values_are_kept_bit_by_bit():
    """Infinities, subnormal numbers and both zeros; a NaN stays one."""
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -1e-40, 3.3e38]
    values = torch.tensor(special, dtype=torch.bfloat16).view(1, 2, 4)
    _, target = empty(values.shape, torch.bfloat16, "channels_last")
    copy_image(values, target, CONFIGS[2])
    kept = ~values.isnan()
    assert torch.equal(target.isnan(), values.isnan())
    assert torch.equal(target.contiguous().view(torch.int16)[kept], values.view(torch.int16)[kept])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_backwards(format, config):
    values = whole_numbers((2, 5, 17), torch.float32)
    memory, target = empty(values.shape, torch.float32, format)
    copy_image(values, target, config, backwards=True)
    assert torch.equal(target, values.flip(2))
    target.fill_(1000.0)
    assert (memory == 1000.0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_do(shape):
    copy_image(torch.empty(shape), torch.empty(shape), CONFIGS[0])


# Rounding and splitting


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("source_format, target_format", list(itertools.product(FORMATS, FORMATS)))
def test_rounded_on_the_way(source_format, target_format):
    values = normal(2, 5, 17)
    _, source = empty(values.shape, torch.float32, source_format)
    source.copy_(values)
    memory, target = empty(values.shape, torch.float32, target_format)
    copy_image(source, target, CONFIGS[1], nearest_tf32)
    assert torch.equal(target, round_to_tf32(values)) and not torch.equal(target, values)
    target.fill_(1000.0)
    assert (memory == 1000.0).all()


def split(values, config=CONFIGS[1], source_format="contiguous", target_format="channels_last"):
    """Both parts, with nothing written beside them."""
    _, source = empty(values.shape, torch.float32, source_format)
    source.copy_(values)
    memories, parts = zip(*(empty(values.shape, torch.bfloat16, target_format) for _ in range(2)), strict=True)
    split_image(source, *parts, config)
    results = [part.clone() for part in parts]
    for memory, part in zip(memories, parts, strict=True):
        part.fill_(1000.0)
        assert (memory == 1000.0).all()
    return results


@by_copy
def test_split_in_every_format(shape, config, source_format, target_format):
    values = normal(*shape)
    high, low = split(values, config, source_format, target_format)
    assert torch.equal(high, values.bfloat16())
    assert torch.equal(low, (values - high.float()).bfloat16())


def test_split_loses_nothing_that_counts():
    """Of any exponent: the largest numbers, which bfloat16 would round to infinity, and subnormal ones."""
    exponents = torch.arange(-149, 128)
    values = torch.cat([torch.ldexp(1 + torch.rand(277), exponents), torch.tensor([torch.finfo(torch.float32).max])])
    values = torch.cat([values, -values]).view(1, 4, -1)
    high, low = split(values)
    error = (high.double() + low.double() - values.double()).abs()
    assert (error <= 2.0**-17 * values.double().abs() + 2.0**-134).all()
    assert high.isfinite().all() and low.isfinite().all()


def test_split_of_what_is_exact():
    """Zeros, and what bfloat16 holds: nothing is left."""
    values = whole_numbers((2, 5, 17), torch.float32)
    values[0, 0, :2] = torch.tensor([0.0, -0.0])
    high, low = split(values)
    assert torch.equal(high.float(), values) and not low.any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_products_of_what_is_not_finite(value):
    """The three products that count add up to what the one product is: also with zeros and with exact numbers."""
    others = torch.tensor([1.0, -1.0, 0.0, 1 + 2.0**-12, -1 - 2.0**-12, 1 - 2.0**-12, 3e38, 1e-30])
    values = torch.full_like(others, value)
    (high, low), (other_high, other_low) = (
        [part.float() for part in split(each[None, None])] for each in (values, others)
    )
    products = high * other_high + high * other_low + low * other_high
    assert torch.allclose(products, (values * others)[None, None], equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_split(shape):
    split_image(torch.empty(shape), *torch.empty(2, *shape, dtype=torch.bfloat16), CONFIGS[0])
