"""Copies of many tensors in one launch."""

import itertools

import pytest
import torch

from triton_kernels.copies import MOST_COPIES, copy_all, matrices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Of no elements, of one, of less than a block, of several, of whole ones.
SHAPES = [(0,), (1,), (5,), (4096,), (9000,), (3, 7), (64, 64), (4, 3, 3, 3), (4, 5, 1, 1), (2, 6, 2, 3, 2)]
SHAPES += [(8, 99, 3, 3)]


def laid_out(tensor, is_turned):
    """As channels_last, or transposed; a new tensor."""
    if not is_turned or tensor.ndim == 1:
        return tensor.clone()
    if tensor.ndim == 2:
        return tensor.T.contiguous().T
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])


def targets_like(sources, dtype, turned=()):
    return [
        laid_out(torch.full(each.shape, torch.nan, dtype=dtype), is_turned)
        for each, is_turned in itertools.zip_longest(sources, turned, fillvalue=False)
    ]


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout(dtype, target_dtype):
    """All shapes, from either layout into either, together."""
    cells = list(itertools.product(SHAPES, (False, True), (False, True)))
    torch.manual_seed(0)
    sources = [laid_out(torch.randn(shape).to(dtype), is_turned) for shape, is_turned, _ in cells]
    targets = targets_like(sources, target_dtype, [is_turned for _, _, is_turned in cells])
    copy_all(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target_dtype)), (source.shape, source.stride(), target.stride())


@pytest.mark.parametrize("count", [1, MOST_COPIES, MOST_COPIES + 1, 2 * MOST_COPIES + 3])
def test_any_number(count):
    sources = [torch.randn(1 + place % 5) for place in range(count)]
    targets = targets_like(sources, torch.bfloat16)
    copy_all(sources, targets)
    assert all(torch.equal(target, source.bfloat16()) for source, target in zip(sources, targets, strict=True))


def test_nothing_beside_is_written():
    memory = torch.full((3, 300), 7.0)
    source = torch.randn(300)
    copy_all([source, source[:3]], [memory[1], memory[2, :3]])
    assert (memory[0] == 7).all() and torch.equal(memory[1], source)
    assert torch.equal(memory[2, :3], source[:3]) and (memory[2, 3:] == 7).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's, by NumPy
def test_special_values():
    """Rounded to the nearest, ties to even; infinities, subnormal numbers, zeros and NaN as PyTorch has them."""
    special = [
        torch.inf,
        -torch.inf,
        torch.nan,
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        3.4e38,
        65520.0,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
    ]
    source = torch.tensor(special)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        (target,) = targets_like([source], dtype)
        copy_all([source], [target])
        torch.testing.assert_close(target, source.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(target.signbit()[3:5], source.signbit()[3:5])


@pytest.mark.parametrize("source, target, expected", [
    (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), (20, 3)),
    (torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), torch.empty(2, 3, 4, 5), (3, 20)),
    (torch.empty(2, 3, 1, 1), torch.empty(2, 3, 1, 1, memory_format=torch.channels_last), (1, 6)),
    (torch.empty(2, 3, 4), torch.empty(2, 3, 4), (1, 24)),
    (torch.empty(2, 3, 4).permute(2, 0, 1), torch.empty(4, 2, 3), (4, 6)),
    (torch.empty(2, 3, 4).permute(2, 1, 0), torch.empty(4, 3, 2), None),  # three axes turned
    (torch.empty(2, 3, 4)[:, :2], torch.empty(2, 2, 4), None),  # a gap
    (torch.empty(2, 4), torch.empty(2, 1).expand(2, 4), None),  # one element for all
    (torch.empty(()), torch.empty(()), (1, 1)),
])  # fmt: skip
def test_matrices(source, target, expected):
    assert matrices(source, target) == expected


def test_other_layouts_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 3, 2\) cannot be copied from strides \(1, 4, 12\) to \(6, 2, 1\)"):
        copy_all([torch.empty(2, 3, 4).permute(2, 1, 0)], [torch.empty(4, 3, 2)])
