"""Repairs of Triton's interpreter (seen with 3.7.1): it rounds and sums less accurately than a GPU."""

import numpy as np
import torch
import triton.language as tl


def repair_interpreter() -> None:
    """Make the interpreter's rounding and sums as accurate as a GPU's."""
    from triton.runtime import interpreter

    convert, sum_in_order = interpreter._convert_float, interpreter.ReduceOps.sum

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

    interpreter._convert_float, interpreter.ReduceOps.sum = convert_exactly, sum_as_a_tree
