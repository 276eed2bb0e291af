"""2-D convolutions, plain and transposed: geometry, checks, memory format, and the calls of cuDNN."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ops import checks
from triton_kernels.device import meant

Pair = tuple[int, int]
#: By their dimensions the memory format in which images' channels are neighbours.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Geometry:
    """The arguments of a convolution other than tensors. Pairs are (height, width).

    ``output_padding`` makes the output larger at its end. A plain convolution has one where "same" pads an image more
    at its end than at its beginning.
    """

    kernel_size: Pair
    stride: Pair
    padding: Pair
    output_padding: Pair
    dilation: Pair
    groups: int
    transposed: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers in a row, from which ``of_numbers`` makes an equal geometry."""
        *pairs, groups, _ = vars(self).values()
        return (*itertools.chain(*pairs), groups)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], transposed: bool) -> "Geometry":
        pairs = [(numbers[place], numbers[place + 1]) for place in range(0, 10, 2)]
        return cls(*pairs, numbers[10], transposed)  # type: ignore[call-arg, arg-type]

    @property
    def sizes(self) -> dict[str, Pair | int]:
        """Its numbers by the names of ``DEFAULTS``."""
        return {name: getattr(self, name) for name in DEFAULTS}

    @property
    def arguments(self) -> dict[str, Pair | int | str]:
        """The arguments of ``torch.nn.functional.conv2d`` or ``conv_transpose2d``, by name."""
        sizes: dict[str, Any] = self.sizes
        if not self.transposed and sizes.pop("output_padding") != (0, 0):
            sizes["padding"] = "same"
        return sizes

    @property
    def of_aten(self) -> tuple[Any, ...]:
        """The arguments of PyTorch's own convolution, of an image that ``_padded`` returns."""
        extra = self.output_padding if self.transposed else (0, 0)
        return self.stride, self.padding, self.dilation, self.transposed, extra, self.groups

    def channels(self, weight: torch.Tensor) -> int:
        """Those of the output."""
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]

    def output_size(self, height: int, width: int) -> Pair:
        """Output size of each axis. Of a transposed convolution it is (size - 1) * stride - 2 * padding + reach +
        output_padding + 1, of another one (size + 2 * padding + output_padding - reach - 1) // stride + 1."""
        return tuple(map(self._output_size, (0, 1), (height, width)))  # type: ignore[return-value]

    def _output_size(self, axis: int, size: int) -> int:
        stride, padding, extra = self.stride[axis], self.padding[axis], self.output_padding[axis]
        reach = self.dilation[axis] * (self.kernel_size[axis] - 1)
        if self.transposed:
            return (size - 1) * stride - 2 * padding + reach + extra + 1
        return (size + 2 * padding + extra - reach - 1) // stride + 1


#: Of ``torch.nn.functional.conv_transpose2d``, and without ``output_padding`` of ``conv2d``.
DEFAULTS: dict[str, int] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
#: The contractions that are convolutions.
IS_TRANSPOSED = {"conv2d": False, "conv_transpose2d": True}


def pair(name: str, value: int | Sequence[int], least: int) -> Pair:
    """``value`` as a pair of ints: the pair that it is, or twice the int that it is or holds, as PyTorch has it.

    Each is in least ... 2**31 - 1. A kernel's size must be an int or a pair, as PyTorch's modules have it.
    """
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) == 1 and name != "kernel_size":
        values = (values[0], values[0])
    if len(values) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints, got {value}")
    rows, columns = checks.integer(name, values[0]), checks.integer(name, values[1])
    if rows < least or columns < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if rows >= 2**31 or columns >= 2**31:
        raise ValueError(f"{name} must be less than 2**31, got {value}")
    return rows, columns


def in_numbers(weight: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any]:
    """The padding of a plain convolution, and by how much more it pads an image's end: PyTorch's words as numbers."""
    if not isinstance(padding, str):
        return padding, 0
    if padding not in ("same", "valid"):
        raise ValueError(f"padding must be 'same', 'valid', an int or a pair of ints, got {padding!r}")
    if padding == "valid" or not isinstance(weight, torch.Tensor) or weight.ndim != 4:  # a weight that is refused
        return 0, 0
    if pair("stride", stride, 1) != (1, 1):
        raise ValueError(f"stride must be 1 where padding is 'same', got {stride}")
    steps = pair("dilation", dilation, 1)
    rows, columns = ((size - 1) * step for size, step in zip(weight.shape[2:], steps, strict=True))
    return (rows // 2, columns // 2), (rows % 2, columns % 2)


def in_order(contraction: str, weight: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """The values of ``DEFAULTS`` for PyTorch's function of this name, which is given some of them, in numbers."""
    sizes: dict[str, Any] = {name: given.get(name, default) for name, default in DEFAULTS.items()}
    if not IS_TRANSPOSED[contraction]:
        of_padding = in_numbers(weight, sizes["stride"], sizes["padding"], sizes["dilation"])
        sizes["padding"], sizes["output_padding"] = of_padding
    return tuple(sizes.values())


def check(
    transposed: bool,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Geometry:
    """Check the arguments of a convolution and return its geometry.

    input is (batch, in_channels, height, width), weight (out_channels, in_channels // groups, kernel_height,
    kernel_width), or with ``transposed`` (in_channels, out_channels // groups, ...). Raises ValueError or TypeError for
    arguments that do not fit.
    """
    names = ("in_channels", "out_channels") if transposed else ("out_channels", "in_channels")
    if input.ndim != 4:
        raise ValueError(f"input must be 4-D (batch, in_channels, height, width), got shape {tuple(input.shape)}")
    if weight.ndim != 4:
        expected = f"({names[0]}, {names[1]} // groups, kernel_height, kernel_width)"
        raise ValueError(f"weight must be 4-D {expected}, got shape {tuple(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have no dimension of size 0, got shape {tuple(weight.shape)}")
    groups = checks.size("groups", groups)
    if weight.shape[0] % groups != 0:
        raise ValueError(f"groups must divide the {weight.shape[0]} {names[0]} of weight, got {groups}")
    in_channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.shape[1] != in_channels:
        raise ValueError(f"input must have the {in_channels} in_channels of weight, got shape {tuple(input.shape)}")
    geometry = Geometry(
        (weight.shape[2], weight.shape[3]),
        pair("stride", stride, 1),
        pair("padding", padding, 0),
        pair("output_padding", output_padding, 0),
        pair("dilation", dilation, 1),
        groups,
        transposed,
    )
    for extra, step, spread in zip(geometry.output_padding, geometry.stride, geometry.dilation, strict=True):
        if transposed and extra >= step and extra >= spread:
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


def cudnn_format(input: torch.Tensor, geometry: Geometry) -> torch.memory_format:
    """The memory format to convolve images in by PyTorch: channels_last in 16 bits on a GPU, else their own.

    cuDNN's kernels for tensor cores take channels_last images. It copies contiguous ones, more slowly than the kernel
    here does, or takes kernels without tensor cores: 1.74 ms for 8 to 32 channels at 128 x 256 x 256 (bf16, H200).
    """
    on_gpu = meant(input.device).type == "cuda"
    in_channels_last = on_gpu and input.element_size() == 2 and geometry.groups == 1
    return torch.channels_last if in_channels_last else memory_format(input)


def convolve(
    input: torch.Tensor, weight: torch.Tensor, geometry: Geometry, memory_format: torch.memory_format
) -> torch.Tensor:
    """PyTorch's convolution without a bias, in the input's dtype and this memory format.

    It follows PyTorch's settings (TF32, determinism), and so is as precise as PyTorch's. Choosing cuDNN's deterministic
    algorithms here would use TF32 where PyTorch's own choice is float32 (seen on an H200 at small sizes).
    """
    z = torch.convolution(_padded(input, geometry), weight, None, *geometry.of_aten)
    return z.contiguous(memory_format=memory_format)


def convolution_gradients(
    z_gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, ...]:
    """PyTorch's gradients of input and weight, in their memory formats, as far as they are wanted."""
    of_input, of_weight, _ = torch.ops.aten.convolution_backward(
        z_gradient, _padded(input, geometry), weight, None, *geometry.of_aten, (*wanted, False)
    )
    if wanted[0]:
        of_input = of_input[:, :, : input.shape[2], : input.shape[3]]
    return tuple(
        gradient.contiguous(memory_format=memory_format(of))
        for gradient, of, is_wanted in zip((of_input, of_weight), (input, weight), wanted, strict=True)
        if is_wanted
    )


def _padded(input: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The image with what a plain convolution pads at its end alone."""
    rows, columns = geometry.output_padding
    return input if geometry.transposed or not rows + columns else F.pad(input, (0, columns, 0, rows))
