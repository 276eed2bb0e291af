"""Blocks and grids. CUDA allows 2**31 - 1 programs along x but 65535 along y or z, so a second axis uses both y and
z."""

import triton
import triton.language as tl

_MOST_ALONG_Y = 65535


def blocks_of(size: int, block: int) -> int:
    """The number of blocks that cover ``size``. ``triton.cdiv`` costs the host 2 us a call, and a launch needs many."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of 2 that is at least ``size``; 0 for 0. ``triton.next_power_of_2`` costs the host 2 us too."""
    return 1 << (size - 1).bit_length() if size else 0


def grid_of(first: int, second: int) -> tuple[int, int, int]:
    """A grid of ``first`` x ``second`` programs.

    Where y is too short for the second axis, a few programs lie past its end. A kernel masks those out, as it masks the
    end of its last block.
    """
    layers = max(1, blocks_of(second, _MOST_ALONG_Y))
    return first, blocks_of(second, layers), layers


@triton.jit
def second_place():
    """This program's index along the second axis of ``grid_of``."""
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def indices(LENGTH: tl.constexpr):
    """0, 1, ..., LENGTH - 1: the INDICES of functions that Gluon kernels call too, with an INDICES of their own."""
    return tl.arange(0, LENGTH)
