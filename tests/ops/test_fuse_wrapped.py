"""Promise: a fused module's forward is a bound method as any other, and what tools put around it or leave behind hides
no module: the report says what runs, and ``unfuse`` undoes it."""

import copy
import functools
import inspect
import pickle
import types
import typing

import pytest
import torch
from torch import nn

from ops import fusion
from ops.fuse import FusionReport, fuse, unfuse

WIDTH = 8
CHAIN = "linear -> add -> group_norm -> mul -> add -> gelu"


class Block(nn.Module):
    """A chain."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()

    def forward(self, input: "Rows", scale: float = 1.0, *more: int, shift: "float | None" = None) -> "Rows":
        """What it does."""
        return self.act(self.norm(self.linear(input))).softmax(-1) * scale + (shift or 0)


Rows = torch.Tensor


class Holder(nn.Module):
    """A chain beside a module that has one."""

    def __init__(self):
        super().__init__()
        self.block, self.linear = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, input):
        return torch.relu(self.linear(self.block(input)))


class Decorated(Block):
    @torch.no_grad()
    def forward(self, input: "Rows") -> "Rows":
        return super().forward(input)


def made(kind=Block):
    torch.manual_seed(1)
    return kind()


def rows(count=5):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", [Block, Decorated, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())])
def test_a_bound_method(kind):
    model, plain = made(kind), made(kind)
    fuse(model)
    mine, theirs = model.forward, plain.forward
    assert type(mine) is types.MethodType and mine.__self__ is model and inspect.ismethod(mine)
    assert inspect.isfunction(mine.__func__) and mine.__func__(model, rows()).shape == (5, WIDTH)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert inspect.signature(mine) == inspect.signature(theirs)
    assert typing.get_type_hints(mine) == typing.get_type_hints(theirs)
    if kind is not Decorated:  # which takes anything, where nobody looks behind it
        assert inspect.getfullargspec(mine) == inspect.getfullargspec(theirs)


def autocasting(function):
    @functools.wraps(function)
    def wrapper(*arguments, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*arguments, **options)

    return wrapper


def prepare(model):
    """As accelerate does it in mixed precision."""
    model._original_forward = model.forward
    model.forward = types.MethodType(autocasting(autocasting(model.forward.__func__)), model)


def unwrap(model):
    forward, original = model.forward, model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_preparing_and_unwrapping(calls):
    model = made()
    plain = copy.deepcopy(model)
    report = fuse(model)
    for each in (model, plain):
        prepare(each)
    for _ in range(calls):
        torch.testing.assert_close(model(rows(), shift=1.0), plain(rows(), shift=1.0), atol=0.05, rtol=0.05)
    for each in (model, plain):
        unwrap(each)
    for _ in range(2):
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
    assert [each.chain for each in report.chains] == [CHAIN]
    unfuse(model)
    assert report.chains == () and fusion.of(model) is None
    torch.testing.assert_close(model(rows()), plain(rows()))


def add_hook(module):
    """As accelerate and diffusers wrap a forward."""
    module._old_forward = module.forward

    def new_forward(module, *arguments, **options):
        return module._old_forward(*arguments, **options)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def remove_hook(module):
    module.forward = module.__dict__.pop("_old_forward")


def parts(model):
    return [each for each in model.modules() if isinstance(each, Block)]


@pytest.mark.parametrize("kind", [Block, lambda: nn.Sequential(Block(), nn.Softmax(-1), Block())], ids=["one", "two"])
@pytest.mark.parametrize("until", [0, 1, 2, 3])
@pytest.mark.parametrize("since", [-1, 0, 1, 2])
def test_wrappers(since, until, kind):
    """Set before a call (-1: before ``fuse``), and removed before a later one."""
    if until <= since:
        return
    model = made(kind)
    plain = copy.deepcopy(model)
    paths = [path for path, each in model.named_modules() if isinstance(each, Block)]
    if since < 0:
        for each in parts(model):
            add_hook(each)
        if until == 0:
            for each in parts(model):
                remove_hook(each)
    report = fuse(model)
    for call in range(5):
        for each in parts(model):
            if call == since:
                add_hook(each)
            if call == until and "_old_forward" in vars(each):
                remove_hook(each)
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
        if since >= 0 or until == 0:
            assert [(each.module, each.chain) for each in report.chains] == [(path, CHAIN) for path in paths]
    if since < 0 < until:  # what is around them holds the chains
        assert {each.module for each in report.chains} <= {""} and len(report.chains) == len(paths) * (paths != [""])
        return
    if since >= 0:
        assert {each.fused for each in report.calls} == {5}
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)] if until < 5 and since < 0 else []
    for each in copies:
        for _ in range(2):
            torch.testing.assert_close(each(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
        assert [chain.module for chain in FusionReport(each).chains] == paths


def test_a_wrapper_that_stays():
    """``unfuse`` leaves it, and what it calls is the class's forward; ``fuse`` sees through it."""
    model = made()
    plain = copy.deepcopy(model)
    report = fuse(model)
    add_hook(model)
    wrapper = model.forward
    for _ in range(2):
        model(rows())
    assert len(report.chains) == 1 and report.calls[0].fused == 2
    again = fuse(model)
    model(rows())
    assert len(again.chains) == 1 and again.calls[0].fused == 1
    unfuse(model)
    assert model.forward is wrapper and report.chains == () and fusion.of(model) is None
    torch.testing.assert_close(model(rows()), plain(rows()))
    remove_hook(model)
    torch.testing.assert_close(model(rows()), plain(rows()))
    assert len(fuse(model).chains) == 0
    model(rows())
    assert [each.chain for each in report.chains] == [CHAIN]


def set_and_deleted(module):
    module.forward = lambda input: input
    del module.forward


def set_to_the_classs(module):
    module.forward = type(module).forward.__get__(module)


def set_to_another(module):
    module.forward = lambda input: input


def set_past_ours(module):
    module.forward = lambda input: Block.forward(module, input)


PAST_OURS = [set_and_deleted, set_to_the_classs, set_to_another, set_past_ours]


@pytest.mark.parametrize("kind", [Block, lambda: nn.Sequential(Block(), nn.Softmax(-1), Block())], ids=["one", "two"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("change", PAST_OURS)
def test_calls_that_do_not_get_there(change, calls, kind):
    """The report lists none of their chains, says why, and lists them again when they run."""
    model = made(kind)
    report = fuse(model)
    for _ in range(calls):
        model(rows())
    path, block = next((path, each) for path, each in model.named_modules() if isinstance(each, Block))
    forward, others = block.forward, report.chains[1:]
    change(block)
    fused = report.calls[0].fused
    for _ in range(3):
        assert report.chains == others
        assert f"{path or 'the model'}: nothing of it ran fused since its forward was set or removed" in str(report)
        model(rows())
    assert report.calls[0].fused == fused
    block.forward = forward
    model(rows())
    assert len(report.chains) == 1 + len(others) and report.calls[0].fused == fused + 1
    assert "since" not in str(report)
    if change is set_past_ours:
        return
    change(block)
    again = fuse(model)  # which sees what was taken away
    for _ in range(2):
        model(rows())
    assert len(again.chains) == len(others) + (change in PAST_OURS[:2])


@pytest.mark.parametrize("change", PAST_OURS)
def test_first_calls_that_do_not_get_there(change):
    """The report does not promise what they would find."""
    model = made()
    report = fuse(model)
    change(model)
    for _ in range(3):
        assert str(report).endswith("\n  the model: nothing of it ran fused since its forward was set or removed")
        model(rows())
    assert report.chains == ()


def test_a_wrapper_that_is_gone_before_the_first_call():
    """Nothing was put below it, and the report says why nothing runs fused."""
    model = made(lambda: nn.ModuleList([Block(), Block()]))
    add_hook(model[0])
    report = fuse(model)
    remove_hook(model[0])
    for _ in range(2):
        for each in model:
            each(rows())
    assert [each.module for each in report.chains] == ["1"]
    assert str(report).endswith("\n  0: not looked at, as its forward was set on it")
    again = fuse(model)
    model[0](rows())
    assert [each.module for each in again.chains] == ["0"] and "not looked" not in str(report)


@pytest.mark.parametrize("calls", [-1, 0, 1, 2])
def test_wrappers_within_what_is_captured(calls):
    """Such a module's calls are part of the whole's: nothing is missed. (-1: set before ``fuse``.)"""
    model = made(Holder)
    plain = copy.deepcopy(model)
    if calls < 0:
        add_hook(model.block)
    report = fuse(model)
    for call in range(4):
        if call == calls:
            add_hook(model.block)
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
        assert len(report.chains) == 2 and "forward" not in str(report)


@pytest.mark.parametrize("calls", [-1, 0, 1])
def test_a_wrapper_of_the_classs_forward(calls):
    """Calls do not get to what ``fuse`` set below it: what is around them holds the chains, once it is known."""
    model = made(lambda: nn.Sequential(Block(), nn.Softmax(-1)))
    plain = copy.deepcopy(model)
    report = None if calls < 0 else fuse(model)
    for call in range(4):
        if call == max(calls, 0):
            model[0].forward = lambda *given: Block.forward(model[0], *given)
            report = report or fuse(model)
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
        if calls == 1 <= call:  # what it had held is lost
            assert report.chains == () and "0: nothing of it ran fused since its forward was set" in str(report)
        else:
            assert [each.module for each in report.chains] == ["0" if call < calls else ""]


def test_compiled_blocks_share_their_code():
    """As PyTorch's do where a model's repeated blocks are compiled, one by one."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    blocks = made(lambda: nn.ModuleList([Block() for _ in range(4)]))
    fuse(blocks)
    for each in blocks:
        each.compile(backend=backend)
        each(rows())
    assert len(graphs) == 1


def test_a_forward_of_the_users_own_is_told_of():
    """It is not looked at, and the report promises nothing."""
    model = made(lambda: nn.Sequential(Block(), nn.Softmax(-1)))
    model[0].forward = lambda input: input
    assert str(fuse(model)) == "chains are found in the model's first call"
    report = fuse(model[0])
    assert str(report) == "0 chains\n  the model: not looked at, as its forward was set on it"
    whole = fuse(model)
    model(rows())
    assert str(whole) == "0 chains\n  0: not looked at, as its forward was set on it"


@pytest.mark.parametrize("load", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
@pytest.mark.parametrize("everything", [False, True])
def test_copies_are_fused(load, everything):
    model = made(lambda: nn.Sequential(Block(), nn.Softmax(-1)))
    fuse(model, everything=everything)
    for calls in range(3):
        loaded = load(model)
        report = FusionReport(loaded)
        for _ in range(2):
            torch.testing.assert_close(loaded(rows()), model(rows()))
            assert [each.module for each in report.chains] == ["0"], calls
        assert loaded[0].forward.__self__ is loaded[0]
        unfuse(loaded)
        assert all("forward" not in vars(each) and fusion.of(each) is None for each in loaded.modules())


def test_one_attribute_says_what_is_fused():
    """And nothing else is left of ``fuse``."""
    model = made(lambda: nn.Sequential(Block(), nn.Softmax(-1), nn.Sequential(Block())))
    before = [set(vars(each)) for each in model.modules()]
    fuse(model)
    added = [sorted(set(vars(each)) - names) for each, names in zip(model.modules(), before, strict=True)]
    assert {tuple(each) for each in added} == {(), ("_normfuse_fusion", "forward")}
    for _ in range(2):
        model(rows())
    unfuse(model)
    assert [set(vars(each)) for each in model.modules()] == before
