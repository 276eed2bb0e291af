"""Chains that have no short name: in words, or as a variable of a module."""

import functools
import re
from importlib import import_module
from typing import Any

from autotune_configs.chains import CHAINS, DTYPES, PASSES, NamedChain
from triton_kernels.built_in import NAMED, named
from triton_kernels.chain import Chain
from triton_kernels.row_minimum import ROW_MINIMUM

_ARROW = "->"
#: Groups of a norm, where none are written.
_NUM_GROUPS = 32
_WORD = re.compile(r"(no )?([a-z0-9_]+(?: [a-z]+(?: \d+)?)?)(?:\(([^()]*)\))?")
_VARIABLE = re.compile(r"([\w.]+):(\w+)(?:\((\d+)\))?")


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

    Raises ValueError where that is no such chain.
    """
    chain, num_groups = _of_variable(text) if _ARROW not in text else _of_words(text)
    if chain.contraction != "linear":
        raise ValueError(f"{text!r} must begin with linear; other chains have the kernels that show --list tells")
    return NamedChain(chain, "", num_groups=num_groups)


def kernels_of(name: str) -> set[str]:
    """The kernels that a chain looks up, or the kernel of this name."""
    chain = composition(name) if is_composition(name) else CHAINS.get(name)
    if chain is None:
        return {name}
    return {problem.kernel for dtype in DTYPES for problem in chain.problems(chain.target, dtype, PASSES)}


def _of_words(text: str) -> tuple[Chain, int]:
    words = [_WORD.fullmatch(word.strip()) for word in text.split(_ARROW)]
    contraction, norm, num_groups = "", "", 1
    reduction = None
    steps: dict[str, list[Any]] = {"": [], "group_norm": []}  # before the norm and after it
    of_norm = 0
    for place, word in enumerate(words):
        if word is None:
            raise ValueError(f"{text!r} is no chain in words: {text.split(_ARROW)[place].strip()!r}")
        _, name, numbers = word.groups()
        if of_norm:  # its weight and its bias, which a call's text has
            of_norm -= 1
        elif place == 0:
            contraction = name
        elif name in ("group_norm", "layer_norm") and not norm:
            written = [float(each) for each in (numbers or "").split(",") if each.strip()]
            norm, of_norm = "group_norm", 2 * (len(written) == 2)
            num_groups = int(written[0]) if written else _NUM_GROUPS if name == norm else 1
            if num_groups < 1:
                raise ValueError(f"{text!r} must have a positive number of groups, got {num_groups}")
        elif name == ROW_MINIMUM.name:
            reduction = ROW_MINIMUM
        else:
            of_numbers = f"{name.split()[0]} numbers"
            known = named(of_numbers if numbers and of_numbers in NAMED else name)
            if known is None:
                raise ValueError(f"{name!r} in {text!r} is not one of {', '.join(NAMED)}")
            steps[norm].append(known)
    return Chain(contraction, tuple(steps[""]), norm, tuple(steps["group_norm"]), reduction), num_groups


def _of_variable(text: str) -> tuple[Chain, int]:
    if not (found := _VARIABLE.fullmatch(text.strip())):
        raise ValueError(f"{text!r} is no module:variable")
    module, name, num_groups = found.groups()
    try:
        chain = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{text!r} cannot be imported: {error}") from None
    if not isinstance(chain, Chain):
        raise ValueError(f"{text!r} must be a Chain, got {type(chain).__name__}")
    return chain, int(num_groups or _NUM_GROUPS) if chain.norm else 1
