"""The ways to run a model: as written, fused, and compiled by Inductor and by this project's backend."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench.schema import GRAPHS

#: Since when Inductor itself decomposes group norm as ``DECOMPOSITIONS`` do.
_KEEPS_MEMORY_FORMAT = (2, 15)


def prepare(way: str, model: nn.Module, device: torch.device) -> Callable:
    """What runs the model this way. ``fuse`` changes it in place."""
    if way == "eager":
        return model
    if way == "fuse":
        import ops

        ops.fuse(model)
        return model
    compiler = way.removesuffix(GRAPHS)
    mode = "reduce-overhead" if way.endswith(GRAPHS) and device.type == "cuda" else None
    return torch.compile(model, backend=_backend(compiler, device.type == "cuda"), mode=mode)


def _backend(compiler: str, on_gpu: bool) -> Any:
    if compiler == "normfuse":
        from ops.backend import normfuse

        return normfuse
    if on_gpu:
        return _inductor_2_15 if compiler == "inductor-2.15" else compiler
    from torch._dynamo.backends.common import aot_autograd

    return (
        aot_autograd(fw_compiler=_as_it_is, decompositions=DECOMPOSITIONS)
        if compiler == "inductor-2.15"
        else "aot_eager"
    )


def _as_it_is(module: torch.fx.GraphModule, inputs: Any) -> Callable:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(module.forward)


@contextmanager
def without_cpp_compiler() -> Iterator[None]:
    """Within it, PyTorch's "aot_eager" stands for Inductor behind this project's backend, as it does on a CPU in the
    other ways: Inductor would need a C++ compiler there."""
    import torch._inductor

    aot_eager: Any = torch._dynamo.lookup_backend("aot_eager")
    with mock.patch.object(torch._inductor, "compile", lambda module, inputs, options=None: aot_eager(module, inputs)):
        yield


class Taken(logging.Handler):
    """What this project's backend takes over, of all that is compiled while it listens: chains and open norms."""

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[str] = []
        self.open_norms: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "in the place of" in record.msg and isinstance(record.args, tuple):
            opened, text = map(str, record.args[:2])
            (self.open_norms if opened else self.chains).append(text)


@contextmanager
def listening() -> Iterator[Taken]:
    """What the backend takes over within it."""
    log, taken = logging.getLogger("ops.backend"), Taken()
    level, propagates = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(taken)
    try:
        yield taken
    finally:
        log.removeHandler(taken)
        log.setLevel(level)
        log.propagate = propagates


# Inductor as of torch 2.15


def has_newer_inductor() -> bool:
    """Whether the installed Inductor keeps an image's memory format in a group norm by itself."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= _KEEPS_MEMORY_FORMAT


def _inductor_2_15(module: torch.fx.GraphModule, inputs: list) -> Callable:
    """Inductor, with group norm decomposed so that images keep their memory format.

    AOTAutograd's cache is off: its key does not hold the decompositions.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(module, inputs, decompositions={**select_decomp_table(), **DECOMPOSITIONS})
        return compiled


def _precise(tensor: Tensor | None) -> Any:
    """In float32 or float64, in which sums are taken."""
    is_half = tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if tensor is not None and is_half else tensor


def _to_pixels(vector: Tensor, image: Tensor) -> Tensor:
    """Values for each sample and channel, to be broadcast over an image's pixels."""
    return vector.reshape(*vector.shape, *[1] * (image.ndim - 2))


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.native_group_norm``: a scale and a shift for each sample and channel, in the image's memory format."""
    image, weight, bias = _precise(input), _precise(weight), _precise(bias)
    by_group = image.unflatten(1, (group, C // group))
    variance, mean = torch.var_mean(by_group, dim=list(range(2, by_group.ndim)), correction=0)
    rstd = torch.rsqrt(variance + eps)
    scale = _by_channel(rstd, C) if weight is None else _by_channel(rstd, C) * weight
    shift = -_by_channel(mean, C) * scale
    if bias is not None:
        shift = shift + bias
    result = image * _to_pixels(scale, image) + _to_pixels(shift, image)
    return result.to(input.dtype), mean, rstd


def _by_channel(of_groups: Tensor, channels: int) -> Tensor:
    samples, groups = of_groups.shape
    return of_groups.unsqueeze(-1).expand(samples, groups, channels // groups).reshape(samples, channels)


def _group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.native_group_norm_backward``: two sums for each sample and channel, then three factors of each pixel."""
    image, gradient = _precise(input), _precise(grad_out)
    pixels = list(range(2, image.ndim))
    product_sums, sums = (each.sum(pixels) if pixels else each for each in (gradient * image, gradient))
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        factor = _precise(weight) if weight is not None else torch.ones_like(sums[0])
        of_products, of_sums = ((each * factor).unflatten(1, (group, -1)).sum(2) for each in (product_sums, sums))
        slope = (of_sums * mean - of_products) * rstd * rstd * rstd / (HxW * (C // group))
        constant = -slope * mean - of_sums * rstd / (HxW * (C // group))
        factors = _by_channel(rstd, C) * factor, _by_channel(slope, C), _by_channel(constant, C)
        scale, slope, constant = (_to_pixels(each, image) for each in factors)
        of_input = (gradient * scale + image * slope + constant).to(input.dtype)
    if output_mask[1] and weight is not None:
        of_weight = ((product_sums - sums * _by_channel(mean, C)) * _by_channel(rstd, C)).sum(0).to(weight.dtype)
    if output_mask[2]:
        of_bias = sums.sum(0).to(input.dtype if weight is None else weight.dtype)
    return of_input, of_weight, of_bias


DECOMPOSITIONS: dict[Any, Callable] = {
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
}
