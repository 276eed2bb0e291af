"""Modules in a process group of one process (the fixture ``process_group``)."""

from torch import nn


def distributed_data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS = [distributed_data_parallel, fully_sharded]
