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
#: products: 0.40 of cuBLAS's time in the mean and 1.08 at most; below, up to 9 times.) Where the kernel divides the
#: depth, from so many terms on, fewer results suffice.
FEWEST_FLOAT32_COLUMNS, FEWEST_FLOAT32_RESULTS = (0, 0) if INTERPRETED else (256, 3 * 2**18)
SHALLOWEST_DIVIDED, FEWEST_DIVIDED_RESULTS = 2048, 2**19
#: So few rows and columns, too, of so many multiplications. (H200: 0.56 of cuBLAS's time at 196 x 384 x 24576, 0.58 at
#: 512 x 512 x 8192, where registers take 0.71 and 0.76; 0.90 at 768 x 196 x 8192; 1.01 at 128 x 512 x 24576.)
NARROWEST_DIVIDED, WIDEST_OF_NARROW, FEWEST_DIVIDED_PRODUCTS = 192, 1024, 2**30

#: With the weight split in registers: so many rows, columns and terms, and so many weights.
FEWEST_ROWS, MANY_ROWS, FEWEST_COLUMNS, FEWEST_WEIGHTS = 16, 512, 512, 2**22
#: Other products: rows of the smaller operand and of the larger one, terms, results and multiplications.
FEWEST_LINES, FEWEST_OF_LARGER, FEWEST_TERMS, FEWEST_RESULTS, FEWEST_PRODUCTS = 32, 128, 32, 2**18, 2**29


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


def float32_by_cublas(M: int, N: int, K: int, divides: bool = False) -> bool:
    """Whether operands of a float32 product [M, K] @ [N, K].T are not both split, in any precision: it has few rows,
    columns, results or terms. cuBLAS computes it, or ``float32_in_registers``. ``divides``: the kernel may divide K
    among multiprocessors (``LinearSplitConfig``)."""
    are_narrow = NARROWEST_DIVIDED <= min(M, N) and max(M, N) <= WIDEST_OF_NARROW
    if divides and are_narrow and M * N * K >= FEWEST_DIVIDED_PRODUCTS:
        return False
    results = FEWEST_FLOAT32_RESULTS
    if divides and K >= SHALLOWEST_DIVIDED:
        results = min(results, FEWEST_DIVIDED_RESULTS)
    is_small = M < FEWEST_FLOAT32_ROWS or N < FEWEST_FLOAT32_COLUMNS or M * N < results
    return is_small or K < SHALLOWEST_FLOAT32


def float32_in_registers(B: int, M: int, N: int, K: int, is_shared: bool = False) -> bool:
    """Whether float32 products of B matrices [M, K] @ [N, K].T are faster than cuBLAS's with an operand split in
    registers. ``is_shared``: one operand is the same in all.

    Of few rows and many weights it does not depend on the number of rows. (H100: 0.36 to 0.98 of cuBLAS's time; the
    others 0.36 to 0.95, up to 2.4 where this says no.) Narrow products of batches may be attention's: of sharp
    softmaxes some results are computed twice. (The least of these products, 96 of 512 x 64 x 512, takes 0.65 of
    cuBLAS's time, of a sharp softmax 0.75; H200.)
    """
    if B == 1 and FEWEST_ROWS <= M < MANY_ROWS and min(N, K) >= FEWEST_COLUMNS and N * K >= FEWEST_WEIGHTS:
        return True
    smaller, larger = sorted((M, N))
    if smaller < FEWEST_LINES or larger < FEWEST_OF_LARGER or K < FEWEST_TERMS or B * M * N < FEWEST_RESULTS:
        return False
    if N % 4 and K < 512:  # TMA cannot store the results, which takes longer than to compute them
        return False
    may_be_sharp = B > 1 and not is_shared and smaller < 128 and K < 2048
    return B * M * N * K >= (3 * FEWEST_PRODUCTS if may_be_sharp else FEWEST_PRODUCTS)


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
