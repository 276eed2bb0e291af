"""What the tests on a GPU share."""

import pytest
import torch

from tests.chains import make_arguments

DEVICE = "cuda"
MARKS = [
    pytest.mark.gpu,
    # cuBLAS's note on its workspace, and operations of the plain chains; ours are deterministic without the mode.
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


def arguments_of(chain, problem, dtype, **options):
    return make_arguments(chain, problem, dtype, device=DEVICE, **options)


def assert_same_bits(results, expected):
    for name in expected:
        assert not results[name].isnan().any(), name
        assert torch.equal(results[name], expected[name]), name
