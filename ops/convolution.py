"""Transposed 2-D convolutions: geometry, checks, memory format, and the calls of cuDNN."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops import checks

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvTranspose2dGeometry:
    """The arguments of ``torch.nn.functional.conv_transpose2d`` other than tensors. Pairs are (height, width)."""

    kernel_size: Pair
    stride: Pair
    padding: Pair
    output_padding: Pair
    dilation: Pair
    groups: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers in a row, from which ``of_numbers`` makes an equal geometry."""
        *pairs, groups = vars(self).values()
        return (*itertools.chain(*pairs), groups)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "ConvTranspose2dGeometry":
        pairs = [(numbers[place], numbers[place + 1]) for place in range(0, 10, 2)]
        return cls(*pairs, numbers[10])  # type: ignore[call-arg, arg-type]

    @property
    def arguments(self) -> dict[str, Pair | int]:
        """The arguments of ``torch.nn.functional.conv_transpose2d``, by name."""
        return {name: getattr(self, name) for name in DEFAULTS}

    def output_size(self, height: int, width: int) -> Pair:
        """Output size: (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1, for each
        axis."""
        return tuple(
            (size - 1) * self.stride[axis]
            - 2 * self.padding[axis]
            + self.dilation[axis] * (self.kernel_size[axis] - 1)
            + self.output_padding[axis]
            + 1
            for axis, size in enumerate((height, width))
        )  # type: ignore[return-value]


#: Of ``torch.nn.functional.conv_transpose2d``.
DEFAULTS: dict[str, int] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def pair(name: str, value: int | Sequence[int], least: int) -> Pair:
    """``value`` as a pair of ints: the pair that it is, or twice the int that it is. Each is in least ... 2**31 - 1."""
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints, got {value}")
    rows, columns = checks.integer(name, values[0]), checks.integer(name, values[1])
    if rows < least or columns < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if rows >= 2**31 or columns >= 2**31:
        raise ValueError(f"{name} must be less than 2**31, got {value}")
    return rows, columns


def check_conv_transpose2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> ConvTranspose2dGeometry:
    """Check the arguments of a transposed convolution and return its geometry.

    input is (batch, in_channels, height, width), weight (in_channels, out_channels // groups, kernel_height,
    kernel_width). Raises ValueError or TypeError for arguments that do not fit.
    """
    if input.ndim != 4:
        raise ValueError(f"input must be 4-D (batch, in_channels, height, width), got shape {tuple(input.shape)}")
    if weight.ndim != 4:
        expected = "(in_channels, out_channels // groups, kernel_height, kernel_width)"
        raise ValueError(f"weight must be 4-D {expected}, got shape {tuple(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have no dimension of size 0, got shape {tuple(weight.shape)}")
    groups = checks.size("groups", groups)
    in_channels = weight.shape[0]
    if in_channels % groups != 0:
        raise ValueError(f"groups must divide the {in_channels} in_channels of weight, got {groups}")
    if input.shape[1] != in_channels:
        raise ValueError(f"input must have the {in_channels} in_channels of weight, got shape {tuple(input.shape)}")
    geometry = ConvTranspose2dGeometry(
        (weight.shape[2], weight.shape[3]),
        pair("stride", stride, 1),
        pair("padding", padding, 0),
        pair("output_padding", output_padding, 0),
        pair("dilation", dilation, 1),
        groups,
    )
    for extra, step, spread in zip(geometry.output_padding, geometry.stride, geometry.dilation, strict=True):
        if extra >= step and extra >= spread:
            raise ValueError(
                "output_padding must be smaller than stride or dilation, "
                f"got {output_padding} with stride {stride} and dilation {dilation}"
            )
    if 0 in input.shape[2:]:
        raise ValueError(f"input must have a height and a width of at least 1, got shape {tuple(input.shape)}")
    rows, columns = geometry.output_size(*input.shape[2:])
    if rows < 1 or columns < 1:
        raise ValueError(
            f"padding must leave an output of at least 1 x 1 pixels, got {padding}, which makes it {rows} x {columns}"
        )
    return geometry


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """channels_last where the strides of a 4-D tensor are in that order, as PyTorch's convolutions decide it.

    Padded and sliced tensors have a format too. Where dimensions of size one leave it open, it is contiguous_format.
    """
    least = 0
    for axis in (1, 3, 2, 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = stride * size
    return torch.channels_last


def conv_transpose2d(input: torch.Tensor, weight: torch.Tensor, geometry: ConvTranspose2dGeometry) -> torch.Tensor:
    """PyTorch's transposed convolution without a bias, in the input's dtype and memory format.

    It follows PyTorch's settings (TF32, determinism), and so is as precise as PyTorch's. Choosing cuDNN's deterministic
    algorithms here would use TF32 where PyTorch's own choice is float32 (seen on an H200 at small sizes).
    """
    z = torch.conv_transpose2d(input, weight, **geometry.arguments)  # type: ignore[arg-type]
    return z.contiguous(memory_format=memory_format(input))


def conv_transpose2d_gradients(
    z_gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: ConvTranspose2dGeometry,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, ...]:
    """PyTorch's gradients of input and weight, in their memory formats, as far as they are wanted."""
    sizes = geometry.stride, geometry.padding, geometry.dilation, True, geometry.output_padding, geometry.groups
    *gradients, _ = torch.ops.aten.convolution_backward(z_gradient, input, weight, None, *sizes, (*wanted, False))
    return tuple(
        gradient.contiguous(memory_format=memory_format(of))
        for gradient, of, is_wanted in zip(gradients, (input, weight), wanted, strict=True)
        if is_wanted
    )
