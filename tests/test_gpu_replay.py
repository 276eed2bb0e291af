"""Promise, on a GPU: a call that comes again gives what the function would give (``tests/ops/test_replay.py``)."""

import pytest
import torch

import ops
from ops import replay
from tests.accuracy import draw_grad_output
from tests.chains import CHAINS, DTYPES, L19, L94, LINEAR, Problem, chain_id, redrawn, tensors_of
from tests.gpu import MARKS, arguments_of

pytestmark = MARKS

PROBLEM = Problem(rows=72, depth=64, groups=4, group_size=16)
#: What the kernels for Hopper take.
IMAGES = Problem(rows=3, depth=64, groups=8, group_size=8, pixels=(20, 24), kernel=(3, 3))


def run(chain, arguments, grad_output):
    """The result without gradients, and then the result and every gradient."""
    with torch.no_grad():
        result = chain.function(**arguments)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = chain.function(**{**arguments, **parameters})
    return result, output.detach(), *torch.autograd.grad(output, list(parameters.values()), grad_output)


@pytest.fixture
def runs(monkeypatch):
    """How many calls were repeated; cuBLAS adds in a fixed order, as our kernels do."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    count = []
    run = replay.Plan.run
    monkeypatch.setattr(replay.Plan, "run", lambda self, tensors: count.append(self) or run(self, tensors))
    return count


def check(chain, arguments, runs):
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    draws = [redrawn(arguments, seed) for seed in range(4)]
    results = [run(chain, draw, grad_output) for draw in draws]
    # cuBLAS computes a float32 product of few rows, with nothing to launch beside it.
    assert len(runs) >= 2 or (chain is LINEAR and arguments["input"].dtype == torch.float32)
    for draw, result in zip(draws, results, strict=True):
        replay.forget()
        fresh = run(chain, draw, grad_output)
        assert all(torch.equal(each, other) for each, other in zip(result, fresh, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_small_repeated_calls(chain, dtype, runs):
    check(chain, arguments_of(chain, PROBLEM, dtype), runs)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
def test_small_repeated_images(dtype, memory_format, runs):
    arguments = arguments_of(L19, IMAGES, dtype)
    arguments["input"] = arguments["input"].to(memory_format=memory_format)
    check(L19, arguments, runs)


def test_small_float32_parts(runs):
    """Split operands, scales and the flag that tells of rows given up."""
    check(L94, arguments_of(L94, Problem(rows=512, depth=512, groups=4, group_size=16), torch.float32), runs)


def test_small_streams_and_graphs(runs):
    """A repeated call is queued where PyTorch queues, and can be captured."""
    arguments = arguments_of(L94, PROBLEM, torch.bfloat16)
    with torch.no_grad():
        expected = [ops.linear_hardtanh_mish_group_norm(**arguments) for _ in range(3)][-1]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            other = redrawn(arguments, 1)
            on_side = ops.linear_hardtanh_mish_group_norm(**other)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = ops.linear_hardtanh_mish_group_norm(**arguments)
        assert len(runs) == 3
        graph.replay()
        assert torch.equal(captured, expected)
        replay.forget()
        assert torch.equal(on_side, ops.linear_hardtanh_mish_group_norm(**other))


def test_small_convolution_whose_layout_changes(runs):
    """cuDNN gives channels_last for channels_last; what PyTorch has instead need not."""
    input = torch.randn(3, 16, 9, 11, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.bfloat16)

    def call():
        with torch.no_grad():
            return ops.conv_transpose2d_gelu_group_norm(input, weight, None, 4, stride=2)

    for _ in range(3):
        call()
    assert len(runs) == 1
    with torch.backends.cudnn.flags(enabled=False):
        result = call()
        replay.forget()
        fresh = call()
    torch.testing.assert_close(result, fresh, rtol=0, atol=0)
    assert result.stride() == fresh.stride()
