"""Chains as data, and what every kernel does with them: apply a chain's steps to values in registers, and its gradient.

A chain is a contraction, pointwise functions, a group norm, more pointwise functions and a reduction, each of which may
be missing. Its pointwise functions are its steps. The contraction's bias and the norm's weight and bias are steps too.
A kernel takes the chain as a constexpr, and a flat tuple of operands with one entry a step: None where there is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from triton_kernels.column_sums import empty_partials, store_sums
from triton_kernels.pointwise import ADD, MUL, Pointwise, source


@dataclass(frozen=True)
class Reduction:
    """What a chain makes of its normalised rows. It has its own backward pass.

    ``store`` is the jit function that does so with a tile (``row_minimum.store_row_minimum``), and ``plain`` the same
    of all rows in PyTorch.
    """

    name: str
    store: triton.runtime.JITFunction = field(repr=False)
    plain: Callable[[torch.Tensor], torch.Tensor] = field(repr=False)

    @property
    def cache_key(self) -> str:
        return self.store.cache_key


@dataclass(frozen=True)
class Chain:
    """contraction → ``before`` → norm → ``after`` → reduction.

    Args:
        contraction: "linear", "conv_transpose2d", or "" for none. It has a bias, which may be absent.
        before: Pointwise functions before the norm.
        norm: "group_norm", or "" for none. It has a weight and a bias, which may be absent.
        after: Pointwise functions after the norm. Without one, they follow those before it.
        reduction: What follows, or None.
    """

    contraction: str = ""
    before: tuple[Pointwise, ...] = ()
    norm: str = "group_norm"
    after: tuple[Pointwise, ...] = ()
    reduction: Reduction | None = None

    def __post_init__(self):
        if not self.norm and self.after:
            object.__setattr__(self, "before", self.before + self.after)
            object.__setattr__(self, "after", ())
        if self.reduction and (self.activation or not self.norm or self.after):
            raise ValueError("a reduction takes the values of a norm, before which only biases are added")
        known = _chains.setdefault(self.kernel, self)
        if known._functions != self._functions and known._sources != self._sources:
            raise ValueError(f"{self.kernel}: a chain of this name has other functions")

    @property
    def _functions(self) -> list[Any]:
        """What its kernel's name stands for."""
        steps = [step.declared or step for step in self.activation + self.after]
        reduces = [self.reduction.store] if self.reduction else []
        return [function for step in steps for function in (step.function, step.gradient)] + reduces

    @property
    def _sources(self) -> list[Any]:
        """The same for functions that were defined again."""
        return [source(function) for function in self._functions]

    @cached_property
    def biases(self) -> tuple[Pointwise, ...]:
        """The first steps, as far as they add vectors: z is what they make of the contraction's result."""
        steps = self._first
        count = next((place for place, step in enumerate(steps) if not step.adds_vector), len(steps))
        return steps[:count]

    @cached_property
    def activation(self) -> tuple[Pointwise, ...]:
        """The steps between z and the norm."""
        return self._first[len(self.biases) :]

    @cached_property
    def last(self) -> tuple[Pointwise, ...]:
        """The steps after the norm, which begin with its weight and its bias."""
        return ((MUL, ADD) if self.norm else ()) + self.after

    @property
    def _first(self) -> tuple[Pointwise, ...]:
        return ((ADD,) if self.contraction else ()) + self.before

    @cached_property
    def norm_place(self) -> int:
        return len(self._first)

    @cached_property
    def steps(self) -> tuple[Pointwise, ...]:
        """All pointwise functions in order: ``biases``, ``activation`` and ``last``."""
        return self._first + self.last

    def of_dtype(self, dtype: torch.dtype) -> "Chain":
        """The chain as precise as values of ``dtype`` are."""
        before, after = (tuple(step.form(dtype) for step in steps) for steps in (self.before, self.after))
        return self if (before, after) == (self.before, self.after) else replace(self, before=before, after=after)

    @cached_property
    def cache_key(self) -> str:
        """What compiled kernels depend on."""
        parts = [*(step.cache_key for step in self.steps), self.norm, len(self.biases), len(self.last)]
        return "|".join(map(str, [*parts, self.reduction and self.reduction.cache_key]))

    @cached_property
    def kernel(self) -> str:
        """The name of its product's kernel in tables: linear_hardtanh_mish_group_norm, linear_group_norm_mul_vector."""
        before, after = (
            [f"{step.name}_{step.operand}" if step.has_tensor else step.name for step in steps]
            for steps in (self.activation, self.after)
        )
        names = [*before, self.norm, *after]
        names += [self.reduction.name] if self.reduction else []
        return "_".join([self.contraction, *(filter(None, names) if any(names) else ["bias"])]).strip("_")

    def targets(self, operands: Sequence[Any], gradients: Sequence[torch.Tensor | None], chunks: int):
        """Where a kernel that takes rows in ``chunks`` stores the gradients of the operands, None where not wanted.

        Returns one for each of the chain's biases, one for each other operand that is a tensor, what these are, and
        one for each step, for ``add_up``. Sums over rows are [chunks, C]; a tensor's gradient has its shape.
        """
        biases = len(self.biases)
        vectors = [
            gradient if step.operand == "vector" else None for step, gradient in zip(self.steps, gradients, strict=True)
        ]
        sums = empty_partials(vectors, chunks)
        stored = sums[:biases]
        if chunks > 1:  # the gradients of all biases are the same sums, which are stored once
            first = next((each for each in stored if each is not None), None)
            sums[:biases] = [None if each is None else first for each in stored]
            stored = [each if each is first else None for each in stored]
        partials = [gradient if each is None else each for each, gradient in zip(sums, gradients, strict=True)]
        kept = [place for place in range(biases, len(self.steps)) if self.has_gradient(place, operands)]
        others, kinds = tuple(partials[place] for place in kept), tuple(self.steps[place].operand for place in kept)
        return tuple(stored), others, kinds, partials

    def has_gradient(self, place: int, operands: Sequence[Any]) -> bool:
        """Whether ``steps_gradient`` returns one of the operand of the step at ``place``."""
        step = self.steps[place]
        return step.adds or (step.has_tensor and operands[place] is not None)


#: All chains of this process by the names of their kernels, the first one where only their biases differ.
_chains: dict[str, Chain] = {}


def chain_of(kernel: str) -> Chain | None:
    """A chain whose product's kernel has this name, or None where this process has made none."""
    return _chains.get(kernel)


@triton.jit
def no_sums(tile, KINDS: tl.constexpr):
    """A tile of zeros for each of KINDS."""
    sums = ()
    for _ in tl.static_range(len(KINDS)):
        sums = sums + (tl.zeros_like(tile),)
    return sums


@triton.jit
def add_gradients(sums, gradients, targets, place, inside, POINTERS: tl.constexpr, KINDS: tl.constexpr):
    """The sums with the gradients of vectors added; those of tensors are stored where POINTERS says."""
    added = ()
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == "vector":
            added = added + (sums[i] + tl.where(inside, gradients[i], 0.0),)
        else:
            added = added + (sums[i],)
            if targets[i] is not None:
                pointers = POINTERS(targets[i], place, inside)
                tl.store(pointers, gradients[i].to(pointers.dtype.element_ty), mask=inside)
    return added


@triton.jit
def store_gradients(sums, targets, place, real, AXIS: tl.constexpr, KINDS: tl.constexpr):
    """Store the sums over an axis of a program's tiles at ``place``."""
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == "vector":
            store_sums(targets[i], place, tl.reshape(tl.sum(sums[i], AXIS), place.shape), real)


@triton.jit
def apply_steps(value, operands, CHAIN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """What the steps FIRST to END make of a value. ``operands`` are loaded, as by ``load_vectors``."""
    for i in tl.static_range(FIRST, END):
        if CHAIN.steps[i].operand == "":
            value = CHAIN.steps[i].function(value, None)
        elif len(operands[i]) > 0:
            value = CHAIN.steps[i].function(value, operands[i][0])
    return value


@triton.jit
def steps_gradient(gradient, value, operands, CHAIN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """The gradient at a value of the steps FIRST to END, and a tuple of those of their tensors.

    Absent ones are left out, but for those that are added: their gradient does not depend on them.
    """
    of_operands = ()
    if FIRST < END:
        if CHAIN.steps[FIRST].operand == "":
            inner = CHAIN.steps[FIRST].function(value, None)
            gradient, of_operands = steps_gradient(gradient, inner, operands, CHAIN, FIRST + 1, END)
            gradient = CHAIN.steps[FIRST].gradient(gradient, value, None)
        elif len(operands[FIRST]) > 0:
            inner = CHAIN.steps[FIRST].function(value, operands[FIRST][0])
            gradient, of_operands = steps_gradient(gradient, inner, operands, CHAIN, FIRST + 1, END)
            if CHAIN.steps[FIRST].has_tensor:
                gradient, own = CHAIN.steps[FIRST].gradient(gradient, value, operands[FIRST][0])
                of_operands = (own,) + of_operands
            else:
                gradient = CHAIN.steps[FIRST].gradient(gradient, value, operands[FIRST][0])
        else:
            gradient, of_operands = steps_gradient(gradient, value, operands, CHAIN, FIRST + 1, END)
            if CHAIN.steps[FIRST].adds:
                of_operands = (gradient,) + of_operands
    return gradient, of_operands


@triton.jit
def load_vectors(operands, columns, real, CHAIN: tl.constexpr, AXIS: tl.constexpr = None):
    """The operands of CHAIN's steps, each in a tuple that is empty for None, with vectors loaded at ``columns``.

    They are in float32, and have one more axis where AXIS says. It is added afterwards, as loads along it would be
    repeated. (A tuple that is made in a kernel cannot hold None.)
    """
    loaded = ()
    for i in tl.static_range(len(CHAIN.steps)):
        if operands[i] is None:
            loaded = loaded + ((),)
        elif CHAIN.steps[i].operand == "vector":
            vector = tl.load(operands[i] + columns, mask=real, other=0.0).to(tl.float32)
            loaded = loaded + ((vector if AXIS is None else tl.expand_dims(vector, AXIS),),)
        else:
            loaded = loaded + ((operands[i],),)
    return loaded


@triton.jit
def load_tensors(operands, place, inside, POINTERS: tl.constexpr, CHAIN: tl.constexpr):
    """The same with the tensors among ``load_vectors``'s result loaded in float32.

    POINTERS(tensor, place, inside) are those to a tile of one.
    """
    loaded = ()
    for i in tl.static_range(len(CHAIN.steps)):
        if CHAIN.steps[i].operand == "tensor" and len(operands[i]) > 0:
            pointers = POINTERS(operands[i][0], place, inside)
            loaded = loaded + ((tl.load(pointers, mask=inside, other=0.0).to(tl.float32),),)
        else:
            loaded = loaded + (operands[i],)
    return loaded
