"""What is timed: a cell's work as each peer does it, ready to be called."""

from typing import NamedTuple

import torch

import ops
from bench.cells import Cell, Problem, Step, make_step
from bench.chain import Call, Forward
from ops import reference

OURS = "ours"
#: The bare products; the others are compared with it.
LIBRARY = "library"
#: The whole chain as PyTorch itself has it.
PYTORCH = ("eager", "compile", "compile-max")


class Memory(NamedTuple):
    """Bytes at the peak of a training step beyond what was there before: without its output and gradients, and with."""

    added: int
    with_results: int


def bind_ours(cell: Cell) -> Forward:
    return cell.chain.bind(ops, cell.shape.channels)


def bind_reference(cell: Cell) -> Forward:
    return cell.chain.bind(reference, cell.shape.channels)


def make_call(peer: str, cell: Cell, problem: Problem) -> Call:
    """The cell's work as ``peer`` does it: ours, library, eager, compile or compile-max."""
    if peer == LIBRARY:
        return cell.chain.library_call(cell.mode, problem.tensors, problem.output_gradient)
    if peer == OURS:
        forward = bind_ours(cell)
    else:
        forward = bind_reference(cell)
        if peer == "compile":
            forward = torch.compile(forward)
        elif peer == "compile-max":
            forward = _compile_max(forward)
    return make_step(cell.mode, forward, problem.tensors, problem.output_gradient)


def measure_memory(step: Step) -> Memory:
    """What a training step needs, which has run before (CUDA)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output, gradients = step()
    storages = [tensor.untyped_storage() for tensor in (output, *gradients)]
    results = {storage.data_ptr(): storage.nbytes() for storage in storages}
    peak = torch.cuda.max_memory_allocated() - before
    return Memory(peak - sum(results.values()), peak)


def _compile_max(forward: Forward) -> Forward:
    # Otherwise it prints each of its trials.
    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    return torch.compile(forward, mode="max-autotune-no-cudagraphs")
