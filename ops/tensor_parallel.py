"""DTensors: every function runs on its shards of whole groups, or of the batch, and returns a DTensor again.

This is a layer over the public functions, and no sharding rules for their operators (DTensor's ``register_sharding``),
for three reasons: a rule places tensors but cannot change the number of groups, of which a shard has only its part;
what CPU tensors and float64 run is not an operator of the project; and a row's minimum takes a gradient to one shard
alone, which a placement cannot say. Each dimension of the mesh divides the channels, or an axis of the batch, or
nothing, as the weight and the input lie there; all other tensors are brought to it. The shards need no communication
with each other, forward or backward, but for the minimum, whose shards tell each other one value a row.

Gradients come out as PyTorch's own: where the channels are divided, the input's is pending a sum over the shards and
a parameter's is sharded as the parameter; where the batch is, a parameter's is pending a sum.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

#: The types of almost every argument: one look at each, and no more, on the way to the kernels.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
#: What a dimension of the mesh divides where it is not an axis of the batch (its number) or nothing (None).
_CHANNELS = -1


@dataclass(frozen=True)
class Layout:
    """Where a function's tensors have their channels."""

    #: The axis of ``weight``; None for a function of the input's own channels.
    weight_axis: int | None
    #: The axis of the result, and of the input's own channels. Axes of the batch are all before it, if it is the last
    #: one (-1), and else the first alone.
    axis: int


LINEAR = Layout(weight_axis=0, axis=-1)
CONVOLUTION = Layout(weight_axis=1, axis=1)
POINTWISE = Layout(weight_axis=None, axis=-1)
NORM = Layout(weight_axis=None, axis=1)


def is_distributed(*tensors: torch.Tensor | None) -> bool:
    """Whether any of these is a DTensor."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return _any_dtensor(tensors)
    return False


def _any_dtensor(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Who made a DTensor has imported its module, which takes half a second that nobody else shall wait for."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def on_shards(
    function: Callable[..., torch.Tensor],
    layout: Layout,
    tensors: Mapping[str, torch.Tensor | None],
    num_groups: int | None = None,
    **others: Any,
) -> "DTensor":
    """``function(**tensors, num_groups=num_groups, **others)``, each rank on its shards and its part of the groups.

    ``tensors`` have been checked for all but their placements. Raises TypeError where one of them is no DTensor, and
    ValueError where it lies on another mesh, where the weight is sharded along another axis than its channels, and
    where a shard would not hold whole groups: all before anything runs.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, given = _on_one_mesh(tensors)
    input = given["input"]
    roles = _roles(layout, given)
    shards = 1
    for dimension, role in enumerate(roles):
        shards *= mesh.size(dimension) if role == _CHANNELS else 1
    _check_whole_groups(layout, given, num_groups, shards, others.get("groups", 1))

    def placed(over_channels: "Placement", over_batch: "Placement | None" = None) -> tuple["Placement", ...]:
        """Replicated where the mesh divides nothing; without ``over_batch``, an axis of the batch lies as divided."""
        return tuple(
            Replicate() if role is None else over_channels if role == _CHANNELS else over_batch or Shard(role)
            for role in roles
        )

    shares: dict[str, torch.Tensor | None] = dict.fromkeys(tensors)
    for name, tensor in given.items():
        channels = Shard(_channels_of(layout, name, tensor))
        if name != "input":
            shares[name] = _share(tensor, placed(channels, Replicate()), placed(channels, Partial()))
        elif layout.weight_axis is None:
            shares[name] = _share(tensor, placed(channels), placed(channels))
        else:
            shares[name] = _share(tensor, placed(Replicate()), placed(Partial()))
    if num_groups is not None:
        others["num_groups"] = num_groups // shards
    share = function(**shares, **others)

    axis = layout.axis % share.ndim
    shape = list(share.shape)
    shape[axis] *= shards
    for role in roles:
        if role is not None and role != _CHANNELS:
            shape[role] = input.shape[role]  # a rank's own part of it may be shorter than another's
    return DTensor.from_local(
        share, mesh, placed(Shard(axis)), shape=torch.Size(shape), stride=_dense_strides(shape, share)
    )


def minimum_on_shards(
    function: Callable[..., torch.Tensor],
    tensors: Mapping[str, torch.Tensor | None],
    bias: torch.Tensor | None,
    num_groups: int,
    **others: Any,
) -> "DTensor":
    """``function(**tensors, num_groups=num_groups, **others) + bias`` where the function returns row minima (batch, 1).

    Every rank gets all shards' minima and takes the least of them; the bias is added behind that, and the result has
    its placement where the channels are divided. It is no ``Partial("min")``, for a library's minimum over ranks may
    lose a NaN (gloo's does), and such a placement hands a gradient to every shard, where it belongs to the one that
    holds the row's minimum (of equal ones, the first). Raises as ``on_shards`` does.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, _ = _on_one_mesh({**tensors, "bias": bias})
    minima = on_shards(function, Layout(weight_axis=0, axis=1), tensors, num_groups, **others)
    placements = tuple(Replicate() if each == Shard(1) else each for each in minima.placements)
    share = minima.redistribute(placements=placements).to_local().min(dim=1, keepdim=True)[0]
    shape = torch.Size((minima.shape[0], 1))
    minimum = DTensor.from_local(share, mesh, placements, shape=shape, stride=(1, 1))
    return minimum if bias is None else cast("DTensor", (minimum + bias).to(minimum.dtype))


def shard_channels(name: str, module: torch.nn.Module, mesh: "DeviceMesh") -> None:
    """Shard the module's own parameters along their channels: a ``partition_fn`` of PyTorch's ``distribute_module``.

    For the modules of this package, with the layers inside them. ``name`` is not used. Raises ValueError where the
    groups of a GroupNorm within the module cannot be shared out whole, and TypeError for a parameter whose channels are
    unknown: one that is neither a Linear layer's, a transposed convolution's or a GroupNorm's, nor a vector with any
    axes of length one.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for child in module.modules():
        if isinstance(child, torch.nn.GroupNorm) and child.num_groups % mesh.size() != 0:
            raise ValueError(_cut_groups(child.num_groups, mesh.size()))
    for key, parameter in list(module.named_parameters(recurse=False)):
        placements = [Shard(_channels_in(module, key, parameter))] * mesh.ndim
        sharded = distribute_tensor(parameter.detach(), mesh, placements)
        module.register_parameter(key, torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _channels_in(module: torch.nn.Module, key: str, parameter: torch.Tensor) -> int:
    """The axis of a module's parameter."""
    if isinstance(module, torch.nn.Linear):
        return 0
    if isinstance(module, torch.nn.ConvTranspose2d) and key == "weight":
        return 1
    if parameter.numel() not in parameter.shape:
        raise TypeError(f"{key} of a {type(module).__name__} must be a vector, got shape {tuple(parameter.shape)}")
    return parameter.shape.index(parameter.numel())


def _channels_of(layout: Layout, name: str, tensor: torch.Tensor) -> int:
    """The axis of a function's argument; of an input whose channels are not the result's, the one that is summed."""
    if name == "input":
        return layout.axis % tensor.ndim
    if name == "weight" and layout.weight_axis is not None:
        return layout.weight_axis
    return tensor.ndim - 1  # of a vector, behind any axes of length one


def _on_one_mesh(tensors: Mapping[str, torch.Tensor | None]) -> tuple["DeviceMesh", dict[str, "DTensor"]]:
    """The mesh, and those of the tensors that are not None."""
    from torch.distributed.tensor import DTensor

    first, mesh = next((name, each.device_mesh) for name, each in tensors.items() if isinstance(each, DTensor))
    given = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be a DTensor, as {first} is, got {type(tensor).__name__}")
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name} must be on {first}'s device mesh {mesh}, got {tensor.device_mesh}")
        given[name] = tensor
    return mesh, given


def _roles(layout: Layout, tensors: Mapping[str, "DTensor"]) -> list[int | None]:
    """What each dimension of the mesh divides: the channels, an axis of the batch (its number), or nothing (None)."""
    from torch.distributed.tensor import Shard

    input, name = tensors["input"], _holder_of_channels(layout)
    along = _channels_of(layout, name, tensors[name])
    batch = range(input.ndim - 1) if layout.axis == -1 else range(1)
    roles: list[int | None] = []
    for of_input, of_channels in zip(input.placements, tensors[name].placements, strict=True):
        # The type itself: a strided shard says that it is one too, and its channels are not neighbours.
        if type(of_channels) is Shard and of_channels.dim == along:
            roles.append(_CHANNELS)
        elif name == "weight" and not of_channels.is_replicate():
            placements = ", ".join(map(repr, tensors[name].placements))
            raise ValueError(f"weight must be replicated or have the placement Shard(dim={along}), got {placements}")
        elif type(of_input) is Shard and of_input.dim in batch:
            roles.append(of_input.dim)
        else:
            roles.append(None)
    return roles


def _holder_of_channels(layout: Layout) -> str:
    return "input" if layout.weight_axis is None else "weight"


def _check_whole_groups(
    layout: Layout, tensors: Mapping[str, "DTensor"], num_groups: int | None, shards: int, convolution_groups: int
) -> None:
    if shards == 1:
        return
    if convolution_groups != 1:
        raise ValueError(f"groups must be 1 where weight's out_channels are sharded, got {convolution_groups}")
    if num_groups is not None:
        if num_groups % shards != 0:
            raise ValueError(_cut_groups(num_groups, shards))
        return
    name = _holder_of_channels(layout)
    channels = tensors[name].shape[_channels_of(layout, name, tensors[name])]
    if channels % shards != 0:
        raise ValueError(f"{name}'s number of channels must be a multiple of its {shards} shards, got {channels}")


def _cut_groups(num_groups: int, shards: int) -> str:
    return (
        f"num_groups must be a multiple of the {shards} shards of the channels, each of which holds whole groups, "
        f"got {num_groups}"
    )


def _share(
    tensor: "DTensor", placements: tuple["Placement", ...], gradient_placements: tuple["Placement", ...]
) -> torch.Tensor:
    """This rank's own part of a tensor that lies like this, and whose gradient will."""
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local(grad_placements=gradient_placements)


def _dense_strides(shape: list[int], like: torch.Tensor) -> tuple[int, ...]:
    """Of a tensor of this shape without gaps whose axes lie in memory in the order of ``like``'s."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (like.stride(axis), -axis)):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)
