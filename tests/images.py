"""Arguments of L19, and what all of its tests need."""

import pytest
import torch

from tests.chains import L19, Problem, make_arguments

PROBLEM = Problem(rows=4, depth=6, groups=3, group_size=4, pixels=(5, 7))
#: What a call may say of its geometry.
GEOMETRIES = (
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": (1, 2), "dilation": (2, 1), "padding": (0, 2), "approximate": "tanh"},
    {"stride": 3, "dilation": 2, "output_padding": (2, 0)},
)
# Of oneDNN's setting for another maker's GPUs, which is set along.
MARK = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


def without_onednn():
    """An autouse fixture of each file: oneDNN's bfloat16 gradients of weights hold memory never written to, for some
    results one pixel wide (torch 2.13)."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def arguments_of(problem=PROBLEM, dtype=torch.float32, *, geometry=None, **options):
    return {**make_arguments(L19, problem, dtype, **options), **(geometry or {})}


def in_format(arguments, format):
    """The same arguments with the input in this memory format."""
    return {**arguments, "input": arguments["input"].contiguous(memory_format=format)}


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """``nearest_tf32`` of a small float32 tensor of any shape, in PyTorch."""
    rounded = torch.bitwise_and(tensor.view(torch.int32) + 0x1000, -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor + tensor)
