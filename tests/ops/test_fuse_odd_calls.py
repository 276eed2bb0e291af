"""Promise: a call that cannot be captured runs as it was written, that call alone, and the report counts both kinds;
``report.chains`` is what ran."""

import copy
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ops import capture
from ops.explain import explain
from ops.fuse import ModuleCalls, fuse

WIDTH = 8
CHAIN = "linear -> add -> group_norm -> mul -> add -> gelu"


class Block(nn.Module):
    """A chain, and what makes a call odd."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()
        self.is_verbose, self.factor = False, 1.0

    def forward(self, x, output_norms=False):
        y = self.norm(self.linear(x))
        if self.is_verbose or output_norms:
            print("shape", y.shape)
        return self.act(y).softmax(-1) * self.factor


def made(kind=Block):
    torch.manual_seed(1)
    return kind()


def rows(count=5):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


class Observing(TorchDispatchMode):
    """A mode of a user's own."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Kind(torch.Tensor):
    """A class of tensors of a user's own."""


def in_mode(mode):
    def call(model):
        with mode():
            return model(rows())

    return call


def verbose(model):
    model.is_verbose = True
    result = model(rows())
    model.is_verbose = False
    return result


def without_compiler(model):
    with torch.compiler.set_stance("force_eager"):
        return model(rows())


def without_dynamo(model):
    with torch._dynamo.config.patch(disable=True):
        return model(rows())


def with_global_hook(model):
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, result: None)
    try:
        return model(rows())
    finally:
        handle.remove()


def dual(model):
    with torch.autograd.forward_ad.dual_level():
        given = torch.autograd.forward_ad.make_dual(rows(), torch.ones(5, WIDTH))
        return torch.autograd.forward_ad.unpack_dual(model(given)).tangent


ODD = {
    "vmap": lambda model: torch.func.vmap(model)(rows()[:, None]),
    "grad": lambda model: torch.func.grad(lambda x: model(x)[:, 0].sum())(rows()),
    "jvp": lambda model: torch.func.jvp(model, (rows(),), (torch.ones(5, WIDTH),)),
    "jacrev": lambda model: torch.func.jacrev(model)(rows(1)),
    "dual numbers": dual,
    "an option that prints": lambda model: model(rows(), output_norms=True),
    "an attribute that prints": verbose,
    "a mode": in_mode(Observing),
    "a counter of operations": in_mode(lambda: FlopCounterMode(display=False)),
    "make_fx": lambda model: make_fx(model)(rows())(rows()),
    "make_fx of fake tensors": lambda model: make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        rows()
    )(rows()),
    "make_fx before the dispatcher": lambda model: make_fx(model, pre_dispatch=True)(rows())(rows()),
    "a stance": without_compiler,
    "no Dynamo": without_dynamo,
    "a global hook": with_global_hook,
    "a class of tensors": lambda model: model(rows().as_subclass(Kind)),
    "an error": lambda model: pytest.raises(RuntimeError, model, rows()[:, :3]) and torch.zeros(1),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("when", ["first", "before the fused call", "after it"])
@pytest.mark.parametrize("name", ODD)
def test_one_odd_call(name, when, capsys):
    """It gives what the plain model gives, and the others run fused as if there had been none."""
    model, odd = made(), ODD[name]
    plain = copy.deepcopy(model)
    report = fuse(model)
    for _ in range(["first", "before the fused call", "after it"].index(when)):
        model(rows())
    result = odd(model)
    text = capsys.readouterr().out
    torch.testing.assert_close(result, odd(plain), atol=1e-4, rtol=1e-4)
    assert text == capsys.readouterr().out  # it was made once
    for count in (5, 5, 3):
        torch.testing.assert_close(model(rows(count)), plain(rows(count)), atol=1e-4, rtol=1e-4)
        assert [each.chain for each in report.chains] == [CHAIN]
    (calls,) = report.calls
    fused = 3 + (when == "before the fused call") + 2 * (when == "after it")
    assert (calls.module, calls.fused + sum(calls.as_written.values())) == ("", fused + 1)
    if name == "no Dynamo" and when == "after it":
        return  # what is captured runs all the same
    assert sum(calls.as_written.values()) == 1
    (reason,) = calls.as_written
    assert str(report).splitlines()[-1] == f"  the model: {calls.fused} calls fused, 1 as written: {reason}"


def test_many_odd_calls(capsys):
    """They do not end what is fused: neither other kinds of calls, nor other shapes, nor the same kind later."""
    model = made()
    report = fuse(model)
    for _ in range(3):
        model(rows())
    for _ in range(20):
        model(rows(), output_norms=True)
    for count in (5, 4, 3, 2):
        model(rows(count))
        assert len(report.chains) == 1, count
    for _ in range(5):
        verbose(model)
    for count in (5, 4, 3, 2):
        model(rows(count))
        assert len(report.chains) == 1, count
    (calls,) = report.calls
    assert calls.fused == 11 and sum(calls.as_written.values()) == 25
    assert capsys.readouterr().out.count("shape") == 25


def test_how_often_a_call_is_tried(monkeypatch):
    """What is never captured costs ever less; as soon as it can be, it is after as many calls again at the most."""
    model = made()
    model.is_verbose = True
    report = fuse(model)
    calls, tries, compiled = [], [], torch.compile
    monkeypatch.setattr(capture, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))  # tries take no time
    monkeypatch.setattr(
        torch, "compile", lambda *given, **options: tries.append(len(calls)) or compiled(*given, **options)
    )
    for _ in range(40):
        calls.append(model(rows()))
    assert tries == [0, 1, 3, 7, 15, 31]
    assert report.chains == () and report.calls[0].fused == 0
    assert list(report.calls[0].as_written.values()) == [40]
    assert "print" in str(report)
    model.is_verbose = False
    for _ in range(25):
        model(rows())
    assert [each.chain for each in report.chains] == [CHAIN]


@pytest.fixture
def tries(monkeypatch):
    """When calls were tried, by a clock that each try lets go 0.45 s ahead, and a call of the result 1 s."""
    now, found, compiled = [0.0], [], torch.compile

    def attempt(*given, **options):
        found.append(int(now[0]))
        now[0] += 0.45
        return compiled(*given, **options)

    def call(model, count):
        for _ in range(count):
            model(rows())
            now[0] += 1.0

    monkeypatch.setattr(torch, "compile", attempt)
    monkeypatch.setattr(capture, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return found, call


def test_attempts_that_take_long(tries):
    """Beyond two seconds they are made when they take less than a hundredth of the time."""
    model = made()
    model.is_verbose = True
    report = fuse(model)
    found, call = tries
    call(model, 400)
    # Behind 0, 0, 1, 3 and 7 others, as those that take no time; then behind 15, 31, from 100 times what they took on.
    assert found[:6] == [0, 1, 3, 8, 16, 240]
    assert list(report.calls[0].as_written.values()) == [400]
    model.is_verbose = False
    call(model, 250)
    assert [each.chain for each in report.chains] == [CHAIN]


def test_attempts_of_several_modules(tries):
    """The two seconds are the model's, after each was tried twice; a copy has its own."""
    model = nn.Sequential(made(), made())
    for each in model:
        each.is_verbose = True
    fuse(model)
    found, call = tries
    call(model, 200)
    assert len(found) == 6 and found[-1] < 5  # of the model and of both blocks; all took 2.7 s
    twin = copy.deepcopy(model)
    call(twin, 2)
    assert len(found) == 12


def test_each_module_has_its_turn(tries):
    """Those ahead do not take all that may be tried: the last of three is captured before they were tried for ever."""
    model = nn.Sequential(made(), made(), made())
    for each in model:
        each.is_verbose = True
    report = fuse(model)
    found, call = tries
    call(model, 20)
    model[-1].is_verbose = False
    call(model, 600)
    assert [each.module for each in report.chains] == ["2"]
    assert len(found) < 20


def test_what_is_beyond_dynamos_limit():
    """Is not captured, so it runs as it was written, and the report does not say otherwise."""
    model = made()
    report = fuse(model)
    for place in range(12):
        model.act = type(f"Act{place}", (nn.GELU,), {"forward": lambda self, x: x + 1})()
        model(rows())
    assert report.chains == ()
    assert "limit" in str(report)
    assert sum(report.calls[0].as_written.values()) >= 2


@pytest.mark.parametrize("kind", [Block, lambda: nn.Sequential(Block(), nn.Softmax(-1))], ids=["own", "within"])
@pytest.mark.parametrize("when", range(4))
def test_a_hook_in_one_call(when, kind):
    """That call runs as it was written, where its graph is not made by then, and all others fused."""
    model = made(kind)
    plain = copy.deepcopy(model)
    report = fuse(model)
    for call in range(6):
        norms = [each for each in (*model.modules(), *plain.modules()) if isinstance(each, nn.LayerNorm)]
        handles = [each.register_forward_hook(lambda *given: given[-1] * 2) for each in norms if call == when]
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
        for handle in handles:
            handle.remove()
    assert [each.chain for each in report.chains] == [CHAIN]
    (calls,) = report.calls
    assert (calls.fused, sum(calls.as_written.values())) == ((6, 0) if when == 0 else (5, 1))


def test_hooks_that_stay():
    """They are in the graph where they were there in the call before; what is without them runs fused, too."""
    model = made()
    handle = model.norm.register_forward_hook(lambda module, given, result: result + 1)
    plain = copy.deepcopy(model)
    report = fuse(model)
    for _ in range(3):
        torch.testing.assert_close(model(rows()), plain(rows()), atol=1e-4, rtol=1e-4)
    more = model.norm.register_forward_hook(lambda module, given, result: None)
    for _ in range(3):
        model(rows())
    assert report.chains == () and report.calls[0].fused == 3
    more.remove()
    model(rows())
    assert len(report.chains) == 1 and report.calls[0].fused == 4
    handle.remove()
    model(rows())
    assert len(report.chains) == 1 and report.calls[0].fused == 5


def test_hooks_set_between_the_first_calls():
    model = made()
    report = fuse(model)
    model(rows())
    model.norm.register_forward_hook(lambda module, given, result: result + 1)
    assert report.chains == ()
    for _ in range(3):
        model(rows())
    assert len(report.chains) == 1
    (calls,) = report.calls
    assert calls.fused == 3 and sum(calls.as_written.values()) == 1


def test_hooks_set_later():
    """From then on the report says so, before the next call too."""
    model = made()
    report = fuse(model)
    model(rows()), model(rows())
    assert len(report.chains) == 1
    handle = model.norm.register_forward_hook(lambda module, given, result: result * 2)
    assert report.chains == ()
    model(rows())
    assert report.chains == () and report.calls[0].fused == 2
    handle.remove()
    model(rows())
    assert len(report.chains) == 1
    assert report.calls == (ModuleCalls("", 3, {"there are other hooks in it than in its first fused call": 1}),)


class Nested(nn.Module):
    """Chains of its own, in modules that have others, of which one is called twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.linear = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.linear(self.inner(self.inner(x))))


def test_all_chains_are_there_after_the_first_call():
    """Those of modules within a holder as well: later calls add none."""
    model = made(lambda: nn.Sequential(Nested(), nn.Softmax(-1), Block(), Nested()))
    report = fuse(model)
    model(rows())
    first = report.chains
    assert [each.module for each in first] == ["0", "0", "0", "2", "3", "3", "3"]
    for _ in range(2):
        model(rows())
        assert sorted(map(str, report.chains)) == sorted(map(str, first))
    assert [each.fused for each in report.calls] == [3, 3, 3]


SCRIPT = """
import torch, ops
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Softmax(1))
input = torch.ones(3, 8)
expected = model(input)
report = ops.fuse(model)
for _ in range(3):
    torch.testing.assert_close(model(input), expected)
print(report)
"""


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_without_the_compiler(variable):
    environment = {**os.environ, variable: "1"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0 chains\n  the model: 0 calls fused, 3 as written: ")


@torch._dynamo.allow_in_graph
class Marked(Block):
    """As diffusers marks its classes."""


@pytest.mark.parametrize("kind", [Marked, lambda: nn.Sequential(Marked(), Block()), lambda: nn.ModuleList([Marked()])])
def test_classes_that_are_marked_for_graphs(kind):
    """They, and what they are in, are fused as others."""
    model = made(kind)
    parts = model if isinstance(model, nn.ModuleList) else [model]
    plain = copy.deepcopy(model)
    report = fuse(model)
    for count in (5, 5, 4):
        for part, other in zip(parts, plain if isinstance(plain, nn.ModuleList) else [plain], strict=True):
            torch.testing.assert_close(part(rows(count)), other(rows(count)), atol=1e-4, rtol=1e-4)
    blocks = [path for path, each in model.named_modules() if isinstance(each, Block)]
    assert [each.module for each in report.chains] == blocks
    assert not any(each.as_written for each in report.calls)
    for part in parts:
        chains = [each.chain for each in explain(part, rows()).calls if each.direction == "forward"]
        assert len(chains) == len([each for each in part.modules() if isinstance(each, Block)])


@pytest.mark.parametrize("kind", [Block, Marked])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_classs_forward_that_is_replaced(kind, calls, monkeypatch):
    """Within a model that is captured, before its first call and before its first fused call; later ones see it where
    the call is the module's own."""
    model = nn.Sequential(made(kind), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    report = fuse(model)
    for _ in range(calls):
        model(rows())
    monkeypatch.setattr(kind, "forward", lambda self, x: x.sin())
    for _ in range(2):
        expected = torch.relu(model[1](rows().sin()))
        if calls < 2:
            torch.testing.assert_close(model(rows()), expected)
        torch.testing.assert_close(model[0](rows()), rows().sin())
    assert report.model is model


def test_quantised_weights():
    """They are swapped for others when a module is moved: no weak reference to one may be left."""
    model = made(lambda: nn.Sequential(Nested(), Block()))
    fuse(model)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for training in (True, False):
            model.train(training)
            for _ in range(3):
                with torch.no_grad():
                    model(rows())
            model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert model(rows()).dtype == torch.float32
