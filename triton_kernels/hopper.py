"""Where the kernels written in Gluon for Hopper run."""

import torch
from triton.experimental.gluon.language.nvidia.hopper import tma

from triton_kernels.device import INTERPRETED, architecture

#: Triton 3.9 gives the copies other names; there the portable kernels run.
_HAS_COPIES = hasattr(tma, "async_copy_global_to_shared")


def runs_hopper_kernels(device: torch.device) -> bool:
    """Compute capability 9.0, kernels that are compiled, not interpreted, and a Triton that has what they call."""
    return not INTERPRETED and _HAS_COPIES and architecture(device) == 90
