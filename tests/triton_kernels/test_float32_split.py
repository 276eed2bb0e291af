"""Splitting float32 into float16 parts: what they hold, what is left to float32, and the tiles that remain."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels import float32_split
from triton_kernels import linear as linear_module
from triton_kernels.chains import LINEAR
from triton_kernels.float32_block_split import BLOCK
from triton_kernels.float32_parts import LOW_SCALE, bounds_of
from triton_kernels.float32_split import split
from triton_kernels.float32_tiles import LinearRegistersConfig, LinearSplitConfig, sections_of, steps_of_parts
from triton_kernels.grid import blocks_of
from triton_kernels.linear import LinearConfig, linear

ROWS, DEPTH = 9, 70
#: Of an element of 1 or 2 parts, what is left out at most.
LEFT_OUT = {1: 2.0**-11, 2: 2.0**-22}

by_parts = pytest.mark.parametrize("parts", [1, 2])


def matrix(rows=ROWS, depth=DEPTH, *, order="depth", seed=0):
    values = torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))
    if order == "rows":
        return values.T.contiguous().T
    if order == "strided":
        return torch.stack((values, values), 2)[:, :, 0]
    return values


def split_of(operand, parts):
    result = split(operand, parts)
    return result, int(result.scale.isnan().any())


def whole(operand):
    """What a split operand stands for, exactly."""
    value = operand.high.double()
    if operand.low is not None:
        value += operand.low.double() / LOW_SCALE.value
    return value * operand.scale.double()[:, None]


@by_parts
@pytest.mark.parametrize("order", ["depth", "rows", "strided"])
@pytest.mark.parametrize("shape", [(ROWS, DEPTH), (1, 1), (5, 2049), (40, 300)], ids=str)
def test_parts_hold_the_value(shape, order, parts):
    operand = matrix(*shape, order=order)
    result, rest = split_of(operand, parts)
    assert rest == 0
    assert ((whole(result) - operand.double()).abs() <= LEFT_OUT[parts] * operand.abs()).all()
    assert result.high.dtype == torch.float16
    assert (result.low is None) == (parts == 1)
    depth_first = order == "rows" and min(shape) > 1
    for part in (result.high, result.low)[:parts]:
        line, step = part.stride() if not depth_first else reversed(part.stride())
        assert step == 1 and line % 8 == 0 and part.data_ptr() % 16 == 0


@by_parts
def test_long_rows_are_read_twice(monkeypatch, parts):
    """Rows that no program keeps in registers, and rows that fill no block."""
    monkeypatch.setattr(float32_split, "_LONGEST_KEPT", 64)
    monkeypatch.setattr(float32_split, "_BLOCK", (4, 32, 8))
    operand = matrix()
    result, rest = split_of(operand, parts)
    assert rest == 0
    assert ((whole(result) - operand.double()).abs() <= LEFT_OUT[parts] * operand.abs()).all()


def test_scales_are_powers_of_two_by_row():
    """Each row's largest element comes to lie between 2**14 and 2**15, whatever the others' are."""
    operand = matrix() * torch.exp2(torch.linspace(-40, 40, ROWS).round())[:, None]
    result, rest = split_of(operand, 2)
    assert rest == 0
    mantissas, _ = torch.frexp(result.scale)
    assert (mantissas == 0.5).all()
    largest = result.high.abs().amax(1).float()
    assert ((largest >= 2**14) & (largest <= 2**15)).all()
    assert ((whole(result) - operand.double()).abs() <= LEFT_OUT[2] * operand.abs()).all()


def test_zeros_have_a_scale():
    operand = torch.zeros(3, 20)
    operand[1, 4] = -0.0
    result, rest = split_of(operand, 2)
    assert rest == 0
    assert torch.equal(whole(result), operand.double())


@by_parts
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**70, 2.0**127])
def test_a_row_that_parts_cannot_hold_gets_no_scale(value, parts):
    for order in ("depth", "rows"):
        operand = matrix(order=order)
        operand[3, 7] = value
        operand[6, 0] = value
        result, rest = split_of(operand, parts)
        assert rest == 1
        assert result.scale.isnan().nonzero().flatten().tolist() == [3, 6]


@pytest.mark.parametrize("parts, fits, lost", [(1, -30, -33), (2, -31, -34)])
def test_rows_of_wide_range(parts, fits, lost):
    """Elements far below their row's largest keep fewer digits; from some distance on the row is given up."""
    for exponent, is_rest in ((fits, 0), (lost, 1)):
        operand = matrix()
        operand[2] = 1.0
        operand[2, 5] = 1.7 * 2.0**exponent
        result, rest = split_of(operand, parts)
        assert rest == is_rest
        assert result.scale.isnan().nonzero().flatten().tolist() == [2] * is_rest
        if not is_rest:
            assert ((whole(result) - operand.double()).abs() <= float32_split._MOST_LOST[parts] * operand.abs()).all()


@pytest.mark.parametrize("parts, fits, most_lost", [(1, -30, 2.0**-9), (2, -31, 2.0**-19)])
def test_the_smallest_elements_that_are_held(parts, fits, most_lost):
    """Half way between two numbers that the parts hold most is lost: here just what may be, and of half as much twice
    that."""
    for smaller, is_rest in ((1, 0), (2, 1)):
        operand = torch.ones(3, 20)
        operand[2, 5] = 2.0**fits / smaller * (1 + most_lost * smaller)
        result, rest = split_of(operand, parts)
        assert rest == is_rest
        assert result.scale.isnan().tolist() == [False, False, bool(is_rest)]


@pytest.mark.parametrize("depth", [256, 512, 2**15])  # the longest is read in blocks
@pytest.mark.parametrize("order", ["depth", "rows"])
@by_parts
def test_an_element_near_zero_by_chance(parts, order, depth):
    """Of 256 elements that are not zero one may lose too much. What it loses is little beside the row's largest."""
    tiny, parts_bits = 1.7 * 2.0**-36, {1: 39, 2: 50}[parts]
    operand = torch.ones(3, depth) if order == "depth" else torch.ones(depth, 3).T
    operand[0, : depth // 256] = tiny
    operand[1, : depth // 256 + 1] = tiny
    operand[2, 256:] = 0.0
    operand[2, 5] = tiny
    result, rest = split_of(operand, parts)
    assert rest == 1
    assert result.scale.isnan().tolist() == [False, True, False]
    operand[1] = 1.0
    result, rest = split_of(operand, parts)
    assert rest == 0
    assert ((whole(result) - operand.double()).abs() <= 2.0**-parts_bits).all()
    operand[2, 9] = 0.0
    assert split_of(operand, parts)[1] == 1


@pytest.mark.parametrize("large", [2.0**70, math.inf, 2.0**-70])
def test_no_element_is_lost_where_the_scale_is_limited(large):
    operand = torch.full((2, 512), min(large, 2.0**20))
    operand[1, 7] = large if large > 1 else large * 2.0**-40
    result, rest = split_of(operand, 2)
    assert rest == 1
    assert result.scale.isnan().tolist() == [False, True]


def test_rows_too_small_to_be_scaled_up():
    """Subnormal numbers are what float16 cannot reach from 2**-60."""
    operand = torch.full((2, 16), 2.0**-62)
    operand[1] = 2.0**-140
    result, rest = split_of(operand, 2)
    assert rest == 1
    assert result.scale.isnan().tolist() == [False, True]
    assert torch.equal(whole(result)[0], operand[0].double())


@by_parts
def test_config(parts):
    config = LinearSplitConfig(parts)
    assert config.holds_groups_of(32) and not config.holds_groups_of(512) and not config.holds_groups_of(48)
    rest = config.rest
    for name in ("block_m", "epilogue_columns", "group_m"):
        assert getattr(rest, name) == getattr(config, name), name
    assert rest.block_k <= 32
    assert config.terms == 64 and replace(config, in_blocks=True).terms == BLOCK.value


@pytest.mark.parametrize("row_rest, column_rest", [(None, None), (21, None), (None, 3), (0, 33)])
def test_only_the_remaining_tiles_are_computed(row_rest, column_rest):
    """Of 3 x 3 tiles of 16 x 16, those of a row and a column; the others keep what they held."""
    input, weight = matrix(40, 24), matrix(36, 24, seed=1)
    left = torch.zeros(3, 3, dtype=torch.int32)
    expected = torch.full((40, 36), 7.0)
    product = input @ weight.T
    if row_rest is not None:
        left[row_rest // 16] = 1
        rows = slice(row_rest // 16 * 16, row_rest // 16 * 16 + 16)
        expected[rows] = product[rows]
    if column_rest is not None:
        left[:, column_rest // 16] = 1
        columns = slice(column_rest // 16 * 16, column_rest // 16 * 16 + 16)
        expected[:, columns] = product[:, columns]
    output = torch.full((40, 36), 7.0)
    left = left.T.flatten()  # tiles go down the columns
    linear(input, weight, LINEAR, LinearConfig(16, 16, 16), (None,), output=output, left=left)
    torch.testing.assert_close(output, expected)


def test_more_tiles_than_a_program_reads_flags_of(monkeypatch):
    """133 of one program: it computes those that are left, and no other."""
    monkeypatch.setattr(linear_module, "multiprocessor_count", lambda device: 1)
    input, weight = matrix(16, 24), matrix(133 * 16, 24, seed=1)
    left = torch.zeros(133, dtype=torch.int32)
    left[[0, 63, 64, 65, 130, 132]] = 1
    output = torch.full((16, 133 * 16), 7.0)
    linear(input, weight, LINEAR, LinearConfig(16, 16, 16), (None,), output=output, left=left)
    expected = torch.where(left.repeat_interleave(16) == 1, input @ weight.T, 7.0)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("columns", [512, 1000, 8192, 50304])
@pytest.mark.parametrize("depth", [512, 1000, 2048, 8192, 65536])
def test_parts_of_few_rows_products(columns, depth):
    """Parts are neither long nor short, and end at all terms."""
    steps = steps_of_parts(columns, depth, 132)
    parts = blocks_of(depth, 64 * steps)
    assert 512 - 64 <= 64 * steps <= 2048
    assert 64 * steps * (parts - 1) < depth <= 64 * steps * parts


def test_tiles_of_few_rows_products():
    configs = [LinearRegistersConfig.of_rows(rows, 2) for rows in (1, 16, 17, 64, 65, 511, 4000)]
    assert [each.block_m for each in configs] == [16, 16, 32, 64, 128, 128, 128]


@pytest.mark.parametrize("order", ["depth", "rows", "strided"])
@pytest.mark.parametrize("shape", [(3, 1), (3, 2049), (40, 300), (9, 640), (2, 20000), (70, 1000)], ids=str)
def test_lane_order(shape, order):
    """The same parts and scales, in the order in which an operand in registers is loaded: of 32 terms in two blocks of
    16, lane i of 4 loads terms 8i to 8i + 7, and tensor cores take 2i, 2i + 1, 2i + 8 and 2i + 9 of each block."""
    operand = matrix(*shape, order=order)
    plain, ordered = (split(operand, 2, may_lose=False, lane_order=each) for each in (False, True))
    terms = torch.empty(2, 16, dtype=torch.int64)
    for lane in range(4):
        for block in range(2):
            terms[block, [2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9]] = 8 * lane + 4 * block + torch.arange(4)
    rows, depth = shape
    whole_blocks = -(-depth // 32)
    places = torch.arange(whole_blocks)[:, None] * 32 + terms.flatten()
    torch.testing.assert_close(ordered.scale, plain.scale, rtol=0, atol=0)
    for one, other in ((ordered.high, plain.high), (ordered.low, plain.low)):
        padded = torch.nn.functional.pad(other, (0, whole_blocks * 32 - depth))
        torch.testing.assert_close(one, padded[:, places.flatten()], rtol=0, atol=0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", ["depth first", "rows first", "strided", "repeated"])
def test_a_batch_is_split_as_its_matrices(order, parts):
    shapes = {"depth first": (3, 40, 70), "rows first": (3, 70, 40), "strided": (3, 80, 70), "repeated": (1, 40, 70)}
    values = torch.randn(shapes[order], generator=torch.Generator().manual_seed(0))
    values[0, 4, 6] = torch.nan
    batch = {
        "depth first": lambda: values,
        "rows first": lambda: values.mT,
        "strided": lambda: values[:, ::2],
        "repeated": lambda: values.expand(3, -1, -1),
    }[order]()
    found = split(batch, parts)
    assert found.scale.isnan().any()
    for matrix, *of_batch in zip(batch, found.high, *([found.low] if parts == 2 else []), found.scale, strict=True):
        alone = split(matrix, parts)
        expected = [each for each in (alone.high, alone.low, alone.scale) if each is not None]
        for one, other in zip(of_batch, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@by_parts
@pytest.mark.parametrize("may_lose", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("depth", [1, 130, 700, 9000])
def test_programs_that_share_rows(depth, batch, may_lose, parts, monkeypatch):
    """Give the bits that programs with whole rows give, whatever a row loses."""
    values = torch.randn(*batch, depth, 37, generator=torch.Generator().manual_seed(0)).mT
    values[..., 3, 0], values[..., 5, -1], values[..., 8, :] = torch.nan, 2.0**100, 0.0
    values[..., 10, : depth // 256] = 2.0**-40
    values[..., 11, : depth // 256 + 1] = 2.0**-40
    values[..., 33, ::3] *= 2.0**-45
    found = []
    for longest in (2**20, 0):
        monkeypatch.setattr(float32_split, "_LONGEST_WHOLE", longest)
        result = split(values, parts, may_lose=may_lose)
        found.append([each for each in (result.high, result.low, result.scale) if each is not None])
    for whole, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, whole, rtol=0, atol=0, equal_nan=True)


def test_few_rows_are_shared(monkeypatch):
    """Where the depth is not contiguous and long enough."""
    shared = []
    monkeypatch.setattr(float32_split, "_split_shared", lambda operand, *_: shared.append(tuple(operand.shape)))
    for rows, depth, order in ((2, 513, "rows"), (2, 512, "rows"), (4097, 513, "rows"), (2, 513, "depth")):
        split(matrix(rows, depth, order=order), 2)
    split(torch.empty(1024, 600, 5).mT, 2)
    assert shared == [(2, 513)]


@pytest.mark.parametrize("depth_stride, expected", [(2**25 - 32, True), (2**25, False)])
def test_rows_far_apart_are_not_shared(depth_stride, expected):
    """32-bit integers hold what lies between the elements of a block."""
    assert float32_split._shares_rows(torch.empty_strided((40, 1000), (1, depth_stride), device="meta")) is expected


@pytest.mark.parametrize(
    "tiles, K, expected",
    [
        (144, 8192, (132, 11, 768)),
        (36, 8192, (0, 3, 2752)),
        (6, 24576, (0, 22, 1152)),
        (1, 8192, (0, 16, 512)),
        (132, 8192, (132, 1, 8192)),  # none is left
        (200, 8192, (200, 1, 8192)),  # more than half as many as there are multiprocessors are left
        (144, 960, (144, 1, 960)),  # too few terms
        (144, 1000, (132, 2, 512)),
        (145, 2070, (132, 4, 576)),
    ],
)
@pytest.mark.parametrize("terms", [64, 128])
def test_sections(tiles, K, expected, terms):
    """What is left for the last wave occupies all multiprocessors, and every section has terms, of whole blocks."""
    whole, count, depth = sections_of(tiles, K, 132, terms)
    if terms == 64:
        assert (whole, count, depth) == expected
    assert count == 1 or depth % terms == 0
    assert (count - 1) * depth < K <= count * depth
    assert whole == tiles or (tiles - whole) * count <= 132


def test_what_is_cleared(monkeypatch):
    """For the kernel behind, by all programs together."""
    monkeypatch.setattr(float32_split, "_LONGEST_WHOLE", 64)
    for size, order in ((1, "depth"), (100, "rows"), (5000, "depth"), (5000, "rows")):
        memory = torch.full((size + 1,), 7, dtype=torch.int32)
        values = matrix(order=order)
        values[3, 3] = torch.inf
        assert split(values, 2, clears=memory[:-1]).scale[3].isnan()
        assert memory.tolist() == [0] * size + [7]


@triton.jit
def bounds_kernel(values, up, down, bounds, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.arange(0, ROWS)
    bits = tl.load(values + rows[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]).to(tl.uint32, bitcast=True)
    of_rows, back, bound = bounds_of((tl.max(bits * 2, 1) >> 1).to(tl.int32), tl.min(bits * 2 - 1, 1))
    tl.store(up + rows, of_rows)
    tl.store(down + rows, back)
    tl.store(bounds + rows, bound)


BOUNDED = [
    ([8.0, 0.0, -(2.0**-25), 1.0], 0.0),
    ([-8.0, 0.0, 2.0**-26, 1.0], 8.0),
    ([0.0, -0.0, 0.0, 0.0], 0.0),
    ([-(2.0**61), 0.0, 0.0, 0.0], math.nan),
    ([2.0**60, 2.0**32, 2.0**40, 0.0], 0.0),
    ([2.0**60, 2.0**31, 2.0**40, 0.0], 2.0**60),
    ([2.0**-70, 2.0**-88, 0.0, 0.0], 0.0),
    ([2.0**-70, 2.0**-89, 0.0, 0.0], 2.0**-60),
    ([1e-45, 0.0, 0.0, 0.0], 2.0**-60),
    ([1.0, -math.inf, 0.0, 0.0], math.nan),
    ([1.0, -math.nan, 0.0, 0.0], math.nan),
]


@pytest.mark.parametrize("values, bound", BOUNDED, ids=str)
def test_bounds(values, bound):
    """The largest, where an element that is not 0 is more than 2**28 below it or below what the least scale holds."""
    up, down = torch.empty(1), torch.empty(1)
    bounds = torch.empty(1)
    bounds_kernel[(1,)](torch.tensor([values]), up, down, bounds, ROWS=1, DEPTH=4)
    torch.testing.assert_close(bounds, torch.tensor([bound]), rtol=0, atol=0, equal_nan=True)
    largest = max(map(abs, values))
    assert (up * down).item() == 1.0
    assert math.isnan(bound) or largest < 2.0**-60 or 2.0**14 <= largest * up.item() < 2.0**15


def test_elements_that_lose_too_much():
    """Each is off by at most 2**-49 of the largest, when it is multiplied by another that is split. The others are off
    by at most 2**-19 of themselves."""
    weight, input = (wide(seed) for seed in (0, 1))
    of_weight, of_input = (split_of(each, 2)[0] for each in (weight, input))
    (high, low), (other, rest) = (
        [each.high.double() / 2.0**14, each.low.double() / 2.0**25] for each in (of_weight, of_input)
    )
    error = (high * other + high * rest + low * other - weight.double() * input.double()).abs()
    is_far = weight.abs() < 2.0**-28
    assert is_far.sum() > 1000 and (error[is_far] <= 2.0**-49).all()
    assert (error <= 2.0**-19 * (weight * input).double().abs())[~is_far].all()
    assert error[is_far].max() > 2.0**-52, "the bound is not far off"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_that_may_lose_nothing(parts):
    """One of many elements that loses too much leaves the row without a scale."""
    values = matrix(depth=600)
    values[4, 7] = math.pi * 2.0**-40
    values[5, 7] = 0.0
    kept, strict = (split(values, parts, may_lose=each).scale for each in (True, False))
    assert not kept.isnan().any() and strict.isnan().nonzero().flatten().tolist() == [4]
    assert torch.equal(strict[5:], kept[5:])


def test_rows_of_zeros():
    """Have a scale of 0: their results need no bound."""
    values = matrix()
    values[2] = 0.0
    assert (split(values, 2).scale == 0).nonzero().flatten().tolist() == [2]


def wide(seed):
    """Rows with a largest element of 1 and exponents down to -60; those of the second matrix are in [0.5, 1]."""
    generator = torch.Generator().manual_seed(seed)
    values = 1 - torch.rand(64, 64, generator=generator) / 2
    if seed == 0:
        values *= torch.exp2(-torch.randint(1, 60, values.shape, generator=generator).float())
    values[:, 0] = 1.0
    return values
