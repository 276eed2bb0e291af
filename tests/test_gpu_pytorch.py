"""Promise: on a GPU the functions and modules are what PyTorch's own are: captured, compiled, on any stream and device.

What of this needs no GPU is tested in ``tests/ops`` (``test_compile.py``, ``test_export.py``, ``test_transforms.py``),
calls on another stream in ``tests/test_gpu.py``.
"""

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import ops
from ops.backend import normfuse
from tests import gpu
from tests.accuracy import draw_grad_output, run
from tests.chains import CHAINS, L19, L94, LINEAR_CHAINS, NORMS, Problem, chain_id, tensors_of
from tests.gpu import DEVICE, arguments_of, assert_same_bits

pytestmark = gpu.MARKS

REPOSITORY = Path(__file__).resolve().parents[1]
PROBLEM = Problem(96, 64, 8, 16)
#: Where float32 is multiplied as parts of it, and a group of L30's spans tiles.
LARGE = Problem(1024, 768, 2, 512)
IMAGES = Problem(4, 64, 8, 8, pixels=(31, 33))

by_chain = pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
by_chain_from_a_product = pytest.mark.parametrize("chain", [*LINEAR_CHAINS, L19], ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=chain_id)


@pytest.fixture(autouse=True)
def library_is_deterministic():
    """So that bits can be compared where cuDNN convolves."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def problem_of(chain, dtype=torch.bfloat16):
    if chain is L19:
        return IMAGES
    return LARGE if dtype == torch.float32 and chain in LINEAR_CHAINS else PROBLEM


def warmed_up(function):
    """Run it on a stream of its own first, as PyTorch asks before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)


# CUDA graphs.


@by_dtype
@by_chain
def test_captured(chain, dtype):
    """Forward and backward: each replay is a call with what the tensors hold by then."""
    arguments = arguments_of(chain, problem_of(chain, dtype), dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}
    grad_output = draw_grad_output(chain, arguments, unsafe="keep").detach()

    def function():
        output = chain.function(**arguments)
        return output.detach(), torch.autograd.grad(output, list(leaves.values()), grad_output)

    warmed_up(function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, gradients = function()
    for seed in (1, 2):
        others = arguments_of(chain, problem_of(chain, dtype), dtype, seed=seed)
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.copy_(others[name])
            grad_output.copy_(torch.randn_like(grad_output))
        graph.replay()
        assert_same_bits(
            {"output": output, **dict(zip(leaves, gradients, strict=True))}, run(chain.function, arguments, grad_output)
        )


@by_chain
def test_captured_without_gradients(chain):
    arguments = arguments_of(chain, problem_of(chain), torch.bfloat16)
    warmed_up(lambda: chain.function(**arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain.function(**arguments)
    arguments["input"].copy_(torch.randn_like(arguments["input"]))
    graph.replay()
    assert_same_bits({"output": output}, {"output": chain.function(**arguments)})


MODULES = [
    pytest.param(lambda: ops.LinearHardtanhMishGroupNorm(64, 128, (128,), 8), (96, 64), id="L94"),
    pytest.param(lambda: ops.LinearGroupNormMin(64, 128, 8, (1, 128, 1, 1)), (96, 64), id="L75"),
    pytest.param(lambda: ops.LinearGroupNormHardtanh(64, 128, 8, -2.0, 2.0), (96, 64), id="L30"),
    pytest.param(lambda: ops.ConvTranspose2dGeluGroupNorm(64, 64, 3, 1, 8, 8), (4, 64, 31, 33), id="L19"),
]


@by_dtype
@pytest.mark.parametrize("make, shape", MODULES)
def test_training_step_captured(make, shape, dtype):
    """Forward, loss, backward and the optimiser in one graph: its replays train as the steps do."""
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype)
    input = torch.randn(shape, device=DEVICE, dtype=dtype)
    target = torch.randn_like(model(input))

    def make_step(model, optimizer):
        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = (model(input) - target).square().sum(0).mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    twin = copy.deepcopy(model)
    twin_step = make_step(twin, torch.optim.SGD(twin.parameters(), lr=0.5))
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        input.copy_(torch.randn_like(input))
        graph.replay()
        assert_same_bits({"loss": loss}, {"loss": twin_step().detach()})
    assert_same_bits(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert not any(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


# The compiler's default backend; its graphs are counted in tests/ops/test_compile.py too.


@by_chain_from_a_product
def test_compiled_for_any_batch(chain, fresh_compiler):
    """One graph for the first batch, one for all others, and not one break."""
    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(chain.function, fullgraph=True, backend=backend)
    for rows in (96, 40, 200, 64):
        problem = Problem(rows, 64, 8, 16) if chain is not L19 else Problem(rows // 8, 64, 8, 8, pixels=(31, 33))
        arguments = arguments_of(chain, problem, torch.bfloat16, seed=rows)
        if chain.has_bounds:  # which are drawn anew for each problem
            arguments["min_val"], arguments["max_val"] = -1.0, 1.0
        grad_output = draw_grad_output(chain, arguments, unsafe="keep")
        assert_same_bits(run(compiled, arguments, grad_output), run(chain.function, arguments, grad_output))
    assert backend.frame_count == 2
    assert not counters["graph_break"]


@by_chain_from_a_product
def test_compiled_with_cuda_graphs(chain, fresh_compiler):
    """``mode="reduce-overhead"`` captures forward and backward; the third call is the first replay."""
    compiled = torch.compile(chain.function, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        arguments = arguments_of(chain, problem_of(chain), torch.bfloat16, seed=seed)
        if chain.has_bounds:
            arguments["min_val"], arguments["max_val"] = -1.0, 1.0
        grad_output = draw_grad_output(chain, arguments, unsafe="keep")
        torch.compiler.cudagraph_mark_step_begin()
        results = run(compiled, arguments, grad_output)
        assert_same_bits(results, run(chain.function, arguments, grad_output))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_backend(mode, fresh_compiler):
    """Inductor compiles what is between the chains, and captures it all."""
    torch.manual_seed(0)
    image = [nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.AvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*image, nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8)).to("cuda")
    compiled = torch.compile(model, backend=normfuse, fullgraph=True, mode=mode)
    for seed in range(4):
        torch.manual_seed(seed)
        input = torch.randn(16, 32, 8, 8, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        results = [each(input) for each in (model, compiled)]
        gradients = [torch.autograd.grad(each.square().mean(), [input, *model.parameters()]) for each in results]
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)  # TF32 in convolutions
        torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(256, 256) for _ in range(3))
        self.norm = nn.LayerNorm(256)

    def forward(self, x):
        q, k, v = (each(x).view(4, 128, 4, 64).transpose(1, 2) for each in (self.query, self.key, self.value))
        attention = torch.softmax(q @ k.transpose(-2, -1) / 8, -1) @ v
        return self.norm(x + attention.transpose(1, 2).reshape(x.shape))


@by_dtype
def test_attention_written_out(dtype, fresh_compiler):
    """In training. Inductor puts PyTorch's attention in its place, and leaves the graph in no order."""
    torch.manual_seed(0)
    model, x = Attention().to(DEVICE), torch.randn(4, 128, 256, device=DEVICE, requires_grad=True)
    weights = torch.randn_like(x)
    steps = []
    with torch.compiler.config.patch(force_disable_caches=True):
        for function in (model, torch.compile(model, backend=normfuse, fullgraph=True)):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                output = function(x)
            steps.append([output, *torch.autograd.grad((output * weights).sum(), [x, *model.parameters()])])
    relative = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for expected, got, name in zip(*steps, ["", "x", *dict(model.named_parameters())], strict=True):
        if name != "key.bias":  # whose gradient is zero but for rounding
            assert (got - expected).norm() <= relative * expected.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 8])
def test_bias_of_a_fused_convolution(groups, dtype, fresh_compiler):
    """The GroupNorm behind a convolution that is PyTorch's adds its bias, under autocast too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(8, 16, 3, groups=groups), nn.GroupNorm(4, 16), nn.SiLU()).to(DEVICE)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    report = ops.fuse(fused, everything=True)
    errors = []
    for _ in range(2):
        input = torch.randn(3, 8, 6, 17, 18, device=DEVICE)
        for model in (exact, plain, fused):
            given = input.to(next(model.parameters()).dtype).requires_grad_()
            with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32 and model is not exact):
                output = model(given)
            of_each = output, *torch.autograd.grad(output.double().sin().sum(), [given, *model.parameters()])
            if model is exact:
                expected = of_each
            errors.append([(one - other).norm() / other.norm() for one, other in zip(of_each, expected, strict=True)])
        for ours, theirs, of_exact in zip(errors[-1], errors[-2], expected, strict=True):
            # Of the vectors' few values one draw decides little.
            assert ours <= (2.0 if of_exact.ndim == 1 else 1.1) * theirs + 1e-6
    of_bias = "" if groups > 1 and dtype != torch.float32 else "add -> "
    assert [each.chain for each in report.chains] == [f"{of_bias}group_norm -> mul -> add -> silu"]


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=chain_id)
@by_chain_from_a_product
def test_autocast(chain, dtype):
    """A cast of the matrices and nothing else: on arguments that its dtype holds, its bits, and float32 gradients. (A
    second vector that is added to the product is not rounded with it, where it is in float32: of zeros both are the
    same.)"""
    rounded = arguments_of(chain, problem_of(chain), dtype)
    if chain is L94:
        rounded["bias"].detach().zero_()
    arguments = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in rounded.items()}
    grad_output = draw_grad_output(chain, rounded, unsafe="keep")

    def under_autocast(**arguments):
        with torch.autocast(DEVICE, dtype):
            return chain.function(**arguments)

    results = run(under_autocast, arguments, grad_output)
    assert results.pop("output").dtype == dtype
    assert {gradient.dtype for gradient in results.values()} == {torch.float32}
    expected = run(chain.function, rounded, grad_output)
    del expected["output"]
    assert_same_bits({name: gradient.to(dtype) for name, gradient in results.items()}, expected)


# PyTorch's deterministic mode, as an error where something is not, and another device than the current one.

DETERMINISTIC = """
    import torch
    from tests.accuracy import run
    from tests.chains import CHAINS, DTYPES, L19, Problem
    from tests.gpu import arguments_of, assert_same_bits

    torch.use_deterministic_algorithms(True)
    for chain in (*CHAINS, L19):
        for dtype in DTYPES:
            for problem in (Problem(96, 64, 8, 16, pixels=(31, 33) if chain is L19 else ()), Problem(40, 24, 2, 20)):
                arguments = arguments_of(chain, problem, dtype)
                grad_output = torch.randn_like(chain.function(**arguments))
                first = run(chain.function, arguments, grad_output)
                assert_same_bits(run(chain.function, arguments, grad_output), first)
    print("all ran")
"""


def test_deterministic_mode():
    """In a process of its own, for cuBLAS reads its setting once."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DETERMINISTIC)],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "all ran"


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, this machine has {torch.cuda.device_count()}"
)
@by_dtype
@by_chain
def test_second_gpu(chain, dtype):
    """While the first is the current one, and stays it; of the same kind, the second gives the same bits."""
    torch.cuda.set_device(0)
    arguments = arguments_of(chain, problem_of(chain, dtype), dtype)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    expected = run(chain.function, arguments, grad_output)
    there = {name: tensor.to("cuda:1") for name, tensor in tensors_of(arguments).items()}
    results = run(chain.function, {**arguments, **there}, grad_output.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert {tensor.device for tensor in results.values()} == {torch.device("cuda:1")}
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert_same_bits({name: tensor.to("cuda:0") for name, tensor in results.items()}, expected)


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, *NORMS, L19], ids=chain_id)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_tensors_hooks", "reentrant"])
def test_checkpointed(chain, use_reentrant):
    """The backward pass computes the forward pass again, in the thread of the device."""
    arguments = arguments_of(chain, problem_of(chain), torch.bfloat16)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    expected = run(chain.function, arguments, grad_output)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}

    def function(*tensors):
        return chain.function(**{**arguments, **dict(zip(leaves, tensors, strict=True))})

    output = torch.utils.checkpoint.checkpoint(function, *leaves.values(), use_reentrant=use_reentrant)
    output.backward(grad_output)
    assert_same_bits({"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}, expected)
