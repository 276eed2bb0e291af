"""Promise: each pointwise function does what PyTorch does, before and after each norm behind each contraction.

``make test`` takes three functions before the norm and three after it at a time, so that each function stands in each
place on each side, and has most others beside it somewhere. ``make exhaustive`` has each beside each in each place in
each dtype, and thousands of random compositions in place of a few.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import images
from tests.accuracy import check_draws
from tests.chains import DTYPES, chain_id
from tests.ops.compositions import HEADS, OPERANDS, STEPS, Composition, Sizes, compose
from triton_kernels import activations, arithmetic, pointwise
from triton_kernels.pointwise import Pointwise

pytestmark = images.MARK
without_onednn = pytest.fixture(autouse=True, scope="module")(images.without_onednn)

IS_EXHAUSTIVE = settings.get_current_profile_name() == "exhaustive"
NAMES = sorted(STEPS)
#: Many samples, of few elements: some of them lie beside no jump.
SIZES = {
    name: replace(head.sizes, lead=(10,) if head.has_images else (24,), pixels=(2, 1)[: len(head.sizes.pixels)])
    for name, head in HEADS.items()
}


def blocks() -> list[list[tuple[str, str, str]]]:
    """Threes of names. In a block, each name is once in each place. In all, each has each behind it once or twice.

    With n names, those at the distances 2 k and 2 k + 1 follow each other in the block k.
    """
    n = len(NAMES)
    return [
        [tuple(NAMES[(i + distance) % n] for distance in (0, 2 * k, 4 * k + 1)) for i in range(n)]
        for k in range((n + 1) // 2)
    ]


#: Of a head without a norm, all steps come after it.
SIDES = [(name, side) for name, head in HEADS.items() for side in ("before", "after") if head.norm or side == "after"]


def cases() -> list[tuple]:
    """(head, before, after, dtype)"""
    dealt, found = blocks(), []
    for turn in range(len(dealt) if IS_EXHAUSTIVE else 1):
        first = turn * len(SIDES)
        of_side = {side: dealt[(first + place) % len(dealt)] for place, side in enumerate(SIDES)}
        for number, name in enumerate(HEADS):
            after = of_side[name, "after"]
            before = of_side.get((name, "before"), [()] * len(after))
            for i, steps in enumerate(zip(before, after[1:] + after[:1], strict=True)):
                dtypes = DTYPES if IS_EXHAUSTIVE else (DTYPES[(i + turn + number) % len(DTYPES)],)
                found += [(name, *steps, dtype) for dtype in dtypes]
    return found


def case_id(case: tuple) -> str:
    name, before, after, dtype = case
    return "-".join([name, "+".join(before) or "none", "+".join(after), chain_id(dtype)])


def test_each_function_is_among_the_steps():
    """With each kind of operand that it is declared for."""
    declared = {
        each
        for module in (activations, arithmetic, pointwise)
        for each in vars(module).values()
        if isinstance(each, Pointwise)
    }
    head, found = HEADS["group_norm"], set()
    for make, _, kind in STEPS.values():
        step = make(torch.ones(OPERANDS[kind][0](head)) if kind in OPERANDS else None)
        found.add((step.pointwise.name, kind or step.pointwise.operand))
    declared |= {*activations.ACTIVATIONS, *arithmetic.ARITHMETIC}
    assert not {(each.name, each.operand) for each in declared} - found


def test_what_is_covered():
    """Each function is in each place on each side of each head, and each one stands beside each, or beside most."""
    found, beside = set(), set()
    for name, before, after, _ in cases():
        found |= {(name, "before", *each) for each in enumerate(before)}
        found |= {(name, "after", *each) for each in enumerate(after)}
        beside |= {pair for steps in (before, after) for pair in zip(steps, steps[1:], strict=False)}
    assert found == {(*side, place, each) for side in SIDES for place in range(3) for each in NAMES}
    assert len(beside) >= (1.0 if IS_EXHAUSTIVE else 0.6) * len(NAMES) ** 2


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_steps(case):
    name, before, after, dtype = case
    composition = compose(name, before, after, SIZES[name])
    check_draws(composition, lambda seed: composition.arguments(dtype, seed=seed))


@st.composite
def compositions(draw) -> Composition:
    """One row and many, odd sizes, several tiles, and groups wider than a tile."""
    name = draw(st.sampled_from(sorted(HEADS)))
    head, steps = HEADS[name], st.lists(st.sampled_from(NAMES), max_size=3).map(tuple)
    if head.has_images:
        lead, pixels = (draw(st.sampled_from([1, 3, 10])),), st.sampled_from([1, 2, 5, 17])
        pixels = tuple(draw(pixels) for _ in head.sizes.pixels)
    else:
        lead, pixels = draw(st.sampled_from([(1,), (2, 7), (40,), (3, 1, 23)])), ()
    groups, group_size = draw(st.sampled_from([(1, 6), (2, 6), (5, 3), (3, 16), (3, 43), (2, 160)]))
    if not head.has_images and draw(st.integers(0, 15)) == 0:
        lead, groups, group_size = (3,), 1, 8200
    depth = draw(st.sampled_from([1, 4, 5, 33]))
    before, after = draw(steps) if head.norm else (), draw(steps)
    return compose(name, before, after, Sizes(lead, depth, groups, group_size, pixels))


#: The ends of the names of vectors that are None.
ABSENT = ((), (), ("bias",), ("norm_bias", "norm_weight"))


@settings(max_examples=settings().max_examples // 4)
@given(compositions(), st.sampled_from(DTYPES), st.sampled_from(ABSENT), st.integers(0, 99))
@example(  # two values round to hardtanh's bound
    compose("conv_transpose2d_group_norm", ("hardtanh", "add_number", "div_number"), ("mish", "mul_tensor")),
    *(torch.bfloat16, (), 3),
)
def test_any_steps(composition, dtype, absent, seed):
    """Random steps, sizes and operands."""
    absent = tuple(name for name in composition.head.shapes if name.endswith(absent))
    check_draws(composition, lambda i: composition.arguments(dtype, absent, seed + 100 * i))
