"""The heuristic's configs: valid for any problem on any architecture."""

import hypothesis.strategies as st
import pytest
import triton
from hypothesis import given, settings

from autotune_configs.gpus import Gpu
from autotune_configs.heuristics import WIDEST_TILE, heuristic_linear_config
from autotune_configs.kernels import kernel_of
from autotune_configs.problem import Problem
from triton_kernels.device import SHARED_MEMORY
from triton_kernels.group_norm import WIDEST_GROUP
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, Parts

sizes = st.integers(1, 64) | st.integers(1, 20000)
by_gpu = pytest.mark.parametrize(
    "gpu", [Gpu("", arch, 100, memory) for arch, memory in SHARED_MEMORY.items()], ids=lambda gpu: str(gpu.architecture)
)
by_element_size = pytest.mark.parametrize("element_size", [2, 4])


@by_gpu
@by_element_size
@given(M=sizes, N=sizes, K=sizes, group_size=st.sampled_from([1, 2, 10, 16, 32, 48, 128, 256, 512, 8192]))
@settings(max_examples=100)
def test_linear_config_is_valid(gpu, element_size, M, N, K, group_size):
    config = heuristic_linear_config(element_size, M, N, K, group_size, gpu)
    for size in (config.block_m, config.block_n, config.block_k, config.num_warps):
        assert triton.next_power_of_2(size) == size
    assert min(config.block_m, config.block_n, config.block_k) >= 16, "what tl.dot asks for"
    assert config.shared_memory(element_size) <= gpu.shared_memory
    if group_size <= WIDEST_TILE and triton.next_power_of_2(group_size) == group_size:
        assert config.holds_groups_of(group_size) or triton.cdiv(M, 128) * triton.cdiv(N, WIDEST_TILE) < 50
    assert config.block_m <= max(16, triton.next_power_of_2(M)), "rows that do not exist are not computed"


@by_gpu
@by_element_size
@pytest.mark.parametrize("rows, features, group_size, holds", [(1, 8192, 32, True), (1, 2048, 128, False)])
def test_groups_are_held_while_there_are_tiles(gpu, element_size, rows, features, group_size, holds):
    """A tile that leaves half of the multiprocessors idle costs more than a second kernel for the norm."""
    config = heuristic_linear_config(element_size, rows, features, features, group_size, gpu)
    assert config.holds_groups_of(group_size) == holds
    large = heuristic_linear_config(element_size, 1024, 8192, 8192, group_size, gpu)
    assert large.holds_groups_of(group_size)


@by_gpu
@by_element_size
def test_small_problems_get_more_and_smaller_tiles(gpu, element_size):
    def tiles(M, N):
        config = heuristic_linear_config(element_size, M, N, 1024, 1, gpu)
        return triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n), config

    large, small = tiles(8192, 8192)[1], tiles(128, 512)[1]
    assert small.block_m * small.block_n < large.block_m * large.block_n
    assert tiles(1024, 1024)[0] >= gpu.multiprocessors / 2


@pytest.mark.parametrize(
    "sizes, tile",
    [
        ((1024, 4096, 4096), (128, 256, 128)),
        ((512, 8192, 8192), (128, 256, 128)),
        ((384, 6144, 2560), (128, 256, 72)),
        ((128, 8192, 8192), (64, 128, 128)),
        ((16, 8192, 8192), (16, 64, 128)),
    ],
    ids=str,
)
def test_one_wave_that_is_not_full_beats_two(sizes, tile):
    """Tiles of twice the size, where these occupy more than half of the multiprocessors (measured on an H100)."""
    M, N, K = sizes
    config = heuristic_linear_config(2, M, N, K, 1, Gpu.called("H100 80GB"))
    number = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    assert (config.block_m, config.block_n, number) == tile


@by_gpu
@by_element_size
@pytest.mark.parametrize("name", ["group_norm", "group_norm_backward"])
@given(M=st.integers(0, 10**6), group_size=st.integers(1, WIDEST_GROUP), num_groups=st.integers(1, 4096))
@settings(max_examples=50)
def test_group_norm_config_is_valid(gpu, element_size, name, M, group_size, num_groups):
    dtype = {2: "bfloat16", 4: "float32"}[element_size]
    problem = Problem(name, dtype, (M, num_groups * group_size, group_size))
    config = kernel_of(name).heuristic(problem, gpu)
    assert kernel_of(name).is_valid(config, problem, gpu)
    blocks = config.blocks(group_size)
    assert blocks["BLOCK_GROUP"] >= group_size
    for size in (*blocks.values(), config.num_warps):
        assert size >= 1 and triton.next_power_of_2(size) == size
    # All of a tile's values, of which the backward pass keeps several, lie in registers.
    assert blocks["BLOCK_M"] * blocks["BLOCK_G"] * blocks["BLOCK_GROUP"] <= 8192
    assert config.rows_per_program % config.block_m == 0 and config.rows_per_program >= 1
    if name == "group_norm_backward":  # each chunk has sums of its own, which are added up
        chunks = triton.cdiv(M, config.rows_per_program)
        assert chunks <= 132 or chunks * num_groups * group_size <= 132 * 8192


@by_gpu
@by_element_size
@pytest.mark.parametrize("layout", [CHANNELS_LAST, CONTIGUOUS])
@pytest.mark.parametrize("name", ["image_statistics", "image_sums"])
@given(samples=st.integers(1, 300), num_groups=sizes, group_size=sizes, pixels=st.integers(1, 2**30))
@settings(max_examples=50)
def test_image_sums_config_is_valid(gpu, element_size, layout, name, samples, num_groups, group_size, pixels):
    dtype = {2: "bfloat16", 4: "float32"}[element_size]
    problem = Problem(name, dtype, (samples, num_groups * group_size, pixels, group_size), None, layout)
    kernel = kernel_of(name)
    config = kernel.heuristic(problem, gpu)
    assert kernel.is_valid(config, problem, gpu)
    for field, values in kernel.ranges.items():
        assert getattr(config, field) in values, field


H200 = Gpu("", 90, 132, SHARED_MEMORY[90])


@pytest.mark.parametrize(
    "name, layout, sizes, tile",
    [
        ("image_statistics", CHANNELS_LAST, (64, 2048, 49, 64), (64, 8, 1)),
        ("image_statistics", CHANNELS_LAST, (64, 64, 12544, 2), (64, 16, 1)),
        ("image_statistics", CHANNELS_LAST, (1, 128, 2**18, 4), (32, 64, 4)),
        ("image_statistics", CHANNELS_LAST, (1, 32, 96**3, 4), (32, 128, 8)),
        ("image_sums", CHANNELS_LAST, (64, 256, 3136, 8), (64, 64, 4)),
        ("image_sums", CHANNELS_LAST, (64, 1024, 196, 32), (64, 8, 1)),
        ("image_statistics", CONTIGUOUS, (64, 512, 784, 16), (16, 256, 4)),
        ("image_statistics", CONTIGUOUS, (64, 2048, 49, 64), (2, 256, 2)),
        ("image_sums", CONTIGUOUS, (2, 320, 4096, 10), (16, 256, 4)),
        ("image_sums", CONTIGUOUS, (64, 512, 784, 16), (16, 128, 4)),
        ("image_sums", CONTIGUOUS, (64, 2048, 49, 64), (32, 32, 2)),
        ("image_sums", CONTIGUOUS, (2, 1280, 64, 40), (64, 64, 8)),
    ],
    ids=str,
)
def test_image_sums_config_is_the_best_measured(name, layout, sizes, tile):
    """In bfloat16 on an H200, or within 4% of it."""
    config = kernel_of(name).heuristic(Problem(name, "bfloat16", sizes, None, layout), H200)
    assert (config.block_c, config.block_s, config.num_warps) == tile


def test_groups_that_occupy_the_gpu_are_not_divided():
    sizes = (32, 192, 1024, 6)
    for name in ("image_statistics", "image_sums"):
        config = kernel_of(name).heuristic(Problem(name, "bfloat16", sizes, None, CHANNELS_LAST), H200)
        assert Parts.of(sizes[:3], 6, config).of_unit == 1
