"""The tiled GEMM: every way to load and store, every kind of config, and what a config says of itself."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tests.chains import LAYOUTS, with_layout
from triton_kernels import chains
from triton_kernels import linear as module
from triton_kernels.chain import Chain
from triton_kernels.linear import LinearConfig, linear
from triton_kernels.pointwise import ADD

CONFIGS = [
    LinearConfig(16, 32, 16, num_warps=4),
    LinearConfig(32, 16, 32, group_m=1),
    LinearConfig(64, 64, 16, group_m=2, num_stages=2),
    LinearConfig(16, 64, 32, epilogue_strips=2),
    LinearConfig(16, 64, 16, store_strips=2),
    LinearConfig(128, 128, 64),
]
TWO_BIASES = Chain("linear", before=(ADD,), norm="")


def config_id(config):
    return f"{config.block_m}x{config.block_n}x{config.block_k}x{config.store_strips}"


def whole_numbers(*shape, seed=0):
    """-2...2: products and sums are exact in every dtype, so results are compared bit by bit."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def product(input, weight, config, *, bias=None, linear_bias=None, output=None):
    if output is None:
        output = torch.full((input.shape[0], weight.shape[0]), torch.nan, dtype=input.dtype)
    linear(input, weight, TWO_BIASES, config, (linear_bias, bias), output=output, input_precision="tf32x3")
    return output


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("M, N, K", [(1, 1, 1), (16, 32, 16), (17, 33, 19), (65, 40, 8), (3, 200, 50), (130, 72, 24)])
def test_every_config_covers_every_size(config, M, N, K):
    input, weight = whole_numbers(M, K), whole_numbers(N, K, seed=1)
    assert torch.equal(product(input, weight, config), input @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_biases(dtype):
    input, weight = whole_numbers(20, 24).to(dtype), whole_numbers(40, 24, seed=1).to(dtype)
    first, second = whole_numbers(40, seed=2).to(dtype), whole_numbers(40, seed=3).to(dtype)
    for linear_bias, bias in itertools.product((None, first), (None, second)):
        expected = F.linear(input.double(), weight.double())
        for vector in (linear_bias, bias):
            expected = expected if vector is None else expected + vector
        result = product(input, weight, CONFIGS[0], linear_bias=linear_bias, bias=bias)
        assert torch.equal(result, expected.to(dtype))


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("input_layout", LAYOUTS)
def test_layouts(input_layout, weight_layout):
    input = with_layout(whole_numbers(24, 40), input_layout)
    weight = with_layout(whole_numbers(32, 40, seed=1), weight_layout)
    assert torch.equal(product(input, weight, CONFIGS[0]), input @ weight.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_which_a_few_exceed_int32(transposed):
    """Four gigabytes that the system hands out a page at a time, and of which few are touched."""
    stride = 2**30 + 1
    far = torch.empty(2 * stride + 40, dtype=torch.bfloat16).as_strided((3, 17), (stride, 1))
    far.copy_(whole_numbers(3, 17))
    far = far.T if transposed else far
    other = whole_numbers(16, far.shape[1], seed=1).bfloat16()
    assert _descriptors(far) is module.load_pointers
    assert torch.equal(product(far, other, CONFIGS[0]), far @ other.T)
    assert torch.equal(product(other, far, CONFIGS[0]), other @ far.T)


@triton.jit
def _store_kernel(output, N, VALUE: tl.constexpr):
    place = tl.program_id(0), tl.program_id(0), 3, N
    module.store_pointers(output, place, tl.full((4, 16), VALUE, tl.float32))


def test_rows_of_an_output_of_which_a_few_exceed_int32():
    N = 2**30 + 1
    output = torch.empty(3, N, dtype=torch.int8)
    output[:, :17] = 7
    _store_kernel[(1,)](output, N, VALUE=3)
    assert (output[:, :16] == 3).all() and (output[:, 16] == 7).all()


def _descriptors(tensor):
    return module._operand(tensor, 16, 16)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_which_operands_go_through_descriptors(dtype):
    """The hardware's copies ask for 16-byte addresses and strides and neighbours along one axis."""
    matrix = torch.zeros(24, 40, dtype=dtype)
    assert _descriptors(matrix) is module.load_descriptor
    assert _descriptors(matrix[:, :32]) is module.load_descriptor
    assert _descriptors(matrix[8:, 8:]) is module.load_descriptor
    assert _descriptors(with_layout(matrix, "transposed")) is module.load_descriptor_transposed
    for other in (
        with_layout(matrix, "strided"),
        with_layout(matrix, "padded"),
        with_layout(matrix, "misaligned"),
        with_layout(matrix, "expanded"),
        matrix[:, 1:],
        torch.zeros(24, 41, dtype=dtype),
        torch.zeros(100, dtype=dtype).unfold(0, 40, 8),  # rows overlap
        matrix[:0],
    ):
        assert _descriptors(other) is module.load_pointers, (other.shape, other.stride(), other.data_ptr() % 16)


@pytest.mark.parametrize("store_strips", [1, 2])
@pytest.mark.parametrize("channels, offset", [(32, 0), (33, 0), (32, 1)])
def test_nothing_is_written_outside(channels, offset, store_strips):
    """Through a descriptor, and through pointers where rows or the result's address are not aligned."""
    rows = 21
    memory = torch.full((offset + rows * channels + 64,), 7.0)
    output = memory[offset : offset + rows * channels].view(rows, channels)
    input, weight = whole_numbers(rows, 24), whole_numbers(channels, 24, seed=1)
    product(input, weight, LinearConfig(64, 64, 32, store_strips=store_strips), output=output)
    assert torch.equal(output, input @ weight.T)
    assert (memory[:offset] == 7).all() and (memory[offset + rows * channels :] == 7).all()


def test_no_rows():
    output = torch.empty(0, 32)
    linear(torch.empty(0, 24), whole_numbers(32, 24), chains.LINEAR, CONFIGS[0], (None,), output=output)


@pytest.mark.parametrize("strips, store_strips", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("save", [True, False])
def test_norms_in_registers(save, strips, store_strips):
    """A group is normalised within its tile, whichever strip it is in; what backward needs is saved beside it."""
    config = LinearConfig(16, 64, 16, epilogue_strips=strips, store_strips=store_strips)
    generator = torch.Generator().manual_seed(0)
    input, weight = torch.randn(20, 24, generator=generator), torch.randn(96, 24, generator=generator)
    linear_bias, bias, norm_weight, norm_bias = torch.randn(4, 96, generator=generator)
    bounds = (-0.5, 1.5)
    z = F.linear(input, weight, linear_bias)
    activated = F.mish(F.hardtanh(z + bias, *bounds))
    for chain, operands, kept, result in (
        (
            chains.LINEAR_HARDTANH_MISH_GROUP_NORM,
            (linear_bias, bias, bounds, None, norm_weight, norm_bias),
            z + bias,
            F.group_norm(activated, 12, norm_weight, norm_bias),
        ),
        (
            chains.LINEAR_GROUP_NORM_HARDTANH,
            (linear_bias, norm_weight, norm_bias, bounds),
            z,
            F.hardtanh(F.group_norm(z, 12, norm_weight, norm_bias), *bounds),
        ),
    ):
        output, saved = torch.full((20, 96), torch.nan), torch.full((20, 96), torch.nan) if save else None
        linear(input, weight, chain, config, operands, output=output, saved=saved, eps=1e-5, group_size=8)
        torch.testing.assert_close(output, result, rtol=1e-4, atol=1e-4)
        if save:
            torch.testing.assert_close(saved, kept, rtol=1e-5, atol=1e-5)


def test_config_holds_groups():
    config = LinearConfig(128, 256, 64)
    assert [size for size in (1, 10, 16, 48, 256, 512) if config.holds_groups_of(size)] == [1, 16, 256]
    strips = LinearConfig(128, 256, 64, epilogue_strips=2)
    assert [size for size in (1, 10, 16, 128, 256) if strips.holds_groups_of(size)] == [1, 16, 128]


def test_config_shared_memory():
    config = LinearConfig(128, 256, 64, num_stages=3)
    assert config.shared_memory(2) == 3 * (128 + 256) * 64 * 2 + 128 * 256 * 2
    assert LinearConfig(128, 256, 64, num_stages=3, epilogue_strips=2).shared_memory(2) < config.shared_memory(2)
    halves = LinearConfig(128, 256, 64, num_stages=4, store_strips=2)
    assert halves.shared_memory(2) == 4 * (128 + 256) * 64 * 2 + 128 * 128 * 2
    assert config.shared_memory(2, staged_columns=32) == 3 * (128 + 256) * 64 * 2 + 128 * 32 * 2
