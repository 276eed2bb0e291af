"""Chains of pointwise functions with operands of every kind, through each kernel, against autograd."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from triton_kernels.chain import Chain
from triton_kernels.group_norm import GroupNormConfig, group_norm, group_norm_backward, pointwise, pointwise_backward
from triton_kernels.linear import LinearConfig, linear
from triton_kernels.pointwise import ADD, GELU, HARDTANH, MISH, MUL
from triton_kernels.reference import plain

ROWS, GROUPS, GROUP_SIZE = 37, 6, 8
CHANNELS = GROUPS * GROUP_SIZE
ADD_TENSOR, MUL_TENSOR = replace(ADD, operand="tensor"), replace(MUL, operand="tensor")
MUL_SCALAR = replace(MUL, operand="scalar")
BOUNDS = (-0.75, 1.25)


def norm(z, weight, bias):
    return F.group_norm(z, GROUPS, weight, bias)


def added(z, *operands):
    for operand in operands:
        z = z if operand is None else z + operand
    return z


def earlier_before(z, *operands):
    z = added(z, *operands[:2])
    return added(z, operands[2]) * operands[3] * z


def earlier_after(x, vector, scalar):
    return (F.gelu(added(x, vector)) + x) * scalar


#: Each chain, and what it is of the product and the operands. Vectors and tensors stand first, last, beside the norm
#: and beside each other.
CHAINS = {
    "vectors before": (
        Chain("linear", before=(ADD, MUL, HARDTANH, ADD, MISH)),
        lambda z, o: norm(F.mish(F.hardtanh((z + o[0] + o[1]) * o[2], *o[3]) + o[4]), o[6], o[7]),
    ),
    "vectors after": (
        Chain("linear", after=(MUL, GELU, ADD, ADD)),
        lambda z, o: F.gelu(norm(z + o[0], o[1], o[2]) * o[3]) + o[5] + o[6],
    ),
    "tensors before": (
        Chain("linear", before=(ADD_TENSOR, MISH, MUL_TENSOR, MUL)),
        lambda z, o: norm(F.mish(z + o[0] + o[1]) * o[3] * o[4], o[5], o[6]),
    ),
    "tensors after": (
        Chain("linear", before=(ADD,), after=(ADD_TENSOR, GELU, MUL_TENSOR, HARDTANH, ADD)),
        lambda z, o: F.hardtanh(F.gelu(norm(z + o[0] + o[1], o[2], o[3]) + o[4]) * o[6], *o[7]) + o[8],
    ),
    "earlier values": (
        Chain(
            "linear",
            before=(ADD, ADD, MUL_SCALAR, MUL.with_operand("earlier 2")),
            after=(ADD, GELU, ADD.with_operand("earlier 2"), MUL_SCALAR),
        ),
        lambda z, o: earlier_after(norm(earlier_before(z, *o[:4]), o[5], o[6]), o[7], o[10]),
    ),
    "no norm": (
        Chain("linear", before=(MISH, MUL, ADD_TENSOR, ADD, HARDTANH), norm=""),
        lambda z, o: F.hardtanh(F.mish(z + o[0]) * o[2] + o[3] + o[4], *o[5]),
    ),
}
by_chain = pytest.mark.parametrize("name", CHAINS)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands_of(chain, rows=ROWS):
    shapes = {"scalar": (1,), "vector": (CHANNELS,), "tensor": (rows, CHANNELS)}
    return tuple(
        draw(*shapes[step.operand], seed=place) + (step.name == "mul")
        if step.has_tensor
        else BOUNDS
        if step.operand == "numbers"
        else None
        for place, step in enumerate(chain.steps)
    )


def doubled(operands):
    return tuple(each.double().requires_grad_() if isinstance(each, torch.Tensor) else each for each in operands)


def expected_gradients(result, z, operands, gradient):
    """Those of z and of the operands, None where these are no tensors."""
    leaves = [each for each in operands if isinstance(each, torch.Tensor)]
    of_z, *others = torch.autograd.grad(result, [z, *leaves], gradient.double())
    remaining = iter(others)
    return of_z, tuple(next(remaining) if isinstance(each, torch.Tensor) else None for each in operands)


def close(result, expected):
    torch.testing.assert_close(result.double(), expected.detach(), rtol=2e-4, atol=2e-4)


@by_chain
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("strips, store_strips", [(1, 1), (2, 1), (1, 2)])
def test_after_a_product(name, strips, store_strips, saves):
    """In the product's epilogue, which keeps z: what it is with the first vectors added."""
    chain, formula = CHAINS[name]
    config = LinearConfig(16, 64, 16, epilogue_strips=strips, store_strips=store_strips)
    input, weight, operands = draw(ROWS, 24, seed=20), draw(CHANNELS, 24, seed=21) / 5, operands_of(chain)
    product = F.linear(input, weight).double()
    output = torch.full((ROWS, CHANNELS), torch.nan)
    saved = torch.full((ROWS, CHANNELS), torch.nan) if saves else None
    linear(input, weight, chain, config, operands, output=output, saved=saved, eps=1e-5, group_size=GROUP_SIZE)
    close(output, formula(product, doubled(operands)))
    if saves:
        close(saved, added(product, *operands[: len(chain.biases)]))


def backward(chain, z, gradient, operands, gradients, rows_per_program=8):
    """The input's gradient; ``gradients`` become those of the operands."""
    input_gradient = torch.full_like(z, torch.nan)
    options = {"input_gradient": input_gradient, "gradients": gradients}
    if chain.norm:
        config = GroupNormConfig(4, 32, rows_per_program)
        group_norm_backward(gradient, z, GROUPS, chain, operands, 1e-5, config, **options)
    else:
        pointwise_backward(gradient, z, chain, operands, **options)
    return input_gradient


def empty_gradient(step, operand):
    """The memory that the passes write: of one value for all, sums of each channel."""
    return torch.full((CHANNELS,) if step.operand == "scalar" else operand.shape, torch.nan)


def check_passes(name, rows_per_program, z, operands, exact_operands, exact_z):
    """The passes of ``z`` and ``operands`` against the formula of the exact ones."""
    chain, formula = CHAINS[name]
    gradient, exact_z, exact_operands = draw(ROWS, CHANNELS, seed=23), *doubled((exact_z,)), doubled(exact_operands)
    expected = formula(exact_z, exact_operands)
    of_z, of_operands = expected_gradients(expected, exact_z, exact_operands, gradient)
    output = torch.full_like(z, torch.nan)
    if chain.norm:
        group_norm(z, GROUPS, chain, operands, 1e-5, GroupNormConfig(4, 32, rows_per_program), output=output)
    else:
        pointwise(z, chain, operands, output=output)
    close(output, expected)
    # A vector that is in z already gets its gradient; any other that is absent has none.
    gradients = [
        empty_gradient(step, exact) if exact is not None and (mine is not None or place < len(chain.biases)) else None
        for place, (step, mine, exact) in enumerate(zip(chain.steps, operands, of_operands, strict=True))
    ]
    close(backward(chain, z, gradient, operands, gradients, rows_per_program), of_z)
    for mine, exact in zip(gradients, of_operands, strict=True):
        if mine is not None:
            close(mine if mine.shape == exact.shape else mine.sum(0, keepdim=True), exact)


@by_chain
@pytest.mark.parametrize("rows_per_program", [8, 64])
@pytest.mark.parametrize("holds_biases", [False, True], ids=["biases", "biases in z"])
def test_in_a_pass(name, rows_per_program, holds_biases):
    """Forward and backward, in one chunk of rows and in several."""
    chain, _ = CHAINS[name]
    z, operands = draw(ROWS, CHANNELS, seed=22), operands_of(chain)
    biases = len(chain.biases) if holds_biases else 0
    given = (*[None] * biases, *operands[biases:])
    check_passes(name, rows_per_program, added(z, *operands[:biases]), given, operands, z)


def without(chain, operands, kind):
    """The operands without those of a kind, and with such that do nothing in their place."""
    absent = [step.operand == kind for step in chain.steps]
    given = tuple(None if is_absent else each for is_absent, each in zip(absent, operands, strict=True))
    neutral = tuple(
        torch.full_like(each, float(step.name == "mul")) if is_absent else each
        for is_absent, step, each in zip(absent, chain.steps, operands, strict=True)
    )
    return given, neutral


@by_chain
@pytest.mark.parametrize("kind", ["vector", "tensor"])
def test_what_is_absent_does_nothing(name, kind):
    """Adding zeros and multiplying by ones have the same result, forward and backward."""
    chain, _ = CHAINS[name]
    z = draw(ROWS, CHANNELS, seed=22)
    check_passes(name, 16, z, *without(chain, operands_of(chain), kind), z)


@by_chain
def test_some_gradients(name):
    """One that is wanted does not depend on the others, and is rounded once to its dtype."""
    chain, _ = CHAINS[name]
    z, gradient, operands = draw(ROWS, CHANNELS, seed=22), draw(ROWS, CHANNELS, seed=23), operands_of(chain)
    pairs = zip(chain.steps, operands, strict=True)
    every = [empty_gradient(step, each) if isinstance(each, torch.Tensor) else None for step, each in pairs]
    backward(chain, z, gradient, operands, every)
    for place, expected in enumerate(every):
        if expected is not None:
            wanted = [None] * len(operands)
            wanted[place] = torch.full(expected.shape, torch.nan, dtype=torch.bfloat16)
            backward(chain, z, gradient, operands, wanted)
            assert torch.equal(wanted[place], expected.bfloat16())


@by_chain
@pytest.mark.parametrize("kind", ["none", "vector", "tensor"])
def test_reference(name, kind):
    """The chain in plain PyTorch is the formula written by hand, also with pixels behind the channels."""
    chain, formula = CHAINS[name]
    z = draw(ROWS, CHANNELS, seed=22).double()
    given, neutral = without(chain, doubled(operands_of(chain)), kind)
    expected = formula(z, neutral)
    torch.testing.assert_close(plain(chain, z, given, GROUPS), expected)
    images = [each[:, :, None] if isinstance(each, torch.Tensor) and each.ndim == 2 else each for each in given]
    torch.testing.assert_close(plain(chain, z[:, :, None], images, GROUPS)[:, :, 0], expected)


def test_names_of_kernels():
    """Those that tables have."""
    assert Chain("linear", norm="").kernel == "linear_bias"
    assert CHAINS["vectors before"][0].kernel == "linear_mul_vector_hardtanh_add_vector_mish_group_norm"
    assert CHAINS["no norm"][0].kernel == "linear_mish_mul_vector_add_tensor_add_vector_hardtanh"
