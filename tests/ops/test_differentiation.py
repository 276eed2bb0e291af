"""Promise: the backward pass of a norm over images is the same a few samples at a time."""

import pytest
import torch

from ops.calls import Arguments, parse
from ops.passes import Differentiation, statistics_of


@pytest.mark.parametrize(
    "text", ["gelu -> group_norm(2, 1e-05) -> mul -> add", "group_norm(4, 1e-05) -> mul -> no add"]
)
@pytest.mark.parametrize("spans", [(2, 5), (1, 2, 3, 4, 5)])
def test_a_few_samples_at_a_time(text, spans):
    torch.manual_seed(0)
    call = parse(text)
    z, dy, weight, bias = torch.randn(5, 8, 12), torch.randn(5, 8, 12), torch.randn(8), torch.randn(8)
    vectors = [weight, bias if call.present[-1] else None]
    arguments = Arguments.of(call, [z, None, *vectors, None])
    found = statistics_of(call, arguments.operands, z)
    results = []
    for ends in (5,), spans:
        target = torch.full_like(z, torch.nan)
        gradients = Arguments.of(call, [None, None, torch.full((8,), torch.nan), torch.full((8,), torch.nan), None])
        differentiation = Differentiation(call, arguments.operands, z, found, gradients.vectors)
        for first, end in zip((0, *ends), ends, strict=False):
            differentiation.differentiate(dy[first:end], target[first:end], slice(first, end))
        differentiation.finish()
        results.append([target, *(each for each in gradients.vectors if each is not None)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
