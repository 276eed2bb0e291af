"""What is left of a product whose weight was split in registers (``linear_registers_hopper``): parts are added up, and
results that cannot be trusted are computed again."""

import torch
import triton
import triton.language as tl

from triton_kernels.device import multiprocessor_count
from triton_kernels.grid import blocks_of
from triton_kernels.launch import launch, wait_for_launch_before
from triton_kernels.linear import (
    FLOAT32_INPUT_PRECISION,
    LinearConfig,
    load_pointers,
    multiply_tile,
    tile_count,
    tile_place,
)

#: A result is trusted where what a bound allows for is at most 2**-19 of it, eight times the usual error: in each step
#: up to 64 elements are off by 2**-49 of the bound, times up to 2**15 of the input row's scale.
TRUSTED = tl.constexpr(64 * 2.0**-49 * 2.0**15 * 2.0**19)


@triton.jit
def bias_of(bias, rows, columns, M, N, TRANSPOSED: tl.constexpr):
    """Of a tile's results."""
    if TRANSPOSED:
        value = tl.load(bias + rows, mask=rows < M, other=0.0)[:, None]
    else:
        value = tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    return value


@triton.jit
def finish_kernel(
    parts,  # [PARTS, elements of the output], or None
    input,  # [B, M, K]: (pointer, row stride, depth stride), and between matrices as below
    weight,  # [B, N, K] likewise
    output,  # as ``linear_registers_kernel``'s
    scales,  # [B, M] float32, NaN where a row has none, and bounds [B, N]
    bias,
    any_rest,  # [1]: 0 where all results can be trusted
    part_count,  # of those that each have a bound, of which the greatest is known
    B,
    M,
    N,
    K,
    input_stride,
    weight_stride,
    is_own,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The parts' sum in order, with the bias behind the first; and results that cannot be trusted, as three TF32
    products of their tiles."""
    wait_for_launch_before()
    input_scale, weight_bounds = scales
    tiles = tile_count(M, N, CONFIG)
    is_any = tl.load(any_rest) != 0
    if is_any or PARTS > 0:
        for item in range(tl.program_id(0), B * tiles, tl.num_programs(0)):
            matrix = (item // tiles).to(tl.int64)
            m, n = tile_place(item % tiles, M, N, CONFIG)
            rows, columns = m + tl.arange(0, CONFIG.block_m), n + tl.arange(0, CONFIG.block_n)
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            if TRANSPOSED:
                place = matrix * M * N + columns.to(tl.int64)[None, :] * M + rows[:, None]
            else:
                place = matrix * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
            if PARTS > 0:
                total = tl.load(parts + place, mask=inside, other=0.0)
                if bias is not None:
                    total += bias_of(bias, rows, columns, M, N, TRANSPOSED)
                for part in tl.static_range(1, PARTS):
                    total += tl.load(parts + tl.cast(part, tl.int64) * B * M * N + place, mask=inside, other=0.0)
                tl.store(output + place, total, mask=inside)
            if is_any:
                scale = tl.load(input_scale + matrix * is_own * M + rows, mask=rows < M, other=1.0)
                bits = tl.load(weight_bounds + matrix * N + columns, mask=columns < N, other=0)
                result = total if PARTS > 0 else tl.load(output + place, mask=inside, other=0.0)
                bound = bits.to(tl.float32, bitcast=True) * part_count
                least = (scale * TRUSTED)[:, None] * bound[None, :]
                is_bounded = (scale != scale)[:, None] | (bound != 0.0)[None, :]
                is_left = is_bounded & inside & ~(tl.abs(result) >= least)
                if tl.max(tl.max(is_left.to(tl.int32), 1), 0) != 0:
                    a = (input[0] + matrix * input_stride, input[1], input[2])
                    b = (weight[0] + matrix * weight_stride, weight[1], weight[2])
                    of_tile, steps = (m, n, M, N), tl.cdiv(K, CONFIG.block_k)
                    tile = multiply_tile(a, b, of_tile, steps, K, load_pointers, load_pointers, INPUT_PRECISION, CONFIG)
                    if bias is not None:
                        tile += bias_of(bias, rows, columns, M, N, TRANSPOSED)
                    tl.store(output + place, tile, mask=is_left)


#: Tiles of ``finish_kernel``.
_FINISH = LinearConfig(64, 64, 32, num_warps=4)


def finish(
    sums: torch.Tensor | None,
    part_count: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    any_rest: torch.Tensor,
    *,
    output: torch.Tensor,
    transposed: bool,
) -> None:
    """The rest of ``linear_registers``, of which these are the arguments. ``sums`` [part_count, *output] are of parts
    that were not added up yet, or None. ``scales`` are the input's, and the bounds of the weight's rows."""
    (inputs, M, K), (B, N, _) = input.shape, weight.shape
    tiles = B * blocks_of(M, _FINISH.block_m) * blocks_of(N, _FINISH.block_n)
    launch(
        finish_kernel,
        (min(tiles, 2 * multiprocessor_count(output.device)),),
        output.device,
        sums,
        (input, *input.stride()[1:]),
        (weight, *weight.stride()[1:]),
        output,
        scales,
        bias,
        any_rest,
        part_count,
        B,
        M,
        N,
        K,
        input.stride(0) if inputs == B else 0,
        weight.stride(0),
        int(inputs == B),
        PARTS=0 if sums is None else part_count,
        TRANSPOSED=transposed,
        INPUT_PRECISION=FLOAT32_INPUT_PRECISION,
        CONFIG=_FINISH,
        config=_FINISH,
        num_warps=_FINISH.num_warps,
        num_stages=_FINISH.num_stages,
    )
