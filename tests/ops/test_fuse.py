"""Promise: ``fuse`` finds the chains of a model in its first call, in whatever Python its forwards are written, and the
model gives what it gave; ``unfuse`` undoes it."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import rewriting
from ops.fuse import fuse, unfuse
from tests.ops.fused_models import (
    BENCHMARKS,
    GROUPS,
    IN,
    L30,
    OUT,
    SPELLED,
    BenchmarkL30,
    BenchmarkL94,
    Parts,
    assert_same,
    by_benchmark,
    input_of,
    made,
    used_elsewhere,
)

NORMED = "linear -> add -> group_norm -> mul -> add"
CHAINS = {
    "linear_hardtanh_mish_group_norm": "linear -> add -> add -> hardtanh -> mish -> group_norm -> mul -> add",
    "linear_group_norm_min": "linear -> add -> group_norm -> mul -> add -> row_minimum",
    "linear_group_norm_hardtanh": f"{NORMED} -> hardtanh",
    "conv_transpose2d_gelu_group_norm": "conv_transpose2d -> add -> gelu -> group_norm -> mul -> add",
}


@by_benchmark
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_benchmark_models(chain, dtype):
    model = made(BENCHMARKS[chain], dtype=dtype)
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert str(report) == "chains are found in the model's first call" and report.chains == ()
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    assert_same(model, plain, input_of(chain, dtype), atol=tolerance, rtol=tolerance)
    assert [(each.module, each.chain) for each in report.chains] == [("", CHAINS[chain])]
    assert str(report) == f"1 chain\n  the model: {CHAINS[chain]}"


@pytest.mark.parametrize("chain, forward", SPELLED)
def test_spellings(chain, forward):
    model = made(forward)
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert_same(model, plain, input_of(chain))
    assert report.chains


def test_tensors_of_two_names():
    """The forward has the one that it names; when that is given another tensor, it has that."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(F.linear(x, self.weight, self.tied))))
    model.tied = model.bias
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L30))
    model.tied = plain.tied = nn.Parameter(torch.randn(OUT))
    assert_same(model, plain, input_of(L30))


def test_modules_of_two_names():
    """The forward calls the second name; when that is given another module, the forward has it."""
    model = made(lambda self, x: self.hardtanh(self.groupnorm(self.again(x))))
    model.again = model.gemm
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(L30))
    model.again = plain.again = made(Parts).skip
    assert_same(model, plain, input_of(L30))


@pytest.mark.parametrize(
    "model", [None, "model", ops.linear, torch.zeros(2), nn.Linear], ids=lambda model: type(model).__name__
)
@pytest.mark.parametrize("function", [fuse, unfuse])
def test_no_module(function, model):
    with pytest.raises(TypeError, match=f"^model must be a torch.nn.Module, got {type(model).__name__}$"):
        function(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ModuleList(), ops.LinearGroupNormHardtanh(4, 4, 2, -1.0, 1.0)])
def test_nothing_to_look_at(model):
    """PyTorch's own layers and this project's have nothing to fuse."""
    assert fuse(model).chains == ()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript():
    scripted = torch.jit.trace(made(BenchmarkL30), input_of(L30))
    expected = scripted(input_of(L30))
    assert fuse(scripted).chains == ()
    torch.testing.assert_close(scripted(input_of(L30)), expected)


class Top(nn.Module):
    """As large models are: blocks in lists, a Sequential, a branch that depends on values, and another way in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([made(BenchmarkL30), made(used_elsewhere), made(BenchmarkL94)])
        self.sequence = nn.Sequential(
            nn.Linear(OUT, OUT),
            nn.GroupNorm(GROUPS, OUT),
            nn.Dropout(0.5),
            nn.Hardtanh(),
            nn.Sequential(nn.Linear(OUT, OUT), nn.GroupNorm(GROUPS, OUT), nn.Hardtanh(-2, 2)),
        )
        self.decoder = nn.Sequential(nn.Linear(OUT, OUT), nn.LayerNorm(OUT), nn.GELU())
        self.last = nn.Linear(OUT, 2)

    def forward(self, x):
        results = []
        for block in self.blocks:
            if block is not None:
                results.append(self.sequence(block(x)))
        if results[0].sum() > 1e9:
            print("large")
        return self.last(sum(results).softmax(1))

    def decode(self, y):
        return self.decoder(y).softmax(1)


def test_large_model():
    """The smallest modules are fused, in evaluation and in training; the others are as they were."""
    model = Top().eval()
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert_same(model, plain, input_of(L30))
    within = [each.module for each in report.chains]
    assert within == ["blocks.0", "blocks.1", "blocks.2", "sequence", "sequence"]
    assert {each.chain for each in report.chains if each.module == "sequence"} == {f"{NORMED} -> hardtanh"}
    changed = {path for path, each in model.named_modules() if "forward" in each.__dict__}
    assert changed == {"", "blocks.0", "blocks.1", "blocks.2", "sequence", "sequence.4", "decoder"}
    model.train(), plain.train()
    for _ in range(2):
        torch.manual_seed(9)
        mine = model(input_of(L30))
        torch.manual_seed(9)
        torch.testing.assert_close(mine, plain(input_of(L30)), atol=1e-4, rtol=1e-4)
    assert NORMED in [each.chain for each in report.chains if each.module == "sequence"]
    torch.testing.assert_close(model.decode(mine.new_ones(3, OUT)), plain.decode(mine.new_ones(3, OUT)))
    torch.testing.assert_close(model.sequence[4](mine.new_ones(3, OUT)), plain.sequence[4](mine.new_ones(3, OUT)))
    assert {"decoder", "sequence.4"} <= {each.module for each in report.chains}
    unfuse(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert report.chains == ()


def test_chain_after_chain():
    def repeated(self, x):
        x = self.hardtanh(self.groupnorm(self.gemm(x)))
        return self.hardtanh(self.groupnorm(F.linear(x, self.square, self.bias))), x

    model = made(repeated)
    model.square = nn.Parameter(torch.randn(OUT, OUT))
    expected = model(input_of(L30))
    report = fuse(model)
    for _ in range(2):
        torch.testing.assert_close(model(input_of(L30)), expected)
    assert len(report.chains) == 2


@by_benchmark
def test_result_written_to(chain):
    """In place, by what comes next."""
    model = nn.Sequential(made(BENCHMARKS[chain]), nn.ReLU(inplace=True))
    plain = copy.deepcopy(model)
    fuse(model)
    assert_same(model, plain, input_of(chain))


def test_any_number_of_batches_and_instances():
    """Instances of one class with other sizes, more than Dynamo captures of one code."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Softmax(1)) for _ in range(12))
    )
    plain = copy.deepcopy(model)
    report = fuse(model)
    for rows in (5, 3, 1, 7, 64, 2):
        torch.testing.assert_close(model(torch.ones(rows, 6)), plain(torch.ones(rows, 6)), atol=1e-5, rtol=1e-4)
    assert {each.module for each in report.chains} == {str(place) for place in range(12)}


def test_sizes_of_one_module_are_not_another_ones(monkeypatch):
    """Dynamo makes a symbol of a size that changed, in all code of one name. Each module's has its own."""
    sizes, rewrite = [], rewriting.rewrite

    def seen(graph):
        sizes.extend(node.meta["example_value"].shape[0] for node in graph.graph.nodes if node.op == "placeholder")
        return rewrite(graph)

    monkeypatch.setattr(rewriting, "rewrite", seen)
    for rows in (3, 4, 5):
        model = made(BenchmarkL30)
        fuse(model)
        for _ in range(2):
            model(torch.ones(rows, IN))
    assert {3, 4, 5} < set(sizes) and all(type(each) is int for each in sizes)


def test_a_fused_model_is_freed():
    """Dynamo keeps its backends for good."""
    model = made(BenchmarkL30)
    fuse(model)
    for _ in range(3):
        model(input_of(L30))
    left = [weakref.ref(model), weakref.ref(model.gemm.weight)]
    del model
    gc.collect()
    assert [each() for each in left] == [None, None]
