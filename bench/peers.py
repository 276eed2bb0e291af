"""What is timed: a cell's work as each peer does it, ready to be called."""

import torch

import ops
from bench.cells import Cell, Problem, Step, make_step
from bench.chain import Call, Forward
from bench.schema import BARE, OURS
from ops import reference


def bind_ours(cell: Cell) -> Forward:
    return cell.chain.bind(ops, cell.shape.channels)


def bind_reference(cell: Cell) -> Forward:
    return cell.chain.bind(reference, cell.shape.channels)


def make_call(peer: str, cell: Cell, problem: Problem) -> Call:
    """The cell's work as ``peer`` does it: ours, bare, eager, compile or compile-max."""
    if peer == BARE:
        return cell.chain.bare_call(cell.mode, problem.tensors, problem.output_gradient)
    forward = bind_ours(cell) if peer == OURS else bind_reference(cell)
    if peer == "compile":
        forward = torch.compile(forward)
    elif peer == "compile-max":
        from torch._inductor import select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False  # it prints each of its trials
        forward = torch.compile(forward, mode="max-autotune-no-cudagraphs")
    return make_step(cell.mode, forward, problem.tensors, problem.output_gradient)


def measure_memory(step: Step) -> int:
    """Bytes that a training step adds at its peak, without its output and gradients. It has run before (CUDA)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output, gradients = step()
    storages = [tensor.untyped_storage() for tensor in (output, *gradients)]
    results = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return torch.cuda.max_memory_allocated() - before - sum(results.values())
