"""The chains written in plain torch operations, independent of ``ops.reference``, and random arguments for them.

``arguments`` are always a dict from the parameter names of the function in ``ops`` to tensors, numbers or None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import ops


def _norm(z, num_groups, weight=None, bias=None, eps=1e-5):
    # torch.group_norm has none of the functional form's refusals; its backward fails for a bias without a weight.
    weight = torch.ones_like(bias) if weight is None and bias is not None else weight
    return torch.group_norm(z, num_groups, weight, bias, eps)


def _rows(z):
    return z.reshape(math.prod(z.shape[:-1]), z.shape[-1])


def _shifted(z, bias):
    return z if bias is None else z + bias


#: What ``Chain.before_jumps`` collects while a plain chain runs.
_noted: list[tuple[torch.Tensor, tuple[float, ...] | None]] | None = None


def note(values: torch.Tensor, jumps: tuple[float, ...] | None) -> torch.Tensor:
    """``values``, at some of which the next function or its gradient jumps: None for those of the least of a row."""
    if _noted is not None and jumps != ():
        _noted.append((values, jumps))
    return values


def hardtanh(z, min_val, max_val):
    """F.hardtanh with its CUDA kernel's gradient everywhere: 0 at and beyond the bounds, else passed on, for NaN too.

    On the CPU, PyTorch's vectorised kernel stops it at a NaN and the one for the remaining elements does not.
    """
    note(z, (min_val, max_val))
    return torch.where((z <= min_val) | (z >= max_val), F.hardtanh(z.detach(), min_val, max_val), z)


def plain_linear(input, weight, bias=None):
    return F.linear(input, weight, bias)


def plain_bias_hardtanh_mish(input, bias=None, min_val=-1.0, max_val=1.0):
    return F.mish(hardtanh(_shifted(input, bias), min_val, max_val))


def plain_group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    return _norm(input, num_groups, weight, bias, eps)


def plain_group_norm_hardtanh(input, num_groups, weight=None, bias=None, min_val=-1.0, max_val=1.0, eps=1e-5):
    return hardtanh(_norm(input, num_groups, weight, bias, eps), min_val, max_val)


def plain_gelu_group_norm(input, num_groups, weight=None, bias=None, approximate="none", eps=1e-5):
    return _norm(F.gelu(input, approximate=approximate), num_groups, weight, bias, eps)


def plain_linear_hardtanh_mish_group_norm(
    input, weight, linear_bias, bias, num_groups, norm_weight=None, norm_bias=None, min_val=-1.0, max_val=1.0, eps=1e-5
):
    activated = plain_bias_hardtanh_mish(F.linear(input, weight, linear_bias), bias, min_val, max_val)
    return _norm(_rows(activated), num_groups, norm_weight, norm_bias, eps).view(activated.shape)


def plain_linear_group_norm_min(
    input, weight, linear_bias, num_groups, norm_weight=None, norm_bias=None, bias=None, eps=1e-5
):
    normalized = _norm(F.linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias, eps)
    return _shifted(torch.min(note(normalized, None), dim=1, keepdim=True)[0], bias)


def plain_linear_group_norm_hardtanh(
    input, weight, linear_bias, num_groups, norm_weight=None, norm_bias=None, min_val=-1.0, max_val=1.0, eps=1e-5
):
    z = F.linear(input, weight, linear_bias)
    normalized = _norm(_rows(z), num_groups, norm_weight, norm_bias, eps).view(z.shape)
    return hardtanh(normalized, min_val, max_val)


def plain_conv_transpose2d_gelu_group_norm(
    input,
    weight,
    conv_bias,
    num_groups,
    norm_weight=None,
    norm_bias=None,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    approximate="none",
    eps=1e-5,
):
    z = biased(F.conv_transpose2d(input, weight, None, stride, padding, output_padding, groups, dilation), conv_bias)
    return _norm(F.gelu(z, approximate=approximate), num_groups, norm_weight, norm_bias, eps)


def biased(z: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution's bias as PyTorch adds it on a GPU: to what is rounded. On a CPU it does so before."""
    return z if bias is None else z + bias[:, None, None]


@dataclass(frozen=True)
class Chain:
    """A function of ``ops`` and the same in plain torch, which notes the values before each jump."""

    name: str
    plain: Callable[..., torch.Tensor]
    vectors: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        return getattr(ops, self.name)

    def before_jumps(self, arguments: dict) -> list[tuple[torch.Tensor, tuple[float, ...] | None]]:
        """The values whose place beside a jump decides the gradient, each with the jumps (``note``)."""
        global _noted
        _noted = noted = []
        try:
            with torch.no_grad():
                self.plain(**arguments)
        finally:
            _noted = None
        return noted

    @property
    def is_linear(self) -> bool:
        """Whether it begins with a matrix product."""
        return self.name.startswith("linear")

    @property
    def has_groups(self) -> bool:
        return "group_norm" in self.name

    @property
    def has_bounds(self) -> bool:
        return "hardtanh" in self.name

    @property
    def has_images(self) -> bool:
        """Whether it takes (batch, channels, *), a sample being all of a batch's element."""
        return self in (*NORMS, L19)


LINEAR = Chain("linear", plain_linear, vectors=("bias",))
BIAS_HARDTANH_MISH = Chain("bias_hardtanh_mish", plain_bias_hardtanh_mish, vectors=("bias",))
GROUP_NORM = Chain("group_norm", plain_group_norm, vectors=("weight", "bias"))
GROUP_NORM_HARDTANH = Chain("group_norm_hardtanh", plain_group_norm_hardtanh, vectors=("weight", "bias"))
GELU_GROUP_NORM = Chain("gelu_group_norm", plain_gelu_group_norm, vectors=("weight", "bias"))
L94 = Chain(
    "linear_hardtanh_mish_group_norm",
    plain_linear_hardtanh_mish_group_norm,
    vectors=("linear_bias", "bias", "norm_weight", "norm_bias"),
)
L75 = Chain(
    "linear_group_norm_min",
    plain_linear_group_norm_min,
    vectors=("linear_bias", "norm_weight", "norm_bias", "bias"),
)
L30 = Chain(
    "linear_group_norm_hardtanh",
    plain_linear_group_norm_hardtanh,
    vectors=("linear_bias", "norm_weight", "norm_bias"),
)
L19 = Chain(
    "conv_transpose2d_gelu_group_norm",
    plain_conv_transpose2d_gelu_group_norm,
    vectors=("conv_bias", "norm_weight", "norm_bias"),
)

LINEAR_CHAINS = (L94, L75, L30)
NORMS = (GROUP_NORM, GROUP_NORM_HARDTANH, GELU_GROUP_NORM)
BLOCKS = (LINEAR, BIAS_HARDTANH_MISH, *NORMS)
#: All but L19, whose arguments are images.
CHAINS = LINEAR_CHAINS + BLOCKS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def chain_id(value) -> str:
    """A readable name for pytest's parametrisation."""
    return value.name if isinstance(value, Chain) else str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Problem:
    """Sizes: ``rows`` x ``depth`` by ``depth`` x ``groups * group_size``; ``pixels`` are a norm's further axes.

    For L19 ``rows`` images of ``depth`` channels, and ``groups * group_size`` channels behind the convolution.
    """

    rows: int
    depth: int
    groups: int
    group_size: int
    pixels: tuple[int, ...] = ()
    #: of L19's weight: height, width, and groups of the convolution
    kernel: tuple[int, int] = (3, 3)
    conv_groups: int = 1

    @property
    def channels(self) -> int:
        return self.groups * self.group_size


def draw(shape, kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random values, on the generator's device.

    - normal; positive: uniform in 0...1
    - wide: signs times 2**u, u uniform in -23...23, for float16 in -4...4, whose products stay within its range
    - spike: normal with one element a row that is 2**20 (float16: 2**8) times as large
    - exact: -1, 0 or 1, whose sums every dtype holds exactly
    """
    options = {"generator": generator, "device": generator.device}
    if kind == "positive":
        values = torch.rand(shape, **options)
    elif kind == "wide":
        exponent = 4 if dtype == torch.float16 else 23
        signs = torch.randint(0, 2, shape, **options) * 2 - 1
        values = signs * torch.exp2((torch.rand(shape, **options) * 2 - 1) * exponent)
    elif kind == "exact":
        values = torch.randint(-1, 2, shape, **options).float()
    else:
        values = torch.randn(shape, **options)
    if kind == "spike" and values.numel() > 0:
        place = torch.randint(0, shape[-1], (*shape[:-1], 1), **options)
        values.scatter_(-1, place, values.gather(-1, place) * (2.0**8 if dtype == torch.float16 else 2.0**20))
    return values.to(dtype)


def make_arguments(
    chain: Chain,
    problem: Problem,
    dtype: torch.dtype,
    *,
    kind: str = "normal",
    absent: tuple[str, ...] = (),
    seed: int = 0,
    device: str = "cpu",
) -> dict:
    """Random arguments for ``chain``. ``absent`` vectors are None; the bounds lie where a few elements exceed them."""
    generator = torch.Generator(device).manual_seed(seed)
    N, K = problem.channels, problem.depth
    arguments = {}
    if chain.is_linear:
        arguments["input"] = draw((problem.rows, K), kind, dtype, generator)
        # A power of two, so that "exact" products stay exact.
        arguments["weight"] = draw((N, K), kind, dtype, generator) * 2.0 ** -round(math.log2(max(1, K)) / 2)
    elif chain is L19:
        arguments["input"] = draw((problem.rows, K, *(problem.pixels or (4, 5))), kind, dtype, generator)
        terms = K // problem.conv_groups * math.prod(problem.kernel)
        weight = draw((K, N // problem.conv_groups, *problem.kernel), kind, dtype, generator)
        arguments["weight"] = weight * 2.0 ** -round(math.log2(terms) / 2)
    else:
        arguments["input"] = draw((problem.rows, N, *problem.pixels), kind, dtype, generator)
    if chain is BIAS_HARDTANH_MISH:
        arguments["input"] = arguments["input"].movedim(1, -1)
    if chain.has_groups:
        arguments["num_groups"] = problem.groups
    if chain is L19 and problem.conv_groups != 1:
        arguments["groups"] = problem.conv_groups
    for name in chain.vectors:
        shape = (1, N, 1, 1) if chain is L75 and name == "bias" else (N,)
        vector = draw(shape, "exact" if kind == "exact" else "normal", torch.float32, generator)
        if name in ("norm_weight", "weight"):
            vector = 1 + vector / 4
        arguments[name] = None if name in absent else vector.to(dtype)
    if chain.has_bounds:
        arguments["min_val"], arguments["max_val"] = _bounds(chain, arguments, kind, dtype)
    return arguments


def _bounds(chain, arguments, kind, dtype) -> tuple[float, float]:
    """Bounds with a few of the values beyond them.

    PyTorch's -1 and 1 where float32 sees them sharply; wider ones, with fewer values near, for the 16-bit dtypes;
    between the values that "exact" arguments lead to (multiples of 1/16); in proportion to values of unusual size.
    """
    if kind == "exact" and chain in (L94, BIAS_HARDTANH_MISH):
        return -1.0 - 2.0**-5, 1.0 + 2.0**-5
    if kind == "normal" and dtype in (torch.float32, torch.float64):
        return -1.0, 1.0
    values = chain.before_jumps(doubled(arguments))[0][0]
    if values.numel() == 0:
        return -1.0, 1.0
    size = float(torch.quantile(values.abs().flatten()[: 2**20].float(), 0.97)) or 1.0
    return -size, size


def doubled(arguments: dict) -> dict:
    """The same arguments in float64."""
    return {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def redrawn(arguments: dict, seed: int) -> dict:
    """Other values in tensors of the same shapes, strides and dtypes."""
    fresh = {}
    for name, tensor in tensors_of(arguments).items():
        generator = torch.Generator(tensor.device).manual_seed(seed + len(fresh))
        fresh[name] = torch.empty_like(tensor).normal_(generator=generator)
    return {**arguments, **fresh}


def tensors_of(arguments: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values laid out otherwise in memory; "expanded" repeats the first row instead, at stride 0."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    filler = math.nan if tensor.is_floating_point() else -1
    if layout == "strided":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), filler)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "padded":
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]
    if layout == "misaligned":
        return torch.cat([tensor.new_full((1,), filler), tensor.flatten()])[1:].view(tensor.shape)
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    raise ValueError(f"no such layout: {layout}")


LAYOUTS = ("contiguous", "transposed", "strided", "padded", "misaligned", "expanded")
