"""Promise: float32 convolutions of single pixels become products that pay, in compiled graphs and in
``faster_float32``, with PyTorch's values, gradients and strides."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import ops
from ops import convolution_as_product, float32_products, precision
from ops.convolution import CHANNELS_LAST
from ops.matrix_products import PRODUCT
from tests.ops.products import Called, Compiler, taken

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIZES = {1: (9,), 2: (5, 7), 3: (3, 4, 5)}


@pytest.fixture(autouse=True)
def all_pay(monkeypatch):
    monkeypatch.setattr(convolution_as_product, "pays", lambda operands: True)
    monkeypatch.setattr(precision, "convolutions_allow_tf32", lambda: False)


@pytest.fixture
def compiled():
    return Compiler(fullgraph=True)


def drawn(dims, is_last, bias=True, **options):
    torch.manual_seed(0)
    layer, image = CONVOLUTIONS[dims](8, 12, 1, bias=bias, **options), torch.randn(2, 8, *SIZES[dims])
    if is_last:
        layer, image = (each.to(memory_format=CHANNELS_LAST[dims + 2]) for each in (layer, image))
    return layer, image.requires_grad_()


def step(function, layer, image):
    result = function(image)
    return result, *torch.autograd.grad(result.square().sum(), [image, *layer.parameters()])


def check(found, expected, has_strides=True):
    for got, each in zip(found, expected, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-4)
        assert got.stride() == each.stride() or not has_strides


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims, is_last", [(1, False), (2, False), (2, True), (3, False)])
def test_a_step(compiled, dims, is_last, bias):
    layer, image = drawn(dims, is_last, bias)
    expected = step(layer, layer, image)
    check(step(compiled(layer), layer, image), expected)
    assert taken(compiled.graphs) == [1, 2]
    with Called() as called, ops.faster_float32():
        found = step(layer, layer, image)
    check(found, expected)
    assert taken(called.graphs) == [3]


def test_volumes():
    """Channels last, as cuDNN has them; PyTorch's own on the CPU have other strides."""
    layer, image = drawn(3, True)
    expected = step(layer, layer, image)
    with Called() as called, ops.faster_float32():
        found = step(layer, layer, image)
    check(found, expected, has_strides=False)
    assert taken(called.graphs) == [3] and found[0].is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient(compiled, wanted):
    layer, image = drawn(2, False)
    leaves = [image, *layer.parameters()]
    for place, each in enumerate(leaves):
        each.requires_grad_(place == wanted)
    (expected,) = torch.autograd.grad(layer(image).square().sum(), leaves[wanted])
    (found,) = torch.autograd.grad(compiled(layer)(image).square().sum(), leaves[wanted])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert taken(compiled.graphs) == [1, int(wanted < 2)]


LEFT = {
    "stride": lambda x, w: torch.conv2d(x, w, stride=2),
    "padding": lambda x, w: torch.conv2d(x, w, padding=1),
    "groups": lambda x, w: torch.conv2d(x, w[:, :4], groups=2),
    "window": lambda x, w: torch.conv2d(x, w.expand(-1, -1, 2, 2)),
    "transposed": lambda x, w: torch.conv_transpose2d(x, w.transpose(0, 1)),
    "another dtype": lambda x, w: torch.conv2d(x.double(), w.double()),
    "part of an image": lambda x, w: torch.conv2d(x[..., ::2], w),
    "sequence with channels last": lambda x, w: torch.conv1d(x[0].flatten(1).mT.contiguous().mT[None], w[..., 0]),
    "weight alone in channels_last": lambda x, w: torch.conv2d(x, w.to(memory_format=torch.channels_last)),
    "no channels": lambda x, w: torch.conv2d(x[:, :0], w[:, :0]),
    "no samples": lambda x, w: torch.conv2d(x[:0], w),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(compiled, name):
    given = torch.randn(2, 8, 6, 6), torch.randn(12, 8, 1, 1)
    expected = LEFT[name](*given)
    torch.testing.assert_close(compiled(LEFT[name])(*given), expected)
    with Called() as called, ops.faster_float32():
        found = LEFT[name](*given)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride() and taken([*compiled.graphs, *called.graphs]) == [0, 0]


def test_the_setting_decides(compiled, monkeypatch):
    """That for convolutions."""
    monkeypatch.setattr(precision, "convolutions_allow_tf32", lambda: True)
    layer, image = drawn(2, False)
    expected = compiled(layer)(image)
    with Called() as called, ops.faster_float32():
        check([layer(image)], [expected])
    assert taken([*compiled.graphs, *called.graphs]) == [0, 0]


def test_what_does_not_pay_is_left(compiled, monkeypatch):
    """Both gradients where one does not; nor is one computed and thrown away."""
    monkeypatch.setattr(convolution_as_product, "pays", lambda operands: operands[0].shape[1] != 70)
    layer, image = drawn(2, True)
    expected = step(layer, layer, image)
    check(step(compiled(layer), layer, image), expected)
    with Called() as called, ops.faster_float32():
        check(step(layer, layer, image), expected)
    assert taken([*compiled.graphs, *called.graphs]) == [1, 0, 1]


def test_large_gradients_of_samples_are_left(compiled):
    """Which are added up only then."""
    torch.manual_seed(0)
    layer, image = nn.Conv2d(64, 48, 1), torch.randn(2, 64, 3, 3, requires_grad=True)
    check(step(compiled(layer), layer, image), step(layer, layer, image))
    assert taken(compiled.graphs) == [1, 0]


@pytest.mark.parametrize("is_last", [True, False])
def test_images_of_one_pixel(is_last):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 1)
    image = torch.randn(70, 1, 1, 8).permute(0, 3, 1, 2) if is_last else torch.randn(70, 8, 1, 1)
    image.requires_grad_()
    expected = step(layer, layer, image)
    with Called() as called, ops.faster_float32():
        check(step(layer, layer, image), expected)
    assert taken(called.graphs)[0] >= 1


def test_values_that_are_not_known_yet():
    """Of nodes that another's pass put there."""
    graph = torch.fx.Graph()
    input, weight = graph.placeholder("input"), graph.placeholder("weight")
    arguments = input, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    graph.output(graph.call_function(torch.ops.aten.convolution.default, arguments))
    for known in False, True:
        for node in graph.nodes:
            if known and node.op == "call_function":
                node.meta["val"] = torch.empty(2, 12, 3, 3)
        float32_products.take_over(graph)
        assert [node.target for node in graph.nodes][2] is torch.ops.aten.convolution.default


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 7, 5, 5), (12, 8, 1, 1), (12,)),
        ((2, 8, 5, 5), (12, 8, 1, 1), (11,)),
        ((2, 8, 5), (12, 8, 1, 1), (12,)),
        ((2, 2, 8, 5, 5), (12, 8, 1, 1), (12,)),
    ],
)
def test_what_pytorch_refuses_is_refused(shapes):
    given = [torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError) as expected:
        torch.conv2d(*given)
    with ops.faster_float32(), pytest.raises(RuntimeError) as found:
        torch.conv2d(*given)
    assert str(found.value) == str(expected.value)


def test_open_sizes_are_left():
    layer, image = drawn(2, True)
    graphs: list[int] = []

    def compile_graph(module, inputs):
        float32_products.take_over(module.graph)
        graphs.append(sum(node.target is PRODUCT for node in module.graph.nodes))
        return make_boxed_func(module.forward)

    function = torch.compile(layer, backend=aot_autograd(fw_compiler=compile_graph), dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(function(image), layer(image))
    assert graphs == [0]
