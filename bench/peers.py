"""What is timed: a cell's work as each peer does it, ready to be called."""

from collections.abc import Callable

import torch

import ops
from bench.cells import Cell, Forward, Problem, Step, make_step
from ops import reference

#: What is timed; its result is dropped.
Call = Callable[[], object]

#: The bare matrix products; the others are compared with it.
LIBRARY = "library"
OURS = "ours"


def bind_ours(cell: Cell) -> Forward:
    return cell.chain.bind(ops, cell.shape.out_features)


def bind_reference(cell: Cell) -> Forward:
    return cell.chain.bind(reference, cell.shape.out_features)


def make_call(peer: str, cell: Cell, problem: Problem) -> Call:
    """The cell's work as ``peer`` does it: ours, library, eager, compile or compile-max."""
    if peer == LIBRARY:
        return _library_call(cell, problem)
    if peer == OURS:
        forward = bind_ours(cell)
    else:
        forward = bind_reference(cell)
        if peer == "compile":
            forward = torch.compile(forward)
        elif peer == "compile-max":
            forward = _compile_max(forward)
    return make_step(cell.mode, forward, problem.tensors, problem.output_gradient)


def added_memory(step: Step) -> int:
    """Bytes a training step needs at its peak beyond what was there before, its output and its gradients (CUDA)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output, gradients = step()
    storages = [tensor.untyped_storage() for tensor in (output, *gradients)]
    results = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return torch.cuda.max_memory_allocated() - before - sum(results.values())


def _compile_max(forward: Forward) -> Forward:
    # Otherwise it prints each of its trials.
    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    return torch.compile(forward, mode="max-autotune-no-cudagraphs")


def _library_call(cell: Cell, problem: Problem) -> Call:
    """The matrix products alone: one for the forward pass, with the input's and the weight's gradient for training."""
    input, weight = problem.tensors["input"], problem.tensors["weight"]
    if cell.mode == "forward":
        return lambda: input @ weight.T
    # Random, and [batch, out_features] whatever the chain's own output is.
    gradient = problem.output_gradient.reshape(cell.shape.batch, cell.shape.out_features)
    return lambda: (input @ weight.T, gradient @ weight, gradient.T @ input)
