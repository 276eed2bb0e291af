"""Barriers of the Gluon kernels for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers in shared memory, each of which completes after so many ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
