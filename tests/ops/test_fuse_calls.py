"""Promise: each call of a fused model does once what its plain forward does once, whatever becomes of it."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ops.fuse import fuse
from tests.ops.fused_models import assert_alike, outcome

WIDTH = 8


class Block(nn.Module):
    """A chain, and layers that draw numbers or keep statistics."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()
        self.dropout, self.batch_norm = nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)
        self.count = 0

    def chain(self, x):
        return self.act(self.norm(self.linear(x)))

    def forward(self, x):
        return self.chain(x).softmax(1)


def made(forward, seed=0):
    torch.manual_seed(seed)
    return type("Model", (Block,), {"forward": forward})()


def rows(count=5, width=WIDTH):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def assert_same_steps(model, *arguments):
    """Results, gradients, buffers and the random numbers afterwards, of three training steps."""
    fused = copy.deepcopy(model)
    report = fuse(fused)
    for _ in range(3):
        found = []
        for each in (model, fused):
            torch.manual_seed(5)
            each.zero_grad()
            result = outcome(each, *arguments)
            if isinstance(result, torch.Tensor):
                result.square().mean().backward()
            gradients = [parameter.grad for parameter in each.parameters()]
            buffers = [buffer.clone() for buffer in each.buffers()]
            found.append([result, gradients, buffers, torch.rand(3), getattr(each, "count", 0)])
        assert_alike(found[1], found[0])
    return report


CHECKPOINTED = {
    "dropout": lambda self, x: checkpoint(lambda z: self.dropout(self.chain(z)), x, use_reentrant=False).sin(),
    "dropout, reentrant": lambda self, x: checkpoint(lambda z: self.dropout(self.chain(z)), x * 1, use_reentrant=True),
    "no chain": lambda self, x: checkpoint(lambda z: self.dropout(self.linear(z)).sin(), x, use_reentrant=False),
    "statistics": lambda self, x: checkpoint(lambda z: self.batch_norm(self.chain(z)), x, use_reentrant=False),
}


@pytest.mark.parametrize("forward", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_checkpoints(forward):
    assert_same_steps(made(forward), rows().requires_grad_())


class Blocks(nn.Module):
    def __init__(self, count, forward=Block.forward):
        super().__init__()
        self.blocks = nn.ModuleList([made(forward, seed) for seed in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpointed_blocks():
    report = assert_same_steps(Blocks(6), rows())
    assert [each.module for each in report.chains] == [f"blocks.{place}" for place in range(6)]


def fails_behind_a_break(self, x, other):
    self.count += 1
    h = self.batch_norm(x)
    print("called")
    return self.chain(h) @ other


@pytest.mark.parametrize("other", [rows(WIDTH), rows(3, 5)], ids=["right", "wrong"])
def test_a_call_that_fails(other, capsys):
    """What it did before is done once."""
    model = made(fails_behind_a_break)
    fused = copy.deepcopy(model)
    fuse(fused)
    for _ in range(3):
        outcomes, printed = [], []
        for each in (model, fused):
            outcomes.append(outcome(each, rows(), other))
            printed.append(capsys.readouterr().out)
        assert_alike(outcomes[1], outcomes[0])
        assert printed == ["called\n"] * 2 and fused.count == model.count
        torch.testing.assert_close(fused.batch_norm.running_mean, model.batch_norm.running_mean)


def calls_the_compiler(self, x):
    self.count += 1
    return torch.compile(lambda y: print("breaks") or y, backend="eager", fullgraph=True)(self.chain(x))


def test_an_error_of_dynamos_that_is_the_models_own():
    model = made(calls_the_compiler)
    fuse(model)
    for called in (1, 2, 3):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model(rows())
        assert model.count == called


def of_many(self, several):
    return [self.chain(each) for each in several]


@pytest.mark.parametrize("last", [rows(), rows(3, 9)], ids=["right", "wrong"])
def test_iterators_as_arguments(last):
    model = made(of_many)
    fused = copy.deepcopy(model)
    fuse(fused)
    for _ in range(3):
        assert_alike(*(outcome(each, (each for each in [rows(), rows(2), last, rows()])) for each in (fused, model)))


def test_any_names_of_arguments():
    def forward(self, x, module=None, arguments=1.0):
        return self.chain(x) * module * arguments

    model = made(forward)
    fused = copy.deepcopy(model)
    fuse(fused)
    for _ in range(3):
        assert_alike(fused(rows(), module=2.0, arguments=3.0), model(rows(), module=2.0, arguments=3.0))


def test_a_forward_that_is_no_method():
    model = type("Static", (Block,), {"forward": staticmethod(lambda x: x.relu())})()
    fuse(model)
    assert torch.equal(model(rows()), rows().relu())


def test_a_module_within_itself():
    model = made(Block.forward)
    model.act.parent = model
    expected = model(rows())
    fuse(model)
    for _ in range(3):
        torch.testing.assert_close(model(rows()), expected, atol=1e-4, rtol=1e-4)


def breaks(self, x):
    y = self.batch_norm(x)
    if y.sum() > 1e9:
        return y
    return self.inner(y)


def test_breaks_in_many_models():
    """Of one class: each is looked at as the first was, and PyTorch's own compiler still captures the class."""
    for width in range(2, 14):
        model = made(breaks)
        model.batch_norm, model.inner = (
            nn.BatchNorm1d(width),
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)),
        )
        plain = copy.deepcopy(model)
        report = fuse(model)
        for _ in range(3):
            assert_alike(model(rows(width=width)), plain(rows(width=width)))
        assert [each.module for each in report.chains] == ["inner"], width
    compiled = torch.compile(made(Block.forward), backend="eager", fullgraph=True)
    assert compiled(rows()).shape == (5, WIDTH)


def test_more_captures_than_dynamo_makes():
    """What is beyond them runs as it was written."""
    model = made(Block.forward).eval()
    plain = copy.deepcopy(model)
    fuse(model)
    for places in range(12):
        model.places = plain.places = places
        type(model).forward = lambda self, x: self.chain(x).softmax(1) * self.places
        for _ in range(2):
            assert_alike(model(rows()), type(model).forward(plain, rows()))


def test_a_forward_that_is_wrapped_before_the_first_call():
    model = made(Block.forward)
    expected = model(rows())
    fuse(model)
    fused = model.forward
    model.forward = lambda *arguments: fused(*arguments)
    for _ in range(3):
        torch.testing.assert_close(model(rows()), expected, atol=1e-4, rtol=1e-4)


def test_a_first_call_without_the_compiler():
    """Nothing was looked at, so the next call is the first."""
    model = made(Block.forward)
    report = fuse(model)
    with torch.compiler.set_stance("force_eager"):
        model(rows())
    assert report.chains == ()
    for _ in range(2):
        model(rows())
    assert len(report.chains) == 1


def test_layers_of_pytorch_with_layers_in_them():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    plain = copy.deepcopy(layer)
    report = fuse(layer)
    input = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        torch.testing.assert_close(layer(input), plain(input), atol=1e-4, rtol=1e-4)
    assert len(report.chains) >= 2


def test_hooks_that_come_and_go():
    """Nothing is captured for them: while there are others than there were, the forward runs as it was written."""
    model = made(Block.forward)
    fuse(model)

    def objects(times):
        for _ in range(times):
            handle = model.norm.register_forward_hook(lambda module, given, result: result * 2)
            model(rows())
            handle.remove()
            model(rows())
        gc.collect()
        return len(gc.get_objects())

    objects(3)
    before = objects(3)
    assert objects(12) < before + 12 * 200
