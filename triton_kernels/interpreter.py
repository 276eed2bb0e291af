"""Repairs of Triton's interpreter (seen with 3.6.0 to 3.9.0): it rounds and sums less accurately than a GPU, and spends
most of its time on patching what is patched, on checks whose result it ignores, on making the same types again, on
copies of what has the right shape, and on reductions an element at a time."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl


def repair_interpreter() -> None:
    """Make the interpreter's rounding and sums as accurate as a GPU's, and let it patch the language once a launch."""
    from triton.runtime import interpreter

    convert, sum_in_order, patch = interpreter._convert_float, interpreter.ReduceOps.sum, interpreter._patch_lang
    reduce_elements = interpreter.ReduceOps.generic_reduce
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    patched: set[int] = set()

    def convert_exactly(data, source, target, rounding_mode):
        """Triton's truncates float32 to bfloat16, with twice the error of rounding, and misplaces subnormals."""
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.array(data, dtype=np.float32, ndmin=1)).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy().reshape(np.shape(data))
        if source == tl.bfloat16 and target == tl.float32:
            return np.array(data).view(np.uint16).astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    def as_a_tree(self, values, combine):
        """``combine(*firsts, *seconds)`` of halves along the axis, until there is one of each value."""
        values = [np.moveaxis(each, self.axis, 0) for each in values]
        while (half := len(values[0]) // 2) > 0:
            values = combine(*(each[:half] for each in values), *(each[half:] for each in values))
        return [np.expand_dims(each[0], self.axis) if self.keep_dims else each[0] for each in values]

    def sum_as_a_tree(self, input):
        """numpy sums in sequence along all axes but the last. A GPU's threads sum in a tree."""
        values = input.handle.data
        if self.axis is None or not np.issubdtype(values.dtype, np.floating):
            return sum_in_order(self, input)
        (result,) = as_a_tree(self, [values], lambda first, second: [first + second])
        return self.to_tensor(result, input.dtype)

    def reduce_as_a_tree(self, input):
        """Triton's calls the combining function for each element."""
        if self.axis is None:
            return reduce_elements(self, input)
        dtypes = [each.dtype for each in input]

        def combine(*halves):
            combined = self.combine_fn.fn(*map(self.to_tensor, halves, 2 * dtypes))
            return [each.handle.data for each in (combined if isinstance(combined, tuple) else (combined,))]

        return [*map(self.to_tensor, as_a_tree(self, [each.handle.data for each in input], combine), dtypes)]

    @cache
    def languages(function):
        """The modules of the language that a function sees: ``tl``, one of Triton's own ``tl.core``."""
        return {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}

    def patch_once(function):
        """Triton's patches the language for each call of a device function too, whose scope it does not use.

        Each module is patched once a launch.
        """
        seen = languages(function)
        if patched and seen <= patched:
            return None
        is_launch = not patched
        scope = patch(function)
        patched.update(seen)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    def patch_builtin(owner, name, member, builder, scope):
        """Triton's goes through two functions more in each call, and a copy of its options."""
        function = getattr(member, "__wrapped__", member)

        def with_semantic(*arguments, **options):
            options["_semantic"] = semantic
            return function(*arguments, **options)

        scope.set_attr(owner, name, with_semantic)

    interpreter._convert_float, interpreter.ReduceOps.sum = convert_exactly, sum_as_a_tree
    interpreter._patch_attr = patch_builtin
    interpreter.ReduceOps.generic_reduce = reduce_as_a_tree
    interpreter._patch_lang = patch_once
    # Overflows of integers are looked for, and asserted in debug mode alone, which the interpreter does not have.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_types(interpreter)
    _broadcast_in_numpy(interpreter)


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


def _broadcast_in_numpy(interpreter: Any) -> None:
    """Leave operands of one type as they are, and the shapes of others to NumPy. Triton copies each to the common
    shape, even the one that has it."""
    semantic: Any = interpreter.TritonSemantic
    check_types = semantic.binary_op_type_checking_impl
    types_together: dict[tuple[str, str], tuple] = {}

    class OfShapes(semantic):
        """Gives operands the type of the result's shape, and not its elements."""

        def broadcast_impl_value(self, lhs, rhs):
            types, key = (lhs.type, rhs.type), (lhs.type.name, rhs.type.name)
            if key not in types_together:
                shapes = [tuple(kind.shape) if kind.is_block() else () for kind in types]
                shape = list(np.broadcast_shapes(*shapes))
                types_together[key] = tuple(tl.block_type(kind.scalar, shape) if shape else kind for kind in types)
            return tuple(
                tl.tensor(each.handle, kind) for each, kind in zip((lhs, rhs), types_together[key], strict=True)
            )

    of_shapes = OfShapes(interpreter.interpreter_builder)

    def check_unless_same(self, lhs, rhs, *arguments):
        is_division = len(arguments) > 3  # of which 16-bit operands become float32
        is_same = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.type is rhs.type
        if is_same and not is_division and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check_types(of_shapes, lhs, rhs, *arguments)

    semantic.binary_op_type_checking_impl = check_unless_same
