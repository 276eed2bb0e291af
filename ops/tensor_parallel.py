"""Tensor and data parallelism with DTensor: every function runs on its shards and returns a DTensor.

A shard holds whole groups of channels, or a part of the batch. Each dimension of the mesh divides the channels, or one
axis of the batch, or nothing, as the weight and the input are placed. All other tensors are redistributed to match. The
shards do not communicate, forward or backward, except for the row minimum: there each rank sends one value per row.

Gradients are placed as PyTorch's own. Where the channels are divided, the input's gradient is pending a sum over the
shards, and a parameter's gradient is sharded like the parameter. Where the batch is divided, a parameter's gradient is
pending a sum.

This is a layer over the public functions and not a set of DTensor sharding rules (``register_sharding``), for three
reasons. A rule places tensors but cannot change ``num_groups``, of which a shard has only a part. CPU tensors and
float64 do not run the project's operators. And a row minimum gives its gradient to one shard alone, which no placement
can express.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ops import checks

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

#: A dimension of the mesh that divides the channels. One that divides the batch has an axis's number, any other None.
_CHANNELS = -1


@dataclass(frozen=True)
class Layout:
    """Which axes of a function's tensors are the channels."""

    #: The axis of ``weight``; None for a function of the input's own channels.
    weight_axis: int | None
    #: The axis in the result, and of the input's own channels. If it is the last one (-1), all axes before it are the
    #: batch; otherwise the first axis alone is.
    axis: int


LINEAR = Layout(weight_axis=0, axis=-1)
CONV2D = Layout(weight_axis=0, axis=1)
CONV_TRANSPOSE2D = Layout(weight_axis=1, axis=1)
POINTWISE = Layout(weight_axis=None, axis=-1)
NORM = Layout(weight_axis=None, axis=1)


def is_distributed(*tensors: torch.Tensor | None) -> bool:
    """Whether any of these is a DTensor. There is one only if its module was imported, which takes half a second."""
    if all(type(tensor) in checks.PLAIN_TENSORS for tensor in tensors):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def on_shards(
    function: Callable[..., torch.Tensor],
    layout: Layout,
    tensors: Mapping[str, torch.Tensor | None],
    num_groups: int | None = None,
    groups: int = 1,
    kinds: Mapping[str, str] | None = None,
) -> "DTensor":
    """``function(**tensors, num_groups=num_groups)``, each rank on its shards and its part of the groups.

    Without ``num_groups``, the function gets none. ``groups`` are those of a convolution. ``kinds`` has those of the
    operands by their names (``triton_kernels.pointwise.Pointwise``); other tensors are vectors.

    All but the placements of ``tensors`` is checked before. Raises TypeError where one of them is no DTensor. Raises
    ValueError where one is on another mesh, where the weight is sharded along an axis other than its channels, and
    where a shard would not hold whole groups. All of this comes before anything runs.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, given = _on_one_mesh(tensors)
    input = given["input"]
    roles, shards = _roles(layout, given, mesh, num_groups, groups)

    def placed(over_channels: "Placement", over_batch: "Placement | None" = None) -> tuple["Placement", ...]:
        """Replicate where the mesh divides nothing. Without ``over_batch``, an axis of the batch is sharded."""
        return tuple(
            Replicate() if role is None else over_channels if role == _CHANNELS else over_batch or Shard(role)
            for role in roles
        )

    shares: dict[str, torch.Tensor | None] = dict.fromkeys(tensors)
    for name, tensor in given.items():
        kind = (kinds or {}).get(name)
        channels = Shard(_channels_of(layout, name, tensor))
        if kind in ("sample", "tensor"):
            placements = of_gradient = placed(Shard(1 if kind == "sample" else layout.axis % tensor.ndim))
        elif kind == "scalar":
            placements, of_gradient = placed(Replicate(), Replicate()), placed(Partial(), Partial())
        elif name != "input":
            placements, of_gradient = placed(channels, Replicate()), placed(channels, Partial())
        elif layout.weight_axis is None:
            placements = of_gradient = placed(channels)
        else:
            placements, of_gradient = placed(Replicate()), placed(Partial())
        if tensor.placements != placements:
            tensor = tensor.redistribute(placements=placements)
        shares[name] = tensor.to_local(grad_placements=of_gradient)
    parts = {} if num_groups is None else {"num_groups": num_groups // shards}
    share = function(**shares, **parts)
    axis = layout.axis % share.ndim
    # The parts of the batch that different ranks have may differ in size.
    shape = [
        input.shape[i] if i in roles else size * (shards if i == axis else 1) for i, size in enumerate(share.shape)
    ]
    order = sorted(range(share.ndim), key=lambda axis: (-share.stride()[axis], axis))
    strides = torch.empty_permuted(shape, order, device="meta").stride()
    return DTensor.from_local(share, mesh, placed(Shard(axis)), shape=torch.Size(shape), stride=strides)


def minimum_on_shards(
    function: Callable[..., torch.Tensor],
    tensors: Mapping[str, torch.Tensor | None],
    bias: torch.Tensor | None,
    num_groups: int,
) -> "DTensor":
    """``function(**tensors, num_groups=num_groups) + bias``, of a function of row minima (batch, 1).

    Every rank gets the minima of all shards and takes the least. The bias is added after that, so the result has the
    bias's placement where the channels are divided. The placement ``Partial("min")`` is not used: a minimum over ranks
    may lose a NaN (gloo's does). It also sends the gradient to every shard; it belongs to the shard with the row's
    minimum (of equal ones, the first). Raises as ``on_shards`` does.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, _ = _on_one_mesh({**tensors, "bias": bias})
    minima = on_shards(function, Layout(weight_axis=0, axis=1), tensors, num_groups)
    placements = tuple(Replicate() if each == Shard(1) else each for each in minima.placements)
    share = minima.redistribute(placements=placements).to_local().min(dim=1, keepdim=True)[0]
    minimum = DTensor.from_local(share, mesh, placements, shape=torch.Size((minima.shape[0], 1)), stride=(1, 1))
    return minimum if bias is None else cast("DTensor", (minimum + bias).to(minimum.dtype))


def shard_channels(name: str, module: torch.nn.Module, mesh: "DeviceMesh") -> None:
    """Shard a module's own parameters along their channels: a ``partition_fn`` for PyTorch's ``distribute_module``.

    It is meant for the modules of this package and the layers inside them. A parameter's channels are known for
    ``nn.Linear``, ``nn.Conv2d``, ``nn.ConvTranspose2d`` and ``nn.GroupNorm``, and for a vector with any axes of length
    one.

    Args:
        name: Not used; ``distribute_module`` passes it.
        module: The module whose parameters are sharded.
        mesh: The device mesh.

    Raises:
        TypeError: The channels of a parameter are not known.
        ValueError: The groups of a GroupNorm within the module cannot be divided among the shards.

    Example::

        distribute_module(layer, mesh, ops.tensor_parallel.shard_channels)
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for child in module.modules():
        if isinstance(child, torch.nn.GroupNorm):
            _require_whole_groups(child.num_groups, mesh.size())
    for key, parameter in list(module.named_parameters(recurse=False)):
        channels = Shard(_channels_in(module, key, parameter))
        sharded = distribute_tensor(parameter.detach(), mesh, [channels] * mesh.ndim)
        module.register_parameter(key, torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _channels_in(module: torch.nn.Module, key: str, parameter: torch.Tensor) -> int:
    if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
        return 0
    if isinstance(module, torch.nn.ConvTranspose2d) and key == "weight":
        return 1
    if parameter.numel() not in parameter.shape:
        raise TypeError(f"{key} of a {type(module).__name__} must be a vector, got shape {tuple(parameter.shape)}")
    return parameter.shape.index(parameter.numel())


def _channels_of(layout: Layout, name: str, tensor: torch.Tensor) -> int:
    """The axis of the channels in a function's argument. In the input of a linear layer or a convolution, that is
    the axis that is summed over."""
    if name == "input":
        return layout.axis % tensor.ndim
    if name == "weight" and layout.weight_axis is not None:
        return layout.weight_axis
    return next((axis for axis, size in enumerate(tensor.shape) if size != 1), 0)  # of a vector


def _on_one_mesh(tensors: Mapping[str, torch.Tensor | None]) -> tuple["DeviceMesh", dict[str, "DTensor"]]:
    """The mesh, and those of the tensors that are not None."""
    from torch.distributed.tensor import DTensor

    first, mesh = next((name, each.device_mesh) for name, each in tensors.items() if isinstance(each, DTensor))
    given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor, as {first} is, got {type(tensor).__name__}")
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name} must be on {first}'s device mesh {mesh}, got {tensor.device_mesh}")
    return mesh, given


def _roles(
    layout: Layout,
    tensors: Mapping[str, "DTensor"],
    mesh: "DeviceMesh",
    num_groups: int | None,
    groups: int,
) -> tuple[list[int | None], int]:
    """What each dimension of the mesh divides: the channels, an axis of the batch (its number), or nothing (None).

    With the number of the channels' shards, each of which holds whole groups.
    """
    from torch.distributed.tensor import Shard

    input, name = tensors["input"], "input" if layout.weight_axis is None else "weight"
    holder = tensors[name]
    along = _channels_of(layout, name, holder)
    batch = range(input.ndim - 1) if layout.axis == -1 else range(1)
    roles: list[int | None] = []
    for of_input, of_channels in zip(input.placements, holder.placements, strict=True):
        # The type itself: a strided shard may be a subclass, and its channels are not neighbours.
        if type(of_channels) is Shard and of_channels.dim == along:
            roles.append(_CHANNELS)
        elif name == "weight" and not of_channels.is_replicate():
            placements = ", ".join(map(repr, holder.placements))
            raise ValueError(f"weight must be replicated or have the placement Shard(dim={along}), got {placements}")
        else:
            roles.append(of_input.dim if type(of_input) is Shard and of_input.dim in batch else None)
    shards = math.prod([mesh.size(dimension) for dimension, role in enumerate(roles) if role == _CHANNELS])
    if shards > 1 and groups != 1:
        raise ValueError(f"groups must be 1 where weight's out_channels are sharded, got {groups}")
    if num_groups is not None:
        _require_whole_groups(num_groups, shards)
    elif holder.shape[along] % shards != 0:
        raise ValueError(
            f"{name}'s number of channels must be a multiple of its {shards} shards, got {holder.shape[along]}"
        )
    return roles, shards


def _require_whole_groups(num_groups: int, shards: int) -> None:
    if num_groups % shards != 0:
        raise ValueError(
            f"num_groups must be a multiple of the {shards} shards of the channels, each of which holds whole groups, "
            f"got {num_groups}"
        )
