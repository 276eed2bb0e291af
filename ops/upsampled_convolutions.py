"""Convolutions of upsampled images in compiled graphs, as transposed convolutions of the images before.

Where ``F.interpolate`` repeats each pixel twice along each axis, an output's 3 x 3 taps read 2 x 2 pixels. So the taps
that read one pixel are added up before, 16 of 36 products remain, and the upsampled image is never written::

    conv2d(upsampled(x), w, b, padding=1) = conv_transpose2d(x, taps, b, stride=2, padding=1)
    taps = sums over the windows of 2 x 2 of w, padded with zeros, turned by 180 degrees

They are added up in float32 and rounded once, under autocast where the weight would be. The convolution is PyTorch's,
forward and backward.

In bfloat16 a VAE decoder of random weights is as far from float32 as with Inductor, 1.10e-2 for 1.10e-2; with this
project's norms and without this it is 1.06e-2. (To take what rounding adds to a tap from the next one makes that worse
where neighbouring pixels differ: 2.8e-3 for 2.3e-3 at white noise.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, Node

from ops import interpolation, precision
from ops.fingerprint import check, fingerprint
from ops.graph_nodes import REFUSAL, Surroundings, bound, example
from ops.graph_writer import Writer

Tensor = torch.Tensor
#: Below these adding up the taps takes longer than is won: pixels of all images before, channels of each.
_FEWEST_PIXELS, _FEWEST_CHANNELS = 2048, 64


class _Taps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return _taps(weight)

    @staticmethod
    def backward(ctx, gradient):
        turned = _wide(gradient).transpose(0, 1).flip(2, 3)
        rows = turned[:, :, :3] + turned[:, :, 1:]
        result = (rows[..., :3] + rows[..., 1:]).to(gradient.dtype)
        return result.contiguous(memory_format=suggest_memory_format(gradient))


def _taps(weight: Tensor) -> Tensor:
    """The weight [O, C, 3, 3] as [C, O, 4, 4], of the same dtype and memory format."""
    turned = _wide(weight).transpose(0, 1).flip(2, 3)
    rows = F.pad(turned, [0, 0, 0, 1]) + F.pad(turned, [0, 0, 1, 0])
    result = (F.pad(rows, [0, 1]) + F.pad(rows, [1, 0])).to(weight.dtype)
    return result.contiguous(memory_format=suggest_memory_format(weight))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _call(weight: Tensor, written_by: str) -> Tensor:
    """The operator ``normfuse::taps``."""
    check(written_by)
    return _Taps.apply(weight)


torch.library.define("normfuse::taps", "(Tensor weight, str written_by) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl("normfuse::taps", "CompositeImplicitAutograd", _call)


def rewrite(graph: Graph) -> None:
    """Let each convolution of 3 x 3 taps whose image is an upsampled one, in 16 bits on Hopper, be a transposed
    convolution of the image before where that is faster."""
    for node in list(graph.nodes):
        kind, given = bound(node)
        if kind == "conv2d" and (image := _image(node, given)) and Surroundings(graph).allow((given["input"], node)):
            taps = Writer(graph, node, node).call(torch.ops.normfuse.taps.default, given["weight"], fingerprint([]))
            node.target, node.kwargs = F.conv_transpose2d, {}
            node.args = image, taps, given.get("bias"), 2, 1
            node.meta[REFUSAL] = "left to the compiler, as one of the image before F.interpolate"
            graph.erase_node(given["input"])


def _image(node: Node, given: dict[str, Any]) -> Node | None:
    """What the convolution is computed of; None where it stays."""
    upsampled, weight, result = given["input"], example(given["weight"]), example(node)
    keeps_size = _is_one(given.get("padding", 0)) or given.get("padding") == "same"
    is_plain = keeps_size and all(_is_one(given.get(name, 1)) for name in ("stride", "dilation", "groups"))
    if not (is_plain and isinstance(upsampled, Node) and len(upsampled.users) == 1):
        return None
    image = interpolation.doubled(upsampled)
    if image is None or example(image).ndim != 4:
        return None
    samples, channels, height, width = example(image).shape
    if any(type(size) is not int for size in (channels, *weight.shape)) or weight.shape[2:] != (3, 3):
        return None
    pixels = height * width * (samples if type(samples) is int else 1)
    is_faster = pixels >= _FEWEST_PIXELS and min(channels, len(weight)) >= _FEWEST_CHANNELS
    return image if is_faster and precision.is_16_bits_on_hopper(result) else None


def _is_one(value: Any) -> bool:
    """Whether PyTorch takes it as 1 along each axis."""
    return value in (1, [1], (1,), [1, 1], (1, 1))
