"""Copies of many tensors in one launch, each in another dtype or memory format. One by one, most of a model's weights
take longer to launch than to copy."""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
import triton
import triton.language as tl

from triton_kernels.grid import blocks_of
from triton_kernels.launch import launch, wait_for_launch_before

#: Copies of a launch. As many are passed always, so that one kernel serves all, and addresses stay in 4 KB.
MOST_COPIES = 64
_BLOCK = 2048


@triton.jit
def copies_kernel(
    sources,  # pointers
    targets,  # pointers
    counts,  # of elements. These numbers are floats, as Triton would compile a kernel for integers like 1 and 16
    rows,  # of the matrices which a target consists of, and a source of their transposes; 1 where both lie alike
    columns,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one target = those of its source."""
    wait_for_launch_before()
    block, first = tl.program_id(0), 0
    source, target, begin = sources[0], targets[0], 0
    count, height, width = counts[0], rows[0], columns[0]
    for i in tl.static_range(1, len(sources)):
        first += tl.cdiv(tl.cast(counts[i - 1], tl.int32), BLOCK)
        is_behind = block >= first
        source, target = tl.where(is_behind, sources[i], source), tl.where(is_behind, targets[i], target)
        count, begin = tl.where(is_behind, counts[i], count), tl.where(is_behind, first, begin)
        height, width = tl.where(is_behind, rows[i], height), tl.where(is_behind, columns[i], width)
    height, width = tl.cast(height, tl.int32), tl.cast(width, tl.int32)
    place = (block - begin) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.cast(count, tl.int32) - (block - begin) * BLOCK
    if (height == 1) & (rest >= BLOCK):  # without a mask, so that threads take several elements at once
        tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))
    else:
        inside = tl.arange(0, BLOCK) < rest
        within = place % (height * width)
        values = tl.load(source + (place - within + within % width * height + within // width), mask=inside)
        tl.store(target + place, values.to(target.dtype.element_ty), mask=inside)


def matrices(source: torch.Tensor, target: torch.Tensor) -> tuple[int, int] | None:
    """The rows and columns of the matrices which a target consists of in memory, and a source of their transposes.

    One row says that both lie alike. None where they lie in other ways, or with gaps.
    """
    order, others = _order(target), _order(source)
    if order is None or others is None:
        return None
    if order == others:
        return 1, target.numel()
    same = next(place for place, (one, other) in enumerate(zip(order, others, strict=True)) if one != other)
    inner = order[same:]
    middle = inner.index(others[same])
    if others[same:] != inner[middle:] + inner[:middle]:
        return None
    rows, columns = (math.prod([target.shape[dim] for dim in dims]) for dims in (inner[:middle], inner[middle:]))
    return rows, columns


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions of more than one element, the one whose elements lie closest last; None where there are gaps."""
    strides = tensor.stride()
    dims = sorted((dim for dim, size in enumerate(tensor.shape) if size != 1), key=lambda dim: -strides[dim])
    elements = 1
    for dim in reversed(dims):
        if strides[dim] != elements:
            return None
        elements *= tensor.shape[dim]
    return dims


def _refuse(source: torch.Tensor, target: torch.Tensor) -> NoReturn:
    raise ValueError(f"{tuple(source.shape)} cannot be copied from strides {source.stride()} to {target.stride()}")


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Each target = its source, rounded to the target's dtype. Sources have one dtype, and so have targets.

    Each has fewer than 2^24 elements, whose numbers floats hold exactly.

    Raises:
        ValueError: A pair does not lie as ``matrices`` takes it.
    """
    for first in range(0, len(sources), MOST_COPIES):
        pairs = list(zip(sources, targets, strict=True))[first : first + MOST_COPIES]
        counts = [target.numel() for _, target in pairs]
        lines = [matrices(*pair) or _refuse(*pair) for pair in pairs]
        rest = MOST_COPIES - len(pairs)
        launch(
            copies_kernel,
            (sum(blocks_of(count, _BLOCK) for count in counts),),
            targets[0].device,
            *(tuple([*each, *[each[0]] * rest]) for each in zip(*pairs, strict=True)),
            *(tuple(map(float, [*each, *[0] * rest])) for each in (counts, *zip(*lines, strict=True))),
            BLOCK=_BLOCK,
            num_warps=4,
            maxnreg=80,
        )
