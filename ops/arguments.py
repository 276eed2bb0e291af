"""The tensors of a call, or what stands for them, as the kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ops.calls import Call
from triton_kernels.launch import call as do

Tensor = torch.Tensor


@dataclass(frozen=True)
class Arguments:
    """What a call gets: ``vectors`` has one entry a step, its vector or tensor, and ``bias`` is the reduction's."""

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
        return cls(input, weight, vectors, next(rest))

    def in_a_row(self, call: Call) -> list[Any]:
        """What ``of`` takes."""
        vectors = [each for step, each in zip(call.chain.steps, self.vectors, strict=True) if step.has_tensor]
        return [self.input, self.weight, *vectors, self.bias]

    def operands(self, call: Call, *, with_biases: bool = True) -> tuple[Any, ...]:
        """One entry a step, as kernels take them: its numbers, or a contiguous vector or tensor."""
        found: list[Any] = []
        for place, (step, each, numbers) in enumerate(zip(call.chain.steps, self.vectors, call.numbers, strict=True)):
            if each is None or (place < len(call.chain.biases) and not with_biases):
                found.append(numbers)
            else:
                found.append(contiguous(each).view(-1) if step.operand == "vector" else contiguous(each))
        return tuple(found)

    def empty_gradients(self, device: torch.device) -> "Arguments":
        """Memory for the gradients of vectors and tensors; of each, this has (shape, dtype), or None."""

        def empty(wanted):
            return None if wanted is None else torch.empty(wanted[0], dtype=wanted[1], device=device)

        return Arguments(self.input, self.weight, tuple(map(empty, self.vectors)), empty(self.bias))

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """The vectors, each in one dimension."""
        return tuple(None if each is None else each.view(-1) for each in self.vectors)


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    return tensor if tensor.is_contiguous() else do(Tensor.contiguous, tensor)


def rows_of(tensor: Tensor) -> Tensor:
    """[*, columns] as a matrix [rows, columns] of any strides, copied where it has to be."""
    if tensor.ndim == 2:
        return tensor
    shape = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        return tensor.view(shape)
    except RuntimeError:
        return do(Tensor.contiguous, tensor).view(shape)
