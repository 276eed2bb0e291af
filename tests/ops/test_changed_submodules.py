"""Promise: a module whose submodules were changed computes what the plain model then does, and says so once."""

import copy
import pickle
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import parametrizations, parametrize, prune

import ops
from ops import submodules
from tests import images
from tests.ops.test_conv_transpose2d_gelu_group_norm_in_pytorch import PlainL19
from tests.ops.test_modules import PlainL30, PlainL75, PlainL94, trained

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)

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


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(submodules, "_told", set())


@pytest.fixture
def calls(monkeypatch):
    """The modules' calls of their functions."""
    made = []

    def recording(name, function):
        def recorded(*arguments, **options):
            made.append(name)
            return function(*arguments, **options)

        return recorded

    for name, function in FUNCTIONS.items():
        module = sys.modules[f"ops.{function}"]  # of which ops has the function, by the same name
        monkeypatch.setattr(module, function, recording(name, getattr(module, function)))
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

SINGLE_CHANGES = [
    pytest.param(name, place, which, *CHANGES[which], id=f"{name}-{place}-{which}")
    for name in MODELS
    for place in ("product", "norm")
    for which in CHANGES
    if place == "product" or which not in ONLY_MATRICES
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name, place, which, change, reason", SINGLE_CHANGES)
def test_changed_layer(name, place, which, change, reason, calls):
    mine, theirs = pair(name, on(place, change))
    path = MODELS[name][4 if place == "product" else 5]
    with pytest.warns(
        RuntimeWarning, match=rf"^{type(mine).__name__} is not fused but runs its layers one by one: {path} .*{reason}"
    ):
        result = results(mine, input_of(name))
    assert_same(result, results(theirs, input_of(name)))
    assert not calls


@pytest.mark.parametrize("which", REPLACEMENTS)
@pytest.mark.parametrize("name", WITH_HARDTANH)
def test_changed_activation(name, which, calls):
    """nn.ReLU6 is a subclass of nn.Hardtanh with bounds of its own; the others are none."""
    mine, theirs = pair(name, on("hardtanh", REPLACEMENTS[which]))
    with pytest.warns(
        RuntimeWarning, match=f"^{type(mine).__name__} is not fused but runs its layers one by one: hardtanh "
    ):
        result = results(mine, input_of(name))
    assert_same(result, results(theirs, input_of(name)))
    assert not calls


@by_name
def test_forward_of_pytorchs_class_that_is_replaced(name, calls, monkeypatch):
    mine, theirs = pair(name)
    kind = type(getattr(mine, MODELS[name][4]))
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) / 2)
    with pytest.warns(RuntimeWarning, match="has a forward set on it that is not its class's"):
        result = results(mine, input_of(name))
    assert_same(result, results(theirs, input_of(name)))
    assert not calls


@by_name
def test_hook_on_all_modules(name, calls):
    mine, theirs = pair(name)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        with pytest.warns(
            RuntimeWarning,
            match=f"^{type(mine).__name__} is not fused but .*: a global hook is set for all modules$",
        ):
            result = results(mine, input_of(name))
    finally:
        handle.remove()
    assert_same(result, results(theirs, input_of(name)))
    assert [module for module in seen if not isinstance(module, nn.Mish)] == [*mine.children(), mine]
    assert not calls
    mine(input_of(name))
    assert calls == [name]


@by_name
def test_as_made(name, calls):
    """What changes no layer: other numbers, other tensors, and other layers of the same classes; nothing is said."""

    def change(model, product, norm):
        getattr(model, norm).eps = 0.5
        if product == "gemm":
            model.gemm = nn.Linear(24, 40, bias=False)
        model.eval()

    mine, theirs = pair(name, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for model in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            torch.testing.assert_close(model(input_of(name)), theirs(input_of(name)))
        mine.register_forward_hook(lambda module, inputs, output: output * 2)
        torch.testing.assert_close(mine(input_of(name)), 2 * theirs(input_of(name)))
    assert calls == [name] * 4


def removed_hook(layer):
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return handle.remove


def removed_pruning(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    return lambda: prune.remove(layer, "weight")


def removed_parametrisation(layer):
    parametrizations.weight_norm(layer)
    return lambda: parametrize.remove_parametrizations(layer, "weight")


def removed_forward(layer):
    own_forward(layer)
    return lambda: delattr(layer, "forward")


@pytest.mark.parametrize(
    "change", [removed_hook, removed_pruning, removed_parametrisation, removed_forward], ids=lambda each: each.__name__
)
@by_name
def test_undone(name, change, calls):
    """Undone, the module is fused again."""
    mine, theirs = pair(name)
    undo = [change(getattr(model, MODELS[name][4])) for model in (mine, theirs)]
    with pytest.warns(RuntimeWarning):
        assert_same(results(mine, input_of(name)), results(theirs, input_of(name)))
    assert not calls
    for each in undo:
        each()
    torch.testing.assert_close(mine(input_of(name)), theirs(input_of(name)))
    assert calls == [name]


@by_name
def test_said_once(name):
    """Whatever the filters of warnings, which forget what was said whenever one of them changes."""
    mine, _ = pair(name, on("product", HOOKS["forward hook"]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mine(input_of(name))
        assert said[0].filename == __file__
        mine(input_of(name))
        with torch.no_grad():
            mine(input_of(name))
        copy.deepcopy(mine)(input_of(name))
        assert [str(each.message) for each in said] == [
            f"{type(mine).__name__} is not fused but runs its layers one by one: {MODELS[name][4]} has a hook"
        ]
        on("norm", halving)(mine, *MODELS[name][4:])
        mine(input_of(name))
        assert len(said) == 1  # the first reason is enough
        getattr(mine, MODELS[name][4])._forward_hooks.clear()
        mine(input_of(name))
        assert len(said) == 2 and "Halving" in str(said[1].message)


def test_warnings_that_are_errors():
    """Each call raises, the first one no more than the others."""
    mine, _ = pair("L30", on("product", HOOKS["forward hook"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="is not fused"):
                mine(input_of("L30"))


def doubled(module, inputs, output):
    return output * 2


@by_name
def test_copies(name, calls):
    """A copy has the layer's hook."""
    mine, theirs = pair(name, on("product", lambda layer: layer.register_forward_hook(doubled)))
    expected = theirs(input_of(name))
    with pytest.warns(RuntimeWarning):
        for each in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            assert torch.equal(each(input_of(name)), expected)
    assert not calls


@by_name
def test_autocast(name, calls):
    """Under autocast too it is the plain model, in PyTorch's dtypes."""
    mine, theirs = pair(name, on("product", HOOKS["forward hook"]))
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(RuntimeWarning):
        result, expected = mine(input_of(name)), theirs(input_of(name))
    assert result.dtype == expected.dtype and torch.equal(result, expected)
    assert not calls


@pytest.mark.parametrize("shape", [(24,), (2, 3, 24), (2, 40, 24)], ids=str)
@pytest.mark.parametrize("name", WITH_HARDTANH)
def test_inputs_of_other_dimensions(name, shape, calls):
    """Rows are the last dimension's, as when it is fused; the plain norm would take dimension 1 for its channels."""
    mine, _ = pair(name)
    input = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    expected = mine(input)
    mine.gemm.register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(RuntimeWarning):
        result = mine(input)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected)
    assert calls == [name]


@pytest.mark.parametrize("name", ["L94", "L75"])
def test_without_a_bias(name):
    """The functions take None for any bias, so the modules do too, changed or not."""
    ours, _, settings, shape, *_ = MODELS[name]
    model, input = ours(*settings), torch.randn(shape)
    model.bias = None
    expected = model(input)
    model.gemm.register_forward_hook(lambda *arguments: None)
    with pytest.warns(RuntimeWarning, match="gemm has a hook"):
        torch.testing.assert_close(model(input), expected)


def test_bias_of_three_dimensions():
    mine = ops.LinearHardtanhMishGroupNorm(24, 40, (1, 1, 40), 5)
    expected = mine(input_of("L94"))
    mine.gemm.register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(RuntimeWarning):
        torch.testing.assert_close(mine(input_of("L94")), expected)


# Compilers


@contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_whole(model):
    """The model compiled without a graph break, and the names of the operators in its graphs."""
    targets = []

    def recorded(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=recorded)
    return torch.compile(model, fullgraph=True, backend=backend), targets


@by_name
def test_compile_as_made(name):
    mine, _ = pair(name)
    with fresh_compiler(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled, targets = compiled_whole(mine)
        assert torch.equal(compiled(input_of(name)), mine(input_of(name)))
        assert any("normfuse" in target for target in targets)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "which",
    ["forward hook", "forward pre-hook", "old weight norm", "weight norm", "pruned", "adapter", "subclass", "compiled"],
)
@by_name
def test_compile(name, which):
    """One graph, as of the plain model, which is called in it; it is said once, when it is compiled."""
    mine, theirs = pair(name, on("product", CHANGES[which][0]))
    with fresh_compiler():
        compiled, _ = compiled_whole(theirs)
        expected = results(compiled, input_of(name))
    with fresh_compiler(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled, targets = compiled_whole(mine)
        for _ in range(2):
            assert_same(results(compiled, input_of(name)), expected)
        assert len([each for each in said if "is not fused" in str(each.message)]) == 1
    assert targets and not any("normfuse" in target for target in targets)


@by_name
def test_layer_that_is_wrapped_after_compiling(name):
    """The compiler notices another layer. (Hooks that are set after compiling it overlooks, of any model.)"""
    mine, theirs = pair(name)
    with fresh_compiler():
        compiled = torch.compile(mine, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(input_of(name)), theirs(input_of(name)))
        for model in (mine, theirs):
            on("product", Adapter)(model, *MODELS[name][4:])
        with pytest.warns(RuntimeWarning):
            assert torch.equal(compiled(input_of(name)), theirs(input_of(name)))


@pytest.mark.parametrize("strict", [False, True])
@by_name
def test_export(name, strict):
    mine, theirs = pair(name, on("product", HOOKS["forward hook"]))
    with fresh_compiler(), pytest.warns(RuntimeWarning, match="is not fused"):
        program = torch.export.export(mine, (input_of(name),), strict=strict)
    assert "normfuse" not in program.graph_module.code
    assert torch.equal(program.module()(input_of(name)), theirs(input_of(name)))


def test_functional_call(calls):
    """Other tensors than the layers' own change no layer."""
    mine, theirs = pair("L94")
    state = {key: torch.randn_like(value) for key, value in mine.state_dict().items()}
    result = torch.func.functional_call(mine, state, input_of("L94"))
    torch.testing.assert_close(result, torch.func.functional_call(theirs, state, input_of("L94")))
    assert calls == ["L94"]
