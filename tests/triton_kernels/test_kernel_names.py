"""Names of kernels: each says what its chain does, and a chain of built-in functions is known by it everywhere."""

import itertools

import pytest

from triton_kernels import chain, chains
from triton_kernels.activations import ELU, LEAKY_RELU, RELU, SILU, SOFTPLUS, TANH
from triton_kernels.arithmetic import MUL_NUMBER
from triton_kernels.built_in import BUILT_IN
from triton_kernels.chain import Chain
from triton_kernels.pointwise import ADD, GELU, GELU_TANH, HARDTANH, MISH, MUL

ADD_TENSOR, ADD_EARLIER, MUL_SCALAR = (
    ADD.with_operand("tensor"), ADD.with_operand("earlier 2"), MUL.with_operand("scalar"),
)  # fmt: skip


def test_parts_are_no_sequences_of_others():
    """Else two chains would share a name: GELU and tanh are not GELU by tanh."""
    parts = [each.part for each in BUILT_IN]
    assert len(set(parts)) == len(parts)
    sequences = {"_".join(each) for each in itertools.product(parts, repeat=2)}
    assert not sequences & set(parts)
    assert Chain("linear", (GELU, TANH), "").kernel == "linear_gelu_tanh"
    assert Chain("linear", (GELU_TANH,), "").kernel == "linear_gelutanh"


@pytest.mark.parametrize("before, after", [
    ((SILU,), ()), ((), (SILU,)), ((ADD, MISH, MUL), (ADD_TENSOR, LEAKY_RELU, ADD)),
    ((MUL_SCALAR,), (SILU, MUL, ADD_EARLIER, ADD)), ((MUL_NUMBER, MUL), (GELU_TANH, GELU, TANH)),
])  # fmt: skip
@pytest.mark.parametrize("norm", ["group_norm", ""])
def test_chains_by_their_names(monkeypatch, before, after, norm):
    """Without the biases, which the name leaves out."""
    made = Chain("linear", before, norm, after)
    monkeypatch.setattr(chain, "_chains", {})
    found = chains.known(made.kernel)
    assert found is not None and found.kernel == made.kernel
    assert (found.activation, found.norm, found.after) == (made.activation, made.norm, made.after)
    assert chains.known(made.kernel) is found


@pytest.mark.parametrize("name", ["linear_softsign", "linear_group_norm_mul_matrix", "conv_silu", "group_norm_silu"])
def test_names_that_are_not_known(name, monkeypatch):
    monkeypatch.setattr(chain, "_chains", {})
    assert chains.known(name) is None


def test_terms():
    """What needs registers: exponentials and polynomials, also those of functions that a function calls."""
    counts = {HARDTANH: 0, RELU: 0, MUL: 0, ADD_TENSOR: 0, SILU: 1, MISH: 1, GELU: 1, TANH: 2, ELU: 2, SOFTPLUS: 2}
    assert {each: each.terms for each in counts} == counts
