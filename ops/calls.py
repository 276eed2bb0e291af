"""Calls of chains as data: a chain with the numbers it is called with, as a value and as text, and with its tensors.

The text describes itself, as in ``linear -> add -> hardtanh(-1.0, 1.0) -> mish -> group_norm(256, 1e-05) -> mul -> no
add``. Operators of PyTorch's take it, with a fingerprint behind it, so compiled and exported graphs have it, which may
outlive the process.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ops import precision
from ops.convolution import IS_TRANSPOSED, Geometry
from ops.fingerprint import check, fingerprint
from triton_kernels.built_in import NAMED, name_of, named
from triton_kernels.chain import Chain, Reduction
from triton_kernels.launch import call as do
from triton_kernels.row_minimum import ROW_MINIMUM

_REDUCTIONS: dict[str, Reduction] = {ROW_MINIMUM.name: ROW_MINIMUM}
#: What texts name beside them.
_CONTRACTIONS = ("linear", *IS_TRANSPOSED)
_OTHER_NAMES = (*_CONTRACTIONS, "group_norm", *_REDUCTIONS, *precision.DTYPES)
_ARROW = " -> "
#: The pointwise functions that a text may name.
_POINTWISE = dict(NAMED)


def register(chain: Chain) -> None:
    """Let texts name the chain's functions. Raises ValueError where one of them has another's name."""
    for step in (*chain.before, *chain.after):
        name = name_of(step)
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", step.name):
            raise ValueError(f"a pointwise function's name must be a lower-case identifier, got {step.name!r}")
        if step.name in _OTHER_NAMES:
            raise ValueError(f"a pointwise function cannot be called {step.name!r}: that is another part of a chain")
        known = _POINTWISE.setdefault(name, step)
        if known != step and known.cache_key != step.cache_key:
            raise ValueError(f"the pointwise function {name!r} is another one's name already: {known.function}")


def text_of(chain: Chain, steps: Sequence[str], sizes: str = "", of_norm: str = "", of_reduction: str = "") -> str:
    """The chain in words: those of its steps, and what is written behind the names of its other parts."""
    reduction = chain.reduction.name + of_reduction if chain.reduction else ""
    first, last = steps[: chain.norm_place], steps[chain.norm_place :]
    return _ARROW.join(filter(None, [chain.contraction + sizes, *first, chain.norm + of_norm, *last, reduction]))


@dataclass(frozen=True)
class Call:
    """A chain with a call's arguments that are no tensors.

    ``numbers`` and ``present`` have one entry a step: its numbers, or None, and whether its operand is there.
    """

    chain: Chain
    numbers: tuple[tuple[float, ...] | None, ...]
    present: tuple[bool, ...]
    num_groups: int = 1
    eps: float = 0.0
    #: A convolution's Geometry, and whether PyTorch's setting lets it use TF32.
    geometry: Any = None
    allow_tf32: bool = False
    has_bias: bool = False  # of the reduction
    #: The result's dtype, where that is not the input's.
    result: torch.dtype | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"normfuse::{self.chain.kernel}"

    @property
    def text(self) -> str:
        """The call in words, from which ``parse`` makes an equal one."""
        chain = self.chain
        given = ["" if numbers is None else f"({', '.join(map(repr, numbers))})" for numbers in self.numbers]
        steps = [
            ("" if present else "no ") + name_of(step) + numbers
            for step, numbers, present in zip(chain.steps, given, self.present, strict=True)
        ]
        # An integer that a compiler leaves open is settled here, and guarded.
        sizes = [str(int(each)) for each in (*self.geometry.numbers, self.allow_tf32)] if self.geometry else []
        of_norm = f"({int(self.num_groups)}, {self.eps!r})" if chain.norm else ""
        text = text_of(chain, steps, f"({', '.join(sizes)})" if sizes else "", of_norm, f"({int(self.has_bias)})")
        return text + (_ARROW + precision.name_of(self.result) if self.result else "")

    @property
    def text_in_graph(self) -> str:
        """The text that operators take."""
        return f"{self.text} | {fingerprint(self.chain.steps)}"


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Call:
    """The call that a text describes, with a fingerprint or without.

    Raises ValueError where it names a function that this process does not have, or another version wrote it.
    """
    text, *written_by = text.split(" | ")
    for each in written_by:
        check(each)
    contraction, norm, reduction = "", "", None
    steps: list[tuple] = []
    before: int | None = None  # how many steps are before the norm
    options: dict = {}
    for word in text.split(_ARROW):
        described: Any = re.fullmatch(r"(no )?([a-z0-9_ ]+?)(?:\((.*)\))?", word)
        absent, name, written = described.groups()
        numbers: Any = None if written is None else tuple(map(float, filter(None, written.split(", "))))
        if name in _CONTRACTIONS:
            contraction = name
            if numbers:
                *geometry, allow_tf32 = map(int, numbers)
                options["geometry"] = Geometry.of_numbers(geometry, IS_TRANSPOSED[name])
                options["allow_tf32"] = bool(allow_tf32)
        elif name == "group_norm":
            norm, before = name, len(steps)
            options |= {"num_groups": int(numbers[0]), "eps": numbers[1]}
        elif name in _REDUCTIONS:
            reduction, options["has_bias"] = _REDUCTIONS[name], bool(numbers[0])
        elif name in precision.DTYPES:
            options["result"] = precision.DTYPES[name]
        elif step := named(name, _POINTWISE):
            steps.append((step, numbers, not absent))
        else:
            raise ValueError(
                f"{text!r} names the pointwise function {name!r}, which this process does not have: make the Chain "
                "that has it first"
            )
    functions, of_steps, present = zip(*steps, strict=True)
    after = () if before is None else functions[before + 2 :]
    return Call(
        Chain(contraction, functions[bool(contraction) : before], norm, after, reduction), of_steps, present, **options
    )


@dataclass(frozen=True)
class Arguments:
    """A call with its tensors, or with what stands for them.

    ``vectors`` has one entry a step, its vector or tensor, and ``bias`` is the reduction's.
    """

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

    @property
    def dtype(self) -> torch.dtype:
        """That of input and weight, of which one is there."""
        return (self.weight if self.input is None else self.input).dtype

    @property
    def result_dtype(self) -> torch.dtype:
        """That of the call's result."""
        return self.call.result or self.dtype

    @functools.cached_property
    def operands(self) -> tuple[Any, ...]:
        """One entry a step, as kernels take them: its numbers, or a contiguous tensor without dimensions of one."""
        return self._operands(contiguous)

    @property
    def operands_of_images(self) -> tuple[Any, ...]:
        """The same where kernels take images of any strides: tensors are [B, C, S]."""
        return self._operands(as_volume)

    def _operands(self, of_tensors: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
        def operand(step: Any, given: torch.Tensor) -> torch.Tensor:
            tensor = (of_tensors if step.operand == "tensor" else contiguous)(given)
            return tensor.view(step.shape(tensor.shape))

        return tuple(
            numbers if each is None else operand(step, each)
            for step, each, numbers in zip(self.call.chain.steps, self.vectors, self.call.numbers, strict=True)
        )

    @property
    def divided(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Two parts of ``operands``: those of the chain's biases, and all with None for these."""
        first = len(self.call.chain.biases)
        return self.operands[:first], (*[None] * first, *self.operands[first:])


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy."""
    return tensor if tensor.is_contiguous() else do(torch.Tensor.contiguous, tensor)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[*, columns] as a matrix [rows, columns] of any strides, copied where it has to be."""
    return tensor if tensor.ndim == 2 else _viewed(tensor, (math.prod(tensor.shape[:-1]), tensor.shape[-1]))


def as_volume(tensor: torch.Tensor) -> torch.Tensor:
    """View or copy as [B, C, S]: samples, channels and pixels. The pixels are all further dimensions."""
    return _viewed(tensor, (*tensor.shape[:2], math.prod(tensor.shape[2:])))


def _viewed(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError:
        return do(torch.Tensor.contiguous, tensor).view(shape)
