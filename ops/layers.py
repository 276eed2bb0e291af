"""What the modules are made of: PyTorch's layers that run as one call, and steps of ``ops.pointwise``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from ops import checks, convolution, family, submodules
from ops.pointwise import Earlier, Step, kind_of
from triton_kernels import reference
from triton_kernels.chain import Chain
from triton_kernels.pointwise import Pointwise

Tensor = torch.Tensor
Layer = TypeVar("Layer", bound=nn.Module)


class Steps(nn.Module):
    """Steps of ``ops.pointwise`` within a module.

    Those with a tensor hold it under their place: a ``torch.nn.Parameter`` as a parameter, which is learned, another
    tensor as a buffer. So the first of the steps ``after`` has the state_dict key ``after.0``.

    Args:
        name: What error messages call the steps.
        steps: The steps.
    """

    def __init__(self, name: str, steps: Sequence[Step]):
        super().__init__()
        family.require_steps(**{name: steps})
        for place, (_, operand) in enumerate(steps):
            if isinstance(operand, nn.Parameter):
                self.register_parameter(str(place), operand)
            elif isinstance(operand, Tensor):
                self.register_buffer(str(place), operand)
        self._given = tuple([Step(each, None if isinstance(operand, Tensor) else operand) for each, operand in steps])

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps with their tensors as they are now."""
        return tuple(
            [
                Step(function, getattr(self, str(place))) if function.has_tensor and operand is None else given
                for place, given in enumerate(self._given)
                for function, operand in (given,)
            ]
        )

    def forward(self, values: Tensor) -> Tensor:
        """Apply the steps one by one to ``values`` ``(samples, channels, *)``."""
        functions: list[Pointwise] = []
        operands: list[Any] = []
        for function, operand in self.steps:
            if isinstance(operand, Earlier):
                function, operand = function.with_operand(operand.kind), None
            elif function.operand == "tensor":
                function = function.with_operand(kind_of(operand.shape, values.ndim, has_rows=False))
                operand = operand.view(values.shape) if function.operand == "tensor" else operand
            functions.append(function)
            operands.append(operand)
        return reference.plain(Chain(before=tuple(functions), norm=""), values, operands)

    def extra_repr(self) -> str:
        """The steps with what they take: numbers, a tensor's shape, or which earlier value."""

        def text(operand: Any) -> str:
            if isinstance(operand, Tensor):
                return f"({tuple(operand.shape)})"
            if isinstance(operand, Earlier):
                return f"(earlier({operand.steps}))"
            return "" if operand is None else f"({', '.join(map(str, operand))})"

        return ", ".join([function.name + text(operand) for function, operand in self.steps])


class Fused(nn.Module, ABC):
    """Layers that run as one call while they are as they were made, and one by one else."""

    #: The layers by their attributes: what the chain begins with, the norm, and others.
    _layers: ClassVar[dict[str, type[nn.Module]]]
    #: Where these are among the layers.
    before: Steps
    after: Steps

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layers to ``input``."""
        layers = {name: (getattr(self, name), kind) for name, kind in self._layers.items()}
        return self._fused(input) if submodules.are_as_made(self, **layers) else self._one_by_one(input)

    @abstractmethod
    def _fused(self, input: Tensor) -> Tensor: ...

    @abstractmethod
    def _one_by_one(self, input: Tensor) -> Tensor: ...

    def _steps(self) -> dict[str, Any]:
        """The arguments ``before`` and ``after`` of a function of ``ops``."""
        return {name: getattr(self, name).steps for name, kind in self._layers.items() if kind is Steps}

    def _layer_and_norm(self) -> tuple[Any, Any]:
        layer, norm, *_ = self._layers
        return getattr(self, layer), getattr(self, norm)

    def _operands(self) -> tuple[Any, Any, Any, Any, Any]:
        """The layer's and the norm's arguments of a function of ``ops``."""
        layer, norm = self._layer_and_norm()
        return layer.weight, layer.bias, norm.num_groups, norm.weight, norm.bias

    def _before(self, values: Tensor) -> Tensor:
        """What is between the layer and the norm, without fusion."""
        return self.before(values) if "before" in self._layers else values

    def _after(self, values: Tensor) -> Tensor:
        return self.after(values) if "after" in self._layers else values


class OfRows(Fused):
    """A linear layer and what follows. The channels are the last dimension."""

    def _one_by_one(self, input: Tensor) -> Tensor:
        layer, norm = self._layer_and_norm()
        z = layer(input)
        return self._after(norm(self._before(z.reshape(-1, z.shape[-1])))).view(*input.shape[:-1], -1)


class OfImages(Fused):
    """A convolution and what follows. The channels are the second dimension."""

    def _one_by_one(self, input: Tensor) -> Tensor:
        layer, norm = self._layer_and_norm()
        return self._after(norm(self._before(layer(input))))


def linear_and_norm(
    kind: Callable[..., Layer],
    in_features: int,
    out_features: int,
    num_groups: int | None,
    bias: bool,
    eps: float,
    device: Any,
    dtype: Any,
) -> tuple[nn.Linear, Layer]:
    """The two layers, after a check of their arguments. ``kind`` is the norm's class; a LayerNorm has no groups."""
    sizes = checks.size("in_features", in_features, 0), checks.size("out_features", out_features)
    checks.dtype(dtype)
    groups = () if num_groups is None else (checks.groups(sizes[1], num_groups),)
    eps = checks.epsilon(eps)
    linear = nn.Linear(*sizes, bias=bias, device=device, dtype=dtype)
    return linear, kind(*groups, sizes[1], eps=eps, device=device, dtype=dtype)


#: The least value of a convolution's pairs.
_LEAST = {"kernel_size": 1, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}


def convolution_and_norm(
    kind: Callable[..., Layer],
    in_channels: int,
    out_channels: int,
    num_groups: int,
    bias: bool,
    eps: float,
    device: Any,
    dtype: Any,
    *,
    groups: int = 1,
    **pairs: Any,
) -> tuple[Layer, nn.GroupNorm]:
    """A convolution of the class ``kind`` and a GroupNorm, after a check of their arguments."""
    in_channels, out_channels = checks.size("in_channels", in_channels), checks.size("out_channels", out_channels)
    checks.dtype(dtype)
    words = ("same", "valid") if kind is nn.Conv2d else ()  # of padding
    sizes: dict[str, Any] = {
        name: value if name == "padding" and value in words else convolution.pair(name, value, _LEAST[name])
        for name, value in pairs.items()
    }
    sizes["groups"] = checks.size("groups", groups)
    num_groups, eps = checks.groups(out_channels, num_groups), checks.epsilon(eps)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    layer = kind(in_channels, out_channels, **sizes, bias=bias, **options)
    return layer, nn.GroupNorm(num_groups, out_channels, eps=eps, **options)
