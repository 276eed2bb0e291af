"""Promise: the kernels for Hopper take what they can do, on Hopper alone, and refuse the rest."""

import dataclasses

import pytest
import torch

from autotune_configs.offline import compile_launches
from ops import direct_convolution
from tests.compilation import META
from tests.test_offline_compilation_images import (
    CHANNELS,
    CONTIGUOUS,
    GEOMETRY,
    SAMPLES,
    SIZE,
    by_architecture,
    images,
)
from triton_kernels import convolution_hopper, weight_gradient_hopper
from triton_kernels.device import SHARED_MEMORY

pytestmark = pytest.mark.offline


@by_architecture
def test_float32_is_direct_on_hopper_alone(arch):
    input, weight = images(torch.float32), torch.empty(CHANNELS, CHANNELS, 3, 3, device=META)
    taken = answer(lambda: direct_convolution.takes(input, weight, GEOMETRY, True), arch)
    assert taken == (arch == 90)


def answer(question, arch):
    """What a question of what is supported answers on this architecture."""
    answers = []
    compile_launches(lambda: answers.append(question()), arch)
    return answers[0]


@by_architecture
def test_kernels_for_hopper_are_for_it_alone(arch):
    taps = direct_convolution.forward_convolution(GEOMETRY)
    input, output = images(torch.bfloat16), images(torch.bfloat16, size=SIZE + 2)
    nhwc = input.permute(0, 2, 3, 1), output.permute(0, 2, 3, 1)
    assert answer(lambda: convolution_hopper.supports(input, output, taps), arch) == (arch == 90)
    assert answer(lambda: weight_gradient_hopper.supports(*nhwc, (3, 3), (1, 1)), arch) == (arch == 90)


#: What is wrong with each: (input, output, taps) of a convolution.
UNSUPPORTED_CONVOLUTIONS = {
    "contiguous input": (images(torch.bfloat16, CONTIGUOUS), images(torch.bfloat16), GEOMETRY),
    "odd channels in": (images(torch.bfloat16, channels=37), images(torch.bfloat16), GEOMETRY),
    "odd channels out": (images(torch.bfloat16), images(torch.bfloat16, channels=44), GEOMETRY),
    "odd rows out": (images(torch.bfloat16), images(torch.bfloat16, CONTIGUOUS, size=SIZE + 2), GEOMETRY),
    "two dtypes": (images(torch.bfloat16), images(torch.float32), GEOMETRY),
    "odd channels in, float32": (images(torch.float32, channels=38), images(torch.float32), GEOMETRY),
    "more weights than fit": (images(torch.bfloat16, channels=512), images(torch.bfloat16), GEOMETRY),
    "more weights than fit, float32": (images(torch.float32, channels=128), images(torch.float32), GEOMETRY),
    "taps too far apart": (
        images(torch.bfloat16),
        images(torch.bfloat16),
        dataclasses.replace(GEOMETRY, dilation=(9, 1)),
    ),
    "no samples": (images(torch.bfloat16, samples=0), images(torch.bfloat16, samples=0), GEOMETRY),
}


@pytest.mark.parametrize(
    "dilation, stages", [((1, 1), 4), ((2, 2), 4), ((6, 6), 2), ((1, 20), 2), ((7, 7), 1)], ids=str
)
def test_how_many_tiles_of_a_weight_gradient_fit(dilation, stages):
    """As many as with what boxes leave empty fit, and no less; below two it is refused."""
    taps = weight_gradient_hopper.Taps((3, 3), dilation)
    assert taps.stages == stages
    assert stages * 128 * 128 + taps.pixels * 128 <= SHARED_MEMORY[90] - 2048
    assert taps.pixels % max(32, taps.halo) == 0


@pytest.mark.parametrize("name", UNSUPPORTED_CONVOLUTIONS)
def test_what_the_convolution_for_hopper_refuses(name):
    input, output, geometry = UNSUPPORTED_CONVOLUTIONS[name]
    taps = direct_convolution.forward_convolution(geometry)
    assert not answer(lambda: convolution_hopper.supports(input, output, taps), 90)


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": 37},
        {"out_channels": 44},
        {"dtype": torch.float32},
        {"gradient_dtype": torch.float16},
        {"kernel_size": (4, 3)},
        {"kernel_size": (1, 5)},
        {"dilation": (20, 20)},
        {"samples": 0},
    ],
    ids=str,
)
def test_what_the_weight_gradient_for_hopper_refuses(changes):
    problem = {
        "channels": CHANNELS,
        "out_channels": CHANNELS,
        "dtype": torch.bfloat16,
        "kernel_size": (3, 3),
        "dilation": (1, 1),
        "samples": SAMPLES,
        **changes,
    }
    input = images(problem["dtype"], channels=problem["channels"], samples=problem["samples"])
    dtype = problem.get("gradient_dtype", problem["dtype"])
    gradient = images(dtype, channels=problem["out_channels"], samples=problem["samples"], size=SIZE + 2)
    nhwc = input.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1)
    taps = problem["kernel_size"], problem["dilation"]
    assert not answer(lambda: weight_gradient_hopper.supports(*nhwc, *taps), 90)
