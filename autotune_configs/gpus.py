"""What a config depends on in a GPU."""

import functools
from dataclasses import dataclass

import torch

from autotune_configs.prediction import library_is_faster
from triton_kernels.device import (
    SHARED_MEMORY,
    architecture,
    device_name,
    multiprocessor_count,
    shared_memory_limit,
)
from triton_kernels.hopper import takes_hopper_convolutions, takes_hopper_kernels


@dataclass(frozen=True)
class Gpu:
    """A GPU's name as its driver gives it, compute capability (90 for 9.0), multiprocessors, and the bytes of shared
    memory that one program may use."""

    name: str
    architecture: int
    multiprocessors: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU of a tensor; for tensors without one (interpreter, offline compilation) what stands in for it."""
        return _of_cuda(device.index) if device.type == "cuda" else _of_other(device)

    @classmethod
    def called(cls, name: str) -> "Gpu":
        """A GPU that need not be here, by its driver's name for it; ValueError for one that is not listed."""
        for known, (arch, multiprocessors) in _KNOWN.items():
            if known.lower() == name.lower():
                return cls(known, arch, multiprocessors, SHARED_MEMORY[arch])
        raise ValueError(f"unknown GPU {name!r}: it must be one of {', '.join(map(repr, _KNOWN))}")

    @property
    def splits_float32(self) -> bool:
        """Whether float32 is multiplied as float16 parts (``triton_kernels.float32_split``): that looks nothing up."""
        return takes_hopper_kernels(self.architecture)

    @property
    def lacks_hopper_convolutions(self) -> bool:
        """Whether this is a Hopper GPU whose convolutions the installed Triton cannot compile."""
        return takes_hopper_kernels(self.architecture) and not takes_hopper_convolutions(self.architecture)

    def library_multiplies(self, M: int, N: int, K: int) -> bool:
        """Whether [M, K] @ [N, K].T in 16 bits is better left to the library, with all else in a pass over its result.

        No table has a say in it: sweeps time the kernels alone.
        """
        return takes_hopper_kernels(self.architecture) and library_is_faster(M, N, K, self.multiprocessors)

    @property
    def file_name(self) -> str:
        """What a file about this GPU is called, without an ending."""
        return self.name.lower().replace(" ", "_").replace("/", "_")


#: Architecture and multiprocessors (NVIDIA's data sheets), for what is asked about a GPU that is not here.
_KNOWN = {
    "NVIDIA A100-SXM4-40GB": (80, 108),
    "NVIDIA A100-SXM4-80GB": (80, 108),
    "NVIDIA A100 80GB PCIe": (80, 108),
    "NVIDIA GeForce RTX 3090": (86, 82),
    "NVIDIA GeForce RTX 4090": (89, 128),
    "NVIDIA L4": (89, 58),
    "NVIDIA L40S": (89, 142),
    "NVIDIA H100 80GB HBM3": (90, 132),
    "NVIDIA H100 PCIe": (90, 114),
    "NVIDIA H200": (90, 132),
    "NVIDIA B200": (100, 148),
    "NVIDIA GeForce RTX 5090": (120, 170),
}


def _of_other(device: torch.device) -> Gpu:
    return Gpu(device_name(device), architecture(device), multiprocessor_count(device), shared_memory_limit(device))


@functools.cache
def _of_cuda(index: int) -> Gpu:
    return _of_other(torch.device("cuda", index))
