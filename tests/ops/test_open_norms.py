"""Promise: an image's norm in a graph that a compiler gets is two operators and PyTorch's functions, as accurate."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ops
from ops.calls import parse
from tests.ops.opened import Opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def draw(*shape, grad=True, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(dtype).requires_grad_(grad)


def film(x, weight, bias, scale, shift):
    return F.silu(F.group_norm(x, 4, weight, bias) * (1 + scale[:, :, None, None]) + shift[:, :, None, None])


CHANNELS, SHAPE = 16, (3, 16, 5, 6)
VECTOR, SAMPLE = (CHANNELS,), (3, CHANNELS)
#: Functions of an image and vectors, the shapes of these, and the chain in words.
FUNCTIONS = {
    "norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (VECTOR, VECTOR), "group_norm -> mul -> add"),
    "silu": (
        lambda x, w, b: F.silu(F.group_norm(x, 2, w, b, 1e-3)),
        (VECTOR, VECTOR),
        "group_norm -> mul -> add -> silu",
    ),
    "without": (lambda x: F.relu(F.group_norm(x, 4)), (), "group_norm -> mul -> add -> relu"),
    "weight alone": (lambda x, w: F.group_norm(x, 4, w), (VECTOR,), "group_norm -> mul -> add"),
    "bias alone": (lambda x, b: F.gelu(F.group_norm(x, 4, torch.ones_like(b), b)), (VECTOR,), None),
    "a channel a group": (lambda x, w, b: F.elu(F.group_norm(x, CHANNELS, w, b)), (VECTOR, VECTOR), None),
    "one group": (lambda x, w, b: F.leaky_relu(F.group_norm(x, 1, w, b)), (VECTOR, VECTOR), None),
    "film": (film, (VECTOR, VECTOR, SAMPLE, SAMPLE), None),
    "several": (
        lambda x, w, b: torch.tanh(F.silu(F.group_norm(x, 4, w, b)) * 2 + 1),
        (VECTOR, VECTOR),
        "group_norm -> mul -> add -> silu -> mul numbers -> add numbers -> tanh",
    ),
    "time embedding": (
        lambda x, w, b, t: F.silu(F.group_norm(x + t[:, :, None, None], 4, w, b)),
        (VECTOR, VECTOR, SAMPLE),
        "add sample -> group_norm -> mul -> add -> silu",
    ),
    "bias before": (
        lambda x, w, b, c: F.group_norm(x + c[:, None, None], 4, w, b),
        (VECTOR, VECTOR, VECTOR),
        "add -> group_norm -> mul -> add",
    ),
    "vectors before": (
        lambda x, w, b, c, t: F.silu(F.group_norm(x + c[:, None, None] + t[:, :, None, None], 4, w, b)),
        (VECTOR, VECTOR, VECTOR, SAMPLE),
        "add -> add sample -> group_norm -> mul -> add -> silu",
    ),
    "several before": (
        lambda x, w, b, c, d, e: F.group_norm(
            F.gelu(x * c[:, None, None]) + d[:, None, None] + e[:, None, None], 2, w, b
        ),
        (VECTOR,) * 5,
        "mul -> gelu -> add -> add -> group_norm -> mul -> add",
    ),
    "activation before": (
        lambda x, w, b: F.group_norm(F.gelu(x), 4, w, b),
        (VECTOR, VECTOR),
        "gelu -> group_norm -> mul -> add",
    ),
    "residual behind": (
        lambda x, w, b: torch.relu(F.group_norm(x, 4, w, b) + x.flip(0)),
        (VECTOR, VECTOR),
        "group_norm -> mul -> add",
    ),
}  # fmt: skip


def evaluated(function, arguments):
    result = function(*arguments)
    cotangent = draw(*result.shape, grad=False).to(result.dtype)
    return result, *torch.autograd.grad(result, [each for each in arguments if each.requires_grad], cotangent)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, dtype, format):
    """At most 1.1 times PyTorch's error against float64, and a float32 epsilon."""
    function, shapes, chain = FUNCTIONS[name]
    x = draw(*SHAPE, grad=False).to(dtype).contiguous(memory_format=format).requires_grad_()
    arguments = [x, *(draw(*shape, dtype=dtype) for shape in shapes)]
    exact = evaluated(function, [each.detach().double().requires_grad_() for each in arguments])
    opened = Opened(function)
    for ours, theirs, expected in zip(evaluated(opened, arguments), evaluated(function, arguments), exact, strict=True):
        errors = [((each.double() - expected).norm() / expected.norm()).item() for each in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1] + (2e-7 if dtype == torch.float32 else 2e-3), errors
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    names = opened.names()
    assert names.count("normfuse.statistics.default") == names.count("normfuse.sums.default") == 1
    assert not any(each.startswith("normfuse.forward") for each in names)
    assert chain is None or opened.chains == [chain]


@pytest.mark.parametrize("shape", [(2, 8, 7), (2, 8, 3, 4, 5), (1, 8, 1, 2)])
def test_images_of_other_dimensions(shape):
    function = FUNCTIONS["silu"][0]
    arguments = [draw(*shape), draw(8), draw(8)]
    opened = Opened(function)
    torch.testing.assert_close(evaluated(opened, arguments), evaluated(function, arguments), rtol=1e-4, atol=1e-5)
    assert "normfuse.sums.default" in opened.names()


@pytest.mark.parametrize(
    "shape, dtype",
    [((2, 8, 1, 1), torch.float32), ((0, 8, 3, 3), torch.float32), ((2, 8, 3, 3), torch.float64)],
)
def test_what_stays_closed(shape, dtype):
    """Rows, empty images, and what the kernels do not take."""
    opened = Opened(function := FUNCTIONS["norm"][0])
    arguments = [draw(*shape, dtype=dtype), draw(8, dtype=dtype), draw(8, dtype=dtype)]
    torch.testing.assert_close(evaluated(opened, arguments), evaluated(function, arguments), rtol=1e-4, atol=1e-5)
    assert "normfuse.statistics.default" not in opened.names()


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (3,), (1, 2, 3)])
def test_some_gradients(asked):
    """Of any part of the arguments."""
    function, shapes, _ = FUNCTIONS["time embedding"]
    arguments = [each.detach() for each in (draw(*SHAPE), *(draw(*shape) for shape in shapes))]
    for place in asked:
        arguments[place].requires_grad_()
    opened = Opened(function)
    torch.testing.assert_close(evaluated(opened, arguments), evaluated(function, arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["time embedding", "bias before", "vectors before"])
def test_no_pass_for_what_is_added(name):
    """The kernel of the sums has the gradients of what is added right before the norm, too: no image is added up."""
    function, shapes, _ = FUNCTIONS[name]
    opened = Opened(function)
    evaluated(opened, [draw(*SHAPE), *(draw(*shape) for shape in shapes)])
    totals = [node for node in opened.nodes("aten.sum.dim_IntList") if node.args[0].meta["val"].ndim == 4]
    assert not totals and "normfuse.sums.default" in opened.names()


@pytest.mark.parametrize("name", ["time embedding", "bias before", "vectors before", "several before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_to_16_bit_images(name, dtype):
    """It is subtracted from the means, once for each channel, and the means from what comes before it."""
    function, shapes, _ = FUNCTIONS[name]
    opened = Opened(function)
    evaluated(opened, [draw(*SHAPE, dtype=dtype), *(draw(*shape, dtype=dtype) for shape in shapes)])
    forward = opened.graphs[0].graph
    centred = next(node for node in forward.nodes if str(node.target) == "aten.sub.Tensor")
    assert (str(centred.args[0].target) == "aten.add.Tensor") == (dtype == torch.float32)


@pytest.mark.parametrize("steps", ["add -> add sample", "add sample -> no add -> add", "add -> silu -> add sample", ""])
def test_means_without_what_is_added(steps):
    """Of steps right before the norm alone. With them and without are two plans."""
    shapes = {"add": VECTOR, "add sample": SAMPLE}
    image, weight = draw(*SHAPE, grad=False), draw(*VECTOR, grad=False)
    names = steps.split(" -> ")
    vectors = [draw(*shapes[name], grad=False) for name in names if name in shapes]
    text = parse(" -> ".join(filter(None, [steps, "group_norm(4, 1e-05) -> mul -> no add"]))).text_in_graph
    values, last, rest = image.double(), torch.zeros(3, CHANNELS).double(), iter(vectors)
    for name in names:
        if name in shapes:
            vector = next(rest).double()
            values, last = values + vector.view(-1, CHANNELS, 1, 1), last + vector
        elif name == "silu":
            values, last = F.silu(values), torch.zeros(3, CHANNELS).double()
    means = values.view(3, 4, -1).mean(2).repeat_interleave(CHANNELS // 4, 1)
    deviations = values.view(3, 4, -1).var(2, correction=0).add(1e-5).sqrt().repeat_interleave(CHANNELS // 4, 1)
    for are_apart in (False, True):
        found = torch.ops.normfuse.statistics(text, [image, *vectors, weight], are_apart)
        expected = torch.stack([means - last if are_apart else means, weight.double() / deviations])
        torch.testing.assert_close(found[-2 * 3 * CHANNELS :].view(2, 3, -1).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_images_that_are_cast(training):
    """The kernels read them before, as they were. What is done to their values is not another thing for that."""
    torch.manual_seed(0)
    convolution, vectors = nn.Conv2d(3, CHANNELS, 1).bfloat16(), draw(3, CHANNELS, grad=False)

    def function(x):
        return F.group_norm(convolution(x).float() + 3 * vectors[:, :, None, None], 4)

    x = draw(3, 3, 5, 6, grad=False).bfloat16()
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(torch.compile(function, backend="normfuse")(x), function(x), rtol=1e-4, atol=1e-4)


def test_what_is_added_to_norms_of_a_channel_each():
    """It changes nothing, and its gradient is 0 up to rounding."""

    def function(x, w, c):
        return F.silu(F.group_norm(x + c[:, None, None], CHANNELS, w))

    arguments = [draw(2, CHANNELS, 64, 64), draw(*VECTOR), draw(*VECTOR)]
    ours, theirs = (evaluated(each, arguments)[-1].abs().max() for each in (Opened(function), function))
    assert ours < 0.1 * theirs


def test_equal_values_leave_nothing():
    """Of a group of equal values, also behind a vector."""
    opened = Opened(lambda x, c: F.group_norm(x + c[:, None, None], 4))
    x, c = torch.full(SHAPE, 0.3), torch.full(VECTOR, 1e4 / 3)
    assert torch.equal(opened(x, c), torch.zeros(SHAPE))


def test_a_vector_alone_leaves_nothing():
    """As of a convolution whose weight is 0, in 16 bits."""
    opened = Opened(lambda x, c: F.group_norm(x + c[:, None, None], CHANNELS))
    x, c = torch.zeros(SHAPE).bfloat16(), torch.full(VECTOR, 1e4 / 3).bfloat16()
    assert torch.equal(opened(x, c), torch.zeros(SHAPE).bfloat16())


def test_outliers_and_large_means():
    """As PyTorch, where the first pixel is one, and where the mean is a thousand deviations."""
    x = draw(*SHAPE, grad=False)
    first = x.clone()
    first[:, :, 0, 0] = 1e4
    opened = Opened(function := lambda x: F.group_norm(x, 4))
    for each in (first, x + 1e3, x * 1e-20, torch.full(SHAPE, torch.finfo(torch.float32).min)):
        exact = function(each.double())
        errors = [(result - exact).norm() / exact.norm().clamp_min(1e-30) for result in (opened(each), function(each))]
        # On the CPU PyTorch's sums overflow where its kernels for GPUs do not.
        assert errors[0] <= 1.5 * errors[1].nan_to_num(0.0) + 2e-7


def test_not_finite():
    opened = Opened(function := lambda x: F.group_norm(x, 4))
    for value in (float("nan"), float("inf"), float("-inf")):
        x = draw(*SHAPE, grad=False)
        x[1, 2, 3, 4] = value
        torch.testing.assert_close(opened(x), function(x), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_second_derivatives():
    """There are none, and PyTorch says so."""
    opened = Opened(FUNCTIONS["silu"][0])
    x, w, b = draw(*SHAPE), draw(*VECTOR), draw(*VECTOR)
    (gradient,) = torch.autograd.grad(opened(x, w, b).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_torch_func():
    """A graph of torch.func's is left as it is."""
    function = FUNCTIONS["silu"][0]
    arguments = draw(*SHAPE, grad=False), draw(*VECTOR, grad=False), draw(*VECTOR, grad=False)
    opened = Opened(lambda *each: torch.func.grad(lambda x: function(x, *each[1:]).sin().sum())(each[0]))
    expected = torch.func.grad(lambda x: function(x, *arguments[1:]).sin().sum())(arguments[0])
    torch.testing.assert_close(opened(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_checkpoints():
    """A checkpoint's body is opened too."""
    block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
    opened = Opened(lambda x: checkpoint(block, x, use_reentrant=False))
    x = draw(*SHAPE)
    torch.testing.assert_close(evaluated(opened, [x]), evaluated(block, [x]), rtol=1e-4, atol=1e-4)
    assert opened.names().count("normfuse.statistics.default") >= 1


def test_modules_and_functions_of_ours():
    """They are open in such a graph as well."""
    layer = nn.GroupNorm(4, 16)
    opened = Opened(lambda x: ops.group_norm(x, 4, layer.weight, layer.bias, after=(ops.pointwise.silu(),)))
    x = draw(*SHAPE)
    expected = F.silu(layer(x))
    torch.testing.assert_close(opened(x), expected, rtol=1e-4, atol=1e-5)
    assert "normfuse.statistics.default" in opened.names()


@pytest.mark.parametrize("name", ["silu", "time embedding", "film"])
def test_opcheck(name):
    """Schema, fakes and dynamic shapes of both operators."""
    function, shapes, _ = FUNCTIONS[name]
    opened = Opened(function)
    evaluated(opened, [draw(*SHAPE), *(draw(*shape) for shape in shapes)])
    for operator in ("normfuse.statistics.default", "normfuse.sums.default"):
        (node,) = opened.nodes(operator)

        def real(value):
            return torch.randn(value.shape).as_strided(value.shape, value.stride()).to(value.dtype)

        arguments = torch.fx.node.map_arg(node.args, lambda each: real(each.meta["val"]))
        kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(node.target, arguments, test_utils=kinds)


def test_the_text_has_what_statistics_depend_on():
    """Norms with different functions behind them share a kernel for their statistics."""
    texts = []
    for function in (F.relu, F.silu):
        opened = Opened(lambda x, w, b, function=function: function(F.group_norm(x, 4, w, b)))
        opened(draw(*SHAPE), draw(*VECTOR), draw(*VECTOR))
        texts += [node.args[0] for node in opened.nodes("normfuse.statistics.default")]
    assert texts[0] == texts[1]


def test_a_copied_model():
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.ReLU())
    opened = Opened(copied := copy.deepcopy(model))
    x = draw(*SHAPE, grad=False)
    torch.testing.assert_close(opened(x), copied(x), rtol=1e-4, atol=1e-5)
