"""A call with its tensors, or with what stands for them, as the kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ops.calls import Call
from triton_kernels.launch import call as do

Tensor = torch.Tensor


@dataclass(frozen=True)
class Arguments:
    """What a call gets: ``vectors`` has one entry a step, its vector or tensor, and ``bias`` is the reduction's."""

    call: Call
    input: Any
    weight: Any
    vectors: tuple[Any, ...]
    bias: Any

    @classmethod
    def of(cls, call: Call, values: Sequence[Any]) -> "Arguments":
        """From values in a row: of the input, the weight, each step that takes a tensor, and the reduction's bias."""
        input, weight, *others = values
        rest = iter(others)
        vectors = tuple([next(rest) if step.has_tensor else None for step in call.chain.steps])
        return cls(call, input, weight, vectors, next(rest))

    @cached_property
    def operands(self) -> tuple[Any, ...]:
        """One entry a step, as kernels take them: its numbers, or a contiguous vector or tensor."""
        return tuple(
            numbers if each is None else contiguous(each).view(-1 if step.operand == "vector" else each.shape)
            for step, each, numbers in zip(self.call.chain.steps, self.vectors, self.call.numbers, strict=True)
        )

    @property
    def biases(self) -> tuple[Any, ...]:
        """The operands that z has where its contraction adds them."""
        return self.operands[: len(self.call.chain.biases)]

    @property
    def operands_after_biases(self) -> tuple[Any, ...]:
        """The operands of what follows such a z: those of the biases are absent."""
        return (*[None] * len(self.biases), *self.operands[len(self.biases) :])

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """The vectors and tensors, each in one dimension."""
        return tuple(None if each is None else each.view(-1) for each in self.vectors)


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    return tensor if tensor.is_contiguous() else do(Tensor.contiguous, tensor)


def rows_of(tensor: Tensor) -> Tensor:
    """[*, columns] as a matrix [rows, columns] of any strides, copied where it has to be."""
    return tensor if tensor.ndim == 2 else viewed(tensor, (tensor.shape[:-1].numel(), tensor.shape[-1]))


def as_volume(tensor: Tensor) -> Tensor:
    """View or copy as [B, C, S]: samples, channels and pixels. The pixels are all further dimensions."""
    return viewed(tensor, (*tensor.shape[:2], tensor.shape[2:].numel()))


def viewed(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in this shape, copied where it has to be."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return do(Tensor.contiguous, tensor).view(shape)
