"""The cells of the bench: their data, their bare products, the settings they run under, one call of their work."""

from contextlib import suppress
from operator import attrgetter

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench.cells import DTYPES, Cell, default_shapes, make_bare_step, make_cells, make_problem, make_step
from bench.chains import CHAINS, NAMED
from bench.compositions import float32_precision
from bench.schema import ALL_MODES

CPU = torch.device("cpu")
L94, L75, _, L19 = map(CHAINS.get, NAMED)
SHAPES = {"GEMM": "5x16x24", "convolution": "3x8x16x4x5x3", "norm": "2x32x4x5"}


def cell_of(chain, dtype="float32", mode="training", memory_format=None):
    precision = "highest" if dtype == "float32" else None
    return Cell(chain, dtype, precision, mode, SHAPES[chain.product], memory_format)


def test_names():
    assert str(cell_of(L94, "bfloat16", "forward")) == "L94 bfloat16 forward 5x16x24"
    assert str(cell_of(L19, memory_format="channels_last")) == "L19 float32 highest training 3x8x16x4x5x3 channels_last"


def test_groups_at_the_target_sizes():
    cells = make_cells(list(CHAINS), ["bfloat16"], ["forward"], default_shapes(on_gpu=True))
    groups = {cell.chain.name: cell.num_groups for cell in cells if cell.chain.norm.name == "group_norm"}
    declared = {"l94": 256, "l75": 512, "l30": 16, "l19": 8, "linear_group_norm_silu": 32, "group_norm_silu": 32}
    assert groups.items() >= declared.items()


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_formats(dtype):
    """The same values, laid out as the cell's name says: the input, the weight and the output's gradient."""
    problems = [make_problem(cell_of(L19, dtype, memory_format=name), CPU) for name in ("contiguous", "channels_last")]
    images = [(problem.tensors["input"], problem.tensors["weight"], problem.output_gradient) for problem in problems]
    for contiguous, channels_last in zip(*images, strict=True):
        assert contiguous.dtype == getattr(torch, dtype) and torch.equal(contiguous, channels_last)
        assert contiguous.is_contiguous() and not channels_last.is_contiguous()
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert problems[0].output_gradient.shape == (3, 16, 6, 7)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("chain", [chain for chain in CHAINS.values() if chain.contraction], ids=attrgetter("name"))
def test_bare_call(chain, mode):
    """The products that autograd runs: one for the forward pass, three of the same size for training."""
    cell = cell_of(chain, mode=mode, memory_format="channels_last" if chain.memory_formats else None)
    problem = make_problem(cell, CPU)
    call = make_bare_step(cell, problem)
    with FlopCounterMode(display=False) as counter:
        output, gradients = call()
    input, weight = (problem.tensors[name].requires_grad_() for name in ("input", "weight"))
    if chain.memory_formats:
        convolution = getattr(F, chain.contraction)
        product = convolution(input, weight, problem.tensors["conv_bias"], **chain.geometry)
        assert product.is_contiguous(memory_format=torch.channels_last)
    else:
        product = F.linear(input, weight)
    pixels = (product if chain.contraction == "conv2d" else input)[0, 0].numel()  # where each weight counts once
    one = 2 * 3 * 8 * 16 * 3 * 3 * pixels if chain.memory_formats else 2 * 5 * 16 * 24
    assert counter.get_total_flops() == one * (3 if mode == "training" else 1)
    torch.testing.assert_close(output, product, check_stride=True)
    if mode == "training":
        expected = torch.autograd.grad(product, (input, weight), problem.output_gradient.reshape(product.shape))
        torch.testing.assert_close(gradients, expected, check_stride=True)
    else:
        assert not gradients


@pytest.mark.parametrize("mode", ALL_MODES)
def test_bare_call_of_a_norm(mode):
    """One copy of the input, in its memory format. Its gradient is that of the copy."""
    cell = cell_of(CHAINS["group_norm_silu"], mode=mode, memory_format="channels_last")
    problem = make_problem(cell, CPU)
    output, gradients = make_bare_step(cell, problem)()
    torch.testing.assert_close(output, problem.tensors["input"], check_stride=True)
    assert output.data_ptr() != problem.tensors["input"].data_ptr()
    assert len(gradients) == (mode == "training") and all(map(problem.output_gradient.equal, gradients))


@pytest.mark.parametrize("precision, allowed", [("highest", False), ("high", True), (None, True)])
@pytest.mark.parametrize("fails", [False, True])
def test_convolution_precision(precision, allowed, fails):
    """cuDNN's TF32 alone, and set back whatever happens."""
    assert torch.backends.cudnn.allow_tf32
    with suppress(ZeroDivisionError), float32_precision(L19, precision):
        assert torch.backends.cudnn.allow_tf32 == allowed
        assert torch.get_float32_matmul_precision() == "highest"
        if fails:
            raise ZeroDivisionError
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("precision, expected", [("highest", "highest"), ("medium", "medium"), (None, "high")])
def test_linear_precision(precision, expected):
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError), float32_precision(L94, precision):
        assert torch.get_float32_matmul_precision() == expected
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "high"


def test_gradient_arrives_in_the_layout_of_the_output():
    """A chain that returns a contiguous output gets a contiguous gradient, the same in every call."""
    arrived = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(context, input):
            return input.contiguous()

        @staticmethod
        def backward(context, gradient):
            arrived.append(gradient)
            return gradient

    problem = make_problem(cell_of(L19, memory_format="channels_last"), CPU)
    step = make_step(
        "training", lambda tensors: Probe.apply(tensors["x"]), {"x": problem.output_gradient}, problem.output_gradient
    )
    assert not problem.output_gradient.is_contiguous()
    results = [step(), step()]
    assert arrived[0].is_contiguous() and arrived[0].data_ptr() == arrived[1].data_ptr()
    for _, (gradient,) in results:
        assert torch.equal(gradient, problem.output_gradient)


def test_sample_dimension():
    for chain, expected in ((L94, 0), (L75, 2), (L19, 0)):
        cell = cell_of(chain)
        assert chain.sample_dimension == expected
        assert make_problem(cell, CPU).output_gradient.shape[expected] == cell.sizes[0]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_a_step_keeps(mode):
    """A training step has all gradients; the forward pass with gradients has a graph for them, the other none."""
    problem = make_problem(cell_of(L94), CPU)

    def forward(tensors):
        assert all(tensor.requires_grad == (mode != "forward") for tensor in tensors.values())
        return sum(tensor.sum() for tensor in tensors.values())

    output, gradients = make_step(mode, forward, problem.tensors, torch.ones(()))()
    assert output.requires_grad == (mode == "forward_grad")
    assert len(gradients) == (len(problem.tensors) if mode == "training" else 0)
    assert not any(tensor.requires_grad for tensor in problem.tensors.values())
