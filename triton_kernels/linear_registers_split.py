"""How ``linear_registers_hopper`` splits a tile of the weight, from shared memory into registers (Gluon)."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from triton_kernels.float32_parts import bounds_of, magnitude

#: Terms of a step, which share a scale, and those that tensor cores add up.
BLOCK_K, BLOCK = gl.constexpr(64), gl.constexpr(16)


@triton.constexpr_function
def in_lane_order(rows):
    """A tile [rows, 64] of float32 that TMA copied, depth last, with its terms in this order (``float32_split``).

    A lane of tensor cores takes terms 2i, 2i + 1, 2i + 8 and 2i + 9 of each 16. Here these are adjacent in memory, and
    eight lanes take theirs from as many different groups of banks."""
    bases = [[0, 1], [0, 8], [0, 16], [0, 2], [0, 4], [1, 16], [2, 2], [4, 4]]
    more_rows = [[8 << bit, 0] for bit in range((rows // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(offset_bases=bases + more_rows + [[0, 32]], alignment=128)


@gluon.jit
def load_block(tile, place: gl.constexpr, LAYOUT: gl.constexpr):
    """16 columns of the tile [rows, 64] of shared memory, as tensor cores take them."""
    return tile.slice(place, BLOCK, 1).load(gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2))


@gluon.jit
def greater(a, b):
    """The greater magnitude, with some sign; NaN where one is."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def twice(value):
    """Twice the ``magnitude`` (uint32)."""
    return value.to(gl.uint32, bitcast=True) * 2


#: Pairs of elements: twice their scale and LOW_SCALE.
_SPLIT = gl.constexpr("""{
    .reg .b16 a, b;
    .reg .f32 x, y, z, w;
    mul.rn.f32 x, $2, $4;
    mul.rn.f32 y, $3, $5;
    cvt.rn.f16x2.f32 $0, y, x;
    mov.b32 {a, b}, $0;
    cvt.f32.f16 z, a;
    cvt.f32.f16 w, b;
    sub.rn.f32 x, x, z;
    sub.rn.f32 y, y, w;
    mul.rn.f32 x, x, 0f45000000;
    mul.rn.f32 y, y, 0f45000000;
    cvt.rn.f16x2.f32 $1, y, x;
}""")


@gluon.jit
def split_block(value, up):
    """High and low float16 parts."""
    value, up = gl.broadcast(value, up)
    return gl.inline_asm_elementwise(
        _SPLIT, "=r,=r,f,f,f,f", [value, up], (gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def split_in_registers(tile, LAYOUT: gl.constexpr):
    """The tile [rows, 64] of shared memory as four blocks of high and low float16 parts in registers; its rows' scales;
    and the ``bounds_of`` them."""
    a, b = load_block(tile, 0, LAYOUT), load_block(tile, 16, LAYOUT)
    c, d = load_block(tile, 32, LAYOUT), load_block(tile, 48, LAYOUT)
    largest = gl.reduce(greater(greater(a, b), greater(c, d)), 1, greater)
    e, f, g, h = twice(a) - 1, twice(b) - 1, twice(c) - 1, twice(d) - 1
    least = gl.min(gl.minimum(gl.minimum(gl.minimum(e, f), g), h), 1)
    up, down, bound = bounds_of(magnitude(largest), least)
    up = gl.expand_dims(up, 1)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    scale = gl.expand_dims(gl.convert_layout(down, OF_ROWS, assert_trivial=True), 1)
    bound = gl.convert_layout(bound, OF_ROWS, assert_trivial=True)
    return (split_block(a, up), split_block(b, up), split_block(c, up), split_block(d, up)), scale, bound
