"""How long a product of 16-bit matrices takes, roughly: which tiles suit a problem, and whether the library's do.

Tiles run in waves, one on each multiprocessor. A wave takes as long as its tensor cores multiply, or as its operands
need through the L2 cache, where every tile's come anew; and no product is faster than memory. That is within a quarter
of what an H200 measures from 128 rows on, and serves to compare: a wave that leaves half of a GPU idle shows.
"""

import functools

from triton_kernels.grid import blocks_of

#: What one of an H200's 132 multiprocessors has of its 800 TFLOP/s, 9.5 TB/s of L2 cache (no more where others idle)
#: and 4 TB/s of memory.
_FLOPS, _L2_BYTES, _MEMORY_BYTES = 800e12 / 132, 9.5e12 / 132, 4.0e12 / 132
#: Seconds that a kernel takes to begin and to end.
_ENDS = 4e-6
_ELEMENT_SIZE = 2
#: Tiles to compare with the library's, which are of many widths and share what they load (multicast).
_OWN_TILES = tuple((block_m, block_n) for block_m in (64, 128) for block_n in (64, 128, 256))
_LIBRARY_TILES = tuple((128, block_n) for block_n in range(128, 257, 16))
#: How much slower the kernel must seem before the product is the library's: that takes a pass more over the result.
_MARGIN = 1.25


def product_seconds(tile: tuple[int, int], M: int, N: int, K: int, multiprocessors: int, *, shares=False) -> float:
    """[M, K] @ [N, K].T in tiles (block_m, block_n); with ``shares``, of a kernel whose tiles share what they load."""
    block_m, block_n = tile
    multiplying = 2 * block_m * block_n * K / _FLOPS
    loading = 0.0 if shares else (block_m + block_n) * K * _ELEMENT_SIZE / _L2_BYTES
    waves = blocks_of(blocks_of(M, block_m) * blocks_of(N, block_n), multiprocessors)
    from_memory = (M + N) * K * _ELEMENT_SIZE / (_MEMORY_BYTES * multiprocessors)
    return max(waves * max(multiplying, loading), from_memory) + _ENDS


@functools.lru_cache(maxsize=4096)
def cublas_is_faster(M: int, N: int, K: int, multiprocessors: int) -> bool:
    """Whether the library multiplies [M, K] @ [N, K].T on Hopper so much faster than any of the kernel's tiles would,
    that a pass over the result for all else costs less than it saves: where those leave the last wave half empty."""
    own = min(product_seconds(tile, M, N, K, multiprocessors) for tile in _OWN_TILES)
    library = min(product_seconds(tile, M, N, K, multiprocessors, shares=True) for tile in _LIBRARY_TILES)
    return own > _MARGIN * library
