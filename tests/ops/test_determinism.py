"""Promise: the same input gives the same bits, forward and in every gradient."""

import pytest
import torch

from tests.accuracy import draw_grad_output, run
from tests.chains import (
    CHAINS,
    DTYPES,
    L75,
    LINEAR_CHAINS,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def run_twice(chain, arguments):
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    first = run(chain.function, arguments, grad_output)
    copies = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    torch.empty(10_000).fill_(torch.nan)  # so that memory never written to is unlikely to hold what it held before
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
