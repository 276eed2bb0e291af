"""What the tests of offline compilation share."""

import torch

from triton_kernels.versions import VERSION

META = torch.device("meta")
ARCHITECTURES = (80, 90, 100, 120)
#: Of Ampere and later, Hopper, and Blackwell's data center GPUs.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def more_spills(arch: int) -> int:
    """Bytes a thread that may be spilled beyond what a test allows with the Triton that tiles were chosen with.

    3.8 and 3.9 spill up to 64 more. For sm_120, 3.6 leaves some bytes on the stack where 3.7 leaves none.
    """
    return 64 if VERSION > (3, 7) or (VERSION < (3, 7) and arch == 120) else 0
