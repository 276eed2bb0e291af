"""Promise: ``explain`` tells the kernels, configs, tables and memory of a call's plans, and changes nothing."""

import io
import textwrap

import pytest
import torch
from rich.console import Console
from torch import nn

import ops
from autotune_configs import lookup, tables
from autotune_configs.gpus import Gpu
from ops import backend, inductor, narrow_convolutions, precision
from tests.autotune_configs.entries import SECOND, entry, linear_problem
from triton_kernels.linear import LinearConfig

L30 = "linear -> add -> group_norm(4, 1e-05) -> mul -> add -> hardtanh(-2.0, 2.0)"


def model(**options):
    return ops.LinearGroupNormHardtanh(16, 32, 4, -2.0, 2.0, **options)


def test_both_passes():
    """In the order in which they run; the memory is that of the tensors, and z is kept."""
    explanation = ops.explain(model(), torch.randn(8, 16, requires_grad=True))
    forward, backward = explanation.calls
    assert (forward.chain, forward.direction) == (L30, "forward")
    assert (backward.chain, backward.direction) == (L30, "backward")
    (product,) = forward.steps
    assert (product.name, product.source) == ("linear_kernel", "heuristic")
    assert isinstance(product.config, LinearConfig) and product.grid == (1,)
    assert (forward.result_bytes, forward.kept_bytes, forward.buffer_bytes) == (1024, 1024, 0)
    assert backward.steps[0].name == "group_norm_backward_kernel"
    assert backward.result_bytes == 4 * (8 * 16 + 32 * 16 + 3 * 32) and backward.kept_bytes == 0
    z_gradient = 4 * 8 * 32
    assert backward.buffer_bytes >= z_gradient


def test_text():
    config = LinearConfig(16, 32, 16)
    steps = (
        ops.ExplainedStep("linear_kernel", (3,), config, "tables/a.json"),
        ops.ExplainedStep("column_sums_kernel", (2, 1, 4)),
        ops.ExplainedStep("mm"),
    )
    call = ops.ExplainedCall(L30, "forward", torch.device("cpu"), steps, 2**20, 2**19, 0)
    other = ops.ExplainedCall("linear", "forward", torch.device("cpu"), reason="it is said")
    settings = "block_m=16 block_n=32 block_k=16 group_m=8 num_warps=8 num_stages=3 epilogue_strips=1 store_strips=1"
    assert str(ops.Explanation((call, other))) == textwrap.dedent(f"""\
        forward on cpu: {L30}
          linear_kernel       3          {settings}  tables/a.json
          column_sums_kernel  2 x 1 x 4
          mm                  PyTorch
          results 1.000 MiB, kept 0.500 MiB, buffers 0.000 MiB
        forward on cpu: linear
          plain PyTorch: it is said""")
    assert str(ops.Explanation(())) == "no chain of ops ran"


@pytest.mark.parametrize(
    "function, shapes, groups, reason",
    [
        (ops.linear_group_norm_min, [(2, 8), (8200, 8)], 1, "of groups wider than 8192, the row minimum alone"),
        (ops.linear_group_norm_hardtanh, [(4, 0), (8, 0)], 2, "an operand has no elements"),
        (ops.group_norm_hardtanh, [(4, 0, 3)], 1, "an operand has no elements"),
    ],
)
def test_what_pytorch_computes(function, shapes, groups, reason):
    tensors = [torch.randn(shape) for shape in shapes]
    linear_bias = [None] * (len(tensors) - 1)
    (call, *_) = ops.explain(function, *tensors, *linear_bias, groups).calls
    assert call.reason == reason


def test_a_tables_config(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path))
    lookup.forget()
    gpu = Gpu.of(torch.device("cpu"))
    tables.store(tables.user_path(gpu), gpu, entry(SECOND, linear_problem(m=32, n=64, k=64)))
    lookup.forget()
    (call,) = ops.explain(ops.linear, torch.randn(32, 64).bfloat16(), torch.randn(64, 64).bfloat16()).calls
    (step,) = call.steps
    assert (step.config, step.source) == (SECOND, str(tables.user_path(gpu)))


def test_a_kins_config(tmp_path, monkeypatch):
    """It says whose entry it is."""
    monkeypatch.setenv(tables.FOLDER_VARIABLE, str(tmp_path))
    gpu = Gpu.of(torch.device("cpu"))
    tables.store(tables.user_path(gpu), gpu, entry(SECOND, linear_problem(m=32, n=64, k=64)))
    lookup.forget()
    input, weight = torch.randn(32, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    (call,) = ops.explain(lambda x: ops.linear(x, weight, after=(ops.pointwise.silu(),)), input).calls
    assert (call.steps[0].config, call.steps[0].source) == (SECOND, f"{tables.user_path(gpu)}, of linear_bias")
    lookup.forget()


def test_functions_without_a_norm_are_the_products_own():
    """However wide the result is: they have no groups that a tile would have to hold."""
    input, weight = torch.randn(4, 16), torch.randn(1024, 16)
    (call,) = ops.explain(lambda x: ops.linear(x, weight, after=(ops.pointwise.silu(),)), input).calls
    assert [step.name for step in call.steps] == ["linear_kernel"]


def test_a_config_that_is_not_looked_up():
    """The weight's gradient in float32 is a product of matrices that are copied first, always with one config."""
    _, backward = ops.explain(model(), torch.randn(200, 16)).calls
    assert {step.source for step in backward.steps if step.name == "copy_kernel"} == {"fixed"}
    assert {step.source for step in backward.steps if step.name == "column_sums_kernel"} == {""}


def test_functions_of_pytorch():
    """A 16-bit backward pass multiplies by torch.mm, which has neither grid nor config."""
    leaves = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(32, 16, dtype=torch.bfloat16).requires_grad_()
    _, backward = ops.explain(ops.linear_group_norm_hardtanh, *leaves, None, 4).calls
    assert backward.steps[-1] == ops.ExplainedStep("mm")


def test_without_gradients():
    frozen = model().requires_grad_(False)
    assert [call.direction for call in ops.explain(frozen, torch.randn(8, 16)).calls] == ["forward"]
    with torch.no_grad():
        (call,) = ops.explain(model(), torch.randn(8, 16)).calls
    assert call.direction == "forward" and call.kept_bytes == 0


def test_a_call_that_was_made_before():
    """Its plan is kept; it tells the same."""
    layer, input = model(), torch.randn(8, 16)
    layer(input).sum().backward()
    first = ops.explain(layer, input)
    assert first == ops.explain(layer, input) and len(first.calls) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_models(fused):
    """Of any model, what is fused and what is left; ``fuse`` makes no difference."""
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32), torch.nn.Hardtanh(-2.0, 2.0))
    if fused:
        ops.fuse(layers)
    explanation = ops.explain(torch.nn.Sequential(layers, torch.nn.Linear(32, 8)), torch.randn(8, 16))
    assert [call.chain for call in explanation.calls] == [L30] * 2
    assert explanation.left == (ops.LeftStep("1", "linear", "nothing follows it"),)
    assert str(explanation).splitlines()[-1] == "left: linear of 1: nothing follows it"


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        y = torch.nn.functional.dropout(self.fc(x), 0.5)
        y = torch.relu(self.norm(y))
        z = torch.nn.functional.linear(y, self.norm.weight[None])
        print("between two graphs")
        return self.out(y).softmax(1) + self.out(y.double().float()) + z.sin() + z, torch.group_norm(x.double(), 4)


@pytest.mark.filterwarnings("ignore:.*print")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
def test_a_compiled_model(options):
    """What the backend runs: a narrow convolution, an open norm's statistics and sums, and what it leaves to Inductor,
    with the bytes."""
    layers = nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 8)
    model = nn.Sequential(*layers, nn.SiLU()).bfloat16()
    input = torch.randn(256, 8, 6, 6, dtype=torch.bfloat16)
    explanation = ops.explain(torch.compile(model, backend="normfuse", **options), input, measure_times=not options)
    told = explanation.calls
    assert [(each.direction, each.chain.partition("(")[0], each.steps[0].name) for each in told] == [
        ("convolution", "image [256, 8, 6, 6], weight [72, 16]", "narrow_convolution_kernel"),
        ("statistics", "group_norm", "statistics_kernel"),
        ("forward", "linear -> add -> silu", "linear_kernel"),
        ("backward", "linear -> add -> silu", "group_norm_backward_kernel"),
        ("sums", "group_norm", "sums_kernel"),
    ]
    assert all((each.seconds is not None) == (not options) for each in told)
    assert [(each.module, each.name, each.reason) for each in explanation.left] == [
        (
            *("0", "conv2d"),
            "left to the compiler: a norm of images behind PyTorch's convolution is faster than both as one call",
        ),
        ("4", "layer_norm", "left to the compiler: 0.3 MB would be moved either way"),  # 256 x 256 in and out
    ]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_pooling():
    """Its gradient, which is gathered."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(3, 2))
    told = ops.explain(torch.compile(model, backend="normfuse"), torch.randn(2, 4, 9, 9), measure_times=True).calls
    assert [(each.direction, each.chain.partition("(")[0], each.steps[0].name) for each in told] == [
        ("statistics", "group_norm", "statistics_kernel"),
        ("gradient", "max_pool2d", "max_pool_backward_kernel"),
        ("sums", "group_norm", "sums_kernel"),
    ]
    assert all(each.seconds for each in told)


@pytest.mark.usefixtures("fresh_compiler")
def test_behind_autograd(monkeypatch):
    """What a compiled model's graphs call there: copies of weights, weights' gradients, products of both
    directions."""
    monkeypatch.setattr(narrow_convolutions, "_FEWEST_PIXELS", 1)
    monkeypatch.setattr(precision, "runs_hopper_kernels", lambda device: True)
    image = torch.randn(2, 1, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
        told = ops.explain(torch.compile(model, backend="normfuse"), image, measure_times=True).calls
    assert [(each.direction, each.chain, each.steps[0].name) for each in told] == [
        ("copies", "5 tensors to bfloat16", "copies_kernel"),
        ("statistics", "group_norm(4, 1e-05) -> mul -> no add", "statistics_kernel"),
        ("gradient", "weight of a convolution [4, 8, 3, 3]", "narrow_weight_gradient_kernel"),
        ("sums", "group_norm(4, 1e-05) -> mul -> add -> relu", "sums_kernel"),
        ("gradient", "weight of a convolution [8, 1, 3, 3]", "narrow_weight_gradient_kernel"),
        ("copies", "4 tensors to float32", "copies_kernel"),
    ]
    assert all(each.seconds for each in told)
    layers = nn.Sequential(nn.Linear(32, 48), nn.Softmax(1), nn.Linear(48, 16), nn.Softmax(1))
    told = ops.explain(torch.compile(layers, backend="normfuse"), torch.randn(20, 32)).calls
    assert [(each.direction, each.chain) for each in told] == [
        ("product", "20 x 32 @ 32 x 48"),
        ("product", "20 x 48 @ 48 x 16"),
        ("product", "20 x 16 @ 16 x 48, 16 x 20 @ 20 x 48"),
        ("product", "48 x 20 @ 20 x 32"),
    ]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_runs_as_before():
    """Its own graphs call what they called, and nothing is told of it any more."""
    model, input = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(4, 8)), torch.randn(2, 4, 9, 9)
    compiled = torch.compile(model, backend="normfuse")
    with torch.no_grad():
        expected = compiled(input)
        told = ops.explain(compiled, input).calls
        assert torch.equal(compiled(input), expected)
    assert len(told) == 1 and inductor.calls.watcher is None


@pytest.mark.usefixtures("fresh_compiler")
def test_behind_a_graph_break():
    """However often: what is left of the model's forward there has one code for all calls."""

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = model()

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.layer(x).relu()

    broken, input = Broken(), torch.randn(8, 16)
    with torch.no_grad():
        told = [len(ops.explain(broken, input).calls) for _ in range(10)]
    assert told == [1] * 10


def test_what_is_left():
    explanation = ops.explain(Mixed(), torch.randn(8, 16))
    chains = ["group_norm(4, 1e-05) -> mul -> add -> relu", "linear -> add -> add tensor"]
    assert [call.chain for call in explanation.calls] == [*chains, *chains[::-1]]
    no_chain = "follows, and there is no chain of that"
    assert [(each.module, each.name, each.reason) for each in explanation.left] == [
        ("fc", "linear", f"dropout {no_chain}"),
        ("", "linear", "nothing follows it"),
        ("out", "linear", f"softmax {no_chain}"),
        ("", "group_norm", "kernels take float32, bfloat16 and float16, not float64"),
    ]


def test_plain_pytorch():
    (call,) = ops.explain(model(dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)).calls
    assert call.chain == "linear_group_norm_hardtanh" and call.steps == ()
    assert call.reason == "kernels take float32, bfloat16 and float16, not float64"


def test_changes_nothing():
    """No gradient is added anywhere, and a graph behind the arguments can still be used."""
    layer, first = model(), torch.randn(8, 16, requires_grad=True)
    input = first * first
    ops.explain(layer, input)
    assert all(parameter.grad is None for parameter in layer.parameters()) and first.grad is None
    input.sum().backward()
    assert torch.equal(first.grad, 2 * first)


def test_what_cannot_be_called():
    with pytest.raises(TypeError, match="^model_or_function must be callable, got Tensor$"):
        ops.explain(torch.randn(3))


@pytest.mark.gpu
def test_on_a_gpu():
    """The backward pass runs in a thread of autograd's own, and is told of too."""
    layer, input = model(device="cuda"), torch.randn(8, 16, device="cuda")
    forward, backward = ops.explain(layer, input).calls
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.device.type == backward.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_on_a_gpu():
    """Its backward pass runs in a thread of autograd's own."""
    model = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.GroupNorm(4, 32), nn.SiLU()).cuda().bfloat16()
    image = torch.randn(2, 16, 32, 32, device="cuda").bfloat16()
    told = ops.explain(torch.compile(model, backend=backend.normfuse), image, measure_times=True).calls
    assert [each.direction for each in told] == ["statistics", "sums"]
    assert all(each.device.type == "cuda" and each.seconds for each in told)


def test_times():
    """Of both passes, and of a chain beside a layer that is left; nothing else changes."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )
    input = torch.randn(8, 16)
    explanation = ops.explain(layers, input, measure_times=True)
    assert [call.direction for call in explanation.calls] == ["forward", "backward"]
    for call in explanation.calls:
        assert call.seconds > 0 and call.pytorch_seconds > 0
        assert f"{call.seconds * 1e6:.1f} us, PyTorch {call.pytorch_seconds * 1e6:.1f} us" in str(call)
    without = ops.explain(layers, input)
    assert [call.seconds for call in without.calls] == [None, None]
    assert all(each.grad is None for each in layers.parameters())


def test_times_of_one_chain_with_two_shapes():
    """Each backward pass beside PyTorch's of its own forward pass."""
    fused = model()
    calls = ops.explain(
        lambda a, b: (fused(a), fused(b)), torch.randn(8, 16), torch.randn(4, 16), measure_times=True
    ).calls
    assert [call.direction for call in calls] == ["forward", "forward", "backward", "backward"]
    assert all(call.pytorch_seconds is not None for call in calls)


def test_times_under_autocast():
    """PyTorch's functions take no mixed dtypes outside it."""
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32))
    with torch.autocast("cpu", torch.bfloat16):
        forward, _ = ops.explain(layers, torch.randn(8, 16), measure_times=True).calls
    assert forward.seconds > 0


def test_as_a_table():
    layers = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )
    console = Console(width=200, file=io.StringIO())
    console.print(ops.explain(layers, torch.randn(8, 16)))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4 and "linear_kernel" in lines[1] and "left: nothing follows it" in lines[3]
