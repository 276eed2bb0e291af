"""Promise: little is kept for the backward pass: of the size batch x channels nothing for L75 and for what adds alone,
one for L94 and L30."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops import pointwise as p
from ops.calls import parse
from ops.operators import write_specs
from tests.chains import (
    BIAS_HARDTANH_MISH,
    BLOCKS,
    CHAINS,
    DTYPES,
    GELU_GROUP_NORM,
    GROUP_NORM,
    GROUP_NORM_HARDTANH,
    L19,
    L30,
    L75,
    L94,
    LINEAR,
    LINEAR_CHAINS,
    Problem,
    chain_id,
    make_arguments,
    tensors_of,
    with_layout,
)

#: Groups that a tile of the product holds, of no power of two, and wider than a tile; few groups and many.
PROBLEMS = (
    Problem(rows=19, depth=13, groups=17, group_size=8),
    Problem(rows=19, depth=13, groups=7, group_size=10),
    Problem(rows=19, depth=16, groups=2, group_size=300),
)
#: How many tensors of batch x channels elements are kept besides arguments.
KEPT = {L94: 1, L30: 1, **dict.fromkeys((L75, *BLOCKS), 0)}

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=chain_id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=chain_id)
by_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"groups_of_{problem.group_size}")


def with_gradients(arguments):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors_of(arguments).items()}
    return {**arguments, **leaves}


def saved_tensors(function, arguments):
    """The result and all that autograd keeps for it but the arguments themselves, each once."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = function(**arguments)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(arguments).values()}
    kept = {}
    for tensor in saved:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0 and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = tensor
    return output, list(kept.values())


@by_problem
@by_dtype
@by_chain
def test_kept_for_backward(chain, dtype, problem):
    arguments = with_gradients(make_arguments(chain, problem, dtype))
    _, kept = saved_tensors(chain.function, arguments)
    # By storage: a small view would keep the whole of what it is a view of.
    sizes = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept]
    large = [tensor for tensor, size in zip(kept, sizes, strict=True) if size >= problem.rows * problem.channels]
    assert [tensor.dtype for tensor in large] == [dtype] * KEPT[chain]
    assert all(tensor.numel() == problem.rows * problem.channels for tensor in large)


@by_problem
def test_minimum_keeps_the_winners_group_alone(problem):
    """In bytes: a column, a scale and one group's values a row."""
    _, kept = saved_tensors(L75.function, with_gradients(make_arguments(L75, problem, torch.bfloat16)))
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) <= problem.rows * (4 + 4 + 4 * problem.group_size)


@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_kept_where_the_library_multiplies(chain):
    torch.set_float32_matmul_precision("high")
    problem = PROBLEMS[0]
    _, kept = saved_tensors(chain.function, with_gradients(make_arguments(chain, problem, torch.float32)))
    large = [tensor for tensor in kept if tensor.numel() >= problem.rows * problem.channels]
    assert len(large) == KEPT[chain]


@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_kept_under_autocast(chain):
    """The one large tensor is in autocast's dtype."""
    problem = PROBLEMS[0]
    arguments = with_gradients(make_arguments(chain, problem, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        _, kept = saved_tensors(chain.function, arguments)
    large = [tensor for tensor in kept if tensor.numel() == problem.rows * problem.channels]
    assert [tensor.dtype for tensor in large] == [torch.bfloat16] * KEPT[chain]


@pytest.mark.parametrize("chain", LINEAR_CHAINS, ids=chain_id)
def test_kept_for_one_parameter(chain):
    """A gradient of one vector alone needs no more than all of them do."""
    problem = PROBLEMS[0]
    for name in chain.vectors:
        arguments = make_arguments(chain, problem, torch.bfloat16)
        arguments[name].requires_grad_()
        _, kept = saved_tensors(chain.function, arguments)
        assert sum(tensor.numel() >= problem.rows * problem.channels for tensor in kept) <= KEPT[chain]


FUNCTIONS = (*CHAINS, L19)


def gradients(chain, arguments, *, unpacked=None, changed=()):
    """Of all tensors; ``unpacked`` is made of each saved one, and ``changed`` are changed in place after the call."""
    arguments = with_gradients(arguments)
    leaves = tensors_of(arguments)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked) if unpacked else nullcontext():
        output = chain.function(**arguments)
    with torch.no_grad():
        for name in changed:
            arguments[name].add_(1)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad_output), strict=True))


@pytest.mark.parametrize("layout", ["strided", "misaligned"])
@pytest.mark.parametrize("problem", [PROBLEMS[1], PROBLEMS[2]], ids=["narrow", "wide"])
@pytest.mark.parametrize("chain", FUNCTIONS, ids=chain_id)
def test_unpacked_otherwise(chain, problem, layout):
    """A hook may give back equal values that lie in memory otherwise, as one that offloads or compresses them."""
    if chain is L19:
        problem = Problem(rows=2, depth=6, groups=2, group_size=4)
    arguments, layouts = make_arguments(chain, problem, torch.bfloat16), []

    def unpacked(tensor):
        layouts.append(with_layout(tensor, layout))
        return layouts[-1]

    expected, results = gradients(chain, arguments), gradients(chain, arguments, unpacked=unpacked)
    assert any(tensor.ndim == 1 for tensor in layouts) or chain is LINEAR
    for name in expected:
        torch.testing.assert_close(results[name], expected[name], msg=name)  # cuBLAS adds in another order


#: Vectors whose values a gradient is made of: a norm's weight as in PyTorch, which saves what is added to a bias in
#: place of the bias. A convolution's bias is one where cuDNN convolves: z is without it.
READ = {
    L94: {"norm_weight"},
    L75: {"norm_weight"},
    L30: {"norm_weight", "norm_bias"},
    L19: {"conv_bias", "norm_weight"},
    LINEAR: set(),
    BIAS_HARDTANH_MISH: {"bias"},
    GROUP_NORM: {"weight"},
    GROUP_NORM_HARDTANH: {"weight", "bias"},
    GELU_GROUP_NORM: {"weight"},
}


@pytest.mark.parametrize("chain", FUNCTIONS, ids=chain_id)
def test_changed_before_the_backward_pass(chain):
    """In place: gradients are those of the forward pass's values, or refused where they would be made of new ones."""
    problem = Problem(rows=3, depth=6, groups=2, group_size=4)
    arguments = make_arguments(chain, problem, torch.bfloat16)
    expected = gradients(chain, arguments)
    for name in READ[chain]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(chain, make_arguments(chain, problem, torch.bfloat16), changed=[name])
    others = [name for name in chain.vectors if name not in READ[chain]]
    results = gradients(chain, make_arguments(chain, problem, torch.bfloat16), changed=others)
    for name in expected:
        assert torch.equal(results[name], expected[name]), name


@pytest.mark.parametrize("chain", [LINEAR, L94, L75, L30], ids=chain_id)
def test_matrices_kept_for_one_gradient(chain):
    """As of PyTorch's Linear: the input is for the weight's gradient, the weight for the input's."""
    for wanted, changed in (("input", "input"), ("weight", "weight")):
        arguments = make_arguments(chain, PROBLEMS[0], torch.bfloat16)
        arguments[wanted].requires_grad_()
        output = chain.function(**arguments)
        (expected,) = torch.autograd.grad(output.sum(), arguments[wanted], retain_graph=True)
        with torch.no_grad():
            arguments[changed].add_(1)
        assert torch.equal(*torch.autograd.grad(output.sum(), arguments[wanted]), expected)


class Operators(TorchDispatchMode):
    """Notes the calls of this project's operators: the name, and the size of every new tensor that is returned."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        results = operator(*arguments, **(keywords or {}))
        if operator.namespace == "normfuse":
            tensors = results if isinstance(results, list) else [results]
            self.calls.append((operator._opname, [tensor.numel() for tensor in tensors]))
        return results


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "nothing requires it"])
@by_chain
def test_nothing_without_gradients(chain, how):
    """Nothing is kept, and the operator returns nothing of that size but its result (for L75 not even that)."""
    problem = PROBLEMS[0]
    arguments = make_arguments(chain, problem, torch.float32)
    if how != "nothing requires it":
        arguments = with_gradients(arguments)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)
    if chain is L75:
        arguments["bias"] = arguments["bias"][:, :2]
    with context(), Operators() as seen:
        output, kept = saved_tensors(chain.function, arguments)
    assert not output.requires_grad and kept == []
    sizes = [size for _, each in seen.calls for size in each]
    assert sizes, "the operator was not seen"
    large = [size for size in sizes if size >= problem.rows * problem.channels]
    assert large == ([] if chain is L75 else [problem.rows * problem.channels])
    assert sum(sizes) == output.numel()


def linear_and_sums(input, weight, bias, shift, residual):
    return ops.linear(input, weight, bias, after=(p.add(shift), p.add(residual)))


SUM = {"input": (19, 13), "weight": (24, 13), "bias": (24,), "shift": (24,), "residual": (19, 24)}


@pytest.mark.parametrize("of_shift", [torch.bfloat16, torch.float32], ids=chain_id)
@pytest.mark.parametrize("of_residual", [torch.bfloat16, torch.float32], ids=chain_id)
def test_nothing_for_sums(of_shift, of_residual):
    """What adds alone keeps no value, and the residual's gradient is the result's."""
    generator = torch.Generator().manual_seed(0)
    dtypes = dict.fromkeys(SUM, torch.bfloat16) | {"shift": of_shift, "residual": of_residual}
    drawn = {name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in SUM.items()}
    leaves = with_gradients(drawn)
    with torch.autocast("cpu", torch.bfloat16):
        output, kept = saved_tensors(linear_and_sums, leaves)
    assert kept == []
    given = torch.randn(output.shape, generator=generator).to(output.dtype)
    found = dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), given), strict=True))
    assert {name: each.dtype for name, each in found.items()} == dtypes
    assert torch.equal(found["residual"], given.to(of_residual))
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in drawn.items()}
    values = torch.nn.functional.linear(exact["input"], exact["weight"], exact["bias"])
    expected = torch.autograd.grad(values + exact["shift"] + exact["residual"], list(exact.values()), given.double())
    for name, each in zip(exact, expected, strict=True):
        torch.testing.assert_close(found[name].double(), each, rtol=1e-2, atol=1e-1, msg=name)


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_values_of_sums(setting):
    """Where a kernel multiplies and where the library does, with one value for all among the terms."""
    torch.set_float32_matmul_precision(setting)
    torch.manual_seed(0)
    shapes = (19, 13), (24, 13), (), (19, 24)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def function(input, weight, shift, residual):
        return ops.linear(input, weight, after=(p.add(shift), p.add(residual)))

    output, kept = saved_tensors(lambda **_: function(*leaves), dict(zip("abcd", leaves, strict=True)))
    assert kept == []
    given = torch.randn_like(output)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = torch.autograd.grad(function(*exact), exact, given.double())
    for each, right in zip(torch.autograd.grad(output, leaves, given), expected, strict=True):
        torch.testing.assert_close(each.double(), right, rtol=1e-4, atol=1e-4)


def test_the_operator_has_the_gradient_of_every_term():
    text = parse("linear -> add -> add tensor").text_in_graph
    dy, input, weight = torch.randn(5, 8), torch.randn(5, 3), torch.randn(8, 3)
    wanted = write_specs([(None, torch.float32)] * 2 + [((8,), torch.float32), (None, torch.bfloat16), None], (0, 1))
    found = torch.ops.normfuse.backward(text, wanted, dy, [input, weight], [])
    expected = dy @ weight, dy.T @ input, dy.sum(0), dy.bfloat16()
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "after, computed",
    [
        (lambda x, y: (p.mish(), p.add(x)), ["input"]),
        (lambda x, y: (p.mish(), p.add(x), p.add(x.new_ones(8)), p.add(y)), ["input"]),
        (lambda x, y: (p.add(x), p.mish(), p.add(y)), ["input", "x"]),
        (lambda x, y: (p.add(x), p.mul(y)), ["input", "x", "y"]),
        (lambda x, y: (p.add(x), p.add(p.earlier())), ["input", "x"]),
    ],
)
@pytest.mark.parametrize("sees", [True, False], ids=["operators", "plans"])
def test_gradients_that_are_the_results(after, computed, sees):
    """That of a tensor that is added last is not computed."""
    torch.manual_seed(0)
    input, x, y = (torch.randn(5, 8, 3, requires_grad=True) for _ in range(3))
    used = [each for each in (x, y) if any(step.operand is each for step in after(x, y))]
    with Operators() if sees else nullcontext() as seen:
        output = ops.group_norm(input, 2, after=after(x, y))
        given = torch.randn_like(output)
        found = torch.autograd.grad(output, (input, *used), given)
    if sees:
        assert [(name, len(sizes)) for name, sizes in seen.calls] == [("forward", 2), ("backward", len(computed))]
    exact = [each.detach().double().requires_grad_() for each in (input, x, y)]  # PyTorch's own functions
    values = ops.group_norm(exact[0], 2, after=after(*exact[1:]))
    expected = torch.autograd.grad(values, exact[: 1 + len(used)], given.double())
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), right, rtol=1e-5, atol=1e-5)


def test_nothing_is_computed_for_the_tensor_alone():
    input, residual = torch.randn(5, 8, 3), torch.randn(5, 8, 3, requires_grad=True)
    with Operators() as seen:
        output = ops.group_norm(input, 2, after=(p.add(residual),))
        (found,) = torch.autograd.grad(output, residual, given := torch.randn_like(output))
    assert torch.equal(found, given) and [name for name, _ in seen.calls] == ["forward"]


HEADS = {
    "linear": lambda x, w, *tensors: ops.linear(x, w, after=tuple(map(p.add, tensors))),
    "layer_norm": lambda x, w, *tensors: ops.layer_norm(x, x.shape[-1:], after=tuple(map(p.add, tensors))),
    "group_norm": lambda x, w, *tensors: ops.group_norm(x, 2, after=tuple(map(p.add, tensors))),
}


@pytest.mark.parametrize("sees", [True, False], ids=["operators", "plans"])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_have_memory_of_their_own(head, sees):
    """Leaves that are added last: neither is another's, nor the caller's, though rows are views."""
    x, w = torch.randn(2, 4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    tensors = [torch.zeros(2, 4, 4, requires_grad=True) for _ in range(2)]
    given = torch.ones(2, 4, 4)
    with Operators() if sees else nullcontext():
        for _ in range(2):
            HEADS[head](x, w, *tensors).backward(given)
    tensors[0].grad.zero_()
    assert torch.equal(given, torch.ones(2, 4, 4)) and torch.equal(tensors[1].grad, 2 * given)
