"""Promise: under torch.compile each function is one graph, for batches of any size, and gives the same bits."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import ops
from tests.accuracy import draw_grad_output, run
from tests.chains import (
    CHAINS,
    GROUP_NORM,
    L19,
    L75,
    LINEAR,
    LINEAR_CHAINS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")
PROBLEM = Problem(rows=5, depth=16, groups=4, group_size=8)

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)


def same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]), name


@by_chain
def test_dynamic_batch(chain):
    """One graph for batches of any size, forward and backward bit for bit what it is without the compiler."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chain.function, fullgraph=True, backend=backend)
    for rows in (5, 2):
        arguments = make_arguments(chain, Problem(rows, 16, 4, 8), torch.float32, seed=rows)
        grad_output = draw_grad_output(chain, arguments)
        expected = run(chain.function, arguments, grad_output)

        def with_dynamic_batch(**arguments):
            torch._dynamo.mark_dynamic(arguments["input"], 0)
            return compiled(**arguments)

        same_bits(run(with_dynamic_batch, arguments, grad_output), expected)
    assert backend.frame_count == 1


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, GROUP_NORM, L19], ids=chain_id)
def test_recompilations(chain):
    """By PyTorch's own rule alone: a second graph, for any batch, where a second size comes, and none after it."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chain.function, fullgraph=True, backend=backend)
    counters.clear()
    for rows in (5, 3, 8, 2):
        arguments = make_arguments(chain, Problem(rows, 16, 4, 8), torch.bfloat16, seed=rows)
        if chain.has_bounds:  # which are drawn anew for each problem
            arguments["min_val"], arguments["max_val"] = -1.0, 1.0
        grad_output = draw_grad_output(chain, arguments)
        same_bits(run(compiled, arguments, grad_output), run(chain.function, arguments, grad_output))
    assert backend.frame_count == 2
    assert not counters["graph_break"]


@by_chain
def test_no_vectors_and_no_gradient(chain):
    arguments = make_arguments(chain, PROBLEM, torch.bfloat16, absent=chain.vectors)
    compiled = torch.compile(chain.function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), chain.function(**arguments))
    grad_output = draw_grad_output(chain, arguments)
    same_bits(run(compiled, arguments, grad_output), run(chain.function, arguments, grad_output))


@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_autocast(chain):
    """Autocast inside the graph."""

    def function(**arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return chain.function(**arguments)

    arguments = make_arguments(chain, PROBLEM, torch.float32)
    grad_output = draw_grad_output(chain, arguments).bfloat16()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same_bits(run(compiled, arguments, grad_output), run(function, arguments, grad_output))


@pytest.mark.parametrize(
    "module, arguments",
    [
        (ops.LinearHardtanhMishGroupNorm, (16, 32, (32,), 4)),
        (ops.LinearGroupNormMin, (16, 32, 4, (1, 32, 1, 1))),
        (ops.LinearGroupNormHardtanh, (16, 32, 4, -2.0, 2.0)),
    ],
)
def test_modules(module, arguments):
    eager = module(*arguments)
    input = torch.randn(5, 16)
    expected = eager(input)
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    eager.zero_grad(set_to_none=True)
    output = torch.compile(eager, fullgraph=True, backend="aot_eager")(input)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    same_bits({name: parameter.grad for name, parameter in eager.named_parameters()}, gradients)


#: Each pair of a chain's vectors; L75's bias has another shape.
TIED = [
    pytest.param(chain, *pair, id="-".join((chain.name, *pair)))
    for chain in (*CHAINS, L19)
    for pair in itertools.combinations([name for name in chain.vectors if (chain, name) != (L75, "bias")], 2)
]


def same_under_the_compiler(function, leaves):
    """Default compilation but for its last stage, which needs a GPU here; without ``fullgraph``, and with it."""
    expected = function(*leaves)
    grad_output = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(expected, leaves, grad_output)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        output = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(*leaves)
        assert torch.equal(output, expected)
        for compiled, eager in zip(torch.autograd.grad(output, leaves, grad_output), gradients, strict=True):
            assert torch.equal(compiled, eager)


@pytest.mark.parametrize("chain, first, second", TIED)
def test_tied_vectors(chain, first, second):
    """One tensor as two arguments: its gradient is the sum of theirs."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    names = [name for name in tensors_of(arguments) if name != second]
    leaves = [arguments[name].detach().requires_grad_() for name in names]

    def function(*leaves):
        tensors = dict(zip(names, leaves, strict=True))
        return chain.function(**{**arguments, **tensors, second: tensors[first]})

    same_under_the_compiler(function, leaves)


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, LINEAR], ids=chain_id)
def test_input_is_the_weight(chain):
    arguments = make_arguments(chain, Problem(rows=32, depth=16, groups=4, group_size=8), torch.float32)
    leaf = arguments["weight"].detach().requires_grad_()
    same_under_the_compiler(lambda leaf: chain.function(**{**arguments, "input": leaf, "weight": leaf}), [leaf])


def tied_linear_hardtanh_mish():
    module = ops.LinearHardtanhMishGroupNorm(16, 32, (32,), 4)
    module.bias = module.gemm.bias
    return module


def tied_to_the_norm(module, layer):
    getattr(module, layer).bias = module.group_norm.bias
    return module


@pytest.mark.parametrize(
    "make, sample",
    [
        pytest.param(tied_linear_hardtanh_mish, (16,), id="L94"),
        pytest.param(
            lambda: tied_to_the_norm(ops.LinearGroupNormMin(16, 32, 4, (1, 32, 1, 1)), "gemm"), (16,), id="L75"
        ),
        pytest.param(
            lambda: tied_to_the_norm(ops.LinearGroupNormHardtanh(16, 32, 4, -2.0, 2.0), "gemm"), (16,), id="L30"
        ),
        pytest.param(
            lambda: tied_to_the_norm(ops.ConvTranspose2dGeluGroupNorm(6, 8, 3, 1, 8, 4), "conv_transpose"),
            (6, 5, 4),
            id="L19",
        ),
    ],
)
def test_tied_modules(make, sample):
    module, input = make(), torch.randn(5, *sample)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def function(*parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (input,))

    same_under_the_compiler(function, list(parameters))


@by_chain
def test_twice_differentiated(chain):
    """Refused aloud: gradients of gradients would be zero or wrong otherwise."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = chain.function(**{**arguments, **leaves})
    with pytest.raises(RuntimeError, match=r"normfuse::\w+ can be differentiated once only"):
        torch.autograd.grad(output.sum(), list(leaves.values()), create_graph=True)


@pytest.mark.parametrize("chain", [*LINEAR_CHAINS, GROUP_NORM], ids=chain_id)
def test_compiled_and_twice_differentiated(chain):
    """Refused aloud, by PyTorch, whatever the gradient is used for next."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    leaf = arguments["input"].requires_grad_()
    output = torch.compile(chain.function, fullgraph=True, backend="aot_eager")(**arguments)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@by_chain
def test_meta_tensors(chain):
    """Shapes without numbers, as for a model that is not loaded yet."""
    arguments = make_arguments(chain, PROBLEM, torch.bfloat16)
    expected = chain.function(**arguments)
    for name, tensor in tensors_of(arguments).items():
        arguments[name] = tensor.to("meta")
    result = chain.function(**arguments)
    assert result.device.type == "meta"
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
