"""Promise: gradients are added up from step to step as PyTorch's are, each in memory of its own."""

import pytest
import torch

from tests.accuracy import draw_grad_output
from tests.chains import CHAINS, DTYPES, Problem, chain_id, make_arguments, tensors_of


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


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_gradients_share_no_memory(chain):
    """What is done to one in place, as clipping does it, must not reach another."""
    arguments = make_arguments(chain, Problem(rows=6, depth=24, groups=4, group_size=4), torch.float32)
    parameters = same_shaped(arguments)
    chain.function(**{**arguments, **parameters}).backward(draw_grad_output(chain, arguments, unsafe="keep"))
    before = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad.fill_(-3.0)
        before[name].fill_(-3.0)
        assert all(torch.equal(parameters[other].grad, before[other]) for other in parameters), name
