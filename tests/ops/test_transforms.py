"""Promise: what PyTorch does to functions either works, bit for bit, or raises one error that says what to do instead.

Parameters from elsewhere, activation checkpointing, batched gradients and PyTorch's deterministic mode work; second
derivatives, ``torch.func`` and forward-mode differentiation are refused by the kernels and work in float64.
"""

from inspect import isfunction

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ops
from tests import images
from tests.accuracy import draw_grad_output, run
from tests.chains import (
    CHAINS,
    GELU_GROUP_NORM,
    L19,
    L30,
    L75,
    L94,
    LINEAR,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)
from tests.ops.compositions import HEADS

pytestmark = [
    images.MARK,
    # Of a decomposition that PyTorch loads for forward-mode differentiation.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]

PROBLEM = Problem(rows=5, depth=16, groups=4, group_size=8)
#: One group is wider than the kernels that hold whole groups take, so that a chain is several functions.
WIDE = Problem(rows=2, depth=4, groups=1, group_size=8200)
#: Every public function; GELU's approximation is an operator of its own.
FUNCTIONS = [pytest.param(chain, {}, id=chain.name) for chain in (*CHAINS, L19)] + [
    pytest.param(GELU_GROUP_NORM, {"approximate": "tanh"}, id="gelu_group_norm-tanh")
]

by_function = pytest.mark.parametrize("chain, options", FUNCTIONS)
by_chain = pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)


def of_input(chain, options=None, problem=PROBLEM, dtype=torch.float32):
    """The chain as a function of its input alone, and the input."""
    arguments = {**make_arguments(chain, problem, dtype), **(options or {})}
    return lambda input: chain.function(**{**arguments, "input": input}), arguments["input"]


def same_bits(results, expected):
    assert results.keys() == expected.keys()
    for name in expected:
        assert torch.equal(results[name], expected[name]), name


def test_every_function_is_here():
    functions = {name for name, each in vars(ops.reference).items() if isfunction(each) and name in ops.__all__}
    assert {chain.name for chain in (*CHAINS, L19)} == functions - HEADS.keys() | {"linear", "group_norm"}


# What works.


@pytest.mark.parametrize(
    "make, sample",
    [
        pytest.param(lambda: ops.LinearHardtanhMishGroupNorm(16, 32, (32,), 4), (16,), id="L94"),
        pytest.param(lambda: ops.LinearGroupNormMin(16, 32, 4, (1, 32, 1, 1)), (16,), id="L75"),
        pytest.param(lambda: ops.LinearGroupNormHardtanh(16, 32, 4, -2.0, 2.0), (16,), id="L30"),
        pytest.param(lambda: ops.ConvTranspose2dGeluGroupNorm(6, 8, 3, 1, 8, 4), (6, 5, 4), id="L19"),
    ],
)
def test_functional_call(make, sample):
    """The module with another's parameters is the other module, and hands the gradients to them."""
    module, other = make(), make()
    input = torch.randn(5, *sample)
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in other.named_parameters()}
    own = module(input)  # before, so that what it keeps of a call would show
    output = torch.func.functional_call(module, parameters, (input,))
    expected = other(input)
    assert torch.equal(output, expected) and torch.equal(module(input), own) and not torch.equal(output, own)
    output.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    same_bits(gradients, {name: parameter.grad for name, parameter in other.named_parameters()})
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_tensors_hooks", "reentrant"])
@by_function
def test_checkpointed(chain, options, use_reentrant):
    arguments = {**make_arguments(chain, PROBLEM, torch.bfloat16), **options}
    grad_output = draw_grad_output(chain, arguments)

    def checkpointed(**arguments):
        names = list(tensors_of(arguments))

        def function(*tensors):
            return chain.function(**{**arguments, **dict(zip(names, tensors, strict=True))})

        return checkpoint(function, *tensors_of(arguments).values(), use_reentrant=use_reentrant)

    # As backward(), not autograd.grad(), which a reentrant checkpoint refuses.
    same_bits(run_backward(checkpointed, arguments, grad_output), run_backward(chain.function, arguments, grad_output))


def run_backward(function, arguments, grad_output):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = function(**{**arguments, **leaves})
    output.backward(grad_output)
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


@by_function
def test_deterministic_mode(chain, options):
    """In PyTorch's deterministic mode, where memory not yet written holds NaN, all runs and no bit differs."""
    arguments = {**make_arguments(chain, PROBLEM, torch.float32), **options}
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        same_bits(run(chain.function, arguments, grad_output), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# PyTorch says of an operator without a rule for batches that it is called once for each.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@by_function
def test_batched_gradients(chain, options):
    """Rows of a Jacobian at once, as ``torch.autograd.functional.jacobian(vectorize=True)`` has them."""
    function, input = of_input(chain, options)
    leaf = input.clone().requires_grad_()
    output = function(leaf)
    directions = torch.randn(2, *output.shape)
    (batch,) = torch.autograd.grad(output, leaf, directions, is_grads_batched=True, retain_graph=True)
    for gradient, direction in zip(batch, directions, strict=True):
        assert torch.equal(gradient, *torch.autograd.grad(output, leaf, direction, retain_graph=True))
    (by_vmap,) = torch.func.vmap(lambda each: torch.autograd.grad(output, leaf, each, retain_graph=True))(directions)
    assert torch.equal(by_vmap, batch)


@by_function
def test_tensor_that_escaped_a_transform(chain, options):
    """It is the tensor that it wrapped, for autograd too, as it is for PyTorch's own functions."""
    function, input = of_input(chain, options)
    input, escaped = input.clone().requires_grad_(), []
    torch.func.grad(lambda values: escaped.append(values) or values.sum())(input)
    (gradient,) = torch.autograd.grad(function(escaped[0]).square().sum(), input)
    (expected,) = torch.autograd.grad(function(input).square().sum(), input)
    assert torch.equal(gradient, expected)


# What is refused.

REFUSED = r"normfuse::\w+ does not support {}: .*torch\.autograd.* dimensions of its input.* ops\.reference"
TRANSFORMS = {
    "vmap": lambda function, input: torch.func.vmap(function)(input.unsqueeze(0)),
    "grad": lambda function, input: torch.func.grad(lambda values: function(values).sum())(input),
    "vjp": lambda function, input: torch.func.vjp(function, input),
    "jvp": lambda function, input: torch.func.jvp(function, (input,), (input,)),
    "jacrev": lambda function, input: torch.func.jacrev(function)(input),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@by_function
def test_torch_func(chain, options, transform):
    function, input = of_input(chain, options)
    with pytest.raises(RuntimeError, match=REFUSED.format(r"torch\.func \(vmap, grad, jvp, \.\.\.\)")):
        TRANSFORMS[transform](function, input)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@by_function
def test_forward_mode(chain, options, context):
    function, input = of_input(chain, options)
    with context(), forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=REFUSED.format("forward-mode differentiation")):
            function(forward_ad.make_dual(input, torch.ones_like(input)))
        assert torch.equal(function(input), of_input(chain, options)[0](input))  # there is nothing to carry on


@pytest.mark.parametrize("chain", [L94, L75, LINEAR, L19], ids=chain_id)
def test_forward_mode_compiled(chain):
    """A compiler traces the operators alone, which would hand on no change at all."""
    torch._dynamo.reset()
    function, input = of_input(chain)
    compiled = torch.compile(lambda input: torch.func.jvp(function, (input,), (input,)), backend="aot_eager")
    with pytest.raises(RuntimeError, match="normfuse::\\w+ does not support"):
        compiled(input)
    torch._dynamo.reset()


@pytest.mark.parametrize("chain", [L94, L75, L30, GELU_GROUP_NORM, L19], ids=chain_id)
def test_gradient_compiled(chain):
    """Within ``torch.compile`` PyTorch may take ``torch.func.grad``, through the operators' own formulas, or refuse."""
    torch._dynamo.reset()
    function, input = of_input(chain)
    leaf = input.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    compiled = torch.compile(torch.func.grad(lambda input: function(input).square().sum()), backend="aot_eager")
    try:
        gradient = compiled(input)
    except RuntimeError:  # aloud
        gradient = expected
    assert torch.equal(gradient, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("problem", [PROBLEM, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("chain", [L94, L75, L30, *NORMS], ids=chain_id)
def test_twice_differentiated(chain, problem):
    """By any tensor alone: no gradient of a gradient comes out without an error, wrong or zero."""
    for name in tensors_of(make_arguments(chain, problem, torch.float32)):
        arguments = make_arguments(chain, problem, torch.float32)
        leaf = arguments[name].requires_grad_()
        output = chain.function(**arguments)
        if chain is L75 and name == "bias" and problem is WIDE:
            continue  # added by PyTorch, behind what the kernels do
        with pytest.raises(RuntimeError, match=r"normfuse::\w+ can be differentiated once only"):
            torch.autograd.grad(output.square().sum(), leaf, create_graph=True)


def test_tanh_twice_differentiated():
    function, input = of_input(GELU_GROUP_NORM, {"approximate": "tanh"})
    leaf = input.requires_grad_()
    with pytest.raises(RuntimeError, match="normfuse::gelutanh_group_norm can be differentiated once only"):
        torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)


def test_second_derivatives_of_images():
    """Of plain PyTorch's path, as those of the other chains in ``test_gradcheck``."""
    arguments = make_arguments(L19, Problem(1, 2, 2, 1, pixels=(2, 2), kernel=(2, 2)), torch.float64)
    names, tensors = zip(*tensors_of(arguments).items(), strict=True)

    def function(*tensors):
        return L19.function(**{**arguments, **dict(zip(names, tensors, strict=True))})

    assert torch.autograd.gradgradcheck(function, tuple(tensor.requires_grad_() for tensor in tensors))
