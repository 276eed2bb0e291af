"""Checks of ``test_tensor_parallel``: each function on shards, what it takes there and what it refuses."""

import math
from unittest import mock

import pytest
import torch

import ops
from bench.checking import allowed
from ops import precision
from tests import accuracy
from tests.chains import (
    L19,
    L30,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    doubled,
    tensors_of,
)
from tests.ops.shards import EVERY, WITH_WEIGHT, check, sized


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
        near = [(each, accuracy.gradient_nearby(chain, each, grad_output)) for each in near]
        exact = [accuracy.run(chain.plain, doubled(each), gradient.double()) for each, gradient in near]
        for divided in ("channels", "batch"):
            function = world.whole(chain, divided)
            ours = accuracy.run(function, arguments, grad_output)
            with mock.patch.object(precision, "runs_kernels", lambda tensor: False):
                theirs = [accuracy.run(function, *each) for each in near]
            for name in ours:
                our_error = (ours[name].double() - exact[0][name]).norm()
                errors = [(each[name].double() - truth[name]).norm() for each, truth in zip(theirs, exact, strict=True)]
                most = allowed(errors[0], exact[0][name].norm())
                most += 2 * max(errors) / math.sqrt(problem.rows)  # chance, as in tests.accuracy
                assert our_error <= most, f"{name}, {divided}, {dtype}: {our_error:.3e}, allowed {most:.3e}"


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
    message = "num_groups must be a multiple of the 2 shards of the channels, each of which holds whole groups, got 1"
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
    message = "weight's number of channels must be a multiple of its 2 shards, got 3"
    refused(world, LINEAR, {"weight": odd, "bias": None}, ValueError, message)


@check
def another_mesh(world):
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh(world.device, (1, 2))
    weight = world.replicate(world.arguments(L94)["weight"], mesh)
    message = f"weight must be on input's device mesh {world.mesh}, got {mesh}"
    refused(world, L94, {"weight": weight}, ValueError, message)


@check(processes=4, chain=EVERY)
def meshes_of_two_dimensions(world, chain):
    """One divides the batch and the other the channels, in either order, or both divide one of them."""
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh(world.device, (2, 2))
    for divided in (("batch", "channels"), ("channels", "batch"), ("channels", "channels"), ("batch", "batch")):
        function = world.whole(chain, *divided, mesh=mesh)
        world.same_results(chain, world.arguments(chain, sized(chain)), function)
