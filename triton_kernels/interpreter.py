"""Repairs of Triton's interpreter (seen with 3.6.0 to 3.9.0): it rounds and sums less accurately than a GPU, and spends
most of its time on patching what is patched, on checks whose result it ignores, and on making the same types again."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl


def repair_interpreter() -> None:
    """Make the interpreter's rounding and sums as accurate as a GPU's, and let it patch the language once a launch."""
    from triton.runtime import interpreter

    convert, sum_in_order, patch = interpreter._convert_float, interpreter.ReduceOps.sum, interpreter._patch_lang
    patched: set[int] = set()

    def convert_exactly(data, source, target, rounding_mode):
        """Triton's truncates float32 to bfloat16, with twice the error of rounding, and misplaces subnormals."""
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1)).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy().reshape(np.shape(data))
        if source == tl.bfloat16 and target == tl.float32:
            return np.array(data).view(np.uint16).astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    def sum_as_a_tree(self, input):
        """numpy sums in sequence along all axes but the last. A GPU's threads sum in a tree."""
        values = input.handle.data
        if self.axis is None or not np.issubdtype(values.dtype, np.floating):
            return sum_in_order(self, input)
        values = np.moveaxis(values, self.axis, 0)
        while len(values) > 1:
            half = len(values) // 2
            values = values[:half] + values[half:]
        result = np.expand_dims(values[0], self.axis) if self.keep_dims else values[0]
        return self.to_tensor(result, input.dtype)

    def patch_once(function):
        """Triton's patches the language for each call of a device function too, whose scope it does not use.

        A function sees the module ``tl``, one of Triton's own ``tl.core``. Each is patched once a launch.
        """
        seen = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if patched and seen <= patched:
            return None
        is_launch = not patched
        scope = patch(function)
        patched.update(seen)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._convert_float, interpreter.ReduceOps.sum = convert_exactly, sum_as_a_tree
    interpreter._patch_lang = patch_once
    # Overflows of integers are looked for, and asserted in debug mode alone, which the interpreter does not have.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_types(interpreter)


def _keep_types(interpreter: Any) -> None:
    """Let it make each type of a block once, each type's attributes of a tensor, and look up each NumPy type once."""
    block_types: dict[tuple, tl.block_type] = {}
    numpy_types: dict[str, np.dtype] = {}
    attributes: dict[str, dict[str, Any]] = {}
    numpy_type, initialize = interpreter._get_np_dtype, tl.tensor.__init__

    def block_type(scalar, shape):
        key = (scalar.name, *shape)
        if key not in block_types:
            block_types[key] = tl.block_type(scalar, shape)
        return block_types[key]

    def numpy_type_once(kind):
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def make_tensor(tensor, handle, kind):
        if kind.name not in attributes:
            initialize(tensor, handle, kind)
            attributes[kind.name] = dict(vars(tensor))
        else:
            vars(tensor).update(attributes[kind.name], handle=handle)

    tl.tensor.__init__ = make_tensor
    interpreter.interpreter_builder.get_block_ty = block_type
    tl.block_type.with_element_ty = lambda self, scalar: block_type(scalar, self.shape)
    interpreter._get_np_dtype = numpy_type_once
