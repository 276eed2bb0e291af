"""Promise: blocks of a float32 matrix that share a scale hold it for products along either axis, or leave no scale."""

import math

import pytest
import torch

from triton_kernels.float32_block_split import BLOCK, split_blocks
from triton_kernels.float32_parts import LOW_SCALE

SIDE = BLOCK.value
ORDERS = {
    "lines": lambda values: values,
    "columns": lambda values: values.T.contiguous().T,
    "strided": lambda values: torch.stack((values, values), 2)[:, :, 0],
    "part": lambda values: torch.cat((values, values[:, :3]), 1)[:, : values.shape[1]],
}


def matrix(rows, depth, seed=0):
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(seed))


def whole(split):
    """What a split matrix stands for, exactly."""
    rows, depth = split.high.shape
    scale = split.scale.double().repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :depth]
    return (split.high.double() + split.low.double() / LOW_SCALE.value) * scale


def left(scale):
    return scale.isnan().nonzero().tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (300, 5), (128, 128), (257, 130)], ids=str)
def test_parts_hold_the_value(shape, order):
    operand = ORDERS[order](matrix(*shape))
    split = split_blocks(operand)
    assert split.scale.shape == split.scale_of_transposed.shape == tuple(-(-size // SIDE) for size in shape)
    for each, value in ((split, operand), (split.T, operand.T)):
        assert ((whole(each) - value.double()).abs() <= 2.0**-22 * value.abs()).all()
    for part in (split.high, split.low):
        line, step = sorted(part.stride(), reverse=True)
        assert step == 1 and line % 8 == 0 and part.data_ptr() % 16 == 0
    mantissas, _ = torch.frexp(split.scale)
    assert (mantissas == 0.5).all()


def test_blocks_have_scales_of_their_own():
    """Each block's largest element comes to lie between 2**14 and 2**15, whatever the others' are."""
    operand = matrix(2 * SIDE, 2 * SIDE)
    exponents = torch.tensor([[-50.0, 3.0], [0.0, 50.0]])
    operand *= torch.exp2(exponents).repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    split = split_blocks(operand)
    assert not split.scale.isnan().any() and torch.equal(split.scale, split.scale_of_transposed)
    largest = split.high.abs().reshape(2, SIDE, 2, SIDE).amax((1, 3)).float()
    assert ((largest >= 2**14) & (largest <= 2**15)).all()
    assert ((whole(split) - operand.double()).abs() <= 2.0**-22 * operand.abs()).all()


@pytest.mark.parametrize("order", ORDERS)
def test_what_rows_or_columns_lose(order):
    """A row far below its block leaves no scale for sums along rows, a column none for sums along columns."""
    operand = matrix(300, 200)
    operand[140] *= 2.0**-36
    operand[:, 150] *= 2.0**-36
    split = split_blocks(ORDERS[order](operand))
    assert left(split.scale) == [[1, 0], [1, 1]]
    assert left(split.scale_of_transposed) == [[0, 1], [1, 1], [2, 1]]
    turned = split_blocks(ORDERS[order](operand.T))
    assert left(turned.scale) == left(split.T.scale) == [[1, 0], [1, 1], [1, 2]]
    for one, other in ((turned.high, split.T.high), (turned.low, split.T.low), (turned.scale, split.T.scale)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fits, lost", [(-29, -32)])
def test_how_far_elements_are_held(fits, lost):
    for exponent, expected in ((fits, []), (lost, [[0, 0]])):
        operand = torch.ones(3, 40)
        operand[2, 5] = 1.7 * 2.0**exponent
        split = split_blocks(operand)
        assert left(split.scale) == left(split.scale_of_transposed) == expected


def test_an_element_near_zero_by_chance():
    """Of 64 elements that are not zero one may lose too much. What it loses is little beside the block's largest."""
    tiny = 1.7 * 2.0**-36
    operand = torch.ones(SIDE, SIDE)
    operand[7, 3] = operand[7, 99] = operand[50, 60] = tiny
    split = split_blocks(operand)
    assert not left(split.scale) and not left(split.scale_of_transposed)
    assert ((whole(split) - operand.double()).abs() <= 2.0**-50).all()
    operand[7, 4] = tiny
    assert left(split_blocks(operand).scale) == [[0, 0]] and not left(split_blocks(operand).scale_of_transposed)
    operand[7, 4], operand[50, :66] = 1.0, 0.0
    operand[50, 60] = tiny
    assert left(split_blocks(operand).scale) == [[0, 0]] and not left(split_blocks(operand).scale_of_transposed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**70, 2.0**127])
def test_what_no_scale_holds(value):
    """Its block has none. The others have."""
    operand = matrix(300, 300)
    operand[150, 270] = value
    split = split_blocks(operand)
    assert left(split.scale) == left(split.scale_of_transposed) == [[1, 2]]


def test_no_element_is_lost_where_a_scale_is_limited():
    """What is larger has no place, and is not one of many."""
    operand = torch.full((SIDE, SIDE), 2.0**60)
    operand[7, 9] = 2.0**70
    split = split_blocks(operand)
    assert left(split.scale) == left(split.scale_of_transposed) == [[0, 0]]


def test_rows_that_would_be_zeros():
    """Are left, also where nothing of them is above the least number."""
    operand = torch.full((4, SIDE), 2.0**36)
    operand[2] = 2.0**-130
    split = split_blocks(operand)
    assert left(split.scale) == [[0, 0]]
    operand[2] = 0.0
    assert not left(split_blocks(operand).scale)


@pytest.mark.parametrize("exponent", [-20, -27, -29, -30])
def test_rows_of_both_operands_far_below_their_blocks(exponent):
    """Their results are as good as float32's, or they are left."""
    matrices = []
    for seed in 0, 1:
        generator = torch.Generator().manual_seed(seed)
        values = (1 + torch.rand(64, 1024, generator=generator)) * 2.0**exponent
        values *= torch.where(torch.rand(64, 1024, generator=generator) < 0.5, -1.0, 1.0)
        values[0] = 1.99
        matrices.append(values)
    a, b = map(split_blocks, matrices)
    if left(a.scale) or left(b.scale):
        assert exponent == -30
        return
    parts = [[part * 2.0**-14 for part in (each.high.double(), each.low.double() / LOW_SCALE.value)] for each in (a, b)]
    (high, low), (other, rest) = parts
    result, exact = high @ other.T + high @ rest.T + low @ other.T, matrices[0].double() @ matrices[1].double().T
    error = (result - exact)[1:, 1:].norm() / exact[1:, 1:].norm()
    assert error < 5e-7


def test_blocks_too_small_to_be_scaled_up():
    """Below 2**-52 a scale stays what it is there, so that a product of two and of 2**-11 is no zero."""
    operand = torch.full((2 * SIDE, 16), 2.0**-54)
    operand[SIDE:] = 2.0**-140
    split = split_blocks(operand)
    assert split.scale[0].item() == 2.0**-66 and left(split.scale) == left(split.scale_of_transposed) == [[1, 0]]
    assert torch.equal(whole(split)[:SIDE], operand[:SIDE].double())


def test_blocks_of_zeros():
    operand = torch.zeros(3, 200)
    operand[1, 190], operand[0, 4] = 1.0, -0.0
    split = split_blocks(operand)
    assert torch.equal(whole(split), operand.double()) and split.scale.tolist() == [[0.0, 2.0**-14]]


def test_what_is_cleared():
    for size, order in ((1, "lines"), (5000, "lines"), (5000, "columns")):
        memory = torch.full((size + 1,), 7, dtype=torch.int32)
        split_blocks(ORDERS[order](matrix(300, 200)), memory[:-1])
        assert memory.tolist() == [0] * size + [7]
