"""Promise: the backend's max pooling has PyTorch's values and gradients, and gathers both."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from ops.fingerprint import fingerprint
from ops.rewriting import rewrite
from tests.ops.opened import POOLS, Opened

OPERATOR = torch.ops.normfuse.max_pool.default


def max_pool(input, *arguments, **options):
    return getattr(F, f"max_pool{input.ndim - 2}d")(input, *arguments, **options)


@st.composite
def poolings(draw):
    """An image's sizes and what its pooling is given."""
    dims = draw(st.integers(1, 3))

    def rows(smallest, largest):
        return st.lists(st.integers(smallest, largest), min_size=dims, max_size=dims)

    kernel, stride = draw(rows(1, 4 if dims < 3 else 2)), draw(rows(-3, 2))
    stride = [max(1, size + apart) for size, apart in zip(kernel, stride, strict=True)]
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    sizes = [size + extra for size, extra in zip(kernel, draw(rows(0, 9)), strict=True)]
    return sizes, (kernel, stride, padding, 1, draw(st.booleans()))


def gathered(input, kernel, stride, padding, dilation, ceil_mode):
    outputs = list(max_pool(input.detach(), kernel, stride, padding, ceil_mode=ceil_mode).shape[2:])
    return OPERATOR(input, fingerprint([]), outputs, kernel, stride, padding, ceil_mode)


def differentiated(function, input, arguments):
    result = function(input, *arguments)
    gradient = torch.randint(-8, 8, result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return result.detach(), *torch.autograd.grad(result, input, gradient)


@settings(max_examples=300)
@given(drawn=poolings(), special=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_values_and_gradients(drawn, special, dtype):
    """Of equal values PyTorch's, too, as of infinities and NaNs. (Sums of small integers are exact in each dtype.)"""
    sizes, arguments = drawn
    if dtype == torch.float64 and any(size > step for size, step in zip(*arguments[:2], strict=True)):
        dtype = torch.float32  # no kernel takes more
    generator = torch.Generator().manual_seed(0)
    input = torch.randint(-3, 3, (2, 3, *sizes), generator=generator).to(dtype)
    if special:
        chosen = torch.randint(0, 4, input.shape, generator=generator)
        input = torch.where(chosen == 0, -torch.inf, torch.where(chosen == 1, torch.nan, input))
    input.requires_grad_()
    exact = differentiated(max_pool, input.detach().double().requires_grad_(), arguments)
    for own, expected in zip(differentiated(gathered, input, arguments), exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=0, equal_nan=True)


def nodes_of(function, *inputs, **options):
    """The functions in the graph that is compiled for these inputs."""
    found = []

    def take(graph, inputs):
        rewrite(graph, compiles=True)
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(function, backend=take, fullgraph=True, **options)(*inputs)
    return found


IMAGE = torch.randn(2, 3, 8, 8)
TAKEN = {
    "a number": lambda x: F.max_pool2d(x, 2),
    "all": lambda x: F.max_pool2d(x, (3, 2), stride=3, padding=(1, 0), ceil_mode=True),
    "one number of a row": lambda x: torch.max_pool2d(x, [3], [4], [1]),
    "a line": lambda x: F.max_pool1d(x[..., 0], 4),
    "a volume": lambda x: F.max_pool3d(x[..., None], (2, 2, 1)),
    "windows that overlap": lambda x: F.max_pool2d(x, 3, (3, 2), 1),
}
LEFT = {
    "indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "dilation": lambda x: F.max_pool2d(x, 2, dilation=2),
    "no batch": lambda x: F.max_pool2d(x[0], 2),
    "a large window": lambda x: F.max_pool2d(x, 5),
    "windows that overlap, in float64": lambda x: F.max_pool2d(x.double(), 3, (3, 2), 1),
    "many windows that overlap": lambda x: F.max_pool2d(x, 4, 1),
    "one place": lambda x: F.max_pool2d(x, 1),
    "integers": lambda x: F.max_pool2d(x.to(torch.int64), 2),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("function, is_taken", [(each, each in TAKEN.values()) for each in (TAKEN | LEFT).values()])
def test_what_is_taken(function, is_taken):
    assert (OPERATOR in nodes_of(function, IMAGE)) == is_taken


@pytest.mark.usefixtures("fresh_compiler")
def test_open_sizes_are_left():
    assert OPERATOR not in nodes_of(lambda x: F.max_pool2d(x, 2), IMAGE, dynamic=True)


@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}], ids=str)
@pytest.mark.usefixtures("fresh_compiler")
def test_what_is_rounded_once(options):
    """In 16 bits Inductor may round the largest value and not the values that it is found among. (Of nearly equal ones
    eager PyTorch may choose another.)"""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3, dtype=torch.bfloat16)
    a, b = (torch.randn(2, 8, 16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def forward(a, b):
        return conv(F.max_pool2d((a * b).relu(), **options))

    with torch.compiler.config.patch(force_disable_caches=True):  # which do not know this project's code
        found = differentiated(torch.compile(forward, backend="normfuse"), a, [b])
    for own, expected in zip(found, differentiated(forward, a, [b]), strict=True):
        assert (own - expected).norm() <= 0.2 * expected.norm()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("dims", [2, 3])
def test_compiled(dims, stride):
    """PyTorch's values and strides, in a model with a norm, in both memory formats. In inference, PyTorch's own."""

    def forward(x):
        return F.max_pool2d(x.relu(), 3, stride, 1) if dims == 2 else F.max_pool3d(x.relu(), 2, stride - 1)

    compiled = torch.compile(forward, backend="normfuse", fullgraph=True)
    format = torch.channels_last if dims == 2 else torch.channels_last_3d
    for image in torch.randn(2, 3, *[9] * dims), torch.randn(2, 3, *[9] * dims).to(memory_format=format):
        image.requires_grad_()
        results = [differentiated(each, image, ()) for each in (compiled, forward)]
        for own, expected in zip(*results, strict=True):
            torch.testing.assert_close(own, expected)
            assert own.stride() == expected.stride()
        with torch.no_grad():
            assert torch.equal(compiled(image), forward(image))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "norm, format",
    [
        (nn.GroupNorm(2, 8), torch.contiguous_format),
        (nn.GroupNorm(2, 8), torch.channels_last),
        (nn.BatchNorm2d(8), torch.channels_last),
    ],
    ids=str,
)
def test_the_kernel_takes_images_as_they_lie(norm, format):
    """No copy is made for it, where a model's images are channels_last, or become so around an open norm."""
    first, last = (nn.Conv2d(8, 8, 3, padding=1).bfloat16() for _ in range(2))
    opened = Opened(lambda x: last(F.max_pool2d(F.relu(norm(first(x))), 3, 2, 1)))
    for each in (first, last, norm.bfloat16()):
        each.to(memory_format=format)
    image = torch.randn(2, 8, 12, 12).bfloat16().to(memory_format=format)
    opened(image).float().sum().backward()
    (node,) = opened.nodes(POOLS)
    assert all(each.meta["val"].is_contiguous(memory_format=torch.channels_last) for each in (*node.args[1:], node))


@pytest.mark.usefixtures("fresh_compiler")
def test_opcheck():
    """Schema, fakes and dynamic shapes."""
    opened = Opened(lambda x: F.max_pool2d(x, 3, 2, 1))
    opened(IMAGE.clone().requires_grad_()).sum().backward()
    (node,) = opened.nodes(POOLS)
    words, *images = node.args
    gradient, chosen = (torch.zeros(each.meta["val"].shape, dtype=each.meta["val"].dtype) for each in images)
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(node.target, (words, gradient, chosen), test_utils=kinds)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("stride", [2, 3])
def test_nothing_is_scattered(stride):
    """The graphs behind AOTAutograd have no operator of PyTorch's for max pooling, and keep a byte an output."""
    returned = []

    def look(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes]
        assert not any("aten.max_pool" in name or "offsets" in name or "scatter" in name for name in names), names
        (output,) = graph.graph.find_nodes(op="output")
        returned.append([each.meta["val"] for each in output.args[0]])
        return make_boxed_func(graph.forward)

    compile = aot_autograd(fw_compiler=look, bw_compiler=look)

    def backend(graph, inputs):
        rewrite(graph, compiles=True)
        return compile(graph, inputs)

    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    torch.compile(lambda x: F.max_pool2d(x, 3, stride, 1), backend=backend)(x).sum().backward()
    (result, places), (gradient,) = returned
    assert (places.dtype, places.shape, gradient.shape) == (torch.int8, result.shape, x.shape)
