"""Promise: PyTorch's caches of compiled graphs give back what was compiled of the same code, and never of another."""

import functools
import json

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

@triton.jit
def slanted(value, operand):
    return value * 2.0

@triton.jit
def slanted_gradient(gradient, value, operand):
    return gradient * 2.0

SLANTED = Pointwise("slanted", slanted, slanted_gradient, lambda value, _: value * slope())
CHAIN = ops.Chain("", norm="", after=(SLANTED,))

def slope():  # behind the chain that reaches it
    return 2.0
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
    factors = [factor]
    return lambda value, _: value * factors[0]


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
        (lambda: words(closure(torch.ones(2))), lambda: words(closure(torch.zeros(2)))),
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


#: What a plain function may reach: a user's modules, the first of them "own", with a number that is edited.
KINDS: dict[str, dict[str, str]] = {
    name: {"own": own, **modules}
    for name, (own, modules) in {
        "a function below": ("def plain(value, _): return half(value)\ndef half(value): return value * NUMBER", {}),
        "a class attribute": (
            "class Own:\n  k = NUMBER\n  def __call__(self, v, _): return v * self.k\nplain = Own()",
            {},
        ),
        "a class attribute of a bound method": (
            "class Own:\n  k = NUMBER\n  def call(self, v, _): return v * self.k\nplain = Own().call",
            {},
        ),
        "a class": ("class Own:\n  k = NUMBER\nplain = lambda v, _: v * Own.k", {}),
        "a base class": ("class Base:\n  k = NUMBER\nclass Own(Base): pass\nplain = lambda v, _: v * Own.k", {}),
        "a metaclass": (
            "class Meta(type):\n  k = NUMBER\nclass Own(metaclass=Meta): pass\nplain = lambda v, _: v * Own.k",
            {},
        ),
        "an abstract class": (
            "import abc\nclass Own(abc.ABC):\n  k = NUMBER\n  @abc.abstractmethod\n  def f(self): pass\n"
            "plain = lambda v, _: v * Own.k",
            {},
        ),
        "a class in a class": ("class Own:\n  class In:\n    k = NUMBER\nplain = lambda v, _: v * Own.In.k", {}),
        "a table of a class": ("class Own:\n  k = {'a': [NUMBER]}\nplain = lambda v, _: v * Own.k['a'][0]", {}),
        "a static method": (
            "class Own:\n  k = NUMBER\n  @staticmethod\n  def call(v, _): return v * Own.k\nplain = Own.call",
            {},
        ),
        "a class method": (
            "class Own:\n  k = NUMBER\n  @classmethod\n  def call(cls, v, _): return v * cls.k\nplain = Own.call",
            {},
        ),
        "a property": (
            "class Own:\n  @property\n  def k(self): return NUMBER\n  def __call__(self, v, _): return v * self.k\n"
            "plain = Own()",
            {},
        ),
        "a cached property": (
            "import functools\nclass Own:\n  @functools.cached_property\n  def k(self): return NUMBER\n"
            "  def __call__(self, v, _): return v * self.k\nplain = Own()",
            {},
        ),
        "a partial method": (
            "import functools\nclass Own:\n  def f(self, v, _, k): return v * k\n"
            "  call = functools.partialmethod(f, k=NUMBER)\nown = Own()\nplain = lambda v, _: own.call(v, _)",
            {},
        ),
        "a descriptor": (
            "class At:\n  def __get__(self, *_): return NUMBER\nclass Own:\n  k = At()\nplain = lambda v, _: v * Own.k",
            {},
        ),
        "slots": (
            "class Own:\n  __slots__ = ('k',)\n  def __init__(self): self.k = NUMBER\n"
            "  def __call__(self, v, _): return v * self.k\nplain = Own()",
            {},
        ),
        "an Enum": ("import enum\nclass Own(enum.Enum):\n  A = NUMBER\nplain = lambda v, _: v * Own.A.value", {}),
        "a method of an IntEnum": (
            "import enum\nclass Own(enum.IntEnum):\n  A = 1\n  def k(self): return NUMBER\na = Own.A\n"
            "plain = lambda v, _: v * a.k()",
            {},
        ),
        "a dataclass": (
            "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Own:\n  k: float = NUMBER\n"
            "  more: list = dataclasses.field(default_factory=list, metadata={'a': 1})\nown = Own()\n"
            "plain = lambda v, _: v * own.k",
            {},
        ),
        "a made dataclass": (
            "import dataclasses\nOwn = dataclasses.make_dataclass('Own', ['a'], namespace={'k': NUMBER})\n"
            "plain = lambda v, _: v * Own.k",
            {},
        ),
        "a constant of Triton's": (
            "import triton.language as tl\nk = tl.constexpr(NUMBER)\nplain = lambda v, _: v * k",
            {},
        ),
        "PyTorch's functions": (
            "import torch.nn.functional as F, torch\n"
            "plain = lambda v, _: F.max_pool2d(torch.sigmoid(F.gelu(v).clamp(0)), 2) * torch.Tensor.mul(v, NUMBER)",
            {},
        ),
        "a namespace": ("import types\nk = types.SimpleNamespace(a=NUMBER)\nplain = lambda v, _: v * k.a", {}),
        "a default factory": (
            "import dataclasses\n@dataclasses.dataclass\nclass Own:\n"
            "  k: list = dataclasses.field(default_factory=lambda: [NUMBER])\nplain = lambda v, _: v * Own().k[0]",
            {},
        ),
        "a method of a named tuple": (
            "import typing\nclass Own(typing.NamedTuple):\n  a: int\n  def k(self): return NUMBER\nown = Own(1)\n"
            "plain = lambda v, _: v * own.k()",
            {},
        ),
        "a method of a float": (
            "class Own(float):\n  def k(self): return NUMBER\nown = Own(1)\nplain = lambda v, _: v * own.k()",
            {},
        ),
        "a module's constant": (
            "import torch\nclass Own(torch.nn.Module):\n  k = NUMBER\n  def forward(self, v): return v * self.k\n"
            "own = Own()\nplain = lambda v, _: own(v)",
            {},
        ),
        "a module's parameter": ("import torch\nown = torch.nn.PReLU(3, NUMBER)\nplain = lambda v, _: own(v)", {}),
        "a module's initialised weights": (
            "import torch\ntorch.manual_seed(1)\nown = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
            "plain = lambda v, _: own(v) * NUMBER",
            {},
        ),
        "a submodule": (
            "import pkg.sub\nplain = lambda v, _: pkg.sub.h(v)",
            {"pkg/sub": "def h(v): return v * NUMBER"},
        ),
        "modules that import each other": (
            "import pkg.sub\nplain = lambda v, _: pkg.sub.pkg.sub.h(v)",
            {"pkg/__init__": "", "pkg/sub": "import pkg\ndef h(v): return v * NUMBER"},
        ),
        "a module in a closure": (
            "def made():\n  import helpers\n  return lambda v, _: helpers.h(v)\nplain = made()",
            {"helpers": "def h(v): return v * NUMBER"},
        ),
        "a module that loads when asked": (
            "import helpers\nplain = lambda v, _: v * helpers.h",
            {"helpers": "def __getattr__(name):\n  if name == 'h': return NUMBER\n  raise AttributeError(name)"},
        ),
        "a name in quotes": (
            "import helpers\nplain = lambda v, _: getattr(helpers, 'h')(v)",
            {"helpers": "def h(v): return v * NUMBER"},
        ),
        "an import in a function": (
            "def plain(v, _):\n  from helpers import h\n  return h(v)",
            {"helpers": "def h(v): return v * NUMBER"},
        ),
        "a submodule's import in a function": (
            "def plain(v, _):\n  import pkg.sub\n  return (lambda: pkg.sub.h(v))()",
            {"pkg/sub": "def h(v): return v * NUMBER"},
        ),
        "a relative import in a function": (
            "from pkg.first import plain",
            {
                "pkg/first": "def plain(v, _):\n  from . import sub as s\n  return s.h(v)",
                "pkg/sub": "def h(v): return v * NUMBER",
            },
        ),
        "an import in a function that fails": (
            "def plain(v, _):\n  try:\n    import nothing_like_this\n  except ImportError:\n    return v * NUMBER",
            {},
        ),
        "an attribute of a function": ("def plain(v, _): return v * plain.k\nplain.k = NUMBER", {}),
        "a function without a module": (
            "exec('def plain(v, _): return v * NUMBER', space := {})\nplain = space['plain']",
            {},
        ),
        "a cached function": (
            "import functools\n@functools.lru_cache\ndef k(): return NUMBER\nplain = lambda v, _: v * k()",
            {},
        ),
        "NumPy's numbers": (
            "import numpy\nk, m = numpy.float32(NUMBER), numpy.ones(3) * NUMBER\nplain = lambda v, _: v * k * m[0]",
            {},
        ),
        "a deque": ("import collections\nk = collections.deque([NUMBER])\nplain = lambda v, _: v * k[0]", {}),
        "keys that are objects": (
            "class Own:\n  def k(self): return NUMBER\nkeys = {Own(): 1}\nplain = lambda v, _: v * [*keys][0].k()",
            {},
        ),
        "a set of objects": (
            "class Own:\n  def __init__(self, k): self.k = k\nkeys = {Own(NUMBER), Own('a'), Own('b')}\n"
            "plain = lambda v, _: v * keys",
            {},
        ),
        "a list in itself": ("k = [NUMBER]\nk.append(k)\nplain = lambda v, _: v * k[1][0]", {}),
        "which of two functions comes twice": (
            "f, g = (lambda v: v), (lambda v: v + 1)\nk = [f, g, (f, g)[NUMBER == 3.0]]\nplain = lambda v, _: k[2](v)",
            {},
        ),
        "which argument is which": (
            "def h(ab): return 0\n"
            "exec('def h(a, b): return a - b' if NUMBER == 2.0 else 'def h(b, a): return b - a')\n"
            "plain = lambda v, _: h(a=v, b=1)",
            {},
        ),
    }.items()
}
HASHES = """
import importlib, json, sys
from ops.fingerprint import fingerprint
from triton_kernels.activations import RELU
from triton_kernels.pointwise import Pointwise

start, found = list(sys.path), {}
for folder in sys.argv[1:]:
    sys.path[:] = [folder, *start]
    for name in [each for each in sys.modules if each.partition(".")[0] in ("own", "pkg", "helpers")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    plain = importlib.import_module("own").plain
    found[folder] = fingerprint([Pointwise("own", RELU.function, RELU.gradient, plain)])
print(json.dumps(list(found.values())))
"""


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory):
    """Of each kind, the fingerprint, that in another process, and that of an edited number."""
    results = []
    for number in ("2.0", "2.0", "3.0"):
        root = tmp_path_factory.mktemp("kinds")
        for name, modules in KINDS.items():
            for path, text in modules.items():
                file = root / name.replace(" ", "_") / f"{path}.py"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text.replace("NUMBER", number))
        folders = [str(root / name.replace(" ", "_")) for name in KINDS]
        results.append(json.loads(run(root, HASHES, *folders)[0]))
    return dict(zip(KINDS, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_of_what_is_edited(kind, of_kinds):
    first, again, edited = of_kinds[kind]
    assert first == again
    assert first != edited


class Refusing:
    def __reduce_ex__(self, protocol):
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [
        (each for each in ()),
        Refusing(),
        pytest,  # of which any function may be called
        torch.ones(2, device="meta"),
        functools.reduce(lambda inner, _: [inner], range(9999), []),
    ],
    ids=["a generator", "an object that raises", "a module as a value", "no values", "what is too deep"],
)
def test_of_what_cannot_be_told(value):
    """Such a function's graphs are not found again."""
    assert words(closure(value)) != words(closure(value))


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
