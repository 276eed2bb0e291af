"""The chains in plain torch that CPU tensors and float64 take: PyTorch's own layers, to the bit."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import ops
from tests.accuracy import draw_grad_output, run
from tests.chains import CHAINS, L75, NORMS, Problem, chain_id, make_arguments, tensors_of

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def reference_of(chain):
    return getattr(ops.reference, chain.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
@by_chain
def test_same_bits_as_the_plain_chain(chain, dtype):
    for absent in ((), chain.vectors, chain.vectors[:1]):
        arguments = make_arguments(chain, Problem(7, 24, 4, 8), dtype, absent=absent)
        grad_output = draw_grad_output(chain, arguments)
        ours, theirs = (run(function, arguments, grad_output) for function in (reference_of(chain), chain.plain))
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), name


@by_chain
def test_same_parameters_as_the_public_function(chain):
    ours = inspect.signature(reference_of(chain)).parameters.values()
    public = inspect.signature(chain.function).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in public]


@by_chain
def test_float64_takes_it(chain):
    arguments = make_arguments(chain, Problem(7, 24, 4, 8), torch.float64)
    assert torch.equal(chain.function(**arguments), reference_of(chain)(**arguments))


#: No function's defaults.
SCALARS = {"eps": 0.3, "min_val": -0.25, "max_val": 0.75, "approximate": "tanh"}


@by_chain
def test_float64_hands_on_every_scalar(chain):
    arguments = make_arguments(chain, Problem(7, 24, 4, 8), torch.float64)
    for name in SCALARS.keys() & inspect.signature(chain.function).parameters.keys():
        changed = arguments | {name: SCALARS[name]}
        expected = reference_of(chain)(**changed)
        assert torch.equal(chain.function(**changed), expected), name
        assert not torch.equal(expected, reference_of(chain)(**arguments)), name


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if chain.has_groups], ids=chain_id)
def test_one_sample_of_groups_of_one(chain):
    """F.group_norm refuses a single sample of one value a group; the kernels do not, so neither may float64."""
    arguments = make_arguments(chain, Problem(1, 8, 5, 1), torch.float64)
    expected = chain.plain(**arguments)
    assert torch.equal(chain.function(**arguments), expected)


@pytest.mark.parametrize("chain", [*NORMS, L75], ids=chain_id)
def test_no_rows(chain):
    arguments = make_arguments(chain, Problem(0, 24, 4, 8), torch.float64)
    output = chain.function(**arguments)
    assert output.shape == ((1, 32, 0, 1) if chain is L75 else (0, 32)) and output.dtype == torch.float64
    results = run(chain.function, arguments, torch.empty_like(output))
    for name, tensor in tensors_of(arguments).items():
        assert torch.equal(results[name], torch.zeros_like(tensor)), name


def test_norm_bias_without_weight():
    """PyTorch's own backward fails there on the CPU; a weight of ones changes nothing."""
    input, bias = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    arguments = {"input": input, "num_groups": 2, "weight": None, "bias": bias}
    results = run(ops.reference.group_norm, arguments, torch.ones_like(input))
    assert torch.equal(results["output"], F.group_norm(input, 2, torch.ones(8, dtype=torch.float64), bias))
    assert torch.equal(results["bias"], torch.full((8,), 3.0, dtype=torch.float64))
