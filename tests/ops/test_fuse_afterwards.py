"""Promise: a fused model's parameters, state_dict, hooks and modes stay what they were, and whatever changes in it
afterwards, it gives what its own forward gives."""

import copy
import inspect
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.fuse import fuse, unfuse
from tests.ops.fused_models import (
    BENCHMARKS,
    GROUPS,
    IN,
    L19,
    L30,
    L75,
    L94,
    OUT,
    ROWS,
    SPELLINGS,
    BenchmarkL19,
    BenchmarkL30,
    HalvingLinear,
    Parts,
    assert_same,
    by_benchmark,
    in_full,
    input_of,
    made,
)


@by_benchmark
def test_parameters_stay(chain):
    model = made(BENCHMARKS[chain])
    state, parameters, modules = model.state_dict(keep_vars=True), dict(model.named_parameters()), list(model.modules())
    fuse(model)
    assert list(model.state_dict()) == list(state)
    assert all(value is state[name] for name, value in model.state_dict(keep_vars=True).items())
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert list(model.modules()) == modules and type(model) is BENCHMARKS[chain]
    assert inspect.signature(model.forward) == inspect.signature(BENCHMARKS[chain]().forward)


@by_benchmark
@pytest.mark.parametrize("assign", [False, True])
def test_training_and_loading(chain, assign):
    """An optimiser made before goes on; a state_dict goes either way, and what is assigned is used."""
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    optimisers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    fuse(model)
    for each, optimiser in zip((model, plain), optimisers, strict=True):
        each(input_of(chain)).square().mean().backward()
        optimiser.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    other = made(BENCHMARKS[chain])
    model.load_state_dict(other.state_dict(), assign=assign)
    assert_same(model, other, input_of(chain))


def test_hooks_of_the_module_itself():
    model, seen = made(BenchmarkL30), []
    model.register_forward_hook(lambda module, arguments, output: seen.append("before"))
    fuse(model)
    model.register_forward_pre_hook(lambda module, arguments: seen.append("after"))
    model(input_of(L30))
    assert seen == ["after", "before"]


def double(module, arguments, output):
    return 2 * output


#: what may happen to a fused model that its fused forward would pass over
CHANGES = {
    "hook": lambda model: model.groupnorm.register_forward_hook(double),
    "replaced module": lambda model: setattr(model, "gemm", HalvingLinear(IN, OUT).float()),
    "parametrisation": lambda model: nn.utils.parametrizations.weight_norm(model.gemm),
    "overridden forward": lambda model: setattr(model.hardtanh, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_after_fusing(change):
    """The forward runs as it was written."""
    torch.manual_seed(5)
    model = made(BenchmarkL30)
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        torch.manual_seed(6)
        change(each)
    assert_same(model, plain, input_of(L30))


def test_another_module_of_the_same_class():
    """The chain is fused with that."""
    model = made(BenchmarkL30)
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        each.gemm = made(Parts).skip
        each.groupnorm = nn.GroupNorm(4, OUT, eps=0.1, affine=False)
    assert_same(model, plain, input_of(L30))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def set(self, scale):
        self.scale = scale
        return self

    def forward(self, x):
        return x * self.scale


class WithBlock(Parts):
    """A chain and, around it, all that a forward may use beside it."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.again = self.block
        self.after = nn.Sequential(nn.Tanh(), nn.Linear(OUT, OUT))

    def forward(self, x):
        y = self.hardtanh(self.groupnorm(self.gemm(self.again(self.block(x)))))
        return self.after(y * self.factor + self.axis_bias.sum())


def another_forward(self, x):
    return self.skip(x)


#: what may happen around the chain of a fused model; the forward then does as its class's would
CHANGES_BESIDE = {
    "nothing": lambda model: None,
    "replaced": lambda model: setattr(model, "block", Block().set(7.0)),
    "replaced by another class": lambda model: setattr(model, "block", nn.Tanh()),
    "replaced under one of two names": lambda model: setattr(model, "again", nn.Identity()),
    "changed": lambda model: model.block.set(9.0),
    "its forward overridden": lambda model: setattr(model.block, "forward", torch.tanh),
    "hooked": lambda model: model.block.register_forward_hook(double),
    "a Sequential reordered": lambda model: model.after._modules.update({"0": model.after._modules.pop("0")}),
    "a Sequential extended": lambda model: model.after.append(nn.Tanh()),
    "a class's number hidden": lambda model: setattr(model, "factor", 5.0),
    "a parameter replaced": lambda model: setattr(model, "axis_bias", nn.Parameter(torch.ones(1, 2, 1, 1).float())),
    "the class's forward replaced": lambda model: setattr(type(model), "forward", another_forward),
}


@pytest.mark.parametrize("change", CHANGES_BESIDE.values(), ids=CHANGES_BESIDE)
def test_changes_beside_the_chain(change, monkeypatch):
    """The result is that of the class's forward on the model as it is now."""
    monkeypatch.setattr(WithBlock, "forward", WithBlock.forward)
    model = made(WithBlock)
    fuse(model)
    change(model)
    torch.testing.assert_close(model(input_of(L30)), type(model).forward(model, input_of(L30)))


@pytest.mark.parametrize("operation", ["+=", "-=", "*=", "/=", "**="])
def test_in_place_operators(operation):
    """Beside a chain, they write in place: to a buffer, and not to a number."""
    namespace = {}
    source = f"""
def forward(self, x):
    kept = self.buffer
    kept {operation} self.scale
    rows = x.shape[0]
    count = rows
    rows {operation} 2
    return self.hardtanh(self.groupnorm(self.gemm(x))) + kept + count * 100 + rows
"""
    exec(source, namespace)
    model = made(namespace["forward"])
    plain = copy.deepcopy(model)
    fuse(model)
    for _ in range(2):
        torch.testing.assert_close(model(input_of(L30)), plain(input_of(L30)), equal_nan=True)
    torch.testing.assert_close(model.buffer, plain.buffer, equal_nan=True)


def test_forward_of_a_layer_replaced(monkeypatch):
    """As libraries do it for all Linear layers at once."""
    model = made(BenchmarkL30)
    plain = copy.deepcopy(model)
    fuse(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 3)
    assert_same(model, plain, input_of(L30))


def test_fusing_again():
    """It begins anew."""
    model = nn.Sequential(nn.Sequential(nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh()), nn.Softmax(1))
    report = fuse(model)
    model(input_of(L30))
    assert [chain.module for chain in report.chains] == ["0"]
    del model[0][2]
    again = fuse(model)
    assert not again.chains and not report.chains
    model(input_of(L30))
    assert [chain.chain for chain in again.chains] == ["linear -> add -> group_norm -> mul -> add"]
    unfuse(model)
    assert not again.chains and all("forward" not in module.__dict__ for module in model.modules())


def changed(**attributes):
    def change(model):
        for name, value in attributes.items():
            owner, _, own = name.rpartition("__")
            setattr(getattr(model, owner) if owner else model, own, value)

    return change


GROUPS_OF_ONE = changed(groupnorm__num_groups=OUT)


#: forward, change, number of samples: PyTorch raises, or takes what the fused chain refuses
AS_WRITTEN = {
    **{f"one value, {chain}": (forward, GROUPS_OF_ONE, 1) for chain, forward in BENCHMARKS.items()},
    "one value, torch.group_norm": (lambda self, x: F.hardtanh(torch.group_norm(self.gemm(x), 8)), changed(), 1),
    "eps that is a fraction": (in_full, changed(groupnorm__eps=Fraction(1, 2)), ROWS),
    "a bound that is a fraction": (in_full, changed(hardtanh__max_val=Fraction(1, 2)), ROWS),
    "negative eps": (in_full, changed(groupnorm__eps=-1.0), ROWS),
    "groups that do not divide": (in_full, changed(groupnorm__num_groups=3), ROWS),
    "no groups": (in_full, changed(groupnorm__num_groups=0), ROWS),
    "bounds upside down": (in_full, changed(hardtanh__min_val=5.0), ROWS),
    "a bound that is None": (in_full, changed(hardtanh__max_val=None), ROWS),
    "no samples": (in_full, changed(), 0),
    "stride 0": (BenchmarkL19, changed(conv_transpose__stride=(0, 0)), 2),
    "unknown GELU": (SPELLINGS[L19]["modules"], changed(gelu__approximate="none of these"), 2),
    "weight of another width": (in_full, changed(gemm__weight=nn.Parameter(torch.ones(OUT, IN + 1).float())), ROWS),
}


@pytest.mark.parametrize("forward, change, rows", AS_WRITTEN.values(), ids=AS_WRITTEN)
def test_where_a_fused_chain_would_differ(forward, change, rows):
    """The chain runs as it was written, with the same result or error."""
    model = made(forward)
    is_convolution = forward in (BenchmarkL19, SPELLINGS[L19]["modules"])
    input = input_of(L19)[:rows, :, :1, :1] if is_convolution else input_of(L30)[:rows]
    fuse(model)
    change(model)
    results = []
    for run_once in (model, lambda input: type(model).forward(model, input)):
        try:
            results.append(run_once(input))
        except Exception as error:
            results.append((type(error), str(error)))
    if isinstance(results[0], tuple):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bound_that_the_dtype_cannot_hold(dtype):
    """PyTorch raises its own error for float32, and takes it for float64."""
    model = made(lambda self, x: self.groupnorm(self.gemm(x)).clamp(-1, 1e40), dtype=dtype)
    plain = copy.deepcopy(model)
    fuse(model)
    if dtype == torch.float64:
        torch.testing.assert_close(model(input_of(L30, dtype)), plain(input_of(L30, dtype)))
        return
    with pytest.raises(RuntimeError) as expected:
        plain(input_of(L30, dtype))
    with pytest.raises(RuntimeError) as raised:
        model(input_of(L30, dtype))
    assert str(raised.value) == str(expected.value)


def test_numbers_of_numpy():
    """As attributes of the layers, and of the model itself."""

    def forward(self, x):
        return F.hardtanh(F.group_norm(self.gemm(x), self.count, eps=self.least), self.low, self.high)

    numbers = {"count": np.int64(GROUPS), "least": np.float32(0.5), "low": np.float64(-0.5), "high": np.float32(0.25)}
    of_layers = {"groupnorm__num_groups": "count", "groupnorm__eps": "least", "hardtanh__max_val": "high"}
    for written, change in (
        (forward, changed(**numbers)),
        (in_full, changed(**{name: numbers[number] for name, number in of_layers.items()})),
    ):
        model = made(written)
        change(model)
        plain = copy.deepcopy(model)
        fuse(model)
        assert_same(model, plain, input_of(L30))


def test_hook_that_is_removed_again():
    model = made(BenchmarkL30)
    fuse(model)
    handle = model.gemm.register_forward_pre_hook(lambda module, arguments: None)
    model(input_of(L30))
    handle.remove()
    model(input_of(L30))


def test_global_hooks():
    """As profilers set them for all modules."""
    model, seen = made(BenchmarkL30), []
    fuse(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, arguments, output: seen.append(module))
    try:
        model(input_of(L30))
    finally:
        handle.remove()
    assert seen == [model.gemm, model.groupnorm, model.hardtanh, model]


def test_sequential_that_changes():
    def sequence():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(IN, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(), nn.Tanh()).float()

    changes = {
        "append": lambda model: model.append(nn.Tanh()),
        "reorder": lambda model: model._modules.update({"2": model._modules.pop("2")}),
        "replace": lambda model: model.__setitem__(2, nn.Tanh()),
        "delete": lambda model: model.__delitem__(2),
        "hook": lambda model: model[1].register_forward_hook(double),
    }
    for name, change in changes.items():
        model, plain = sequence(), sequence()
        fuse(model)
        change(model)
        change(plain)
        torch.testing.assert_close(model(input_of(L30)), plain(input_of(L30)), msg=name)


@pytest.mark.parametrize("chain", [L94, L75, L30])
def test_settings_are_read_at_each_call(chain):
    model = made(BENCHMARKS[chain])
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        each.groupnorm.eps = 0.5
        each.hardtanh.min_val, each.hardtanh.max_val = -0.1, 0.2
    assert_same(model, plain, input_of(chain))


def scaled(self, x):
    return F.hardtanh(F.group_norm(self.gemm(x * self.scale), self.groups, eps=self.eps))


@pytest.mark.parametrize("change", [lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m, "eps", 0.5)])
def test_numbers_that_the_forward_reads(change):
    """They are read at each call."""
    model = made(scaled)
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L30))
    change(model)
    change(plain)
    assert_same(model, plain, input_of(L30))


def dropping(self, x):
    return self.hardtanh(self.groupnorm(self.gemm(F.dropout(x, 0.5, self.training))))


def test_training_mode():
    """A forward that asks for its mode is fused in both."""
    model = made(dropping)
    plain = copy.deepcopy(model)
    fuse(model)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        results = []
        for each in (model, plain):
            torch.manual_seed(8)
            results.append(each(input_of(L30)))
        torch.testing.assert_close(*results)
