"""Promise: a compiled or exported module whose submodules were changed computes what the plain model then does."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tests import images
from tests.ops import changed_models
from tests.ops.changed_models import CHANGES, HOOKS, MODELS, Adapter, assert_same, by_name, input_of, on, pair, results

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)
nothing_told = pytest.fixture(autouse=True)(changed_models.nothing_told)


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
