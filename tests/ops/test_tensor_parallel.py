"""Promise: given DTensors, each function and module computes on its shards what one process computes on the whole.

The checks run in processes of their own, two (for a mesh of two dimensions, four) started once for all of them; each
process writes what failed there. On the CPU the processes talk through gloo and a file: there is no port to clash.
"""

import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from ops import tensor_parallel
from tests.ops import sharded_family, sharded_functions, sharded_modules  # noqa: F401  (registers the checks)
from tests.ops.shards import CHECKS, World

ROOT = Path(__file__).parents[2]
#: For all of a process's checks, and for one rank's wait for another; on a GPU all kernels are compiled first.
TIMEOUT_SECONDS = {"cpu": (240, 60), "cuda": (1200, 300)}


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
