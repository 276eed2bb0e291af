"""The second stage of sums over rows."""

import pytest
import torch

from triton_kernels.column_sums import column_sums, empty_partials


@pytest.mark.parametrize("sums, chunks, channels", [(1, 1, 1), (3, 5, 70), (2, 16, 64), (1, 100, 65), (3, 33, 200)])
def test_against_float64(sums, chunks, channels):
    partials = torch.randn(sums, chunks, channels, generator=torch.Generator().manual_seed(chunks))
    assert torch.equal(column_sums(partials), partials.double().sum(1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [1, 3])
def test_other_dtypes(chunks, dtype):
    """One chunk of the dtype wanted is its sum; one of another is rounded to it, as sums are."""
    partials = torch.randn(2, chunks, 70, generator=torch.Generator().manual_seed(0))
    expected = partials.double().sum(1).float().to(dtype)
    assert torch.equal(column_sums(partials, dtype), expected)
    written = empty_partials(2, chunks, 70, dtype, partials.device).copy_(partials)
    sums = column_sums(written, dtype)
    assert torch.equal(sums, expected) and (sums.data_ptr() == written.data_ptr()) == (chunks == 1)


def test_no_channels_and_no_chunks():
    assert column_sums(torch.empty(3, 4, 0)).shape == (3, 0)
    assert torch.equal(column_sums(torch.empty(2, 0, 5)), torch.zeros(2, 5))


def test_large_terms_that_cancel():
    """A float32 sum would lose the small term."""
    partials = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1)
    assert column_sums(partials).item() == 1.0
