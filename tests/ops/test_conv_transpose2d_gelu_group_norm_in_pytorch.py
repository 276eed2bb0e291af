"""L19 within PyTorch: under autocast and ``torch.compile``, differentiated twice, of meta tensors, and as a module."""

import dataclasses

import pytest
import torch
from torch import nn

import ops
from ops import precision
from ops.convolution import memory_format
from tests import images
from tests.accuracy import draw_grad_output, run
from tests.chains import L19, chain_id, doubled, tensors_of
from tests.images import GEOMETRIES, PROBLEM, arguments_of, in_format

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)


@pytest.mark.parametrize("way", ["kernels", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
def test_autocast(dtype, way, monkeypatch):
    """Its dtype comes out, gradients are the parameters' own, and rounded arguments give what they give without it."""
    if way == "reference":
        monkeypatch.setattr(precision, "runs_kernels", lambda tensor: False)
    rounded = arguments_of(dtype=dtype)
    arguments = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in rounded.items()}
    grad_output = draw_grad_output(L19, rounded)

    def under_autocast(**arguments):
        with torch.autocast("cpu", dtype):
            return L19.function(**arguments)

    ours = run(under_autocast, arguments, grad_output)
    assert ours["output"].dtype == dtype
    assert all(ours[name].dtype == torch.float32 for name in tensors_of(arguments))
    if way == "kernels":
        expected = run(L19.function, rounded, grad_output)
        for name, tensor in expected.items():
            assert torch.equal(ours[name].to(dtype), tensor), name
        with torch.autocast("cpu", dtype):
            inside = run(L19.function, arguments, grad_output)
        for name in ours:
            assert torch.equal(inside[name], ours[name]), name
    else:
        theirs, exact = run(L19.plain, rounded, grad_output), run(L19.plain, doubled(rounded), grad_output.double())
        for name in exact:
            allowed = 1.5 * (theirs[name] - exact[name]).norm() + 1e-6 * exact[name].norm()
            assert (ours[name] - exact[name]).norm() <= allowed, name


def test_autocast_leaves_float64():
    arguments = arguments_of(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(L19.function(**arguments), L19.plain(**arguments))


# Each geometry, in one format or both: a compilation takes seconds.
@pytest.mark.parametrize(
    "geometry, format",
    [
        (GEOMETRIES[0], torch.contiguous_format),
        (GEOMETRIES[0], torch.channels_last),
        (GEOMETRIES[1], torch.channels_last),
        (GEOMETRIES[2], torch.contiguous_format),
        (GEOMETRIES[3], torch.channels_last),
    ],
    ids=str,
)
def test_compile(geometry, format, fresh_compiler):
    """One graph for batches and images of any size, bit for bit and stride for stride what it is without."""
    compiled = torch.compile(L19.function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, pixels in ((4, (5, 7)), (3, (6, 4))):
        arguments = arguments_of(dataclasses.replace(PROBLEM, rows=rows, pixels=pixels), geometry=geometry)
        arguments = in_format(arguments, format)
        grad_output = draw_grad_output(L19, arguments)
        expected, results = run(L19.function, arguments, grad_output), run(compiled, arguments, grad_output)
        for name in expected:
            assert torch.equal(results[name], expected[name]), name
            assert results[name].stride() == expected[name].stride(), name


def test_compile_without_gradients(fresh_compiler):
    arguments = arguments_of(dtype=torch.bfloat16, absent=L19.vectors)
    compiled = torch.compile(L19.function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), L19.function(**arguments))


def test_compile_under_autocast(fresh_compiler):
    def function(**arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return L19.function(**arguments)

    arguments = arguments_of()
    grad_output = draw_grad_output(L19, arguments).bfloat16()
    results = run(torch.compile(function, fullgraph=True, backend="aot_eager"), arguments, grad_output)
    for name, tensor in run(function, arguments, grad_output).items():
        assert torch.equal(results[name], tensor), name


def test_differentiated_once():
    arguments = arguments_of()
    leaf = arguments["input"].requires_grad_()
    with pytest.raises(RuntimeError, match="conv_transpose2d_gelu_group_norm can be differentiated once only"):
        torch.autograd.grad(L19.function(**arguments).sum(), leaf, create_graph=True)


def test_meta_tensors():
    arguments = arguments_of(dtype=torch.bfloat16, geometry=GEOMETRIES[1])
    expected = L19.function(**arguments)
    for name, tensor in tensors_of(arguments).items():
        arguments[name] = tensor.to("meta")
    result = L19.function(**arguments)
    assert (result.device.type, result.shape, result.dtype) == ("meta", expected.shape, expected.dtype)


# The module


class PlainL19(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, groups, num_groups):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride=stride)
        self.group_norm = nn.GroupNorm(num_groups=num_groups, num_channels=out_channels)

    def forward(self, x):
        return self.group_norm(nn.functional.gelu(self.conv_transpose(x)))


SETTINGS = [
    {"in_channels": 6, "out_channels": 8, "kernel_size": 3, "stride": 1, "groups": 8, "num_groups": 4},
    {"in_channels": 5, "out_channels": 6, "kernel_size": (2, 4), "stride": (2, 1), "groups": 3, "num_groups": 6},
]


def both(settings):
    models = []
    for model in (ops.ConvTranspose2dGeluGroupNorm, PlainL19):
        torch.manual_seed(7)
        models.append(model(**settings))
    return models


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_module(settings):
    """Constructor, initial draws, state_dict, result and one step of training of the plain model."""
    mine, theirs = both(settings)
    assert torch.initial_seed() == 7
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert set(mine.state_dict()) == {f"{name}.{part}" for name in mine._modules for part in ("weight", "bias")}
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key
    input = torch.randn(3, settings["in_channels"], 6, 5)
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input).square().mean().backward()
        optimizer.step()
    for (name, parameter), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(mine(input), theirs(input))
    mine.load_state_dict(theirs.state_dict())
    mine.group_norm.eps = theirs.group_norm.eps = 0.5
    torch.testing.assert_close(mine(input), theirs(input))


def test_modules_settings_are_the_layers_own():
    """A changed layer is used as it is, as in the plain model."""
    mine, theirs = both(SETTINGS[0])
    for model in (mine, theirs):
        model.conv_transpose = nn.ConvTranspose2d(
            6, 8, 2, 2, padding=1, output_padding=1, groups=2, dilation=2, bias=False
        )
        model.group_norm = nn.GroupNorm(2, 8, affine=False)
    mine.load_state_dict(theirs.state_dict())
    input = torch.randn(3, 6, 6, 5)
    torch.testing.assert_close(mine(input), theirs(input))


def test_compiled_module(fresh_compiler):
    mine, _ = both(SETTINGS[0])
    mine = mine.to(memory_format=torch.channels_last)
    input = torch.randn(3, 6, 6, 5).to(memory_format=torch.channels_last)
    expected = mine(input)
    result = torch.compile(mine, fullgraph=True, backend="aot_eager")(input)
    assert torch.equal(result, expected) and memory_format(result) is torch.channels_last
