"""What a config depends on in a GPU."""

import re
from dataclasses import dataclass

import torch

from autotune_configs.prediction import cublas_is_faster
from triton_kernels.device import (
    INTERPRETED,
    SHARED_MEMORY,
    architecture,
    device_name,
    multiprocessor_count,
    shared_memory_limit,
)
from triton_kernels.hopper import takes_hopper_kernels

#: The kernel computes float32 products of at least this depth and this many rows. In the interpreter, it computes all.
SHALLOWEST_FLOAT32, FEWEST_FLOAT32_ROWS = (0, 0) if INTERPRETED else (512, 512)
#: And so many columns and results: fewer tiles leave multiprocessors idle, where cuBLAS splits the depth. (H100, 763
#: products: 0.40 of cuBLAS's time in the mean and 1.08 at most; below, up to 9 times.)
FEWEST_FLOAT32_COLUMNS, FEWEST_FLOAT32_RESULTS = (0, 0) if INTERPRETED else (256, 3 * 2**18)

#: With the weight split in registers: so many rows, columns and terms, and so many weights or multiplications.
FEWEST_ROWS, MANY_ROWS, FEWEST_COLUMNS, FEWEST_WEIGHTS, FEWEST_PRODUCTS = 16, 512, 512, 2**22, 2**29


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as configs depend on it.

    ``name`` is the driver's, ``architecture`` the compute capability (90 for 9.0), ``multiprocessors`` their number and
    ``shared_memory`` the bytes that one program may use.
    """

    name: str
    architecture: int
    multiprocessors: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU of a tensor. In the interpreter and in offline compilation, a stand-in."""
        return cls(device_name(device), architecture(device), multiprocessor_count(device), shared_memory_limit(device))

    @classmethod
    def called(cls, name: str) -> "Gpu":
        """A listed GPU, which need not be here, by words of its name in any case and order: "h200", "a100 40gb".

        Where no GPU has these words, parts of a name do. Raises ValueError unless exactly one GPU is meant: two of one
        architecture and size may still differ, as in the speed of their memory.
        """
        words = _words(name)
        if not words:
            raise ValueError(f"no GPU is named by {name!r}")
        meant = [known for known in KNOWN if set(words) <= set(_words(known))]
        meant = meant or [known for known in KNOWN if "".join(words) in "".join(_words(known))]
        if len(meant) != 1:
            problem = "may be any" if meant else "is none"
            raise ValueError(f"{name!r} {problem} of {', '.join(meant or KNOWN)}")
        arch, multiprocessors = KNOWN[meant[0]]
        return cls(meant[0], arch, multiprocessors, SHARED_MEMORY[arch])

    @property
    def splits_float32(self) -> bool:
        """Whether float32 operands are split into float16 ones (``triton_kernels.float32_split``).

        Those kernels have fixed configs.
        """
        return takes_hopper_kernels(self.architecture)

    def prefers_cublas(self, M: int, N: int, K: int) -> bool:
        """Whether cuBLAS computes [M, K] @ [N, K].T in 16 bits, and a second kernel the rest of the chain.

        Tables do not decide this: sweeps only time the kernels.
        """
        return takes_hopper_kernels(self.architecture) and cublas_is_faster(M, N, K, self.multiprocessors)

    @property
    def file_name(self) -> str:
        return self.name.lower().replace(" ", "_").replace("/", "_")


def float32_by_cublas(M: int, N: int, K: int) -> bool:
    """Whether operands of a float32 product [M, K] @ [N, K].T are not both split, in any precision: it has few rows,
    columns, results or terms. cuBLAS computes it, or ``float32_in_registers``."""
    is_small = M < FEWEST_FLOAT32_ROWS or N < FEWEST_FLOAT32_COLUMNS or M * N < FEWEST_FLOAT32_RESULTS
    return is_small or K < SHALLOWEST_FLOAT32


def float32_in_registers(M: int, N: int, K: int) -> bool:
    """Whether a float32 product [M, K] @ [N, K].T of few rows is faster than cuBLAS's with the weight split in
    registers. (H100: 0.36 to 0.99 of its time; smaller ones up to 2.1.)"""
    is_large = N * K >= FEWEST_WEIGHTS or M * N * K >= FEWEST_PRODUCTS
    return FEWEST_ROWS <= M < MANY_ROWS and min(N, K) >= FEWEST_COLUMNS and is_large


def float32_batch_in_registers(B: int, M: int, N: int, K: int) -> bool:
    """Whether float32 products [B, M, K] @ [B, K, N] are faster than cuBLAS's with an operand split in registers."""
    return min(M, N) >= 32 and K >= 32 and B * M * N * K >= 2**30


#: Architecture and multiprocessors by name (NVIDIA's data sheets), for questions about a GPU that is not here.
KNOWN = {
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


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())
