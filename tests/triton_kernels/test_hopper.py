"""Where the kernels for Hopper run: not in the interpreter."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ops import direct_convolution
from triton_kernels import convolution_hopper, weight_gradient_hopper
from triton_kernels.convolution_tiling import StrideOneConvolution
from triton_kernels.device import architecture
from triton_kernels.hopper import is_copyable, runs_hopper_kernels, takes_input


def test_not_in_the_interpreter():
    """Though its architecture goes by Hopper's number."""
    images = torch.zeros(2, 64, 16, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    nhwc = images.permute(0, 2, 3, 1)
    assert architecture(images.device) == 90
    assert not runs_hopper_kernels(images.device)
    assert not convolution_hopper.supports(images, images, StrideOneConvolution((3, 3), (1, 1), (-1, -1)))
    assert not weight_gradient_hopper.supports(nhwc, nhwc, (3, 3), (1, 1))


def test_tensors_without_an_address():
    """Those of a compiler's tracers, by which operators are asked too, stand for memory that begins where it should."""
    with FakeTensorMode(), FunctionalTensorMode():
        assert is_copyable(torch.empty(2, 64, 5, 6, dtype=torch.bfloat16, memory_format=torch.channels_last))


def test_inputs_that_are_taken_as_they_lie():
    """Channels_last in rows of 16 bytes; strides of axes of length one and of expanded ones count too."""
    images = torch.zeros(4, 72, 5, 6, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    assert takes_input(images)
    assert takes_input(images[:, 8:])
    for refused in (
        images.contiguous(),
        images[:, 4:68],
        images[:1].expand(4, -1, -1, -1),
        torch.zeros(4, 64, 1, 1, dtype=torch.bfloat16),
        torch.zeros(4, 68, 5, 6, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last),
    ):
        assert not takes_input(refused)
        copy = direct_convolution.in_channels_last(refused[:, :64])
        assert takes_input(copy) and torch.equal(copy, refused[:, :64])
