"""Workloads of problems: their tensors, their launch with a config, and the expected results.

On the "meta" device the tensors have no memory. A launch there can be compiled without a GPU.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

from autotune_configs.kernels import Config
from autotune_configs.problem import Problem
from triton_kernels import epilogues, group_norm, image_group_norm, row_minimum
from triton_kernels.convolution import StrideOneConvolution, convolution
from triton_kernels.grid import blocks_of
from triton_kernels.image_statistics import PartialStatistics, image_statistics
from triton_kernels.image_tiles import CHANNELS_LAST, ImageNormConfig
from triton_kernels.linear import FLOAT32_INPUT_PRECISION, linear
from triton_kernels.pointwise import GELU_OF, HARDTANH_MISH

_EPS = 1e-5
_BOUNDS = (-1.0, 1.0)
#: How many samples of images are compared with float64. The others must have been written.
_CHECKED_SAMPLES = 2

#: The relative error allowed: that of rounding to the dtype, with room for float32 sums in another order.
_TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}
#: The error allowed for one element, as a multiple of the relative error times the root mean square of all.
_OUTLIER = 64


class Workload(ABC):
    """Random tensors for a problem. Results are filled with NaN before each checked launch."""

    #: What a launch writes, unless ``results`` and ``poison`` say otherwise.
    output: torch.Tensor

    def __init__(self, problem: Problem, device: torch.device):
        self.problem = problem
        self.device = device
        self.dtype = getattr(torch, problem.dtype)
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
        self._expected: tuple[torch.Tensor, ...] | None = None

    @abstractmethod
    def launch(self, config: Config) -> None:
        """Run the problem once with this config. This is what a sweep times."""

    def results(self, config: Config) -> tuple[torch.Tensor, ...]:
        """The results of the last launch, which had this config."""
        return (self.output,)

    @abstractmethod
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The expected results, by PyTorch in float64; of images only the first samples."""

    def poison(self, config: Config) -> None:
        """Fill what a launch with this config writes with NaN."""
        self.output.fill_(math.nan)

    def launch_variants(self, config: Config) -> None:
        """Run every kind of launch that uses this config. Compiled, they show the resources that it needs."""
        self.launch(config)

    def fault(self, config: Config) -> str | None:
        """What is wrong with the results of a launch, in a few words, or None."""
        if self._expected is None:
            with torch.enable_grad():
                self._expected = self.expected()
        self.poison(config)
        self.launch(config)
        for result, expected in zip(self.results(config), self._expected, strict=True):
            if not result.isfinite().all():
                return "not everything is written"
            error = result[: len(expected)].double() - expected
            mean_square = expected.square().mean().sqrt()
            tolerance = _TOLERANCES[self.tolerated(result)]
            relative = (error.square().mean().sqrt() / mean_square).item()
            if not relative <= tolerance:
                return f"wrong by {relative:.1e}"
            if not (error.abs() <= tolerance * (4 * expected.abs() + _OUTLIER * mean_square)).all():
                return f"one element wrong by {error.abs().max().item():.1e}"
        return None

    def tolerated(self, result: torch.Tensor) -> torch.dtype:
        """The dtype whose precision a result must have."""
        return result.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normally distributed random numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype or self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class Linear(Workload):
    """input [M, K] @ weight [N, K].T, with an epilogue."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.M, self.N, self.K, self.group_size = problem.sizes
        self.input = self.normal(self.M, self.K)
        self.weight = (self.normal(self.N, self.K, dtype=torch.float32) / math.sqrt(self.K)).to(self.dtype)
        linear_bias, bias, norm_bias = (0.5 * self.normal(self.N) for _ in range(3))
        self.vectors = (linear_bias, bias, 1 + 0.2 * self.normal(self.N), norm_bias)
        self.output = self.empty(self.M, self.N)
        self.epilogue = getattr(epilogues, problem.kernel.removeprefix("linear_") + "_epilogue")

    def launch(self, config):
        self._launch(config, self.output)

    def _launch(self, config, output, saved=None):
        linear(
            self.input,
            self.weight,
            self.epilogue,
            config,
            output=output,
            saved=saved,
            vectors=self.vectors,
            scalars=(*_BOUNDS, _EPS),
            group_size=self.group_size if config.holds_groups_of(self.group_size) else 1,
            input_precision=FLOAT32_INPUT_PRECISION,
        )

    def launch_variants(self, config):
        self.launch(config)
        if self.problem.kernel != "linear_bias":
            self._launch(config, self.output, self.empty(self.M, self.N))

    def expected(self):
        z = self.input.double() @ self.weight.double().T + self.vectors[0].double() + self.vectors[1].double()
        weight, bias = (vector.double() for vector in self.vectors[2:])
        groups = self.N // self.group_size
        if self.problem.kernel == "linear_hardtanh_mish_group_norm":
            return (F.group_norm(F.mish(F.hardtanh(z, *_BOUNDS)), groups, weight, bias, _EPS),)
        if self.problem.kernel == "linear_group_norm_hardtanh":
            return (F.hardtanh(F.group_norm(z, groups, weight, bias, _EPS), *_BOUNDS),)
        if self.problem.kernel == "linear_group_norm_row_minimum":
            return (F.group_norm(z, groups, weight, bias, _EPS).amin(1),)
        return (z,)


class RowMinimum(Linear):
    """The same with a row minimum: each tile writes the minima of its rows as integer keys."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.keys: dict[tuple[int, bool], tuple] = {}

    def _tiles(self, config, save=False):
        tiles = blocks_of(self.N, config.epilogue_columns)
        if (tiles, save) not in self.keys:
            self.keys[tiles, save] = row_minimum.empty_tile_minimum(tiles, self.M, self.group_size, self.device, save)
        return self.keys[tiles, save]

    def launch(self, config):
        self._launch(config, *self._tiles(config))

    def launch_variants(self, config):
        self.launch(config)
        self._launch(config, *self._tiles(config, save=True))

    def poison(self, config):
        self._tiles(config)[0].fill_(-(2**31))  # the key of NaN

    def results(self, config):
        minimum = self.empty(1, self.M, dtype=torch.float32)
        row_minimum.finish(self._tiles(config)[0], None, None, minimum, None, self.group_size)
        return (minimum[0],)


class GroupNorm(Workload):
    """hardtanh → mish → group norm of a matrix [M, N], the most expensive activation before a norm."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.M, self.N, self.group_size = problem.sizes
        self.input = self.normal(self.M, self.N)
        self.weight, self.bias = 1 + 0.2 * self.normal(self.N), self.normal(self.N)
        self.output = self.empty(self.M, self.N)
        self.arguments = (self.input, self.N // self.group_size, self.weight, self.bias, _EPS)

    def launch(self, config):
        group_norm.group_norm(*self.arguments, config, output=self.output, activation=HARDTANH_MISH, bounds=_BOUNDS)

    def _chain(self, input, weight, bias):
        return F.group_norm(F.mish(F.hardtanh(input, *_BOUNDS)), self.N // self.group_size, weight, bias, _EPS)

    def expected(self):
        return (self._chain(self.input.double(), self.weight.double(), self.bias.double()),)


class GroupNormBackward(GroupNorm):
    """The gradients of ``GroupNorm``: of the input, and the sums over the rows."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.gradient = self.normal(self.M, self.N)
        self.sums = [self.empty(self.N, dtype=torch.float32) for _ in range(3)]

    def launch(self, config):
        group_norm.group_norm_backward(
            self.gradient,
            *self.arguments,
            config,
            input_gradient=self.output,
            vector_gradients=(*self.sums, None),
            activation=HARDTANH_MISH,
            bounds=_BOUNDS,
        )

    def poison(self, config):
        for each in (self.output, *self.sums):
            each.fill_(math.nan)

    def results(self, config):
        return self.output, *self.sums

    def expected(self):
        leaves = [tensor.double().requires_grad_() for tensor in (self.input, self.weight, self.bias)]
        input_gradient, *gradients = torch.autograd.grad(self._chain(*leaves), leaves, self.gradient.double())
        return input_gradient, *gradients, input_gradient.sum(0)


class ImageWorkload(Workload):
    """GELU and group norm of images [B, C, S]."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.B, self.C, self.S, self.group_size = problem.sizes
        self.groups = self.C // self.group_size
        layouts = problem.layout.split(" to ")
        self.input = self.image(layouts[0]).normal_(generator=self._generator)
        self.output = self.image(layouts[-1])
        self.weight, self.bias = 1 + 0.2 * self.normal(self.C), self.normal(self.C)
        self.activation = GELU_OF[self.dtype]

    def image(self, layout: str) -> torch.Tensor:
        if layout == CHANNELS_LAST:
            return self.empty(self.B, self.S, self.C).transpose(1, 2)
        return self.empty(self.B, self.C, self.S)

    def statistics(self, config=None):
        config = config or ImageNormConfig.fit(self.input)
        return image_statistics(self.input, self.groups, _EPS, config, activation=self.activation)

    def tolerated(self, result):
        return self.dtype  # its GELU is no more precise

    def checked(self, image: torch.Tensor) -> torch.Tensor:
        return image[:_CHECKED_SAMPLES].double()


class ImageStatistics(ImageWorkload):
    def launch(self, config):
        self.found = self.statistics(config)

    def results(self, config):
        return tuple(each.view(self.B, self.groups) for each in self.found)

    def poison(self, config):
        pass  # the launch makes the tensors of its results

    def expected(self):
        values = F.gelu(self.checked(self.input)).reshape(-1, self.groups, self.group_size * self.S)
        variance, mean = torch.var_mean(values, 2, correction=0)
        return mean, (variance + _EPS).rsqrt()


class ImageGroupNorm(ImageWorkload):
    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.given = self.statistics()

    def launch(self, config):
        image_group_norm.image_group_norm(
            self.input, self.given, self.weight, self.bias, config, output=self.output, activation=self.activation
        )

    def expected(self):
        activated = F.gelu(self.checked(self.input))
        return (F.group_norm(activated, self.groups, self.weight.double(), self.bias.double(), _EPS),)


class ImageGroupNormBackward(ImageWorkload):
    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.given = self.statistics()
        self.gradient = self.image(problem.layout).normal_(generator=self._generator)

    def launch(self, config):
        strips = config.strips(self.S)
        self.sums = self.empty(3, self.B, strips, self.C, dtype=torch.float32)
        image_group_norm.image_group_norm_backward(
            self.gradient,
            self.input,
            self.given,
            self.weight,
            self.bias,
            config,
            input_gradient=self.output,
            norm_sums=self.sums[:2].unbind(),
            bias_sums=self.sums[2],
            activation=self.activation,
        )

    def results(self, config):
        return self.output, self.sums.sum(2).transpose(0, 1)

    def expected(self):
        # The sums over each sample by itself, because only some samples are checked.
        vectors = (each.double().expand(_CHECKED_SAMPLES, -1) for each in (self.weight, self.bias))
        input, weight, bias = leaves = [
            each[: self.B].clone().requires_grad_() for each in (self.checked(self.input), *vectors)
        ]
        normalized = F.group_norm(F.gelu(input), self.groups, eps=_EPS)
        output = normalized * weight[:, :, None] + bias[:, :, None]
        input_gradient, *gradients = torch.autograd.grad(output, leaves, self.checked(self.gradient))
        return input_gradient, torch.stack([*gradients, input_gradient.sum(2)], 1)


class Convolution(Workload):
    """A convolution of stride 1 with the partial statistics of its GELU."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self.B, self.C, self.O, height, width, *self.taps = problem.sizes
        layouts = problem.layout.split(" to ")
        in_size = (height + self.taps[0] - 1, width + self.taps[1] - 1)
        self.input = self.image(layouts[0], self.C, *in_size).normal_(generator=self._generator)
        self.output = self.image(layouts[-1], self.O, height, width)
        depth = math.sqrt(self.C * math.prod(self.taps))
        self.weight = self.normal(*self.taps, self.O, self.C) / depth
        self.bias = self.normal(self.O)

    def image(self, layout, channels, height, width):
        format = torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format
        shape = (self.B, channels, height, width)
        return torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=format)

    def tolerated(self, result):
        return self.dtype

    def launch(self, config):
        self.partials = PartialStatistics.empty(self.B, config.tiles(self.output[0, 0].numel()), self.O, self.device)
        convolution(
            self.input,
            self.weight,
            self.bias,
            StrideOneConvolution(tuple(self.taps), (1, 1), (0, 0)),
            config,
            output=self.output,
            partials=self.partials,
            activation=GELU_OF[self.dtype],
        )

    def results(self, config):
        mean, rstd = self.partials.merge(self.O, self.output[0, 0].numel(), _EPS)
        return self.output, mean.view(self.B, self.O), rstd.view(self.B, self.O)

    def expected(self):
        weight = self.weight.permute(2, 3, 0, 1).double()
        output = F.conv2d(self.input[:_CHECKED_SAMPLES].double(), weight, self.bias.double())
        variance, mean = torch.var_mean(F.gelu(output), (2, 3), correction=0)
        return output, mean, (variance + _EPS).rsqrt()


_WORKLOADS: dict[str, Callable[[Problem, torch.device], Workload]] = {
    "linear_group_norm_row_minimum": RowMinimum,
    "group_norm": GroupNorm,
    "group_norm_backward": GroupNormBackward,
    "image_statistics": ImageStatistics,
    "image_group_norm": ImageGroupNorm,
    "image_group_norm_backward": ImageGroupNormBackward,
    "convolution": Convolution,
}


def workload_of(problem: Problem, device: torch.device) -> Workload:
    return _WORKLOADS.get(problem.kernel, Linear)(problem, device)
