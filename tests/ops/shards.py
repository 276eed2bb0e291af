"""What the checks of tensor parallelism share: how they are registered, and a process's place among the others."""

from functools import partial

import torch

from tests import accuracy
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    L19,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

EVERY = (*CHAINS, L19)
WITH_WEIGHT = (*LINEAR_CHAINS, LINEAR, L19)
PROBLEM = Problem(rows=5, depth=16, groups=4, group_size=4)
#: What runs in the processes, by name, for each number of them.
CHECKS = {2: {}, 4: {}}


def check(function=None, *, processes=2, **parameters):
    """Have ``function(world)`` run in the processes, once for each value of its one further parameter, if any."""
    if function is None:
        return lambda function: check(function, processes=processes, **parameters)
    for name, values in parameters.items():
        for value in values:
            CHECKS[processes][f"{function.__name__}-{chain_id(value)}"] = partial(function, **{name: value})
    if not parameters:
        CHECKS[processes][function.__name__] = function
    return function


class World:
    """A process's place: its rank, the mesh of all ranks, and the placements, which are imported here alone."""

    def __init__(self, device: str):
        from torch.distributed import get_rank, get_world_size, init_device_mesh, tensor

        self.device, self.rank, self.size = device, get_rank(), get_world_size()
        self.mesh = init_device_mesh(device, (self.size,))
        self.DTensor, self.Shard, self.Replicate = tensor.DTensor, tensor.Shard, tensor.Replicate
        self.Partial, self.distribute_module = tensor.Partial, tensor.distribute_module

    def arguments(self, chain, problem=PROBLEM, dtype=torch.float64, **options):
        """The same on every rank."""
        arguments = make_arguments(chain, problem, dtype, **options)
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }

    def replicate(self, tensor, mesh=None):
        mesh = mesh or self.mesh
        return self.DTensor.from_local(tensor, mesh, [self.Replicate()] * mesh.ndim)

    def divide(self, chain, arguments, *divided, mesh=None):
        """The arguments as DTensors, each dimension of the mesh dividing "channels", "batch" or "nothing"."""
        result = dict(arguments)
        for name, tensor in tensors_of(arguments).items():
            placements = [self.placement(chain, name, tensor.ndim, each) for each in divided]
            result[name] = self.replicate(tensor, mesh).redistribute(placements=placements)
        return result

    def placement(self, chain, name, ndim, divided):
        is_input, is_matrix = name == "input", name == "weight" and ndim > 1
        if divided == "batch" and is_input:
            return self.Shard(0)
        if divided != "channels" or (is_input and chain in WITH_WEIGHT):
            return self.Replicate()
        if is_matrix:
            return self.Shard(1 if chain is L19 else 0)
        if is_input:
            return self.Shard(ndim - 1 if chain is BIAS_HARDTANH_MISH else 1)
        return self.Shard(1 if ndim == 4 else 0)

    def whole(self, chain, *divided, mesh=None):
        """The chain's function, of whole tensors and with a whole result, that computes on shards on the way."""
        function = chain.function

        def through_shards(**arguments):
            return function(**self.divide(chain, arguments, *divided, mesh=mesh)).full_tensor()

        return through_shards

    def same_results(self, chain, arguments, function):
        """Result and gradients are those of one process, to float64's last digits."""
        grad_output = accuracy.draw_grad_output(chain, arguments, unsafe="keep")
        expected = accuracy.run(chain.function, arguments, grad_output)
        results = accuracy.run(function, arguments, grad_output)
        for name in expected:
            assert type(results[name]) is torch.Tensor
            torch.testing.assert_close(results[name], expected[name], rtol=1e-11, atol=1e-11, msg=name)


def pixels_of(chain):
    return (2, 3) if chain in NORMS else ()


def sized(chain, rows=PROBLEM.rows, **options):
    return Problem(rows=rows, depth=16, groups=4, group_size=4, pixels=pixels_of(chain), **options)
