"""The second stage of every sum over rows: partial sums are added in a fixed order, so the result is deterministic."""

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of
from triton_kernels.launch import launch, wait_for_launch_before


@triton.jit
def column_sums_kernel(
    partials,  # [sums, chunks, C] float32
    output,  # [sums, C]
    chunks,
    C,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """output[s, c] = sum over the chunks of partials[s, :, c], in float64: there are few of them."""
    wait_for_launch_before()
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_CHUNKS, BLOCK_C), tl.float64)
    for first in range(0, chunks, BLOCK_CHUNKS):
        chunk = first + tl.arange(0, BLOCK_CHUNKS)
        inside = (chunk < chunks)[:, None] & (columns < C)[None, :]
        source = partials + (index * chunks + chunk)[:, None] * C + columns[None, :]
        total += tl.load(source, mask=inside, other=0.0).to(tl.float64)
    tl.store(output + index * C + columns, tl.sum(total, 0).to(tl.float32), mask=columns < C)


def empty_partials(sums: int, chunks: int, C: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For partial sums [sums, chunks, C] that ``column_sums`` will add up to ``dtype``: one chunk is the sum itself."""
    return torch.empty(sums, chunks, C, dtype=dtype if chunks == 1 else torch.float32, device=device)


def column_sums(partials: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum ``partials`` [sums, chunks, C] (contiguous) over the chunks; returns [sums, C], rounded once to ``dtype``.

    One chunk of that dtype is its sum: a view of it is returned, and nothing launched.
    """
    sums, chunks, C = partials.shape
    if chunks == 1 and partials.dtype == dtype:
        return partials.view(sums, C)
    output = torch.empty(sums, C, dtype=dtype, device=partials.device)
    block_c = 64
    launch(
        column_sums_kernel,
        (blocks_of(C, block_c), sums),
        partials.device,
        partials,
        output,
        chunks,
        C,
        BLOCK_CHUNKS=16,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return output
