"""Checks of ``test_tensor_parallel``: functions that take steps, on shards."""

import pytest
import torch

from tests.chains import tensors_of
from tests.ops.compositions import HEADS, compose
from tests.ops.shards import check


def _divided(world, composition, arguments, divided):
    """The arguments as DTensors whose channels or batch are divided, or nothing."""
    head, result = composition.head, dict(arguments)
    for name, tensor in tensors_of(arguments).items():
        kind = composition.operands.get(name, "tensor" if name == "input" and not head.contraction else "")
        axis = None
        if kind == "scalar":
            pass
        elif divided == "batch" and (name == "input" or kind in ("sample", "tensor")):
            axis = 0
        elif divided == "channels" and kind in ("sample", "tensor"):
            axis = head.axis % tensor.ndim
        elif divided == "channels" and name != "input":
            axis = 1 if tensor.ndim == 4 and composition.name == "conv_transpose2d_group_norm" else 0
        placement = world.Replicate() if axis is None else world.Shard(axis)
        result[name] = world.replicate(tensor.to(world.device)).redistribute(placements=[placement])
    return result


def _on_shards(world, composition, divided):
    def function(**arguments):
        return composition.function(**_divided(world, composition, arguments, divided)).full_tensor()

    return function


@check(name=[name for name in HEADS if name != "layer_norm"])
def steps(world, name):
    """Operands of each kind, on both sides of the norm."""
    before = ("mul_vector", "mul_scalar", "mish", "add_tensor", "add_sample") if HEADS[name].norm else ()
    composition = compose(name, before, ("mul_tensor", "gelu", "add_vector", "mul_earlier", "mul_scalar"))
    arguments = composition.arguments(torch.float64)
    arguments = {
        key: each.to(world.device) if key in tensors_of(arguments) else each for key, each in arguments.items()
    }
    for divided in ("channels", "batch", "nothing"):
        if name == "linear_layer_norm" and divided == "channels":  # a row is one group
            with pytest.raises(ValueError, match="num_groups must be a multiple of the 2 shards"):
                _on_shards(world, composition, divided)(**arguments)
        else:
            world.same_results(composition, arguments, _on_shards(world, composition, divided))


@check
def layer_norm(world):
    """Over the batch. What is normalised cannot be divided."""
    composition = compose("layer_norm", ("mish", "add_tensor"), ("mul_vector",))
    arguments = composition.arguments(torch.float64)
    for divided in ("batch", "nothing"):
        world.same_results(composition, arguments, _on_shards(world, composition, divided))
    with pytest.raises(ValueError, match="num_groups must be a multiple of the 2 shards"):
        _on_shards(world, composition, "channels")(**arguments)
