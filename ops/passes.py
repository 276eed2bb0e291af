"""What follows a contraction, as steps of plans: z's pointwise functions and its norm, forward and backward.

One pass does it where a program can hold a row's whole group. Images take three passes, as do rows with wider groups,
which are images of one pixel. So all tensors here are [B, C, S]: samples, channels and pixels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autotune_configs import group_norm_config, image_norm_config
from ops.calls import Call
from triton_kernels import image_statistics
from triton_kernels.chain import Chain
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
    merges,
)
from triton_kernels.image_statistics import PartialStatistics
from triton_kernels.pointwise import identity

Tensor = torch.Tensor
Operands = Sequence[Any]


def keeps_statistics(call: Call, channels: int, pixels: int = 1) -> bool:
    """Whether there are three passes, of which the first makes the norm's statistics."""
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
        (found,) = known or [partial_statistics(call, operands, z).merge(call.num_groups, z.shape[2], call.eps)]
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


def partial_statistics(call: Call, operands: Operands, z: Tensor) -> PartialStatistics:
    """Of what comes before the norm."""
    config = image_norm_config("image_statistics", z.shape[1] // call.num_groups, z)
    operands = _with_tensors(call.chain, operands, lambda each: each.view(z.shape), "tensor")
    return image_statistics.partial_statistics(z, call.num_groups, config, call.chain, operands)


def normalize(
    call: Call, operands: Operands, z: Tensor, output: Tensor, partials: PartialStatistics | None = None
) -> Tensor:
    """output = the chain of z. Returns the statistics [2, B * G], from ``partials`` where there are any."""
    partials = partials or partial_statistics(call, operands, z)
    config = image_norm_config("image_group_norm", z.shape[1] // call.num_groups, z, output)
    operands = _with_tensors(call.chain, operands, lambda each: each.view(z.shape), "tensor")
    if merges(z, call.num_groups, config, partials):
        statistics = partials.empty_statistics(call.num_groups)
        options: dict[str, Any] = {"partials": partials, "eps": call.eps}
    else:
        statistics, options = partials.merge(call.num_groups, z.shape[2], call.eps), {}
    image_group_norm(z, statistics, call.chain, operands, config, output=output, **options)
    return statistics


class Differentiation:
    """The backward pass of ``normalize``, a few samples at a time; ``finish`` makes the gradients of the operands."""

    def __init__(
        self, call: Call, operands: Operands, z: Tensor, found: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        self._chain, self._z = call.chain, z
        self._operands, self._gradients = (
            _with_tensors(call.chain, each, lambda tensor: tensor.view(z.shape), "tensor")
            for each in (operands, gradients)
        )
        self._statistics = found.view(2, len(z), call.num_groups)
        self._config = image_norm_config("image_group_norm_backward", z.shape[1] // call.num_groups, z)
        self._sums = empty_sums(self._chain, self._gradients, z, self._config)

    def differentiate(
        self, dy: Tensor, z_gradient: Tensor, samples: slice = slice(None), stored: Any = identity
    ) -> None:
        """z_gradient = ``stored`` of the gradient at these samples of z; dy is that of the output."""
        image_group_norm_backward(
            dy,
            self._z[samples],
            self._statistics[:, samples].flatten(1),
            self._chain,
            _with_tensors(self._chain, self._operands, lambda each: each[samples], "sample", "tensor"),
            self._config,
            input_gradient=z_gradient,
            sums=[None if each is None else each[samples] for each in self._sums],
            stored=stored,
        )

    def finish(self) -> None:
        add_up_sums(self._chain, self._sums, self._gradients)
