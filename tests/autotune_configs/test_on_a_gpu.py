"""On a GPU: a sweep and tuning on first use, with the real clock, compilers and graphs."""

import pytest
import torch

import autotune_configs
import ops
from autotune_configs import commands as cli
from autotune_configs import tables
from autotune_configs.gpus import Gpu

pytestmark = pytest.mark.gpu

M, N, K, GROUPS = 64, 256, 512, 8
PROBLEM = "linear_hardtanh_mish_group_norm", (M, N, K, N // GROUPS)


@pytest.fixture
def arguments():
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (M, K), (N, K), (N,), (N,)
    tensors = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    tensors[1] /= K**0.5
    return (*tensors, GROUPS)


def stored():
    gpu = Gpu.of(torch.device("cuda", torch.cuda.current_device()))
    return {(entry.problem.kernel, entry.problem.sizes) for entry in tables.read(tables.user_path(gpu), gpu)}


def test_a_sweep(folder, capsys):
    """Forward and backward, with configs compiled ahead in worker processes."""
    shape = f"{M}x{K}x{N}"
    status = cli.run(["sweep", "--names", "l94", "--dtypes", "bfloat16,float32", "--shapes", shape, "--processes", "2"])
    output = capsys.readouterr().out
    assert status == 0 and "WRONG" not in output, output
    assert PROBLEM in stored() and ("group_norm_backward", (M, N, N // GROUPS)) in stored()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tuning_in_place(folder, arguments, mode):
    with mode():
        expected = ops.linear_hardtanh_mish_group_norm(*arguments)
        assert stored() == set()
        with autotune_configs.tune_unseen_problems():
            tuned = ops.linear_hardtanh_mish_group_norm(*arguments)
        assert PROBLEM in stored()
    torch.testing.assert_close(tuned, expected, rtol=2**-7, atol=2**-7)


def test_backward_passes_are_tuned_too(folder, arguments):
    leaf = arguments[0].requires_grad_()
    with autotune_configs.tune_unseen_problems():
        ops.linear_hardtanh_mish_group_norm(leaf, *arguments[1:]).sum().backward()
    assert ("group_norm_backward", (M, N, N // GROUPS)) in stored() and leaf.grad.isfinite().all()


def test_nothing_is_tuned_while_a_graph_is_captured(folder, arguments):
    with torch.no_grad(), autotune_configs.tune_unseen_problems(False):
        expected = ops.linear_hardtanh_mish_group_norm(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), autotune_configs.tune_unseen_problems(), torch.cuda.graph(graph):
        captured = ops.linear_hardtanh_mish_group_norm(*arguments)
    graph.replay()
    assert stored() == set() and torch.equal(captured, expected)
