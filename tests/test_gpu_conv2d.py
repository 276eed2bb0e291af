"""Promise: on a GPU, at real sizes, conv2d_group_norm keeps what the interpreter's tests promise.

As in ``tests/test_gpu.py``, uninitialised memory is NaN, and what is "small" is for compute-sanitizer.
"""

import dataclasses

import pytest
import torch

from ops import convolution, direct_convolution
from ops.convolution import in_numbers
from tests import gpu
from tests.accuracy import check, draw_grad_output
from tests.chains import DTYPES, Problem, chain_id
from tests.gpu import DEVICE, FORMATS, RUNS_HOPPER_KERNELS, by_format, on_hopper
from tests.images import CONV2D_GELU, CONV2D_SILU
from tests.test_gpu_images import check_images

pytestmark = [
    *gpu.MARKS,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]

#: Problems, the rest of their geometry, and whether the kernels for Hopper take them in 16 bits.
CONVOLUTIONS = {
    "64-64-3x3": (Problem(4, 64, 8, 8, pixels=(64, 72)), {}, True),
    "64-64-3x3-same": (Problem(4, 64, 32, 2, pixels=(64, 72)), {"padding": 1}, True),
    "128-128-3x3-same": (Problem(2, 128, 32, 4, pixels=(61, 47)), {"padding": "same"}, True),
    "128-64-1x1": (Problem(4, 128, 8, 8, pixels=(33, 40), kernel=(1, 1)), {}, True),
    "64-64-1x1-padding": (Problem(4, 64, 8, 8, pixels=(33, 40), kernel=(1, 1)), {"padding": (2, 1)}, True),
    "40-72-2x3-same": (Problem(4, 40, 9, 8, pixels=(40, 56), kernel=(2, 3)), {"padding": "same"}, True),
    "wide-padding": (Problem(4, 64, 8, 8, pixels=(37, 48)), {"padding": 4}, True),
    "dilation": (Problem(4, 64, 8, 8, pixels=(37, 48)), {"padding": (1, 3), "dilation": (1, 2)}, True),
    "32-32-5x5": (Problem(4, 32, 8, 4, pixels=(64, 72), kernel=(5, 5)), {"padding": 2}, True),
    "64-64-1x5": (Problem(4, 64, 8, 8, pixels=(64, 72), kernel=(1, 5)), {"padding": (0, 2)}, True),
    "320-320-3x3": (Problem(2, 320, 32, 10, pixels=(32, 32)), {"padding": 1}, False),
    "8-32-3x3": (Problem(8, 8, 8, 4, pixels=(64, 64)), {}, True),
    "16-8-3x2-same": (Problem(3, 16, 2, 4, pixels=(37, 40), kernel=(3, 2)), {"padding": "same"}, True),
    "24-40-1x1": (Problem(4, 24, 5, 8, pixels=(33, 40), kernel=(1, 1)), {}, True),
    "odd-channels": (Problem(4, 37, 4, 11, pixels=(29, 31)), {"padding": 1}, False),
    "stride": (Problem(4, 64, 8, 8, pixels=(65, 62)), {"stride": 2, "padding": 1}, False),
    "groups": (Problem(4, 64, 8, 8, pixels=(33, 34), conv_groups=2), {"padding": 1}, False),
}
SMALL_CONVOLUTIONS = {
    "64-64-3x3-same": (Problem(1, 64, 8, 8, pixels=(9, 11)), {"padding": 1}),
    "40-72-2x3": (Problem(1, 40, 9, 8, pixels=(5, 16), kernel=(2, 3)), {"padding": (0, 1)}),
    "128-64-1x1": (Problem(1, 128, 8, 8, pixels=(3, 2), kernel=(1, 1)), {}),
    "single-pixel": (Problem(4, 64, 8, 8, pixels=(1, 1)), {"padding": 1}),
    "stride": (Problem(2, 16, 4, 8, pixels=(19, 23)), {"stride": 2, "padding": 1}),
}

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_chain = pytest.mark.parametrize("chain", [CONV2D_SILU, CONV2D_GELU], ids=["silu", "gelu"])


@by_dtype
@by_format
@pytest.mark.parametrize("name", SMALL_CONVOLUTIONS)
def test_small_convolutions(name, format, dtype):
    problem, geometry = SMALL_CONVOLUTIONS[name]
    arguments = CONV2D_SILU.arguments(problem, dtype, geometry=geometry, format=format, device=DEVICE)
    check_images(arguments, format, CONV2D_SILU)


@by_dtype
@by_format
@by_chain
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, chain, format, dtype):
    problem, geometry, _ = CONVOLUTIONS[name]
    check_images(chain.arguments(problem, dtype, geometry=geometry, format=format, device=DEVICE), format, chain)


@on_hopper
@by_format
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_takes_the_kernels_for_hopper(name, format):
    problem, options, is_taken = CONVOLUTIONS[name]
    arguments = CONV2D_SILU.arguments(problem, torch.bfloat16, format=format, device=DEVICE)
    input, weight = arguments["input"], arguments["weight"]
    sizes = {"stride": 1, "dilation": 1, **options, "groups": problem.conv_groups}
    sizes["padding"], sizes["output_padding"] = in_numbers(weight, 1, sizes.get("padding", 0), sizes["dilation"])
    geometry = convolution.check(False, input, weight, **sizes)
    assert RUNS_HOPPER_KERNELS
    assert direct_convolution.takes(input, weight, geometry, True) is is_taken
    assert not direct_convolution.takes(input.float(), weight.float(), geometry, True)


@by_format
@pytest.mark.parametrize("shape", [(8, 64, 128), (1, 128, 512), (8, 320, 64)], ids=str)
def test_shapes_of_models(shape, format):
    """More than are copied or differentiated at a time."""
    samples, channels, size = shape
    problem = Problem(samples, channels, 32, channels // 32, pixels=(size, size))
    options = {"geometry": {"padding": 1}, "format": format, "device": DEVICE}
    arguments = CONV2D_SILU.arguments(problem, torch.bfloat16, **options)
    check(CONV2D_SILU, arguments, draw_grad_output(CONV2D_SILU, arguments).contiguous(memory_format=format))


@pytest.mark.parametrize("out_format", FORMATS, ids=str)
def test_tensors_of_other_strides(out_format):
    """An image that is part of a larger one, and a gradient whose rows are apart."""
    problem = dataclasses.replace(CONVOLUTIONS["64-64-3x3-same"][0], pixels=(32, 40))
    arguments = CONV2D_SILU.arguments(problem, torch.bfloat16, geometry={"padding": 1}, device=DEVICE)
    wide = torch.randn(4, 64, 34, 48, dtype=torch.bfloat16, device=DEVICE).contiguous(memory_format=out_format)
    arguments["input"] = wide[:, :, 1:33, 8:]
    grad_output = draw_grad_output(CONV2D_SILU, arguments)
    apart = torch.zeros(4, 64, 32, 80, dtype=torch.bfloat16, device=DEVICE)[..., ::2].copy_(grad_output)
    check(CONV2D_SILU, arguments, apart)
