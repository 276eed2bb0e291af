"""Checks of ``test_tensor_parallel``: modules and their training on shards, with PyTorch's own ways to divide them."""

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ops
from ops import pointwise as p
from ops import submodules, tensor_parallel
from tests.ops.shards import check

ROOT = Path(__file__).parents[2]


def composed():
    """Steps before and after the norm, and vectors of them that are learned."""
    scale, shift = nn.Parameter(torch.rand(24) + 0.5), nn.Parameter(torch.randn(24))
    return ops.LinearGroupNorm(16, 24, 4, before=(p.silu(), p.mul(scale)), after=(p.add(shift), p.gelu()))


def modules():
    torch.manual_seed(3)
    return {
        "L94": ops.LinearHardtanhMishGroupNorm(16, 24, (24,), 4),
        "L75": ops.LinearGroupNormMin(16, 24, 4, (1, 24, 1, 1)),
        "L30": ops.LinearGroupNormHardtanh(16, 24, 4, -0.75, 1.25),
        "L19": ops.ConvTranspose2dGeluGroupNorm(3, 8, 3, 2, 1, 4),
        "composed": composed(),
        "L94 without a bias": ops.LinearHardtanhMishGroupNorm(16, 24, (24,), 4, linear_bias=False),
        "L75 without a bias": ops.LinearGroupNormMin(16, 24, 4, (1, 24, 1, 1), linear_bias=False),
        "L30 without a bias": ops.LinearGroupNormHardtanh(16, 24, 4, -0.75, 1.25, linear_bias=False),
        "L19 without a bias": ops.ConvTranspose2dGeluGroupNorm(3, 8, 3, 2, 1, 4, conv_bias=False),
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


@check(name=list(modules()))
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


@check(name=["L94", "L75", "L30", "L19", "composed"])
def modules_by_batch(world, name):
    """A replicated module with a divided batch."""

    def forward(model, input):
        return model(world.replicate(input).redistribute(placements=[world.Shard(0)])).full_tensor()

    trains_as_alone(world, name, lambda model: world.distribute_module(model, world.mesh), forward)


@check(name=["L94", "L75", "L30", "L19", "composed"])
def modules_fully_sharded(world, name):
    """FSDP2: each rank has its part of the batch and, while it does not compute, of the parameters."""
    from torch.distributed.fsdp import fully_shard

    def distribute(model):
        model = fully_shard(model, mesh=world.mesh)
        assert all(isinstance(parameter, world.DTensor) for parameter in model.parameters())
        return model

    batch = slice(3 * world.rank, 3 * world.rank + 3)
    trains_as_alone(world, name, distribute, lambda model, input: model(input), batch=batch)


def layers_of(model):
    """The product and the norm, the two children that have parameters."""
    return [child for child in model.children() if list(child.parameters())]


@check(name=["L94", "L75", "L30", "L19", "composed"])
def fused_when_fully_sharded(world, name):
    """FSDP2's hooks are the module's own, and change none of its layers."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(modules()[name], mesh=world.mesh)
    submodules._told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model(torch.randn((6, 3, 4, 5) if name == "L19" else (6, 16), device=world.device)).sum().backward()


@check(name=["L94", "L75", "L30", "L19"])
def modules_with_fully_sharded_layers(world, name):
    """Where a layer is sharded by itself, its own hooks gather its parameters: it is called."""
    from torch.distributed.fsdp import fully_shard

    def distribute(model):
        for layer in layers_of(model):
            fully_shard(layer, mesh=world.mesh)
        return fully_shard(model, mesh=world.mesh)

    batch = slice(3 * world.rank, 3 * world.rank + 3)
    submodules._told.clear()
    with pytest.warns(
        RuntimeWarning, match=r"is not fused but runs its layers one by one: (gemm|conv_transpose) is a .*FSDP"
    ):
        trains_as_alone(world, name, distribute, lambda model, input: model(input), batch=batch)


@check
def refused_modules(world):
    model = ops.LinearGroupNormHardtanh(16, 24, 3, -1.0, 1.0)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="^num_groups must be a multiple of the 2 shards of the channels, .* got 3$"):
        world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    with pytest.raises(TypeError, match=r"^weight of a Conv3d must be a vector, got shape \(4, 2, 3, 3, 3\)$"):
        world.distribute_module(nn.Conv3d(2, 4, 3), world.mesh, tensor_parallel.shard_channels)


@check
def frozen_parameters(world):
    model = modules()["L94"].requires_grad_(False)
    world.distribute_module(model, world.mesh, tensor_parallel.shard_channels)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@check(name=["L94", "L75", "L30", "L19", "composed"])
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
