"""Windows of shared memory that overlap and begin anywhere, and the names that Triton's versions have for TMA copies,
in Gluon.

Memory is counted in atoms: a buffer of N atoms has the shape [N, *atom]. An atom is what a window begins at a multiple
of, and its sizes are powers of 2. Two spellings of one window:

- Up to Triton 3.8, ``index`` moves by the atom's shape, known at run time, while a view must claim as much memory as
  what it is of. Zeros among the bases of a linear layout make an atom claim as much as a window, so that it can be
  viewed as one.
- Triton 3.9 moves by what the layout claims instead, and would compile the first spelling to wrong addresses. But it
  takes slices that begin anywhere, where that is known when it compiles. That of a pipeline's stage is chosen by a
  branch for each stage, of which the compiler makes a selection among addresses.
"""

import math

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from triton_kernels.versions import HAS_ASYNC_LOAD, SLICES_ANYWHERE

async_load = tma.async_load if HAS_ASYNC_LOAD else tma.async_copy_global_to_shared
async_store = tma.async_store if HAS_ASYNC_LOAD else tma.async_copy_shared_to_global

#: All of a buffer in another dtype, shape and layout.
view = gl.shared_memory_descriptor.reinterpret if SLICES_ANYWHERE else gl.shared_memory_descriptor._reinterpret

_SLICES_ANYWHERE = gl.constexpr(SLICES_ANYWHERE)


@gluon.jit
def load_box(source, place, barrier, memory):
    """Start copying the box of a descriptor that begins at this place to all of the memory."""
    async_load(source, place, barrier, view(memory, source.dtype, source.block_shape, source.layout))


@triton.constexpr_function
def atoms_of(shape, memory):
    """How many atoms of ``memory`` a view of this shape has."""
    return math.prod(shape) // math.prod(memory[1:])


@triton.constexpr_function
def _by_window(memory, window):
    """The shape of a buffer each of whose atoms claims the memory of a window of so many."""
    return [memory[0] // window, *memory[1:]]


@triton.constexpr_function
def _claiming(memory, window):
    """The layout of an atom of ``memory``, row by row, that claims the memory of ``window`` atoms."""
    atom = memory[1:]
    bases = []
    for axis in reversed(range(len(atom))):
        for bit in range(atom[axis].bit_length() - 1):
            bases.append([1 << bit if each == axis else 0 for each in range(len(atom))])
    nowhere = [[0] * len(atom)] * (window.bit_length() - 1)
    return gl.SharedLinearLayout(offset_bases=bases + nowhere, alignment=128)


@gluon.jit
def window(
    memory,  # its atoms are a multiple of ATOMS
    stage,
    ATOMS: gl.constexpr,  # of the window: a power of 2
    FIRST: gl.constexpr,  # atom of the first stage
    PITCH: gl.constexpr,  # atoms from stage to stage
    STAGES: gl.constexpr,
    PLACE: gl.constexpr,  # of the window in its stage
):
    """The window that begins at atom FIRST + stage * PITCH + PLACE, for ``view``."""
    if _SLICES_ANYWHERE:
        part = memory.slice(FIRST, PITCH)
        for each in gl.static_range(1, STAGES):
            if stage == each:
                part = memory.slice(FIRST + each * PITCH, PITCH)
        result = part.slice(PLACE, ATOMS)
    else:
        atoms = view(memory, memory.dtype, _by_window(memory.shape, ATOMS), _claiming(memory.shape, ATOMS))
        result = atoms.index(FIRST + stage * PITCH + PLACE)
    return result
