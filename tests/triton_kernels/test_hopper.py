"""Where the kernels for Hopper run: not in the interpreter."""

import torch

from triton_kernels import convolution_hopper, weight_gradient_hopper
from triton_kernels.convolution import StrideOneConvolution
from triton_kernels.device import architecture
from triton_kernels.hopper import runs_hopper_kernels


def test_not_in_the_interpreter():
    """Though its architecture goes by Hopper's number."""
    images = torch.zeros(2, 64, 16, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    nhwc = images.permute(0, 2, 3, 1)
    assert architecture(images.device) == 90
    assert not runs_hopper_kernels(images.device)
    assert not convolution_hopper.supports(images, images, StrideOneConvolution((3, 3), (1, 1), (-1, -1)))
    config = weight_gradient_hopper.WeightGradientConfig()
    assert not weight_gradient_hopper.supports(nhwc, nhwc, (3, 3), (1, 1), config)
