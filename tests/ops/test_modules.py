"""Promise: the modules stand in for the plain models: constructor, random draws, state_dict and results."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import ops
from tests.accuracy import check, draw_grad_output, run
from tests.chains import L30, L75, L94

IN, OUT, GROUPS, ROWS = 24, 40, 5, 9


class PlainL94(nn.Module):
    def __init__(self, in_features, out_features, bias_shape, num_groups):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.hardtanh = nn.Hardtanh()
        self.mish = nn.Mish()
        self.groupnorm = nn.GroupNorm(num_groups=num_groups, num_channels=out_features)

    def forward(self, x):
        return self.groupnorm(self.mish(self.hardtanh(self.gemm(x) + self.bias)))


class PlainL75(nn.Module):
    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        return torch.min(self.group_norm(self.gemm(x)), dim=1, keepdim=True)[0] + self.bias


class PlainL30(nn.Module):
    def __init__(self, in_features, out_features, num_groups, hardtanh_min, hardtanh_max):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.hardtanh = nn.Hardtanh(min_val=hardtanh_min, max_val=hardtanh_max)

    def forward(self, x):
        return self.hardtanh(self.group_norm(self.gemm(x)))


#: chain, ours, plain, arguments of both constructors, and the chain's vectors by their names in the state_dict
MODELS = [
    pytest.param(
        L94,
        ops.LinearHardtanhMishGroupNorm,
        PlainL94,
        {"in_features": IN, "out_features": OUT, "bias_shape": (OUT,), "num_groups": GROUPS},
        {
            "linear_bias": "gemm.bias",
            "bias": "bias",
            "norm_weight": "groupnorm.weight",
            "norm_bias": "groupnorm.bias",
        },
        id="L94",
    ),
    pytest.param(
        L75,
        ops.LinearGroupNormMin,
        PlainL75,
        {"in_features": IN, "out_features": OUT, "num_groups": GROUPS, "bias_shape": (1, OUT, 1, 1)},
        {
            "linear_bias": "gemm.bias",
            "norm_weight": "group_norm.weight",
            "norm_bias": "group_norm.bias",
            "bias": "bias",
        },
        id="L75",
    ),
    pytest.param(
        L30,
        ops.LinearGroupNormHardtanh,
        PlainL30,
        {"in_features": IN, "out_features": OUT, "num_groups": GROUPS, "hardtanh_min": -0.75, "hardtanh_max": 1.25},
        {"linear_bias": "gemm.bias", "norm_weight": "group_norm.weight", "norm_bias": "group_norm.bias"},
        id="L30",
    ),
]
by_model = pytest.mark.parametrize("chain, ours, plain, settings, names", MODELS)


def seeded(model, settings):
    torch.manual_seed(7)
    return model(**settings)


def trained(model):
    """The model with none of its parameters at its initial value, not even the norm's ones and zeros."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def functional_arguments(chain, model, settings, names, input):
    state = model.state_dict()
    arguments = {"input": input, "weight": state["gemm.weight"], "num_groups": GROUPS}
    arguments.update({name: state[key] for name, key in names.items()})
    if chain.has_bounds:
        arguments["min_val"] = settings.get("hardtanh_min", -1.0)
        arguments["max_val"] = settings.get("hardtanh_max", 1.0)
    return arguments


def draw_input(dtype=torch.float32):
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(5)).to(dtype)


@by_model
def test_constructor(chain, ours, plain, settings, names):
    assert list(inspect.signature(ours).parameters)[: len(settings)] == list(settings)
    by_place, by_name = ours(*settings.values()), ours(**settings)
    shapes = {key: value.shape for key, value in plain(**settings).state_dict().items()}
    for module in (by_place, by_name):
        assert {key: value.shape for key, value in module.state_dict().items()} == shapes


@by_model
def test_initial_draws(chain, ours, plain, settings, names):
    """Bit for bit, in the same order, and as many: what is drawn next is the same too."""
    mine = seeded(ours, settings)
    next_of_mine = torch.randn(3)
    theirs = seeded(plain, settings)
    assert torch.equal(next_of_mine, torch.randn(3))
    for (name, parameter), (their_name, their_parameter) in zip(
        mine.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == their_name
        assert parameter.requires_grad and parameter.dtype == torch.float32
        assert torch.equal(parameter, their_parameter), name


@by_model
def test_state_dict_keys(chain, ours, plain, settings, names):
    keys = list(ours(**settings).state_dict())
    assert keys == list(plain(**settings).state_dict())
    assert set(keys) == {"gemm.weight", *names.values()}


@by_model
def test_state_dict_from_and_to_the_plain_model(chain, ours, plain, settings, names):
    mine, theirs = ours(**settings), trained(plain(**settings))
    mine.load_state_dict(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[key], value), key
    trained(mine)
    theirs.load_state_dict(mine.state_dict())
    for key, value in mine.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], value), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@by_model
def test_results(chain, ours, plain, settings, names, dtype):
    """The module is the function of its parameters, the function keeps the rule of accuracy to the plain chain, and the
    plain chain is the plain model."""
    theirs = trained(seeded(plain, settings)).to(dtype)
    mine = ours(**settings).to(dtype)
    mine.load_state_dict(theirs.state_dict())
    arguments = functional_arguments(chain, theirs, settings, names, draw_input(dtype))
    assert torch.equal(theirs(arguments["input"]), chain.plain(**arguments))
    assert torch.equal(mine(arguments["input"]), chain.function(**arguments))
    check(chain, arguments)


@by_model
def test_gradients(chain, ours, plain, settings, names):
    module = trained(seeded(ours, settings))
    arguments = functional_arguments(chain, module, settings, names, draw_input())
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    input = draw_input().requires_grad_()
    module(input).backward(grad_output)
    parameters = dict(module.named_parameters())
    assert torch.equal(input.grad, expected["input"])
    for name, key in {**names, "weight": "gemm.weight"}.items():
        assert torch.equal(parameters[key].grad, expected[name]), key


@by_model
def test_one_step_of_training(chain, ours, plain, settings, names):
    """An optimiser moves every parameter of ours as it moves the plain model's."""
    mine, theirs = seeded(ours, settings), seeded(plain, settings)
    input = draw_input()
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input).square().mean().backward()
        optimizer.step()
    for (name, parameter), their_parameter in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, their_parameter, msg=lambda text, name=name: f"{name}: {text}")


@by_model
def test_settings_are_the_submodules_own(chain, ours, plain, settings, names):
    """eps and the bounds are read where the plain model keeps them, so that changing them there works."""
    mine, theirs = seeded(ours, settings), seeded(plain, settings)
    for model in (mine, theirs):
        norm = model.groupnorm if chain is L94 else model.group_norm
        norm.eps = 0.5
        if chain.has_bounds:
            model.hardtanh.min_val, model.hardtanh.max_val = -0.1, 0.2
    input = draw_input()
    torch.testing.assert_close(mine(input), theirs(input))
    assert not torch.allclose(mine(input), seeded(ours, settings)(input), atol=1e-2)


@by_model
def test_copies(chain, ours, plain, settings, names):
    module = trained(seeded(ours, settings))
    expected = module(draw_input())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(draw_input()), expected)


@by_model
def test_groups_that_do_not_divide(chain, ours, plain, settings, names):
    """As the plain model, the constructor itself refuses."""
    for model in (ours, plain):
        with pytest.raises(ValueError, match="num_groups must divide|divisible.*num_groups|num_groups.*divisible"):
            model(**{**settings, "num_groups": 7})


@pytest.mark.parametrize("shape", [(), (1,), (OUT - 1,), (OUT, 1), (2, OUT)], ids=str)
def test_bias_of_another_shape(shape):
    with pytest.raises(ValueError) as raised:
        ops.LinearHardtanhMishGroupNorm(IN, OUT, shape, GROUPS)
    assert str(raised.value) == f"bias_shape must be (40,), got {shape}"


@pytest.mark.parametrize("shape", [(), (OUT,), (1, OUT), (1, OUT, 1), (2, OUT, 1, 1), (1, OUT, 1, 2)], ids=str)
def test_bias_of_the_minimum_of_another_shape(shape):
    with pytest.raises(ValueError) as raised:
        ops.LinearGroupNormMin(IN, OUT, GROUPS, shape)
    assert str(raised.value) == f"bias_shape must be (1, channels, 1, 1), got {shape}"


def test_bias_shapes_that_the_functions_take():
    """Leading ones, a number alone, and any number of channels where the bias is added to a minimum."""
    input = draw_input()
    for shape in (OUT, [OUT], (1, OUT), (1, 1, OUT)):
        assert ops.LinearHardtanhMishGroupNorm(IN, OUT, shape, GROUPS)(input).shape == (ROWS, OUT)
    for channels in (1, 3, OUT):
        assert ops.LinearGroupNormMin(IN, OUT, GROUPS, (1, channels, 1, 1))(input).shape == (1, channels, ROWS, 1)
