"""Promise: gradients are added up from step to step as PyTorch's are, each in memory of its own."""

import pytest
import torch

from ops.plan import Plan
from tests.accuracy import draw_grad_output
from tests.chains import (
    BIAS_HARDTANH_MISH,
    CHAINS,
    DTYPES,
    L19,
    L30,
    L75,
    L94,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

#: Sums over one chunk of rows and over several; of groups that no program holds.
PROBLEMS = (
    Problem(rows=1, depth=24, groups=4, group_size=4),
    Problem(rows=6, depth=24, groups=4, group_size=4),
    Problem(rows=2, depth=4, groups=1, group_size=8200),
)


def same_shaped(arguments):
    """Parameters of one dtype, which autograd keeps the gradients of as they come."""
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors_of(arguments).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_two_steps_add_up(chain, dtype):
    arguments = make_arguments(chain, Problem(rows=6, depth=24, groups=4, group_size=4), dtype)
    parameters = same_shaped(arguments)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    chain.function(**{**arguments, **parameters}).backward(grad_output)
    first = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    chain.function(**{**arguments, **parameters}).backward(grad_output)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * first[name], rtol=0, atol=0, msg=name)


def leaf():
    return torch.ones((), requires_grad=True)


@pytest.mark.parametrize("problem", PROBLEMS, ids=["one row", "rows", "wide groups"])
@pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
def test_gradients_share_no_memory(chain, problem):
    """What is done to one in place, as clipping does it, must not reach another, nor what autograd thinks of it.

    And a gradient that is kept keeps no more than its own memory.
    """
    arguments = make_arguments(chain, problem, torch.float32)
    parameters = same_shaped(arguments)
    chain.function(**{**arguments, **parameters}).backward(draw_grad_output(chain, arguments, unsafe="keep"))
    before = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes, name
        in_a_graph = {other: (parameters[other].grad * leaf()).sum() for other in parameters if other != name}
        parameter.grad.fill_(-3.0)
        before[name].fill_(-3.0)
        for other, product in in_a_graph.items():
            product.backward()  # "modified by an inplace operation", where they have one version counter
            assert torch.equal(parameters[other].grad, before[other]), name


#: Kernels of a backward pass but for products, for each of PROBLEMS.
LAUNCHES = {
    L94: (1, 2, 3),
    L75: (3, 3, 3),
    L30: (1, 2, 3),
    BIAS_HARDTANH_MISH: (1, 1, 1),
    **dict.fromkeys(NORMS, (1, 2, 2)),
}


@pytest.mark.parametrize("chain", LAUNCHES, ids=chain_id)
def test_launches(chain, monkeypatch):
    """Memory of its own for each gradient costs no launch: kernels write to it, in its dtype."""
    plans, run = [], Plan.run
    monkeypatch.setattr(Plan, "run", lambda plan, tensors: plans.append(plan) or run(plan, tensors))
    for problem, launches in zip(PROBLEMS, LAUNCHES[chain], strict=True):
        arguments = make_arguments(chain, problem, torch.bfloat16)  # whose products cuBLAS computes
        parameters = same_shaped(arguments)
        output = chain.function(**{**arguments, **parameters})
        plans.clear()
        output.backward(draw_grad_output(chain, arguments, unsafe="keep"))
        assert sum(step.grid is not None for plan in plans for step in plan.noted) == launches
