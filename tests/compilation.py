"""What the tests of offline compilation share."""

import torch

from triton_kernels.versions import VERSION

META = torch.device("meta")
ARCHITECTURES = (80, 90, 100, 120)
#: Of Ampere and later, Hopper, and Blackwell's data center GPUs.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
#: Bytes a thread that may be spilled beyond what a test allows, with a Triton newer than those that tiles were chosen
#: with: 3.8 and 3.9 spill up to 64.
MORE_SPILLS = 64 if VERSION > (3, 7) else 0
