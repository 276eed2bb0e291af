"""Promise: a call whose layer norm takes a sum keeps no more for the backward pass than a compiler would."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ops import pays, pointwise
from ops.growth import Growth
from ops.pointwise import Step
from tests.ops.opened import Opened
from tests.ops.test_saved_tensors import saved_tensors

WIDTH = 16


class Block(nn.Module):
    """A sum of a product and what a residual is, and its layer norm in float32, as under autocast on a GPU."""

    def __init__(self, add):
        super().__init__()
        self.add = add
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(4, 6, WIDTH))

    def forward(self, input):
        residual = self.norm(self.first(input).float())
        return self.last(self.norm(self.add(self, residual, input).float()))


SUMS = {
    "residual": lambda block, x, _: block.second(x) + x,
    "residual first": lambda block, x, _: x + block.second(x),
    "behind the product": lambda block, x, _: block.second(x) + x.transpose(1, 2).contiguous().transpose(1, 2),
    "views of the product": lambda block, x, _: block.second(x.view(-1, WIDTH)).view(4, 6, WIDTH) + x,
    "halved": lambda block, x, _: (block.second(x) - x) * 0.5,
    "two products": lambda block, x, y: block.second(F.gelu(x)) + block.third(y),
}
#: Of these, a compiler keeps as much as a call or more.
OTHERS = {
    "a product with the residual": lambda block, x, _: block.second(x) * x,
    "a function of the product": lambda block, x, _: F.gelu(block.second(x)) + x,
    "a scaled product": lambda block, x, _: block.second(x) * block.scale + x,
    "a parameter": lambda block, x, y: block.second(F.gelu(block.third(y))) + block.shift,
    "an input": lambda block, x, y: block.second(F.gelu(block.third(y))) + y,
    "a bias alone": lambda block, x, _: block.second(x),
}


def saved_by(add):
    """How many bytes a block saves for its backward pass, and its chains."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(add)
    opened, given = Opened(block), {**dict(block.named_parameters()), "input": torch.randn(4, 6, WIDTH)}
    with torch.autocast("cpu", torch.bfloat16):
        _, kept = saved_tensors(lambda input, **_: opened(input), given)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept), opened.chains


@pytest.mark.parametrize("name", [*SUMS, *OTHERS])
def test_blocks(name, monkeypatch):
    add = (SUMS | OTHERS)[name]
    saved, chains = saved_by(add)
    monkeypatch.setattr(pays, "_kept_beside_sum", lambda chain: 0.0)
    with_calls, all_chains = saved_by(add)
    monkeypatch.setattr(pays, "reason_for_compiler", lambda *_, **__: "left")
    left, none = saved_by(add)
    assert none == [] and sum("norm" in chain for chain in all_chains) >= 2
    if name in SUMS:
        assert len(chains) == len(all_chains) - 1 and saved < with_calls
    else:
        assert chains == all_chains and saved == with_calls <= 1.02 * left


class Chain:
    """A chain of fake tensors: a product in 16 bits, and steps and terms before a norm."""

    def __init__(self, norm="layer_norm", trains=True):
        self._mode, self._graph, self.norm, self._trains = FakeTensorMode(), torch.fx.Graph(), norm, trains
        self.product = self.term(torch.bfloat16)
        self.nodes, self.steps, self.given = [self.product], [], {}

    def term(self, dtype, shape=(4, 6), is_input=False):
        graph = self._graph
        node = graph.placeholder("given") if is_input else graph.call_function(torch.rand, (4, 6))
        return self._of(node, dtype, shape)

    def _of(self, node, dtype, shape=(4, 6)):
        with self._mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, requires_grad=self._trains)
        return node

    def step(self, function, *operand, dtype=torch.float32):
        node = self._graph.call_function(torch.add, (self.nodes[-1], *operand))
        self.nodes.append(self._of(node, dtype))
        self.steps.append(Step(function.pointwise, operand[0] if operand else function.operand))
        return self

    def add(self, term):
        value = term.meta["example_value"]
        return self.step(pointwise.add(value), term)

    def growth(self, after=()):
        norm = self._of(self._graph.call_function(F.layer_norm, (self.nodes[-1], (6,))), torch.float32)
        return Growth(
            self.product,
            "linear",
            self.given,
            nodes=(*self.nodes, norm),
            before=tuple(self.steps),
            steps=tuple(after),
            norm=(self.norm, {"input": self.nodes[-1]}) if self.norm else None,
        )

    def kept(self, after=()):
        return pays._kept_beside_sum(self.growth(after))


def test_what_is_kept():
    size = 4 * 6 * 2
    chain = Chain()
    assert chain.add(chain.term(torch.float32)).kept() == size
    chain = Chain()
    assert chain.add(chain.term(torch.bfloat16)).kept() == size  # which nothing else reads
    chain = Chain()
    assert (
        chain.add(chain.term(torch.float32)).step(pointwise.mul(2.0)).add(chain.term(torch.float32)).kept() == 3 * size
    )
    chain = Chain()
    chain.product.meta["example_value"].requires_grad_(False)  # of frozen layers
    assert chain.add(chain.term(torch.float32)).kept(after=[pointwise.relu()]) == size
    chain = Chain()
    shared = chain.term(torch.bfloat16)
    chain._graph.call_function(torch.relu, (shared,))
    assert chain.add(shared).kept() == 0  # something else keeps it


def test_where_a_call_keeps_no_more():
    chain = Chain()
    chain.given = {"input": chain.term(torch.bfloat16)}  # kept for the weight's gradient
    assert chain.add(chain.given["input"]).kept() == 0
    chain = Chain()
    residual = chain.term(torch.float32)
    chain._graph.call_function(F.layer_norm, (residual, (6,)))  # which keeps it
    assert chain.add(residual).kept() == 0
    for norm, trains in (("group_norm", True), ("", True), ("layer_norm", False)):
        chain = Chain(norm, trains)
        assert chain.add(chain.term(torch.float32)).kept() == 0
    chain = Chain()
    assert chain.add(chain.term(torch.float32, is_input=True)).kept() == 0
    chain = Chain()
    assert chain.add(chain.term(torch.float32, (6,))).kept() == 0  # a vector
    chain = Chain()
    assert chain.step(pointwise.relu()).add(chain.term(torch.float32)).kept() == 0
    chain = Chain()
    factor = chain.term(torch.float32)
    assert chain.step(pointwise.mul(factor.meta["example_value"]), factor).kept() == 0
    chain = Chain()
    residual = Step(pointwise.add(chain.product.meta["example_value"]).pointwise, chain.term(torch.float32))
    assert chain.kept(after=[residual]) == 0  # it is added behind the norm
    chain = Chain()
    chain._of(chain.product, torch.float32)
    assert chain.add(chain.term(torch.float32)).kept() == 0  # products of float32 are worth more


def test_the_reason():
    chain = Chain()
    growth = chain.add(chain.term(torch.float32)).growth()
    for replays in (False, True):
        reason = "left to the compiler, which keeps 0.0 MB less for the backward pass"
        assert pays.reason_for_compiler(growth, replays) == reason
