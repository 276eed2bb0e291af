"""Promise: a module whose submodules were changed computes what the plain model then does, and says so once."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ops
from tests import images
from tests.ops import changed_models
from tests.ops.changed_models import (
    CHANGES,
    HOOKS,
    MODELS,
    ONLY_MATRICES,
    REPLACEMENTS,
    WITH_HARDTANH,
    assert_same,
    by_name,
    halving,
    input_of,
    on,
    own_forward,
    pair,
    results,
)

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)

nothing_told = pytest.fixture(autouse=True)(changed_models.nothing_told)
calls = pytest.fixture(changed_models.calls)

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


def test_functional_call(calls):
    """Other tensors than the layers' own change no layer."""
    mine, theirs = pair("L94")
    state = {key: torch.randn_like(value) for key, value in mine.state_dict().items()}
    result = torch.func.functional_call(mine, state, input_of("L94"))
    torch.testing.assert_close(result, torch.func.functional_call(theirs, state, input_of("L94")))
    assert calls == ["L94"]
