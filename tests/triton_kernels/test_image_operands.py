"""Norm passes over images with vectors and images as operands anywhere, and which gradients are wanted."""

import pytest
import torch

from tests.triton_kernels.test_image_group_norm import (
    BOUNDS,
    CONFIGS,
    FORMATS,
    gradients_of,
    image_statistics,
    in_format,
    normal,
    our_results,
    problem,
)
from triton_kernels.chain import Chain
from triton_kernels.image_group_norm import image_group_norm
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.pointwise import (
    ADD,
    GELU,
    HARDTANH,
    MUL,
    Pointwise,
    add,
    add_gradient,
    mul,
    mul_gradient,
)

ADD_IMAGE = Pointwise("add", add, add_gradient, lambda value, image: value + image, "tensor")
MUL_IMAGE = Pointwise("mul", mul, mul_gradient, lambda value, image: value * image, "tensor")
ANYWHERE = Chain("conv_transpose2d", before=(ADD, GELU, MUL, ADD_IMAGE, ADD), after=(HARDTANH, ADD, MUL_IMAGE, MUL))


def exact_chain(chain, values, operands, num_groups, gradient):
    """The result, and the gradients of the values and of the operands that are tensors, in float64."""
    leaves = [each.double().requires_grad_() if isinstance(each, torch.Tensor) else each for each in operands]
    input = value = values.double().requires_grad_()
    known = []
    for place, (step, operand) in enumerate(zip(chain.steps, leaves, strict=True)):
        if place == len(chain.steps) - len(chain.last):
            value = torch.group_norm(value, num_groups)
        known.append(value)
        if step.earlier:
            operand = known[place - step.earlier]
        if operand is not None or not step.has_tensor:
            value = step.plain(value, operand[..., None] if step.operand in ("vector", "sample") else operand)
    tensors = [input, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    return value.detach(), *torch.autograd.grad(value, tensors, gradient.double())


def our_chain(chain, values, operands, num_groups, gradient, config, wanted=None):
    """The same from kernels. ``wanted`` operands have gradients; all that are tensors, if None."""
    channels = values.shape[1:2]  # of one value for all, sums of each channel are written
    statistics = image_statistics(values, num_groups, 1e-5, config, chain, operands)
    output, input_gradient = torch.full_like(values, torch.nan), torch.full_like(values, torch.nan)
    image_group_norm(values, statistics, chain, operands, config, output=output)
    gradients = [
        (torch.full(channels, torch.nan) if step.operand == "scalar" else torch.full_like(each, torch.nan))
        if isinstance(each, torch.Tensor) and (wanted is None or i in wanted)
        else None
        for i, (step, each) in enumerate(zip(chain.steps, operands, strict=True))
    ]
    gradients_of(gradient, values, statistics, chain, operands, gradients, config, input_gradient=input_gradient)
    return output, input_gradient, *(each for each in gradients if each is not None)


def anywhere(size, absent=()):
    samples, num_groups, group_size, pixels = size
    C = num_groups * group_size
    images = (each for format, each in zip(FORMATS[1:], normal(2, samples, C, pixels, seed=3), strict=True))
    vectors = iter(normal(9, C, seed=2))
    made = {"vector": lambda: next(vectors), "tensor": lambda: in_format(next(images), "strided")}
    operands = [made[step.operand]() if step.has_tensor else None for step in ANYWHERE.steps]
    operands = [None if i in absent else each for i, each in enumerate(operands)]
    operands[ANYWHERE.steps.index(HARDTANH)] = BOUNDS
    values, gradient = normal(2, samples, C, pixels, seed=pixels)
    return values, operands, num_groups, gradient


#: One image, and one strip of it; strips of several tiles; a matrix; a few pixels.
ANYWHERE_SIZES = [((1, 3, 5, 17), CONFIGS[2]), ((2, 3, 5, 33), CONFIGS[1]), ((3, 2, 40, 1), None), ((2, 2, 6, 3), None)]


@pytest.mark.parametrize("absent", [(), (0, 1), (3, 6), (4, 7), (5, 9), (10, 11)], ids=str)
@pytest.mark.parametrize("size, config", ANYWHERE_SIZES, ids=str)
def test_operands_anywhere(size, config, absent):
    """Vectors and images before the norm and after it, with gradients; each may be absent."""
    values, operands, *rest = anywhere(size, absent)
    results = our_chain(ANYWHERE, values, operands, *rest, config or ImageNormConfig.fit(values))
    truths = exact_chain(ANYWHERE, values, operands, *rest)
    for result, truth in zip(results, truths, strict=True):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", [(), (0,), (4, 9), (3, 6), (7, 11)], ids=str)
def test_what_is_wanted(wanted):
    """No gradient depends on which others are wanted."""
    values, operands, *rest = anywhere((2, 3, 5, 33))
    every = our_chain(ANYWHERE, values, operands, *rest, CONFIGS[1])
    tensors = [i for i, each in enumerate(operands) if isinstance(each, torch.Tensor)]
    some = our_chain(ANYWHERE, values, operands, *rest, CONFIGS[1], wanted)
    expected = (*every[:2], *(every[2 + tensors.index(i)] for i in wanted))
    for result, truth in zip(some, expected, strict=True):
        assert torch.equal(result, truth)


ADD_SAMPLE, MUL_SAMPLE, MUL_SCALAR = ADD.with_operand("sample"), MUL.with_operand("sample"), MUL.with_operand("scalar")
#: One value for all, one a channel of each sample, and earlier values; the first and the last of them reach back to
#: where their part begins.
EVERY = Chain(
    "conv_transpose2d",
    before=(ADD, ADD_SAMPLE, MUL_SCALAR, GELU, MUL.with_operand("earlier 3")),
    after=(HARDTANH, MUL_SAMPLE, MUL_SCALAR, ADD.with_operand("earlier 3")),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size, config", ANYWHERE_SIZES, ids=str)
def test_operands_of_every_kind(size, config, dtype):
    samples, num_groups, group_size, pixels = size
    C = num_groups * group_size
    shapes = {"vector": (C,), "scalar": (1,), "sample": (samples, C)}
    operands = [
        normal(1, *shapes[step.operand], seed=place)[0].to(dtype) if step.has_tensor else None
        for place, step in enumerate(EVERY.steps)
    ]
    operands[EVERY.steps.index(HARDTANH)] = BOUNDS
    values, gradient = (each.to(dtype) for each in normal(2, samples, C, pixels, seed=pixels))
    results = our_chain(EVERY, values, operands, num_groups, gradient, config or ImageNormConfig.fit(values))
    truths = exact_chain(EVERY, values, operands, num_groups, gradient)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for result, truth in zip(results, truths, strict=True):
        result = result.double() if result.shape == truth.shape else result.double().sum(0, keepdim=True)
        assert (result - truth).norm() <= tolerance * truth.norm()


def test_gradient_of_an_absent_bias():
    """A convolution added it: its gradient is that of its result."""
    values, gradient, num_groups, weight, bias = problem((2, 3, 5, 17))
    added = our_results(values, gradient, num_groups, weight, bias, CONFIGS[1], input_bias=torch.zeros(15))
    for result, truth in zip(our_results(values, gradient, num_groups, weight, bias, CONFIGS[1]), added, strict=True):
        assert torch.equal(result, truth)
