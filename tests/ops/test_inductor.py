"""Promise: graphs that Inductor compiles call the plans' own functions, and no call gets a plan that is not its own."""

import re
import sys
import threading

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code, tensor_is_aligned

import ops
from ops import compile_worker, compiling, inductor
from ops.plan import Planner
from tests.ops.programs import run

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def aligned(monkeypatch):
    """On the CPU Inductor takes no address for aligned. On a GPU it copies inputs that are not."""
    import torch._inductor.graph

    monkeypatch.setattr(torch._inductor.graph, "should_assume_input_aligned", tensor_is_aligned)
    monkeypatch.setattr(compiling, "IN_THREADS", True)  # the interpreter compiles nothing
    inductor.calls.clear()
    with fresh_inductor_cache():
        yield


def head(input, weight):
    return ops.linear(input, weight, after=(ops.pointwise.silu(),))


def norm(input, weight):
    return ops.linear_group_norm(input, weight, None, 4, after=(ops.pointwise.silu(),))


def draw(rows=8):
    torch.manual_seed(rows)
    return torch.randn(rows, 16), torch.randn(32, 16)


def compiled(function, **options):
    return torch.compile(function, backend="normfuse", fullgraph=True, **options)


def calls_in(code):
    assert "torch.ops.normfuse." not in "".join(code).replace("'torch.ops.normfuse.", "'")  # but in asserts' messages
    return [line for each in code for line in each.splitlines() if "normfuse.calls[" in line]


@pytest.mark.parametrize("function", [head, norm])
def test_direct(function):
    """The second call does not look for a plan."""
    input, weight = draw()
    graph = compiled(function)
    result, code = run_and_get_code(graph, input, weight)
    assert torch.equal(result, function(input, weight))
    (line,) = calls_in(code)
    assert "'cpu: torch.float32[8, 16, 16, 1, 0], torch.float32[32, 16, 16, 1, 0]'" in line.replace("\\", "")
    (call,) = inductor.calls.values()
    assert call.__name__ == "run", "the plan's function"
    assert torch.equal(graph(-input, weight), function(-input, weight))


@pytest.mark.parametrize("function", [head, norm])
@pytest.mark.parametrize("wanted", [(True, True), (False, True)], ids=["two gradients", "one"])
def test_training(function, wanted):
    leaves = [each.requires_grad_(is_wanted) for each, is_wanted in zip(draw(), wanted, strict=True)]
    needed = [each for each in leaves if each.requires_grad]
    graph = compiled(function)
    gradient = torch.randn(8, 32)

    def step(function):
        result = function(*leaves)
        return result.detach(), *torch.autograd.grad(result, needed, gradient)

    results, code = run_and_get_code(step, graph)
    assert ["backward" in line for line in calls_in(code)] == [False, True]
    expected = step(function)
    for found in results, step(graph):
        for each, other in zip(found, expected, strict=True):
            assert torch.equal(each, other)
    assert [call.__name__ for call in inductor.calls.values()] == ["run", "run"]


class Block(nn.Module):
    """A convolution, a product of its channels, which are last, and a residual."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.first(self.conv(x).permute(0, 2, 3, 1))
        return x + self.last(nn.functional.gelu(y)).permute(0, 3, 1, 2)


def test_products_are_of_matrices():
    """What has four dimensions, near a convolution, Inductor would copy to channels_last and back."""
    torch.manual_seed(0)
    model, input = Block(), torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last)

    def step(function):
        return torch.autograd.grad(function(input).square().sum(), model.parameters())

    gradients, code = run_and_get_code(step, compiled(model))
    torch.testing.assert_close(gradients, step(model))
    assert [re.findall(r"torch.float32\[([^]]*)]", line)[0] for line in calls_in(code)] == [
        "30, 8, 8, 1, 0",  # the input
        "30, 16, 16, 1, 0",  # the gradient
    ]


def test_equal_calls_share_a_plan(made):
    input, weight = torch.randn(8, 16), torch.randn(16, 16)
    result, code = run_and_get_code(compiled(lambda input, weight: head(head(input, weight), weight)), input, weight)
    assert len(calls_in(code)) == 2 and len(inductor.calls) == len(made) == 1
    assert torch.equal(result, head(head(input, weight), weight))


@pytest.fixture
def makers(monkeypatch):
    """The threads in which plans are made."""
    found, plan = [], Planner.plan

    def noted(self, results):
        found.append(threading.current_thread().name.partition("_")[0])
        return plan(self, results)

    monkeypatch.setattr(Planner, "plan", noted)
    return found


class Model(nn.Module):
    """A convolution's open norm, a pooling whose windows overlap, a product with a norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(72, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, x):
        y = nn.functional.max_pool2d(nn.functional.silu(self.norm(self.conv(x))), 3, 2)
        return nn.functional.hardtanh(self.last(self.head(y.flatten(1))))


@pytest.mark.parametrize(
    "threads, dynamic, may", [(1, False, True), (2, False, True), (2, True, True), (2, True, False)]
)
def test_plans_are_made_meanwhile(makers, threads, dynamic, may, monkeypatch):
    """By threads while Inductor compiles, and the first call finds them: no plan is made twice."""
    monkeypatch.setattr(compiling, "IN_THREADS", may)
    torch.manual_seed(0)
    model, input = Model(), torch.randn(2 + threads + 9 * dynamic + 2 * may, 3, 10, 10)  # new to all that is kept
    with torch._inductor.config.patch(compile_threads=threads):
        if dynamic:
            torch._dynamo.mark_dynamic(input, 0)
        graph = compiled(model)
        for _ in range(2):
            gradients = torch.autograd.grad(graph(input).square().sum(), model.parameters())
    assert set(makers) == {"normfuse-plans" if threads > 1 and may else "MainThread"}
    assert 4 <= len(makers) <= len(inductor.calls) and not inductor._begun
    expected = torch.autograd.grad(model(input).square().sum(), model.parameters())
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_workers_are_asked_before_code_is_written(dynamic, monkeypatch):
    """For the same calls, forward and backward."""
    asked = {True: set(), False: set()}
    monkeypatch.setattr(compiling, "IN_THREADS", True)
    monkeypatch.setattr(
        compile_worker,
        "ask",
        lambda *call, is_early=False: asked[is_early].add(repr(call)),  # which asks none
    )
    with torch._inductor.config.patch(compile_threads=2):
        compiled(Model(), dynamic=dynamic)(torch.randn(6, 3, 10, 10)).sum().backward()
    assert asked[True] == asked[False] and len(asked[True]) >= 4


def test_rows_that_values_decide(monkeypatch):
    """Nobody is asked to compile for a size that nobody knows."""
    monkeypatch.setattr(compiling, "IN_THREADS", True)
    asked = []
    monkeypatch.setattr(compile_worker, "ask", lambda *call, is_early=False: asked.append(call))
    input, weight = draw()

    def kept(input, weight):
        return norm(input[input[:, 0] > 0], weight)

    with (
        torch._inductor.config.patch(compile_threads=2),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        assert torch.equal(compiled(kept)(input, weight), kept(input, weight)) and not asked


def test_what_a_thread_cannot_make(monkeypatch):
    """The call makes it again, and says why."""
    input, weight = draw()
    graph, plan, failures = compiled(norm), Planner.plan, [RuntimeError("no memory")]
    monkeypatch.setattr(
        Planner, "plan", lambda *given: (_ for _ in ()).throw(failures.pop()) if failures else plan(*given)
    )
    assert torch.equal(graph(input, weight), norm(input, weight)) and not failures
    inductor.reset()
    monkeypatch.setattr(Planner, "plan", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        compiled(lambda *given: norm(*given) + 1)(input[:4], weight)


def test_open_sizes():
    """Each size has its own plan."""
    graph = compiled(norm, dynamic=True)
    for rows in 8, 5, 70:
        input, weight = draw(rows)
        result, code = run_and_get_code(graph, input, weight)
        assert torch.equal(result, norm(input, weight))
        assert not code or "''" in calls_in(code)[0].replace("\\", "")
    assert [call.__name__ for call in inductor.calls.values()] == ["look_up"]


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("convolution", [{}, {"stride": 2, "padding": 1}], ids=str)
def test_images_of_open_sizes(convolution, trains):
    """They lie as channels_last between contiguous ones."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3, **convolution), nn.GroupNorm(4, 8), nn.SiLU())
    graph = compiled(net, dynamic=True)
    for height, width in (8, 9), (11, 10):
        image = torch.randn(2, 4, height, width)
        result, expected = graph(image), net(image)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, check_stride=True)
        if trains:
            found, others = (torch.autograd.grad(each.square().sum(), net.parameters()) for each in (result, expected))
            torch.testing.assert_close(found, others, rtol=1e-3, atol=1e-4)


def test_an_odd_address():
    """An input that is not aligned as others is looked up in each call."""
    memory, weight = torch.randn(8 * 16 + 4), draw()[1]
    inputs = [memory[first : first + 128].view(8, 16) for first in (1, 4)]
    graph = compiled(norm)
    for input in inputs:
        torch._dynamo.mark_static(input)
        assert torch.equal(graph(input, weight), norm(input, weight))
    assert {call.__name__ for call in inductor.calls.values()} == {"look_up"}


def test_a_part_of_a_tensor():
    """Its place in memory is in the words."""
    input, weight = torch.randn(9, 16), draw()[1]
    function = lambda input, weight: norm(input[1:], weight) + norm(input[:8], weight)  # noqa: E731
    result, code = run_and_get_code(compiled(function), input, weight)
    assert torch.equal(result, function(input, weight))
    assert ["16]" in line for line in calls_in(code)] in ([True, False], [False, True])


def test_under_plain_inductor():
    input, weight = draw()
    result, code = run_and_get_code(torch.compile(norm, fullgraph=True), input, weight)
    assert torch.equal(result, norm(input, weight)) and len(calls_in(code)) == 1


def test_without_the_registry(monkeypatch):
    """In a version of PyTorch without it graphs call the operators."""
    import torch._inductor.codegen.custom_extern_kernel_codegen as registry

    for name in [each for each in registry.CUSTOM_EXTERN_KERNEL_CODEGEN if "normfuse" in each]:
        monkeypatch.delitem(registry.CUSTOM_EXTERN_KERNEL_CODEGEN, name)
    monkeypatch.delitem(sys.modules, registry.__name__)
    input, weight = draw()
    result, code = run_and_get_code(compiled(norm), input, weight)
    assert torch.equal(result, norm(input, weight)) and not inductor.calls
    assert any("= torch.ops.normfuse.forward.one(" in each for each in code)


def test_reset(monkeypatch):
    """CUDA graphs are forgotten with the compiled graphs that they are of."""
    from torch._inductor import cudagraph_trees

    done = []
    monkeypatch.setattr(cudagraph_trees, "reset_cudagraph_trees", lambda: done.append(True))
    input, weight = draw()
    compiled(norm)(input, weight)
    assert inductor.calls
    torch._dynamo.reset()
    assert done and not inductor.calls


PROGRAM = """
import torch, ops
import torch._inductor.graph
from torch._dynamo.utils import counters
from ops import compiling, inductor
from ops.plan import Planner

torch._inductor.graph.should_assume_input_aligned = lambda tensor: True
layer = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32), torch.nn.SiLU())
input = torch.randn(8, 16)
graph = torch.compile(layer, backend="normfuse")
for _ in range(2):
    torch.testing.assert_close(graph(input), layer(input))
graph(input).sum().backward()
hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
print(*hits, *[call.__name__ for call in inductor.calls.values()])
"""


def test_a_graph_from_the_cache(tmp_path):
    """The second process compiles nothing, and calls plans of its own."""
    assert [run(tmp_path, PROGRAM) for _ in range(2)] == [["0 0 run run"], ["1 2 run run"]]


CPP = """
import sys
import torch, ops
from torch.nn.functional import silu

def functions(x, w):
    # Of the second, nothing is kept.
    return ops.linear_group_norm(x, w, None, 4, after=(ops.pointwise.silu(),)), ops.bias_hardtanh_mish(x) @ w.t()

def norms(x, w):
    # The second is open: its statistics, and the sums of its gradients, are operators of a result each.
    return silu(norm(x @ w.t())) + 1.0, silu(norm(images * w.sum(1)[:, None, None]))

torch.manual_seed(0)
leaves = x, w = torch.randn(8, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
norm, images = torch.nn.GroupNorm(4, 32), torch.randn(2, 32, 5, 5)
function = {"inductor": functions, "normfuse": norms}[sys.argv[1]]
graph = torch.compile(function, backend=sys.argv[1], options={"cpp_wrapper": True})
with torch.no_grad():
    torch.testing.assert_close(graph(x, w), function(x, w))
sums = [sum(part.square().sum() for part in each(x, w)) for each in (graph, function)]
torch.testing.assert_close(*[torch.autograd.grad(each, leaves) for each in sums])
print("the same")
"""


@pytest.mark.parametrize("backend", ["inductor", "normfuse"])
def test_cpp_wrapper(backend, tmp_path):
    """Calls with a single result, in inference, forward and backward."""
    assert run(tmp_path, CPP, backend) == ["the same"]


def test_without_a_gpu(tmp_path):
    """A convolution that Hopper's kernels would keep closed is PyTorch's, as is all else."""
    program = """
        import torch, ops
        from torch import nn
        torch.manual_seed(0)
        net = nn.Sequential(nn.ConvTranspose2d(8, 8, 3), nn.GELU(), nn.GroupNorm(4, 8)).bfloat16()
        image = torch.randn(2, 8, 6, 6).bfloat16()
        torch.testing.assert_close(torch.compile(net, backend="normfuse")(image), net(image), rtol=0.02, atol=0.02)
    """
    run(tmp_path, program, interpreted=False)
