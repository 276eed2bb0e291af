"""Promise, on a GPU: a call gives the same bits by a plan that was kept as by one that is made for it."""

import pytest
import torch

import ops
from autotune_configs import lookup
from tests.accuracy import draw_grad_output
from tests.chains import CHAINS, DTYPES, L19, L94, Problem, chain_id, redrawn, tensors_of
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
def made(made, monkeypatch):
    """The plans that are made; cuDNN adds in a fixed order, as cuBLAS and our kernels do."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    return made


def check(chain, arguments, made):
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    draws = [redrawn(arguments, seed) for seed in range(4)]
    results = [run(chain, draw, grad_output) for draw in draws]
    assert len(made) == 3, "without gradients, with them, and backward"
    for draw, result in zip(draws, results, strict=True):
        lookup.forget()
        fresh = run(chain, draw, grad_output)
        assert all(torch.equal(each, other) for each, other in zip(result, fresh, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_small_calls(chain, dtype, made):
    check(chain, arguments_of(chain, PROBLEM, dtype), made)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
def test_small_images(dtype, memory_format, made):
    arguments = arguments_of(L19, IMAGES, dtype)
    arguments["input"] = arguments["input"].to(memory_format=memory_format)
    check(L19, arguments, made)


def test_small_float32_parts(made):
    """Split operands, scales and the flag that tells of rows given up."""
    check(L94, arguments_of(L94, Problem(rows=512, depth=512, groups=4, group_size=16), torch.float32), made)


def test_small_streams_and_graphs(made):
    """A call by a kept plan is queued where PyTorch queues, and can be captured."""
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
        assert len(made) == 1
        graph.replay()
        assert torch.equal(captured, expected)
        lookup.forget()
        assert torch.equal(on_side, ops.linear_hardtanh_mish_group_norm(**other))


def test_small_convolution_whose_layout_changes(made):
    """cuDNN gives channels_last for channels_last; what PyTorch has instead need not."""
    input = torch.randn(3, 16, 9, 11, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.bfloat16)

    def call():
        with torch.no_grad():
            return ops.conv_transpose2d_gelu_group_norm(input, weight, None, 4, stride=2)

    for _ in range(3):
        call()
    assert len(made) == 1
    with torch.backends.cudnn.flags(enabled=False):
        result = call()
        lookup.forget()
        fresh = call()
    torch.testing.assert_close(result, fresh, rtol=0, atol=0)
    assert result.stride() == fresh.stride()
