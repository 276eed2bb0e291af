"""Promise: under torch.compile each function is one graph and gives the same bits; operators and fakes agree."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from tests.accuracy import draw_grad_output, run
from tests.chains import CHAINS, L75, LINEAR_CHAINS, Problem, chain_id, make_arguments, tensors_of

PROBLEM = Problem(rows=5, depth=16, groups=4, group_size=8)

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


@by_chain
def test_twice_differentiated(chain):
    """Refused aloud: gradients of gradients would be zero or wrong otherwise."""
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors_of(arguments).items()}
    output = chain.function(**{**arguments, **leaves})
    with pytest.raises(RuntimeError, match=r"normfuse::\w+ can be differentiated once only"):
        torch.autograd.grad(output.sum(), list(leaves.values()), create_graph=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def vectors(count, present=True):
    return [random(32 + i)[:32].clone() if present else None for i in range(count)]


L19_OPERATORS = (
    "conv_transpose2d_gelu_group_norm",
    "conv_transpose2d_gelu_group_norm_backward",
)


def samples():
    """For each operator, lists of arguments: contiguous tensors, with and without vectors."""
    M, K, C, G, S = 3, 16, 32, 4, 2
    input, weight, gradient, z = random(M, K), random(C, K) / 4, random(M, C), random(M, C) + 0.1
    volume, volume_gradient = random(M, C, S), random(M, C, S) - 0.1
    bounds, eps = (-1.0, 1.0), 1e-5
    column, rstd = torch.tensor([0, 31, 9], dtype=torch.int32), random(M).abs()
    presence_and_training = ((True, True), (False, True), (False, False))
    result = {
        "linear": [[input, weight, *vectors(1, present)] for present in (True, False)],
        "linear_input_gradient": [[gradient, weight]],
        "linear_weight_gradient": [[gradient, input]],
        "bias_hardtanh_mish": [[gradient, *vectors(1, present), *bounds] for present in (True, False)],
        "bias_hardtanh_mish_backward": [[gradient, z, *vectors(1, present), *bounds] for present in (True, False)],
        "linear_group_norm_min": [
            [input, weight, *vectors(1, present), G, *vectors(3, present), eps, training]
            for present, training in presence_and_training
        ],
        "linear_group_norm_min_backward": [
            [
                *(random(C, M), column, rstd, random(M, C // groups), *vectors(1, present)),
                *(input, weight, groups, *wanted),
            ]
            for present, wanted in ((True, (True, True)), (False, (True, False)))
            for groups in (4, 16)  # few are multiplied as dense matrices, many are not
        ],
    }
    for name in ("group_norm", "group_norm_hardtanh", "gelu_group_norm", "gelu_tanh_group_norm"):
        result[name] = [
            [values, G, *vectors(2, present), *bounds, eps]
            for values, present in ((volume, True), (z, True), (volume.mT.contiguous().mT, False))
        ]
        result[f"{name}_backward"] = [
            [volume_gradient, volume, G, *vectors(2, present), *bounds, eps] for present in (True, False)
        ]
    kernel, statistics = random(K, C // 2, 3, 2) / 4, random(2, M * G).abs()
    geometry = ([2, 1], [1, 0], [1, 0], [1, 2], 2)
    for name in L19_OPERATORS:
        result[name] = []
    for approximate, format in (("none", torch.contiguous_format), ("tanh", torch.channels_last)):
        image, convolved = (random(*shape).to(memory_format=format) for shape in ((M, K, 4, 5), (M, C, 8, 7)))
        forward, backward = (result[name] for name in L19_OPERATORS)
        for present, training in presence_and_training:
            forward.append([image, kernel, *vectors(3, present), G, *geometry, approximate, eps, True, training])
        for present, wanted in ((True, (True, True)), (False, (True, False)), (True, (False, True))):
            backward.append(
                [
                    *(convolved + 1, image, kernel, convolved, statistics, *vectors(3, present)),
                    *(G, *geometry, approximate, True, *wanted),
                ]
            )
    for name in ("linear_hardtanh_mish_group_norm", "linear_group_norm_hardtanh"):
        result[name] = [
            [input, weight, *vectors(2, present), G, *vectors(2, present), *bounds, eps, training]
            for present, training in presence_and_training
        ]
        result[f"{name}_backward"] = [[gradient, z, G, *vectors(2, present), *bounds, eps] for present in (True, False)]
    return result


SAMPLES = samples()
DIFFERENTIABLE = [name for name in SAMPLES if not name.endswith(("_backward", "_gradient"))]


def operator_of(name):
    return getattr(torch.ops.normfuse, name).default


def is_for_training(name, arguments):
    """Whether an operator that can keep something for its backward pass was asked to."""
    schema = [argument.name for argument in operator_of(name)._schema.arguments]
    return "training" not in schema or arguments[schema.index("training")]


def test_every_operator_has_samples():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    registered = {name for namespace, name in names if namespace == "normfuse"}
    assert registered == SAMPLES.keys()


@pytest.mark.parametrize(
    "name, arguments",
    [pytest.param(name, each, id=f"{name}-{i}") for name in SAMPLES for i, each in enumerate(SAMPLES[name])],
)
def test_opcheck(name, arguments):
    """With gradients, which checks all that it does without, wherever there are any."""
    if name in DIFFERENTIABLE and is_for_training(name, arguments):
        arguments = [
            argument.clone().requires_grad_() if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
    torch.library.opcheck(operator_of(name), tuple(arguments))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_operator_twice_differentiated(name):
    arguments = [
        argument.clone().requires_grad_() if isinstance(argument, torch.Tensor) else argument
        for argument in SAMPLES[name][0]
    ]
    outputs = operator_of(name)(*arguments)
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    with pytest.raises(RuntimeError, match=f"normfuse::{name} can be differentiated once only"):
        torch.autograd.grad(output.sum(), tensors, create_graph=True)


@by_chain
def test_operators_gradients_are_the_functions(chain):
    """Met without the public function, as in an exported graph, an operator gives the same gradients."""
    operator = operator_of(chain.name)
    arguments = make_arguments(chain, PROBLEM, torch.float32)
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)

    def call(**arguments):
        # The operator's parameters are the function's; those it has in addition are None, True or no bounds.
        known = {"eps": 1e-5, "training": True, "min_val": 0.0, "max_val": 0.0, "bias": None, **arguments}
        if chain is L75:
            known["bias"] = known["bias"].flatten()
        values = [known[argument.name] for argument in operator._schema.arguments]
        outputs = operator(*values)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        return output.view(grad_output.shape)

    same_bits(run(call, arguments, grad_output), expected)


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
