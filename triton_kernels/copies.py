"""Copies of many tensors in one launch, each in another dtype or memory format. One by one, most of a model's weights
take longer to launch than to copy."""

import itertools
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
#: Elements of a program, which first finds its tensor: among those of a group, of these groups.
_BLOCK, _GROUP = 4096, 8


@triton.jit
def copies_kernel(
    sources,  # pointers
    targets,  # pointers
    firsts,  # the first program of each, and the end; floats, as Triton compiles kernels anew for integers like 16
    counts,  # of elements
    rows,  # of the matrices which a target consists of, and a source of their transposes; 1 where both lie alike
    columns,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one target = those of its source."""
    wait_for_launch_before()
    program = tl.cast(tl.program_id(0), tl.float32)
    source, target = sources[0], targets[0]
    first, count, height, width = firsts[0], counts[0], rows[0], columns[0]
    for group in tl.static_range(0, len(sources), GROUP):
        if (program >= firsts[group]) & (program < firsts[group + GROUP]):
            for i in tl.static_range(group, group + GROUP):
                is_behind = program >= firsts[i]
                source, target = tl.where(is_behind, sources[i], source), tl.where(is_behind, targets[i], target)
                first, count = tl.where(is_behind, firsts[i], first), tl.where(is_behind, counts[i], count)
                height, width = tl.where(is_behind, rows[i], height), tl.where(is_behind, columns[i], width)
    height, width, count = tl.cast(height, tl.int32), tl.cast(width, tl.int32), tl.cast(count, tl.int32)
    begin = tl.cast(program - first, tl.int32) * BLOCK
    rest = count - begin
    if (height == 1) & (rest >= BLOCK):  # without a mask, so that threads take several elements at once
        place = begin + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))
    else:
        place = count - rest + tl.arange(0, BLOCK)  # without a known divisor, so that they take one after another
        within = place % (height * width)
        from_place = place - within + within % width * height + within // width
        values = tl.load(source + from_place, mask=place < count)
        tl.store(target + place, values.to(target.dtype.element_ty), mask=place < count)


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
        ends = list(itertools.accumulate(blocks_of(count, _BLOCK) for count in counts))
        rest = MOST_COPIES - len(pairs)
        launch(
            copies_kernel,
            (ends[-1],),
            targets[0].device,
            *(tuple([*each, *[each[0]] * rest]) for each in zip(*pairs, strict=True)),
            tuple(map(float, [0, *ends, *[ends[-1]] * rest])),
            *(tuple(map(float, [*each, *[0] * rest])) for each in (counts, *zip(*lines, strict=True))),
            GROUP=_GROUP,
            BLOCK=_BLOCK,
            num_warps=8,
            maxnreg=64,
        )
