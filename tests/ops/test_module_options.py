"""Promise: the modules take eps, device, dtype and whether there is a bias, and do with them as PyTorch's layers do."""

import copy
import inspect
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from tests import images

pytestmark = [images.MARK, pytest.mark.filterwarnings("ignore:.* is not fused")]


def _l94(model, x):
    return F.mish(model.hardtanh(F.linear(x, model.gemm.weight, model.gemm.bias) + model.bias))


def _plain_l94(model, x, eps):
    return F.group_norm(_l94(model, x), 4, model.groupnorm.weight, model.groupnorm.bias, eps)


def _normed(model, x, eps):
    z = F.linear(x, model.gemm.weight, model.gemm.bias)
    return F.group_norm(z, 4, model.group_norm.weight, model.group_norm.bias, eps)


def _plain_l75(model, x, eps):
    return _normed(model, x, eps).min(dim=1, keepdim=True)[0] + model.bias


def _plain_l30(model, x, eps):
    return F.hardtanh(_normed(model, x, eps), -0.5, 0.75)


def _plain_l19(model, x, eps):
    z = F.conv_transpose2d(x, model.conv_transpose.weight, model.conv_transpose.bias, stride=(2, 1))
    return F.group_norm(F.gelu(z), 4, model.group_norm.weight, model.group_norm.bias, eps)


#: module, its arguments, the name of the option and of the bias, the shape of an input, and the plain chain
MODULES = [
    pytest.param(ops.LinearHardtanhMishGroupNorm, (12, 16, (16,), 4), "linear_bias", "gemm.bias", (5, 12), _plain_l94),
    pytest.param(ops.LinearGroupNormMin, (12, 16, 4, (1, 3, 1, 1)), "linear_bias", "gemm.bias", (5, 12), _plain_l75),
    pytest.param(ops.LinearGroupNormHardtanh, (12, 16, 4, -0.5, 0.75), "linear_bias", "gemm.bias", (5, 12), _plain_l30),
    pytest.param(
        ops.ConvTranspose2dGeluGroupNorm,
        (6, 8, 3, (2, 1), 8, 4),
        "conv_bias",
        "conv_transpose.bias",
        (2, 6, 4, 5),
        _plain_l19,
    ),
]
by_module = pytest.mark.parametrize(
    "module, given, option, bias, shape, plain", MODULES, ids=["L94", "L75", "L30", "L19"]
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(4)


def draw(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def hooked(model):
    """The module with a hook, so that it calls its layers one by one."""
    for layer in model.children():
        layer.register_forward_hook(lambda *arguments: None)
    return model


@by_module
def test_options_are_named(module, given, option, bias, shape, plain):
    """After the plain model's own arguments, which keep their order, by keyword alone."""
    parameters = list(inspect.signature(module).parameters.values())[len(given) :]
    assert [(each.name, each.default) for each in parameters] == [
        (option, True),
        ("eps", 1e-5),
        ("device", None),
        ("dtype", None),
    ]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters)


@by_module
def test_without_a_bias(module, given, option, bias, shape, plain):
    """As a plain layer with bias=False: the key is absent, fused and layer by layer, copied, pickled and compiled."""
    model, input = module(*given, **{option: False}), draw(shape)
    assert set(module(*given).state_dict()) - set(model.state_dict()) == {bias}
    assert "bias=False" in repr(model)
    output = model(input)
    torch.testing.assert_close(output, plain(model, input, 1e-5))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input), output)
    loaded = module(*given, **{option: False})
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(input), output)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(input), output)
    torch.testing.assert_close(hooked(model)(input), output)


@by_module
def test_exported_without_a_bias(module, given, option, bias, shape, plain):
    model, input = module(*given, **{option: False}), draw(shape)
    program = torch.export.export(model, (input,))
    assert torch.equal(program.module()(input), model(input))


@by_module
def test_within_a_fused_model(module, given, option, bias, shape, plain):
    """The module is left as it is, and the report says nothing of it: it is fused already."""
    model, input = nn.Sequential(module(*given, **{option: False})), draw(shape)
    expected = model(input)
    report = ops.fuse(model)
    assert torch.equal(model(input), expected)
    assert report.chains == ()


@by_module
def test_eps(module, given, option, bias, shape, plain):
    """Of the fused call and of the layers' own."""
    input = draw(shape)
    for eps in (0.25, 1, np.float32(0.5), Fraction(1, 8)):
        model = module(*given, eps=eps)
        norm = next(layer for layer in model.children() if isinstance(layer, nn.GroupNorm))
        assert type(norm.eps) is float and norm.eps == eps
        for each in (model, hooked(copy.deepcopy(model))):
            torch.testing.assert_close(each(input), plain(model, input, float(eps)))
    for eps, error in ((-1.0, ValueError), (float("nan"), ValueError), ("1e-5", TypeError), (None, TypeError)):
        with pytest.raises(error, match="^eps must "):
            module(*given, eps=eps)


@by_module
def test_dtype(module, given, option, bias, shape, plain):
    model = module(*given, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(draw(shape, torch.bfloat16)).dtype == torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = module(*given)
    finally:
        torch.set_default_dtype(before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@by_module
def test_device(module, given, option, bias, shape, plain):
    """Given, or of PyTorch's context."""
    with torch.device("meta"):
        in_context = module(*given)
    for model in (in_context, module(*given, device="meta"), module(*given, device=torch.device("meta"))):
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        expected = module(*given)(draw(shape))
        result = model(draw(shape).to("meta"))
        assert (result.device.type, result.shape, result.dtype) == ("meta", expected.shape, expected.dtype)


def filled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


@by_module
def test_parameters_made_anew(module, given, option, bias, shape, plain):
    """After ``to_empty`` or ``skip_init``, each module's ``reset_parameters`` draws what its constructor draws."""
    skipped = nn.utils.skip_init(module, *given, device="cpu", dtype=torch.float64)
    emptied = module(*given, device="meta", dtype=torch.float64).to_empty(device="cpu")
    for model in (skipped, emptied):
        assert {(each.device.type, each.dtype) for each in model.parameters()} == {("cpu", torch.float64)}
        torch.manual_seed(9)
        for each in (*filled(model).children(), model):
            if hasattr(each, "reset_parameters"):
                each.reset_parameters()
        torch.manual_seed(9)
        expected = module(*given, dtype=torch.float64)
        for name, parameter in expected.named_parameters():
            assert torch.equal(dict(model.named_parameters())[name], parameter), name


@by_module
def test_numbers_of_numpy(module, given, option, bias, shape, plain):
    """They are Python's own in the layers, so that a compiler makes one graph of the module."""

    def of_numpy(value):
        if isinstance(value, tuple):
            return tuple(of_numpy(each) for each in value)
        return np.int64(value) if isinstance(value, int) else np.float32(value)

    model, input = module(*of_numpy(given), eps=np.float64(1e-5)), draw(shape)
    for layer in model.children():
        numbers = [value for value in vars(layer).values() if isinstance(value, (int, float, tuple, np.generic))]
        flat = [each for value in numbers for each in (value if isinstance(value, tuple) else (value,))]
        assert not any(isinstance(each, np.generic) for each in flat)
    other = module(*given)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(input), other(input))
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(input), other(input))


@by_module
def test_arguments_that_do_not_fit(module, given, option, bias, shape, plain):
    """Errors name the constructor's own arguments."""
    names = list(inspect.signature(module).parameters)
    valid = dict(zip(names, given, strict=False))
    for name in names[: len(given)]:
        if name == "groups":  # taken and unused
            continue
        with pytest.raises(TypeError, match=f"^{name} must be an int"):
            module(**{**valid, name: "1"})
    for count in (0, -1, 3):
        with pytest.raises(ValueError, match="^num_groups must "):
            module(**{**valid, "num_groups": count})


@by_module
def test_sizes_and_dtypes_that_do_not_fit(module, given, option, bias, shape, plain):
    names = list(inspect.signature(module).parameters)
    valid = dict(zip(names, given, strict=False))
    for name in names[:2]:  # features, or channels
        least = 0 if name == "in_features" else 1
        for size in (least - 1, least - 2):
            with pytest.raises(ValueError, match=f"^{name} must be at least {least}, got {size}"):
                module(**{**valid, name: size})
    for dtype in ("float32", torch.int8, torch.complex64):
        with pytest.raises(TypeError, match="^dtype must be float32, bfloat16, float16, float64 or None, got "):
            module(**valid, dtype=dtype)


def test_bounds_that_do_not_fit():
    for low, high in ((1.0, 1.0), (2, 1), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match=f"^hardtanh_min must be less than hardtanh_max, got {low} for "):
            ops.LinearGroupNormHardtanh(12, 16, 4, low, high)


@by_module
def test_pickles_of_before(module, given, option, bias, shape, plain):
    """The options are kept by the layers alone, so a module that was pickled without them is none the less whole."""
    model = module(*given, eps=0.5)
    assert set(vars(model)) == set(vars(nn.Module()))
