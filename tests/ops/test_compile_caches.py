"""Promise: PyTorch's caches of compiled graphs give back what was compiled of the same code, and never of another."""

import functools

import pytest
import torch
import torch.nn.functional as F
import triton

import ops
from ops import fingerprint as fingerprints
from ops.calls import parse
from ops.fingerprint import check, fingerprint
from tests.ops.programs import run
from triton_kernels.activations import RELU
from triton_kernels.pointwise import Pointwise

OWN = """
import torch
import triton
import ops
from triton_kernels.pointwise import Pointwise

def slope():
    return 2.0

@triton.jit
def slanted(value, operand):
    return value * 2.0

@triton.jit
def slanted_gradient(gradient, value, operand):
    return gradient * 2.0

SLANTED = Pointwise("slanted", slanted, slanted_gradient, lambda value, _: value * slope())
CHAIN = ops.Chain("", norm="", after=(SLANTED,))
"""
PROGRAM = """
import sys
import torch
from torch._dynamo.utils import counters
import own

function = lambda input: own.CHAIN(input) + 1.0
value = torch.compile(function, backend=sys.argv[1])(torch.ones(4, 8, dtype=getattr(torch, sys.argv[2]))).unique()
print(value.item(), counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.parametrize(
    "backend, dtype, interpreted",
    [("inductor", "float32", False), ("normfuse", "float64", True)],
    ids=["inductor", "normfuse"],
)
def test_an_edited_function(backend, dtype, interpreted, tmp_path):
    """The second process finds the first one's graph, and the third, after an edit, does not."""
    go = functools.partial(run, tmp_path, PROGRAM, backend, dtype, interpreted=interpreted)
    own = tmp_path / "own.py"
    own.write_text(OWN)
    assert go() == ["3.0 0 0"]
    assert go() in (["3.0 1 0"], ["3.0 1 1"])
    own.write_text(OWN.replace("return 2.0", "return 5.0"))
    assert go() == ["6.0 0 0"]


def twice(value):
    return value * FACTOR


FACTOR = 2.0


@triton.jit
def scaled(value, operand):
    return value * 2.0


@triton.jit
def scaled_otherwise(value, operand):
    return value * 3.0


def with_default(value, _, factor=2.0):
    return value * factor


class Scale(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, value):
        return value * self.factor


def closure(factor):
    return lambda value, _: value * factor


def module(layer):
    return lambda value, _: layer(value)


def pointwise(plain=lambda value, _: twice(value), function=scaled, gradient=scaled, **options):
    return Pointwise("scaled", function, gradient, plain, **options)


def words(*arguments, **options):
    return fingerprint([pointwise(*arguments, **options)])


def test_of_built_in_functions():
    """The version, and whether the interpreter runs: once, and nothing else."""
    call = parse("linear -> add -> gelu -> group_norm(4, 1e-05) -> mul -> add -> div scalar -> hardtanh(-1.0, 1.0)")
    assert fingerprint(call.chain.steps) == f"normfuse {ops.__version__}, interpreted"


def test_without_the_interpreter(monkeypatch):
    monkeypatch.setattr(fingerprints, "INTERPRETED", False)
    assert fingerprint([]) == f"normfuse {ops.__version__}"


def test_of_a_users_function():
    first, second = pointwise(), pointwise()
    found = fingerprint([first, first, second])
    assert found.startswith(f"normfuse {ops.__version__}, interpreted, scaled ") and found.count("scaled") == 1


@pytest.mark.parametrize(
    "first, second",
    [
        (lambda: words(), lambda: words(lambda value, _: value * 2.0)),
        (lambda: words(), lambda: words(function=scaled_otherwise)),
        (lambda: words(), lambda: words(gradient=scaled_otherwise)),
        (lambda: words(), lambda: words(operand="numbers")),
        (lambda: words(), lambda: words(forms=((torch.float16, scaled_otherwise, scaled),))),
        (lambda: words(closure(2.0)), lambda: words(closure(3.0))),
        (lambda: words(module(Scale(2.0))), lambda: words(module(Scale(3.0)))),
        (lambda: words(module(torch.nn.LeakyReLU(0.1))), lambda: words(module(torch.nn.LeakyReLU(0.2)))),
        (
            lambda: words(functools.partial(with_default, factor=2.0)),
            lambda: words(functools.partial(with_default, factor=3.0)),
        ),
        (lambda: words(lambda value, _: F.silu(value)), lambda: words(lambda value, _: F.relu(value))),
        (lambda: words(lambda value, _: value + 1), lambda: words(lambda value, _: value - 1)),
        (lambda: words(lambda value, _: value + 1), lambda: words(lambda value, _: value + True)),
        (lambda: words(lambda value, _: (lambda: value + 1)()), lambda: words(lambda value, _: (lambda: value + 2)())),
    ],
)
def test_of_other_code(first, second):
    assert first() == first()
    assert first() != second()


@pytest.mark.parametrize("name, value", [("FACTOR", 3.0), ("twice", lambda value: value + value)])
def test_of_what_the_code_reaches(name, value, monkeypatch):
    """A constant and a function that it calls."""
    before = words()
    monkeypatch.setitem(globals(), name, value)
    fingerprints._hash.cache_clear()  # which knows a function's code for as long as the process lives
    assert words() != before


def test_of_what_cannot_be_told():
    """A tensor's values may be large, or none: such a function's graphs are not found again."""
    tensor = torch.ones(2)
    assert words(closure(tensor)) != words(closure(tensor))


def test_another_versions_text():
    text, chain = "linear -> add -> relu", ops.Chain("linear", norm="", after=(RELU,))
    assert parse(f"{text} | {fingerprint([])}") == parse(text)
    tensors = [torch.ones(4, 8), torch.ones(2, 8), torch.ones(2)]
    expected = f"normfuse 0.1.7 made this graph, and normfuse {ops.__version__} is to run it: compile or export"
    for operator in torch.ops.normfuse.forward.one, torch.ops.normfuse.forward.default:
        with pytest.raises(ValueError, match=expected):
            operator(f"{text} | normfuse 0.1.7, interpreted", tensors, False)
    with pytest.raises(ValueError, match=expected):
        torch.ops.normfuse.chain(f"{chain.text} | normfuse 0.1.7 |  |  | False None", [*tensors, None], [], 1, 0.0, [])
    with pytest.raises(
        ValueError, match=f"an early version of normfuse made this graph, and normfuse {ops.__version__}"
    ):
        check("1,2")
