"""What the tests of offline compilation share."""

import torch

META = torch.device("meta")
ARCHITECTURES = (80, 90, 100, 120)
#: Of Ampere and later, Hopper, and Blackwell's data center GPUs.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
