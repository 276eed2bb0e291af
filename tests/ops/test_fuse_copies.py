"""Promise: copies and pickles of a fused model are fused models of their own, and hold nothing that the model lost."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from ops.fuse import fuse, unfuse
from tests.ops.fused_models import (
    BENCHMARKS,
    IN,
    L30,
    OUT,
    BenchmarkL30,
    Parts,
    by_benchmark,
    in_full,
    input_of,
    made,
)


@by_benchmark
def test_copies(chain):
    """Each has parameters of its own, and is fused."""
    model = made(BENCHMARKS[chain])
    fuse(model)
    expected = model(input_of(chain))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for each in copies:
        assert torch.equal(each(input_of(chain)), expected)
        unfuse(each)
        torch.testing.assert_close(each(input_of(chain)), expected)


def test_code_that_changed_since_it_was_pickled(monkeypatch):
    """The loaded model's forward is that of its class as it is now."""
    monkeypatch.setattr(BenchmarkL30, "forward", BenchmarkL30.forward)
    model = made(BenchmarkL30)
    fuse(model)
    pickled = pickle.dumps(model)
    BenchmarkL30.forward = lambda self, x: self.skip(x)
    loaded = pickle.loads(pickled)
    torch.testing.assert_close(loaded(input_of(L30)), loaded.skip(input_of(L30)))


def test_shallow_copy():
    """Shares its attributes, the forward of the original among them, until it is fused itself."""
    model = made(BenchmarkL30)
    fuse(model)
    shallow = copy.copy(model)
    shallow._modules = dict(shallow._modules, gemm=made(Parts).skip)
    fuse(shallow)
    torch.testing.assert_close(shallow(input_of(L30)), BenchmarkL30.forward(shallow, input_of(L30)))
    torch.testing.assert_close(model(input_of(L30)), BenchmarkL30.forward(model, input_of(L30)))


REPLACED = {
    "of the chain": ("gemm", lambda: nn.Linear(IN, OUT)),
    "of the chain, by another class": ("hardtanh", nn.Tanh),
    "beside it": ("skip", lambda: nn.Linear(IN, OUT)),
    "by none": ("skip", lambda: None),
}


@pytest.mark.parametrize("name, replacement", REPLACED.values(), ids=REPLACED)
def test_replaced_children_are_gone(name, replacement):
    """From memory and from pickles; the model is what its forward makes of it now."""

    def forward(self, x):
        return self.hardtanh(self.groupnorm(self.gemm(x)))

    class Model(Parts):
        pass

    Model.forward = forward
    model = made(Model)
    fuse(model)
    model(input_of(L30))
    model.large = nn.Linear(100, 100)
    old = weakref.ref(getattr(model, name))
    setattr(model, name, replacement())
    model.float()
    gc.collect()
    assert old() is None
    torch.testing.assert_close(model(input_of(L30)), forward(model, input_of(L30)))


def size_of_pickle(model):
    return len(pickle.dumps(model))


def test_pickles_of_replaced_children():
    """They are as large as if the model had been fused afterwards, and load as what was saved."""
    model = made(BenchmarkL30)
    model.skip = nn.Linear(IN, 2000).float()
    model.gemm = nn.Linear(IN, OUT).float()
    fuse(model)
    model.skip = nn.Linear(IN, 1).float()
    unfused = copy.deepcopy(model)
    unfuse(unfused)
    assert size_of_pickle(model) < size_of_pickle(unfused) + 20_000
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(input_of(L30)), unfused(input_of(L30)))


@pytest.mark.parametrize("replacement", [nn.Tanh, lambda: nn.Hardtanh(-0.1, 0.1)], ids=["Tanh", "Hardtanh"])
def test_children_replaced_before_pickling(replacement):
    model = made(BenchmarkL30)
    fuse(model)
    model.hardtanh = replacement()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(each(input_of(L30)), in_full(model, input_of(L30)))
