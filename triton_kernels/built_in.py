"""The built-in pointwise functions together: their numbers, what texts call them, and how they are pickled."""

import copyreg
import math
import sys
from collections.abc import Mapping
from importlib import import_module
from pickle import PicklingError
from typing import Any

from triton_kernels.activations import ACTIVATIONS
from triton_kernels.arithmetic import ARITHMETIC
from triton_kernels.pointwise import GELU, GELU_TANH, HARDTANH, MISH, Pointwise

BUILT_IN = (HARDTANH, MISH, GELU, GELU_TANH, *ACTIVATIONS, *ARITHMETIC)
#: The numbers that a function takes, in order, with PyTorch's defaults: None where there is none. (PyTorch's clamp
#: takes None for no bound.)
NUMBERS: dict[str, dict[str, float | None]] = {
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    "softplus": {"beta": 1.0, "threshold": 20.0},
    "clamp": {"min": -math.inf, "max": math.inf},
    **{name: {"other": None} for name in ("add", "sub", "mul", "div")},
}
_ARITHMETIC = {each.name for each in ARITHMETIC}


def name_of(step: Pointwise) -> str:
    """What texts call it. An operand of another kind than the usual is named too: arithmetic's is a vector."""
    usual = "vector" if step.name in _ARITHMETIC else (step.declared or step).operand
    return step.name if step.operand == usual else f"{step.name} {step.operand}"


#: By what texts call them.
NAMED = {name_of(each): each for each in BUILT_IN}


def named(name: str, functions: Mapping[str, Pointwise] = NAMED) -> Pointwise | None:
    """The one of these functions that a text calls so, or None."""
    function, earlier, steps = name.partition(" earlier ")
    of_tensor = functions.get(f"{function} tensor") if earlier else None
    return functions.get(name) or (of_tensor and of_tensor.with_operand(f"earlier {steps}"))


def _pickled(function: Pointwise) -> tuple:
    """By name, as functions are pickled: that of a built-in one, or of the variable that holds it."""
    if function in BUILT_IN:
        return _built_in, (function.name, function.operand)
    module = function.plain.__module__
    for name, value in vars(sys.modules[module]).items():
        if value is function:
            return _variable, (module, name)
    raise PicklingError(f"{function.name} must be a variable of {module} to be pickled, and is none")


def _built_in(name: str, operand: str) -> Pointwise:
    return next(each for each in BUILT_IN if (each.name, each.operand) == (name, operand))


def _variable(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


copyreg.pickle(Pointwise, _pickled)
