"""Workloads of problems: their tensors, their launch with a config, and the expected results.

On the "meta" device the tensors have no memory. A launch there can be compiled without a GPU.
"""

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from autotune_configs.chains import CHAINS
from autotune_configs.kernel import Config
from autotune_configs.problem import Problem
from triton_kernels import chains, group_norm, image_group_norm, image_sums, reference, row_minimum
from triton_kernels.built_in import NUMBERS
from triton_kernels.chain import Chain
from triton_kernels.grid import blocks_of
from triton_kernels.image_statistics import image_statistics
from triton_kernels.image_tiles import CHANNELS_LAST, CONTIGUOUS, ImageSumsConfig
from triton_kernels.linear import FLOAT32_INPUT_PRECISION, linear
from triton_kernels.pointwise import Pointwise

_EPS = 1e-5
#: How many samples of images are compared with float64. The others must have been written.
_CHECKED_SAMPLES = 2

#: The relative error allowed: that of rounding to the dtype, with room for float32 sums in another order.
_TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}
#: The error allowed for one element, as a multiple of the relative error times the root mean square of all.
_OUTLIER = 64
#: The error allowed for what is a difference, as a part of the arithmetic's relative error times what it is one of. It
#: is less than the above, but where the difference is nothing or next to it, as gradients of norms of a few values are.
_OF_TERMS = 2.0**-4


#: What the vectors and tensors of some functions are around: so a product is no smaller than what it is made of, and no
#: quotient much larger.
_AROUND = {"mul": 1.0, "div": 4.0}


class Workload(ABC):
    """Random tensors for a problem.

    ``written`` is what a launch writes, filled with NaN before each checked one. Its results are as precise as
    ``precision``, or as their own dtypes.
    """

    written: tuple[torch.Tensor, ...] = ()
    precision: torch.dtype | None = None

    def __init__(self, problem: Problem, device: torch.device):
        self.problem = problem
        self.device = device
        self.dtype = getattr(torch, problem.dtype)
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    @abstractmethod
    def launch(self, config: Config) -> None:
        """Run the problem once with this config. This is what a sweep times."""

    def results(self, config: Config) -> tuple[torch.Tensor, ...]:
        """The results of the last launch, which had this config."""
        return self.written

    @abstractmethod
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The expected results, by PyTorch in float64; of images only the first samples."""

    def poison(self, config: Config) -> None:
        for each in self.written:
            each.fill_(math.nan)

    def launch_variants(self, config: Config) -> None:
        """Run every kind of launch that uses this config. Compiled, they show the resources that it needs."""
        self.launch(config)

    def fault(self, config: Config) -> str | None:
        """What is wrong with the results of a launch, in a few words, or None."""
        self.poison(config)
        self.launch(config)
        for result, expected, size_of_terms in zip(self.results(config), self._expected, self._sizes, strict=True):
            if not result.isfinite().all():
                return "not everything is written"
            error = result[: len(expected)].double() - expected
            tolerance = _TOLERANCES[self.precision or result.dtype]
            of_terms = _OF_TERMS * _TOLERANCES[self.precision or torch.float32] / tolerance
            size = max(_size(expected), of_terms * size_of_terms)
            if not (typical := _size(error)) <= tolerance * size:
                return f"wrong by {typical / size if size else typical:.1e}"
            if not (error.abs() <= tolerance * (4 * expected.abs() + _OUTLIER * size)).all():
                return f"one element wrong by {error.abs().max().item():.1e}"
        return None

    @functools.cached_property
    def _expected(self) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return self.expected()

    @functools.cached_property
    def _sizes(self) -> list[float]:
        """Those of what the expected results are differences of: their own, where that is not known."""
        return list(map(_size, self._expected))

    def normal(self, *shape: int, layout: str = CONTIGUOUS) -> torch.Tensor:
        return self.empty(*shape, layout=layout).normal_(generator=self._generator)

    def empty(self, *shape: int, layout: str = CONTIGUOUS, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Not initialised; [samples, channels, ...] where the layout is channels_last."""
        options: dict[str, Any] = {"dtype": dtype or self.dtype, "device": self.device}
        if layout == CHANNELS_LAST:
            samples, channels, *pixels = shape
            return torch.empty(samples, *pixels, channels, **options).movedim(-1, 1)
        return torch.empty(shape, **options)


def _size(values: torch.Tensor) -> float:
    """The root mean square."""
    return values.square().mean().sqrt().item()


def _scaled(values: torch.Tensor, num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float):
    """A group norm that takes no mean off, of constant deviations: what it and its gradients are differences of."""
    groups = values.unflatten(1, (num_groups, -1)).flatten(2)
    scaled = groups * (groups.detach().var(2, correction=0, keepdim=True) + eps).rsqrt()
    weight, bias = (each.view(-1, *[1] * (values.ndim - 2)) for each in (weight, bias))
    return scaled.view(values.shape) * weight + bias


class ChainWorkload(Workload):
    """A chain of values with rows [M, N] or samples [M, N, ...], and its operands."""

    norm: Callable[..., torch.Tensor] = staticmethod(reference.group_norm)

    def __init__(self, problem: Problem, device: torch.device, chain: Chain, M: int, N: int):
        super().__init__(problem, device)
        self.chain, self.M, self.N, self.group_size = chain.of_dtype(self.dtype), M, N, problem.sizes[-1]
        numbers = iter(next((each.numbers for each in CHAINS.values() if each.chain.kernel == chain.kernel), ()))
        self.operands = tuple(self._operand(step, numbers) for step in chain.steps)

    def _operand(self, step: Pointwise, numbers: Iterator[tuple[float, ...]]) -> Any:
        if step.operand == "numbers":
            defaults = NUMBERS[step.name].values() if step.name in NUMBERS else (-1.0, 1.0)
            return next(numbers, tuple(0.5 if each is None else each for each in defaults))
        shapes = {"scalar": (1,), "vector": (self.N,), "sample": (self.M, self.N), "tensor": (self.M, self.N)}
        around = _AROUND.get(step.name, 0.0)
        return around + 0.5 * self.normal(*shapes[step.operand]) if step.has_tensor else None

    def plain(self, z: torch.Tensor, *last: torch.Tensor) -> torch.Tensor:
        """The chain of z in float64, by PyTorch. ``last`` take the places of the last operands."""
        operands = (*self.operands[: len(self.operands) - len(last)], *last)
        doubled = [each.double() if isinstance(each, torch.Tensor) else each for each in (z, *operands)]
        return reference.plain(self.chain, doubled[0], doubled[1:], self.N // self.group_size, _EPS, self.norm)

    def plain_gradients(self, z: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Those of z, of a bias that z holds, and of the norm's weight and bias, which are the last operands."""
        leaves = [each.double().requires_grad_() for each in (z, *self.operands[-2:])]
        of_z, *of_norm = torch.autograd.grad(self.plain(*leaves), leaves, gradient.double())
        return of_z, of_z.transpose(0, 1).flatten(1).sum(1), *of_norm


class Linear(ChainWorkload):
    """A chain that begins with input [M, K] @ weight [N, K].T."""

    def __init__(self, problem, device, chain):
        M, N, K, _ = problem.sizes
        super().__init__(problem, device, chain, M, N)
        self.input = self.normal(M, K)
        self.weight = self.normal(N, K) / math.sqrt(K)
        self.written = (self.empty(M, N),)

    def stored(self, config: Config, saves: bool = False) -> tuple[Any, Any]:
        return self.written[0], self.empty(self.M, self.N) if saves else None

    def launch(self, config, saves=False):
        output, saved = self.stored(config, saves)
        linear(
            self.input,
            self.weight,
            self.chain,
            config,
            self.operands,
            output=output,
            saved=saved,
            eps=_EPS,
            group_size=self.group_size if config.holds_groups_of(self.group_size) else 1,
            input_precision=FLOAT32_INPUT_PRECISION,
        )

    def launch_variants(self, config):
        self.launch(config)
        if self.chain.activation or self.chain.last:
            self.launch(config, saves=True)

    def expected(self):
        return (self.plain(self.input.double() @ self.weight.double().T),)


class RowMinimum(Linear):
    """The same with a row minimum: each tile writes the minima of its rows as integer keys."""

    def __init__(self, problem, device, chain):
        super().__init__(problem, device, chain)
        self.keys: dict[tuple[int, bool], tuple] = {}

    def stored(self, config, saves=False):
        tiles = blocks_of(self.N, config.epilogue_columns)
        if (tiles, saves) not in self.keys:
            self.keys[tiles, saves] = row_minimum.empty_tile_minimum(tiles, self.M, self.group_size, self.device, saves)
        return self.keys[tiles, saves]

    def poison(self, config):
        self.stored(config)[0].fill_(-(2**31))  # the key of NaN

    def results(self, config):
        minimum = self.empty(1, self.M, dtype=torch.float32)
        row_minimum.finish(self.stored(config)[0], None, None, minimum, None, self.group_size)
        return (minimum.T,)


class Norm(ChainWorkload):
    """A pass of a group norm over the result of a contraction that added the biases: over rows [M, N] or images.

    Of rows, the chain is hardtanh → mish → group norm, the most expensive activation. Of images [M, N, pixels], it is
    GELU → group norm.
    """

    def __init__(self, problem, device):
        M, N, *pixels, group_size = problem.sizes
        declared = chains.CONV_TRANSPOSE2D_GELU_GROUP_NORM if pixels else chains.LINEAR_HARDTANH_MISH_GROUP_NORM
        super().__init__(problem, device, declared, M, N)
        biases = len(self.chain.biases)
        self.operands = (*[None] * biases, *self.operands[biases:])
        self.groups = N // group_size
        self.shape = (M, N, *pixels)
        layouts = (problem.layout or CONTIGUOUS).split(" to ")
        self.input = self.normal(*self.shape, layout=layouts[0])
        self.output = self.empty(*self.shape, layout=layouts[-1])
        self.written = (self.output,)
        self.precision = self.dtype if pixels else None  # GELU is no more precise

    def expected(self):
        return (self.plain(self.input),)

    @functools.cached_property
    def _sizes(self):
        scaled = copy.copy(self)
        scaled.norm = _scaled
        with torch.enable_grad():
            return list(map(_size, scaled.expected()))


class GroupNorm(Norm):
    def launch(self, config):
        arguments = self.groups, self.chain, self.operands, _EPS, config
        group_norm.group_norm(self.input, *arguments, output=self.output)


class GroupNormBackward(Norm):
    """The gradients of ``GroupNorm``: of the input, and the sums over the rows."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.gradient = self.normal(*self.shape)
        self.sums = [self.empty(self.N, dtype=torch.float32) for _ in range(3)]
        self.written = (self.output, *self.sums)

    def launch(self, config):
        bias, *of_norm = self.sums
        gradients = (bias, *[None] * (len(self.operands) - 3), *of_norm)
        arguments = self.groups, self.chain, self.operands, _EPS, config
        group_norm.group_norm_backward(
            self.gradient, self.input, *arguments, input_gradient=self.output, gradients=gradients
        )

    def expected(self):
        return self.plain_gradients(self.input, self.gradient)


class ImageStatistics(Norm):
    def launch(self, config):
        statistics = image_statistics(self.input, self.groups, _EPS, config, self.chain, self.operands)
        self.written = tuple(each.view(-1, self.groups) for each in statistics)

    def expected(self):
        return statistics_of(self.input[:_CHECKED_SAMPLES], self.groups)


def statistics_of(values: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal standard deviation [samples, groups] of GELU, in float64."""
    variance, mean = torch.var_mean(F.gelu(values.double()).reshape(len(values), groups, -1), 2, correction=0)
    return mean, (variance + _EPS).rsqrt()


class ImageGroupNorm(Norm):
    def __init__(self, problem, device):
        super().__init__(problem, device)
        config = ImageSumsConfig.fit(self.input)
        statistics = image_statistics(self.input, self.groups, _EPS, config, self.chain, self.operands)
        self.arguments = (self.input, statistics, self.chain, self.operands)

    def launch(self, config):
        image_group_norm.image_group_norm(*self.arguments, config, output=self.output)

    def expected(self):
        return (self.plain(self.input[:_CHECKED_SAMPLES]),)


class ImageSums(ImageGroupNorm):
    """The means over groups that the input's gradient takes, and the gradients of the norm's weight and bias."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.gradient = self.normal(*self.shape, layout=problem.layout.split(" to ")[-1])
        self.sums = tuple(self.empty(self.N, dtype=torch.float32) for _ in range(2))

    def launch(self, config):
        gradients = (*[None] * self.chain.norm_place, *self.sums)
        means = image_sums.image_sums(self.gradient, *self.arguments, gradients, config)
        self.written = (*means.view(2, self.M, self.groups), *self.sums)

    def expected(self):  # sample by sample, as float64 takes memory
        samples = zip(self.input.split(1), self.gradient.split(1), strict=True)
        sums = torch.stack([torch.stack(self.plain_gradients(*each)[2:]) for each in samples], 1)
        of_groups = (self.operands[-2].double() * sums).view(2, self.M, self.groups, -1).mean(3)
        return *(of_groups / math.prod(self.shape[2:])), *sums.sum(1)


class ImageGroupNormBackward(ImageGroupNorm):
    """The gradient of the input from these means, and the sums of a bias's."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.gradient = self.normal(*self.shape, layout=problem.layout)
        config = ImageSumsConfig.fit(self.input)
        self.means = image_sums.image_sums(self.gradient, *self.arguments, [None] * len(self.operands), config)

    def launch(self, config):
        self.sums = self.empty(self.M, config.strips(self.shape[2]), self.N, dtype=torch.float32)
        input, statistics, chain, operands = self.arguments
        sums = (self.sums, *[None] * (chain.norm_place - 1))
        arguments = self.gradient, input, statistics, self.means, chain, operands, config
        image_group_norm.image_group_norm_backward(*arguments, input_gradient=self.output, sums=sums)

    def results(self, config):
        return self.output, self.sums.sum(1)

    def expected(self):  # sample by sample, as only some are checked
        checked = (each[:_CHECKED_SAMPLES].split(1) for each in (self.input, self.gradient))
        of_input, of_bias, *_ = zip(*map(self.plain_gradients, *checked), strict=True)
        return torch.cat(of_input), torch.stack(of_bias)


_WORKLOADS: dict[str, Callable[[Problem, torch.device], Workload]] = {
    "group_norm": GroupNorm,
    "group_norm_backward": GroupNormBackward,
    "image_statistics": ImageStatistics,
    "image_sums": ImageSums,
    "image_group_norm": ImageGroupNorm,
    "image_group_norm_backward": ImageGroupNormBackward,
}


#: The kernels of the chains that are declared here.
_DECLARED = {chain.kernel for chain in vars(chains).values() if isinstance(chain, Chain)}


def is_of_every_process(problem: Problem) -> bool:
    """Whether a worker process, too, can make the problem's workload.

    It knows what is declared, and chains of built-in functions. A user's own functions are known where the user's
    program runs.
    """
    kernel = problem.kernel
    return kernel in _WORKLOADS or kernel in _DECLARED or chains.built_in(kernel) is not None


def workload_of(problem: Problem, device: torch.device) -> Workload:
    """Raises ValueError where this process has made no chain of the kernel's name."""
    if problem.kernel in _WORKLOADS:
        return _WORKLOADS[problem.kernel](problem, device)
    chain = chains.known(problem.kernel)
    if chain is None:
        raise ValueError(f"no chain of this process has the kernel {problem.kernel}")
    return (RowMinimum if chain.reduction else Linear)(problem, device, chain)
