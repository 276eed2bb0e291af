"""Promise: a step's operand is broadcast as in PyTorch, is an earlier value of the chain, or is refused."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import ops
from ops import pointwise as p
from ops.calls import parse
from tests.accuracy import run
from tests.chains import doubled, tensors_of
from tests.ops.compositions import HEADS, compose
from triton_kernels.chain import Chain
from triton_kernels.pointwise import ADD, MISH, MUL, Pointwise

by_head = pytest.mark.parametrize("name", HEADS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(function, by_hand, arguments, shape):
    """Both give the same, and gradients of the arguments' shapes."""
    grad_output = torch.randn(shape)
    found = run(function, arguments, grad_output)
    expected = run(by_hand, doubled(arguments), grad_output.double())
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        error = (found[name].double() - expected[name]).norm()
        assert error <= 1e-5 * (expected[name].norm() + 1), f"{name}: {error}"
    return found


def shapes_of(head):
    """Those that PyTorch broadcasts to the head's values, with channels in their place, and the two of its own."""
    channels, last, lead = head.channels, [1] * (len(head.shape) - 2) if head.has_images else [], len(head.shape)
    filled = range(lead - 1 - len(last))
    yield from ([1] * ones for ones in range(lead + 1))
    yield from ([1] * ones + [channels, *last] for ones in (0, *(each + 1 for each in filled)))
    yield (channels,)
    yield head.shape
    if head.has_images:
        yield (head.shape[0], channels)
        yield (head.shape[0], channels, *last)


def aligned(head, operand):
    """The operand as PyTorch broadcasts it."""
    ones = [1] * (len(head.shape) - 2) if head.has_images and operand.ndim in (1, 2) and operand.numel() > 1 else []
    is_column = operand.ndim == 2 and operand.shape[1] == 1
    return operand if is_column else operand.view((*operand.shape, *ones))


@by_head
def test_shapes(name):
    """Before the norm, where there is one, and after it."""
    head, composition = HEADS[name], compose(name)
    for shape, place in itertools.product(
        map(tuple, shapes_of(head)), ("before", "after") if head.norm else ("after",)
    ):
        arguments = {**composition.arguments(), "operand": torch.randn(shape)}

        def own(operand, place=place, **rest):
            return getattr(ops, name)(**rest, **{place: (p.mul(operand), p.mish())})

        def by_hand(operand, place=place, **rest):
            tensors = [rest[each] for each in head.shapes]
            value, vectors = head.contract(tensors)
            around = (lambda value: F.mish(value * aligned(head, operand))), (lambda value: value)
            first, last = around if place == "before" else around[::-1]
            value = first(value)
            return last(head.norm(value, head, *vectors, 1e-5) if head.norm else value)

        close(own, by_hand, arguments, head.shape)


REFUSED = {
    "linear": [(7,), (2, 12), (2, 7, 1), (2, 1, 12), (1, 1, 1, 12), (12, 1)],
    "linear_layer_norm": [(7,), (2, 12), (2, 7, 1), (12, 1)],
    "layer_norm": [(7,), (2, 12), (2, 7, 1), (2, 1, 12), (12, 1)],
    "conv_transpose2d_group_norm": [(7,), (1, 12), (2, 12), (12, 7), (3, 12, 9, 1), (9, 7), (1, 3, 12, 1, 1)],
    "group_norm": [(5,), (1, 12), (8, 12), (9, 12, 4), (9, 1, 5), (1, 12, 5)],
}


@pytest.mark.parametrize("name, shape", [(name, shape) for name, shapes in REFUSED.items() for shape in shapes])
def test_refused_shapes(name, shape):
    expected = rf"^after\[1\]\.operand must have shape .*\(12,\).*, got {re.escape(str(shape))}$"
    with pytest.raises(ValueError, match=expected):
        getattr(ops, name)(**compose(name).arguments(), after=(p.mish(), p.add(torch.ones(shape))))


def test_refused_devices_and_dtypes():
    """Those of a tensor with one value are checked like any other's."""
    input = torch.randn(4, 12)
    with pytest.raises(ValueError, match=r"^after\[0\]\.operand must be on input's device cpu, got meta"):
        ops.group_norm(input, 2, after=(p.mul(torch.tensor(1.0, device="meta")),))
    with pytest.raises(
        TypeError, match=r"^after\[0\]\.operand must have input's dtype torch.float32, got torch.float64"
    ):
        ops.group_norm(input, 2, after=(p.mul(torch.tensor(1.0, dtype=torch.float64)),))


@triton.jit
def gate(value, operand):
    return value * tl.sigmoid(operand)


@triton.jit
def gate_gradient(gradient, value, operand):
    sigmoid = tl.sigmoid(operand)
    return gradient * sigmoid, gradient * value * sigmoid * (1.0 - sigmoid)


GATE = Pointwise("own_gate", gate, gate_gradient, lambda value, operand: value * torch.sigmoid(operand), "tensor")

#: Steps, and the values that they make of one, by hand.
EARLIER = {
    "a residual": (lambda: (p.silu(), p.add(p.earlier())), lambda v: F.silu(v) + v),
    "a gate": (lambda: (p.sigmoid(), p.mul(p.earlier(1))), lambda v: torch.sigmoid(v) * v),
    "further back": (lambda: (p.mul(0.5), p.mish(), p.sub(p.earlier(2))), lambda v: F.mish(v * 0.5) - v),
    "between": (
        lambda: (p.add(1.0), p.mish(), p.sub(p.earlier(1)), p.mul(2.0)),
        lambda v: (F.mish(v + 1) - (v + 1)) * 2,
    ),
    "one value twice": (
        lambda: (p.silu(), p.mul(p.earlier(1)), p.add(p.earlier(2))),
        lambda v: F.silu(v) * v + v,
    ),
    "of another": (
        lambda: (p.silu(), p.add(p.earlier(1)), p.mul(p.earlier(1))),
        lambda v: (F.silu(v) + v) * F.silu(v),
    ),
    "a quotient": (
        lambda: (p.softplus(), p.add(0.5), p.mish(), p.div(p.earlier(1))),
        lambda v: F.mish(F.softplus(v) + 0.5) / (F.softplus(v) + 0.5),
    ),
    "one's own": (lambda: (p.mish(), p.apply(GATE, p.earlier())), lambda v: F.mish(v) * torch.sigmoid(v)),
}


@pytest.mark.parametrize("steps", EARLIER)
@by_head
def test_earlier_values(name, steps):
    """Before the norm and after it. The first reaches back to where its part begins."""
    head, (make, plain) = HEADS[name], EARLIER[steps]

    def own(**arguments):
        return getattr(ops, name)(
            **arguments, **{each: make() for each in (("before", "after") if head.norm else ("after",))}
        )

    def by_hand(**arguments):
        value, vectors = head.contract([arguments[each] for each in head.shapes])
        return plain(head.norm(plain(value), head, *vectors, 1e-5)) if head.norm else plain(value)

    arguments = compose(name).arguments()
    found = close(own, by_hand, arguments, head.shape)
    if steps in ("a residual", "one's own"):
        torch._dynamo.reset()
        compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(**arguments), found["output"])


def test_a_function_of_ones_own_takes_any_shape():
    input = torch.randn(3, 12, 5)
    for shape in ((), (12,), (3, 12), (3, 12, 5)):
        arguments = {"input": input, "operand": torch.randn(shape)}
        close(
            lambda input, operand: ops.group_norm(input, 2, after=(p.apply(GATE, operand),)),
            lambda input, operand: GATE.plain(
                F.group_norm(input, 2), operand.view((*operand.shape, *[1] * (operand.ndim in (1, 2))))
            ),
            arguments,
            input.shape,
        )


def check_convolution(samples, channels, size, dtype, device="cpu", format=torch.contiguous_format):
    """A time embedding, a gate and a residual around the norm of a transposed convolution of stride 1."""
    shapes = {
        "input": (samples, channels, *size),
        "weight": (channels, channels, 3, 3),
        "bias": (channels,),
        "embedding": (samples, channels),
        "scale": (samples, channels, 1, 1),
    }
    arguments = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    arguments["input"] = arguments["input"].contiguous(memory_format=format)

    def own(input, weight, bias, embedding, scale):
        steps = {
            "before": (p.add(embedding), p.sigmoid(), p.mul(p.earlier())),
            "after": (p.mul(scale), p.silu(), p.add(p.earlier(2))),
        }
        return ops.conv_transpose2d_group_norm(input, weight, bias, 4, padding=1, **steps)

    def by_hand(input, weight, bias, embedding, scale):
        z = F.conv_transpose2d(input, weight, bias, padding=1) + embedding[:, :, None, None]
        y = F.group_norm(torch.sigmoid(z) * z, 4)
        return F.silu(y * scale) + y

    grad_output = torch.randn(shapes["input"]).to(device, dtype)
    found, theirs = run(own, arguments, grad_output), run(by_hand, arguments, grad_output)
    exact = run(by_hand, doubled(arguments), grad_output.double())
    for name in exact:
        error, bar = ((each[name].double() - exact[name]).norm() for each in (found, theirs))
        assert error <= 1.1 * bar + 2**-22 * exact[name].norm(), (name, error, bar)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_after_a_convolution_of_stride_1(format, dtype):
    check_convolution(3, 8, (6, 5), dtype, format=format)


def test_what_is_reached_is_not_in_z():
    """z, which the backward pass reads, is the first value that a later step takes, or comes before it."""
    add = ADD.with_operand
    assert len(Chain("linear", before=(ADD, ADD, MISH)).biases) == 3
    assert len(Chain("linear", before=(ADD, ADD, MISH, add("earlier 2"))).biases) == 2
    assert len(Chain("linear", before=(ADD, ADD, MISH, add("earlier 3"), add("earlier 1"))).biases) == 1
    assert not Chain(before=(ADD, add("earlier 1"))).biases


def test_absent_vectors_count_as_steps():
    """An earlier value is found by its place, whatever is absent."""
    chain = ops.Chain(before=(MISH, MUL, ADD.with_operand("earlier 2")))
    input, vector = torch.randn(4, 12), torch.randn(12)
    for factor in (vector, None):
        expected = F.group_norm(F.mish(input) * (1 if factor is None else factor) + input, 2)
        torch.testing.assert_close(chain(input, factor, None, None, num_groups=2), expected, rtol=1e-5, atol=1e-5)


def test_chains_that_there_are_not():
    with pytest.raises(
        ValueError, match=r"after\[0\] must reach back at most 0 steps, to where after begins, got earlier"
    ):
        ops.Chain("linear", norm="", after=(ADD.with_operand("earlier 1"),))
    with pytest.raises(ValueError, match="a vector a sample must be an operand where channels have further dimensions"):
        ops.Chain("linear", before=(replace(ADD, operand="sample"),))
    for operand in ("earlier", "earlier 0", "earlier -1", "earlier x", "later 1"):
        with pytest.raises(ValueError, match="operand must be one of '', 'numbers'"):
            replace(MUL, operand=operand)


TEXT = (
    "add sample -> gelu -> mul earlier 2 -> group_norm(2, 1e-05) -> no mul -> add -> silu -> mul scalar -> "
    "no sub sample -> div earlier 3"
)


def test_texts():
    """They name operands of every kind, in a process that has made no such chain too."""
    code = f"from ops.calls import parse; call = parse({TEXT!r}); assert call.text == {TEXT!r}; print(call.name)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == (
        "normfuse::add_sample_gelu_mul_earlier_2_group_norm_silu_mul_scalar_sub_sample_div_earlier_3"
    )
    call = parse(TEXT)
    assert [step.earlier for step in call.chain.steps] == [0, 0, 2, 0, 0, 0, 0, 0, 3]
    with pytest.raises(ValueError, match="names the pointwise function 'unknown earlier 1'"):
        parse("add -> unknown earlier 1")


def test_exported():
    """A graph has the functions with their operands' kinds."""

    class Layer(torch.nn.Module):
        def forward(self, input, scale, embedding):
            return ops.group_norm(
                input, 2, before=(p.add(embedding), p.silu()), after=(p.mul(scale), p.add(p.earlier()))
            )

    arguments = torch.randn(4, 12, 3), torch.tensor(0.7), torch.randn(4, 12)
    batch = torch.export.Dim("batch")
    program = torch.export.export(Layer(), arguments, dynamic_shapes=({0: batch}, None, {0: batch}))
    assert "add sample -> silu -> group_norm -> mul -> add -> mul scalar -> add earlier 1" in str(program.graph)
    for size in (4, 2):
        given = arguments[0][:size], arguments[1], arguments[2][:size]
        assert torch.equal(program.module()(*given), Layer()(*given))


def test_autocast_keeps_the_dtypes_of_gradients():
    composition = compose("linear_group_norm", ("mish", "mul_scalar"), ("silu", "add_earlier"))
    arguments = composition.arguments()
    with torch.autocast("cpu", torch.bfloat16):
        output = composition.function(**arguments)
        found = run(composition.function, arguments, torch.ones_like(output))
    assert output.dtype == torch.bfloat16
    assert all(found[name].dtype == torch.float32 for name in tensors_of(arguments))
