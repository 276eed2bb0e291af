"""Row minima: keys that order as numbers do, minima per tile, and the kernel that finishes them."""

import math

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels import row_minimum
from triton_kernels.chains import LINEAR_GROUP_NORM_MIN
from triton_kernels.group_norm import GroupNormConfig, column_tiles, group_norm
from triton_kernels.linear import LinearConfig, linear

CPU = torch.device("cpu")


@triton.jit
def _key_kernel(values, keys, back, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    key = row_minimum.ordered_key(tl.load(values + places))
    tl.store(keys + places, key)
    tl.store(back + places, row_minimum.key_value(key))


def keys_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = triton.next_power_of_2(values.numel())
    padded = torch.cat([values, values.new_zeros(size - values.numel())])
    keys, back = torch.empty(size, dtype=torch.int32), torch.empty(size)
    _key_kernel[(1,)](padded, keys, back, SIZE=size)
    return keys[: values.numel()], back[: values.numel()]


def test_keys_order_as_numbers_with_nan_first():
    ascending = torch.tensor(
        [math.nan, -math.inf, -3.4e38, -2.0, -1.0, -1e-38, -1e-45, 0.0, 1e-45, 1e-38, 1.0, 2.0, 3.4e38, math.inf]
    )
    keys, back = keys_of(ascending)
    assert (keys[1:].long() > keys[:-1].long()).all()
    assert keys[0] == -(2**31), "no number may come before a NaN"
    torch.testing.assert_close(back, ascending, rtol=0, atol=0, equal_nan=True)
    zeros, _ = keys_of(torch.tensor([-0.0, 0.0]))
    assert zeros[0] == zeros[1], "the first zero of a row is its minimum, whatever its sign"
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    assert keys_of(negative_nan)[0] == keys[0]


def test_keys_of_random_bits():
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    keys, back = keys_of(values)
    torch.testing.assert_close(back, values, rtol=0, atol=0, equal_nan=True)
    numbers = ~values.isnan()
    assert torch.equal(values[numbers][keys[numbers].argsort(stable=True)], values[numbers].sort()[0])


def expected_winner(z, num_groups, weight, bias):
    """Minimum [M], column [M], rstd [M] and normalised group [M, group_size] of group_norm(z), in float64."""
    rows, channels = z.shape
    groups = z.double().view(rows, num_groups, -1)
    rstd = (groups.var(2, correction=0) + 1e-5).rsqrt()
    normalized = (groups - groups.mean(2, keepdim=True)) * rstd[:, :, None]
    y = normalized.reshape(rows, channels) * weight.double() + bias.double()
    least, column = y.min(1)
    group = column // (channels // num_groups)
    every = torch.arange(rows)
    return least, column, rstd[every, group], normalized[every, group]


def check_finished(keys, tile_saved, z, num_groups, weight, bias):
    rows, channels = z.shape
    winner = row_minimum.empty_winner(rows, channels // num_groups, CPU)
    shift = torch.arange(5.0)
    output = torch.full((5, rows), torch.nan)
    row_minimum.finish(keys, tile_saved, shift, output, winner, channels // num_groups, weight, bias)
    least, column, rstd, normalized = expected_winner(z, num_groups, weight, bias)
    torch.testing.assert_close(output.double(), least + shift.double()[:, None], rtol=1e-5, atol=1e-5)
    assert torch.equal(winner[0].long(), column)
    torch.testing.assert_close(winner[1].double(), rstd, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(winner[2].double(), normalized, rtol=1e-4, atol=1e-5)
    # Without a winner to keep and without a bias: the minimum alone.
    alone = torch.full((1, rows), torch.nan)
    row_minimum.finish(keys, None, None, alone, None, channels // num_groups)
    assert torch.equal(alone[0], output[0])


@pytest.mark.parametrize("rows, num_groups, group_size", [(1, 1, 1), (5, 7, 10), (33, 3, 16), (5, 30, 8), (9, 2, 300)])
def test_minimum_of_normalised_tiles(rows, num_groups, group_size):
    generator = torch.Generator().manual_seed(rows)
    z = torch.randn(rows, num_groups * group_size, generator=generator)
    weight, bias = torch.randn(2, num_groups * group_size, generator=generator)
    config = GroupNormConfig(2, 32, 2)
    tiles = column_tiles(z.shape[1], group_size, config)
    keys, saved = row_minimum.empty_tile_minimum(tiles, rows, group_size, CPU, save=True)
    operands = (None, weight, bias)  # the linear bias is in z
    group_norm(z, num_groups, LINEAR_GROUP_NORM_MIN, operands, 1e-5, config, output=keys, saved=saved)
    check_finished(keys, saved, z, num_groups, weight, bias)


@pytest.mark.parametrize("strips", [1, 2])
@pytest.mark.parametrize("rows, num_groups, group_size", [(1, 2, 8), (21, 12, 8), (40, 5, 16), (10, 5, 4)])
def test_minimum_of_a_product(rows, num_groups, group_size, strips):
    """In the product's own epilogue; a strip or a tile beyond the last column must leave nothing anywhere."""
    generator = torch.Generator().manual_seed(rows)
    channels = num_groups * group_size
    input, matrix = torch.randn(rows, 24, generator=generator), torch.randn(channels, 24, generator=generator)
    weight, bias = torch.randn(2, channels, generator=generator)
    config = LinearConfig(16, 64, 16, epilogue_strips=strips)
    tiles = triton.cdiv(channels, config.epilogue_columns)
    _, saved = row_minimum.empty_tile_minimum(tiles, rows, group_size, CPU, save=True)
    memory = torch.full((tiles * rows + 256,), 7, dtype=torch.int32)
    keys = memory[: tiles * rows].view(tiles, rows)
    arguments = (input, matrix, LINEAR_GROUP_NORM_MIN, config, (None, weight, bias))
    options = {"eps": 1e-5, "group_size": group_size}
    linear(*arguments, output=keys, saved=None, **options)
    written_beyond = int((memory[tiles * rows :] != 7).sum())
    assert written_beyond == 0
    linear(*arguments, output=keys, saved=saved, **options)
    check_finished(keys, saved, input @ matrix.T, num_groups, weight, bias)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tiles, rows", [(1, 1), (32, 70), (33, 3), (100, 130)])
def test_finish_over_many_tiles(tiles, rows, affine):
    """More tiles than are reduced at a time; the first of equal minima wins, among tiles and in the group."""
    generator = torch.Generator().manual_seed(tiles)
    values = torch.randint(-50, 50, (tiles, rows), generator=generator).float()
    keys = keys_of(values.flatten())[0].view(tiles, rows)
    saved = (
        torch.randint(0, 20, (tiles, rows), generator=generator, dtype=torch.int32),
        torch.randn(tiles, rows, generator=generator),
        torch.randint(-2, 2, (tiles, rows, 3), generator=generator).float(),
    )
    vectors = torch.randint(-2, 2, (2, 60), generator=generator).float() if affine else (None, None)
    output, winner = torch.empty(1, rows), row_minimum.empty_winner(rows, 3, CPU)
    row_minimum.finish(keys, saved, None, output, winner, 3, *vectors)
    least = values.min(0)[0]
    first = (values == least).int().argmax(0)
    every = torch.arange(rows)
    assert torch.equal(output[0], least)
    group, rstd, normalized = (mine[first, every] for mine in saved)
    y = normalized
    if affine:
        weight, bias = (vector.view(20, 3)[group.long()] for vector in vectors)
        y = normalized * weight + bias
    column = group * 3 + (y == y.min(1, keepdim=True)[0]).int().argmax(1)
    for kept, expected in zip(winner, (column, rstd, normalized), strict=True):
        assert torch.equal(kept.double(), expected.double())


@pytest.mark.parametrize("first_nan", [0, 2, 3])
def test_finish_finds_the_first_nan(first_nan):
    """Of the weight's, say: the values of its group are numbers, and one of them less than all others."""
    saved = torch.tensor([[3]], dtype=torch.int32), torch.ones(1, 1), torch.tensor([[[1.0, -5.0, 2.0, 3.0]]])
    weight = torch.ones(16)
    weight[12 + first_nan :] = math.nan
    winner = row_minimum.empty_winner(1, 4, CPU)
    row_minimum.finish(
        keys_of(torch.tensor([math.nan]))[0].view(1, 1), saved, None, torch.empty(1, 1), winner, 4, weight
    )
    assert winner[0].item() == 12 + first_nan


def test_no_channels():
    """A bias of no channels leaves no result, but the winner is kept all the same."""
    keys, saved = row_minimum.empty_tile_minimum(2, 3, 4, CPU, save=True)
    for memory in (keys, *saved):
        memory.fill_(5)
    output, winner = torch.empty(0, 3), row_minimum.empty_winner(3, 4, CPU)
    for memory in winner:
        memory.fill_(-1)
    row_minimum.finish(keys, saved, torch.empty(0), output, winner, 4)
    assert all((memory == value).all() for memory, value in zip(winner, (5 * 4, 5, 5), strict=True))


def test_no_rows():
    keys, saved = row_minimum.empty_tile_minimum(2, 0, 4, CPU, save=True)
    row_minimum.finish(keys, saved, None, torch.empty(1, 0), row_minimum.empty_winner(0, 4, CPU), 4)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("strips", [1, 2])
def test_columns_past_the_last_are_no_minimum(strips, has_bias):
    """Zeros lie there, less than every number of these rows; and NaN comes before all, in its first column."""
    generator = torch.Generator().manual_seed(3)
    channels, rows = 24, 10
    input = torch.rand(rows, 24, generator=generator) + 0.5
    matrix = torch.rand(channels, 24, generator=generator)
    matrix[1::2] *= -1.0  # groups of two: a number above their mean, and one below, which a negative weight turns
    weight = torch.tensor([1.0, -1.0]).repeat(channels // 2)
    bias = torch.rand(channels, generator=generator) if has_bias else None
    input[1, 2], input[2, 3], input[3, 7] = math.nan, math.inf, -math.inf
    matrix[7, 7] = 0.0  # times an infinity: NaN
    matrix[9, 5], input[:, 5], input[4, 5] = 3e38, 0.0, 2.0  # one infinite z, in row 4: its group alone is NaN
    config = LinearConfig(16, 64, 16, epilogue_strips=strips)
    tiles = triton.cdiv(channels, config.epilogue_columns)
    keys, saved = row_minimum.empty_tile_minimum(tiles, rows, 2, CPU, save=True)
    operands = (None, weight, bias)
    options = {"output": keys, "saved": saved, "eps": 1e-5, "group_size": 2}
    linear(input, matrix, LINEAR_GROUP_NORM_MIN, config, operands, **options)
    output, winner = torch.empty(1, rows), row_minimum.empty_winner(rows, 2, CPU)
    row_minimum.finish(keys, saved, None, output, winner, 2, weight, bias)
    y = torch.nn.functional.group_norm(input @ matrix.T, channels // 2, weight, bias)
    is_nan = y.isnan()
    assert is_nan.any(1)[:5].tolist() == [False, True, True, True, True] and not is_nan[4].all()
    assert (y[~is_nan] > 0.0).all()
    torch.testing.assert_close(output[0], y.min(1)[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    has_nan = is_nan.any(1)
    assert torch.equal(winner[0].long()[has_nan], is_nan.int().argmax(1)[has_nan])
