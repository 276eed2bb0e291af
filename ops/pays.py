"""What runs a chain fastest: a call of this project's, PyTorch's layers, or a compiler. One place decides, by bytes,
launches and the host's time."""

from typing import Any

import torch

from ops import convolution, direct_convolution, precision
from ops.graph_nodes import CONVOLUTIONS, example, is_computed_on_the_way
from ops.growth import Growth, size_of

#: What an elementwise kernel of eager PyTorch moves in a second (an H200; two thirds of its memory's bandwidth).
BYTES_PER_SECOND = 4e12
#: What its launch takes beside that, in seconds.
LAUNCH = 5e-6
#: How much longer the host takes for a captured call with a chain than for its layers, in seconds. Of 48 us, 41 are the
#: guards of Dynamo (an H200's host, torch 2.11: Linear, LayerNorm and GELU of 16 x 256).
CAPTURED_CALL = 48e-6
#: The same with its backward pass: the least that a chain took in layers of BERT (260 us), ViT-B (370) and ConvNeXt
#: (630) under autocast, on the same host.
CAPTURED_STEP = 260e-6


def reason_for_pytorch(moved: float, launches: int, host: float = CAPTURED_CALL) -> str:
    """Why a chain is left to PyTorch's layers, in words; "" where a fused call is faster on the wall.

    Args:
        moved: The bytes that the layers move and the call does not.
        launches: The kernels that they launch and it does not.
        host: How much longer it takes the host, in seconds.
    """
    saved = moved / BYTES_PER_SECOND + launches * LAUNCH
    if saved > host:
        return ""
    return (
        f"left to PyTorch: {moved / 1e6:.1f} MB and {launches} launches would be saved, some {saved * 1e6:.0f} us, "
        f"and the call takes the host {host * 1e6:.0f} us more"
    )


def reason_for_compiler(chain: Growth) -> str:
    """Why a chain is left to a compiler, in words; "" where it is not."""
    if chain.contraction and not stays_closed(chain.contraction, chain.given):
        return "left to the compiler: a norm of images behind PyTorch's convolution is faster than both as one call"
    if not _is_computed_either_way(chain):
        return ""
    moved = sum(map(size_of, (example(chain.start), example(chain.given.get("weight")), example(chain.value))))
    return f"left to the compiler: {moved / 1e6:.1f} MB would be moved either way"


def stays_closed(contraction: str, given: dict[str, Any]) -> bool:
    """Whether a contraction of ours wins more than an open norm behind PyTorch's: convolutions that are transposed."""
    if contraction == "linear":
        return True
    values = example(given["input"]), example(given["weight"])
    if contraction == "conv2d" or not all(isinstance(each, torch.Tensor) and each.ndim == 4 for each in values):
        return False
    try:
        sizes = dict(zip(convolution.DEFAULTS, convolution.in_order(contraction, values[1], given), strict=True))
        geometry = convolution.check(True, *values, **sizes)
    except (TypeError, ValueError):
        return False
    return direct_convolution.takes(*values, geometry, precision.convolutions_allow_tf32())


def _is_computed_either_way(chain: Growth) -> bool:
    """Whether a compiler computes it together with all that uses its result, or a layer norm with what it is of, such
    as the sum with a residual (4% of ViT-B's training under autocast, H100); and in 16 bits each layer norm, in whose
    kernel for rows as few bytes are moved.

    That saves nothing behind a product, which is one kernel with what follows here. In 16 bits cuBLAS's is faster by
    some percent, which a function without exponentials or polynomials does not outweigh.
    """
    if chain.opens:
        return False
    start, is_on_the_way = example(chain.start), all(map(is_computed_on_the_way, chain.value.users))
    if chain.contraction == "linear":
        terms = sum([step.pointwise.terms for step in chain.steps])
        return is_on_the_way and not chain.norm and terms == 0 and start.dtype.itemsize == 2
    if is_on_the_way or chain.contraction or not chain.norm or chain.norm[0] != "layer_norm":
        return is_on_the_way
    follows = chain.start.target in CONVOLUTIONS or is_computed_on_the_way(chain.start)
    return example(chain.norm[1]["input"]).dtype.itemsize == 2 or follows
