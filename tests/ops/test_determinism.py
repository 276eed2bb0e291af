"""Promise: the same input gives the same bits, forward and in every gradient."""

import pytest
import torch

from tests.accuracy import draw_grad_output, run
from tests.chains import (
    CHAINS,
    DTYPES,
    L19,
    L75,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)
from triton_kernels.column_sums import column_sums_kernel

pytestmark = pytest.mark.usefixtures("poisoned_memory")

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert not first[name].isnan().any(), name  # what memory that was never written to holds
        assert torch.equal(first[name], second[name]), name


def run_twice(chain, arguments):
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    first = run(chain.function, arguments, grad_output)
    copies = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    second = run(chain.function, {**arguments, **copies}, grad_output.clone())
    same_bits(first, second)
    return first


@by_dtype
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_two_calls(chain, dtype):
    run_twice(chain, make_arguments(chain, Problem(rows=18, depth=24, groups=17, group_size=4), dtype))


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, *NORMS], ids=chain_id)
def test_two_calls_of_wide_groups(chain):
    run_twice(chain, make_arguments(chain, Problem(rows=5, depth=20, groups=2, group_size=300), torch.float32))


@pytest.mark.parametrize("chain", NORMS, ids=chain_id)
def test_two_calls_with_pixels(chain):
    problem = Problem(rows=2, depth=1, groups=2, group_size=5, pixels=(13, 11))
    run_twice(chain, make_arguments(chain, problem, torch.float32))


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_result_is_the_same_in_training(chain):
    """What is kept for the backward pass changes no bit of the result."""
    arguments = make_arguments(chain, Problem(rows=30, depth=24, groups=17, group_size=4), torch.bfloat16)
    trained = run(chain.function, arguments, draw_grad_output(chain, arguments))["output"]
    assert torch.equal(chain.function(**arguments), trained)


def test_many_rows_choose_one_group():
    """The rows that share a winner are summed in a fixed order."""
    arguments = make_arguments(L75, Problem(rows=70, depth=24, groups=17, group_size=4), torch.float32)
    arguments["norm_bias"][5] = -100.0
    gradients = run_twice(L75, arguments)
    assert gradients["norm_bias"].nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
def test_memory_never_written_to_shows(chain, training, monkeypatch):
    """A call without the last of its launches, here one that comes again (``ops/plans.py``), leaves NaN."""
    sizes = Problem(2, 4, 2, 4, pixels=(3, 3)) if chain is L19 else Problem(rows=5, depth=16, groups=3, group_size=16)
    arguments = make_arguments(chain, sizes, torch.bfloat16)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    kernel_type = type(column_sums_kernel)
    launch, launches, last = kernel_type.run, [], None

    def launch_all_but_last(self, *arguments, **options):
        launches.append(self)
        return launch(self, *arguments, **options) if len(launches) != last else None

    def results():
        launches.clear()
        return run(chain.function, arguments, grad_output) if training else {"output": chain.function(**arguments)}

    monkeypatch.setattr(kernel_type, "run", launch_all_but_last)
    first = results()
    same_bits(results(), first)
    last = len(launches)
    assert any(result.isnan().any() for result in results().values())
