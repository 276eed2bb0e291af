"""Promise: a convolution of an upsampled image has PyTorch's values and gradients, and no such image is written."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import explain, precision, upsampled_convolutions
from ops.backend import normfuse
from tests.ops.opened import Opened

FORMATS = torch.contiguous_format, torch.channels_last


class Block(nn.Module):
    """As in an image decoder: an upsampled image, its convolution, and a residual block's begin."""

    def __init__(self, channels=(4, 6), bias=True, before=None, taps=3, **options):
        super().__init__()
        torch.manual_seed(0)
        self.before = before or nn.Upsample(scale_factor=2)
        self.convolution = nn.Conv2d(*channels, taps, bias=bias, **{"padding": 1, **options})
        self.norm = nn.GroupNorm(2, channels[1])

    def forward(self, input):
        image = self.convolution(self.before(input))
        return image + F.silu(self.norm(image))


@pytest.fixture
def all_pay(monkeypatch):
    """Whatever the dtype and the sizes."""
    monkeypatch.setattr(upsampled_convolutions, "_FEWEST_PIXELS", 0)
    monkeypatch.setattr(upsampled_convolutions, "_FEWEST_CHANNELS", 0)
    monkeypatch.setattr(precision, "is_16_bits_on_hopper", lambda tensor: True)


def step(function, input, wanted):
    result = function(input)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    return result, *torch.autograd.grad(result, wanted, gradient)


def is_taken(opened):
    """Whether there is a transposed convolution; then no image is interpolated."""
    (convolution,) = opened.nodes("aten.convolution.default")
    is_transposed, gathers = convolution.args[6], any("index" in name or "upsample" in name for name in opened.names())
    assert gathers is not is_transposed
    return is_transposed


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
@pytest.mark.parametrize("of_weight", FORMATS, ids=str)
@pytest.mark.parametrize("of_input", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 1, 1), (3, 4, 1, 6), (2, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values(bias, shape, of_input, of_weight):
    model = Block(bias=bias).to(torch.float64, memory_format=of_weight)
    input = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=of_input).requires_grad_()
    wanted, opened = [input, *model.parameters()], Opened(model)
    for found, expected in zip(step(opened, input, wanted), step(model, input, wanted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert found.stride() == expected.stride()
    assert is_taken(opened)
    with torch.no_grad():
        found, expected = Opened(model)(input), model(input)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Interpolates(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, input):
        return F.interpolate(input, **self.options)


class Changed(nn.Module):
    """Between the interpolation and the convolution its input is written to."""

    def forward(self, input):
        input = input * 1
        upsampled = F.interpolate(input, scale_factor=2)
        input.add_(1)
        return upsampled


class Kept(nn.Module):
    def forward(self, input):
        self.kept = F.interpolate(input, scale_factor=2)
        return self.kept


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"before": Interpolates(size=(10, 14))}, True),
        ({"before": Interpolates(scale_factor=(2.0, 2.0), mode="nearest-exact")}, True),
        ({"before": Interpolates(scale_factor=2.0, recompute_scale_factor=True)}, True),
        ({"before": Interpolates(scale_factor=2.1)}, False),  # 10 x 14 pixels too, but others'
        ({"before": Interpolates(scale_factor=(2, 3))}, False),
        ({"before": Interpolates(size=(9, 13))}, False),  # two of each pixel, but for the last
        ({"before": Interpolates(scale_factor=2, mode="bilinear")}, False),
        ({"before": Interpolates(scale_factor=4)}, False),
        ({"before": nn.Upsample(scale_factor=2, mode="bilinear")}, False),
        ({"before": Changed()}, False),
        ({"before": Kept()}, False),
        ({"padding": "same"}, True),
        ({"padding": "valid"}, False),
        ({"taps": 5}, False),
        ({"taps": (3, 1)}, False),
        ({"padding": (1, 0)}, False),
        ({"padding": 2}, False),
        ({"padding": 2, "dilation": 2}, False),
        ({"stride": 2}, False),
        ({"groups": 2}, False),
        ({"padding_mode": "reflect"}, False),
    ],
    ids=str,
)
def test_which(options, expected):
    model = Block(**options).double()
    input = torch.randn(2, 4, 5, 7, dtype=torch.float64, requires_grad=True)
    wanted, opened = [input, *model.parameters()], Opened(model)
    found = step(opened, input, wanted)
    assert is_taken(opened) is expected
    torch.compiler.reset()  # PyTorch's functions for the CPU take a scale that is near 2 for 2, compiled graphs do not
    theirs = step(torch.compile(model, backend="aot_eager_decomp_partition"), input, wanted)
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "channels, sizes, dtype, expected",
    [
        ((64, 64), (2, 32, 32), torch.bfloat16, True),
        ((64, 64), (2, 32, 32), torch.float16, True),
        ((64, 64), (1, 64, 32), torch.bfloat16, True),
        ((64, 64), (2, 32, 32), torch.float32, False),
        ((64, 64), (1, 23, 89), torch.bfloat16, False),
        ((62, 64), (2, 32, 32), torch.bfloat16, False),
        ((64, 62), (2, 32, 32), torch.bfloat16, False),
    ],
)
def test_which_pay(channels, sizes, dtype, expected):
    samples, *pixels = sizes
    opened = Opened(Block(channels).to(dtype))
    with torch.no_grad():
        opened(torch.randn(samples, channels[0], *pixels, dtype=dtype))
    assert is_taken(opened) is expected


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
@pytest.mark.parametrize("is_autocast", [False, True])
def test_precision(is_autocast):
    """The taps are added up in float32. So under autocast they are rounded once, as the weight is; those of a weight
    in 16 bits once more."""
    model = Block((32, 32))
    model.norm = nn.Identity()
    model.requires_grad_(is_autocast)
    model.to(torch.float32 if is_autocast else torch.bfloat16)
    input = torch.randn(2, 32, 8, 8).bfloat16()
    wide = Block((32, 32))
    wide.norm = nn.Identity()
    wide.load_state_dict(model.state_dict())
    opened, wanted = Opened(model), [*model.parameters()] if is_autocast else []
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found = step(opened, input, wanted) if wanted else (opened(input),)
        theirs = step(model, input, wanted) if wanted else (model(input),)
    wide.double()
    expected = step(wide, input.double(), [*wide.parameters()]) if wanted else (wide(input.double()),)
    assert is_taken(opened)
    for one, other, exact in zip(found, theirs, expected, strict=True):
        error, allowed = ((each.double() - exact).norm() for each in (one, other))
        assert one.dtype == other.dtype and error <= (1.05 if is_autocast else 1.25) * allowed


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
def test_open_batches():
    model = Block().double()
    opened = Opened(model)
    for samples in 2, 3, 5:
        input = torch.randn(samples, 4, 5, 7, dtype=torch.float64)
        torch._dynamo.mark_dynamic(input, 0)
        with torch.no_grad():
            torch.testing.assert_close(opened(input), model(input))
    assert len(opened.graphs) == 1 and is_taken(opened)


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
def test_open_channels():
    """They stay PyTorch's, and open."""

    def function(image, weight):
        return F.conv2d(F.interpolate(image, scale_factor=2), weight, padding=1)

    opened = Opened(function)
    for outputs in 6, 7, 9:
        image, weight = torch.randn(2, 4, 5, 7), torch.randn(outputs, 4, 3, 3)
        torch._dynamo.mark_dynamic(weight, 0)
        torch.testing.assert_close(opened(image, weight), function(image, weight))
    assert len(opened.graphs) == 1 and not is_taken(opened)


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
def test_it_is_told():
    told = explain(torch.compile(Block(), backend=normfuse), torch.randn(2, 4, 5, 7))
    assert "as one of the image before F.interpolate" in str(told)


@pytest.mark.usefixtures("fresh_compiler", "all_pay")
def test_an_image_without_samples():
    """One axis is interpolated then."""
    image, weight = torch.randn(5, 4, 6), torch.randn(3, 5, 3, 3)

    def function(image):
        return F.conv2d(F.interpolate(image, scale_factor=2), weight, padding=1)

    torch.testing.assert_close(Opened(function)(image), function(image))
