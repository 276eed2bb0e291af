"""Calls of chains as data: a chain with the numbers it is called with, as a value and as text.

The text describes itself, as in ``linear -> add -> hardtanh(-1.0, 1.0) -> mish -> group_norm(256, 1e-05) -> mul -> no
add``. Operators of PyTorch's take it, so compiled and exported graphs have it, which may outlive the process.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

from ops.convolution import ConvTranspose2dGeometry
from triton_kernels.chain import Chain, Reduction
from triton_kernels.pointwise import ADD, GELU, GELU_TANH, HARDTANH, MISH, MUL, Pointwise
from triton_kernels.row_minimum import ROW_MINIMUM

_REDUCTIONS: dict[str, Reduction] = {ROW_MINIMUM.name: ROW_MINIMUM}
#: The pointwise functions that a text may name.
_POINTWISE = {each.name: each for each in (ADD, MUL, HARDTANH, MISH, GELU, GELU_TANH)}
#: Operands of another kind than the function's usual one are named with it.
_ARROW = " -> "


def register(chain: Chain) -> None:
    """Let texts name the chain's functions. Raises ValueError where one of them has another's name."""
    for step in (*chain.before, *chain.after):
        name = _name(step)
        if not re.fullmatch(r"[a-z_][a-z0-9_ ]*", name):
            raise ValueError(f"a pointwise function's name must be a lower-case identifier, got {step.name!r}")
        known = _POINTWISE.setdefault(name, step)
        if known != step and known.cache_key != step.cache_key:
            raise ValueError(f"the pointwise function {name!r} is another one's name already: {known.function}")


def _name(step: Pointwise) -> str:
    usual = step.operand == "vector" or step.name not in ("add", "mul")
    return step.name if usual else f"{step.name} {step.operand}"


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
    #: A convolution's ConvTranspose2dGeometry, and whether PyTorch's setting lets it use TF32.
    geometry: Any = None
    allow_tf32: bool = False
    has_bias: bool = False  # of the reduction

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"normfuse::{self.chain.kernel}"

    @property
    def text(self) -> str:
        """The call in words, from which ``parse`` makes an equal one."""
        chain = self.chain
        words = []
        # An integer that a compiler leaves open is settled here, and guarded.
        if self.geometry is not None:
            sizes = *self.geometry.numbers, self.allow_tf32
            words.append(f"{chain.contraction}({', '.join([str(int(each)) for each in sizes])})")
        elif chain.contraction:
            words.append(chain.contraction)
        steps = [
            ("" if present else "no ") + _name(step) + ("" if numbers is None else f"({', '.join(map(repr, numbers))})")
            for step, numbers, present in zip(chain.steps, self.numbers, self.present, strict=True)
        ]
        before = len(chain.steps) - len(chain.last)
        norm = [f"{chain.norm}({int(self.num_groups)}, {self.eps!r})"] if chain.norm else []
        words += [*steps[:before], *norm, *steps[before:]]
        if chain.reduction:
            words.append(f"{chain.reduction.name}({int(self.has_bias)})")
        return _ARROW.join(words)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Call:
    """The call that a text describes. Raises ValueError where it names a function that this process does not have."""
    contraction, norm, reduction = "", "", None
    options: dict = {}
    stages: tuple[list, list] = ([], [])
    for word in text.split(_ARROW):
        described: Any = re.fullmatch(r"(no )?([a-z0-9_ ]+?)(?:\((.*)\))?", word)
        absent, name, written = described.groups()
        numbers: Any = None if written is None else tuple(map(float, filter(None, written.split(", "))))
        if name in ("linear", "conv_transpose2d"):
            contraction = name
            if numbers is not None:
                *geometry, allow_tf32 = map(int, numbers)
                options |= {"geometry": ConvTranspose2dGeometry.of_numbers(geometry), "allow_tf32": bool(allow_tf32)}
        elif name == "group_norm":
            norm = name
            options |= {"num_groups": int(numbers[0]), "eps": numbers[1]}
        elif name in _REDUCTIONS:
            reduction, options["has_bias"] = _REDUCTIONS[name], bool(numbers[0])
        elif name in _POINTWISE:
            stages[bool(norm)].append((_POINTWISE[name], numbers, not absent))
        else:
            raise ValueError(
                f"{text!r} names the pointwise function {name!r}, which this process does not have: make the Chain "
                "that has it first"
            )
    steps = [*stages[0], *stages[1]]
    before = tuple(step for step, _, _ in stages[0])[bool(contraction) :]
    after = tuple(step for step, _, _ in stages[1])[2 if norm else 0 :]
    chain = Chain(contraction, before, norm, after, reduction)
    return Call(chain, tuple(each[1] for each in steps), tuple(each[2] for each in steps), **options)
