"""Transposed convolutions: their geometry beside PyTorch's, every argument that does not fit, and memory formats."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops import convolution
from ops.convolution import Geometry, memory_format

INPUT, WEIGHT = torch.ones(2, 4, 5, 6), torch.ones(4, 3, 3, 2)
VALID = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


class NothingRuns(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        raise AssertionError(f"{operator} ran before the arguments were checked")


def check_refused(error, message, input=INPUT, weight=WEIGHT, **changes):
    """By the check alone and by the public function, before anything runs."""
    arguments = {**VALID, **changes}
    for call in (
        lambda: convolution.check(True, input, weight, **arguments),
        lambda: ops.conv_transpose2d_gelu_group_norm(input, weight, None, 1, **arguments),
    ):
        with pytest.raises(error) as raised, NothingRuns():
            call()
        assert str(raised.value) == message


def test_accepted():
    ops.conv_transpose2d_gelu_group_norm(INPUT, WEIGHT, None, 1, **VALID)


def pairs(least, most):
    return st.integers(least, most) | st.tuples(st.integers(least, most), st.integers(least, most))


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stride=pairs(1, 4),
    padding=pairs(0, 4),
    output_padding=pairs(0, 3),
    dilation=pairs(1, 4),
)
@settings(max_examples=300)
def test_output_size(kernel, size, stride, padding, output_padding, dilation):
    """PyTorch's own; where it refuses, so do we."""
    input, weight = torch.zeros(1, 1, *size), torch.zeros(1, 1, *kernel)
    try:
        expected = F.conv_transpose2d(input, weight, None, stride, padding, output_padding, 1, dilation).shape[2:]
    except RuntimeError:
        with pytest.raises(ValueError):
            convolution.check(True, input, weight, stride, padding, output_padding, dilation, 1)
        return
    geometry = convolution.check(True, input, weight, stride, padding, output_padding, dilation, 1)
    assert geometry.output_size(*size) == tuple(expected)


def test_geometry():
    geometry = convolution.check(True, INPUT, WEIGHT, 2, [1, 0], (1, 0), torch.Size((1, 2)), 2)
    assert geometry == Geometry((3, 2), (2, 2), (1, 0), (1, 0), (1, 2), 2)
    assert hash(geometry) == hash(Geometry((3, 2), (2, 2), (1, 0), (1, 0), (1, 2), 2))
    with pytest.raises(AttributeError):
        geometry.groups = 1


@pytest.mark.parametrize("shape", [(), (4,), (4, 5), (4, 5, 6), (1, 2, 4, 5, 6)], ids=str)
def test_input_dimensions(shape):
    message = f"input must be 4-D (batch, in_channels, height, width), got shape {shape}"
    check_refused(ValueError, message, input=torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (4,), (4, 3), (4, 3, 2), (4, 3, 2, 2, 2)], ids=str)
def test_weight_dimensions(shape):
    expected = "(in_channels, out_channels // groups, kernel_height, kernel_width)"
    check_refused(ValueError, f"weight must be 4-D {expected}, got shape {shape}", weight=torch.ones(shape))


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (4, 0, 2, 2), (4, 3, 0, 2), (4, 3, 2, 0)], ids=str)
def test_empty_weight(shape):
    message = f"weight must have no dimension of size 0, got shape {shape}"
    check_refused(ValueError, message, weight=torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 8, 5, 6), (2, 0, 5, 6)], ids=str)
def test_channels_differ(shape):
    message = f"input must have the 4 in_channels of weight, got shape {shape}"
    check_refused(ValueError, message, input=torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 4, 0, 6), (2, 4, 5, 0), (0, 4, 0, 0)], ids=str)
def test_no_pixels(shape):
    message = f"input must have a height and a width of at least 1, got shape {shape}"
    check_refused(ValueError, message, input=torch.ones(shape))


def test_groups():
    for groups in (0, -2):
        check_refused(ValueError, f"groups must be at least 1, got {groups}", groups=groups)
    for groups in (3, 8):
        check_refused(ValueError, f"groups must divide the 4 in_channels of weight, got {groups}", groups=groups)
    for groups in (2.0, None, "1", True, (1, 1)):
        check_refused(TypeError, f"groups must be an int, got {type(groups).__name__}", groups=groups)


@pytest.mark.parametrize("name", ["stride", "padding", "output_padding", "dilation"])
class TestPairs:
    @pytest.mark.parametrize("value", [1.0, None, "1", True, torch.tensor(1)], ids=repr)
    def test_no_integers(self, name, value):
        message = f"{name} must be an int, got {type(value).__name__}"
        check_refused(TypeError, message, **{name: value})
        check_refused(TypeError, message, **{name: (1, value)})

    @pytest.mark.parametrize("value", [(), [], (1, 1, 1), [1, 1, 1]], ids=repr)
    def test_no_pairs(self, name, value):
        check_refused(ValueError, f"{name} must be an int or a pair of ints, got {value}", **{name: value})

    @pytest.mark.parametrize("below", [1, 5])
    def test_too_small(self, name, below):
        least = 1 if name in ("stride", "dilation") else 0
        for value in (least - below, (least - below, 3), [3, least - below]):
            check_refused(ValueError, f"{name} must be at least {least}, got {value}", **{name: value})

    def test_too_large(self, name):
        check_refused(ValueError, f"{name} must be less than 2**31, got {2**31}", **{name: 2**31})


@pytest.mark.parametrize(
    "output_padding, stride, dilation",
    [(1, 1, 1), (2, 2, 1), (3, 2, 3), ((0, 1), (2, 1), 1), ((2, 0), (1, 5), (2, 5))],
)
def test_output_padding_too_large(output_padding, stride, dilation):
    message = (
        "output_padding must be smaller than stride or dilation, "
        f"got {output_padding} with stride {stride} and dilation {dilation}"
    )
    check_refused(ValueError, message, output_padding=output_padding, stride=stride, dilation=dilation)


@pytest.mark.parametrize("padding, rows, columns", [(4, -1, -1), ((4, 0), -1, 7), ([0, 4], 7, -1)])
def test_nothing_left(padding, rows, columns):
    message = f"padding must leave an output of at least 1 x 1 pixels, got {padding}, which makes it {rows} x {columns}"
    check_refused(ValueError, message, padding=padding)


@pytest.mark.parametrize("approximate", ["", "erf", "TANH"])
def test_other_approximations(approximate):
    message = f"approximate must be 'none' or 'tanh', got {approximate!r}"
    for call in (
        lambda: ops.conv_transpose2d_gelu_group_norm(INPUT, WEIGHT, None, 1, approximate=approximate),
        lambda: ops.gelu_group_norm(INPUT, 1, approximate=approximate),
    ):
        with pytest.raises(ValueError) as raised, NothingRuns():
            call()
        assert str(raised.value) == message


@pytest.mark.parametrize("approximate", [None, True, 0, ["none"]], ids=repr)
def test_approximation_is_no_string(approximate):
    message = f"approximate must be a str, got {type(approximate).__name__}"
    for call in (
        lambda: ops.conv_transpose2d_gelu_group_norm(INPUT, WEIGHT, None, 1, approximate=approximate),
        lambda: ops.gelu_group_norm(INPUT, 1, approximate=approximate),
    ):
        with pytest.raises(TypeError) as raised, NothingRuns():
            call()
        assert str(raised.value) == message


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 4),
    order=st.permutations(range(4)),
    padded=st.integers(0, 1),
)
@settings(max_examples=200)
def test_memory_format(shape, order, padded):
    """PyTorch's own rule, of sliced and ambiguous tensors too."""
    memory = torch.empty([shape[axis] + padded for axis in order])
    tensor = memory[tuple(slice(shape[axis]) for axis in order)].permute([order.index(axis) for axis in range(4)])
    assert tensor.shape == shape
    assert memory_format(tensor) is torch._prims_common.suggest_memory_format(tensor)


@pytest.mark.parametrize("setting", [False, True])
def test_library_follows_pytorchs_settings(monkeypatch, setting):
    """It runs under the caller's cuDNN flags, so it is as accurate and as deterministic as PyTorch's own call."""
    seen = []

    def record(function):
        def call(*arguments, **options):
            seen.append(torch.backends.cudnn.deterministic)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(torch, "convolution", record(torch.convolution))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", setting)
    geometry = convolution.check(True, INPUT, WEIGHT, **VALID)
    convolution.convolve(INPUT, WEIGHT, geometry, torch.contiguous_format)
    assert seen == [setting]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_library_keeps_the_format(format):
    """The input's, whatever the weight's is; the gradients' are those of what they are gradients of."""
    input = INPUT.to(memory_format=format)
    for weight in (WEIGHT, WEIGHT.to(memory_format=torch.channels_last)):
        geometry = convolution.check(True, input, weight, **VALID)
        z = convolution.convolve(input, weight, geometry, convolution.memory_format(input))
        assert z.shape == (2, 3, 7, 7) and z.is_contiguous(memory_format=format)
        gradients = convolution.convolution_gradients(z, input, weight, geometry, (True, True))
        for gradient, tensor in zip(gradients, (input, weight), strict=True):
            assert gradient.shape == tensor.shape and memory_format(gradient) is memory_format(tensor)
        (of_weight,) = convolution.convolution_gradients(z, input, weight, geometry, (False, True))
        assert torch.equal(of_weight, gradients[1])
