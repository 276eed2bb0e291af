"""Promise: modules that take steps compute what PyTorch's layers and functions compute, with their parameters."""

import copy
import inspect
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import pointwise as p
from ops import submodules
from tests import images
from triton_kernels import activations, arithmetic, pointwise
from triton_kernels.pointwise import Pointwise

pytestmark = images.MARK
C = 16
OWN = Pointwise("halved", arithmetic.MUL_NUMBER.function, arithmetic.MUL_NUMBER.gradient, lambda x, _: x / 2)


def vectors():
    """A learned vector, and one that is not."""
    generator = torch.Generator().manual_seed(3)
    return nn.Parameter(torch.randn(C, generator=generator)), torch.randn(C, generator=generator)


def linear_group_norm(**options):
    shift, scale = vectors()
    before, after = (p.mish(), p.add(shift)), (p.silu(), p.mul(scale), p.mul(2.0))
    return ops.LinearGroupNorm(12, C, 4, before=before, after=after, **options)


def plain_linear_group_norm(model, x):
    values = F.mish(model.linear(x)) + model.before.get_parameter("1")
    normalized = model.norm(values.reshape(-1, C)).view(values.shape)
    return F.silu(normalized) * model.after.get_buffer("1") * 2.0


def linear_layer_norm(**options):
    return ops.LinearLayerNorm(12, C, after=(p.gelu(), p.add(vectors()[0])), **options)


def plain_linear_layer_norm(model, x):
    return F.gelu(model.norm(model.linear(x))) + model.after.get_parameter("1")


def conv_transpose(**options):
    options = {"stride": (2, 1), "padding": 1, "groups": 2, **options}
    return ops.ConvTranspose2dGroupNorm(6, C, 3, 4, before=(p.silu(),), after=(p.mul(vectors()[0]),), **options)


def plain_conv_transpose(model, x):
    return model.norm(F.silu(model.conv_transpose(x))) * model.after.get_parameter("0").view(C, 1, 1)


def conv2d(**options):
    options = {"padding": "same", "dilation": (1, 2), "groups": 2, **options}
    return ops.Conv2dGroupNorm(6, C, (3, 2), 4, before=(p.mish(),), after=(p.silu(), p.add(vectors()[0])), **options)


def plain_conv2d(model, x):
    return F.silu(model.norm(F.mish(model.conv(x)))) + model.after.get_parameter("1").view(C, 1, 1)


def linear(**options):
    return ops.Linear(12, C, after=(p.silu(), p.mul(vectors()[0]), p.sub(vectors()[1])), **options)


def plain_linear(model, x):
    return F.silu(nn.Linear.forward(model, x)) * model.after.get_parameter("1") - model.after.get_buffer("2")


def group_norm(**options):
    return ops.GroupNorm(4, C, before=(p.leaky_relu(0.2),), after=(p.silu(), p.mul(vectors()[0])), **options)


def plain_group_norm(model, x):
    normalized = nn.GroupNorm.forward(model, F.leaky_relu(x, 0.2))
    return F.silu(normalized) * model.after.get_parameter("1").view(C, *[1] * (x.ndim - 2))


def layer_norm(**options):
    return ops.LayerNorm((4, 4), before=(p.mul(vectors()[0]),), after=(p.hardtanh(-0.5, 0.5),), **options)


def plain_layer_norm(model, x):
    return F.hardtanh(nn.LayerNorm.forward(model, x * model.before.get_parameter("0").view(4, 4)), -0.5, 0.5)


#: ours, the same by hand with its parameters, an input's shape, and the keys of a plain model
MODULES = {
    "LinearGroupNorm": (
        linear_group_norm,
        plain_linear_group_norm,
        (2, 5, 12),
        ["linear.weight", "linear.bias", "before.1", "norm.weight", "norm.bias", "after.1"],
    ),
    "LinearLayerNorm": (
        linear_layer_norm,
        plain_linear_layer_norm,
        (5, 12),
        ["linear.weight", "linear.bias", "norm.weight", "norm.bias", "after.1"],
    ),
    "ConvTranspose2dGroupNorm": (
        conv_transpose,
        plain_conv_transpose,
        (2, 6, 4, 5),
        ["conv_transpose.weight", "conv_transpose.bias", "norm.weight", "norm.bias", "after.0"],
    ),
    "Conv2dGroupNorm": (
        conv2d,
        plain_conv2d,
        (2, 6, 4, 5),
        ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "after.1"],
    ),
    "Linear": (linear, plain_linear, (2, 5, 12), ["weight", "bias", "after.1", "after.2"]),
    "GroupNorm": (group_norm, plain_group_norm, (2, C, 5, 3), ["weight", "bias", "after.1"]),
    "LayerNorm": (layer_norm, plain_layer_norm, (2, 4, 4), ["weight", "bias", "before.0"]),
}
by_module = pytest.mark.parametrize("name", MODULES)
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(submodules, "_told", set())
    torch._dynamo.reset()
    torch.manual_seed(4)


def trained(model):
    """The model with none of its parameters at its initial value."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) / 4)
    return model


def draw(name):
    return torch.randn(MODULES[name][2], generator=torch.Generator().manual_seed(2))


def results(call, model, input):
    leaf = input.clone().requires_grad_()
    output = call(leaf)
    wanted = leaf, *model.parameters()
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), wanted)]


@by_module
def test_values_and_gradients(name):
    """Also of the learned vectors, and layer by layer where a hook wants it so."""
    make, plain, _, keys = MODULES[name]
    model, input = trained(make()), draw(name)
    assert list(model.state_dict()) == keys
    expected = results(lambda x: plain(model, x), model, input)
    for result, wanted in zip(results(model, model, input), expected, strict=True):
        torch.testing.assert_close(result, wanted)
    hooked = copy.deepcopy(model)
    hooked.after.register_forward_hook(lambda *arguments: None)
    with pytest.warns(RuntimeWarning, match=f"^{name} is not fused but runs its layers one by one: after has a hook$"):
        unfused = results(hooked, hooked, input)
    for result, wanted in zip(unfused, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@by_module
def test_hooks_of_a_step_run(name):
    make, *_ = MODULES[name]
    model, input = make(), draw(name)
    expected = model(input)
    model.after.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(RuntimeWarning):
        torch.testing.assert_close(model(input), 2 * expected)


@by_module
def test_copies(name):
    """Copied, pickled and saved whole, with the very functions; loaded from a state_dict."""
    make, *_ = MODULES[name]
    model, input = trained(make()), draw(name)
    expected = model(input)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = make()
    loaded.load_state_dict(model.state_dict())
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        loaded,
    ):
        assert torch.equal(other(input), expected)
        assert all(a is b for (a, _), (b, _) in zip(other.after.steps, model.after.steps, strict=True))


@by_module
def test_compiled_and_exported(name):
    make, *_ = MODULES[name]
    model, input = trained(make()), draw(name)
    expected = model(input)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(input), expected)
    assert torch.equal(torch.export.export(model, (input,)).module()(input), expected)


@by_module
def test_moved(name):
    """All of it, what is learned and what is not."""
    make, *_ = MODULES[name]
    model = make(dtype=torch.bfloat16).to(torch.float64)
    assert {each.dtype for each in model.state_dict().values()} == {torch.float64}
    assert model(draw(name).double()).dtype == torch.float64
    on_meta = make(device="meta").to("meta")
    assert on_meta(draw(name).to("meta")).shape == model(draw(name).double()).shape


@by_module
def test_one_step_of_training_moves_what_is_learned(name):
    make, *_ = MODULES[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(draw(name)).square().mean().backward()
    optimizer.step()
    learned = dict(model.named_parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) != (key in learned), key


@by_module
def test_options(name):
    """PyTorch's, with its defaults."""
    make, plain, _, keys = MODULES[name]
    options = inspect.signature(getattr(ops, name)).parameters
    assert all(options[each].default is None for each in ("device", "dtype"))
    if "eps" in options:
        assert options["eps"].default == 1e-5
        model, input = make(eps=0.5), draw(name)
        torch.testing.assert_close(model(input), plain(model, input))
        assert not torch.allclose(make()(input), model(input), atol=1e-2)
        with pytest.raises(ValueError, match="^eps must not be negative, got -1"):
            make(eps=-1)
    if "bias" in options:
        assert options["bias"].default is True
        model, input = make(bias=False), draw(name)
        (missing,) = set(keys) - set(model.state_dict())
        assert missing == keys[1]
        torch.testing.assert_close(model(input), plain(model, input))
    with pytest.raises(TypeError, match="^dtype must be float32"):
        make(dtype=torch.int8)


@by_module
def test_within_a_fused_model(name):
    """Left as it is, and not told of."""
    make, *_ = MODULES[name]
    model, input = nn.Sequential(make()), draw(name)
    expected = model(input)
    report = ops.fuse(model)
    assert torch.equal(model(input), expected)
    assert report.chains == ()


def test_state_dicts_of_plain_layers():
    """A norm alone and a linear layer have the keys of PyTorch's; a model of two layers has theirs under its names."""
    for ours, theirs in (
        (ops.GroupNorm(4, C, after=(p.silu(),)), nn.GroupNorm(4, C)),
        (ops.LayerNorm(C, after=(p.gelu(),)), nn.LayerNorm(C)),
        (ops.Linear(12, C, after=(p.silu(),)), nn.Linear(12, C)),
    ):
        assert isinstance(ours, type(theirs))
        ours.load_state_dict(trained(theirs).state_dict())
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value)
    plain = nn.ModuleDict({"linear": nn.Linear(12, C), "norm": nn.GroupNorm(4, C)})
    ops.LinearGroupNorm(12, C, 4, after=(p.silu(),)).load_state_dict(plain.state_dict())


def test_repr():
    assert repr(linear_group_norm()).splitlines() == [
        "LinearGroupNorm(",
        f"  (linear): {nn.Linear(12, C)}",
        "  (before): Steps(mish, add((16,)))",
        f"  (norm): {nn.GroupNorm(4, C)}",
        "  (after): Steps(silu, mul((16,)), mul(2.0))",
        ")",
    ]
    assert "(after): Steps(clamp(-inf, 1.0))" in repr(ops.LayerNorm(8, after=(p.clamp(max=1.0),)))


@pytest.mark.parametrize("shape", [(), (1, C, 1, 1), (2, C), (2, C, 5, 3)], ids=str)
def test_operands_of_every_kind(shape):
    """One value for all, one a channel, one a channel of each sample, one a value; and a value from before."""
    scale = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    model = trained(ops.GroupNorm(4, C, after=(p.mul(scale), p.silu(), p.add(p.earlier(2)))))
    assert f"Steps(mul({shape}), silu, add(earlier(2)))" in repr(model)
    assert pickle.loads(pickle.dumps(model)).after.steps[0][0] is model.after.steps[0][0]

    def plain(x):
        factor = model.after.get_parameter("0")
        value = nn.GroupNorm.forward(model, x)
        return F.silu(value * (factor.view(2, C, 1, 1) if shape == (2, C) else factor)) + value

    input = draw("GroupNorm")
    hooked = copy.deepcopy(model)
    hooked.after.register_forward_hook(lambda *arguments: None)
    expected = results(plain, model, input)
    with pytest.warns(RuntimeWarning, match="after has a hook"):
        unfused = results(hooked, hooked, input)
    for found in (results(model, model, input), unfused):
        for result, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(result, wanted)


def test_a_layer_in_a_steps_place():
    """It runs, with a warning that says what it is."""
    model, input = ops.GroupNorm(4, C, after=(p.silu(),)), draw("GroupNorm")
    expected = model(input)
    model.after = nn.SiLU()
    told = r"after is a torch.nn.modules.activation.SiLU, not ops.layers.Steps itself$"
    with pytest.warns(RuntimeWarning, match=told):
        torch.testing.assert_close(model(input), expected)


def test_numbers_of_numpy():
    model = ops.ConvTranspose2dGroupNorm(np.int64(6), C, np.int64(3), np.int64(4), eps=np.float32(0.5))
    assert type(model.norm.eps) is float and type(model.norm.num_groups) is int
    assert all(type(each) is int for each in model.conv_transpose.kernel_size)


def test_paddings():
    """PyTorch's words too; another mode than zeros, which the layer may have got, is the layer's own."""
    input = draw("Conv2dGroupNorm")
    for padding in ("valid", "same", 1, (0, 2)):
        model = ops.Conv2dGroupNorm(6, C, 3, 4, padding=padding, after=(p.silu(),))
        torch.testing.assert_close(model(input), F.silu(model.norm(model.conv(input))))
    model.conv = nn.Conv2d(6, C, 3, padding=1, padding_mode="reflect")
    torch.testing.assert_close(model(input), F.silu(model.norm(model.conv(input))))
    with pytest.raises(TypeError, match="^padding must be an int, got str"):
        ops.Conv2dGroupNorm(6, C, 3, 4, padding="full")
    with pytest.raises(TypeError, match="^padding must be an int, got str"):
        ops.ConvTranspose2dGroupNorm(6, C, 3, 4, padding="same")


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match="^after must be a tuple of steps of ops.pointwise, got Step"):
        ops.GroupNorm(4, C, after=p.silu())
    with pytest.raises(TypeError, match=r"^before\[1\] must be a step of ops.pointwise, got SiLU"):
        ops.LinearGroupNorm(12, C, 4, before=(p.silu(), nn.SiLU()))
    with pytest.raises(ValueError, match="^num_groups must divide the 16 channels, got 3"):
        ops.GroupNorm(3, C)
    with pytest.raises(ValueError, match="^stride must be at least 1, got 0"):
        ops.ConvTranspose2dGroupNorm(6, C, 3, 4, stride=0)
    with pytest.raises(ValueError, match=r"^after\[1\].operand must have shape \(16,\), got \(15,\)"):
        ops.Linear(12, C, after=(p.silu(), p.mul(torch.ones(15))))(torch.randn(2, 12))


BUILT_IN = [*activations.ACTIVATIONS, *arithmetic.ARITHMETIC]
BUILT_IN += [pointwise.HARDTANH, pointwise.MISH, pointwise.GELU, pointwise.GELU_TANH]


@pytest.mark.parametrize("function", [*BUILT_IN, OWN], ids=lambda function: f"{function.name} {function.operand}")
def test_functions_pickle_by_name(function):
    """As functions do, a user's own too."""
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_function_that_has_no_name():
    with pytest.raises(pickle.PicklingError, match="^twice must be a variable of .* to be pickled, and is none"):
        pickle.dumps(Pointwise("twice", OWN.function, OWN.gradient, lambda x, _: x * 2))


def test_a_pickle_in_another_process():
    """Which has made no chain with these functions."""
    model, input = ops.LinearGroupNorm(12, C, 4, before=(p.softplus(2.0),), after=(p.div(3.0),)), draw("Linear")
    code = "import pickle, sys; model, input = pickle.load(sys.stdin.buffer); print(model(input).double().sum().item())"
    given = pickle.dumps((model, input.detach()))
    result = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True)
    assert float(result.stdout) == model(input).double().sum().item()
