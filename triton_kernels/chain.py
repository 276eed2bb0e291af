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
from triton_kernels.device import IN_INTERPRETER
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

    def __hash__(self) -> int:
        return hash((self.name, source(self.store)))

    @property
    def cache_key(self) -> str:
        return str(source(self.store))


@dataclass(frozen=True)
class Chain:
    """contraction → ``before`` → norm → ``after`` → reduction.

    Args:
        contraction: "linear", "conv2d", "conv_transpose2d", or "" for none. It has a bias, which may be absent.
        before: Pointwise functions before the norm.
        norm: "group_norm", or "" for none. It has a weight and a bias, which may be absent.
        after: Pointwise functions after the norm. Without one, they follow those before it.
        reduction: What follows, or None.
        adds_later: Whether z is what the contraction's own bias alone makes of its result. Vectors that are added after
            that are then not rounded with it.
    """

    contraction: str = ""
    before: tuple[Pointwise, ...] = ()
    norm: str = "group_norm"
    after: tuple[Pointwise, ...] = ()
    reduction: Reduction | None = None
    adds_later: bool = False

    def __post_init__(self):
        for name, steps in (("before", self.before), ("after", self.after)):
            for place, step in enumerate(steps):
                if step.earlier > place:
                    most = f"at most {place} steps, to where {name} begins"
                    raise ValueError(f"{name}[{place}] must reach back {most}, got {step.operand}")
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
        """The first steps, as far as they add vectors: z is what they make of the contraction's result.

        A value that a later step takes is z or comes after it.
        """
        steps = self._first
        ends = [place for place, step in enumerate(steps) if not step.adds_vector]
        most = 1 if self.adds_later else len(steps)
        return steps[: min([most, *ends, *_reached(steps)])]

    @cached_property
    def reached(self) -> tuple[bool, ...]:
        """Of each step whether its value, what it is applied to, is a later step's operand too."""
        places = _reached(self.steps)
        return tuple([place in places for place in range(len(self.steps))])

    @cached_property
    def activation(self) -> tuple[Pointwise, ...]:
        """The steps between z and the norm."""
        return self._first[len(self.biases) :]

    @cached_property
    def last(self) -> tuple[Pointwise, ...]:
        """The steps after the norm, which begin with its weight and its bias."""
        return ((MUL, ADD) if self.norm else ()) + self.after

    @cached_property
    def _first(self) -> tuple[Pointwise, ...]:
        """The steps before the norm. The value that it takes is rounded, whichever of the last steps is absent: see
        ``rounded_product``."""
        before = list(self.before)
        for place in reversed(range(len(before) if self.norm else 0)):
            before[place] = before[place].rounded
            if not before[place].has_tensor:
                break
        return ((ADD,) if self.contraction else ()) + tuple(before)

    @cached_property
    def norm_place(self) -> int:
        return len(self._first)

    @cached_property
    def added_last(self) -> int:
        """How many of the last steps before the norm add one value a channel. The gradient of each such value is the
        sum of the gradients of what the norm takes."""
        kinds = [step.adds and step.operand in ("vector", "sample") for step in reversed(self._first)]
        return kinds.index(False) if False in kinds else len(kinds)

    @cached_property
    def is_sum(self) -> bool:
        """Whether all that it does is add. Then the gradient of each term is the result's, or sums of that."""
        return not self.norm and all(step.adds and step.operand != "sample" for step in self.steps)

    @cached_property
    def steps(self) -> tuple[Pointwise, ...]:
        """All pointwise functions in order: ``biases``, ``activation`` and ``last``."""
        return self._first + self.last

    @cached_property
    def takes_tensors(self) -> bool:
        """Whether a step takes a tensor of the value's shape."""
        return any(step.operand == "tensor" for step in self.steps)

    @property
    def has_rows(self) -> bool:
        """Whether the channels are the values' last dimension. Else they are the second."""
        return has_rows(self.contraction, self.norm)

    def of_dtype(self, dtype: torch.dtype, result: torch.dtype | None = None) -> "Chain":
        """The chain as precise as values of ``dtype`` are, and its result of this dtype or another.

        Where one is wider, it is behind a contraction, whose result has ``dtype``, and else behind the input.
        """
        last = result or dtype
        first = dtype if self.contraction and self.norm else last
        return self._changed(lambda step: step.form(first), lambda step: step.form(last))

    @property
    def of_rows(self) -> "Chain":
        """The chain where a sample is a row, so that one value a channel of each sample is one a value."""

        def change(step: Pointwise) -> Pointwise:
            return step.with_operand("tensor") if step.operand == "sample" else step

        return self._changed(change, change)

    def _changed(self, *changes: Callable[[Pointwise], Pointwise]) -> "Chain":
        """The chain with other functions before and after the norm, or itself where none is another."""
        before, after = (tuple(map(*each)) for each in zip(changes, (self.before, self.after), strict=True))
        return self if (before, after) == (self.before, self.after) else replace(self, before=before, after=after)

    @cached_property
    def cache_key(self) -> str:
        """What compiled kernels depend on."""
        parts = [*(step.cache_key for step in self.steps), self.norm, len(self.biases), len(self.last)]
        return "|".join(map(str, [*parts, self.reduction and self.reduction.cache_key]))

    @cached_property
    def kernel(self) -> str:
        """The name of its product's kernel in tables: linear_hardtanh_mish_group_norm, linear_group_norm_mul_vector."""
        before, after = ([step.part for step in steps] for steps in (self.activation, self.after))
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
            None if step.operand == "tensor" else gradient for step, gradient in zip(self.steps, gradients, strict=True)
        ]
        sums = empty_partials(vectors, chunks)
        stored = sums[:biases]
        if chunks > 1:  # the gradients of all biases are the same sums, which are stored once
            first = next((each for each in stored if each is not None), None)
            sums[:biases] = [None if each is None else first for each in stored]
            stored = [each if each is first else None for each in stored]
        partials = [gradient if each is None else each for each, gradient in zip(sums, gradients, strict=True)]
        kept = [place for place in range(biases, len(self.steps)) if self.has_gradient(place, operands)]
        return tuple(stored), tuple(partials[place] for place in kept), self.kinds(kept), partials

    def kinds(self, places: Sequence[int]) -> tuple[str, ...]:
        """What kernels take the operands at these places for: a tensor's gradient is stored, a vector's added up."""
        return tuple("tensor" if self.steps[place].operand == "tensor" else "vector" for place in places)

    def has_gradient(self, place: int, operands: Sequence[Any]) -> bool:
        """Whether ``steps_gradient`` returns one of the operand of the step at ``place``."""
        step = self.steps[place]
        return step.adds or (step.has_tensor and operands[place] is not None)


#: All chains of this process by the names of their kernels, the first one where only their biases differ.
_chains: dict[str, Chain] = {}


def chain_of(kernel: str) -> Chain | None:
    """A chain whose product's kernel has this name, or None where this process has made none."""
    return _chains.get(kernel)


def has_rows(contraction: str, norm: str) -> bool:
    """Whether the channels of a chain of this contraction and norm are the last dimension. Without a norm, they are."""
    return contraction == "linear" or not norm


def _reached(steps: Sequence[Pointwise]) -> set[int]:
    """The places of the steps whose value is a later step's operand."""
    return {place - step.earlier for place, step in enumerate(steps) if step.earlier}


@triton.jit
def no_sums(tile, KINDS: tl.constexpr):
    """A tile of zeros for each of KINDS."""
    sums = ()
    for _ in tl.static_range(len(KINDS)):
        sums = sums + (tl.zeros_like(tile),)
    return sums


@triton.jit
def added(sum, values, AXIS: tl.constexpr):
    """sum + values, which are added up first along an axis if it is not None: one that a thread holds whole."""
    return sum + (values if AXIS is None else tl.sum(values, AXIS, keep_dims=True))


@triton.jit
def add_gradients(
    sums, gradients, targets, place, inside, POINTERS: tl.constexpr, KINDS: tl.constexpr, AXIS: tl.constexpr = None
):
    """The sums with the gradients of vectors ``added``; those of tensors are stored where POINTERS says."""
    found = ()
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == "vector":
            found = found + (added(sums[i], tl.where(inside, gradients[i], 0.0), AXIS),)
        else:
            found = found + (sums[i],)
            if targets[i] is not None:
                pointers = POINTERS(targets[i], place, inside)
                tl.store(pointers, gradients[i].to(pointers.dtype.element_ty), mask=inside)
    return found


@triton.jit
def store_gradients(sums, targets, place, real, AXIS: tl.constexpr, KINDS: tl.constexpr):
    """Store the sums over an axis of a program's tiles at ``place``."""
    for i in tl.static_range(len(KINDS)):
        if KINDS[i] == "vector":
            store_sums(targets[i], place, tl.reshape(tl.sum(sums[i], AXIS), place.shape), real)


@triton.jit
def values_of_steps(value, operands, CHAIN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """A value, and what each of the steps FIRST to END makes of it. ``operands`` are loaded, as by ``load_vectors``."""
    values = (value,)
    for i in tl.static_range(FIRST, END):
        if CHAIN.steps[i].earlier > 0:
            value = CHAIN.steps[i].function(value, values[i - FIRST - CHAIN.steps[i].earlier])
        elif CHAIN.steps[i].operand == "":
            value = CHAIN.steps[i].function(value, None)
        elif len(operands[i]) > 0:
            value = CHAIN.steps[i].function(value, operands[i][0])
        values = values + (value,)
    return values


@triton.jit
def apply_steps(value, operands, CHAIN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """What the steps FIRST to END make of a value."""
    values = values_of_steps(value, operands, CHAIN, FIRST, END)
    return values[END - FIRST]


@triton.jit
def steps_gradient(gradient, value, operands, CHAIN: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr):
    """The gradient at a value of the steps FIRST to END, and a tuple of those of their tensors.

    Absent ones are left out, but for those that are added: their gradient does not depend on them.
    """
    values = values_of_steps(value, operands, CHAIN, FIRST, END)
    of_operands = ()
    passed = ()  # of each step that came: to the earlier value that it takes, or just anything
    for i in tl.static_range(END - 1, FIRST - 1, -1):
        own = gradient
        if CHAIN.steps[i].earlier > 0:
            earlier = values[i - FIRST - CHAIN.steps[i].earlier]
            gradient, own = CHAIN.steps[i].gradient(gradient, values[i - FIRST], earlier)
        elif CHAIN.steps[i].operand == "":
            gradient = CHAIN.steps[i].gradient(gradient, values[i - FIRST], None)
        elif len(operands[i]) == 0:
            if CHAIN.steps[i].adds:
                of_operands = (gradient,) + of_operands
        elif CHAIN.steps[i].has_tensor:
            gradient, own = CHAIN.steps[i].gradient(gradient, values[i - FIRST], operands[i][0])
            of_operands = (own,) + of_operands
        else:
            gradient = CHAIN.steps[i].gradient(gradient, values[i - FIRST], operands[i][0])
        passed = (own,) + passed
        for j in tl.static_range(i + 1, END):
            if j - CHAIN.steps[j].earlier == i:
                gradient += passed[j - i]
    return gradient, of_operands


@triton.jit
def load_vectors(
    operands, columns, real, CHAIN: tl.constexpr, AXIS: tl.constexpr = None, of_sample=None, WIDE: tl.constexpr = True
):
    """The operands of CHAIN's steps, each in a tuple that is empty for None, with vectors loaded at ``columns``.

    Those of samples are loaded too, if ``of_sample`` says where a sample's begin. They are in float32, if WIDE, and
    have one more axis where AXIS says. It is added afterwards, as loads along it would be repeated. (A tuple that is
    made in a kernel cannot hold None.)
    """
    loaded = ()
    for i in tl.static_range(len(CHAIN.steps)):
        if operands[i] is None:
            loaded = loaded + ((),)
        elif CHAIN.steps[i].operand == "vector" or (CHAIN.steps[i].operand == "sample" and of_sample is not None):
            pointer = operands[i] if CHAIN.steps[i].operand == "vector" else operands[i] + of_sample
            vector = tl.load(pointer + columns, mask=real, other=0.0)
            vector = vector.to(tl.float32) if WIDE else vector
            loaded = loaded + ((vector if AXIS is None else tl.expand_dims(vector, AXIS),),)
        elif CHAIN.steps[i].operand == "scalar":
            loaded = loaded + ((tl.load(operands[i]).to(tl.float32),),)
        else:
            loaded = loaded + ((operands[i],),)
    return loaded


@triton.jit
def widened_here(vector):
    """A vector in float32. A compiler that made that of 16 bits before a loop would keep twice the registers in it
    (Triton 3.9 spilled 112 bytes of a layer norm's gradient, 8% of its time: rows of 4096 with GELU, H100)."""
    if vector.dtype.primitive_bitwidth == 16 and not IN_INTERPRETER:
        vector = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [vector], dtype=vector.dtype, is_pure=False, pack=2
        )
    return vector.to(tl.float32)


@triton.jit
def load_tensors(operands, place, inside, POINTERS: tl.constexpr, CHAIN: tl.constexpr):
    """The same in float32, with the tensors among ``load_vectors``'s result loaded.

    POINTERS(tensor, place, inside) are those to a tile of one.
    """
    loaded = ()
    for i in tl.static_range(len(CHAIN.steps)):
        if CHAIN.steps[i].operand == "tensor" and len(operands[i]) > 0:
            pointers = POINTERS(operands[i][0], place, inside)
            loaded = loaded + ((tl.load(pointers, mask=inside, other=0.0).to(tl.float32),),)
        elif CHAIN.steps[i].operand == "vector" and len(operands[i]) > 0:
            loaded = loaded + ((widened_here(operands[i][0]),),)
        else:
            loaded = loaded + (operands[i],)
    return loaded
