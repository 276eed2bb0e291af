"""Promise: what PyTorch builds on graphs takes open norms as it takes its own."""

import copy
import inspect

import pytest
import torch
from torch import nn

from tests.ops.one_process import WRAPPERS
from tests.ops.opened import Opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")

aot_eager = torch._dynamo.lookup_backend("aot_eager")


def block():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 1))


class Model(nn.Module):  # Dynamo passes over PyTorch's own frames behind a wrapper's
    def __init__(self):
        super().__init__()
        self.layers = block()

    def forward(self, x):
        return self.layers(x)


def images():
    return torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))


def step(model, input):
    """The result and the parameters' gradients."""
    model.zero_grad()
    result = model(input)
    result.square().sum().backward()
    found = {name.removeprefix("module."): each.grad for name, each in model.named_parameters()}
    wholes = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}
    return {"result": result.detach(), **wholes}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view tensor")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_distributed(wrap, process_group, monkeypatch, caplog):
    """ "aot_eager" stands for Inductor behind the backend."""
    caplog.set_level("INFO", "ops.backend")
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: aot_eager(graph, inputs))
    model, input = Model(), images()
    expected = step(copy.deepcopy(model), input)
    wrapped = wrap(model)
    wrapped.compile(backend="normfuse")
    for _ in range(2):
        for name, value in step(wrapped, input).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert "open add -> group_norm -> mul -> add -> silu" in caplog.text


def test_sharded_tensors(process_group):
    """DTensors are computed as shares, where the norm is open as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    norm, input = nn.GroupNorm(4, 8), torch.randn(2, 8, 5, 4)
    given = [
        distribute_tensor(each.detach(), mesh, [place]).requires_grad_()
        for each, place in ((input, Shard(0)), (norm.weight, Replicate()), (norm.bias, Replicate()))
    ]

    def function(x, weight, bias):
        return nn.functional.silu(nn.functional.group_norm(x, 4, weight, bias))

    result = Opened(function)(*given)
    expected = function(input.requires_grad_(), norm.weight, norm.bias)
    torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(result.full_tensor().square().sum(), given)
    theirs = torch.autograd.grad(expected.square().sum(), [input, norm.weight, norm.bias])
    for ours, each in zip(found, theirs, strict=True):
        torch.testing.assert_close(ours.full_tensor(), each, rtol=1e-4, atol=1e-4)


def test_branches():
    """Both are opened."""
    model, other = block(), block()
    opened = Opened(lambda is_one, x: torch.cond(is_one, lambda x: model(x), lambda x: other(x), (x,)))
    for is_one, layers in (True, model), (False, other):
        for training in (False, True):
            input = images().requires_grad_(training)
            result = opened(torch.tensor(is_one), input)
            torch.testing.assert_close(result, layers(input), rtol=1e-4, atol=1e-5)
            if training:
                pair = [torch.autograd.grad(each.square().sum(), input)[0] for each in (result, layers(input))]
                torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
    assert set(opened.chains) == {"add -> group_norm -> mul -> add -> silu"} and len(opened.chains) >= 4


def test_regions_compiled_once():
    layers = nn.ModuleList([block() for _ in range(2)])

    @torch.compiler.nested_compile_region
    def region(layer, x):
        return layer(x)

    def function(x):
        for layer in layers:
            x = region(layer, x)
        return x

    opened, input = Opened(function), images().requires_grad_()
    result = opened(input)
    expected = layers[1](layers[0](input))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    pair = [torch.autograd.grad(each.square().sum(), input)[0] for each in (result, expected)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
    assert opened.chains == ["add -> group_norm -> mul -> add -> silu"]


def test_passes_of_the_user():
    """They run before those of this project's, and with a uuid the caches know both."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from ops.backend import _behind
    from ops.layouts import lay_out

    ran = []

    class Own(CustomGraphPass):
        def __call__(self, graph):
            ran.append("own")

        def uuid(self):
            return "own"

    behind = _behind(Own(), "joint_custom_pre_pass", [lay_out])
    graph = torch.fx.Graph()
    graph.output(())
    behind(graph)
    assert ran == ["own"] and "own" in behind.uuid()
    unknown = _behind(lambda graph: ran.append("other"), "joint_custom_pre_pass", [lay_out])
    unknown(graph)
    assert ran == ["own", "other"] and unknown.uuid() is None


def test_a_pass_that_gives_no_values(fresh_compiler):
    """Inductor asks for none of these in a graph without a backward pass."""

    def doubled(graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
            with graph.inserting_after(node):
                twice = graph.call_function(torch.ops.aten.add.Tensor, (node, node))
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).bfloat16()
    compiled = torch.compile(model, backend="normfuse", options={"joint_custom_pre_pass": doubled})
    image = torch.randn(2, 3, 12, 12).bfloat16()
    with torch.no_grad():
        found = compiled(image)
        expected = model[1].float()(2 * model[0].float()(image.float()))
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_what_a_pass_is_known_by(monkeypatch):
    """Its changes' modules, and those of this project's that they use: a change of any makes another pass."""
    from ops import backend, copies, float32_products, paired_products
    from ops.backend import _behind

    found = _behind([], "post_grad_custom_post_pass", [float32_products.take_over, copies.join]).uuid()
    assert {inspect.getsource(each) for each in (copies, float32_products, paired_products)} <= set(found)
    monkeypatch.setattr(backend, "INTERPRETED", False)  # another process's
    assert _behind([], "post_grad_custom_post_pass", [float32_products.take_over, copies.join]).uuid() != found
