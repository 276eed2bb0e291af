"""Arguments of chains that begin with a convolution, and what all of their tests need."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import ops
from ops import pointwise as p
from tests.chains import L19, Chain, Problem, biased, make_arguments

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


@dataclass(frozen=True)
class Conv2d(Chain):
    """``conv2d_group_norm`` between steps, which ``plain`` has too. Its arguments are L19's, with the weight turned."""

    before: tuple = ()
    after: tuple = ()
    has_images = True

    @property
    def function(self):
        return functools.partial(ops.conv2d_group_norm, before=self.before, after=self.after)

    def arguments(self, problem, dtype=torch.float32, *, geometry=None, format=None, **options):
        arguments = {**make_arguments(L19, problem, dtype, **options), **(geometry or {})}
        by_group = arguments["weight"].unflatten(0, (problem.conv_groups, -1))
        arguments["weight"] = by_group.transpose(1, 2).flatten(0, 1).contiguous()
        arguments["input"] = arguments["input"].contiguous(memory_format=format or torch.contiguous_format)
        return arguments


def _plain_conv2d(first, last):
    def plain(input, weight, conv_bias, num_groups, norm_weight=None, norm_bias=None, **geometry):
        norm_weight = torch.ones_like(norm_bias) if norm_weight is None and norm_bias is not None else norm_weight
        z = first(biased(F.conv2d(input, weight, **geometry), conv_bias))
        return last(torch.group_norm(z, num_groups, norm_weight, norm_bias))

    return plain


_NAMES = {"vectors": L19.vectors}
CONV2D_SILU = Conv2d("conv2d_group_norm", _plain_conv2d(torch.clone, F.silu), **_NAMES, after=(p.silu(),))
CONV2D_GELU = Conv2d("conv2d_group_norm", _plain_conv2d(F.gelu, torch.clone), **_NAMES, before=(p.gelu(),))
