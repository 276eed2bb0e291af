"""What the tests on a GPU share."""

import pytest
import torch

from tests.chains import make_arguments
from triton_kernels.hopper import runs_hopper_kernels

DEVICE = "cuda"
MARKS = [
    pytest.mark.gpu,
    # cuBLAS's note on its workspace, and operations of the plain chains; ours are deterministic without the mode.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
FORMATS = (torch.contiguous_format, torch.channels_last)
RUNS_HOPPER_KERNELS = torch.cuda.is_available() and runs_hopper_kernels(torch.device(DEVICE, 0))

by_format = pytest.mark.parametrize("format", FORMATS, ids=str)
on_hopper = pytest.mark.skipif(not RUNS_HOPPER_KERNELS, reason="needs compute capability 9.0")


def arguments_of(chain, problem, dtype, **options):
    return make_arguments(chain, problem, dtype, device=DEVICE, **options)


def assert_same_bits(results, expected):
    for name in expected:
        assert not results[name].isnan().any(), name
        assert torch.equal(results[name], expected[name]), name
