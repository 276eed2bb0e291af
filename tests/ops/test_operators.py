"""Promise: each operator ``torch.ops.normfuse.*`` is a good one by PyTorch's own checks, however its tensors lie."""

import pytest
import torch

from tests.accuracy import draw_grad_output, run
from tests.chains import CHAINS, L75, Problem, chain_id, make_arguments, with_layout


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def vectors(count, present=True):
    return [random(32 + i)[:32].clone() if present else None for i in range(count)]


def dtypes(count, present=True):
    """Of vectors' gradients: each its own, and None where none is wanted."""
    return [torch.bfloat16, None, torch.float32, torch.float16][:count] if present else [None] * count


L19_OPERATORS = (
    "conv_transpose2d_gelu_group_norm",
    "conv_transpose2d_gelu_group_norm_backward",
)


def samples(M):
    """For each operator, lists of arguments: contiguous tensors, a batch of M (at most 3), with and without vectors."""
    K, C, G, S = 16, 32, 4, 2
    input, weight, gradient, z = random(M, K), random(C, K) / 4, random(M, C), random(M, C) + 0.1
    volume, volume_gradient = random(M, C, S), random(M, C, S) - 0.1
    bounds, eps = (-1.0, 1.0), 1e-5
    column, rstd = torch.tensor([0, 31, 9], dtype=torch.int32)[:M], random(M).abs()
    presence_and_training = ((True, True), (False, True), (False, False))
    result = {
        "linear": [[input, weight, *vectors(1, present)] for present in (True, False)],
        "linear_input_gradient": [[gradient, weight]],
        "linear_weight_gradient": [[gradient, input]],
        "bias_hardtanh_mish": [[gradient, *vectors(1, present), *bounds] for present in (True, False)],
        "bias_hardtanh_mish_backward": [
            [gradient, z, *vectors(1, present), *bounds, *dtypes(1, present)] for present in (True, False)
        ],
        "linear_group_norm_min": [
            [input, weight, *vectors(1, present), G, *vectors(3, present), eps, training]
            for present, training in presence_and_training
        ],
        "linear_group_norm_min_backward": [
            [
                *(random(C, M), column, rstd, random(M, C // groups), *vectors(1, present)),
                *(*matrices, groups, *dtypes(4, present)),
            ]
            for present, matrices in ((True, (input, weight)), (False, (None, weight)))
            for groups in (4, 16)  # few are multiplied as dense matrices, many are not
        ],
    }
    for name in ("group_norm", "group_norm_hardtanh", "gelu_group_norm", "gelu_tanh_group_norm"):
        result[name] = [
            [values, G, *vectors(2, present), *bounds, eps]
            for values, present in ((volume, True), (z, True), (volume.mT.contiguous().mT, False))
        ]
        result[f"{name}_backward"] = [
            [*tensors, G, *vectors(2, present), *bounds, eps, *dtypes(2, present)]
            for tensors in ((volume_gradient, volume), (gradient, z))
            for present in (True, False)
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
                    *(convolved + 1, image, kernel, convolved, statistics, *vectors(2, present)),
                    *(G, *geometry, approximate, False, *wanted, *dtypes(3, present)),
                ]
            )
    for name in ("linear_hardtanh_mish_group_norm", "linear_group_norm_hardtanh"):
        result[name] = [
            [input, weight, *vectors(2, present), G, *vectors(2, present), *bounds, eps, training]
            for present, training in presence_and_training
        ]
        result[f"{name}_backward"] = [
            [gradient, z, G, *vectors(2, present), *bounds, eps, *dtypes(4, present)] for present in (True, False)
        ]
    return result


SAMPLES = samples(3)
#: Each operator's first sample in other ways: matrices and images whose last two axes are swapped in memory, vectors at
#: stride 2, and no batch.
OTHERWISE = {
    "permuted": {
        name: [
            with_layout(each, "transposed" if each.ndim > 1 else "strided") if isinstance(each, torch.Tensor) else each
            for each in first
        ]
        for name, (first, *_) in SAMPLES.items()
    },
    "empty": {name: first for name, (first, *_) in samples(0).items()},
}
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


def opcheck(name, arguments):
    """With gradients, which checks all that it does without, wherever there are any."""
    if name in DIFFERENTIABLE and is_for_training(name, arguments):
        arguments = [
            argument.clone().requires_grad_() if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
    torch.library.opcheck(operator_of(name), tuple(arguments))


@pytest.mark.parametrize(
    "name, arguments",
    [pytest.param(name, each, id=f"{name}-{i}") for name in SAMPLES for i, each in enumerate(SAMPLES[name])],
)
def test_opcheck(name, arguments):
    opcheck(name, arguments)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("way", OTHERWISE)
def test_opcheck_otherwise(name, way):
    opcheck(name, OTHERWISE[way][name])


def results_of(name, arguments):
    outputs = operator_of(name)(*arguments)
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("name", SAMPLES)
def test_layout_changes_no_value(name):
    """To PyTorch's tolerance: cuBLAS multiplies transposed matrices in another order."""
    for result, expected in zip(
        results_of(name, OTHERWISE["permuted"][name]), results_of(name, SAMPLES[name][0]), strict=True
    ):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if not is_for_training(name, SAMPLES[name][-1])])
def test_nothing_kept(name):
    """Recorded without gradients, as in an exported graph, it runs, and is not differentiated with what it lacks."""
    arguments = [each.clone() if isinstance(each, torch.Tensor) else each for each in SAMPLES[name][-1]]
    expected, *_ = results_of(name, arguments)
    arguments[0].requires_grad_()
    output, *_ = results_of(name, arguments)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=rf"normfuse::{name} cannot be differentiated here.*with gradients enabled"):
        output.sum().backward()


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


@pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
def test_operators_gradients_are_the_functions(chain):
    """Met without the public function, as in an exported graph, an operator gives the same gradients."""
    operator = operator_of(chain.name)
    arguments = make_arguments(chain, Problem(rows=5, depth=16, groups=4, group_size=8), torch.float32)
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

    for name, result in run(call, arguments, grad_output).items():
        assert torch.equal(result, expected[name]), name
