"""What the tests of modules with changed submodules share: the modules, the plain models, and the changes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import ops
from ops import functions, submodules
from tests.ops.test_conv_transpose2d_gelu_group_norm_in_pytorch import PlainL19
from tests.ops.test_modules import PlainL30, PlainL75, PlainL94, trained

#: Ours, the plain model, the arguments of both, an input's shape, and ours' product and norm.
MODELS = {
    "L94": (ops.LinearHardtanhMishGroupNorm, PlainL94, (24, 40, (40,), 5), (9, 24), "gemm", "groupnorm"),
    "L75": (ops.LinearGroupNormMin, PlainL75, (24, 40, 5, (1, 40, 1, 1)), (9, 24), "gemm", "group_norm"),
    "L30": (ops.LinearGroupNormHardtanh, PlainL30, (24, 40, 5, -0.75, 1.25), (9, 24), "gemm", "group_norm"),
    "L19": (
        ops.ConvTranspose2dGeluGroupNorm,
        PlainL19,
        (6, 8, 3, 1, 8, 4),
        (3, 6, 5, 4),
        "conv_transpose",
        "group_norm",
    ),
}
FUNCTIONS = {
    "L94": "linear_hardtanh_mish_group_norm",
    "L75": "linear_group_norm_min",
    "L30": "linear_group_norm_hardtanh",
    "L19": "conv_transpose2d_gelu_group_norm",
}
by_name = pytest.mark.parametrize("name", MODELS)
WITH_HARDTANH = ("L94", "L30")


def nothing_told(monkeypatch):
    """An autouse fixture of each file: no warning was given yet."""
    monkeypatch.setattr(submodules, "_told", set())


def calls(monkeypatch):
    """A fixture of each file: the modules' calls of their functions."""
    made = []

    def recording(name, function):
        def recorded(*arguments, **options):
            made.append(name)
            return function(*arguments, **options)

        return recorded

    for name, function in FUNCTIONS.items():
        monkeypatch.setattr(functions, function, recording(name, getattr(functions, function)))
    return made


def pair(name, change=lambda model, product, norm: None):
    """Ours and the plain model with the same parameters, and the same change made to both."""
    ours, plain, settings, _, product, norm = MODELS[name]
    models = plain(*settings), ours(*settings)
    models[1].load_state_dict(trained(models[0]).state_dict())
    for model in models:
        torch.manual_seed(7)
        change(model, product, norm)
    return models[::-1]


def input_of(name):
    return torch.randn(MODELS[name][3], generator=torch.Generator().manual_seed(5))


def results(model, input):
    """The result, and the gradients of the input and the parameters by name."""
    model.zero_grad()
    leaf = input.clone().requires_grad_()
    output = model(leaf)
    generator = torch.Generator().manual_seed(6)
    output.backward(torch.randn(output.shape, generator=generator).to(output))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input": leaf.grad, **gradients}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0, msg=lambda text, name=name: name + text)


def on(which, change):
    """A change of one submodule, by the name that it has in the model or "product" or "norm"."""

    def changed(model, product, norm):
        path = {"product": product, "norm": norm}.get(which, which)
        replacement = change(getattr(model, path))
        if isinstance(replacement, nn.Module):
            setattr(model, path, replacement)

    return changed


class Adapter(nn.Module):
    """A layer with a low-rank update beside it, as an adapter has it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, x):
        return self.layer(x) + self.scale * self.layer(x.tanh())


def halving(layer):
    """The layer as one of a subclass, whose forward is its own."""

    class Halving(type(layer)):
        def forward(self, x):
            return super().forward(x) / 2

    layer.__class__ = Halving


def own_forward(layer):
    layer.forward = lambda x: type(layer).forward(layer, x) / 2


HOOKS = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda module, inputs, output: output * 2),
    "forward hook with options": lambda layer: layer.register_forward_hook(
        lambda module, inputs, options, output: output * 2, with_kwargs=True
    ),
    "hook that is always called": lambda layer: layer.register_forward_hook(
        lambda module, inputs, output: output * 2, always_call=True
    ),
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
    "backward hook": lambda layer: layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,)),
    "backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,)),
}
#: What is done to the product or the norm, and what is said of it.
CHANGES = {
    **{hook: (register, "has a hook") for hook, register in HOOKS.items()},
    "old spectral norm": (torch.nn.utils.spectral_norm, "has a hook"),
    "old weight norm": (torch.nn.utils.weight_norm, "has a hook"),
    "spectral norm": (parametrizations.spectral_norm, "is a torch.nn.utils.parametrize.Parametrized"),
    "weight norm": (parametrizations.weight_norm, "is a torch.nn.utils.parametrize.Parametrized"),
    "pruned": (lambda layer: prune.random_unstructured(layer, "weight", 0.5), "has a hook"),
    "adapter": (Adapter, "Adapter, not torch.nn."),
    "subclass": (halving, "Halving, not torch.nn."),
    "own forward": (own_forward, "has a forward set on it that is not its class's"),
    "compiled": (lambda layer: layer.compile(backend="eager"), "was compiled with its own compile"),
    "replaced": (lambda layer: nn.Sequential(layer, nn.Tanh()), "is a torch.nn.modules.container.Sequential, not"),
}
ONLY_MATRICES = ("old spectral norm", "old weight norm", "spectral norm", "weight norm")
REPLACEMENTS = {
    "ReLU6": lambda layer: nn.ReLU6(),
    "Identity": lambda layer: nn.Identity(),
    "GELU": lambda layer: nn.GELU(),
    "hook": HOOKS["forward hook"],
    "subclass": halving,
}
