"""Promise: whatever straight-line code, branches, loops, in-place operations, views and helper functions a model is
made of, rewriting its graph changes no value and no gradient beyond rounding.

``make test`` tries 200 random programs, ``make exhaustive`` thousands.
"""

import linecache
import math
import sys
import textwrap
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from tests.ops.graphs import compiled

#: With what the names of the programs' modules begin.
PROGRAM = "random_program_"
IS_EXHAUSTIVE = settings.get_current_profile_name() == "exhaustive"
#: By what the values are: their shape, that of a weight, and that of what each channel has one of.
SHAPES = {
    "rows": ((6, 16), (16, 16), (16,)),
    "sequences": ((2, 3, 16), (16, 16), (16,)),
    "images": ((2, 16, 4, 3), (16, 16, 3, 3), (1, 16, 1, 1)),
}
CONTRACTIONS = {
    "rows": ["F.linear({a}, w)", "F.linear({a}, w, v)", "F.linear(input={a}, weight=w, bias=u)"],
    "images": ["F.conv2d({a}, w, padding=1)", "F.conv2d({a}, w, u.view(-1), 1, 'same')",
               "F.conv_transpose2d({a}, w, v.view(-1), padding=1)"],
}  # fmt: skip
CONTRACTIONS["sequences"] = CONTRACTIONS["rows"]
NORMS = {
    "rows": ["F.group_norm({a}, 4)", "F.group_norm({a}, 2, v, u, 1e-3)", "F.layer_norm({a}, (16,), u)"],
    "sequences": ["F.layer_norm({a}, [16])", "F.layer_norm({a}, (3, 16))", "F.layer_norm({a}, (16,), u, v, eps=0.01)"],
    "images": ["F.group_norm({a}, 4)", "torch.group_norm({a}, 2, v.view(-1), u.view(-1))",
               "F.layer_norm({a}, {a}.shape[1:])"],
}  # fmt: skip
POINTWISE = [
    "F.relu({a})", "{a}.relu_()", "F.silu({a}, inplace=True)", "F.silu({a})", "F.gelu({a})", "torch.tanh({a})",
    "{a}.sigmoid()", "{a} * torch.sigmoid({a})", "{a} * torch.tanh(F.softplus({a}))", "F.mish({a})",
    "F.hardtanh({a}, -0.7, 1.3)", "{a}.clamp(min=-0.5)", "torch.clamp({a}, max=0.8)", "F.leaky_relu({a}, 0.1)",
    "F.hardswish({a})", "F.elu({a}, 1.5)", "F.hardtanh_({a}, -1.1, 0.9)", "F.softplus({a}, 2.0)",
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "2 * {a}", "1.5 - {a}", "{a} / 1.5", "{a} + v", "u * {a}", "{a} - s",
    "{a}.mul_(0.5)", "{a}.add_(v)", "{a}.sub({b}, alpha=2)", "torch.add({a}, {b})", "helper({a})", "helper({a}, {b})",
]  # fmt: skip
OTHERS = [
    "{a}.flatten(1).view({a}.shape)", "{a}.contiguous()", "{a}.view({a}.shape)", "F.dropout({a}, 0.5, False)",
    "{a}[:]", "{a}.transpose(0, 1).transpose(1, 0)", "{a}.clone()", "{a}.softmax(1)", "{a}.flip(0)",
]  # fmt: skip
STATEMENTS = [
    "{n} = {a}\n{n} += {b}", "{n} = {a}\n{n} *= 2", "v = v.add_(1)\n{n} = {a}", "u.mul_(2)\n{n} = {a}",
    "{n} = {a}\n{n}[0] = 0.5", "if {a}.ndim == 2:\n    {n} = {a} + 1\nelse:\n    {n} = {a} * 2",
    "{n} = {a}\nfor number in range(2):\n    {n} = F.relu({n} + number)",
    "with torch.no_grad():\n    {n} = {a} * 2", "{n} = {a}\n{b}.zero_()", "{n} = {a}\nw = w * 2",
]  # fmt: skip
HELPER = """\
def helper(value, other=None, *, factor=0.5):
    return F.silu(value) * factor if other is None else value + F.relu(other)
"""


@st.composite
def programs(draw) -> tuple[str, str]:
    """What the values are, and the text of a function ``model`` of x, y, w, v, u and s."""
    kind = draw(st.sampled_from(sorted(SHAPES)))
    names, lines = ["x", "y"], []
    parts = [CONTRACTIONS[kind], NORMS[kind], POINTWISE, POINTWISE, POINTWISE, OTHERS, STATEMENTS]
    for number in range(draw(st.integers(2, 9))):
        # Mostly the last value, so that there are chains.
        chosen = {name: names[-1 - min(draw(st.sampled_from([0, 0, 0, 0, 1, 2])), len(names) - 1)] for name in "ab"}
        if chosen["a"] == chosen["b"]:
            chosen["b"] = draw(st.sampled_from(names))
        part = parts[number] if number < 2 else draw(st.sampled_from(parts))
        text, name = draw(st.sampled_from(part)), f"z{number}"
        line = text.format(n=name, **chosen)
        lines += (line if part is STATEMENTS else f"{name} = {line}").split("\n")
        names.append(name)
    results = sorted({names[-1], *draw(st.lists(st.sampled_from(names), max_size=2))})
    body = textwrap.indent("\n".join([*lines, f"return {', '.join(results)},"]), "    ")
    return kind, f"{HELPER}\n\ndef model(x, y, w, v, u, s):\n{body}\n"


def function_of(text, called="model", **names):
    """The program, or what else its text calls so, which may use ``names``. Dynamo reads its lines and its module."""
    name = f"{PROGRAM}{abs(hash(text))}"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(torch=torch, F=F, **names)
    exec(compile(text, name, "exec"), vars(module))
    return getattr(module, called)


def evaluate(function, arguments):
    """Results, the arguments afterwards, and gradients; None for these where PyTorch refuses to compute them."""
    leaves = [each.clone().requires_grad_() for each in arguments]
    taken = [each * 1 for each in leaves]  # no leaves, so that they may be written to
    results = [*function(*taken), *taken]
    roots = [each.square().mean() for each in results if each.requires_grad]
    try:
        gradients = torch.autograd.grad(roots, leaves, allow_unused=True)
    except RuntimeError:  # a value that the backward pass needs was overwritten
        return results, None
    return results, [
        torch.zeros_like(leaf) if each is None else each for each, leaf in zip(gradients, leaves, strict=True)
    ]


def error(values, exact):
    return max(
        float((one.detach().double() - other.detach()).norm() / (1 + other.detach().norm()))
        for one, other in zip(values, exact, strict=True)
    )


@settings(max_examples=4000 if IS_EXHAUSTIVE else 200)
@given(programs(), st.integers(0, 9))
def test_random_models(program, seed):
    kind, text = program
    note(text)
    shape, of_weight, of_vector = SHAPES[kind]
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape, shape, of_weight, of_vector, of_vector, ())
    arguments = [torch.randn(each, generator=generator, dtype=torch.float64).float() for each in shapes]
    arguments[2] /= math.prod(of_weight[1:]) ** 0.5
    model = function_of(text)
    torch._dynamo.reset()
    fused, found = compiled(model)
    results, gradients = evaluate(model, arguments)
    ours, of_ours = evaluate(fused, arguments)
    exact, of_exact = evaluate(model, [each.double() for each in arguments])
    note(f"rewritten: {found}")
    for one, other in zip(ours, results, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    plain = error(results, exact)
    assume(plain < 1e-4)  # a group without variance may make anything of rounding
    assert error(ours, exact) <= 10 * plain + 1e-5
    if gradients is not None and of_ours is not None:
        plain = error(gradients, of_exact)
        assume(plain < 1e-4)
        assert error(of_ours, of_exact) <= 10 * plain + 1e-4


def test_programs_have_chains():
    """A program can be rewritten, so that the test above tests something."""
    text = "def model(x, y, w, v, u, s):\n    return F.silu(F.group_norm(F.linear(x, w), 4)),\n"
    fused, found = compiled(function_of(text))
    fused(torch.ones(6, 16), None, torch.ones(16, 16), None, None, None)
    assert len(found) == 1


@pytest.fixture(autouse=True, scope="module")
def without_lines():
    yield
    for known in linecache.cache, sys.modules:
        for name in [name for name in known if name.startswith(PROGRAM)]:
            del known[name]
