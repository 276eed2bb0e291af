"""Products of one matrix by many others, in one launch: a grouped GEMM whose first operand is one for all.

One by one, small products take longer to launch than to compute.
"""

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from triton_kernels.device import IN_INTERPRETER
from triton_kernels.grid import blocks_of, grid_of, second_place
from triton_kernels.launch import launch, wait_for_launch_before

#: Products of a launch. As many are passed always, so that one kernel serves all, and addresses stay in 4 KB.
MOST_PRODUCTS = 64
#: Products of a group, in which a program finds its own behind the group.
_GROUP = 8
#: By the most rows for which it is fastest, a tile's rows, columns and depth, stages and warps.
_TILES = {16: (16, 32, 128, 4, 4), 256: (64, 64, 64, 4, 4), math.inf: (128, 128, 64, 3, 8)}
#: By which all sizes along memory are best divisible, so that threads load several elements at once.
DIVISOR = 16


@triton.jit
def grouped_products_kernel(
    matrix,  # [M, K]
    others,  # pointers, each [K, N], or [N, K] where turned
    biases,  # pointers, each [N]
    targets,  # pointers, each [M, N], or [N, M] where turned
    firsts,  # the first column of programs of each, and the end; floats, as Triton specializes for integers like 16
    widths,  # N of each
    row_stride,  # of the matrix
    depth_stride,
    M,
    K,
    HAS_BIAS: tl.constexpr,
    OTHERS_ARE_TURNED: tl.constexpr,
    TARGETS_ARE_TURNED: tl.constexpr,
    DIVISOR: tl.constexpr,  # of all widths
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of one target = those rows of matrix @ other + bias, added up in float32."""
    wait_for_launch_before()
    program = tl.cast(tl.program_id(0), tl.float32)
    other, bias, target, first, width = others[0], biases[0], targets[0], firsts[0], widths[0]
    for group in tl.static_range(0, len(others), GROUP):
        if (program >= firsts[group]) & (program < firsts[group + GROUP]):
            for i in tl.static_range(group, group + GROUP):
                is_behind = program >= firsts[i]
                other, bias = tl.where(is_behind, others[i], other), tl.where(is_behind, biases[i], bias)
                target, first = tl.where(is_behind, targets[i], target), tl.where(is_behind, firsts[i], first)
                width = tl.where(is_behind, widths[i], width)
    N = tl.multiple_of(tl.cast(width, tl.int32), DIVISOR)
    m = second_place() * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.cast(program - first, tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if OTHERS_ARE_TURNED:
        columns, step = other + (n * K)[None, :] + k[:, None], 1
    else:
        columns, step = other + n[None, :] + (k * N)[:, None], N
    rows = matrix + (m * row_stride)[:, None] + (k * depth_stride)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        is_inside = begin + k < K
        a = tl.load(rows + begin * depth_stride, mask=(m < M)[:, None] & is_inside[None, :], other=0.0)
        b = tl.load(columns + begin * step, mask=(n < N)[None, :] & is_inside[:, None], other=0.0)
        if IN_INTERPRETER:  # which would multiply the bit patterns of bfloat16 numbers
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    places = m[:, None] + (n * M)[None, :] if TARGETS_ARE_TURNED else (m * N)[:, None] + n[None, :]
    tl.store(target + places, total.to(target.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def are_turned(matrices: Sequence[torch.Tensor]) -> bool | None:
    """Whether all matrices lie column by column in memory; None where neither that nor the opposite is true."""
    if all(each.is_contiguous() for each in matrices):
        return False
    return True if all(each.T.is_contiguous() for each in matrices) else None


def multiply_all(
    matrix: torch.Tensor,
    others: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    """Each target [M, N] = matrix [M, K] @ its other [K, N] + its bias [N], added up in float32 and rounded once.

    All are of one 16-bit dtype, and lie within 2^31 elements each; all N together are fewer than 2^24, which floats
    hold exactly.

    Args:
        matrix: Of any strides.
        others: All row by row in memory, or all column by column.
        biases: One each, contiguous, or none at all.
        targets: As the others.

    Raises:
        ValueError: Others, biases or targets lie otherwise.
    """
    layouts = are_turned(others), are_turned(targets)
    if None in layouts:
        strides = [each.stride() for each in (*others, *targets)]
        raise ValueError(f"matrices must all lie row by row, or all column by column, not with strides {strides}")
    if not all(each.is_contiguous() for each in biases):
        raise ValueError(f"biases must be contiguous, not with strides {[each.stride() for each in biases]}")
    (M, K), most = matrix.shape, MOST_PRODUCTS
    block_m, block_n, block_k, stages, warps = next(tile for rows, tile in _TILES.items() if M <= rows)
    for first in range(0, len(others), most):
        part = slice(first, first + most)
        widths = [other.shape[1] for other in others[part]]
        ends = list(itertools.accumulate(blocks_of(width, block_n) for width in widths))
        rest = most - len(widths)
        pointers = (others[part], (biases or others)[part], targets[part])  # without biases, those are not read
        launch(
            grouped_products_kernel,
            grid_of(ends[-1], blocks_of(M, block_m)),
            matrix.device,
            matrix,
            *(tuple([*each, *[each[0]] * rest]) for each in pointers),
            tuple(map(float, [0, *ends, *[ends[-1]] * rest])),
            tuple(map(float, [*widths, *[0] * rest])),
            *matrix.stride(),
            M,
            K,
            HAS_BIAS=bool(biases),
            OTHERS_ARE_TURNED=layouts[0],
            TARGETS_ARE_TURNED=layouts[1],
            DIVISOR=1 if any(width % DIVISOR for width in widths) else DIVISOR,
            GROUP=_GROUP,
            STAGES=stages,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
        )
