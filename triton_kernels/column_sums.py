"""The second stage of sums over rows. Partial sums are added in a fixed order, which makes the result deterministic."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of
from triton_kernels.launch import launch, wait_for_launch_before

_BLOCK_CHUNKS, _BLOCK_C = 16, 64


@triton.jit
def column_sums_kernel(
    partials,  # tuple of [sums, chunks, C] float32
    outputs,  # tuple of as many [sums, C]
    chunks,
    C,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """outputs[i][s, c] = sum over the chunks of partials[i][s, :, c], in float64: there are few of them."""
    wait_for_launch_before()
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.program_id(1).to(tl.int64)
    pointer = partials[0]
    for i in tl.static_range(1, len(partials)):
        if tl.program_id(2) == i:
            pointer = partials[i]
    total = tl.zeros((BLOCK_CHUNKS, BLOCK_C), tl.float64)
    for first in range(0, chunks, BLOCK_CHUNKS):
        chunk = first + tl.arange(0, BLOCK_CHUNKS)
        inside = (chunk < chunks)[:, None] & (columns < C)[None, :]
        source = pointer + (index * chunks + chunk)[:, None] * C + columns[None, :]
        total += tl.load(source, mask=inside, other=0.0).to(tl.float64)
    result = tl.sum(total, 0).to(tl.float32)  # there is no conversion from float64 to 16 bits
    for i in tl.static_range(len(outputs)):
        if tl.program_id(2) == i:
            tl.store(outputs[i] + index * C + columns, result, mask=columns < C)


@triton.jit
def store_sums(target, offsets, values, mask):
    """Store a kernel's sums at ``target + offsets``. ``target`` is None for a sum that is not wanted."""
    if target is not None:
        tl.store(target + offsets, values, mask=mask)


def empty_partials(vectors: Sequence[torch.Tensor | None], chunks: int) -> list[torch.Tensor | None]:
    """Buffers for sums over each of ``chunks`` chunks of rows, for ``add_up`` to add up to ``vectors`` ([C], or None).

    For one chunk, they are the vectors themselves.
    """
    if chunks == 1:
        return list(vectors)
    return [
        None if vector is None else torch.empty(chunks, vector.numel(), dtype=torch.float32, device=vector.device)
        for vector in vectors
    ]


def add_up(partials: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]) -> None:
    """Add the partial sums up: each of ``outputs`` becomes the sum over the chunks of its ``partials``.

    ``outputs`` are [C] or [sums, C] in any float dtype, ``partials`` [chunks, C] or [sums, chunks, C] in float32.
    Nothing is launched for an output that is None or is its own partial sums.
    """
    pairs = [
        (partial, output)
        for partial, output in zip(partials, outputs, strict=True)
        if output is not None and partial is not output
    ]
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        *sums, chunks, C = sources[0].shape
        launch(
            column_sums_kernel,
            (blocks_of(C, _BLOCK_C), *(sums or (1,)), len(targets)),
            targets[0].device,
            sources,
            targets,
            chunks,
            C,
            BLOCK_CHUNKS=_BLOCK_CHUNKS,
            BLOCK_C=_BLOCK_C,
            num_warps=4,
        )


def column_sums(partials: torch.Tensor) -> torch.Tensor:
    """Sum ``partials`` [sums, chunks, C] (float32, contiguous) over the chunks; returns [sums, C].

    For one chunk a view is returned, and nothing is launched.
    """
    sums, chunks, C = partials.shape
    if chunks == 1:
        return partials.view(sums, C)
    output = torch.empty(sums, C, dtype=torch.float32, device=partials.device)
    add_up((partials,), (output,))
    return output
