"""The second stage of sums over rows."""

import pytest
import torch

from triton_kernels.chain import Chain
from triton_kernels.column_sums import add_up, column_sums, empty_partials
from triton_kernels.image_group_norm import empty_sums
from triton_kernels.image_tiles import ImageNormConfig
from triton_kernels.pointwise import ADD


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sums, chunks, channels", [(1, 1, 1), (3, 5, 70), (2, 16, 64), (1, 100, 65), (3, 33, 200)])
def test_against_float64(sums, chunks, channels):
    partials = draw(sums, chunks, channels)
    assert torch.equal(column_sums(partials), partials.double().sum(1).float())


def test_partials_are_float32_whatever_the_default():
    vectors = (None, torch.empty(8, dtype=torch.bfloat16))
    torch.set_default_dtype(torch.float64)
    try:
        images = empty_sums(Chain("", before=(ADD, ADD)), vectors, torch.empty(3, 8, 5), ImageNormConfig(8, 8))
        partials = [*images, *empty_partials(vectors, 3)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {partial.dtype for partial in partials if partial is not None} == {torch.float32}


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_vectors_of_any_dtype(chunks):
    """Each in memory of its own, rounded once; two may get the same sums, and one that is not wanted is None."""
    vectors = [torch.full((70,), torch.nan, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    vectors.insert(1, None)
    sums = [draw(chunks, 70, seed=seed) for seed in (0, 1, 2, 2)]
    add_up(sums, vectors)
    for each, vector in zip(sums, vectors, strict=True):
        assert vector is None or torch.equal(vector, each.double().sum(0).float().to(vector.dtype))


def test_sums_of_samples():
    """Several sums for each output."""
    partials = [draw(5, 3, 70, seed=seed) for seed in (0, 1)]
    outputs = [torch.empty(5, 70) for _ in partials]
    add_up(partials, outputs)
    for each, output in zip(partials, outputs, strict=True):
        assert torch.equal(output, each.double().sum(1).float())


def test_partials():
    """One chunk is its sum: it is written to where it belongs."""
    vectors = (torch.empty(7), None, torch.empty(7, dtype=torch.bfloat16))
    assert empty_partials(vectors, 1) == list(vectors)
    for chunks in (0, 3):
        first, absent, last = empty_partials(vectors, chunks)
        assert absent is None and first.shape == last.shape == (chunks, 7)
        assert first.dtype == last.dtype == torch.float32


def test_partials_of_images():
    """Of vectors before the norm. They are read on the way, so a strip is its sum in float32 alone."""
    vectors = [torch.empty(7), None, torch.empty(7, dtype=torch.bfloat16)]
    chain = Chain("", before=(ADD, ADD))
    for gradients in (vectors[:2], vectors[1:]):
        for samples in (1, 3):
            sums = empty_sums(chain, [*gradients, None, None], torch.empty(samples, 7, 5), ImageNormConfig(8, 8))
            expected = [None if each is None else (samples, 1, 7) for each in gradients]
            found = [None if each is None else each.shape for each in sums[:2]]
            assert found == expected
            for each, vector in zip(sums, gradients, strict=False):
                if each is not None:
                    assert each.dtype == torch.float32
                    assert (each.data_ptr() == vector.data_ptr()) == (samples == 1 and vector is vectors[0])


def test_no_channels_and_no_chunks():
    assert column_sums(torch.empty(3, 4, 0)).shape == (3, 0)
    assert torch.equal(column_sums(torch.empty(2, 0, 5)), torch.zeros(2, 5))


def test_large_terms_that_cancel():
    """A float32 sum would lose the small term."""
    partials = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1)
    assert column_sums(partials).item() == 1.0
