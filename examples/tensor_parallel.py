"""Two processes train one module, each with half of its channels, as one process would, without a GPU."""

import os
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.tensor import DTensor, Replicate, distribute_module, init_device_mesh

import ops


def last_loss(distribute=lambda model: model, as_input=lambda input: input) -> torch.Tensor:
    torch.manual_seed(0)
    model = distribute(ops.LinearHardtanhMishGroupNorm(64, 128, bias_shape=(128,), num_groups=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        loss = (model(as_input(torch.randn(32, 64))) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def run(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    shard = ops.tensor_parallel.shard_channels
    as_input = lambda input: DTensor.from_local(input, mesh, [Replicate()])  # noqa: E731
    loss = last_loss(lambda model: distribute_module(model, mesh, shard), as_input)
    print(f"process {rank} of two: loss {loss.full_tensor():.6f}\n", end="", flush=True)
    distributed.barrier()  # neither closes its connections while the other still reads
    os._exit(0)  # at Python's own end, gloo's threads may still free tensors, which aborts now and then


if __name__ == "__main__":
    print(f"one process: loss {last_loss():.6f}")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=2)
