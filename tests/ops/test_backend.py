"""Promise: ``torch.compile(model, backend="normfuse")`` fuses chains and hands Inductor all else, options too.

Without a GPU, PyTorch's "aot_eager" stands for Inductor, which needs a C++ compiler there.
``tests/test_gpu_pytorch.py`` runs it.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ops import fuse, pays

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def handed(monkeypatch):
    """What Inductor is given: the counter of graphs, and the options of each."""
    counter = CompileCounterWithBackend("aot_eager")
    counter.options = []

    def compile_graph(module, inputs, options):
        counter.options.append({name: each for name, each in options.items() if not callable(each)})
        return counter(module, inputs)

    monkeypatch.setattr(torch._inductor, "compile", compile_graph)
    return counter


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.SiLU(), nn.Linear(32, 8), nn.Softmax(-1))


def test_is_found():
    assert "normfuse" in torch._dynamo.list_backends()


def test_training(handed):
    """Batches of any size have one more graph. The chain is one operator in it."""
    layers = model()
    compiled = torch.compile(layers, backend="normfuse", fullgraph=True)
    for rows in 4, 6, 7:
        input = torch.randn(rows, 16, requires_grad=True)
        results = layers(input), compiled(input)
        gradients = [torch.autograd.grad(each.square().sum(), [input, *layers.parameters()]) for each in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert handed.frame_count == 2
    for graph in handed.graphs:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert len(names) == 3 and names[0] == "normfuse.chain.default"


@pytest.mark.parametrize(
    "layers, chains",
    [
        ((nn.GroupNorm(4, 8), nn.SiLU(), nn.MaxPool2d(2)), 1),
        ((nn.LayerNorm(5), nn.Softmax(1)), 0),
        ((nn.GroupNorm(4, 8), nn.BatchNorm2d(8)), 1),
        ((nn.Conv2d(8, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), 1),
        ((nn.Conv3d(2, 2, 1), nn.LayerNorm(5), nn.GELU()), 0),
        ((nn.Softmax(-1), nn.LayerNorm(5), nn.GELU()), 0),
        ((nn.Conv2d(8, 8, 3, groups=8), nn.LayerNorm(3), nn.GELU()), 1),
        ((nn.Upsample(scale_factor=2), nn.LayerNorm(10), nn.GELU()), 1),
        ((nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)), 1),
        ((nn.GroupNorm(4, 8), nn.SiLU()), 1),
        ((nn.Linear(5, 5), nn.Sigmoid(), nn.AvgPool2d(2)), 1),
        ((nn.Linear(5, 5), nn.LayerNorm(5), nn.Softmax(-1)), 1),
    ],
    ids=str,
)
def test_what_inductor_goes_on_with(layers, chains, handed):
    """What it would compute in its kernel for a norm is left to it, with the norm, and not in a graph that runs as it
    is. Of an image's norm the sums alone are not left to it."""
    layers = nn.Sequential(*layers)
    images = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(torch.compile(layers.eval(), backend="normfuse")(images), layers(images))
    torch.compile(layers.train(), backend="normfuse")(images)
    for graph in handed.graphs[:1] if chains else handed.graphs:
        names = [str(node.target) for node in graph.graph.nodes]
        assert names.count("normfuse.chain.default") == chains
    report = fuse(layers)
    layers(images)
    assert len(report.chains) == 1


@pytest.mark.parametrize(
    "function, dtype, chains",
    [
        (lambda y: (y / 2.0).relu().sum(1), torch.bfloat16, 0),
        (lambda y: (y / 2.0).relu().sum(1), torch.float32, 1),
        (lambda y: (y / 2.0).sigmoid().sum(1), torch.bfloat16, 1),
        (lambda y: (y / 2.0).relu().cumsum(1), torch.bfloat16, 1),
        (lambda y: nn.functional.layer_norm(y, (8,)).sum(1), torch.bfloat16, 1),
    ],
)
def test_products_that_inductor_goes_on_with(function, dtype, chains, handed):
    """In 16 bits, what costs nothing in its next kernel is left to it, as cuBLAS's product is."""
    layer, input = nn.Linear(16, 8).to(dtype), torch.randn(4, 16, dtype=dtype)
    compiled = torch.compile(lambda input: function(layer(input)), backend="normfuse")
    torch.testing.assert_close(compiled(input), function(layer(input)), rtol=2e-2, atol=2e-2)
    assert [str(node.target) for node in handed.graphs[0].graph.nodes].count("normfuse.chain.default") == chains


@pytest.mark.parametrize("function, chains", [(lambda x: x + 1, 0), (lambda x: x.cumsum(1), 1)], ids=["sum", "other"])
def test_a_residual_stream(function, chains, handed):
    """A layer norm of what Inductor computes on the way is left to it, where that is used elsewhere too."""

    def forward(x):
        x = function(x)
        return x + nn.functional.layer_norm(x, (8,)).cumsum(1)

    input = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(forward, backend="normfuse")(input), forward(input))
    assert [str(node.target) for node in handed.graphs[0].graph.nodes].count("normfuse.chain.default") == chains


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {}),
        ({"mode": "default"}, {}),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"options": {"max_autotune": True}}, {"max_autotune": True}),
        ({"options": {"max-autotune": True}}, {"max_autotune": True}),  # as torch.compile itself takes it
    ],
    ids=str,
)
def test_mode_and_options(handed, given, expected, context, monkeypatch):
    """They reach Inductor, a mode as the options that it stands for; and the rule knows of CUDA graphs."""
    layers, input = model(), torch.randn(4, 16)
    asked = []
    rule = pays.reason_for_compiler
    monkeypatch.setattr(pays, "reason_for_compiler", lambda *given: asked.append(given[1]) or rule(*given))
    with context():
        torch.testing.assert_close(torch.compile(layers, backend="normfuse", **given)(input), layers(input))
    assert handed.options == [expected]
    assert set(asked) == {"triton.cudagraphs" in expected}


def test_log(handed, caplog):
    with caplog.at_level("INFO", "ops.backend"):
        torch.compile(model(), backend="normfuse")(torch.randn(4, 16))
    texts = [record.getMessage() for record in caplog.records if record.name == "ops.backend"]
    assert [text.split(" ")[0] for text in texts] == ["1", "linear"]
    assert texts[1].startswith("linear -> add -> group_norm -> mul -> add -> silu, in the place of ")


def test_unknown_option():
    with pytest.raises(Exception, match="no_such_option"):
        torch.compile(model(), backend="normfuse", options={"no_such_option": 1})(torch.randn(4, 16))
