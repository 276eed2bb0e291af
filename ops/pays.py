"""What runs a chain fastest: a call of this project's, PyTorch's layers, or a compiler. One place decides, by bytes,
launches and the host's time."""

from typing import Any

import torch
from torch.fx import Node

from ops import convolution, direct_convolution, precision
from ops.graph_nodes import CONVOLUTIONS, NORMS, bound, example, has_shape, is_computed_on_the_way
from ops.growth import Growth, size_of
from ops.pointwise import Step

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
#: How much longer the host takes for a product with what follows than for what Inductor makes of it (DiT-XL's, H200).
DIRECT_CALL = 9e-6


def reason_for_pytorch(moved: float, launches: int, host: float = CAPTURED_CALL, others: str = "PyTorch") -> str:
    """Why a chain is left to PyTorch's layers, or to ``others``, in words; "" where a call is faster on the wall.

    Args:
        moved: The bytes that the layers move and the call does not.
        launches: The kernels that they launch and it does not.
        host: How much longer it takes the host, in seconds.
        others: What runs the chain without a call.
    """
    saved = moved / BYTES_PER_SECOND + launches * LAUNCH
    if saved > host:
        return ""
    return (
        f"left to {others}: {moved / 1e6:.1f} MB {f'and {launches} launches ' if launches else ''}would be saved, some "
        f"{saved * 1e6:.0f} us, and the call takes the host {host * 1e6:.0f} us more"
    )


def reason_for_compiler(chain: Growth, replays: bool = False) -> str:
    """Why a chain is left to a compiler, in words; "" where it is not. ``replays``: whether a CUDA graph runs the call,
    which takes no time of the host's then."""
    if chain.contraction and not stays_closed(chain.contraction, chain.given):
        return "left to the compiler: a norm of images behind PyTorch's convolution is faster than both as one call"
    if kept := _kept_beside_sum(chain):
        return f"left to the compiler, which keeps {kept / 1e6:.1f} MB less for the backward pass"
    start, value = example(chain.start), example(chain.value)
    is_product = chain.contraction == "linear" and not chain.norm and start.dtype.itemsize == 2
    # In training, a product's backward pass is one kernel less.
    is_inferred = is_product and value.is_cuda and not (value.requires_grad or replays)
    if _is_computed_either_way(chain) or (is_inferred and _has_pass_of_its_own(chain)):
        moved = sum(map(size_of, (start, example(chain.given.get("weight")), value)))
        return f"left to the compiler: {moved / 1e6:.1f} MB would be moved either way"
    return reason_for_pytorch(chain.saved[0], 0, DIRECT_CALL, "the compiler") if is_inferred else ""


def _kept_beside_sum(chain: Growth) -> float:
    """The bytes that a call keeps for the backward pass and a compiler does not, before a layer norm of nothing but a
    sum in which a term has 16 bits: a call keeps all terms, a compiler the sum. (A BERT under autocast kept 1.07 times
    what it keeps with Inductor, in 0.91 of the time for 0.93, H200.)
    """
    if not chain.norm or chain.norm[0] != "layer_norm" or not example(chain.value).requires_grad:
        return 0.0
    if not all(map(_is_linear, chain.before)):
        return 0.0  # the gradient of another function needs what it is of
    shape = example(chain.start).shape
    terms = dict.fromkeys([chain.start, *(each.operand for each in chain.before if has_shape(each.operand, shape))])
    if all(map(_is_wide, terms)):
        return 0.0
    sizes = {each: size_of(example(each)) for each in terms}
    kept = sum([sizes[each] for each in terms if not _is_kept_anyway(each, chain)])
    return max(kept - max(sizes.values()), 0.0)


def _is_wide(term: Node) -> bool:
    return example(term).dtype.itemsize > 2


def _is_kept_anyway(term: Node, chain: Growth) -> bool:
    """Whether a term is there in the backward pass without a call that keeps it: an input of the graph, or a term of 16
    bits that something else reads. Of a wider one, layers under autocast keep a cast, but norms keep it."""
    if term.op in ("placeholder", "get_attr"):
        return True
    others = [user for user in term.users if user not in chain.nodes]
    if _is_wide(term):
        return any(bound(user)[0] in NORMS for user in others)
    return len(others) > 0 or (chain.contraction != "" and term in chain.given.values())


def _is_linear(step: Step) -> bool:
    """Whether it adds or subtracts something, or multiplies by a number."""
    function = step.pointwise
    return function.name in ("add", "sub") or (function.name in ("mul", "div") and function.operand == "numbers")


def _has_pass_of_its_own(chain: Growth) -> bool:
    """Whether what follows a product is in no kernel with it: in 16 bits cuBLAS computes some."""
    values = [example(each) for each in (chain.given["input"], chain.given["weight"], chain.given.get("bias"))]
    shapes = [each.shape for each in values if each is not None]
    if not all(type(size) is int for shape in shapes for size in shape):
        return False
    input, weight, bias = values
    return precision.multiplies_by_cublas(input.flatten(0, -2), len(weight), bias)


def stays_closed(contraction: str, given: dict[str, Any]) -> bool:
    """Whether a contraction of ours wins more than an open norm behind PyTorch's: convolutions that are transposed."""
    if contraction == "linear":
        return True
    values = example(given["input"]), example(given["weight"])
    if contraction == "conv2d" or not all(isinstance(each, torch.Tensor) and each.ndim == 4 for each in values):
        return False
    if precision.why_no_kernels(values[0]):
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
