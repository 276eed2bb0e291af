"""Promise: given DTensors, each function and module computes on its shards what one process computes on the whole.

The checks run in processes of their own, two (for a mesh of two dimensions, four) started once for all of them; each
process writes what failed there. On the CPU the processes talk through gloo and a file: there is no port to clash.
"""

import json
import math
import os
import re
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ops
from ops import precision, tensor_parallel
from tests import accuracy
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    L19,
    L30,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    doubled,
    make_arguments,
    tensors_of,
)

ROOT = Path(__file__).parents[2]
EVERY = (*CHAINS, L19)
WITH_WEIGHT = (*LINEAR_CHAINS, LINEAR, L19)
PROBLEM = Problem(rows=5, depth=16, groups=4, group_size=4)
#: For all of a process's checks, and for one rank's wait for another; on a GPU all kernels are compiled first.
TIMEOUT_SECONDS = {"cpu": (240, 60), "cuda": (1200, 300)}

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


@check(chain=EVERY)
def results(world, chain):
    """Plain PyTorch in float64: channels, or a batch that does not come out even, or nothing divided."""
    for divided in ("channels", "batch", "nothing"):
        world.same_results(chain, world.arguments(chain, sized(chain)), world.whole(chain, divided))


@check(chain=(*LINEAR_CHAINS, L19))
def accuracy_of_kernels(world, chain):
    """The kernels keep the rule of accuracy beside PyTorch on the same shards, which rounds what is pending a sum once
    more than one process does. The interpreter's problem is small, and of float32 alone."""
    pixels = (3, 3) if chain is L19 else ()
    if world.device == "cuda":
        problem = Problem(rows=512, depth=64 if pixels else 768, groups=16, group_size=32, pixels=pixels)
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
    else:
        problem = Problem(rows=6, depth=16, groups=4, group_size=16, pixels=pixels)
        dtypes = [torch.float32]
    for dtype in dtypes:
        arguments = world.arguments(chain, problem, dtype)
        grad_output = accuracy.draw_grad_output(chain, arguments)
        near = [arguments, *(accuracy.neighbour(arguments, seed) for seed in range(3))]
        exact = [accuracy.run(chain.plain, doubled(each), grad_output.double()) for each in near]
        for divided in ("channels", "batch"):
            function = world.whole(chain, divided)
            ours = accuracy.run(function, arguments, grad_output)
            with mock.patch.object(precision, "runs_kernels", lambda tensor: False):
                theirs = [accuracy.run(function, each, grad_output) for each in near]
            for name in ours:
                our_error = (ours[name].double() - exact[0][name]).norm()
                errors = [(each[name].double() - truth[name]).norm() for each, truth in zip(theirs, exact, strict=True)]
                allowed = accuracy.FACTOR * errors[0] + torch.finfo(torch.float32).eps * exact[0][name].norm()
                allowed += 2 * max(errors) / math.sqrt(problem.rows)  # chance, as in tests.accuracy
                assert our_error <= allowed, f"{name}, {divided}, {dtype}: {our_error:.3e}, allowed {allowed:.3e}"


@check(chain=EVERY)
def absent_vectors(world, chain):
    arguments = world.arguments(chain, sized(chain), absent=chain.vectors)
    for divided in ("channels", "batch"):
        world.same_results(chain, arguments, world.whole(chain, divided))


@check(chain=EVERY)
def fewer_samples_than_ranks(world, chain):
    """A rank without any takes part."""
    world.same_results(chain, world.arguments(chain, sized(chain, rows=1)), world.whole(chain, "batch"))


@check(chain=EVERY)
def placements(world, chain):
    """Those of the result, and of the gradients of DTensors that are leaves; nothing is sent on the way to them."""
    from torch.distributed.tensor.debug import CommDebugMode

    shard, replicate, pending = world.Shard, world.Replicate(), world.Partial()
    axis = 1 if chain in (*NORMS, L75, L19) else -1 % 2
    samples = 2 if chain is L75 else 0
    expected = {
        "channels": (shard(axis), pending if chain in WITH_WEIGHT else shard(axis), None),
        "batch": (shard(samples), shard(0), pending),
        "nothing": (replicate, replicate, replicate),
    }
    for divided, (of_result, of_input, of_parameters) in expected.items():
        whole = world.arguments(chain, sized(chain))
        leaves = world.divide(chain, whole, divided)
        leaves.update({name: leaf.detach().requires_grad_() for name, leaf in tensors_of(leaves).items()})
        with CommDebugMode() as communication:
            output = chain.function(**leaves)
            gradient = world.DTensor.from_local(
                torch.ones_like(output.to_local()),
                world.mesh,
                output.placements,
                shape=output.shape,
                stride=output.stride(),
            )
            output.backward(gradient)
        assert output.placements == (of_result,)
        assert output.shape == chain.plain(**whole).shape
        assert output.stride() == chain.plain(**whole).contiguous().stride()
        assert leaves["input"].grad.placements == (of_input,)
        for name, leaf in tensors_of(leaves).items():
            if name != "input":
                # The bias behind a minimum is added to all of it.
                assert leaf.grad.placements == (of_parameters or leaf.placements[0],), name
        sent = {str(operator).split(".")[-1].strip("')>"): n for operator, n in communication.comm_counts.items() if n}
        if chain is L75 and divided == "channels":
            # The shards' minima, and the gradient at the minimum from each shard of the bias's channels.
            assert sent == {"all_gather_into_tensor": 1, "all_reduce": 1}, sent
        else:
            assert not sent, sent


@check(chain=WITH_WEIGHT)
def other_inputs(world, chain):
    """Sharded weights with an input that is itself sharded, over samples or channels, or pending a sum."""
    for placement in (world.Shard(0), world.Shard(1), world.Partial()):

        def function(placement=placement, **arguments):
            divided = world.divide(chain, arguments, "channels")
            input = world.replicate(arguments["input"])
            if placement.is_partial():
                share = input.to_local() * (0.25 if world.rank == 0 else 0.75)
                divided["input"] = world.DTensor.from_local(share, world.mesh, [placement])
            else:
                divided["input"] = input.redistribute(placements=[placement])
            return chain.function(**divided).full_tensor()

        arguments = world.arguments(chain)
        if placement.is_partial():
            with torch.no_grad():
                output = function(**arguments)
                torch.testing.assert_close(output, chain.function(**arguments), rtol=1e-11, atol=1e-11)
        else:
            world.same_results(chain, arguments, function)


@check(chain=(L94, L30, LINEAR))
def batches_of_more_axes(world, chain):
    """Whichever of them is divided, and more than one sample of all."""
    arguments = world.arguments(chain)
    arguments["input"] = torch.stack([arguments["input"], -arguments["input"], 2 * arguments["input"]])
    grad_output = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grad_output = grad_output.to(world.device)
    expected = accuracy.run(chain.function, arguments, grad_output)
    for axis in (0, 1):

        def function(axis=axis, **arguments):
            divided = world.divide(chain, arguments, "nothing")
            divided["input"] = divided["input"].redistribute(placements=[world.Shard(axis)])
            output = chain.function(**divided)
            assert output.placements == (world.Shard(axis),)
            return output.full_tensor()

        for name, result in accuracy.run(function, arguments, grad_output).items():
            torch.testing.assert_close(result, expected[name], rtol=1e-11, atol=1e-11, msg=name)


@check(kept=("bias", "vectors"))
def minimum_with_replicated_vectors(world, kept):
    """The bias behind the minimum is added once, however it lies; vectors that lie whole are cut where weights are."""
    arguments = world.arguments(L75)
    names = ["bias"] if kept == "bias" else ["linear_bias", "norm_weight", "norm_bias"]

    def function(**arguments):
        divided = world.divide(L75, arguments, "channels")
        divided.update({name: world.replicate(arguments[name]) for name in names})
        output = ops.linear_group_norm_min(**divided)
        assert output.placements == (world.Replicate() if kept == "bias" else world.Shard(1),)
        return output.full_tensor()

    world.same_results(L75, arguments, function)


@check(dtype=(torch.float64, torch.float32))
def equal_and_missing_minima(world, dtype):
    """Of equal minima in two shards the first one's gets the gradient; a NaN is its row's minimum, and gets it."""
    # Groups of one weight row, whose norm is 0, so that the norm's bias is every row's value: equal in all columns,
    # then least in one of each shard, then NaN in the second shard.
    for values, winner in (
        ([2.0, 2.0, 2.0, 2.0], 0),
        ([3.0, 1.0, 1.0, 5.0], 1),
        ([3.0, 4.0, 1.0, 1.0], 2),
        ([0.0, 1.0, float("nan"), -1.0], 2),
    ):
        norm_bias = torch.tensor(values, dtype=dtype, device=world.device)
        arguments = {"input": torch.ones(3, 2, dtype=dtype, device=world.device), "linear_bias": None}
        arguments["weight"] = torch.ones(4, 2, dtype=dtype, device=world.device)
        leaves = world.divide(L75, {**arguments, "norm_bias": norm_bias}, "channels")
        leaves["norm_bias"] = leaf = leaves["norm_bias"].detach().requires_grad_()
        output = ops.linear_group_norm_min(**leaves, num_groups=4)
        assert output.placements == (world.Replicate(),) and output.shape == (3, 1)
        output.to_local().sum().backward()
        assert torch.equal(output.full_tensor().isnan(), norm_bias[winner].isnan().expand(3, 1))
        expected = torch.zeros(4, dtype=dtype, device=world.device)
        expected[winner] = 3
        assert torch.equal(leaf.grad.full_tensor(), expected)


@check
def channels_last(world):
    """A convolution's images keep their format, and the DTensor says so."""
    arguments = world.arguments(L19)
    arguments["input"] = arguments["input"].to(memory_format=torch.channels_last)
    expected = L19.function(**arguments)
    for divided in ("channels", "batch"):
        result = L19.function(**world.divide(L19, arguments, divided))
        assert result.stride() == expected.stride()
        assert result.to_local().is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(result.full_tensor(), expected, rtol=1e-11, atol=1e-11)


@check
def autocast(world):
    """The result has autocast's dtype, gradients their parameters' own."""
    for chain in (L94, L75, L30):
        leaves = world.divide(chain, world.arguments(chain, dtype=torch.float32), "channels")
        leaves.update({name: leaf.detach().requires_grad_() for name, leaf in tensors_of(leaves).items()})
        with torch.autocast(world.device, torch.bfloat16):
            output = chain.function(**leaves)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert all(leaf.grad.dtype == torch.float32 for leaf in tensors_of(leaves).values())


@check
def asynchronous_arguments(world):
    """What is still being sent, here an input and, on the way back, a gradient, is waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    arguments = world.arguments(L30, dtype=torch.float32)

    def function(**arguments):
        divided = world.divide(L30, arguments, "channels")
        spread = world.replicate(arguments["input"]).redistribute(placements=[world.Shard(0)])
        divided["input"] = spread.redistribute(placements=[world.Replicate()], async_op=True)
        assert isinstance(divided["input"].to_local(), AsyncCollectiveTensor)
        output = ops.linear_group_norm_hardtanh(**divided)
        return output.redistribute(placements=[world.Replicate()], async_op=True).to_local() * 1

    grad_output = torch.ones(5, 16, device=world.device)
    expected = accuracy.run(ops.linear_group_norm_hardtanh, arguments, grad_output)
    for name, result in accuracy.run(function, arguments, grad_output).items():
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-4, msg=name)


def refused(world, chain, changes, error, message, divided="channels"):
    """Refused with this message, on every rank, before a rank sent anything."""
    from torch.distributed.tensor.debug import CommDebugMode

    arguments = world.divide(chain, world.arguments(chain, sized(chain)), divided) | changes
    with CommDebugMode() as communication, pytest.raises(error) as raised:
        chain.function(**arguments)
    assert str(raised.value) == message
    assert communication.get_total_counts() == 0


@check(chain=[chain for chain in EVERY if chain.has_groups])
def cut_groups(world, chain):
    message = "num_groups must be a multiple of the channels' 2 shards, which hold whole groups, got 1"
    refused(world, chain, {"num_groups": 1}, ValueError, message)


@check
def refusals(world):
    weight = torch.ones(16, 16, dtype=torch.float64, device=world.device)
    for chain in LINEAR_CHAINS:
        placed = world.replicate(weight).redistribute(placements=[world.Shard(1)])
        message = "weight must be replicated or have the placement Shard(dim=0), got Shard(dim=1)"
        refused(world, chain, {"weight": placed}, ValueError, message)
        pending = world.DTensor.from_local(weight, world.mesh, [world.Partial()])
        message = "weight must be replicated or have the placement Shard(dim=0), got Partial(sum)"
        refused(world, chain, {"weight": pending}, ValueError, message)
        refused(world, chain, {"weight": weight}, TypeError, "weight must be a DTensor, as input is, got Tensor")
        for vector in chain.vectors:
            plain = torch.ones(1, 16, 1, 1, dtype=torch.float64, device=world.device)
            changes = {vector: plain if chain is L75 and vector == "bias" else plain.flatten()}
            refused(world, chain, changes, TypeError, f"{vector} must be a DTensor, as input is, got Tensor")
        changes = {"input": torch.ones(5, 16, dtype=torch.float64, device=world.device)}
        refused(world, chain, changes, TypeError, "input must be a DTensor, as weight is, got Tensor")
    image = world.arguments(L19)["weight"]
    for axis in (0, 2, 3):
        placed = world.replicate(image).redistribute(placements=[world.Shard(axis)])
        message = f"weight must be replicated or have the placement Shard(dim=1), got Shard(dim={axis})"
        refused(world, L19, {"weight": placed}, ValueError, message)
    message = "groups must be 1 where weight's out_channels are sharded, got 2"
    changes = {name: world.replicate(torch.ones(32, dtype=torch.float64, device=world.device)) for name in L19.vectors}
    refused(world, L19, {"groups": 2, **changes}, ValueError, message)
    odd = world.replicate(torch.ones(3, 16, dtype=torch.float64, device=world.device))
    odd = odd.redistribute(placements=[world.Shard(0)])
    message = "weight's channels must be a multiple of its 2 shards, got 3"
    refused(world, LINEAR, {"weight": odd, "bias": None}, ValueError, message)


@check
def another_mesh(world):
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh(world.device, (1, 2))
    weight = world.replicate(world.arguments(L94)["weight"], mesh)
    message = f"weight must lie on input's mesh {world.mesh}, got {mesh}"
    refused(world, L94, {"weight": weight}, ValueError, message)


def modules():
    torch.manual_seed(3)
    return {
        "L94": ops.LinearHardtanhMishGroupNorm(16, 24, (24,), 4),
        "L75": ops.LinearGroupNormMin(16, 24, 4, (1, 24, 1, 1)),
        "L30": ops.LinearGroupNormHardtanh(16, 24, 4, -0.75, 1.25),
        "L19": ops.ConvTranspose2dGeluGroupNorm(3, 8, 3, 2, 1, 4),
    }


def trained(world, model, forward, *, batch=None):
    """The model's parameters, whole, after three steps of training on a fixed batch, or a rank's part of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    shape = (6, 3, 4, 5) if hasattr(model, "conv_transpose") else (6, 16)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        input = torch.randn(shape, dtype=torch.float64, generator=generator).to(world.device)
        if batch is not None:
            input = input[batch]
        optimizer.zero_grad()
        forward(input).square().mean().backward()
        optimizer.step()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        name: parameter.full_tensor() if isinstance(parameter, world.DTensor) else parameter
        for name, parameter in parameters.items()
    }


def trains_as_alone(world, name, distribute, forward, **options):
    alone = modules()[name].to(world.device, torch.float64)
    expected = trained(world, alone, alone)
    model = distribute(modules()[name].to(world.device, torch.float64))
    for key, result in trained(world, model, partial(forward, model), **options).items():
        torch.testing.assert_close(result, expected[key], rtol=1e-8, atol=1e-8, msg=key)


@check(name=["L94", "L75", "L30", "L19"])
def modules_by_channels(world, name):
    """PyTorch's distribute_module with ``shard_channels``: every parameter is cut, the state_dict keeps its keys."""

    def distribute(model):
        keys = list(model.state_dict())
        world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
        assert list(model.state_dict()) == keys
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
            assert parameter.to_local().numel() * 2 == parameter.numel(), key
        return model

    trains_as_alone(world, name, distribute, lambda model, input: model(world.replicate(input)).full_tensor())


@check
def module_in_a_plan(world):
    """PyTorch's own styles prepare the input and the output of a module whose parameters are cut."""
    from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module

    def distribute(model):
        world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
        into = PrepareModuleInput(input_layouts=world.Shard(0), desired_input_layouts=world.Replicate())
        out = PrepareModuleOutput(output_layouts=world.Shard(1), desired_output_layouts=world.Replicate())
        return parallelize_module(parallelize_module(model, world.mesh, into), world.mesh, out)

    def forward(model, input):
        return model(input.chunk(2)[world.rank])

    trains_as_alone(world, "L94", distribute, forward)


@check(name=["L94", "L75", "L30", "L19"])
def modules_by_batch(world, name):
    """A replicated module with a divided batch."""

    def forward(model, input):
        return model(world.replicate(input).redistribute(placements=[world.Shard(0)])).full_tensor()

    trains_as_alone(world, name, lambda model: world.distribute_module(model, world.mesh), forward)


@check(name=["L94", "L75", "L30", "L19"])
def modules_fully_sharded(world, name):
    """FSDP2: each rank has its part of the batch and, while it does not compute, of the parameters."""
    from torch.distributed.fsdp import fully_shard

    def distribute(model):
        model = fully_shard(model, mesh=world.mesh)
        assert all(isinstance(parameter, world.DTensor) for parameter in model.parameters())
        return model

    batch = slice(3 * world.rank, 3 * world.rank + 3)
    trains_as_alone(world, name, distribute, lambda model, input: model(input), batch=batch)


@check
def refused_modules(world):
    model = ops.LinearGroupNormHardtanh(16, 24, 3, -1.0, 1.0)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="^num_groups must be a multiple of the channels' 2 shards, .* got 3$"):
        world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(TypeError, match=r"^weight of a Conv2d must be a vector, got shape \(4, 2, 3, 3\)$"):
        world.distribute_module(nn.Conv2d(2, 4, 3), world.mesh, tensor_parallel.shard_channels)


@check
def frozen_parameters(world):
    model = modules()["L94"].requires_grad_(False)
    world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@check(name=["L94", "L75", "L30", "L19"])
def compiled_modules(world, name):
    """torch.compile takes a sharded module whole."""
    model = modules()[name].to(world.device, torch.float64)
    world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
    input = torch.randn((6, 3, 4, 5) if name == "L19" else (6, 16), dtype=torch.float64)
    input = world.replicate(input.to(world.device))
    torch._dynamo.reset()
    expected, result = model(input), torch.compile(model, backend="aot_eager", fullgraph=True)(input)
    assert result.placements == expected.placements
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=1e-11, atol=1e-11)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(output.full_tensor().square().sum(), parameters) for output in (result, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=1e-11, atol=1e-11)


@check
def documented_examples(world):
    """Those of docs/tensor_parallel.md, on a small scale."""
    page = (ROOT / "docs" / "tensor_parallel.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names = {}
        exec(example.replace('"cuda"', repr(world.device)).replace("1024", "8").replace("8192", "256"), names)
        assert all(isinstance(parameter, world.DTensor) for parameter in names["layer"].parameters())


@check(processes=4, chain=EVERY)
def meshes_of_two_dimensions(world, chain):
    """One divides the batch and the other the channels, in either order, or both divide one of them."""
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh(world.device, (2, 2))
    for divided in (("batch", "channels"), ("channels", "batch"), ("channels", "channels"), ("batch", "batch")):
        function = world.whole(chain, *divided, mesh=mesh)
        world.same_results(chain, world.arguments(chain, sized(chain)), function)


@check(processes=4, name=["L94", "L75", "L30", "L19"])
def modules_fully_sharded_by_channels(world, name):
    """FSDP2 over one dimension of the mesh, the channels over the other."""
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device, (2, 2), mesh_dim_names=("data", "model"))

    def distribute(model):
        world.distribute_module(model, mesh["model"], tensor_parallel.shard_channels)
        return fully_shard(model, mesh=mesh["data"])

    def forward(model, input):
        return model(world.replicate(input, mesh["model"])).full_tensor()

    first = 3 * mesh["data"].get_local_rank()
    trains_as_alone(world, name, distribute, forward, batch=slice(first, first + 3))


def main(rank: str, processes: str, device: str, folder: str) -> None:
    """One process: run its checks and write what failed, by name."""
    from torch import distributed

    rank, processes = int(rank), int(processes)
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=TIMEOUT_SECONDS[device][1]),
    )
    world, failures = World(device), {}
    for name, function in CHECKS[processes].items():
        try:
            function(world)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(failures))
    distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # taking down what is left of gloo's threads may end in an abort


def failures_of_processes(processes: int, device: str, folder: Path) -> list[dict[str, str]]:
    """What failed, by rank and name of the check."""
    command = [sys.executable, "-m", "tests.ops.test_tensor_parallel"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(processes)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            arguments = [*command, str(rank), str(processes), device, str(folder)]
            running.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=output, stderr=output))
    try:
        statuses = [process.wait(TIMEOUT_SECONDS[device][0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not any(statuses), "\n".join(log.read_text() for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Of the processes of a number and a device, which are started when first asked for."""
    outcomes = {}

    def get(processes, device):
        key = processes, device
        if key not in outcomes:
            try:
                outcomes[key] = failures_of_processes(*key, tmp_path_factory.mktemp("processes"))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                outcomes[key] = error  # which is every check's, too
        if isinstance(outcomes[key], Exception):
            raise outcomes[key]
        return outcomes[key]

    return get


def assert_passed(failures, name):
    failed = [f"on rank {rank}:\n{each[name]}" for rank, each in enumerate(failures) if name in each]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", CHECKS[2])
def test_two_processes(failures, name):
    assert_passed(failures(2, "cpu"), name)


@pytest.mark.parametrize("name", CHECKS[4])
def test_four_processes(failures, name):
    assert_passed(failures(4, "cpu"), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS[2])
def test_two_gpus(failures, name):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    assert_passed(failures(2, "cuda"), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS[4])
def test_four_gpus(failures, name):
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs four GPUs, this machine has {torch.cuda.device_count()}")
    assert_passed(failures(4, "cuda"), name)


def test_other_tensors_load_nothing(monkeypatch):
    """DTensor's module is not imported to find out that a tensor of another class is none."""

    class Other(torch.Tensor):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", None)
    assert not tensor_parallel.is_distributed(torch.ones(2).as_subclass(Other), nn.Parameter(torch.ones(2)), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
