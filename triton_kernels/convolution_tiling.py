"""The tiles of ``convolution_hopper``: as large as fits into shared memory with the weights. This does not import
Gluon."""

import math
from dataclasses import dataclass, replace

import torch

from triton_kernels.device import SHARED_MEMORY
from triton_kernels.grid import blocks_of
from triton_kernels.hopper import is_channels_last

#: Output channels of a tile.
CHANNELS = 64
#: Bytes of a pixel in a box: a row of shared memory, swizzled. A step has as many input channels.
_ROW_BYTES = (32, 64, 128)
#: Image rows of a halo that are copied at a time.
_HALO_ROWS = 2
#: The widest halo.
WIDEST_HALO = 16
#: The largest number of boxes in flight.
_MOST_STAGES = 6
#: Bytes set aside for barriers, reductions and alignment.
_RESERVED_BYTES = 2048
#: Tiles of 256 pixels are used where they cover at most this much more than tiles of 128, beyond an image's edges.
_MOST_WASTE = 1.1


@dataclass(frozen=True)
class StrideOneConvolution:
    """Taps (rows, columns), their dilation, and the offset of the first tap from the output's pixel.

    output[n, o, y, x] = bias[o] + sum over ky, kx, c of
                         weight[ky, kx, o, c] * input[n, c, y + sy + ky * dy, x + sx + kx * dx]   (0 outside the image)
    """

    kernel_size: tuple[int, int]
    dilation: tuple[int, int]
    shift: tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a tile, number of boxes in flight, and what a tile needs of the image and the weights."""

    rows: int
    columns: int
    stages: int
    tap_rows: int
    tap_columns: int
    dilation_y: int
    #: Image rows beyond the tile's own, and those copied at a time.
    halo: int
    halo_rows: int
    #: Steps of input channels, and the bytes of a pixel in each.
    steps: int
    row_bytes: int

    @property
    def pixels(self) -> int:
        return self.rows * self.columns

    @property
    def tile_atoms(self) -> int:
        return self.pixels // 8

    @property
    def weight_atoms(self) -> int:
        """Of 8 rows in shared memory, which all weights of a tile's channels take."""
        return self.tap_rows * self.tap_columns * self.steps * CHANNELS // 8

    @property
    def box_atoms(self) -> int:
        """Of 8 pixels, which a box takes."""
        return (self.rows + self.halo) * self.columns // 8

    @property
    def atoms(self) -> int:
        """All that are allocated: whole tiles, as windows of one are wanted (``triton_kernels.hopper_memory``)."""
        return blocks_of(self.weight_atoms + self.stages * self.box_atoms, self.tile_atoms) * self.tile_atoms

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        return blocks_of(height, self.rows), blocks_of(width, self.columns)

    def covered(self, height: int, width: int) -> int:
        return math.prod(self.tiles(height, width)) * self.pixels


def columns_of(output: torch.Tensor) -> int:
    """The number of columns of a tile: 8, or 64 bytes of a contiguous row."""
    return 8 if is_channels_last(output) else 64 // output.element_size()


def tiling_of(pixels: int, columns: int, channels: int, element_size: int, convolution: StrideOneConvolution) -> Tiling:
    """Tiles of ``pixels`` pixels, for an input of ``channels`` channels."""
    rows = pixels // columns
    (tap_rows, tap_columns), (dilation_y, _) = convolution.kernel_size, convolution.dilation
    halo = blocks_of((tap_rows - 1) * dilation_y, _HALO_ROWS) * _HALO_ROWS
    row_bytes = next((each for each in _ROW_BYTES if each >= channels * element_size), _ROW_BYTES[-1])
    steps = blocks_of(channels * element_size, row_bytes)
    tiling = Tiling(rows, columns, 0, tap_rows, tap_columns, dilation_y, halo, _HALO_ROWS, steps, row_bytes)
    results = pixels * CHANNELS * 2 if element_size == 2 else 0
    free = (SHARED_MEMORY[90] - _RESERVED_BYTES - results) // (8 * row_bytes)
    free -= free % tiling.tile_atoms
    return replace(tiling, stages=min((free - tiling.weight_atoms) // tiling.box_atoms, _MOST_STAGES))


def tiling_for(
    input: torch.Tensor, output: torch.Tensor, convolution: StrideOneConvolution, statistics: bool
) -> Tiling:
    """Tiles of 128 pixels, or larger ones where the epilogue, which may compute statistics, makes that faster."""
    columns, element_size, out_size = columns_of(output), input.element_size(), output.shape[2:]
    small, large = (tiling_of(pixels, columns, input.shape[1], element_size, convolution) for pixels in (128, 256))
    # Without statistics an epilogue is short. float32 results are not staged, and spill registers.
    pays = statistics and columns == 8 and element_size == 2 and large.stages >= 2
    return large if pays and large.covered(*out_size) <= _MOST_WASTE * small.covered(*out_size) else small
