"""What the tests of offline compilation share."""

import pytest
import torch

from autotune_configs.gpus import Gpu
from autotune_configs.kernels import kernel_of
from autotune_configs.problem import Problem
from triton_kernels.group_norm import GroupNormConfig
from triton_kernels.versions import VERSION

META = torch.device("meta")
#: Those of which a GPU was measured or is common, then the others: ``make matrix`` alone compiles for these.
ARCHITECTURES = (80, 90, *(pytest.param(each, marks=pytest.mark.further) for each in (100, 120)))
by_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
#: Of Ampere and later, Hopper, and Blackwell's data center GPUs.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def more_spills(arch: int) -> int:
    """Bytes a thread that may be spilled beyond what a test allows with the Triton that tiles were chosen with.

    3.8 and 3.9 spill up to 64 more. For sm_120, 3.6 leaves some bytes on the stack where 3.7 leaves none.
    """
    return 64 if VERSION > (3, 7) or (VERSION < (3, 7) and arch == 120) else 0


def norm_configs(dtype: torch.dtype, *sizes: int) -> list[GroupNormConfig]:
    """The heuristic's configs of a norm's kernels, forward and backward, for a problem of these sizes."""
    names = "group_norm", "group_norm_backward"
    problems = [Problem(name, str(dtype).removeprefix("torch."), sizes) for name in names]
    return [kernel_of(each.kernel).heuristic(each, Gpu.of(META)) for each in problems]
