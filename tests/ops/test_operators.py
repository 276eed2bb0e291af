"""Promise: each operator ``torch.ops.normfuse.*`` is a good one by PyTorch's own checks, however its tensors lie."""

import contextlib
import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.accuracy import draw_grad_output, run
from tests.chains import (
    CHAINS,
    GELU_GROUP_NORM,
    L19,
    L75,
    NORMS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
    with_layout,
)

FORWARD, BACKWARD = torch.ops.normfuse.forward, torch.ops.normfuse.backward
PROBLEM = Problem(rows=3, depth=16, groups=4, group_size=8)
IMAGES = dataclasses.replace(PROBLEM, rows=2, pixels=(4, 5), kernel=(3, 2), conv_groups=2)
GEOMETRY = {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0), "dilation": (1, 2), "approximate": "tanh"}
#: Chains, their problems and further arguments.
CALLS = {
    **{chain.name: (chain, PROBLEM, {}) for chain in CHAINS},
    **{f"{chain.name}-volume": (chain, dataclasses.replace(PROBLEM, pixels=(2,)), {}) for chain in NORMS},
    "gelu_group_norm-tanh": (GELU_GROUP_NORM, PROBLEM, {"approximate": "tanh"}),
    "linear_group_norm_min-many_groups": (L75, dataclasses.replace(PROBLEM, groups=16, group_size=2), {}),
    "linear_group_norm_min-other_bias": (L75, PROBLEM, {"bias": torch.linspace(-1, 1, 5).view(1, 5, 1, 1)}),
    "conv_transpose2d_gelu_group_norm": (L19, IMAGES, {}),
    "conv_transpose2d_gelu_group_norm-geometry": (L19, IMAGES, GEOMETRY),
}

by_call = pytest.mark.parametrize("name", CALLS)


def detached(value):
    return [each.detach() for each in value] if isinstance(value, list) else value.detach()


class Calls(TorchDispatchMode):
    """Notes what the operators are called with."""

    def __init__(self):
        super().__init__()
        self.arguments = {}
        self.others = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "normfuse":
            given = [each if isinstance(each, (str, bool)) else detached(each) for each in args]
            self.arguments[function.overloadpacket] = given
        else:
            self.others.add(function.overloadpacket)
        return function(*args, **(kwargs or {}))


def arguments_of(name, *, way="contiguous", absent=False, **sizes):
    chain, problem, changes = CALLS[name]
    problem = dataclasses.replace(problem, **sizes)
    arguments = make_arguments(chain, problem, torch.float32, absent=chain.vectors if absent else ()) | changes
    if way == "permuted":
        for each, tensor in tensors_of(arguments).items():
            is_vector = min(tensor.shape[-2:]) == 1 or tensor.ndim == 1
            arguments[each] = with_layout(tensor, "strided" if is_vector else "transposed")
    return chain, arguments


def calls(name, *, wanted=None, **options):
    """What each operator is called with in a training step, or without a gradient."""
    chain, arguments = arguments_of(name, **options)
    leaves = {
        each: tensor.detach().requires_grad_()
        for each, tensor in tensors_of(arguments).items()
        if wanted is None or each in wanted
    }
    with Calls() as noted:
        output = chain.function(**{**arguments, **leaves})
        if leaves:
            output.backward(draw_grad_output(chain, arguments, unsafe="keep").to(output.dtype))
    return noted.arguments


def as_leaves(value):
    """Tensors that ask for gradients where autograd may."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_()
    return [as_leaves(each) for each in value] if isinstance(value, list) else value


def opcheck(arguments):
    """With gradients, which checks all that it does without, wherever there are any; one result as a tensor too."""
    for operator, given in arguments.items():
        has_one = len(operator.default(*given)) == 1
        if operator is FORWARD and given[-1]:
            given = as_leaves(list(given))
        for overload in (operator.default, operator.one) if has_one else (operator.default,):
            with torch.enable_grad() if operator is FORWARD else contextlib.nullcontext():
                torch.library.opcheck(overload, tuple(given))


def test_operators():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    assert {name for namespace, name in names if namespace == "normfuse"} == {
        "forward",
        "forward.one",
        "backward",
        "backward.one",
        "chain",
        "copies",
        "grouped_products",
        "interpolate",
        "max_pool",
        "max_pool_backward",
        "narrow_convolution",
        "product",
        "product.of_one_matrix",
        "statistics",
        "sums",
        "taps",
        "weight_gradient",
    }


@by_call
def test_opcheck(name):
    arguments = calls(name)
    assert arguments.keys() == {FORWARD, BACKWARD}
    opcheck(arguments)


@by_call
def test_opcheck_without_vectors(name):
    opcheck(calls(name, absent=True))


@by_call
def test_opcheck_without_gradients(name):
    arguments = calls(name, wanted=())
    assert arguments.keys() == {FORWARD}
    opcheck(arguments)


@pytest.mark.parametrize("wanted", ["input", "weight", "norm_bias"])
@by_call
def test_opcheck_of_one_gradient(name, wanted):
    if wanted in tensors_of(arguments_of(name)[1]):
        opcheck(calls(name, wanted=(wanted,)))


@pytest.mark.parametrize("options", [{"way": "permuted"}, {"rows": 0}], ids=["permuted", "empty"])
@by_call
def test_opcheck_otherwise(name, options):
    opcheck(calls(name, **options))


@by_call
def test_observed_step_makes_no_other_tensor(name):
    """What is kept has no gradient, and none of zeros is made for it."""
    chain, arguments = arguments_of(name)
    leaves = {each: tensor.detach().requires_grad_() for each, tensor in tensors_of(arguments).items()}
    output = chain.function(**{**arguments, **leaves})
    grad_output = torch.ones_like(output)
    with Calls() as noted:
        torch.autograd.grad(chain.function(**{**arguments, **leaves}), list(leaves.values()), grad_output)
    assert noted.arguments.keys() == {FORWARD, BACKWARD}
    assert noted.others <= {torch.ops.aten.detach}


@by_call
def test_recorded_graph(name):
    """It returns as much whether autograd sees it or not, so a graph that was recorded runs with leaves and without."""
    text, tensors, _ = calls(name)[FORWARD]
    leaves = as_leaves(tensors)
    with torch.no_grad():
        expected = FORWARD(text, tensors, True)
    for given in (tensors, leaves):
        recorded = make_fx(lambda *each: FORWARD(text, list(each), True))(*given)
        for again in (tensors, leaves):
            for result, each in zip(recorded(*again), expected, strict=True):
                assert torch.equal(result, each)
    result, *kept = FORWARD(text, leaves, True)
    assert result.requires_grad and not any(each.requires_grad for each in kept)


@by_call
def test_profiler_counts_a_call_once(name):
    text, tensors, _ = calls(name)[FORWARD]
    for given in (tensors, as_leaves(tensors)):
        with torch.autograd.profiler.profile() as profile:
            FORWARD(text, given, True)
        assert [each.count for each in profile.key_averages() if each.key == "normfuse::forward"] == [1]


@by_call
def test_tangent_is_refused(name):
    text, tensors, training = calls(name, wanted=())[FORWARD]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises(RuntimeError, match="does not support forward-mode differentiation"):
            FORWARD(text, [dual, *tensors[1:]], training)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@by_call
def test_undefined_gradient_is_handed_on(name):
    chain, arguments = arguments_of(name)
    leaves = {each: tensor.detach().requires_grad_() for each, tensor in tensors_of(arguments).items()}
    output = WithoutGradient.apply(chain.function(**{**arguments, **leaves}))
    assert torch.autograd.grad(output.sum(), list(leaves.values()), allow_unused=True) == (None,) * len(leaves)


@by_call
def test_layout_changes_no_value(name):
    """To PyTorch's tolerance: cuBLAS multiplies transposed matrices in another order."""
    permuted, plain = calls(name, way="permuted"), calls(name)
    for operator, arguments in plain.items():
        for result, expected in zip(operator(*permuted[operator]), operator(*arguments), strict=True):
            torch.testing.assert_close(result, expected)


@by_call
def test_nothing_kept(name):
    """Recorded without gradients, as in an exported graph, it runs, and is not differentiated with what it lacks."""
    text, tensors, training = calls(name, wanted=())[FORWARD]
    assert not training
    (expected,) = FORWARD(text, tensors, False)
    (output,) = FORWARD(text, as_leaves(tensors), False)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=r"normfuse::\w+ cannot be differentiated here.*with gradients enabled"):
        output.sum().backward()


@by_call
def test_operator_twice_differentiated(name):
    text, tensors, _ = calls(name)[FORWARD]
    leaves = as_leaves(tensors)
    output = FORWARD(text, leaves, True)[0]
    with pytest.raises(RuntimeError, match=r"normfuse::\w+ can be differentiated once only"):
        torch.autograd.grad(output.sum(), leaves, create_graph=True)


@pytest.mark.parametrize("chain", [*CHAINS, L19], ids=chain_id)
def test_operators_gradients_are_the_functions(chain):
    """Met without the public function, as in an exported graph, an operator gives the same gradients."""
    _, arguments = arguments_of(chain.name)
    grad_output = draw_grad_output(chain, arguments)
    expected = run(chain.function, arguments, grad_output)
    names = ["input", *(["weight"] if chain.is_linear or chain is L19 else []), *chain.vectors]
    text, tensors, _ = calls(chain.name)[FORWARD]
    leaves = as_leaves(tensors)
    output = FORWARD(text, leaves, True)[0]
    assert torch.equal(output, expected["output"])
    for name, gradient in zip(names, torch.autograd.grad(output, leaves, grad_output), strict=True):
        assert torch.equal(gradient, expected[name]), name


@by_call
@pytest.mark.parametrize("wanted", ["", "input", "weight", "input weight", "input weight bias"])
def test_flops(name, wanted):
    """PyTorch counts as many as of its own operators."""
    chain, arguments = arguments_of(name, conv_groups=1)  # of more, it counts a weight's gradient that often
    counted = []
    for function in chain.function, chain.plain:
        leaves = {each: tensor.detach() for each, tensor in tensors_of(arguments).items()}
        wanted_leaves = [tensor.requires_grad_() for each, tensor in leaves.items() if each in wanted.split()]
        with FlopCounterMode(display=False) as counter:
            output = function(**{**arguments, **leaves})
            if wanted_leaves:
                output.sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]
    assert (counted[0] > 0) == ("weight" in arguments and arguments["weight"].ndim > 1)
