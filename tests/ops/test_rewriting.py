"""Promise: each chain in a graph of PyTorch's operations becomes one call, which gives what PyTorch gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from ops.rewriting import rewrite
from tests.ops.graphs import AFFINE, CONV, IMAGES, LINEAR, ROWS, WEIGHT, check, compiled, draw, evaluated

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def seeded(make):
    torch.manual_seed(0)
    return make()


def linear():
    return nn.Linear(16, 32)


#: name → (layers, the input's shape, the chains)
LAYERS = {
    "group norm": (lambda: [linear(), nn.GroupNorm(4, 32), nn.SiLU()], ROWS, [f"{LINEAR} -> {AFFINE} -> silu"]),
    "in place": (
        lambda: [linear(), nn.ReLU(inplace=True), nn.GroupNorm(4, 32), nn.SiLU(inplace=True)],
        ROWS,
        [f"{LINEAR} -> relu -> {AFFINE} -> silu"],
    ),
    "layer norm": (
        lambda: [linear(), nn.LayerNorm(32), nn.GELU(approximate="tanh")],
        (2, 3, 16),
        [f"{LINEAR} -> {AFFINE} -> gelu_tanh"],
    ),
    "layer norm alone": (lambda: [nn.LayerNorm((4, 16)), nn.SiLU()], (2, 4, 16), [f"{AFFINE} -> silu"]),
    "layer norm of a plain input": (lambda: [nn.LayerNorm(16, bias=False)], ROWS, [AFFINE]),
    "three dimensions": (lambda: [linear(), nn.GroupNorm(3, 3), nn.ReLU()], (2, 3, 16), [f"{AFFINE} -> relu"]),
    "what changes nothing": (
        lambda: [linear(), nn.Identity(), nn.Flatten(), nn.Dropout(0.0).eval(), nn.GroupNorm(4, 32), nn.Mish()],
        ROWS,
        [f"{LINEAR} -> {AFFINE} -> mish"],
    ),
    "dropout that is off": (
        lambda: [linear(), nn.Dropout(0.0), nn.LayerNorm(32), nn.Dropout(0.9).eval(), nn.ELU(1.5)],
        ROWS,
        [f"{LINEAR} -> {AFFINE} -> elu"],
    ),
    "dropout of all": (lambda: [linear(), nn.Dropout(1.0), nn.LayerNorm(32), nn.ELU(1.5)], ROWS, [f"{AFFINE} -> elu"]),
    "linear": (lambda: [linear(), nn.LeakyReLU(0.2), nn.Linear(32, 8)], ROWS, [f"{LINEAR} -> leaky_relu"]),
    "convolution": (
        lambda: [nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()],
        IMAGES,
        [f"{CONV} -> {AFFINE} -> silu"],
    ),
    "two convolutions": (
        lambda: [
            *(nn.Conv2d(8, 16, 3, padding="same", dilation=2), nn.ReLU(), nn.GroupNorm(4, 16)),
            *(nn.Conv2d(16, 8, 3, stride=2, groups=2), nn.GroupNorm(2, 8), nn.Hardswish()),
        ],
        IMAGES,
        [f"{CONV} -> relu -> {AFFINE}", f"{CONV} -> {AFFINE} -> hardswish"],
    ),
    "transposed convolution": (
        lambda: [nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1), nn.GELU(), nn.GroupNorm(4, 16)],
        IMAGES,
        [f"conv_transpose2d -> add -> gelu -> {AFFINE}"],
    ),
    "convolution of other dimensions": (
        lambda: [nn.Conv1d(8, 16, 3), nn.Softplus(2.0, 3.0), nn.GroupNorm(4, 16), nn.ReLU6()],
        (2, 8, 7),
        [f"add -> softplus -> {AFFINE} -> hardtanh"],
    ),
    "convolution of other dimensions without a bias": (
        lambda: [nn.ConvTranspose3d(8, 16, 3, bias=False), nn.GroupNorm(4, 16)],
        (2, 8, 3, 4, 5),
        [AFFINE],
    ),
    "convolution of other dimensions, of one image": (
        lambda: [nn.Conv1d(8, 16, 3), nn.GroupNorm(1, 5)],
        (8, 7),
        [AFFINE],
    ),
    "convolution of other dimensions and layer norm": (
        lambda: [nn.Conv1d(8, 16, 3), nn.ReLU(), nn.LayerNorm(5)],
        (2, 8, 7),
        [f"relu -> {AFFINE}"],
    ),
    "convolution and pointwise": (lambda: [nn.Conv2d(8, 16, 3), nn.ReLU()], IMAGES, []),
    "batch norm": (lambda: [nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()], IMAGES, []),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, shape, expected = LAYERS[name]
    check(nn.Sequential(*seeded(make)), [draw(*shape)], expected)


def augmented(value, vector):
    value *= 3
    value += vector
    return value


def mish(value):
    return value * torch.tanh(F.softplus(value))


#: name → (a function of the value, the shapes of its other arguments, the chain behind linear and norm)
STEPS = {
    "spelled mish": (mish, [], "softplus -> tanh -> mul earlier 2"),
    "other order": (lambda y: torch.sigmoid(y) * y, [], "sigmoid -> mul earlier 1"),
    "methods": (lambda y: y.relu().clamp(max=1.0).clip(0.1).tanh(), [], "relu -> clamp -> clamp -> tanh"),
    "in place": (
        lambda y: y.mul_(2).add_(1).clamp_(min=0).sigmoid_(),
        [],
        "mul numbers -> add numbers -> clamp -> sigmoid",
    ),
    "operators": (
        lambda y: 2 - (3 * y - 1) / 4,
        [],
        "mul numbers -> sub numbers -> div numbers -> mul numbers -> add numbers",
    ),
    "residual": (lambda y, r: r + F.relu(y), [(6, 32)], "relu -> add tensor"),
    "subtracted from": (lambda y, r: r - y, [(6, 32)], "mul numbers -> add tensor"),
    "vectors": (lambda y, a, b: (y * a + b).sub(a), [(32,), (1, 32)], "mul -> add -> sub"),
    "scalars": (lambda y, a, b: y.mul(a) / b, [(), (1, 1)], "mul scalar -> div scalar"),
    "augmented": (augmented, [(32,)], "mul numbers -> add"),
    "no effect": (lambda y: torch.add(y, 1, alpha=1).div(2, rounding_mode=None), [], "add numbers -> div numbers"),
    "twice": (lambda y: y + y, [], "mul numbers"),
    "earlier": (lambda y: F.gelu(y) + y, [], "gelu -> add earlier 1"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("first", ["norm", "contraction"])
def test_steps(name, first):
    function, shapes, expected = STEPS[name]
    norm = lambda z: F.group_norm(z, 4)  # noqa: E731
    others = [draw(*shape) for shape in shapes]
    if first == "norm":
        check(lambda x, w, *rest: function(norm(F.linear(x, w)), *rest), [draw(*ROWS), draw(*WEIGHT), *others],
              [f"{LINEAR} -> {AFFINE} -> {expected}"])  # fmt: skip
    else:
        check(lambda x, w, *rest: norm(function(F.linear(x, w), *rest)), [draw(*ROWS), draw(*WEIGHT), *others],
              [f"{LINEAR} -> {expected} -> {AFFINE}"])  # fmt: skip


def test_bias_of_a_convolution_whose_result_is_kept():
    """The bias is added in a chain that takes its sum twice; not where the sum is used elsewhere."""

    def swish(x, weight, bias):
        y = F.conv3d(x, weight, bias=bias, padding=1)
        return F.group_norm(y * torch.sigmoid(y), 2)

    def residual(x, weight, bias):
        y = F.conv3d(x, weight, bias, padding=1)
        return y + F.group_norm(F.silu(y), 2)

    arguments = draw(2, 4, 3, 4, 5), draw(4, 4, 3, 3, 3), draw(4)
    chain = f"sigmoid -> mul earlier 1 -> {AFFINE}"
    check(swish, arguments, [f"add -> {chain}"], gradient_tolerance=1e-4)
    check(residual, arguments, [f"silu -> {AFFINE} -> add tensor"], gradient_tolerance=1e-4)
    # On the CPU PyTorch rounds the sum alone.
    check(swish, [each.detach().bfloat16() for each in arguments], [chain])


def test_dropout_whose_probability_is_an_input():
    """With dynamic=True a module's floats are. Another one is another graph."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.SiLU())
    fused, found = compiled(layers, dynamic=True)
    input = torch.randn(4, 8)
    torch.testing.assert_close(fused(input), layers(input))
    assert found == [f"{LINEAR} -> silu"]
    layers[1].p = 1.0
    assert not fused(input).any() and found == [f"{LINEAR} -> silu"]


def test_bias_that_no_chain_takes():
    """The convolution adds it, as before."""

    def twice(x, weight, bias):
        y = F.conv1d(x, weight, bias)
        return y.mean(), F.group_norm(y, 2)

    graphs = []

    def backend(module, inputs):
        rewrite(module)
        graphs.append(module)
        return module.forward

    arguments = draw(2, 4, 9), draw(4, 4, 3), draw(4)
    for one, other in zip(torch.compile(twice, backend=backend)(*arguments), twice(*arguments), strict=True):
        torch.testing.assert_close(one, other)
    (convolution,) = [node for node in graphs[0].graph.nodes if node.target is F.conv1d]
    assert convolution.args[2] is not None
    assert not any(node.target is torch.add for node in graphs[0].graph.nodes)


def test_bias_of_tensors_of_other_classes():
    layers = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8))
    images = torch.randn(2, 4, 9)
    inputs = TwoTensor(images, images)
    fused, found = compiled(layers)
    torch.testing.assert_close(fused(inputs).a, layers(images))
    assert found == []


def test_bias_of_another_dtype():
    """PyTorch's error stays. (On some CPUs it takes other biases beside 16-bit weights.)"""

    def function(x, weight, bias):
        return F.group_norm(F.conv_transpose1d(x, weight, bias), 2)

    arguments = draw(2, 4, 9), draw(4, 8, 3), draw(8).bfloat16()
    for each in function, compiled(function)[0]:
        with pytest.raises(RuntimeError, match="should be the same"):
            each(*arguments)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1)])
def test_vectors_of_images(shape):
    def function(x, w, vector, sample):
        return F.relu(F.group_norm(F.conv2d(x, w) + vector, 4) * sample[:, :, None, None])

    arguments = [draw(*IMAGES), draw(8, 8, 1, 1), draw(*shape), draw(2, 8)]
    check(function, arguments, [f"{CONV} -> add -> {AFFINE} -> mul sample -> relu"])


@pytest.mark.parametrize("minimum", [lambda y: torch.min(y, 1, True)[0], lambda y: y.min(dim=-1, keepdim=True).values])
@pytest.mark.parametrize("bias", [(1, 5, 1, 1), (5,)])
def test_row_minimum(minimum, bias):
    """A bias of another shape is added as before."""
    function = lambda x, w, b: minimum(F.group_norm(F.linear(x, w), 4)) + b  # noqa: E731
    check(function, [draw(*ROWS), draw(*WEIGHT), draw(*bias)], [f"{LINEAR} -> {AFFINE} -> row_minimum"])


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w.T,
        lambda x, w: torch.matmul(x, w.t()),
        lambda x, w: x.mm(w.mT),
        lambda x, w: x.matmul(w.transpose(-1, 0)),
        lambda x, w: torch.mm(x, w.permute(1, 0)),
    ],
)
def test_products(product):
    function = lambda x, w, v: F.relu(F.layer_norm(product(x, w) + v, (32,)))  # noqa: E731
    check(function, [draw(*ROWS), draw(*WEIGHT), draw(32)], [f"{LINEAR} -> add -> {AFFINE} -> relu"])


def test_products_of_other_matrices():
    function = lambda x, w: (F.relu(x @ w), F.relu(x @ w.reshape(16, 32)), F.relu(w @ w.T[:, :3]))  # noqa: E731
    check(function, [draw(*ROWS), draw(16, 32)], [])


class Block(nn.Module):
    """Of a diffusion model."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.time = nn.Linear(16, 8)

    def forward(self, x, time):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


BLOCK = [f"{CONV} -> add sample -> {AFFINE} -> silu", f"{AFFINE} -> silu"]


def test_block():
    check(seeded(Block), [draw(*IMAGES), draw(2, 16)], BLOCK)


@torch.no_grad()
def test_channels_last():
    """Without gradients: PyTorch's own backward pass of a CPU's group norm dies of mixed memory formats."""
    block = seeded(Block).to(memory_format=torch.channels_last)
    images = draw(*IMAGES).contiguous(memory_format=torch.channels_last)
    fused, found = compiled(block)
    torch.testing.assert_close(fused(images, draw(2, 16)), block(images, draw(2, 16)), check_stride=True)
    assert found == BLOCK


@torch.no_grad()
@pytest.mark.parametrize(
    "then, copies",
    [
        (F.conv2d, 0),
        (lambda y, w: F.relu(F.conv2d(y, w)) + F.conv2d(y, w), 0),
        (lambda y, w: F.conv2d(F.relu(y), w) + F.conv2d(F.silu(F.relu(y)), w), 0),
        (lambda y, w: (F.conv2d(F.relu(y), w), F.silu(F.relu(y))), 1),
        (lambda y, w: (F.conv2d(y, w), y), 1),
        (lambda y, w: (F.conv2d(y, w), F.relu(y)), 1),
        (lambda y, w: (F.conv2d(y, w), y.flatten(1)), 1),
    ],
)
def test_strides_that_are_seen(then, copies):
    """A GPU's group norm of channels_last images is contiguous up to PyTorch 2.13, as is what follows. A convolution's
    result lies as its weight does, so before that nothing is copied."""

    def backend(module, inputs):
        for node in module.graph.nodes:
            if getattr(node.target, "__name__", "") in ("group_norm", "silu", "relu"):
                node.meta["example_value"] = node.meta["example_value"].contiguous()
        (found,) = rewrite(module)
        assert found.chain == f"{AFFINE} -> silu"
        assert [node.target for node in module.graph.nodes].count(torch.ops.aten.contiguous.default) == copies
        return module

    images, weight = (draw(*IMAGES, grad=False).contiguous(memory_format=torch.channels_last) for _ in range(2))
    weight = weight[:, :, :3, :3].contiguous(memory_format=torch.channels_last)
    function = lambda x, w: then(F.silu(F.group_norm(x, 4)), w)  # noqa: E731
    results = torch.compile(function, backend=backend, fullgraph=True)(images, weight)
    torch.testing.assert_close(results, function(images, weight))


def in_place_elsewhere(x, w, v):
    """What is written to is no value of the chain's, or comes before it is taken."""
    z = F.linear(x, w)
    other = torch.zeros(3)
    other[1] = 2
    bias = (v * 2).add_(1)
    return F.group_norm(z + bias, 4), F.relu(other, inplace=True)


SPELLED = {
    "casts": (lambda x, w, v: F.layer_norm(F.linear(x, w).float(), (32,)).type_as(x).to(v.dtype).relu(),
              [f"{LINEAR} -> {AFFINE} -> relu"]),
    "clones": (lambda x, w, v: F.relu(+F.layer_norm(F.linear(x, w).clone(), (32,))), [f"{LINEAR} -> {AFFINE} -> relu"]),
    "in place elsewhere": (in_place_elsewhere, [f"{LINEAR} -> add -> {AFFINE}"]),
    "expand_as": (lambda x, w, v: (lambda n: F.relu(v.expand_as(n) * n))(F.linear(x, w)),
                  [f"{LINEAR} -> mul tensor -> relu"]),
    "addcmul": (lambda x, w, v: torch.addcmul(v, F.layer_norm(F.linear(x, w), (32,)), v + 1),
                [f"{LINEAR} -> {AFFINE} -> mul -> add"]),
    "addmm": (lambda x, w, v: torch.addmm(v, x, w.t()).relu(), [f"{LINEAR} -> relu"]),
    "negative": (lambda x, w, v: F.silu(-F.linear(x, w)), [f"{LINEAR} -> mul numbers -> silu"]),
    "clamp_min": (lambda x, w, v: F.linear(x, w).clamp_min(0.1).clamp_max(0.5), [f"{LINEAR} -> clamp -> clamp"]),
    "hard swish": (lambda x, w, v: (lambda h: h * F.relu6(h + 3, inplace=True) / 6)(F.linear(x, w)),
                   [f"{LINEAR} -> add numbers -> relu6 -> mul earlier 2 -> div numbers"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_spellings(name):
    function, expected = SPELLED[name]
    check(function, [draw(*ROWS), draw(*WEIGHT), draw(32)], expected)


def test_checkpoint():
    block = seeded(Block)
    check(lambda x, t: checkpoint(block, x, t, use_reentrant=False), [draw(*IMAGES), draw(2, 16)], BLOCK)


def test_autocast_within():
    """A CPU's layer norm returns what it is given, as the fused chain does."""

    def function(x, w, v):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = F.gelu(F.layer_norm(F.linear(x, w), (32,), v, v))
        return y, F.relu(F.linear(x, w))

    arguments = [draw(*ROWS), draw(*WEIGHT), draw(32)]
    fused, found = compiled(function)
    in_float64 = [each.detach().double().requires_grad_() for each in arguments]
    evaluations = evaluated(fused, arguments), evaluated(function, arguments), evaluated(function, in_float64)
    assert found == [f"{LINEAR} -> {AFFINE} -> gelu", f"{LINEAR} -> relu"]
    for one, other, expected in zip(*(results + gradients for results, gradients in evaluations), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert (one - expected).norm() <= 1.1 * (other - expected).norm() + 1e-6 * expected.norm()


def test_tied_parameters():
    torch.manual_seed(0)
    layer, norm = nn.Linear(32, 32), nn.LayerNorm(32)
    model = nn.Sequential(layer, norm, nn.Tanh(), layer, norm, nn.Sigmoid())
    check(model, [draw(4, 32)], [f"{LINEAR} -> {AFFINE} -> tanh", f"{LINEAR} -> {AFFINE} -> sigmoid"])


def test_numbers_that_change():
    """One that came with another value before is an input of the graph: the chain ends before it."""

    def function(x, w, factor):
        return F.group_norm(F.linear(x, w), 4) * factor

    fused, found = compiled(function)
    for number in range(12):  # more than the recompilations that PyTorch allows
        arguments = draw(3 + number, 16), draw(*WEIGHT), 0.5 + number
        torch.testing.assert_close(fused(*arguments), function(*arguments), rtol=1e-4, atol=1e-5)
    assert set(found) == {f"{LINEAR} -> {AFFINE} -> mul numbers", f"{LINEAR} -> {AFFINE}"}


@pytest.mark.parametrize(
    "function, shapes, dynamic",
    [
        (lambda x: F.layer_norm(x, (x.shape[-1],)).relu(), [(3, 16)], 1),
        (lambda x: F.group_norm(x, 4).relu(), [(2, 8, 3)], 1),
        (lambda w, x: F.linear(x, w).relu(), [WEIGHT, ROWS], 0),
        (lambda x, w: F.linear(x, w).relu() / x.shape[0], [ROWS, WEIGHT], 0),
    ],
)
def test_sizes_stay_dynamic(function, shapes, dynamic):
    arguments = [draw(*shape, grad=False) for shape in shapes]
    torch._dynamo.mark_dynamic(arguments[0], dynamic)
    fused, found = compiled(function)
    torch.testing.assert_close(fused(*arguments), function(*arguments), rtol=1e-4, atol=1e-5)
    assert len(found) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x[x[:, 0] > 0], w).relu() + 1,
        lambda x, w: F.layer_norm(x[x[:, 0] > 0], (16,)).relu(),
        lambda x, w: F.linear(x, w) * w[0, 0].item(),
    ],
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_sizes_that_no_graph_knows(function):
    """Whatever is made of them, it compiles."""
    arguments = draw(*ROWS, grad=False), draw(*WEIGHT, grad=False)
    torch.testing.assert_close(compiled(function)[0](*arguments), function(*arguments), rtol=1e-4, atol=1e-5)


def test_dynamic_sizes():
    check(nn.Sequential(linear(), nn.LayerNorm(32), nn.SiLU()), [draw(2, 3, 16)], [f"{LINEAR} -> {AFFINE} -> silu"],
          dynamic=True)  # fmt: skip
    check(nn.Sequential(nn.LayerNorm(16), nn.SiLU()), [draw(2, 3, 16)], [f"{AFFINE} -> silu"], dynamic=True)
    torch._dynamo.reset()
    check(lambda x: F.layer_norm(x, x.shape[1:]).relu(), [draw(3, 5, 16)], [f"{AFFINE} -> relu"], dynamic=True)
