"""Where the Gluon kernels for Hopper run, and which images they take. This does not import Gluon."""

import torch
from torch._subclasses.fake_tensor import is_fake

from triton_kernels.device import INTERPRETED, architecture


def takes_hopper_kernels(architecture: int) -> bool:
    """Whether the Hopper kernels run: compute capability 9.0, and not in the interpreter."""
    return not INTERPRETED and architecture == 90


def runs_hopper_kernels(device: torch.device) -> bool:
    return takes_hopper_kernels(architecture(device))


def is_channels_last(image: torch.Tensor) -> bool:
    """Whether the channels of an image [N, C, H, W] are contiguous."""
    return image.stride(1) == 1


def is_copyable(image: torch.Tensor) -> bool:
    """Whether TMA can copy the image: contiguous channels or pixels, and all other strides multiples of 16 bytes.

    A fake tensor, as torch.compile passes, has no address. It counts as aligned.
    """
    strides, element_size = image.stride(), image.element_size()
    others = [stride for stride in strides if stride != 1]
    if len(others) != 3 or 1 not in (strides[1], strides[3]):
        return False
    aligned = all(stride > 0 and stride * element_size % 16 == 0 for stride in others)
    return aligned and (is_fake(image) or image.data_ptr() % 16 == 0)


def is_matrix_copyable(matrix: torch.Tensor) -> bool:
    """Whether TMA can copy the matrix, or each of a batch, of float32: rows or columns are contiguous, and begin at
    multiples of 16 bytes. A fake one counts as aligned."""
    *batch, rows, columns = matrix.stride()
    inner, outer = sorted((rows, columns))
    length = matrix.shape[-1] if columns == inner else matrix.shape[-2]
    aligned = outer % 4 == 0 and outer >= length and all(each > 0 and each % 4 == 0 for each in batch)
    return inner == 1 and aligned and (is_fake(matrix) or matrix.data_ptr() % 16 == 0)


def takes_input(image: torch.Tensor) -> bool:
    """Whether the kernels can read ``image`` in place: it is channels_last, and TMA can copy it."""
    return is_channels_last(image) and is_copyable(image)
