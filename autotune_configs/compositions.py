"""Chains that have no short name: in words, or as a variable of a module."""

import contextlib
import functools
import math
import re
import sys
from importlib import import_module
from typing import Any

from autotune_configs.chains import CHAINS, DTYPES, PASSES, NamedChain
from autotune_configs.siblings import complaint
from triton_kernels.built_in import NAMED, NUMBERS, named
from triton_kernels.chain import Chain
from triton_kernels.grid import blocks_of
from triton_kernels.row_minimum import ROW_MINIMUM

_ARROW = "->"
#: Groups of a norm, where none are written.
_NUM_GROUPS = 32
_WORD = re.compile(r"(no )?([a-z0-9_]+(?: [a-z]+(?: \d+)?)?)(?:\(([^()]*)\))?")
_VARIABLE = re.compile(r"([\w.]+):(\w+)(?:\(([^()]*)\))?")


def is_composition(text: str) -> bool:
    return _ARROW in text or ":" in text


@functools.cache
def composition(text: str) -> NamedChain:
    """The chain that begins with a linear layer that a text describes.

    In words, it is ``linear -> mish -> group_norm(32) -> mul -> silu``: functions by PyTorch's names, arithmetic with a
    vector, or with numbers or a tensor where that is written (``add tensor``), ``layer_norm`` or ``group_norm`` with
    its number of groups, and ``row_minimum``. Biases, a norm's weight and bias, and the numbers of functions are no
    part of what is tuned. A call's text, as ``ops.explain`` prints it, is accepted too. ``module:variable`` names a
    ``Chain``, and ``module:variable(64)`` its number of groups.

    A tensor in words has the values' shape. To values of one row that is a vector, as in a call.

    Raises ValueError where that is no such chain.
    """
    in_words = _ARROW in text
    chain, num_groups = _of_words(text) if in_words else _of_variable(text)
    if chain.contraction != "linear":
        raise ValueError(f"{text!r} must begin with linear; other chains have the kernels that show --list tells")
    return NamedChain(chain, "", num_groups=num_groups, takes_any_shape=in_words)


def kernels_of(name: str) -> set[str]:
    """The kernels that a chain looks up, or the kernel of this name."""
    chain = composition(name) if is_composition(name) else CHAINS.get(name)
    if chain is None:
        return {name}
    *sizes, channels = chain.target
    if chain.num_groups:  # as many channels as make whole groups
        channels = blocks_of(channels, chain.num_groups) * chain.num_groups
    return {problem.kernel for dtype in DTYPES for problem in chain.problems((*sizes, channels), dtype, PASSES)}


def _of_words(text: str) -> tuple[Chain, int]:
    words = [_WORD.fullmatch(word.strip()) for word in text.split(_ARROW)]
    contraction, norm, num_groups = "", "", 1
    reduction = None
    steps: dict[str, list[Any]] = {"": [], "group_norm": []}  # before the norm and after it
    of_norm = 0
    for place, word in enumerate(words):
        if word is None:
            raise ValueError(f"{text!r} is no chain in words: {text.split(_ARROW)[place].strip()!r}")
        absent, name, written = word.groups()
        if of_norm:  # its weight and its bias, which a call's text has
            of_norm -= 1
            continue
        if place and place == len(words) - 1 and word[0] in DTYPES:  # of a call's result
            continue
        step, least, most = None, 0, 0.0
        if place == 0:
            contraction, most = name, 0.0 if name == "linear" else math.inf  # which is refused later
        elif name == "layer_norm" and not norm:
            norm = "group_norm"
        elif name == "group_norm" and not norm:
            norm, least, most = name, 1, 2
            num_groups = _NUM_GROUPS if written is None else _groups(text, written.partition(",")[0])
            weight_and_bias = [each and each[2] for each in words[place + 1 : place + 3]]
            of_norm = 2 * ("," in (written or "") and weight_and_bias == ["mul", "add"])
        elif name == ROW_MINIMUM.name:
            reduction, most = ROW_MINIMUM, 1
        else:
            step = named(f"{name} numbers" if written is not None and f"{name} numbers" in NAMED else name)
            if step is None:
                raise ValueError(f"{name!r} in {text!r} is not one of {', '.join(NAMED)}")
            defaults = [*NUMBERS.get(step.name, {"min_val": -1.0, "max_val": 1.0}).values()]
            defaults = defaults if step.operand == "numbers" else []
            least, most = defaults.count(None), len(defaults)
            steps[norm].append(step)
        if absent and not (step and step.has_tensor):
            raise ValueError(f"{word[0]!r} in {text!r} must not be absent")
        if reduction and name != ROW_MINIMUM.name:
            raise ValueError(f"{word[0]!r} in {text!r} follows a reduction, which ends a chain")
        if written is not None:
            _, *eps = _numbers(f"{word[0]!r} in {text!r}", written, least, most) or [0.0]
            if name == "group_norm" and not all(0 <= each < math.inf for each in eps):
                raise ValueError(f"{word[0]!r} in {text!r} must have an eps that is finite and not negative")
    return Chain(contraction, tuple(steps[""]), norm, tuple(steps["group_norm"]), reduction), num_groups


def _groups(text: str, written: str) -> int:
    """The number of groups that is written in a chain's text."""
    if not re.fullmatch(r"[1-9]\d{0,9}", written.strip()):
        raise ValueError(f"{text[:200]!r} must have a positive number of groups, got {written.strip()[:20] or 'none'}")
    return int(written)


def _numbers(what: str, written: str, least: int, most: float) -> list[float]:
    """What is written between the parentheses."""
    items = written.split(",") if written.strip() else []
    with contextlib.suppress(ValueError):
        numbers = list(map(float, items))
        if least <= len(numbers) <= most:
            return numbers
    expected = f"{least} to {most} numbers" if most > 1 else "a number" if most else "no numbers"
    raise ValueError(f"{what} takes {expected}")


def _of_variable(text: str) -> tuple[Chain, int]:
    if not (found := _VARIABLE.fullmatch(text.strip())):
        raise ValueError(f"{text!r} is no module:variable")
    module, name, written = found.groups()
    num_groups = _NUM_GROUPS if written is None else _groups(text, written)
    if "" not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")  # the current folder, which a script's path does not have
    try:
        chain = getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # which a module may raise in any way, and sys.exit another one
        kind = type(error).__name__
        reason = str(error) or kind if isinstance(error, Exception) else f"{kind}: {error}".removesuffix(": ")
        told = complaint("ops")  # which the current folder may have in its place
        raise ValueError(f"{text!r} cannot be imported: {reason}{f'; it {told}' if told else ''}") from None
    if not isinstance(chain, Chain):
        raise ValueError(f"{text!r} must be a Chain, got {type(chain).__name__}")
    return chain, num_groups if chain.norm else 1
