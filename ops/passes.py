"""What follows a contraction, as steps of plans: z's pointwise functions and its norm, forward and backward.

One pass does it where a program can hold a row's whole group. Images take two passes, as do rows with wider groups,
which are images of one pixel. So all tensors here are [B, C, S]: samples, channels and pixels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autotune_configs import group_norm_config, image_norm_config
from ops.calls import Call
from triton_kernels.chain import Chain
from triton_kernels.column_sums import add_up
from triton_kernels.group_norm import (
    WIDEST_GROUP,
    GroupNormConfig,
    group_norm,
    group_norm_backward,
    pointwise,
    pointwise_backward,
)
from triton_kernels.image_group_norm import (
    add_up_sums,
    empty_sums,
    image_group_norm,
    image_group_norm_backward,
)
from triton_kernels.image_statistics import PartialStatistics, image_statistics
from triton_kernels.image_sums import image_sums
from triton_kernels.pointwise import identity

Tensor = torch.Tensor
Operands = Sequence[Any]


def keeps_statistics(call: Call, channels: int, pixels: int = 1) -> bool:
    """Whether there are two passes, of which the first makes the norm's statistics."""
    return bool(call.chain.norm) and (pixels != 1 or channels // call.num_groups > WIDEST_GROUP)


def rows_config(kernel: str, call: Call, z: Tensor) -> GroupNormConfig:
    """The config of a norm's one pass over z [M, C]."""
    M, C = z.shape
    return group_norm_config(kernel, z.dtype, M, C, C // call.num_groups, z.device)


def forward(call: Call, operands: Operands, z: Tensor, output: Tensor) -> list[Tensor]:
    """output = the chain of z; returns the statistics, where there are any."""
    if keeps_statistics(call, *z.shape[1:]):
        return [normalize(call, operands, z, output)]
    z, output, chain = z.squeeze(2), output.squeeze(2), call.chain.of_rows
    if chain.norm:
        config = rows_config("group_norm", call, z)
        group_norm(z, call.num_groups, chain, operands, call.eps, config, output=output)
    else:
        pointwise(z, chain, operands, output=output)
    return []


def backward(
    call: Call,
    operands: Operands,
    dy: Tensor,
    z: Tensor,
    z_gradient: Tensor,
    gradients: Sequence[Tensor | None],
    known: Sequence[Tensor],
) -> None:
    """Write z_gradient and the operands' ``gradients``. dy is the output's.

    ``known`` has the statistics, where ``forward`` returned any that were kept.
    """
    if keeps_statistics(call, *z.shape[1:]):
        (found,) = known or [statistics_of(call, operands, z)]
        differentiation = Differentiation(call, operands, z, found, gradients)
        differentiation.differentiate(dy, z_gradient)
        differentiation.finish()
        return
    z, dy, chain = z.squeeze(2), dy.squeeze(2), call.chain.of_rows
    targets: dict[str, Any] = {"input_gradient": z_gradient.squeeze(2), "gradients": gradients}
    if chain.norm:
        config = rows_config("group_norm_backward", call, z)
        group_norm_backward(dy, z, call.num_groups, chain, operands, call.eps, config, **targets)
    else:
        pointwise_backward(dy, z, chain, operands, **targets)


def _with_tensors(
    chain: Chain, each_steps: Operands, change: Callable[[Tensor], Tensor], *kinds: str
) -> tuple[Any, ...]:
    """What each step has, of which tensors of these kinds are changed."""
    return tuple(
        change(each) if step.operand in kinds and each is not None else each
        for step, each in zip(chain.steps, each_steps, strict=True)
    )


def statistics_of(call: Call, operands: Operands, z: Tensor) -> Tensor:
    """The statistics [2, B * G] of what comes before the norm."""
    config = image_norm_config("image_statistics", z.shape[1] // call.num_groups, z)
    operands = _with_tensors(call.chain, operands, lambda each: each.view(z.shape), "tensor")
    return image_statistics(z, call.num_groups, call.eps, config, call.chain, operands)


def normalize(
    call: Call, operands: Operands, z: Tensor, output: Tensor, partials: PartialStatistics | None = None
) -> Tensor:
    """output = the chain of z. Returns the statistics [2, B * G], from ``partials`` where there are any."""
    found = partials.merge(call.num_groups, call.eps) if partials else statistics_of(call, operands, z)
    config = image_norm_config("image_group_norm", z.shape[1] // call.num_groups, z, output)
    operands = _with_tensors(call.chain, operands, lambda each: each.view(z.shape), "tensor")
    image_group_norm(z, found, call.chain, operands, config, output=output)
    return found


class Differentiation:
    """The backward pass of ``normalize``, all samples at once or a few at a time: their sums, then z's gradient.

    ``finish`` makes the gradients of the operands.
    """

    def __init__(
        self, call: Call, operands: Operands, z: Tensor, found: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        self._chain, self._z, self._group_size = call.chain, z, z.shape[1] // call.num_groups
        self._operands, self._gradients = (
            _with_tensors(call.chain, each, lambda tensor: tensor.view(z.shape), "tensor")
            for each in (operands, gradients)
        )
        self._statistics = found.view(2, len(z), call.num_groups)
        self._config = image_norm_config("image_group_norm_backward", self._group_size, z)
        self._sums = empty_sums(self._chain, self._gradients, z, self._config)
        #: Where samples come a few at a time, the sums of each: of vectors that all samples share.
        self._of_samples: list[Tensor | None] | None = None

    def differentiate(
        self, dy: Tensor, z_gradient: Tensor, samples: slice = slice(None), stored: Any = identity
    ) -> None:
        """z_gradient = ``stored`` of the gradient at these samples of z. dy is theirs of the output."""
        z, statistics = self._z[samples], self._statistics[:, samples].flatten(1)
        operands = _with_tensors(self._chain, self._operands, lambda each: each[samples], "sample", "tensor")
        config = image_norm_config("image_sums", self._group_size, z, dy)
        means = image_sums(dy, z, statistics, self._chain, operands, self._targets(samples), config)
        image_group_norm_backward(
            dy,
            z,
            statistics,
            means,
            self._chain,
            operands,
            self._config,
            input_gradient=z_gradient,
            sums=[None if each is None else each[samples] for each in self._sums],
            stored=stored,
        )

    def _targets(self, samples: slice) -> list[Tensor | None]:
        """Where the gradients from the norm on are written, which are sums over these samples."""
        B, C, _ = self._z.shape
        if samples.indices(B) == (0, B, 1):
            return list(self._gradients)
        if self._of_samples is None:
            self._of_samples = [
                torch.empty(B, C, dtype=torch.float32, device=self._z.device) if self._is_shared(place) else None
                for place in range(len(self._gradients))
            ]
        return [
            each if each is None else (own if own is not None else each)[samples]
            for each, own in zip(self._gradients, self._of_samples, strict=True)
        ]

    def _is_shared(self, place: int) -> bool:
        """Whether the gradient of the step's operand, one from the norm on, is a sum over all samples."""
        each = self._gradients[place]
        return place >= self._chain.norm_place and each is not None and each.ndim == 1

    def finish(self) -> None:
        add_up_sums(self._chain, self._sums, self._gradients)
        if self._of_samples is not None:
            shared = [place for place, each in enumerate(self._of_samples) if each is not None]
            add_up([self._of_samples[place] for place in shared], [self._gradients[place] for place in shared])


def open_statistics(call: Call, operands: Operands, image: Tensor, are_apart: bool, found: Tensor) -> None:
    """Write an open norm's statistics: mean and rstd of each group, then centre and scale of each channel. Vectors that
    are added right before the norm ``are_apart`` where centres are without them."""
    samples, channels, _ = image.shape
    of_groups, of_channels = _parts(found, samples, call.num_groups)
    config = image_norm_config("image_statistics", channels // call.num_groups, image)
    options: dict[str, Any] = {"channels": of_channels, "are_apart": are_apart, "statistics": of_groups}
    image_statistics(image, call.num_groups, call.eps, config, call.chain, operands, **options)


def open_sums(
    call: Call,
    operands: Operands,
    dy: Tensor,
    image: Tensor,
    found: Tensor,
    factors: Tensor,
    gradients: Sequence[Tensor | None],
) -> None:
    """Write an open norm's factors, slope and shift, the gradients from the norm on, and one that is wanted before it,
    of what is added there."""
    samples, channels, _ = image.shape
    of_groups, _ = _parts(found, samples, call.num_groups)
    config = image_norm_config("image_sums", channels // call.num_groups, image, dy)
    added = next((each for each in gradients[: call.chain.norm_place] if each is not None), None)
    options: dict[str, Any] = {"channels": factors.unbind(), "added": added}
    image_sums(dy, image, of_groups, call.chain, operands, gradients, config, **options)


def _parts(found: Tensor, samples: int, num_groups: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Of an open norm's statistics, those of groups, [2, B * G], and of channels, [B * C] twice."""
    count = 2 * samples * num_groups
    return found[:count].view(2, -1), found[count:].view(2, -1).unbind()
