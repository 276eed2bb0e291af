"""Roughly predict the time of a product of 16-bit matrices, to compare tiles, and our kernel with cuBLAS.

Tiles run in waves, one tile per multiprocessor. A wave takes as long as its tensor cores compute, or as its operands
come through the L2 cache, which each tile loads anew. No product is faster than its operands come from memory. From 128
rows on the prediction is within 25% of what an H200 measures. That suffices to see wave quantisation: a last wave that
leaves much of the GPU idle.
"""

import functools

from triton_kernels.grid import blocks_of

#: The share of one of an H200's 132 multiprocessors in 800 TFLOP/s, 9.5 TB/s of L2 cache and 4 TB/s of memory. (A
#: multiprocessor gets no more of the L2 cache when others are idle.)
_FLOPS, _L2_BYTES, _MEMORY_BYTES = 800e12 / 132, 9.5e12 / 132, 4.0e12 / 132
#: Seconds that a kernel needs to start and to end.
_ENDS = 4e-6
_ELEMENT_SIZE = 2
#: Our tiles, and those of cuBLAS, which has more widths and whose tiles share their loads (multicast).
_OWN_TILES = tuple((block_m, block_n) for block_m in (64, 128) for block_n in (64, 128, 256))
_CUBLAS_TILES = tuple((128, block_n) for block_n in range(128, 257, 16))
#: cuBLAS computes the product if our kernel is predicted to take this many times as long. The rest of the chain then
#: needs one more pass over the result.
_MARGIN = 1.25


def product_seconds(tile: tuple[int, int], M: int, N: int, K: int, multiprocessors: int, *, shares=False) -> float:
    """The time of [M, K] @ [N, K].T in tiles (block_m, block_n). ``shares``: tiles share their loads (multicast)."""
    block_m, block_n = tile
    multiplying = 2 * block_m * block_n * K / _FLOPS
    loading = 0.0 if shares else (block_m + block_n) * K * _ELEMENT_SIZE / _L2_BYTES
    waves = blocks_of(blocks_of(M, block_m) * blocks_of(N, block_n), multiprocessors)
    from_memory = (M + N) * K * _ELEMENT_SIZE / (_MEMORY_BYTES * multiprocessors)
    return max(waves * max(multiplying, loading), from_memory) + _ENDS


@functools.lru_cache(maxsize=4096)
def cublas_is_faster(M: int, N: int, K: int, multiprocessors: int) -> bool:
    """Whether cuBLAS computes [M, K] @ [N, K].T on Hopper so much faster that another pass over the result is worth it.

    That is so where all of our tiles leave much of the last wave empty, and one of cuBLAS's does not.
    """
    own = min(product_seconds(tile, M, N, K, multiprocessors) for tile in _OWN_TILES)
    cublas = min(product_seconds(tile, M, N, K, multiprocessors, shares=True) for tile in _CUBLAS_TILES)
    return own > _MARGIN * cublas
