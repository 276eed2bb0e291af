"""Promise: on a GPU, an image's sums have equal bits whoever else runs; graphs and streams share no counters."""

import pytest
import torch

from tests import gpu
from tests.gpu import DEVICE
from triton_kernels.activations import RELU
from triton_kernels.chain import Chain
from triton_kernels.image_statistics import image_statistics
from triton_kernels.image_sums import image_sums
from triton_kernels.image_tiles import ImageSumsConfig

pytestmark = [*gpu.MARKS, pytest.mark.usefixtures("poisoned_memory")]

CHAIN = Chain(after=(RELU,))
CONFIG = ImageSumsConfig(32, 64, programs=528)
#: The last one has more samples than a grid has blocks along its further axes.
SHAPES = [(8, 256, 3136, 32), (1, 128, 65536, 32), (64, 2048, 49, 32), (70000, 8, 9, 4)]


def draw(B, C, S, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    image, gradient = torch.randn(2, B, S, C, generator=generator, device=DEVICE).to(dtype).mT
    return image, gradient, torch.randn(2, C, generator=generator, device=DEVICE)


def sums_of(image, gradient, vectors, num_groups):
    operands = (*vectors, None)
    statistics = image_statistics(image, num_groups, 1e-5, CONFIG, CHAIN, operands)
    gradients = (*torch.empty_like(vectors), None)
    means = image_sums(gradient, image, statistics, CHAIN, operands, gradients, CONFIG)
    return [statistics, means, *gradients[:2]]


def assert_equal(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert not other.isnan().any() and torch.equal(result, other)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_repeats(shape):
    *sizes, num_groups = shape
    image, gradient, vectors = draw(*sizes)
    results = sums_of(image, gradient, vectors, num_groups)
    leaves = [each.double().requires_grad_() for each in (image, *vectors)]
    output = torch.relu(torch.group_norm(leaves[0], num_groups, *leaves[1:]))
    truths = torch.autograd.grad(output, leaves[1:], gradient.double())
    for result, truth in zip(results[2:], truths, strict=True):
        assert (result - truth).norm() <= 1e-3 * truth.norm()  # a relu whose value rounds across 0 counts
    for _ in range(100):
        assert_equal(sums_of(image, gradient, vectors, num_groups), results)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_two_streams_and_a_graph(shape):
    """A graph is replayed beside eager launches of the stream that it was captured in and of another."""
    *sizes, num_groups = shape
    problems = [draw(*sizes, seed=seed) for seed in range(2)]
    expected = [sums_of(*problem, num_groups) for problem in problems]
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.cuda.graph(graph):
        captured = sums_of(*problems[1], num_groups)
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            eager = [sums_of(*problems[0], num_groups) for _ in range(4)]
        with torch.cuda.stream(streams[1]):
            graph.replay()
            other = sums_of(*problems[1], num_groups)
        torch.cuda.synchronize()
        for results in eager:
            assert_equal(results, expected[0])
        assert_equal(captured, expected[1])
        assert_equal(other, expected[1])
