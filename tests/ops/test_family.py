"""Promise: the functions that take steps do what PyTorch does with the same steps, one after another."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import ops
from ops import family, plans
from ops import pointwise as p
from tests.accuracy import check, draw_grad_output, run
from tests.chains import L19, L30, L94, Problem, doubled, make_arguments, tensors_of
from tests.ops.compositions import HEADS, compose
from triton_kernels.pointwise import ADD, Pointwise

BEFORE = ("add_vector", "hardtanh", "mish", "add_earlier", "mul_tensor", "add_sample", "mul_number")
AFTER = ("gelu", "mul_vector", "add_number", "mul_earlier", "mul_scalar", "add_tensor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One of each function, with an operand of each kind on both sides.
RICH = [compose(name, BEFORE if HEADS[name].norm else (), AFTER) for name in HEADS]
by_composition = pytest.mark.parametrize("composition", RICH, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def same(found, expected):
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@by_composition
def test_values_and_gradients(composition, dtype):
    check(composition, composition.arguments(dtype))


@pytest.mark.parametrize("absent", ["some", "all"])
@by_composition
def test_absent_vectors(composition, absent):
    """A norm's bias without its weight, and none of all."""
    names = [name for name in composition.head.shapes if name not in ("input", "weight")]
    if not composition.head.contraction:
        names = ["weight", *names]
    names = names if absent == "all" else [name for name in names if not name.endswith("norm_bias")]
    check(composition, composition.arguments(absent=tuple(names)))


@by_composition
def test_without_gradients(composition):
    arguments = composition.arguments()
    expected = run(composition.function, arguments, torch.ones(composition.head.shape))["output"]
    with torch.no_grad():
        assert torch.equal(composition.function(**arguments), expected)


@by_composition
def test_gradients_of_operands_alone(composition):
    arguments = composition.arguments()
    expected = run(composition.function, arguments, torch.ones(composition.head.shape))
    leaves = {name: arguments[name].requires_grad_() for name in composition.operands}
    output = composition.function(**arguments)
    gradients = torch.autograd.grad(output.sum(), list(leaves.values()))
    same(dict(zip(leaves, gradients, strict=True)), {name: expected[name] for name in leaves})


#: A named function, the same by steps, and how it is called.
NAMED = {
    "L94": (
        L94,
        lambda input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, min_val, max_val: (
            ops.linear_group_norm(
                *(input, weight, linear_bias, num_groups, norm_weight, norm_bias),
                before=(p.add(bias), p.hardtanh(min_val, max_val), p.mish()),
            )
        ),
    ),
    "L30": (
        L30,
        lambda *, min_val, max_val, **rest: ops.linear_group_norm(**rest, after=(p.hardtanh(min_val, max_val),)),
    ),
    "L19": (L19, lambda **rest: ops.conv_transpose2d_group_norm(**rest, before=(p.gelu(),))),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_bits_of_named_functions(name, dtype):
    chain, by_steps = NAMED[name]
    arguments = make_arguments(chain, Problem(16, 24, 4, 8), dtype)
    grad_output = draw_grad_output(chain, arguments, unsafe="keep")
    same(run(by_steps, arguments, grad_output), run(chain.function, arguments, grad_output))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@by_composition
def test_reference(composition, dtype):
    """The same plain PyTorch as by hand, which float64 runs too."""
    arguments = composition.arguments(dtype)
    grad_output = torch.randn(composition.head.shape, dtype=dtype)
    reference = composition.of(getattr(ops.reference, composition.name))
    found, by_hand = (run(function, arguments, grad_output) for function in (reference, composition.plain))
    for name in by_hand:
        torch.testing.assert_close(found[name], by_hand[name], rtol=1e-5, atol=1e-5, msg=name)
    if dtype == torch.float64:
        same(run(composition.function, arguments, grad_output), found)


@by_composition
def test_compiled(composition):
    """The bits of the eager call, in one graph, for batches of any size."""
    torch._dynamo.reset()  # all compositions are one function to it
    compiled = torch.compile(composition.function, backend="aot_eager", fullgraph=True)
    arguments = composition.arguments()
    grad_output = torch.randn(composition.head.shape)
    batched = [name for name, kind in composition.operands.items() if kind in ("sample", "tensor")]
    for size in (None, 2, 1):
        for name in ("input", *batched):
            arguments[name] = arguments[name][:size]
        expected = run(composition.function, arguments, grad_output[:size])
        same(run(compiled, arguments, grad_output[:size]), expected)


def test_compiled_with_steps_of_outside():
    """Steps may be made once. A graph with other numbers is another."""
    steps = p.gelu(), p.mul(3.0)
    input, weight = torch.randn(8, 5), torch.randn(12, 5)

    def function(input, factor):
        return ops.linear_group_norm(input, weight, None, 2, after=(*steps, p.mul(factor)))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for factor in (2.0, 0.5, 4):
        assert torch.equal(compiled(input, factor), function(input, factor))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(5, 12), torch.nn.Parameter(torch.randn(12))
        self.steps = p.hardtanh(-0.5, 1), p.gelu()

    def forward(self, input):
        after = (*self.steps, p.mul(self.scale))
        return ops.linear_layer_norm(input, self.linear.weight, self.linear.bias, after=after)


def test_exported():
    """A program's graph has the chain by its name, for batches of any size."""
    layer, input = Layer(), torch.randn(8, 5)
    program = torch.export.export(layer, (input,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert "linear -> add -> group_norm -> mul -> add -> hardtanh -> gelu -> mul" in str(program.graph)
    for batch in (8, 3):
        assert torch.equal(program.module()(input[:batch]), layer(input[:batch]))


def test_copied():
    """A model that keeps steps can be copied."""
    layer, input = Layer(), torch.randn(8, 5)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(input), layer(input))
    torch.nn.init.zeros_(copied.scale)
    assert copied(input).abs().max() == 0 < layer(input).abs().max()


def test_text():
    """What graphs call a chain is made of names alone."""
    steps = (p.add(torch.ones(8)), p.mish(), p.add(2.0)), (p.mul(torch.ones(3, 8)), p.hardtanh(0, 1))
    chain, row, numbers = family.LINEAR_GROUP_NORM.bind((1, 2, 3), (4, 5), *steps)
    expected = "linear -> add -> add -> mish -> add numbers -> group_norm -> mul -> add -> mul tensor -> hardtanh"
    assert chain.text == expected
    assert row == (1, 2, 3, steps[0][0].operand, 4, 5, steps[1][0].operand, None)
    assert numbers == ((2.0,), (0.0, 1.0))


def test_one_chain_a_combination(monkeypatch):
    """Whatever the operands are. Their number is bounded."""
    input, made = torch.randn(4, 8), []
    make = family.Chain
    family.GROUP_NORM._chains.clear()  # of other tests' chains
    monkeypatch.setattr(family, "Chain", lambda *each, **names: made.append(make(*each, **names)) or made[-1])
    monkeypatch.setattr(plans, "_MOST_PLANS", 3)
    for _ in range(2):
        for number, steps in itertools.product((1.5, 2.5), ((p.mish(),), (p.gelu(), p.mish()))):
            ops.group_norm(input, 2, before=steps, after=(p.add(number), p.mul(torch.randn(8))))
    assert len(made) <= 2
    for count in range(8):
        ops.group_norm(input, 2, after=(p.add(0.5),) * count)
    assert len(family.GROUP_NORM._chains) <= 3


@pytest.mark.parametrize("name", HEADS)
def test_autocast(name):
    """Products are in autocast's dtype, as is what follows them. Gradients have their tensors' dtypes."""
    before = ("add_vector", "mish", "mul_tensor", "mul_number") if HEADS[name].norm else ()
    composition = compose(name, before, AFTER)
    is_lowered = composition.head.contraction is not None
    ratios = []
    for seed in range(5):  # one value, where a group has a small variance, may decide a draw by chance
        arguments, grad_output = composition.arguments(seed=seed), torch.randn(composition.head.shape).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            output = composition.function(**arguments)
            found = run(composition.function, arguments, grad_output.to(output.dtype))
            plain = run(composition.plain, arguments, grad_output.to(composition.plain(**arguments).dtype))
        assert output.dtype == (torch.bfloat16 if is_lowered else torch.float32)
        exact = run(composition.plain, doubled(arguments), grad_output.double())
        for key, tensor in tensors_of(arguments).items():
            assert found[key].dtype == tensor.dtype
        floor = 2**-8 if is_lowered else 2e-7
        errors = [[(each[key].double() - exact[key]).norm() for each in (found, plain)] for key in exact]
        allowed = [1.1 * bar + floor * each.norm() for (_, bar), each in zip(errors, exact.values(), strict=True)]
        ratios.append([error / most for (error, _), most in zip(errors, allowed, strict=True)])
    for key, ratio in zip(exact, torch.tensor(ratios).median(0).values, strict=True):
        assert ratio <= 1, key


@by_composition
def test_meta(composition):
    arguments = composition.arguments()
    on_meta = {name: each.to("meta") if name in tensors_of(arguments) else each for name, each in arguments.items()}
    output = composition.function(**on_meta)
    assert output.device.type == "meta" and output.shape == composition.head.shape


@by_composition
def test_fake(composition):
    from torch._subclasses import FakeTensorMode

    arguments = composition.arguments()
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(each) if name in tensors_of(arguments) else each for name, each in arguments.items()}
    with mode:
        output = composition.function(**fake)
    expected = composition.function(**arguments)
    assert (output.shape, output.stride(), output.dtype) == (expected.shape, expected.stride(), expected.dtype)


@by_composition
def test_changed_operands(composition):
    """A later call sees what is in them then. A gradient does not see what came after its forward pass."""
    arguments = composition.arguments()
    composition.function(**arguments)
    for name in composition.operands:
        arguments[name].normal_()
        torch.testing.assert_close(
            composition.function(**arguments), composition.plain(**arguments), rtol=1e-4, atol=1e-4
        )
    read = [name for name in composition.operands if not name.startswith("after") or name in ("after1", "after4")]
    for name in (each for each in read if each != "before0"):
        output = composition.function(**{**arguments, "input": arguments["input"].requires_grad_()})
        arguments[name].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


LAYER_NORMS = [
    ((2, 3, 8), 8), ((2, 3, 8), (8,)), ((8,), 8), ((4, 8), 8), ((2, 3, 4, 2), (4, 2)), ((2, 3, 4), [2, 3, 4]),
    ((0, 3, 8), 8), ((1, 1), 1), ((2, 2, 3, 5), torch.Size((3, 5))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("shape, normalized_shape", LAYER_NORMS, ids=str)
def test_layer_norm(shape, normalized_shape, dtype):
    """As PyTorch's own, for each of its vectors there or not."""
    normalized = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    generator = torch.Generator().manual_seed(0)
    input, weight, bias = (torch.randn(each, generator=generator).to(dtype) for each in (shape, normalized, normalized))
    grad_output = torch.randn(shape, generator=generator).to(dtype)

    def own(**arguments):
        return ops.layer_norm(normalized_shape=normalized_shape, **arguments, eps=0.1)

    def plain(**arguments):
        return F.layer_norm(normalized_shape=normalized, **arguments, eps=0.1)

    for names in (("weight", "bias"), ("weight",), ("bias",), ()):
        arguments = {"input": input} | {name: weight if name == "weight" else bias for name in names}
        ours, theirs = (run(function, arguments, grad_output) for function in (own, plain))
        exact = run(plain, doubled(arguments), grad_output.double())
        for name in exact:
            assert ours[name].dtype == dtype and ours[name].shape == theirs[name].shape
            error, bar = ((each[name].double() - exact[name]).norm() for each in (ours, theirs))
            assert error <= 1.1 * bar + 4e-7 * exact[name].norm() + 1e-15, name


@pytest.mark.parametrize("is_linear", [False, True])
def test_wide_rows(is_linear):
    """Those that no program holds whole, which take three passes. Tensors are read by each of them."""
    tensors = {name: torch.randn(3, 8200).bfloat16() for name in ("input", "residual", "gate")}
    if is_linear:
        tensors |= {"input": torch.randn(3, 4).bfloat16(), "weight": torch.randn(8200, 4).bfloat16()}

    def own(input, residual, gate, weight=None):
        steps = {"before": (p.mish(), p.add(residual)), "after": (p.mul(gate), p.gelu())}
        if is_linear:
            return ops.linear_layer_norm(input, weight, None, **steps)
        return ops.layer_norm(input, 8200, **steps)

    def by_hand(input, residual, gate, weight=None):
        z = F.linear(input, weight) if is_linear else input
        return F.gelu(F.layer_norm(F.mish(z) + residual, (8200,)) * gate)

    grad_output = torch.randn(3, 8200).bfloat16()
    ours, theirs = (run(function, tensors, grad_output) for function in (own, by_hand))
    exact = run(by_hand, doubled(tensors), grad_output.double())
    for name in exact:
        error, bar = ((each[name].double() - exact[name]).norm() for each in (ours, theirs))
        assert error <= 1.1 * bar, name


def test_layer_norm_of_a_transposed_input():
    input = torch.randn(4, 6, 8).transpose(0, 1)
    residual = torch.randn(6, 8, 4).transpose(1, 2)
    output = ops.layer_norm(input, (4, 8), before=(p.add(residual),))
    torch.testing.assert_close(output, F.layer_norm(input + residual, (4, 8)))
    assert output.is_contiguous()


# A pointwise function of a user's own, with numbers and with a vector.
@triton.jit
def scaled_square(value, numbers):
    return value * value * numbers[0] + numbers[1] * tl.abs(value)


@triton.jit
def scaled_square_gradient(gradient, value, numbers):
    sign = tl.where(value < 0.0, -1.0, 1.0)
    return gradient * (2.0 * value * numbers[0] + numbers[1] * sign)


SQUARE = Pointwise(
    "scaled_square",
    scaled_square,
    scaled_square_gradient,
    lambda value, numbers: value * value * numbers[0] + numbers[1] * value.abs(),
    "numbers",
)


def test_a_function_of_ones_own():
    input, shift = torch.randn(8, 12), torch.randn(12)

    def function(input, shift):
        return ops.group_norm(input, 2, before=(p.apply(SQUARE, (0.5, 2)),), after=(p.apply(ADD, shift),))

    def by_hand(input, shift):
        return F.group_norm(input * input * 0.5 + 2 * input.abs(), 2) + shift

    arguments, grad_output = {"input": input, "shift": shift}, torch.randn(8, 12)
    found, expected = (run(each, arguments, grad_output) for each in (function, by_hand))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    same(run(compiled, arguments, grad_output), found)


STEP_ERRORS = [
    (lambda: p.hardtanh(2, 1), ValueError, "min_val must not be greater than max_val, got min_val=2 and max_val=1"),
    (lambda: p.hardtanh("a"), TypeError, "min_val must be an int or a float, got str"),
    (lambda: p.gelu("erf"), ValueError, "approximate must be 'none' or 'tanh', got 'erf'"),
    (lambda: p.gelu(None), TypeError, "approximate must be a str, got NoneType"),
    (lambda: p.add("a"), TypeError, "other must be an int, a float, a torch.Tensor or p.earlier(), got str"),
    (lambda: p.mul(None), TypeError, "other must be an int, a float, a torch.Tensor or p.earlier(), got NoneType"),
    (lambda: p.mul(True), TypeError, "other must be an int, a float, a torch.Tensor or p.earlier(), got bool"),
    (lambda: p.add(10**400), ValueError, "other must be at most 1.79769e+308 in magnitude, got an int of 1329 bits"),
    (lambda: p.earlier(0), ValueError, "steps must be at least 1, got 0"),
    (lambda: p.earlier(1.0), TypeError, "steps must be an int, got float"),
    (lambda: p.apply(ADD, p.earlier()), TypeError, "operand must be a torch.Tensor for add, got Earlier"),
    (lambda: p.apply(torch.relu), TypeError, "pointwise must be a Pointwise, got builtin_function_or_method"),
    (lambda: p.apply(ADD), TypeError, "operand must be a torch.Tensor for add, got NoneType"),
    (lambda: p.apply(p.mish().pointwise, 1), TypeError, "operand must be None for mish, which takes none, got int"),
    (lambda: p.apply(SQUARE, (1.0, "a")), TypeError, "operand must be an int or a float, got str"),
]


@pytest.mark.parametrize("make, error, message", STEP_ERRORS)
def test_errors_of_steps(make, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        make()


ERRORS = [
    ("after", p.mish, TypeError, "after must be a tuple of steps of ops.pointwise, got function"),
    ("after", None, TypeError, "after must be a tuple of steps of ops.pointwise, got NoneType"),
    ("after", p.mish(), TypeError, "after must be a tuple of steps of ops.pointwise, got Step"),
    ("before", (p.mish(), p.gelu), TypeError, "before[1] must be a step of ops.pointwise, got function"),
    ("before", (ADD,), TypeError, "before[0] must be a step of ops.pointwise, got Pointwise"),
    ("before", (p.mish(), p.add(torch.ones(7))), ValueError, "before[1].operand must have shape (12,), got (7,)"),
    ("after", (p.mul(torch.ones(5, 1, 12)),), ValueError, "after[0].operand must have shape {shape} or (12,)"),
    ("after", (p.mul(torch.ones(1, 1, 1, 1, 1)),), ValueError, "after[0].operand must have shape {shape} or (12,)"),
    (
        "after",
        (p.mish(), p.add(p.earlier(2))),
        ValueError,
        "after[1] must reach back at most 1 steps, to where after beg",
    ),
    (
        "before",
        (p.add(p.earlier()),),
        ValueError,
        "before[0] must reach back at most 0 steps, to where before begins, g",
    ),
    ("after", (p.add(torch.ones(12, dtype=torch.int64)),), TypeError, "after[0].operand must be a float32, bfloat16"),
    ("after", (p.add(torch.ones(12).double()),), TypeError, "after[0].operand must have input's dtype torch.float32"),
    ("after", (p.add(torch.ones(12, device="meta")),), ValueError, "after[0].operand must be on input's device cpu"),
    ("eps", -1, ValueError, "eps must not be negative, got -1"),
]


@pytest.mark.parametrize(
    "name, argument, value, error, message",
    [(name, *each) for name in HEADS for each in ERRORS if name != "linear" or each[0] == "after"],
)
def test_errors(name, argument, value, error, message):
    head = HEADS[name]
    arguments = compose(name).arguments()
    with pytest.raises(error, match="^" + re.escape(message.format(shape=head.shape))):
        getattr(ops, name)(**arguments, **{argument: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'behind'"):
        getattr(ops, name)(**arguments, behind=())


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"normalized_shape": 7},
            ValueError,
            "normalized_shape must be the input's last dimensions, of (2, 7, 12), go",
        ),
        ({"normalized_shape": ()}, ValueError, "normalized_shape must be the input's last dimensions, of (2, 7, 12)"),
        ({"normalized_shape": (1, 2, 7, 12)}, ValueError, "normalized_shape must be the input's last dimensions"),
        ({"normalized_shape": 12.0}, TypeError, "normalized_shape must be an int, got float"),
        ({"weight": torch.ones(1, 12)}, ValueError, "weight must have shape (12,), got (1, 12)"),
        ({"bias": torch.ones(7)}, ValueError, "bias must have shape (12,), got (7,)"),
        ({"bias": [1.0]}, TypeError, "bias must be a torch.Tensor, got list"),
        ({"input": None}, TypeError, "input must be a torch.Tensor, got NoneType"),
    ],
)
def test_errors_of_layer_norm(changes, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        ops.layer_norm(**{**compose("layer_norm").arguments(), **changes})
