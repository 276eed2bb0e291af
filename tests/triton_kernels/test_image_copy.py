"""Copies of images between memory formats."""

import itertools

import pytest
import torch

from triton_kernels.image_copy import copy_image
from triton_kernels.image_group_norm import ImageNormConfig

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


@pytest.mark.parametrize("source_format, target_format", list(itertools.product(FORMATS, FORMATS)))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
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


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_do(shape):
    copy_image(torch.empty(shape), torch.empty(shape), CONFIGS[0])
