"""Promise: on a GPU, steps with operands of every kind keep the rule of accuracy around each norm."""

import pytest
import torch

from tests import gpu
from tests.accuracy import check
from tests.chains import tensors_of
from tests.ops.compositions import HEADS, Sizes, compose
from tests.ops.test_operands import check_convolution

pytestmark = gpu.MARKS

BEFORE = ("add_sample", "mul_scalar", "mish", "add_earlier", "mul_vector")
AFTER = ("mul_scalar", "sigmoid", "mul_earlier", "add_sample", "mul_tensor")
ROWS, IMAGES = Sizes((320,), 96, 8, 16), Sizes((6,), 64, 8, 8, pixels=(31, 33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients(name, dtype):
    head = HEADS[name]
    sizes = IMAGES if head.has_images else ROWS
    composition = compose(name, BEFORE if head.norm else (), AFTER, sizes)
    arguments = composition.arguments(dtype)
    check(
        composition,
        {key: each.to(gpu.DEVICE) if key in tensors_of(arguments) else each for key, each in arguments.items()},
    )


@gpu.by_format
@pytest.mark.parametrize("samples", [5, 200])
def test_after_a_convolution_of_stride_1(samples, format):
    """By the project's kernels, which take a few samples at a time: each has its own part of an operand."""
    check_convolution(samples, 64, (96, 97), torch.bfloat16, gpu.DEVICE, format)
