"""Promise: results of a fused model have the strides that the plain model's have."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ops import direct_convolution
from ops.fuse import fuse
from tests.ops.fused_models import (
    BENCHMARKS,
    L19,
    L30,
    L75,
    L94,
    assert_alike,
    assert_same,
    input_of,
    made,
    outcome,
)

FORMATS = (torch.contiguous_format, torch.channels_last)
#: input's shape, kernel and output's channels, convolution's options: batches, channels and pixels of one among them
IMAGES = {
    "usual": ((2, 6, 4, 5), 3, 8, {}),
    "strided": ((2, 6, 4, 5), 3, 8, {"stride": 2, "padding": 1, "output_padding": 1}),
    "one sample": ((1, 6, 4, 5), 3, 8, {}),
    "one column": ((2, 6, 4, 1), (3, 1), 8, {}),
    "one tap": ((2, 6, 4, 5), 1, 8, {}),
    "one pixel": ((2, 6, 1, 1), 3, 8, {}),
    "one pixel after": ((2, 6, 1, 1), 1, 8, {}),
    "one channel": ((2, 1, 4, 5), 3, 8, {}),
    "one channel after": ((2, 6, 4, 5), 3, 1, {}),
    "groups": ((2, 6, 4, 5), 3, 4, {"groups": 2}),
}


def seen_strides(tensor):
    """Those that a view can see: of axes of length one they say nothing."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("input_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape, kernel, channels, options", IMAGES.values(), ids=IMAGES)
def test_strides_of_images(shape, kernel, channels, options, input_format, weight_format, dtype):
    torch.manual_seed(1)
    convolution = nn.ConvTranspose2d(shape[1], channels, kernel, **options)
    model = nn.Sequential(convolution, nn.GELU(), nn.GroupNorm(1, channels)).to(dtype).to(memory_format=weight_format)
    plain = copy.deepcopy(model)
    fuse(model)
    input = torch.randn(shape).to(dtype).to(memory_format=input_format)
    result, expected = model(input), plain(input)
    torch.testing.assert_close(result, expected)
    assert seen_strides(result) == seen_strides(expected)
    assert_same(model, plain, input, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("input_format", FORMATS, ids=str)
def test_views_of_images(input_format):
    """A view works where the plain model's result has one, and raises where it has none."""
    model = made(BENCHMARKS[L19])
    input = input_of(L19).to(memory_format=input_format)
    plain = copy.deepcopy(model)
    fuse(model)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        assert_alike(*(outcome(each(input).permute(order).view, len(input), -1) for each in (model, plain)))


@pytest.mark.parametrize("chain", [L94, L75, L30])
@pytest.mark.parametrize("rows", [1, 5])
def test_strides_of_matrices(rows, chain):
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    fuse(model)
    for input in (input_of(chain)[:rows], input_of(chain).T.contiguous().T[:rows]):
        assert model(input).stride() == plain(input).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("input_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape, kernel, channels, options", IMAGES.values(), ids=IMAGES)
def test_strides_of_images_on_a_gpu(shape, kernel, channels, options, input_format, weight_format, dtype, monkeypatch):
    """All of them, without a GPU: PyTorch's fake tensors have a device, and strides, but no values."""
    monkeypatch.setattr(direct_convolution, "runs_hopper_kernels", lambda device: False)
    with FakeTensorMode(), torch.no_grad():
        convolution = nn.ConvTranspose2d(shape[1], channels, kernel, **options, device="meta")
        model = nn.Sequential(convolution, nn.GELU(), nn.GroupNorm(1, channels, device="meta"))
        for layer in (model[0], model[2]):
            for name, value in list(layer.named_parameters()):
                format = weight_format if value.ndim == 4 else torch.contiguous_format
                fake = torch.empty(value.shape, dtype=dtype, device="cuda", memory_format=format)
                setattr(layer, name, nn.Parameter(fake))
        input = torch.empty(shape, dtype=dtype, device="cuda", memory_format=input_format)
        expected = model(input)
        report = fuse(model, everything=True)
        model(input)
        result = model(input)
        assert len(report.chains) == 1
    assert seen_strides(result) == seen_strides(expected)
