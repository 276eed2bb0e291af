"""What a chain computes, from its declaration: its tensors, and the function of them by ``ops`` and by PyTorch."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from bench.chains import ROW_MINIMUM, Chain, Part

PRECISIONS = ("highest", "high", "medium")
_EPS = 1e-5

Sizes = tuple[int, ...]
Tensors = Mapping[str, torch.Tensor]
#: A chain as a function of its tensors by name. Its other arguments are bound.
Forward = Callable[[Tensors], torch.Tensor]


@contextmanager
def setting(read: Callable, write: Callable, value: object) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def attribute(owner: object, name: str, value: object) -> AbstractContextManager:
    """A setting that is an attribute, as those of ``torch.backends``."""
    return setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


@dataclass(frozen=True)
class Contraction:
    """What a chain begins with, or nothing."""

    #: The argument name of its bias.
    bias: str
    #: The float32 precisions there are for it, and a context in which PyTorch has one of them.
    precisions: tuple[str, ...]
    with_precision: Callable[[str], AbstractContextManager]
    #: Of the input, and of the weight where there is one, from the sizes.
    shapes: Callable[..., tuple[Sizes, ...]]
    #: PyTorch's function of these and of the bias, with the chain's geometry.
    plain: Callable[..., torch.Tensor]
    #: Of the tensors and the geometry: the product alone, by cuBLAS or cuDNN. Without one, a copy of the input, which
    #: is read and written once.
    bare: Callable[..., torch.Tensor]


def _convolution(function: Callable[..., torch.Tensor], shapes: Callable[..., tuple[Sizes, ...]]) -> Contraction:
    """One of PyTorch's convolutions. cuDNN uses TF32 or does not."""

    def bare(tensors: Tensors, **geometry: int) -> torch.Tensor:
        return function(tensors["input"], tensors["weight"], tensors["conv_bias"], **geometry)

    return Contraction(
        "conv_bias",
        ("highest", "high"),
        lambda precision: attribute(torch.backends.cudnn, "allow_tf32", precision == "high"),
        shapes,
        function,
        bare,
    )


CONTRACTIONS = {
    "linear": Contraction(
        "linear_bias",
        PRECISIONS,
        partial(setting, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        shapes=lambda batch, in_features, channels: ((batch, in_features), (channels, in_features)),
        plain=F.linear,
        bare=lambda tensors: tensors["input"] @ tensors["weight"].T,
    ),
    "conv2d": _convolution(
        F.conv2d,
        lambda batch, in_channels, channels, height, width, kernel: (
            (batch, in_channels, height, width),
            (channels, in_channels, kernel, kernel),
        ),
    ),
    "conv_transpose2d": _convolution(
        F.conv_transpose2d,
        lambda batch, in_channels, channels, height, width, kernel: (
            (batch, in_channels, height, width),
            (in_channels, channels, kernel, kernel),
        ),
    ),
    "": Contraction(
        "",
        ("highest",),
        lambda precision: nullcontext(),
        shapes=lambda *sizes: (sizes,),
        plain=lambda input: input,
        bare=lambda tensors: tensors["input"].clone(),
    ),
}

#: The tensors that steps take, by the name that a composition has for them: random ones, from the value's shape.
OPERANDS: dict[str, Callable[[torch.Size], torch.Tensor]] = {
    "bias": lambda shape: torch.randn(shape[1]),
    "scale": lambda shape: _near_one(shape[1]),
    "residual": torch.randn,
}
#: The tensors of which each sample has its own part.
OF_SAMPLES = ("input", "residual")


def contraction_of(chain: Chain) -> Contraction:
    return CONTRACTIONS[chain.contraction]


def float32_precision(chain: Chain, precision: str | None) -> AbstractContextManager:
    """Within it, PyTorch's setting for the product's float32 precision is this one; None leaves it alone."""
    return contraction_of(chain).with_precision(precision) if precision else nullcontext()


def _uniform(bound: float, *size: int) -> torch.Tensor:
    return (torch.rand(size) * 2 - 1) * bound


def _near_one(size: int) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size)


def draw_tensors(chain: Chain, sizes: Sizes) -> dict[str, torch.Tensor]:
    """The tensors by argument name, random as a fresh model's, but the norm's weight and bias are not 1 and 0."""
    contraction = contraction_of(chain)
    input, *weights = contraction.shapes(*sizes)
    tensors = {"input": torch.randn(input)}
    channels = sizes[2] if weights else sizes[1]
    for weight in weights:
        bound = 1 / math.sqrt(math.prod(weight[1:]))
        tensors |= {"weight": _uniform(bound, *weight), contraction.bias: _uniform(bound, channels)}
    if chain.norm.name:
        tensors |= {"norm_weight": _near_one(channels), "norm_bias": 0.2 * torch.randn(channels)}
    shape = product_shape(chain, tensors)
    for part in chain.parts:
        for name in _names(part):
            tensor = OPERANDS[name](shape)
            tensors[name] = tensor.view(1, -1, 1, 1) if part.name == ROW_MINIMUM else tensor
    return tensors


def _names(part: Part) -> list[str]:
    return [each for each in part.arguments if isinstance(each, str)]


def product_shape(chain: Chain, tensors: Tensors) -> torch.Size:
    return bare_product(chain)({name: tensor.to("meta") for name, tensor in tensors.items()}).shape


def bare_product(chain: Chain) -> Forward:
    return partial(contraction_of(chain).bare, **chain.geometry)


def num_groups(chain: Chain, channels: int) -> int:
    """Groups of the chain's number or size, where that divides the channels, else of the divisor nearest by ratio."""
    wanted = chain.group_size or float(*chain.norm.arguments or [1])
    divisors = [size for size in range(1, channels + 1) if channels % size == 0]
    found = min(divisors, key=lambda size: abs(math.log(size / wanted)))
    return channels // found if chain.group_size else found


def by_ops(chain: Chain, groups: int) -> Forward:
    """The chain by its function of ``ops``. As triton is imported, it reads whether it is to interpret."""
    import ops

    function = getattr(ops, chain.function or "_".join(filter(None, (chain.contraction, chain.norm.name))))
    of_groups = {"num_groups": groups} if chain.norm.name == "group_norm" else {}
    if chain.function:
        steps = (part for parts in chain.steps for part in parts if not _names(part))
        options = of_groups | {name: value for part in steps for name, value in _by_name(part).items()}
        return lambda tensors: function(**tensors, **options)
    first = ["weight", contraction_of(chain).bias] if chain.contraction else []
    last = ["norm_weight", "norm_bias"] if chain.norm.name else []
    geometry = chain.geometry
    before, after = ([(_step_function(part), part.arguments) for part in parts] for parts in chain.steps)

    def forward(tensors):
        steps = {
            where: tuple([step(*[tensors.get(each, each) for each in arguments]) for step, arguments in parts])
            for where, parts in (("before", before), ("after", after))
            if parts
        }
        of_first, of_last = ([tensors[name] for name in names] for names in (first, last))
        return function(tensors["input"], *of_first, *of_groups.values(), *of_last, **steps, **geometry)

    return forward


def _step_function(part: Part) -> Callable[..., Any]:
    from ops import pointwise

    return getattr(pointwise, part.name)


def _by_name(part: Part) -> dict[str, Any]:
    return inspect.signature(_step_function(part)).bind(*part.arguments).arguments


def jumps(part: Part) -> tuple[float, ...]:
    """Where a step or its gradient jumps. Those that take tensors do nowhere."""
    if _names(part):
        return ()
    step = _step_function(part)(*part.arguments)
    return step.pointwise.jumps(step.operand)


def by_pytorch(chain: Chain, groups: int) -> Forward:
    """The chain as one writes it with PyTorch's own functions."""
    product, functions = plain_product(chain), [plain_of(part, groups) for part in chain.parts]

    def forward(tensors):
        value = product(tensors)
        for function in functions:
            value = function(value, tensors)
        return value

    return forward


def plain_product(chain: Chain) -> Forward:
    contraction, geometry = contraction_of(chain), chain.geometry
    names = ("input", "weight", contraction.bias) if chain.contraction else ("input",)
    return lambda tensors: contraction.plain(*[tensors[name] for name in names], **geometry)


def plain_of(part: Part, groups: int) -> Callable[[torch.Tensor, Tensors], torch.Tensor]:
    """PyTorch's function for a part, of the value and the tensors."""
    if part.name == "group_norm":
        return lambda value, tensors: torch.group_norm(
            value, groups, tensors["norm_weight"], tensors["norm_bias"], _EPS
        )
    if part.name == "layer_norm":
        return lambda value, tensors: F.layer_norm(
            value, value.shape[-1:], tensors["norm_weight"], tensors["norm_bias"], _EPS
        )
    if part.name == ROW_MINIMUM:
        (bias,) = _names(part)
        return lambda value, tensors: value.min(dim=1, keepdim=True)[0] + tensors[bias]
    function = getattr(F, part.name, None) or getattr(torch, part.name)

    def step(value, tensors):
        return function(
            value, *[_aligned(tensors[each], value) if each in tensors else each for each in part.arguments]
        )

    return step


def _aligned(operand: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A vector over the channels, which are a value's second dimension."""
    return operand.view(-1, *[1] * (value.ndim - 2)) if operand.ndim == 1 else operand
