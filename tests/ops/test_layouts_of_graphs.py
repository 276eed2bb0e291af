"""Promise: images around open norms lie as channels_last, and nothing but speed shows it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.layouts import hold_apart
from tests.ops.opened import Opened, saved_bytes

pytestmark = pytest.mark.usefixtures("fresh_compiler")

_seen: list[tuple[int, ...]] = []


@torch.library.custom_op("normfuse_tests::strided", mutates_args=())
def strided(x: torch.Tensor) -> torch.Tensor:
    """A user's operator, which sees strides."""
    _seen.append(x.stride())
    return x * 2


@strided.register_fake
def _(x):
    return torch.empty_like(x)


strided.register_autograd(lambda ctx, gradient: gradient * 2)


def conv(channels_in, channels, kernel=3, **options):
    return nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, **options)


class Net(nn.Module):
    """A convolution, a norm, and what a function does with them."""

    def __init__(self, then, channels_in=4, channels=16):
        super().__init__()
        torch.manual_seed(0)
        self.then = then
        self.first, self.norm = conv(channels_in, channels), nn.GroupNorm(4, channels)
        self.second = conv(channels, channels)

    def forward(self, x):
        return self.then(self, x, F.silu(self.norm(self.first(x))))


def in_place_through_a_view(net, x, y):
    z = net.second(y)
    z.permute(0, 2, 3, 1).mul_(2)
    return z


def in_place_through_a_slice(net, x, y):
    z = net.second(y)
    z[:, :8].add_(1)
    return z


def twice_as_large(image):
    """By an index, as Inductor interpolates: the result is traced as contiguous."""
    places = torch.arange(2 * image.shape[-1]) // 2
    return torch.ops.aten._unsafe_index(image, [None, None, places[:, None], places])


def upsampled(net, x, y):
    """As a U-Net's decoder: what is interpolated is added to what lies otherwise."""
    z = twice_as_large(F.avg_pool2d(net.second(y), 2)) + y
    return z + net.second(F.silu(net.norm(z)))


def upsampled_and_viewed(net, x, y):
    z = twice_as_large(F.avg_pool2d(net.second(y), 2)) * 2
    return net.second(z), z.view(2, -1)


def as_strided(net, x, y):
    return net.second(y).as_strided((2, 3), (5, 7)) * 1.0


def bits(net, x, y):
    return net.second(y).detach().view(torch.int32) >> 3


def complex_numbers(net, x, y):
    return torch.view_as_complex(net.second(y).contiguous().unflatten(3, (4, 2))).abs()


def attention(net, x, y):
    rows = net.second(y).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(rows, rows, rows).transpose(1, 2).view_as(y) + y


def pre_activation(net, x, y):
    y = net.first(x)
    for _ in range(3):
        y = y + net.second(F.relu(net.norm(y)))
    return y


THEN = {
    "next": lambda net, x, y: net.second(y),
    "pre-activation": pre_activation,
    "norm at the end": lambda net, x, y: y,
    "both": lambda net, x, y: (y, net.second(y)),
    "residual": lambda net, x, y: torch.relu(net.second(y) + y),
    "flatten": lambda net, x, y: net.second(y).flatten(1) @ torch.ones(16 * 64, 3),
    "view": lambda net, x, y: net.second(y).view(2, 4, 4, -1).sum(1) if x.is_contiguous() else y,
    "view in place": in_place_through_a_view,
    "slice in place": in_place_through_a_slice,
    "as_strided": as_strided,
    "bits": bits,
    "complex": complex_numbers,
    "attention": attention,
    "user": lambda net, x, y: torch.ops.normfuse_tests.strided(net.second(y)),
    "user between": lambda net, x, y: net.second(torch.ops.normfuse_tests.strided(y)),
    "slice": lambda net, x, y: net.second(y)[:, 2:9],
    "permute": lambda net, x, y: net.second(y).permute(0, 2, 3, 1),
    "concatenation": lambda net, x, y: torch.cat((y, net.second(y), x), 1),
    "shuffle": lambda net, x, y: F.pixel_shuffle(net.second(y), 2),
    "pooling": lambda net, x, y: F.max_pool2d(net.second(F.avg_pool2d(y, 2)), 2),
    "head": lambda net, x, y: F.adaptive_avg_pool2d(net.second(y), 1).flatten(1),
    "upsampling": lambda net, x, y: net.second(F.interpolate(y, scale_factor=2)),
    "bilinear": lambda net, x, y: net.second(F.interpolate(y, scale_factor=2, mode="bilinear")),
    "padding": lambda net, x, y: F.pad(net.second(F.pad(y, (1, 1, 1, 1), mode="reflect")), (0, 1)),
    "no padding": lambda net, x, y: F.pad(net.second(F.pad(y, (0,) * 4, "replicate")), (0,) * 4, "replicate"),
    "depthwise": lambda net, x, y: F.conv2d(y, net.second.weight[:, :1], groups=16),
    "transposed": lambda net, x, y: F.conv_transpose2d(y, net.second.weight, stride=2),
    "softmax": lambda net, x, y: net.second(y).softmax(1),
    "one tap": lambda net, x, y: F.conv2d(net.norm(F.conv2d(y, net.second.weight[:, :, :1, :1])), net.second.weight),
    "mean": lambda net, x, y: y * net.second(y).mean((2, 3), keepdim=True).sigmoid(),
    "copy": lambda net, x, y: net.second(y.contiguous()).clone(),
    "views together": lambda net, x, y: (lambda z: (z, z.flatten(2)))(net.second(y)),
    "contiguous twice": lambda net, x, y: (y, y.contiguous()),
    "expand": lambda net, x, y: net.second(y).mean(1, keepdim=True).expand(-1, 5, -1, -1),
    "named": lambda net, x, y: F.conv2d(input=y, weight=net.second.weight),
    "sort": lambda net, x, y: net.second(y).sort(1)[0],
    "upsampled": upsampled,
    "upsampled, viewed": upsampled_and_viewed,
    "cumsum": lambda net, x, y: net.second(y).flatten(1).cumsum(1),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    """Float32 convolutions as PyTorch has them on a GPU."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def run(function, x, parameters):
    given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    results = function(given)
    results = results if isinstance(results, tuple) else (results,)
    roots = [each.square().sum() for each in results if each.requires_grad]
    gradients = torch.autograd.grad(roots, [given, *parameters], allow_unused=True) if roots else ()
    return results, gradients


def check(net, x, results=None):
    """Values, gradients and the strides of both are the plain model's."""
    opened = Opened(net)
    _seen.clear()
    expected, of_expected = run(net, x, list(net.parameters()))
    strides = list(_seen)
    _seen.clear()
    found, gradients = run(opened, x, list(net.parameters()))
    assert _seen == strides
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5, check_stride=True)
    for each, other in zip(gradients, of_expected, strict=True):
        assert (each is None) == (other is None)
        if each is not None:
            torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-4)
            assert each.stride() == other.stride()
    return opened


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", THEN)
def test_programs(name, format):
    net = Net(THEN[name]).to(memory_format=format)
    opened = check(net, torch.randn(2, 4, 8, 8).contiguous(memory_format=format))
    assert "normfuse.statistics.default" in opened.names()


@pytest.mark.parametrize("name", ["next", "residual", "head", "views together", "user"])
def test_inference(name):
    net = Net(THEN[name]).eval()
    opened, x = Opened(net), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected, found = net(x), opened(x)
    for each, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5, check_stride=True)


def test_volumes():
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv3d(2, 8, 3), nn.GroupNorm(2, 8), nn.LeakyReLU(), nn.Conv3d(8, 8, 3), nn.GroupNorm(8, 8), nn.ReLU())
    )
    opened = check(net, torch.randn(2, 2, 7, 8, 9))
    assert opened.chains == ["add -> group_norm -> mul -> add -> leaky_relu", "add -> group_norm -> mul -> add -> relu"]


def test_one_channel():
    """An image of one channel lies as both formats. It is copied into none, nor is what the convolution makes of it."""
    net = Net(THEN["next"], channels_in=1)
    opened = check(net, torch.randn(2, 1, 8, 8))
    copies = [(node.meta["val"], node.args[0].meta["val"]) for node in opened.nodes("aten.clone.default")]
    shapes = [tuple(copy.shape) for copy, image in copies if copy.stride() != image.stride()]
    assert (2, 1, 8, 8) not in shapes and shapes.count((2, 16, 8, 8)) == 2  # the result, and its gradient


def test_only_around_open_norms():
    """Convolutions that no image leads to from an open norm, or which cuDNN runs as well otherwise, lie as traced."""
    torch.manual_seed(0)
    left, right, norm = conv(4, 8), conv(4, 8), nn.GroupNorm(2, 8)
    opened = Opened(lambda x, y: (left(x), norm(right(y))))
    x, y = torch.randn(2, 2, 4, 8, 8)
    found, expected = opened(x, y), (left(x), norm(right(y)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_stride=True)
    formats = [node.meta["val"].is_contiguous() for node in opened.nodes("aten.convolution.default")]
    assert sorted(formats) == [False, True]


def test_without_open_norms():
    """A graph without one is left as it is."""
    opened = Opened(nn.Sequential(conv(4, 8), nn.ReLU(), conv(8, 8)))
    opened(torch.randn(2, 4, 8, 8)).sum().backward()
    assert "aten.clone.default" not in opened.names()


def test_exact_float32(monkeypatch):
    """Where PyTorch's setting forbids TF32, convolutions keep their format, and norms read that."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    monkeypatch.setattr("tests.ops.opened.check_images", lambda graph: None)
    opened = check(Net(THEN["residual"]), torch.randn(2, 4, 8, 8))
    assert all(node.meta["val"].is_contiguous() for node in opened.nodes("aten.convolution.default"))


def test_draws():
    """A dropout draws as without the pass."""
    net = Net(lambda net, x, y: F.dropout(net.second(F.dropout(y, 0.5)), 0.5))
    opened, x = Opened(net), torch.randn(2, 4, 8, 8)
    monkey = []
    with torch._inductor.config.patch(fallback_random=True):  # Inductor's own draws are others
        for each in net, opened:
            torch.manual_seed(3)
            monkey.append(each(x))
    torch.testing.assert_close(*monkey, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["next", "residual", "concatenation", "head", "pre-activation", "upsampled"])
def test_saved_bytes(name, dtype):
    """No more is kept for the backward pass than a compiler's graph without this project keeps."""
    torch.manual_seed(0)
    net, x = Net(THEN[name], 8, 32).to(dtype), torch.randn(2, 8, 32, 32, dtype=dtype)
    plain = torch.compile(net, backend="aot_eager_decomp_partition")
    least, _ = saved_bytes(plain, net.parameters(), x)
    found, _ = saved_bytes(Opened(net), net.parameters(), x)
    assert found <= 1.02 * least


def test_after_a_graph_break():
    """The next graph sees PyTorch's strides."""

    def then(net, x, y):
        y = net.second(y)
        torch._dynamo.graph_break()
        return y.view(2, -1) * 2

    check(Net(then), torch.randn(2, 4, 8, 8))


def test_open_sizes():
    opened = Opened(net := Net(THEN["residual"]), dynamic=True)
    for size in (8, 9, 12):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(opened(x), net(x), rtol=1e-4, atol=1e-5, check_stride=True)
    assert len(opened.graphs) <= 2


def test_one_channel_of_open_sizes(fresh_compiler):
    """Inductor cannot save a view of it: it compares strides, one of which may be one."""
    net, x = Net(THEN["next"], channels_in=1), torch.randn(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        results = torch.compile(net, backend="normfuse", dynamic=True)(x), net(x)
    gradients = [torch.autograd.grad(each.float().square().sum(), net.first.weight)[0] for each in results]
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2, check_stride=True)
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-1)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_a_size_that_values_decide(format):
    """A convolution of it lies as it was traced: what it gives for channels_last is not known before."""
    net = Net(lambda net, x, y: net.second(y[x.mean((1, 2, 3)) > -10])).to(memory_format=format)
    opened = check(net, torch.randn(3, 4, 8, 8).contiguous(memory_format=format))
    assert "normfuse.statistics.default" in opened.names()


@pytest.mark.parametrize("width", [0, 1])
def test_pads_by_nothing(width):
    """U-Nets pad what is concatenated, by nothing for most sizes. PyTorch's operator of its gradient is not called for
    that, and convolutions on both sides lie as channels_last."""

    def then(net, x, y):
        padded = F.pad(net.first(x), (width, 0, 0, 0), "replicate")[..., :8]
        return net.second(torch.cat((y[:, :8], padded[:, :8]), 1))

    opened = check(Net(then), torch.randn(2, 4, 8, 8))
    assert ("aten.replication_pad2d_backward.default" in opened.names()) == bool(width)
    convolutions = opened.nodes("aten.convolution_backward.default")
    given = [each.meta["val"] for node in convolutions for each in node.args[:3]]
    assert width or all(each.is_contiguous(memory_format=torch.channels_last) for each in given)


def test_a_graph_in_no_order():
    """As Inductor's own passes leave one."""
    graph = torch.fx.Graph()
    first = graph.placeholder("x")
    second = graph.call_function(torch.ops.aten.sin.default, (first,))
    third = graph.call_function(torch.ops.aten.cos.default, (second,))
    other = graph.call_function(torch.ops.aten.exp.default, (first,))
    graph.output((third, other))
    third.append(second)
    hold_apart(graph)
    graph.lint()
    assert [node.name for node in graph.nodes] == ["x", "sin_default", "cos_default", "exp_default", "output"]
