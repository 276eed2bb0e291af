"""Promise: a chain's declaration and the names of its function's parameters are all that ``fuse`` needs to know."""

import copy
import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import fuse_calls
from ops.fuse import fuse
from tests.ops import fused_models
from tests.ops.fused_models import L30, L94, OUT, Parts, assert_same, input_of, made
from triton_kernels.pointwise import ADD, HARDTANH, MISH

calls = pytest.fixture(fused_models.calls)


@pytest.mark.parametrize("name", fuse_calls.CHAINS)
def test_names_are_parameters(name):
    chain = fuse_calls.CHAINS[name]
    assert len(chain.names) == sum(bool(step.operand) for step in chain.steps) + (chain.reduction is not None)
    flat = [each for entry in chain.names for each in (entry if isinstance(entry, tuple) else (entry,))]
    assert set(flat) <= set(inspect.signature(getattr(ops, name)).parameters) and len(set(flat)) == len(flat)


@pytest.fixture
def declare(monkeypatch, calls):
    """Adds a chain and its function, which records its calls."""

    def declare_chain(chain, function):
        def recorded(*arguments, **options):
            calls.append(function.__name__)
            return function(*arguments, **options)

        monkeypatch.setattr(ops, function.__name__, recorded, raising=False)
        monkeypatch.setitem(fuse_calls.CHAINS, function.__name__, chain)

    return declare_chain


def linear_mish_add_group_norm(input, weight, linear_bias, bias, num_groups, norm_weight, norm_bias, eps):
    z = F.mish(F.linear(input, weight, linear_bias))
    return F.group_norm(z if bias is None else z + bias, num_groups, norm_weight, norm_bias, eps)


def linear_group_norm(input, weight, linear_bias, num_groups, norm_weight, norm_bias, eps):
    return F.group_norm(F.linear(input, weight, linear_bias), num_groups, norm_weight, norm_bias, eps)


def linear_hardtanh_group_norm_hardtanh(
    input, weight, linear_bias, num_groups, norm_weight, norm_bias, eps, low, high, min_val, max_val
):
    z = F.hardtanh(F.linear(input, weight, linear_bias), low, high)
    return F.hardtanh(F.group_norm(z, num_groups, norm_weight, norm_bias, eps), min_val, max_val)


FIFTH_CHAINS = {
    "a bias after an activation": (
        ops.Chain("linear", before=(MISH, ADD), names=("linear_bias", "bias", "norm_weight", "norm_bias")),
        linear_mish_add_group_norm,
        lambda self, x: self.groupnorm(self.mish(self.gemm(x)) + self.bias),
    ),
    "the same function twice": (
        ops.Chain(
            "linear",
            before=(HARDTANH,),
            after=(HARDTANH,),
            names=("linear_bias", ("low", "high"), "norm_weight", "norm_bias", ("min_val", "max_val")),
        ),
        linear_hardtanh_group_norm_hardtanh,
        lambda self, x: self.groupnorm(self.gemm(x).clamp(-2, 3)).clamp(-0.25, 0.5),
    ),
    "nothing after the norm": (
        ops.Chain("linear", names=("linear_bias", "norm_weight", "norm_bias")),
        linear_group_norm,
        lambda self, x: self.gelu(self.groupnorm(self.gemm_without_bias(x) + self.bias)),
    ),
}


@pytest.mark.parametrize("chain, function, forward", FIFTH_CHAINS.values(), ids=FIFTH_CHAINS)
def test_fifth_chain(chain, function, forward, declare, calls):
    model = made(forward)
    plain = copy.deepcopy(model)
    assert not fuse(model).replaced
    declare(chain, function)
    report = fuse(model)
    assert [entry.chain for entry in report.replaced] == [function.__name__] and not report.left
    assert_same(model, plain, input_of(L30))
    assert calls == [function.__name__]


def test_longest_chain(declare, calls):
    """Where one chain begins with all of another."""
    declare(*FIFTH_CHAINS["nothing after the norm"][:2])
    model = made(lambda self, x: self.hardtanh(self.groupnorm(self.gemm(x))))
    assert [entry.chain for entry in fuse(model).replaced] == [L30]
    model(input_of(L30))
    assert calls == [L30]


def added_twice(self, x):
    return self.groupnorm(self.mish(self.hardtanh(self.gemm_without_bias(x) + self.bias + self.row_bias)))


def added_once(self, x):
    return self.hardtanh(self.groupnorm(self.gemm_without_bias(x) + self.bias))


@pytest.mark.parametrize("chain, forward", [(L94, added_twice), (L30, added_once)], ids=["L94", "L30"])
def test_as_many_biases_as_the_chain_has(chain, forward, calls):
    """Those that are added take the place of the layer's own. Where it gets one, they are too many."""
    model = made(forward)
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    assert_same(model, plain, input_of(chain))
    assert calls == [chain]
    for each in (model, plain):
        each.gemm_without_bias = made(Parts).gemm
    assert_same(model, plain, input_of(chain))
    assert calls == [chain]
    left = fuse(model).left[0]
    assert left.reason == "gemm_without_bias has a bias, and add adds another"


def test_bias_that_is_gone(calls):
    """PyTorch cannot add None; neither does a fused model."""
    model = made(added_once)
    assert fuse(model).replaced
    model.bias = None
    with pytest.raises(TypeError, match="NoneType"):
        model(input_of(L30))
    assert not calls


def test_shapes_that_change(calls):
    """An added vector may have a leading one; a number that is added runs as it was written."""
    model = made(added_once)
    plain = copy.deepcopy(model)
    assert fuse(model).replaced
    for shape in ((1, OUT), (1,)):
        for each in (model, plain):
            each.bias = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        assert_same(model, plain, input_of(L30))
    assert calls == [L30]


@fused_models.by_benchmark
def test_compile_in_a_new_process(chain, monkeypatch):
    """As of a model that was loaded there: the chains are as they were declared, and none was called yet."""
    model = made(fused_models.BENCHMARKS[chain])
    fuse(model)
    for name, declared in fuse_calls.CHAINS.items():
        monkeypatch.setitem(fuse_calls.CHAINS, name, dataclasses.replace(declared))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_of(chain)), model(input_of(chain)))
