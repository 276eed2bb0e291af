"""Promise: whatever modules a model is made of, shared, hooked, with forwards of any code, ``fuse`` changes no value,
no gradient and no error beyond rounding, at its first call and at later ones, in training and in evaluation.

``make test`` tries 60 random models, ``make exhaustive`` thousands.
"""

import copy
import math

import pytest
import torch
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from torch import nn

import ops
from tests.ops.test_random_models import IS_EXHAUSTIVE, SHAPES, error, function_of, programs, without_lines

__all__ = ["without_lines"]  # a fixture

#: What follows a block's program: code that Dynamo captures in part or not at all, and what raises an error.
ENDINGS = [
    "return z", "return z", "return z", "return z",
    "if float(z.detach().sum()) > 0:\n    return z * 2\nreturn z",
    "print(end='')\nreturn z",
    "self.calls += 1\nreturn z * self.calls",
    "if self.training:\n    return z\nreturn z + 1",
    "if z.detach().abs().max() > 3:\n    raise ValueError('large')\nreturn z",
    "return z.view(-1, 7)",
]  # fmt: skip
HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda module, given, result: result * 0.5),
    "before": lambda module: module.register_forward_pre_hook(lambda module, given: (given[0] + 1, *given[1:])),
    "backward": lambda module: module.register_full_backward_hook(lambda module, given, result: None),
}


class Block(nn.Module):
    """A program as a module."""

    def __init__(self, kind, text, ending, generator):
        super().__init__()
        shape, of_weight, of_vector = SHAPES[kind]
        for name, size in (("w", of_weight), ("v", of_vector), ("u", of_vector), ("s", ())):
            values = torch.randn(size, generator=generator, dtype=torch.float64).float()
            scale = math.prod(size[1:]) ** -0.5 if name == "w" else 1.0
            setattr(self, name, nn.Parameter(values * scale))
        self.calls = 0
        self.text = text, ending

    def __init_subclass__(cls, program):
        cls.program = staticmethod(program)


def block_class(text, ending):
    """A class with a forward of this text: ``z`` is what the program returns first."""
    lines = "\n".join(f"        {line}" for line in ending.split("\n"))
    source = (
        f"{text}\n\nclass Made(Block, program=model):\n"
        "    def forward(self, x, y):\n"
        "        z = model(x, y, self.w * 1, self.v * 1, self.u * 1, self.s * 1)[0]\n"
        f"{lines}\n"
    )
    return function_of(source, "Made", Block=Block)


class Model(nn.Module):
    """Blocks one after the other, of which some may be the same."""

    def __init__(self, blocks, order):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = order

    def forward(self, x, y):
        for place in self.order:
            x = self.blocks[place % len(self.blocks)](x, y)
        return x


@st.composite
def models(draw):
    """A model and its hooks: of which block, of which kind, and before which call each is set."""
    kind, first = draw(programs())
    texts = [first, *(text for other, text in draw(st.lists(programs(), max_size=1)) if other == kind)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    endings = [draw(st.sampled_from(ENDINGS)) for _ in texts]
    note("\n".join(f"{text}\n...\n{ending}" for text, ending in zip(texts, endings, strict=True)))
    blocks = [block_class(*each)(kind, *each, generator) for each in zip(texts, endings, strict=True)]
    hooks = st.tuples(st.integers(0, 1), st.sampled_from(sorted(HOOKS)), st.integers(0, 3))
    order = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    return kind, Model(blocks, order), draw(st.lists(hooks, max_size=2)), generator


def outcome(model, arguments):
    """Result and gradients of a call, or an error."""
    given = [each.clone().requires_grad_() for each in arguments]
    leaves = [*given, *model.parameters()]
    try:
        result = model(*(each * 1 for each in given))
    except Exception as error:
        return error, None
    try:
        gradients = torch.autograd.grad(result.square().mean(), leaves, allow_unused=True)
    except RuntimeError as error:
        return result, error
    return result, [
        torch.zeros_like(leaf) if each is None else each for each, leaf in zip(gradients, leaves, strict=True)
    ]


@settings(max_examples=4000 if IS_EXHAUSTIVE else 60)
@given(models())
def test_random_modules(drawn):
    kind, model, hooks, generator = drawn
    torch._dynamo.reset()
    fused, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = ops.fuse(fused)
    for call in range(4):
        for place, hook, before in hooks:
            if before == call:
                for each in (model, fused, exact):
                    HOOKS[hook](each.blocks[place % len(each.blocks)])
        for each in (model, fused, exact):
            each.train(call != 2)
        arguments = [torch.randn(SHAPES[kind][0], generator=generator, dtype=torch.float64) for _ in "xy"]
        outcomes = [
            outcome(each, [value.to(each.blocks[0].w.dtype) for value in arguments]) for each in (fused, model, exact)
        ]
        note(f"call {call}: {report.chains}")
        (result, gradients), (plain_result, plain_gradients), (exact_result, exact_gradients) = outcomes
        if isinstance(plain_result, Exception) or isinstance(exact_result, Exception):
            assume(type(plain_result) is type(exact_result))  # else rounding decides
            assert (type(result), str(result)) == (type(plain_result), str(plain_result))
            continue
        assert isinstance(result, torch.Tensor), result
        layouts = [(each.shape, each.dtype, each.stride()) for each in (result, plain_result)]
        assert layouts[0] == layouts[1]
        rounding = error([plain_result], [exact_result])
        assume(rounding < 1e-4)
        assert error([result], [exact_result]) <= 10 * rounding + 1e-5
        if isinstance(plain_gradients, list):  # else a value that they need was overwritten
            rounding = error(plain_gradients, exact_gradients)
            assume(rounding < 1e-4)
            assert error(gradients, exact_gradients) <= 10 * rounding + 1e-4


def test_models_have_chains():
    """A model can be fused, so that the test above tests something."""
    text = "def model(x, y, w, v, u, s):\n    return F.silu(F.group_norm(F.linear(x, w), 4)),\n"
    model = Model([block_class(text, "return z")("rows", text, "return z", torch.Generator())], [0, 0])
    report = ops.fuse(model)
    model(torch.ones(6, 16), torch.ones(6, 16))
    assert {each.module for each in report.chains} == {"blocks.0"}


@pytest.fixture(autouse=True)
def forgotten():
    yield
    torch._dynamo.reset()
